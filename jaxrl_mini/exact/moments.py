"""The exact mean and variance of a batch's gradient, in float64: how far an estimator points from the truth.

The gradient of a batch, at the policy that sampled it, is a sum over its episodes of (coefficient of the episode) *
(sum over its steps of grad log p). Episodes are independent, and a coefficient depends on the others through a few
counts only: the successes of the group, those of the batch, and the actions of the batch. So both moments are finite
sums: over what one or two episodes do (`Law`), and over those counts. Every surrogate has the same gradient there.
"""

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxrl_mini.config import UserError, Variant
from jaxrl_mini.exact.expected import choices_by_outcome
from jaxrl_mini.objective.advantage import asks_for_batch, credited, formula
from jaxrl_mini.objective.credit import SHARES
from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS
from jaxrl_mini.tasks.tables import TABLES

REWARDS, LENGTHS = 2, MAX_STEPS + 1
MAX_CELLS = 5_000_000
"""Combinations of counts that are summed over, at most."""


class Law(NamedTuple):
    """What one episode of a policy does. An episode passes through a context at most once."""

    choices: Float[np.ndarray, "reward length context action"]
    """The probability that an episode takes the action there and ends with this reward and length."""
    ends: Float[np.ndarray, "reward length"]
    """The probability that it ends with this reward and length."""
    probs: Float[np.ndarray, "context action"]
    """The policy."""

    @property
    def success(self) -> float:
        """The probability of reward 1."""
        return float(self.ends[1].sum())

    @property
    def scores(self) -> Float[np.ndarray, "reward length context action"]:
        """The expectation of the sum of grad log p over an episode with this reward and length, by the logits."""
        return self.choices - self.probs * self.choices.sum(axis=3, keepdims=True)

    @property
    def squared_scores(self) -> Float[np.ndarray, "reward length"]:
        """The same of the squared norm of that sum: its parts in different contexts are orthogonal."""
        squares = 1.0 - 2.0 * self.probs + (self.probs**2).sum(axis=1, keepdims=True)
        return (self.choices * squares).sum(axis=(2, 3))

    @property
    def gradient(self) -> Float[np.ndarray, "context action"]:
        """The gradient of the probability of reward 1 by the logits."""
        return self.scores[1].sum(axis=0)


def law_of(log_probs: Float[np.ndarray, "24 6"], success: Float[np.ndarray, " outcome"]) -> Law:
    """The law of a table policy's episodes, by dynamic programming over the transition tables.

    Args:
      log_probs: of the actions in every state.
      success: the probability of reward 1 by outcome (`rewards.success_by_outcome`).
    """
    probs = np.exp(np.asarray(log_probs, np.float64))
    by_length = [choices_by_outcome(probs, np.eye(MAX_STEPS)[length - 1]) for length in range(1, LENGTHS)]
    outcomes = np.stack([np.zeros_like(by_length[0]), *by_length])  # [length, outcome, state, action]
    chances = np.stack([1.0 - success, success])
    choices = np.einsum("ro,losa->rlsa", chances, outcomes)
    return Law(choices, choices[:, :, :NUM_VARIANTS].sum(axis=(2, 3)), probs)


class Moments(NamedTuple):
    """The gradient that a batch's update follows: minus that of the surrogate loss."""

    mean: Float[np.ndarray, "context action"]
    variance: float
    """The trace of the covariance, of one batch."""


def check_size(groups: int, group_size: int, variant: Variant, method: str = "grpo") -> None:
    """Refuses a batch whose moments are sums over too many counts.

    Raises:
      UserError: they are.
    """
    of_batch, of_steps = asks_for_batch(formula(variant.advantage, method)), variant.aggregation == "step-mean"
    episodes = groups * group_size
    cells = group_size**2 * (episodes if of_batch else 1) * (MAX_STEPS * episodes if of_steps else 1)
    if cells > MAX_CELLS and groups > 1 and (of_batch or of_steps):
        counting = [variant.advantage if method == "grpo" else method] * of_batch + ["step-mean"] * of_steps
        raise UserError(f"--groups {groups} of {group_size} are too many for {' and '.join(counting)}: ask for fewer")


class _Counts(NamedTuple):
    """What a coefficient depends on, beside its own episode; the axes broadcast."""

    group: np.ndarray
    """Successes of the group."""
    batch: np.ndarray
    """Successes of the batch."""
    steps: np.ndarray
    """Actions of the batch."""


def batch_moments(law: Law, groups: int, group_size: int, variant: Variant, method: str = "grpo") -> Moments:
    """The moments of the gradient of a batch, exactly.

    E[g] = N sum over (reward, length) of E[coefficient | reward, length] * scores, and E|g|^2 is the sum over an
    episode with itself, with another of its group, and with one of another group.

    Raises:
      UserError: the batch is so large that the sums over its counts are.
    """
    check_size(groups, group_size, variant, method)
    episodes = groups * group_size
    function = formula(variant.advantage, method)
    of_batch = asks_for_batch(function)
    of_steps = variant.aggregation == "step-mean"
    marks = [(reward, length) for reward in range(REWARDS) for length in range(1, law.ends.shape[1])]
    scores = np.stack([law.scores[mark].ravel() for mark in marks])
    inner = scores @ scores.T
    shares = SHARES[variant.aggregation][[length - 1 for _, length in marks]] / (1 if of_steps else episodes)

    def coefficient(reward: int, counts: _Counts) -> np.ndarray:
        def batch() -> tuple[np.ndarray, int]:
            return counts.batch.astype(np.float64), episodes

        advantage = credited(function, float(reward), counts.group.astype(np.float64), group_size, batch)
        return advantage / counts.steps if of_steps else advantage

    def with_one(power: int) -> np.ndarray:
        chance, counts = _others(law, [group_size - 1], episodes - group_size, of_batch, of_steps)
        return np.array([(chance * coefficient(m[0], _joined(counts, 0, [m], [m])) ** power).sum() for m in marks])

    def with_two(mates: list[int], strangers: int, where: tuple[int, int]) -> np.ndarray:
        chance, counts = _others(law, mates, strangers, of_batch, of_steps)
        found: dict[tuple[int, int, int], float] = {}  # lengths matter by their sum, or as shares
        values = []
        for one, other in itertools.product(marks, marks):
            key = one[0], other[0], one[1] + other[1] if of_steps else 0
            if key not in found:
                both = [one, other]
                first, second = (_joined(counts, g, both, both if where == (0, 0) else [both[g]]) for g in where)
                found[key] = float((chance * coefficient(one[0], first) * coefficient(other[0], second)).sum())
            values.append(found[key])
        return np.array(values).reshape(len(marks), -1) * np.outer(shares, shares)

    weights = shares * with_one(1)
    mean = episodes * weights @ scores
    second = episodes * (shares**2 * with_one(2)) @ np.array([law.squared_scores[mark] for mark in marks])
    same = with_two([group_size - 2], episodes - group_size, (0, 0))
    second += episodes * (group_size - 1) * (same * inner).sum()
    if groups > 1:
        if of_batch or of_steps:
            apart = with_two([group_size - 1] * 2, episodes - 2 * group_size, (0, 1))
        else:
            apart = np.outer(weights, weights)
        second += episodes * (episodes - group_size) * (apart * inner).sum()
    return Moments(mean.reshape(law.probs.shape), float(second - mean @ mean))


def _joined(
    counts: tuple[list[np.ndarray], np.ndarray, np.ndarray],
    group: int,
    present: list[tuple[int, int]],
    members: list[tuple[int, int]],
) -> _Counts:
    """The counts with the named episodes added: all to the batch, and the members to the group."""
    by_group, strangers, steps = counts
    own = by_group[group] + sum(reward for reward, _ in members)
    batch = sum(by_group) + strangers + sum(reward for reward, _ in present)
    return _Counts(own, batch, steps + sum(length for _, length in present))


def _others(
    law: Law, mates: list[int], strangers: int, of_batch: bool, of_steps: bool
) -> tuple[np.ndarray, tuple[list[np.ndarray], np.ndarray, np.ndarray]]:
    """The law of what the other episodes count, on the axes [successes of each group's mates..., strangers', actions].

    An axis that nothing depends on has length 1.

    Returns:
      The probabilities, and the counts along the axes: by group of mates, of the strangers, and of all actions.
    """
    one = law.ends if of_steps else law.ends.sum(axis=1, keepdims=True)
    parts = [_sum_of(one, count) for count in mates]
    parts.append(_sum_of(one if of_batch else one.sum(axis=0, keepdims=True), strangers))
    joint = parts[0]
    for part in parts[1:]:
        # Successes side by side, actions added up.
        wide = np.zeros((*joint.shape[:-1], part.shape[0], joint.shape[-1] + part.shape[-1] - 1))
        for steps in range(part.shape[-1]):
            wide[..., steps : steps + joint.shape[-1]] += joint[..., None, :] * part[:, steps, None]
        joint = wide
    axes = [np.arange(size).reshape([-1 if i == axis else 1 for i in range(joint.ndim)]) for axis, size in
            enumerate(joint.shape)]  # fmt: skip
    return joint, (axes[: len(mates)], axes[-2], axes[-1])


def _sum_of(one: Float[np.ndarray, "reward length"], count: int) -> Float[np.ndarray, "successes actions"]:
    """The law of the successes and the actions of so many episodes."""
    total = np.ones((1, 1))
    for _ in range(count):
        more = np.zeros((total.shape[0] + one.shape[0] - 1, total.shape[1] + one.shape[1] - 1))
        for reward, length in np.argwhere(one > 0):
            more[reward : reward + total.shape[0], length : length + total.shape[1]] += one[reward, length] * total
        total = more
    return total


# The KL term


def kl_moments(law: Law, reference: Float[np.ndarray, "context action"], kl: str, aggregation: str) -> Moments:
    """The moments of the gradient of one episode's KL term; those of a batch are the mean, and 1 / N of the variance.

    Args:
      law: of the policy's episodes.
      reference: log-probabilities of the reference policy.
      kl: "exact", "k1", "k2" or "k3".
      aggregation: "episode-mean" or "fixed-length".
    """
    shares = np.append(0.0, SHARES[aggregation])[: law.ends.shape[1]]  # no episode has length 0
    choices, probs = law.choices.sum(axis=0), law.probs
    gap = _log(probs) - reference
    if kl == "exact":
        each = probs * (gap - (probs * gap).sum(axis=1, keepdims=True))
        visits = choices.sum(axis=2)
        mean = np.einsum("l,lc->c", shares, visits)[:, None] * each
        second = np.einsum("l,lc,ca->", shares**2, visits, each**2)
    else:
        rarest = np.where(probs > 0, 1.0, np.nan)  # there, k3 weighs with reference / 0
        weight = {"k1": np.ones_like(gap), "k2": gap, "k3": (1.0 - np.exp(-gap)) * rarest}[kl]
        weighted = np.einsum("l,lca->ca", shares, choices) * weight
        mean = weighted - probs * weighted.sum(axis=1, keepdims=True)
        squares = 1.0 - 2.0 * probs + (probs**2).sum(axis=1, keepdims=True)
        second = np.einsum("l,lca,ca->", shares**2, choices * weight, weight * squares)
    return Moments(mean, float(second - (mean**2).sum()))


def _log(probs: Float[np.ndarray, "context action"]) -> Float[np.ndarray, "context action"]:
    """The logarithm, and any number where the probability is 0: p log p is 0 there."""
    return np.log(np.where(probs > 0, probs, 1.0))


def episode_kl_gradient(
    probs: Float[np.ndarray, "24 6"], reference: Float[np.ndarray, "24 6"]
) -> Float[np.ndarray, "24 6"]:
    """The gradient, by the logits, of KL(policy || reference) between their distributions of whole episodes.

    That divergence is the expected sum of the steps' divergences, and its gradient has a part that the KL term of the
    loss leaves out: an action also leads to states where the policies differ more, or less.
    """
    gap = (_log(probs) - reference).reshape(MAX_STEPS, NUM_VARIANTS, NUM_ACTIONS)
    by_step = probs.reshape(gap.shape)
    ahead, costs = np.zeros(NUM_VARIANTS), []
    for step in reversed(range(MAX_STEPS)):
        costs.append(gap[step] + np.where(TABLES.ends[step], 0.0, ahead[TABLES.next_variant[step]]))
        ahead = (by_step[step] * costs[-1]).sum(axis=1)
    cost = np.stack(costs[::-1]).reshape(probs.shape)
    reach = choices_by_outcome(probs, np.ones(MAX_STEPS)).sum(axis=(0, 2))
    return reach[:, None] * probs * (cost - (probs * cost).sum(axis=1, keepdims=True))
