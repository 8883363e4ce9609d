"""Exact means and variances of gradients: closed forms, and the sum over every sequence of actions."""

import math
from functools import cache

import numpy as np
import oracle
import pytest

from jaxrl_mini.config import ADVANTAGES, AGGREGATIONS, UserError, Variant
from jaxrl_mini.exact import laws, moments
from jaxrl_mini.exact.laws import Law
from jaxrl_mini.tasks.specification import load_task

TASK = load_task("binary-search-repair")
UNIFORM = np.full((24, 6), -math.log(6))


def policy(seed: int) -> np.ndarray:
    """Log-probabilities: uniform for 0, else random, with a habit of repairing."""
    logits = np.random.default_rng(seed).normal(size=(24, 6)) * (seed > 0)
    logits[:, 1:3] += seed > 0
    return oracle.log_softmax(logits)


def law_of(log_probs: np.ndarray) -> Law:
    (law,) = laws.laws_of(TASK, log_probs)
    return law


class Tree:
    """Every sequence of actions that ends an episode, one row each."""

    def __init__(self) -> None:
        played = [oracle.play(sequence) for sequence in oracle.all_action_sequences()]
        self.choices = np.zeros((len(played), 24, 6))
        for row, episode in zip(self.choices, played, strict=True):
            row[episode.states, episode.actions] = 1.0
        self.lengths = np.array([len(episode.actions) for episode in played])
        self.rewards = np.array([float(e.submitted and e.low_fixed and e.high_fixed) for e in played])

    def probabilities(self, log_probs: np.ndarray) -> np.ndarray:
        return np.exp(self.choices.reshape(-1, 144) @ log_probs.ravel())

    def scores(self, log_probs: np.ndarray) -> np.ndarray:
        """The gradient of the log-probability of each sequence by the logits."""
        return self.choices - self.choices.sum(axis=2, keepdims=True) * np.exp(log_probs)


@cache
def tree() -> Tree:
    return Tree()


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float((one * other).sum() / (np.linalg.norm(one) * np.linalg.norm(other)))


# One step: closed forms


def one_step(p: float) -> Law:
    """Two actions, of which the first succeeds; one step."""
    choices = np.zeros((2, 2, 1, 2))
    choices[1, 1, 0, 0], choices[0, 1, 0, 1] = p, 1 - p
    return Law(choices, choices.sum(axis=(2, 3)), np.array([[p, 1 - p]]))


def factor(p: float, size: int, advantage: str, method: str = "grpo") -> float:
    """The expected gradient of one group by the true gradient, p (1 - p) (1, -1)."""
    found = moments.batch_moments([one_step(p)], 1, size, Variant(advantage), method).mean
    np.testing.assert_allclose(found[0, 1], -found[0, 0], atol=1e-15)
    return found[0, 0] / (p * (1 - p))


def expectation(p: float, size: int, function) -> float:
    return sum(math.comb(size, k) * p**k * (1 - p) ** (size - k) * function(k) for k in range(size + 1))


RATES = [0.01, 0.2, 0.5, 0.7, 0.99]


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("p", RATES)
def test_on_one_step_expected_gradients_have_closed_forms(size, p):
    spread = expectation(p, size, lambda k: math.sqrt(k * (size - k))) / (size * p * (1 - p))
    assert factor(p, size, "rloo") == pytest.approx(1.0, abs=1e-6)
    assert factor(p, size, "reinforce") == pytest.approx(1.0, abs=1e-6)
    assert factor(p, size, "group-mean") == pytest.approx((size - 1) / size, abs=1e-6)
    assert factor(p, size, "group-std") == pytest.approx(spread, abs=1e-6)
    assert factor(p, size, "group-sample-std") == pytest.approx(spread * math.sqrt((size - 1) / size), abs=1e-6)
    assert factor(p, size, "batch-std") == pytest.approx(spread, abs=1e-6)  # one group is the batch
    assert factor(p, size, "maxrl") == pytest.approx(sum((1 - p) ** j for j in range(size - 1)), abs=1e-6)
    assert factor(p, size, "group-std", "rs-sft") == pytest.approx((1 - (1 - p) ** size) / p, abs=1e-6)


@pytest.mark.parametrize("p", RATES[1:4])
def test_as_groups_grow_group_std_follows_arcsin_of_the_root_and_sft_the_logarithm(p):
    """d arcsin(sqrt(p)) / dp = 1 / (2 sqrt(p (1 - p))), d log p / dp = 1 / p."""
    arcsin = 1 / (2 * math.sqrt(p * (1 - p)))
    errors = [abs(factor(p, size, "group-std") / (2 * arcsin) - 1) for size in (4, 16, 64, 256)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 5e-3
    assert factor(p, 256, "group-std", "rs-sft") == pytest.approx(1 / p, rel=1e-6)
    assert factor(p, 256, "maxrl") == pytest.approx(1 / p, rel=1e-6)


def test_the_variance_of_plain_reinforce_by_hand():
    """p = 1/2, eight episodes: reward * score is (1/2, -1/2) or 0, each half the time; mean (1/4, -1/4)."""
    found = moments.batch_moments([one_step(0.5)], 2, 4, Variant("reinforce"))
    assert found.variance == pytest.approx((0.5 * 0.5 - 2 * 0.25**2) / 8, abs=1e-12)


# This task


@pytest.mark.parametrize("seed", range(3))
def test_the_law_is_that_of_every_sequence(seed):
    log_probs = policy(seed)
    law, chance = law_of(log_probs), tree().probabilities(log_probs)
    scores = tree().scores(log_probs)
    for reward, length in np.ndindex(law.ends.shape):
        mine = chance * ((tree().rewards == reward) & (tree().lengths == length))
        assert law.ends[reward, length] == pytest.approx(mine.sum(), abs=1e-12)
        np.testing.assert_allclose(law.choices[reward, length], np.tensordot(mine, tree().choices, 1), atol=1e-12)
        np.testing.assert_allclose(law.scores[reward, length], np.tensordot(mine, scores, 1), atol=1e-12)
        assert law.squared_scores[reward, length] == pytest.approx(mine @ (scores**2).sum((1, 2)), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_exact_gradient_is_the_finite_difference_of_the_exact_success(seed):
    logits = policy(seed)
    gradient = law_of(logits).gradient
    assert abs(gradient).max() > 1e-3
    for index in np.ndindex(24, 6):
        step = np.zeros((24, 6))
        step[index] = 1e-5
        up, down = (tree().probabilities(oracle.log_softmax(logits + sign * step)) for sign in (1, -1))
        assert gradient[index] == pytest.approx(((up - down) @ tree().rewards) / 2e-5, abs=1e-8)


def sampled(log_probs: np.ndarray, batches: int) -> np.ndarray:
    """Sequences of batches, by number [batch, episode]."""
    chance = tree().probabilities(log_probs)
    return np.random.default_rng(0).choice(len(chance), (batches, 32), p=chance / chance.sum())


def test_the_exact_gradient_lies_within_the_interval_of_a_sampled_one():
    log_probs = policy(1)
    drawn = sampled(log_probs, 4000).ravel()
    terms = tree().rewards[drawn, None, None] * tree().scores(log_probs)[drawn]
    error = terms.std(axis=0) / math.sqrt(len(drawn))
    gap = abs(terms.mean(axis=0) - law_of(log_probs).gradient)
    assert (gap <= 4.5 * error + 1e-12).all()


def plain_advantages(rewards: np.ndarray, advantage: str) -> np.ndarray:
    """By their definitions, rewards[batch, group, episode]."""
    mean = rewards.mean(axis=2, keepdims=True)
    scale = {
        "group-std": rewards.std(axis=2, keepdims=True),
        "group-sample-std": rewards.std(axis=2, ddof=1, keepdims=True),
        "batch-std": rewards.std(axis=(1, 2), keepdims=True),
        "maxrl": mean,
    }.get(advantage, np.ones_like(mean))
    if advantage == "reinforce":
        return rewards
    if advantage == "rloo":
        return rewards - (rewards.sum(axis=2, keepdims=True) - rewards) / (rewards.shape[2] - 1)
    return np.divide(rewards - mean, scale, out=np.zeros_like(rewards), where=scale > 0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("advantage", [*ADVANTAGES, "rs-sft"])
def test_means_and_variances_are_those_of_sampled_batches(advantage, aggregation):
    """4,000 batches of 4 x 8 episodes, each credited by the definitions."""
    log_probs, batches = policy(2), 4000
    law, variant = law_of(log_probs), Variant(aggregation=aggregation)
    drawn = sampled(log_probs, batches)
    rewards, lengths = tree().rewards[drawn], tree().lengths[drawn]
    shares = {
        "episode-mean": 1 / (32 * lengths),
        "fixed-length": np.full(lengths.shape, 1 / (32 * 6)),
        "step-mean": np.broadcast_to(1 / lengths.sum(axis=1, keepdims=True), lengths.shape),
    }[aggregation]
    if advantage == "rs-sft":
        credited = rewards * 32 / np.maximum(rewards.sum(axis=1, keepdims=True), 1)
        exact = moments.batch_moments([law], 4, 8, variant, advantage)
    else:
        credited = plain_advantages(rewards.reshape(-1, 4, 8), advantage).reshape(-1, 32)
        exact = moments.batch_moments([law], 4, 8, variant._replace(advantage=advantage))
    scores = tree().scores(log_probs).reshape(-1, 144)
    gradients = np.einsum("be,bec->bc", credited * shares, scores[drawn])
    mean = exact.mean.ravel()
    assert ((gradients.mean(axis=0) - mean) ** 2).sum() < 2 * exact.variance / batches  # 1 is expected
    along = gradients @ mean / np.linalg.norm(mean)
    assert abs(along.mean() - np.linalg.norm(mean)) < 4.5 * along.std() / math.sqrt(batches)
    squares = ((gradients - mean) ** 2).sum(axis=1)
    assert abs(squares.mean() - exact.variance) < 4.5 * squares.std() / math.sqrt(batches)
    assert squares.std() / math.sqrt(batches) < 0.05 * exact.variance


@pytest.mark.parametrize("seed", range(3))
def test_where_episodes_differ_in_length_the_mean_over_each_is_biased_and_a_fixed_length_is_not(seed):
    law = law_of(policy(seed))
    mean = {name: moments.batch_moments([law], 4, 8, Variant("rloo", name)).mean for name in AGGREGATIONS}
    np.testing.assert_allclose(mean["fixed-length"], law.gradient / 6, atol=1e-12)
    assert cosine(mean["fixed-length"], law.gradient) == pytest.approx(1.0, abs=1e-6)
    assert cosine(mean["episode-mean"], law.gradient) < 0.98
    assert 0.99 < cosine(mean["step-mean"], law.gradient) < 1 - 1e-6


def test_with_one_kind_of_task_a_deviation_changes_the_size_alone():
    law = law_of(policy(2))
    for advantage in ("group-std", "group-sample-std", "group-mean", "batch-std", "maxrl"):
        mean = moments.batch_moments([law], 4, 8, Variant(advantage, "fixed-length")).mean
        assert cosine(mean, law.gradient) == pytest.approx(1.0, abs=1e-9)
        plain, divided = (
            moments.batch_moments([law], 4, 8, Variant(one, "step-mean")).mean for one in ("rloo", advantage)
        )
        assert math.degrees(math.acos(min(1.0, cosine(plain, divided)))) < 0.005  # a few thousandths


def test_batches_of_too_many_counts_are_refused():
    with pytest.raises(UserError, match="--groups 64 of 32 are too many"):
        moments.batch_moments([law_of(UNIFORM)], 64, 32, Variant("batch-std", "step-mean"))


# The KL term


def plain_kl_gradient(log_probs, reference, kl: str, aggregation: str) -> np.ndarray:
    """The expectation of what one episode contributes, summed over every sequence."""
    shares = 1 / tree().lengths if aggregation == "episode-mean" else np.full(len(tree().lengths), 1 / 6)
    weights = tree().probabilities(log_probs) * shares
    probs, gap = np.exp(log_probs), log_probs - reference
    visits = np.tensordot(weights, tree().choices.sum(axis=2), 1)[:, None]
    if kl == "exact":
        return visits * probs * (gap - (probs * gap).sum(axis=1, keepdims=True))
    slope = {"k1": 1.0, "k2": gap, "k3": 1 - np.exp(-gap)}[kl]  # d estimator / d log p
    by_action = np.tensordot(weights, tree().choices, 1) * slope
    return by_action - probs * by_action.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("aggregation", ["episode-mean", "fixed-length"])
@pytest.mark.parametrize("kl", ["exact", "k1", "k2", "k3"])
def test_the_kl_estimators_follow_what_the_sum_over_sequences_says(kl, aggregation):
    log_probs, reference = policy(1), policy(2)
    found = moments.kl_moments([law_of(log_probs)], reference, kl, aggregation)
    np.testing.assert_allclose(found.mean, plain_kl_gradient(log_probs, reference, kl, aggregation), atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_with_a_fixed_length_k1_says_nothing_k2_is_exact_and_k3_pulls_the_other_way(seed):
    log_probs, reference = policy(seed), policy(3)
    law = law_of(log_probs)
    k1, k2, k3, exact = (
        moments.kl_moments([law], reference, kl, "fixed-length").mean for kl in ("k1", "k2", "k3", "exact")
    )
    np.testing.assert_allclose(k1, 0.0, atol=1e-7)
    np.testing.assert_allclose(k2, exact, atol=1e-12)
    visits = law.choices.sum(axis=(0, 1, 3))[:, None] / 6
    np.testing.assert_allclose(k3, visits * (np.exp(log_probs) - np.exp(reference)), atol=1e-12)  # grad KL(q || p)
    assert cosine(k3, exact) < 0.99


def test_with_the_mean_over_an_episode_k1_is_not_zero():
    """The share of an action depends on what follows it."""
    found = moments.kl_moments([law_of(policy(1))], UNIFORM, "k1", "episode-mean")
    assert np.linalg.norm(found.mean) > 1e-2


def test_the_variance_of_a_kl_estimator_is_that_of_sampled_episodes():
    log_probs, reference = policy(1), policy(2)
    law, drawn = law_of(log_probs), sampled(log_probs, 1000).ravel()
    slope, scores = log_probs - reference, tree().choices[drawn]
    taken = scores * slope / tree().lengths[drawn, None, None]
    terms = taken - np.exp(log_probs) * taken.sum(axis=2, keepdims=True)
    found = moments.kl_moments([law], reference, "k2", "episode-mean")
    squares = ((terms - found.mean) ** 2).sum(axis=(1, 2))
    assert abs(squares.mean() - found.variance) < 4.5 * squares.std() / math.sqrt(len(drawn))


def test_the_gradient_of_the_kl_between_episodes_is_its_finite_difference():
    logits, reference = policy(1), policy(2)
    gradient = moments.episode_kl_gradient(TASK, np.exp(logits), reference)

    def divergence(moved: np.ndarray) -> float:
        log_probs = oracle.log_softmax(moved)
        return tree().probabilities(log_probs) @ (tree().choices * (log_probs - reference)).sum(axis=(1, 2))

    for index in [(0, 0), (0, 5), (5, 2), (9, 1), (15, 5), (23, 3)]:
        step = np.zeros((24, 6))
        step[index] = 1e-5
        difference = (divergence(logits + step) - divergence(logits - step)) / 2e-5
        assert gradient[index] == pytest.approx(difference, abs=1e-8)
