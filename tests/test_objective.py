"""Advantages, credit, losses and their gradients: by hand, by formula, and against the plain per-step oracle."""

import math
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxrl_mini import objective
from jaxrl_mini.episodes.rollout import episodes_from_actions
from jaxrl_mini.policies import table
from jaxrl_mini.types import Credit, Settings

pytestmark = pytest.mark.usefixtures("quick_to_compile")

UNIFORM = np.full((24, 6), -math.log(6))

group_advantages = jax.jit(objective.group_advantages)


def advantages_of(*groups) -> np.ndarray:
    return np.asarray(group_advantages(jnp.array(groups, jnp.float32)))


# Advantages


def test_one_success_among_eight():
    expected = [2.645751] + [-0.377964] * 7
    np.testing.assert_allclose(advantages_of([1, 0, 0, 0, 0, 0, 0, 0])[0], expected, atol=1e-6)


@pytest.mark.parametrize("size", range(2, 17))
def test_k_successes_have_the_advantage_of_the_closed_form(size):
    """A success gets sqrt((1 - p) / p), a failure -sqrt(p / (1 - p)), with p = k / size."""
    groups = [[1.0] * k + [0.0] * (size - k) for k in range(1, size)]
    for k, row in enumerate(advantages_of(*groups), start=1):
        p = k / size
        expected = [math.sqrt((1 - p) / p)] * k + [-math.sqrt(p / (1 - p))] * (size - k)
        np.testing.assert_allclose(row, expected, rtol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_rewards_have_exactly_no_advantage(reward, size):
    assert (advantages_of([reward] * size) == 0).all()


def test_a_large_group_with_one_success_is_not_rounded_to_an_equal_one():
    row = advantages_of([1.0] + [0.0] * 9_999)[0]
    np.testing.assert_allclose(row[:2], [math.sqrt(9_999), -math.sqrt(1 / 9_999)], rtol=1e-6)


def test_each_group_is_compared_with_itself_only():
    groups = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    together = advantages_of(*groups)
    for group, row in zip(groups, together, strict=True):
        np.testing.assert_array_equal(advantages_of(group)[0], row)
    np.testing.assert_allclose(together[:3, 0], [math.sqrt(3), 1, math.sqrt(1 / 3)], rtol=1e-6)


def test_permuting_episodes_and_groups_permutes_advantages():
    rng = np.random.default_rng(0)
    rewards = (rng.random((4, 8)) < np.array([[0.1], [0.4], [0.6], [0.9]])).astype(np.float32)
    plain = advantages_of(*rewards)
    episodes, groups = rng.permutation(8), rng.permutation(4)
    np.testing.assert_allclose(advantages_of(*rewards[:, episodes]), plain[:, episodes], rtol=1e-6)
    np.testing.assert_array_equal(advantages_of(*rewards[groups]), plain[groups])


def test_runs_side_by_side_have_the_advantages_of_each_alone():
    rewards = (np.random.default_rng(1).random((3, 5, 4)) < 0.5).astype(np.float32)
    together = group_advantages(jnp.asarray(rewards))
    for run in range(4):
        np.testing.assert_array_equal(together[..., run], advantages_of(*rewards[..., run]))
        np.testing.assert_allclose(together[..., run], oracle.group_advantages(rewards[..., run]), rtol=1e-6)


@pytest.mark.parametrize("rewards", [[[1.0] * 8], [[0.0] * 8], [[0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]])
def test_the_gradient_of_advantages_is_finite_for_equal_and_mixed_groups(rewards):
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(group_advantages(x))))(jnp.array(rewards))
    assert np.isfinite(gradient).all()


# Credit


def random_batch(seed: int = 0, groups: int = 3, size: int = 5) -> SimpleNamespace:
    """Episodes of random actions, with garbage after their ends, random rewards, and three policies."""
    rng = np.random.default_rng(seed)
    actions = rng.choice(6, (groups, size, 6), p=[0.1, 0.25, 0.25, 0.1, 0.1, 0.2])
    rewards = (rng.random((groups, size)) < 0.5).astype(np.float32)
    behavior = oracle.log_softmax(rng.normal(size=(24, 6)))
    return SimpleNamespace(
        actions=actions,
        rewards=rewards,
        behavior=behavior,
        logits=behavior + 0.4 * rng.normal(size=(24, 6)),
        reference=oracle.log_softmax(rng.normal(size=(24, 6))),
    )


@partial(jax.jit, static_argnames="method")
def credit_of(actions, rewards, method: str) -> Credit:
    """The package's sums for actions[group, episode, step, *run] and rewards[group, episode, *run]."""
    episodes = episodes_from_actions(jnp.moveaxis(jnp.asarray(actions), 2, 0))
    rewards = jnp.asarray(rewards)
    return objective.state_credit(episodes, rewards, objective.advantages(rewards, method=method))


def plain_weights(rewards: np.ndarray, method: str) -> np.ndarray:
    """What every episode counts: its advantage, or its share among the successes."""
    if method == "grpo":
        return oracle.group_advantages(rewards)
    return rewards.astype(np.float64) * rewards.size / max(rewards.sum(), 1)


def plain_credit(actions: np.ndarray, rewards: np.ndarray, method: str) -> Credit:
    """The sums, one action of one episode at a time."""
    plus, minus, counts, taken = np.zeros((4, 24, 6))
    weights = plain_weights(rewards, method)
    for index in np.ndindex(rewards.shape):
        episode = oracle.play(actions[index])
        share = 1 / (len(episode.actions) * rewards.size)
        for where in zip(episode.states, episode.actions, strict=True):
            plus[where] += max(weights[index], 0) * share
            minus[where] += min(weights[index], 0) * share
            counts[where] += 1
            taken[where] += share
    return Credit(plus, minus, counts, taken.sum(axis=1), taken)


@pytest.mark.parametrize("method", ["grpo", "rs-sft"])
@pytest.mark.parametrize(("groups", "size"), [(3, 5), (4, 8), (1, 2), (2, 33), (1, 100)])
def test_credit_sums_are_those_of_a_loop_over_every_action(groups, size, method):
    """Whatever stands after the end of an episode: the actions there are random."""
    batch = random_batch(groups, groups, size)
    expected = plain_credit(batch.actions, batch.rewards, method)
    credit = credit_of(batch.actions, batch.rewards, method)
    assert credit.taken is None  # only estimators of the KL need it
    for name, sums in credit._replace(taken=expected.taken)._asdict().items():
        np.testing.assert_allclose(sums, getattr(expected, name), rtol=1e-6, atol=1e-8, err_msg=name)


def test_credit_by_hand():
    """Two episodes: [finish] succeeds, advantage 1; [read, finish] fails, advantage -1."""
    actions, rewards = np.array([[[5, 0, 0, 0, 0, 0], [0, 5, 0, 0, 0, 0]]]), np.array([[1.0, 0.0]], np.float32)
    credit = credit_of(actions, rewards, "grpo")
    assert credit.plus[0, 5] == 0.5 and jnp.sum(credit.plus) == 0.5
    assert credit.minus[0, 0] == credit.minus[4, 5] == -0.25 and jnp.sum(credit.minus) == -0.5
    assert credit.counts[0].tolist() == [1, 0, 0, 0, 0, 1] and credit.counts[4, 5] == 1
    assert credit.visits[0] == 0.75 and credit.visits[4] == 0.25


def test_rejection_keeps_successes_only():
    actions, rewards = np.array([[[5, 0, 0, 0, 0, 0], [0, 5, 0, 0, 0, 0]]]), np.array([[1.0, 0.0]], np.float32)
    credit = credit_of(actions, rewards, "rs-sft")
    assert credit.plus[0, 5] == 1 and jnp.sum(credit.plus) == 1
    assert (credit.minus == 0).all()


def test_groups_without_success_have_no_credit_but_are_visited():
    batch = random_batch(4)
    for method in ("grpo", "rs-sft"):
        credit = credit_of(batch.actions, np.zeros_like(batch.rewards), method)
        assert (credit.plus == 0).all() and (credit.minus == 0).all()
        assert jnp.sum(credit.visits) == pytest.approx(1, abs=1e-6)


def test_runs_side_by_side_have_the_credit_of_each_alone():
    batches = [random_batch(seed) for seed in range(3)]
    actions, rewards = (np.stack([getattr(b, name) for b in batches], -1) for name in ("actions", "rewards"))
    together = credit_of(actions, rewards, "grpo")
    for run, batch in enumerate(batches):
        alone = credit_of(batch.actions, batch.rewards, "grpo")
        for ours, theirs in zip(together[:4], alone[:4], strict=True):
            np.testing.assert_allclose(ours[..., run], theirs, rtol=1e-6, atol=1e-9)


# Losses and gradients, in float64


def loss_function(batch, method: str, clip: float = 0.2, beta: float = 0.3):
    """The loss as a function of the logits; call it under `jax.enable_x64`."""
    credit = jax.tree.map(jnp.asarray, plain_credit(batch.actions, batch.rewards, method))
    settings = Settings(*map(jnp.asarray, (0.1, clip, beta)))
    behavior, reference = jnp.asarray(batch.behavior), jnp.asarray(batch.reference)

    def loss(logits):
        terms = objective.loss_terms(
            table.distribution(logits).log_probs, behavior, reference, credit, settings, method
        )
        return jnp.sum(terms)

    return loss


def loss_and_gradient(batch, method: str, **settings) -> tuple[float, np.ndarray]:
    with jax.enable_x64(True):
        loss, gradient = jax.value_and_grad(loss_function(batch, method, **settings))(jnp.asarray(batch.logits))
        return float(loss), np.asarray(gradient)


def plain_step(batch, method: str, clip: float = 0.2, beta: float = 0.3) -> oracle.Step:
    policies = batch.logits, batch.behavior, batch.reference
    if method == "grpo":
        return oracle.grpo_step(*policies, batch.actions, oracle.group_advantages(batch.rewards), clip, beta)
    return oracle.sft_step(*policies, batch.actions, batch.rewards, clip)


@pytest.mark.parametrize("method", ["grpo", "rs-sft"])
@pytest.mark.parametrize("seed", range(3))
def test_losses_and_gradients_are_those_of_the_plain_loop(method, seed):
    batch = random_batch(seed)
    loss, gradient = loss_and_gradient(batch, method)
    step = plain_step(batch, method)
    assert loss == pytest.approx(step.loss, abs=1e-12)
    np.testing.assert_allclose(gradient, step.gradient, atol=1e-12)
    assert abs(step.gradient).max() > 1e-3


@pytest.mark.parametrize("method", ["grpo", "rs-sft"])
def test_gradients_are_finite_differences(method):
    batch = random_batch(5)
    with jax.enable_x64(True):
        loss = jax.jit(loss_function(batch, method))
        gradient = np.asarray(jax.grad(loss)(jnp.asarray(batch.logits)))
        for index in np.ndindex(24, 6):
            up, down = batch.logits.copy(), batch.logits.copy()
            up[index] += 1e-6
            down[index] -= 1e-6
            difference = (loss(jnp.asarray(up)) - loss(jnp.asarray(down))) / 2e-6
            assert gradient[index] == pytest.approx(float(difference), abs=1e-8)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective_value", "slope"),
    [
        (1.5, 2.0, 2.4, 0.0),  # better already by more than the clip: nothing more to gain
        (1.5, -2.0, -3.0, -2.0),  # worse by more than the clip: pushed back
        (0.5, 2.0, 1.0, 2.0),
        (0.5, -2.0, -1.6, 0.0),
        (1.1, 2.0, 2.2, 2.0),
        (0.9, -2.0, -1.8, -2.0),
    ],
)
def test_clipping_stops_the_gradient_in_two_of_four_cases(ratio, advantage, objective_value, slope):
    """The slope by the ratio is the advantage, or exactly 0, not merely small, where the ratio is clipped."""
    zero = np.zeros((24, 6), np.float32)
    plus, minus = zero.copy(), zero.copy()
    (plus if advantage > 0 else minus)[3, 2] = advantage
    credit = Credit(*map(jnp.asarray, (plus, minus, zero + 1, zero[:, 0] + 1)))
    log_ratio = jnp.asarray(zero).at[3, 2].set(math.log(ratio))
    settings = Settings(*map(jnp.float32, (0.1, 0.2, 0.0)))

    def loss(log_probs):
        return jnp.sum(objective.loss_terms(log_probs, jnp.asarray(zero), jnp.asarray(zero), credit, settings, "grpo"))

    value, gradient = jax.value_and_grad(loss)(log_ratio)
    assert value == pytest.approx(-objective_value, rel=1e-6)
    np.testing.assert_allclose(gradient[3, 2], -slope * ratio, rtol=1e-6)
    assert (np.asarray(gradient) == 0).sum() == 144 - (slope != 0)


def test_kl_is_that_of_the_policy_from_the_reference_not_the_reverse():
    """p = (1/2, 1/10 five times) from the uniform q: 0.294; the reverse would be 0.243."""
    log_p = np.log([[0.5, 0.1, 0.1, 0.1, 0.1, 0.1]])
    log_q = np.full((1, 6), -math.log(6))
    forward = 0.5 * math.log(3) + 0.5 * math.log(0.6)
    reverse = -(math.log(3) + 5 * math.log(0.6)) / 6
    assert abs(forward - reverse) > 0.02
    kl = jnp.sum(objective.kl_terms(jnp.asarray(log_p, jnp.float32), jnp.asarray(log_q, jnp.float32)))
    assert kl == pytest.approx(forward, abs=1e-6)


def test_kl_is_exact_and_so_is_its_gradient():
    """Both against float64 sums over all six actions, not over the sampled one."""
    batch = random_batch(7)
    log_p, p = oracle.log_softmax(batch.logits), np.exp(oracle.log_softmax(batch.logits))
    with jax.enable_x64(True):
        reference = jnp.asarray(batch.reference)

        def kl(logits):
            return jnp.sum(objective.kl_terms(table.distribution(logits).log_probs, reference))

        value, gradient = map(np.asarray, jax.value_and_grad(kl)(jnp.asarray(batch.logits)))
    each = (p * (log_p - batch.reference)).sum(axis=1, keepdims=True)
    assert value == pytest.approx(each.sum(), abs=1e-12)
    np.testing.assert_allclose(gradient, p * (log_p - batch.reference - each), atol=1e-12)


def test_the_kl_is_added_to_the_loss_which_of_a_batch_of_equal_groups_is_beta_times_kl():
    batch = random_batch(8)
    batch.rewards = np.repeat([[1.0], [0.0], [1.0]], 5, axis=1).astype(np.float32)
    log_probs = oracle.log_softmax(batch.logits)
    kl = (np.exp(log_probs) * (log_probs - batch.reference)).sum(axis=1)
    visits = plain_credit(batch.actions, batch.rewards, "grpo").visits
    loss, gradient = loss_and_gradient(batch, "grpo", beta=0.3)
    assert loss == pytest.approx(0.3 * visits @ kl, abs=1e-12)
    assert np.isfinite(gradient).all() and abs(gradient).max() > 1e-3


def test_on_policy_the_surrogate_is_zero_but_its_gradient_is_not():
    """Every ratio is 1 and the advantages of a group sum to 0; where it starts, the loss says nothing."""
    batch = random_batch(9)
    batch.logits = batch.behavior
    loss, gradient = loss_and_gradient(batch, "grpo", beta=0.0)
    assert abs(loss) < 1e-12
    step = oracle.grpo_step(
        batch.logits, batch.behavior, batch.reference, batch.actions, oracle.group_advantages(batch.rewards), 0.2, 0.0
    )
    np.testing.assert_allclose(gradient, step.gradient, atol=1e-12)


def test_the_loss_of_rejection_sampling_is_zero_without_a_success():
    batch = random_batch(10)
    batch.rewards[:] = 0
    loss, gradient = loss_and_gradient(batch, "rs-sft")
    assert loss == 0 and (gradient == 0).all()


@pytest.mark.parametrize(("ratio", "outside"), [(0.79, True), (0.81, False), (1.0, False), (1.19, False), (1.21, True)])
def test_a_sampled_action_counts_as_outside_the_clip_range_whatever_its_advantage(ratio, outside):
    """Three actions in state 0 at that ratio, one in state 9 at ratio 1; what was not sampled does not count."""
    counts, log_ratio = np.zeros((24, 6)), np.full((24, 6), 5.0)
    counts[0, 2], log_ratio[0, 2] = 3, math.log(ratio)
    counts[9, 4], log_ratio[9, 4] = 1, 0
    credit = Credit(np.zeros((24, 6)), np.zeros((24, 6)), counts, np.zeros(24))
    assert measured(UNIFORM + log_ratio, UNIFORM, UNIFORM, credit)["ratio_outside_clip_fraction"] == 0.75 * outside


def test_the_upper_bound_is_a_clip_of_its_own_where_there_is_one():
    counts, log_ratio = np.zeros((24, 6)), np.zeros((24, 6))
    counts[0, :4], log_ratio[0, :4] = 1, np.log([0.79, 0.81, 1.25, 1.31])
    credit = Credit(np.zeros((24, 6)), np.zeros((24, 6)), counts, np.zeros(24))
    for clip_high, outside in ((None, 3), (0.3, 2), (0.1, 3), (0.5, 1)):
        fraction = measured(UNIFORM + log_ratio, UNIFORM, UNIFORM, credit, clip_high)["ratio_outside_clip_fraction"]
        assert fraction == outside / 4


def measured(log_probs, behavior, reference, credit: Credit, clip_high: float | None = None) -> dict[str, float]:
    """What is measured of one run, in NumPy's float64, with a clip of 0.2 and a beta of 0.3."""
    with_runs = jax.tree.map(lambda array: array[..., None], (log_probs, behavior, reference, credit))
    high = None if clip_high is None else np.array([clip_high])
    settings = Settings(np.array([0.1]), np.array([0.2]), np.array([0.3]), clip_high=high)
    return {name: column.item() for name, column in objective.measure(*with_runs, settings, "grpo").items()}


def test_what_is_measured_of_a_step_is_the_oracles():
    """KL and entropy are averaged over the sampled actions, not over states or episodes."""
    batch = random_batch(11)
    credit, step = plain_credit(batch.actions, batch.rewards, "grpo"), plain_step(batch, "grpo")
    ours = measured(oracle.log_softmax(batch.logits), batch.behavior, batch.reference, credit)
    expected = {"loss": step.loss, "mean_kl": step.mean_kl, "entropy": step.entropy}
    assert ours == pytest.approx(expected | {"ratio_outside_clip_fraction": step.outside}, abs=1e-12)
