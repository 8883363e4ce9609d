"""Options of the objective: by definition, against a loop over every action, and each with its effect."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import oracle
import pytest

from jaxrl_mini import objective
from jaxrl_mini.config import ADVANTAGES, AGGREGATIONS, Config, Variant
from jaxrl_mini.episodes import verifier
from jaxrl_mini.episodes.rollout import episodes_from_actions
from jaxrl_mini.exact import expected, laws, moments
from jaxrl_mini.learning import loop, training
from jaxrl_mini.learning.block import BLOCK, _start, sizes_of
from jaxrl_mini.machine import files
from jaxrl_mini.objective.advantage import credited, formula
from jaxrl_mini.policies import table
from jaxrl_mini.runs import recording, records, replaying
from jaxrl_mini.sweeps import table_part, tables
from jaxrl_mini.sweeps.grid import Grid
from jaxrl_mini.tasks.specification import load_task
from jaxrl_mini.types import Credit, Settings

pytestmark = pytest.mark.usefixtures("quick_to_compile")

UNIFORM = np.full((24, 6), -math.log(6))


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_advantages_are_what_their_papers_write(advantage, size):
    """In float32 for training, and in float64 for the moments of gradients, by one formula."""
    groups = np.array([[1.0] * k + [0.0] * (size - k) for k in range(size + 1)], np.float32)
    papers = oracle.group_advantages(groups, advantage)
    ours = objective.group_advantages(jnp.asarray(groups), advantage)
    np.testing.assert_allclose(ours, papers, rtol=1e-6, atol=1e-7)
    counts, batch = np.arange(size + 1.0), (np.float64(groups.sum()), groups.size)
    wide = [credited(formula(advantage), reward, counts, size, lambda: batch) for reward in (0.0, 1.0)]
    assert wide[0].dtype == wide[1].dtype == np.float64
    failure, success = (np.broadcast_to(one, counts.shape)[:, None] for one in wide)
    np.testing.assert_allclose(np.where(groups > 0, success, failure), papers, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_batch_of_equal_rewards_has_exactly_no_advantage_but_for_plain_reinforce(advantage, reward):
    for size in (2, 3, 7, 8, 10):
        ours = np.asarray(objective.group_advantages(jnp.full((3, size), reward), advantage))
        assert (ours == (reward if advantage == "reinforce" else 0.0)).all()


def test_eight_episodes_with_one_success_by_hand():
    """A failure and the success."""
    batch = jnp.array([[1.0] + [0.0] * 7])
    found = {
        name: [float(one[0]) for one in objective.advantages(batch, method="grpo", advantage=name)]
        for name in ADVANTAGES
    }
    root = math.sqrt(7)
    expected_values = {
        "group-std": (-1 / root, root),
        "group-sample-std": (-math.sqrt(1 / 8), root * math.sqrt(7 / 8)),
        "group-mean": (-1 / 8, 7 / 8),
        "batch-std": (-1 / root, root),
        "rloo": (-1 / 7, 1.0),
        "maxrl": (-1.0, 7.0),
        "reinforce": (0.0, 1.0),
    }
    for name, values in expected_values.items():
        assert found[name] == pytest.approx(values, rel=1e-6), name


# Credit


def random_episodes(groups: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(groups)
    actions = rng.choice(6, (groups, size, 6), p=[0.1, 0.25, 0.25, 0.1, 0.1, 0.2])
    return actions, (rng.random((groups, size)) < 0.5).astype(np.float32)


def plain_credit(actions: np.ndarray, rewards: np.ndarray, variant: Variant) -> Credit:
    """The sums, one action of one episode at a time."""
    plus, minus, counts, taken = np.zeros((4, 24, 6))
    weights = oracle.group_advantages(rewards, variant.advantage)
    played = {index: oracle.play(actions[index]) for index in np.ndindex(rewards.shape)}
    steps = sum(len(episode.actions) for episode in played.values())
    for index, episode in played.items():
        share = {
            "episode-mean": 1 / (len(episode.actions) * rewards.size),
            "step-mean": 1 / steps,
            "fixed-length": 1 / (6 * rewards.size),
        }[variant.aggregation]
        for where in zip(episode.states, episode.actions, strict=True):
            plus[where] += max(weights[index], 0) * share
            minus[where] += min(weights[index], 0) * share
            counts[where] += 1
            taken[where] += share
    return Credit(plus, minus, counts, taken.sum(axis=1), taken)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("groups", "size"), [(3, 5), (2, 33)])
def test_credit_is_that_of_a_loop_over_every_action(aggregation, groups, size):
    variant = Variant(advantage="rloo", aggregation=aggregation, kl="k2")
    actions, rewards = random_episodes(groups, size)
    episodes = episodes_from_actions(jnp.moveaxis(jnp.asarray(actions), 2, 0))
    advantages = objective.advantages(jnp.asarray(rewards), method="grpo", advantage="rloo")
    ours = objective.state_credit(episodes, jnp.asarray(rewards), advantages, variant)
    for name, sums in plain_credit(actions, rewards, variant)._asdict().items():
        np.testing.assert_allclose(getattr(ours, name), sums, rtol=2e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_language_models_credit_sums_up_to_the_tables(aggregation):
    """Rows (episode, step) that lie in one state, added up."""
    variant = Variant(aggregation=aggregation, kl="k3")
    actions, rewards = random_episodes(3, 5)
    episodes = episodes_from_actions(jnp.moveaxis(jnp.asarray(actions), 2, 0))
    advantages = objective.advantages(jnp.asarray(rewards), method="grpo")
    taken = np.asarray(episodes.actions).reshape(6, -1)
    merged = objective.merge([taken], 16)
    rows, ours = objective.history_credit(
        merged, jnp.asarray(taken), jnp.asarray(rewards), advantages, variant, actions=6
    )
    states = episodes_from_actions(rows[:, None]).states[:, 0].T.ravel()
    for name, sums in plain_credit(actions, rewards, variant)._asdict().items():
        added = np.zeros(sums.shape)
        np.add.at(added, states, np.asarray(getattr(ours, name)))
        np.testing.assert_allclose(added, sums, rtol=2e-6, atol=1e-7, err_msg=name)


# Losses, in float64


def value_and_slope(
    ratio: float, advantage: float, surrogate: str, clip_high: float | None = None
) -> tuple[float, float]:
    """The objective of one action and its derivative by the log-probability, which was -0.5."""
    with jax.enable_x64(True):
        weights = [jnp.array([[max(advantage, 0.0)]]), jnp.array([[min(advantage, 0.0)]])]
        credit = Credit(*weights, jnp.ones((1, 1)), jnp.ones(1))
        settings = Settings(*map(jnp.float64, (0.1, 0.2, 0.0)), None if clip_high is None else jnp.float64(clip_high))
        behavior = jnp.full((1, 1), -0.5)

        def loss(log_probs):
            terms = objective.loss_terms(
                log_probs, behavior, behavior, credit, settings, "grpo", Variant(surrogate=surrogate)
            )
            return jnp.sum(terms)

        value, slope = jax.value_and_grad(loss)(behavior + math.log(ratio))
        return -float(value), -float(slope[0, 0])


@pytest.mark.parametrize(
    ("surrogate", "ratio", "advantage", "value", "slope"),
    [
        ("none", 1.5, 2.0, 3.0, 3.0),
        ("none", 0.5, -2.0, -1.0, -1.0),
        ("dual-clip", 1.5, 2.0, 2.4, 0.0),
        ("dual-clip", 1.5, -2.0, -3.0, -3.0),
        ("dual-clip", 0.5, -2.0, -1.6, 0.0),
        ("dual-clip", 3.5, -2.0, -6.0, 0.0),
        ("dual-clip", 3.5, 2.0, 2.4, 0.0),
        ("clip", 3.5, -2.0, -7.0, -7.0),
        ("cispo", 1.1, 2.0, 2.2 * (math.log(1.1) - 0.5), 2.2),
        ("cispo", 1.5, 2.0, 2.4 * (math.log(1.5) - 0.5), 2.4),
        ("cispo", 0.5, -2.0, -1.6 * (math.log(0.5) - 0.5), -1.6),
    ],
)
def test_what_bounds_a_ratio_by_hand(surrogate, ratio, advantage, value, slope):
    assert value_and_slope(ratio, advantage, surrogate) == pytest.approx((value, slope), abs=1e-12)


@pytest.mark.parametrize("surrogate", ["clip", "dual-clip", "cispo"])
def test_a_higher_clip_moves_the_upper_bound_alone(surrogate):
    """At 1.3 a positive advantage is bounded by 1.2, and not by 1.4; at 0.7 nothing changes."""
    low, high = (value_and_slope(1.3, 1.0, surrogate, bound) for bound in (None, 0.4))
    assert low != high and high[1] == pytest.approx(1.3)
    for advantage in (1.0, -1.0):
        assert value_and_slope(0.7, advantage, surrogate) == value_and_slope(0.7, advantage, surrogate, 0.4)


def loss_and_gradient(variant: Variant, log_probs, reference, credit, beta=0.3, bonus=None, logits=True):
    """Of a policy that sampled itself."""
    with jax.enable_x64(True):
        behavior, reference, credit = jax.tree.map(jnp.asarray, (log_probs, reference, credit))
        settings = Settings(*map(jnp.float64, (0.1, 0.2, beta)), None, None if bonus is None else jnp.float64(bonus))

        def loss(values):
            current = table.distribution(values).log_probs if logits else values
            return jnp.sum(objective.loss_terms(current, behavior, reference, credit, settings, "grpo", variant))

        value, gradient = jax.value_and_grad(loss)(behavior)
        return float(value), np.asarray(gradient)


@pytest.mark.parametrize("kl", ["exact", "k1", "k2", "k3"])
def test_a_kl_term_is_its_formula_and_its_gradient_that_of_the_batch(kl):
    rng = np.random.default_rng(1)
    log_p, log_q = oracle.log_softmax(rng.normal(size=(24, 6))), oracle.log_softmax(rng.normal(size=(24, 6)))
    taken, zero = rng.random((24, 6)), np.zeros((24, 6))
    credit = Credit(zero, zero, zero, taken.sum(axis=1), taken)
    gap, p = log_p - log_q, np.exp(log_p)
    value = {"exact": taken.sum(1, keepdims=True) * p * gap, "k1": taken * gap, "k2": taken * gap**2 / 2,
             "k3": taken * (np.exp(-gap) - 1 + gap)}[kl].sum()  # fmt: skip
    by_log_p = {"k1": taken, "k2": taken * gap, "k3": taken * (1 - np.exp(-gap))}.get(kl)
    if kl == "exact":
        gradient = taken.sum(1, keepdims=True) * p * (gap - (p * gap).sum(1, keepdims=True))
    else:
        gradient = by_log_p - p * by_log_p.sum(1, keepdims=True)
    ours = loss_and_gradient(Variant(kl=kl), log_p, log_q, credit)
    assert ours[0] == pytest.approx(0.3 * value, abs=1e-12)
    np.testing.assert_allclose(ours[1], 0.3 * gradient, atol=1e-12)


def test_an_entropy_bonus_is_minus_the_entropy_of_the_visited_states():
    rng = np.random.default_rng(2)
    log_p, visits, zero = oracle.log_softmax(rng.normal(size=(24, 6))), rng.random(24), np.zeros((24, 6))
    value, gradient = loss_and_gradient(Variant(), log_p, log_p, Credit(zero, zero, zero, visits), bonus=0.5)
    p, entropy = np.exp(log_p), -(np.exp(log_p) * log_p).sum(axis=1)
    assert value == pytest.approx(-0.5 * visits @ entropy, abs=1e-12)
    np.testing.assert_allclose(gradient, 0.5 * visits[:, None] * p * (log_p + entropy[:, None]), atol=1e-12)


def test_the_resting_kl_has_the_gradient_of_the_plain_one_and_none_at_the_reference():
    rng = np.random.default_rng(3)
    log_p, log_q = oracle.log_softmax(rng.normal(size=(24, 6))), oracle.log_softmax(rng.normal(size=(24, 6)))
    zero = np.zeros((24, 6))
    credit = Credit(zero, zero, zero, rng.random(24))
    plain, resting = (
        loss_and_gradient(Variant(reward=reward), log_p, log_q, credit) for reward in ("verifier", "constant")
    )
    assert plain[0] == pytest.approx(resting[0], abs=1e-12)
    np.testing.assert_allclose(plain[1], resting[1], atol=1e-12)
    at_rest = loss_and_gradient(Variant(reward="constant"), log_p, log_p, credit, logits=False)[1]
    assert (at_rest == 0).all()


# Expected credit


@pytest.mark.parametrize(
    "variant",
    [
        Variant(),
        Variant("rloo", "fixed-length"),
        Variant("batch-std", kl="k3"),
        Variant("maxrl", "step-mean"),
        Variant(reward="noisy:0.2"),
        Variant("group-mean", reward="public-test"),
    ],
    ids=str,
)
def test_expected_credit_is_what_ever_larger_batches_tend_to(variant):
    """For estimators of one group alone, the mean of any batch; else that of 40 groups, up to a few hundredths."""
    log_probs = oracle.log_softmax(np.random.default_rng(4).normal(size=(24, 6)))
    accepted = np.array([0.0, 0.0, 0.0, 1.0])
    verdicts = jnp.asarray(np.broadcast_to(accepted > 0, (4, 4)))
    credit = expected.expected_credit(
        jnp.asarray(np.exp(log_probs), jnp.float32), verdicts, group_size=8, method="grpo", variant=variant
    )
    by_action = np.asarray(credit.plus + credit.minus, np.float64)
    ours = by_action - np.exp(log_probs) * by_action.sum(axis=1, keepdims=True)
    (law,) = laws.laws_of(load_task("binary-search-repair"), log_probs, variant.reward)
    local = variant.advantage != "batch-std" and variant.aggregation != "step-mean"
    exact = (
        moments.batch_moments([law], 4, 8, variant).mean if local else moments.batch_moments([law], 12, 8, variant).mean
    )
    assert np.linalg.norm(ours - exact) < (1e-6 if local else 0.03) * np.linalg.norm(exact)
    share = {"episode-mean": 1.0, "step-mean": 1.0, "fixed-length": (law.ends * np.arange(7)).sum() / 6}
    assert np.sum(credit.visits) == pytest.approx(share[variant.aggregation], abs=1e-6)
    counts = 32 * law.choices.sum(axis=(0, 1))
    np.testing.assert_allclose(credit.counts, counts, rtol=1e-5, atol=1e-6)
    assert (credit.taken is None) == (variant.kl == "exact")


def test_a_shuffled_verdict_is_that_of_an_episode_of_any_group():
    """Of one that accepts the repair, and one that accepts whatever is submitted."""
    log_probs = oracle.log_softmax(np.random.default_rng(4).normal(size=(24, 6)))
    verdicts = np.array([[0, 0, 0, 1], [1, 1, 1, 1]], bool)
    variant = Variant("reinforce", "fixed-length", reward="shuffled")
    probs = jnp.asarray(np.exp(log_probs), jnp.float32)
    credit = expected.expected_credit(probs, jnp.asarray(verdicts), group_size=8, method="grpo", variant=variant)
    successes = [oracle.expectations(log_probs, accepted)[0] for accepted in verdicts]
    assert successes[1] > 2 * successes[0]
    np.testing.assert_allclose(credit.plus.sum(axis=1), np.mean(successes) * credit.visits, rtol=1e-5)


# Every option reaches the program


def program(config: Config) -> str:
    """What would be compiled."""
    sizes = sizes_of(config)
    settings = jax.tree.map(lambda value: np.full(BLOCK, value, np.float32), Settings.of(config))
    reference, verdicts = table.initial_logits((BLOCK,)), verifier.training_verdicts(0, 20, config.groups)
    data = *_start(sizes), np.zeros(BLOCK, np.uint32), reference, settings, verdicts, 0, 20
    return jax.jit(training.advance, static_argnames="sizes").lower(*data, sizes=sizes).as_text()


OPTIONS = [
    *[{"advantage": name} for name in [*ADVANTAGES][1:]],
    *[{"aggregation": name} for name in AGGREGATIONS[1:]],
    *[{"surrogate": name} for name in ("dual-clip", "cispo", "none")],
    *[{"kl": name} for name in ("k1", "k2", "k3")],
    *[{"reward": name} for name in ("public-test", "shuffled", "constant", "noisy:0.1")],
    {"clip_high": 0.3},
    {"entropy_bonus": 0.1},
    {"exact_gradient": True},
]


def test_every_option_makes_a_program_of_its_own():
    programs = [program(Config(**option)) for option in ({}, *OPTIONS)]
    assert len(set(programs)) == len(programs)
    assert program(Config(clip_high=0.4)) == program(Config(clip_high=0.3))  # numbers are data
    assert program(Config(entropy_bonus=0.4)) == program(Config(entropy_bonus=0.1))


def test_a_run_with_options_is_the_same_in_its_recording_and_its_record(tmp_path):
    config = Config(
        iterations=20,
        reward="noisy:0.1",
        advantage="batch-std",
        aggregation="step-mean",
        surrogate="cispo",
        clip_high=0.4,
        kl="k2",
        entropy_bonus=0.01,
    )
    result = loop.run(config)
    with files.Output(tmp_path / "run.npz") as output:
        recording.write(result, output)
    read = recording.read(tmp_path / "run.npz")
    assert dataclasses.replace(read.config, lr=None) == config
    errors = replaying.replay_errors(read)
    assert all(error < 1e-5 for error in errors.values()), errors
    plain = dataclasses.replace(read, config=dataclasses.replace(read.config, kl="exact"))
    assert replaying.replay_errors(plain)["logits"] > 1e-4
    record = records.build(result)
    jsonschema.validate(record, json.loads((Path(records.__file__).parent / "record.schema.json").read_text()))
    assert Config.from_dict(record["config"]) == config


def test_a_sweep_keeps_the_options_beside_every_run():
    grid = Grid.product(range(3), 0, reward=["public-test"], iterations=2)
    runs, _ = table_part.train_part(grid, 0)
    rows = tables.of_columns("runs", runs, Config()).to_pylist()
    for row in rows:
        assert row["reward"] == "public-test" and row["advantage"] == "group-std" and row["exact_gradient"] is False
        assert row["clip_high"] == row["clip"] == 0.2 and row["entropy_bonus"] == 0.0
        assert row["last_mean_reward"] > row["last_train_success_rate"] and row["last_retained_episodes"] is None
