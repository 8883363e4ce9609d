"""Training: every iteration against the float64 oracle, and runs that depend on nothing but themselves."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

from jaxrl_mini import objective
from jaxrl_mini.config import Config
from jaxrl_mini.episodes import verifier
from jaxrl_mini.learning import block, loop, metrics, training
from jaxrl_mini.learning.block import BLOCK, Block
from jaxrl_mini.machine import compilation
from jaxrl_mini.policies import table
from jaxrl_mini.types import Credit, Settings

UNIFORM = np.full((24, 6), -np.log(6))


def block_of(*configs: Config) -> Block:
    """Runs of one method and one size of batch, side by side."""
    settings = {
        "lr": np.array([config.effective_lr for config in configs]),
        "clip": np.array([config.clip for config in configs]),
        "beta": np.array([config.beta for config in configs]),
    }
    return Block(block.sizes_of(configs[0]), np.array([config.seed for config in configs]), settings)


def advanced(block: Block, count: int) -> tuple[training.Log, np.ndarray]:
    """What the next iterations of a block's runs leave behind, and the policies after each."""
    return block.record(np.arange(block.iteration, block.iteration + count))


def history_of(block: Block, log: training.Log, logits: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of the iterations that a block has just run, [iteration, run]."""
    iterations = np.arange(block.iteration - len(logits), block.iteration)
    return metrics.history_of(log, logits, iterations, block.settings, block.sizes)


# Against the oracle


class Course(NamedTuple):
    """What one run left behind."""

    config: Config
    history: dict[str, np.ndarray]
    logits: np.ndarray  # [iteration + 1, 24, 6]
    actions: np.ndarray  # [iteration, group, episode, 6]
    rewards: np.ndarray  # [iteration, group, episode], as the oracle gives them


def rewards_of(actions: np.ndarray) -> np.ndarray:
    episodes = [oracle.play(row) for row in actions.reshape(-1, 6)]
    solved = [episode.submitted and episode.low_fixed and episode.high_fixed for episode in episodes]
    return np.array(solved, np.float32).reshape(actions.shape[:-1])


def replay_by_oracle(course: Course, tolerance: float) -> list[tuple[np.ndarray, oracle.Step]]:
    """The oracle's logits and last step after each iteration, started at the recorded policy; metrics are compared."""
    config, history, adam = course.config, course.history, oracle.Adam()
    settings, results = config.to_dict() | {"lr": config.effective_lr}, []
    for i in range(config.iterations):
        batch = course.actions[i], course.rewards[i]
        logits, step = oracle.update(course.logits[i], adam, UNIFORM, *batch, settings)
        assert history["loss"][i] == pytest.approx(step.loss, rel=1e-5, abs=tolerance)
        assert history["mean_kl"][i] == pytest.approx(step.mean_kl, rel=1e-5, abs=tolerance)
        assert history["entropy"][i] == pytest.approx(step.entropy, abs=tolerance)
        assert history["ratio_outside_clip_fraction"][i] == pytest.approx(step.outside, abs=1e-6)
        assert history["gradient_norm"][i] == pytest.approx(np.linalg.norm(step.gradient), rel=1e-4, abs=tolerance)
        results.append((logits, step))
    return results


def check_batches(course: Course) -> None:
    """What is counted in each batch."""
    for i, rewards in enumerate(course.rewards):
        successes, history = rewards.sum(axis=1), course.history
        learns = course.config.method == "grpo" or rewards.any()
        assert history["train_success_rate"][i] == pytest.approx(rewards.mean())
        assert history["mixed_groups"][i] == ((successes > 0) & (successes < rewards.shape[1])).sum()
        assert history.get("retained_episodes", [rewards.sum()] * (i + 1))[i] == rewards.sum()
        assert history["optimizer_steps"][i] == (course.config.epochs if learns else 0)


@pytest.mark.parametrize("method", ["grpo", "rs-sft"])
def test_the_articles_runs_by_the_oracle(request, method):
    """Rewards, advantages and behavior log-probabilities follow from actions and policies, metrics from them."""
    name = {"grpo": "grpo", "rs-sft": "sft"}[method]
    run, arrays = request.getfixturevalue(f"{name}_run"), request.getfixturevalue(f"{name}_arrays")
    course = Course(run.config, run.history, run.logits, arrays["actions"], rewards_of(arrays["actions"]))
    check_batches(course)
    replay_by_oracle(course, tolerance=2e-5)
    np.testing.assert_array_equal(arrays["rewards"], course.rewards)
    for i in range(run.config.iterations):
        log_probs = oracle.log_softmax(run.logits[i])
        for index in np.ndindex(course.rewards.shape[1:]):
            episode = oracle.play(course.actions[i][index])
            rest = [0.0] * (6 - len(episode.actions))
            assert course.actions[i][index].tolist() == episode.actions + [-1] * len(rest)
            behavior = [*log_probs[episode.states, episode.actions], *rest]
            np.testing.assert_allclose(arrays["old_log_probs"][i][index], behavior, atol=1e-5)
        expected = oracle.group_advantages(course.rewards[i]) if method == "grpo" else 0 * course.rewards[i]
        np.testing.assert_allclose(arrays["advantages"][i], expected, atol=1e-6)


CASES = [
    Config(),
    Config(lr=0.5, clip=0.1, beta=0.1),  # many ratios outside the clip range
    Config(lr=0.02, beta=50.0),  # gradients above norm 1
    Config(beta=0.0),
]


@pytest.fixture(scope="module", params=["grpo", "rs-sft"])
def courses(request) -> list[Course]:
    """Twenty iterations from random policies on, in one block.

    From the uniform policy on, credits of a state can cancel exactly; float32 leaves rounding of 1e-10 of the gradient,
    and Adam, which divides it by its own size, makes a visible step of it. Random policies have no such states.
    """
    cases = CASES if request.param == "grpo" else [Config(method="rs-sft", lr=case.lr) for case in CASES]
    configs = [dataclasses.replace(case, iterations=20, seed=3) for case in cases]
    block = block_of(*configs)
    start = np.random.default_rng(0).normal(size=(24, 6, BLOCK)).astype(np.float32)
    start[:, 5] += 1.5  # a habit of finishing early, so that some batches have no success
    block.state = block.state._replace(params=jnp.asarray(start), policy=table.distribution(jnp.asarray(start)))
    log, policies = advanced(block, 20)
    history, actions = history_of(block, log, policies), np.moveaxis(log.episodes.actions, 0, -1)
    logits = np.concatenate([start[None, ..., : len(CASES)], policies])
    return [
        Course(
            config,
            {name: column[:, run] for name, column in history.items()},
            logits[..., run],
            actions[..., run, :],
            rewards_of(actions[..., run, :]),
        )
        for run, config in enumerate(configs)
    ]


def test_every_update_is_the_oracles(courses):
    for course in courses:
        check_batches(course)
        for i, (logits, _) in enumerate(replay_by_oracle(course, tolerance=5e-6)):
            np.testing.assert_allclose(course.logits[i + 1], logits, atol=1e-3 * course.config.effective_lr)


def test_the_cases_reach_what_they_are_there_for(courses):
    if courses[0].config.method == "grpo":
        assert (courses[1].history["ratio_outside_clip_fraction"] > 0.1).sum() > 5
        assert (courses[2].history["gradient_norm"] > 1).sum() > 5
    else:
        assert any((course.history["optimizer_steps"] == 0).any() for course in courses)


def test_the_exact_success_rate_of_an_iteration_is_that_of_the_policy_after_it(grpo_run):
    for i in (0, 1, 19, 20, 99):
        success, _ = oracle.expectations(oracle.log_softmax(grpo_run.logits[i + 1]))
        assert grpo_run.history["exact_success_rate"][i] == pytest.approx(success, abs=1e-6)


def test_on_policy_no_ratio_is_outside_and_the_surrogate_is_zero_while_the_gradient_is_not():
    """With one epoch, the last optimizer step is the first after sampling."""
    history = loop.run(Config(epochs=1, iterations=20, clip=1e-4, beta=0.0, eval_episodes=1)).history
    assert (history["ratio_outside_clip_fraction"] == 0).all()
    assert abs(history["loss"]).max() < 1e-6
    assert (history["gradient_norm"][history["mixed_groups"] > 0] > 1e-3).all()


def test_optimizer_steps_are_those_of_optax_on_any_tree_of_parameters():
    """Three batches of two steps, against the textbook chain of norm clip and Adam, at a slope that is clipped."""
    rng = np.random.default_rng(0)
    arrays = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((24, 6), (24, 1), (6,)))
    params = dict(zip(("bias", "state", "action"), arrays, strict=True))

    def log_probs_of(tree):
        return jax.nn.log_softmax(tree["bias"] + tree["state"] * tree["action"], axis=1)

    def backward(state, batch, loss_gradient):
        log_probs, pullback = jax.vjp(log_probs_of, state.params)
        return log_probs, pullback(loss_gradient(log_probs, batch))[0]

    counts = rng.integers(0, 5, (24, 6)).astype(np.float32)
    plus, minus = 5 * rng.random((24, 6)), -5 * rng.random((24, 6))
    sums = (plus, minus, counts, counts.sum(axis=1) / counts.sum())
    credit = Credit(*(jnp.asarray(x, jnp.float32) for x in sums))
    settings, reference = Settings(*map(jnp.float32, (0.05, 0.2, 0.02))), jnp.asarray(UNIFORM, jnp.float32)
    sizes = training.Sizes("grpo", 4, 8, epochs=2)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.05))

    @jax.jit
    def optax_step(tree, chain_state, behavior):
        def loss(tree):
            terms = objective.loss_terms(log_probs_of(tree), behavior, reference, credit, settings, "grpo")
            return jnp.sum(terms)

        gradient = jax.grad(loss)(tree)
        updates, chain_state = chain.update(gradient, chain_state)
        return optax.apply_updates(tree, updates), chain_state, optax.tree.norm(gradient)

    @jax.jit
    def our_steps(state, behavior):
        return training.update(state, backward, training.Batch(behavior, reference, credit), settings, sizes)

    state, theirs, chain_state = training.initial_state(params), params, chain.init(params)
    for _ in range(3):
        behavior = log_probs_of(theirs)
        state, _, our_norm = our_steps(state, behavior)
        for _ in range(2):
            theirs, chain_state, norm = optax_step(theirs, chain_state, behavior)
        assert norm > 1
        assert our_norm == pytest.approx(float(norm), rel=1e-4)
        for name in params:
            np.testing.assert_allclose(state.params[name], theirs[name], atol=1e-5)
    assert state.moments.count == 6


# What a verifier's verdicts do


def verdicts_are(monkeypatch, answer: bool) -> None:
    monkeypatch.setattr(
        verifier, "training_verdicts", lambda first, iterations, groups: np.full((iterations, groups, 4), answer)
    )


def leaves(block: Block) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(block.state)]


def test_rejection_sampling_without_a_success_changes_no_bit(monkeypatch):
    """Neither parameters nor moments nor the count of steps, also where earlier batches left momentum."""
    block = block_of(*[Config(seed=seed, method="rs-sft") for seed in range(8)])
    advanced(block, 10)
    before = leaves(block)
    assert all(abs(leaf).max() > 0 for leaf in before)
    verdicts_are(monkeypatch, False)
    history = history_of(block, *advanced(block, 10))
    for old, new in zip(before, leaves(block), strict=True):
        assert old.tobytes() == new.tobytes()
    for name in ("loss", "gradient_norm", "optimizer_steps", "retained_episodes", "train_success_rate"):
        assert (history[name] == 0).all()


def test_a_run_without_a_success_waits_while_its_neighbours_learn():
    block = block_of(*[Config(seed=seed, method="rs-sft") for seed in range(BLOCK)])
    log, logits = advanced(block, 5)
    params = np.concatenate([np.zeros((1, 24, 6, BLOCK)), logits])
    moved = (params[1:] != params[:-1]).any(axis=(1, 2))
    np.testing.assert_array_equal(moved, history_of(block, log, logits)["retained_episodes"] > 0)
    assert moved.any(axis=1).all() and not moved.all()


def test_grpo_learns_nothing_from_a_verifier_that_accepts_nothing(monkeypatch):
    """No group is mixed, the policy is its own reference: the policy stays uniform, whatever Adam makes of rounding."""
    verdicts_are(monkeypatch, False)
    block = block_of(Config())
    history = history_of(block, *advanced(block, 20))
    assert (history["mixed_groups"] == 0).all()
    np.testing.assert_allclose(oracle.log_softmax(block.logits()[..., 0]), UNIFORM, atol=1e-6)


def test_what_the_policy_does_first_does_not_depend_on_the_verifier(monkeypatch):
    batches = []
    for answer in (False, True):
        verdicts_are(monkeypatch, answer)
        batches.append(np.asarray(advanced(block_of(Config()), 1)[0].episodes.packed))
    np.testing.assert_array_equal(*batches)


# Runs depend on nothing but themselves


def trace(left: tuple[training.Log, np.ndarray], run: int) -> bytes:
    """All bits a run left behind."""
    return b"".join(leaf[..., run].tobytes() for leaf in jax.tree.leaves(left))


SEEDS = (7, 0, 2**31, 2**32 - 1, 19)


def test_a_seed_is_the_same_alone_among_others_and_in_any_order():
    together = advanced(block_of(*[Config(seed=seed) for seed in SEEDS]), 20)
    backwards = advanced(block_of(*[Config(seed=seed) for seed in SEEDS[::-1]]), 20)
    for run, seed in enumerate(SEEDS):
        alone = trace(advanced(block_of(Config(seed=seed)), 20), 0)
        assert trace(together, run) == alone
        assert trace(backwards, len(SEEDS) - 1 - run) == alone
    assert len({trace(together, run) for run in range(len(SEEDS))}) == len(SEEDS)


def test_the_same_seed_twice_in_a_full_block_is_the_same_run_twice():
    log = advanced(block_of(*[Config(seed=seed % 32) for seed in range(BLOCK)]), 5)
    assert all(trace(log, run) == trace(log, run + 32) for run in range(32))


def test_settings_of_a_run_are_its_own():
    configs = [Config(lr=0.5), Config(), Config(clip=0.01), Config(beta=1.0)]
    together = advanced(block_of(*configs), 20)
    for run, config in enumerate(configs):
        assert trace(together, run) == trace(advanced(block_of(config), 20), 0)
    assert len({trace(together, run) for run in range(4)}) == 4


@pytest.mark.parametrize("chunks", [(7, 13), (1,) * 20, (19, 1)])
def test_chunks_of_any_size_give_the_same_bits(chunks):
    whole, parts = block_of(Config()), block_of(Config())
    log, logs = advanced(whole, 20), [advanced(parts, count) for count in chunks]
    joined = jax.tree.map(lambda *pieces: np.concatenate(pieces), *logs)
    assert trace(joined, 0) == trace(log, 0)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(leaves(whole), leaves(parts), strict=True))


def test_evaluation_does_not_change_training():
    """Off, on, or more often and with other numbers of episodes."""
    plain, evaluated = block_of(Config()), block_of(Config())
    for episodes in (1, 30, 700):
        evaluated.evaluate(episodes)
        evaluated.evaluate(episodes)
        assert trace(advanced(plain, 5), 0) == trace(advanced(evaluated, 5), 0)


def test_settings_seeds_and_counts_need_no_new_compilation():
    advanced(block_of(Config()), 20)
    compiled = compilation.seconds()
    for count, config in [(1, Config(seed=3)), (13, Config(lr=0.5)), (20, Config(clip=0.5, beta=0.0))]:
        advanced(block_of(*[config] * count), count)
    assert compilation.seconds() == compiled


def test_the_policy_learns(grpo_run, sft_run):
    for run in (grpo_run, sft_run):
        assert run.before.success_rate < 0.12
        assert run.after.success_rate >= 0.97
        assert run.after.exact_success_rate > 0.98
        assert run.history["train_success_rate"][-20:].mean() > run.history["train_success_rate"][:20].mean() + 0.3
