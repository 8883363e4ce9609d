"""The exact mean and variance of a batch's gradient, in float64: how far an estimator points from the truth.

The gradient of a batch, at the policy that sampled it, is a sum over its episodes of (coefficient of the episode) *
(sum over its steps of grad log p). Given the instances that the groups play, each drawn for itself, episodes are
independent, and a coefficient depends on the others through a few counts only: the successes of the group, those of the
batch, and the actions of the batch. So both moments are finite sums: over what one or two episodes do (`laws.Law`, one
for each instance), over their instances, and over those counts. Every surrogate has the same gradient there.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxrl_mini.config import UserError, Variant
from jaxrl_mini.exact.laws import REWARDS, Law
from jaxrl_mini.exact.situations import ahead, reach
from jaxrl_mini.objective.advantage import asks_for_batch, credited, formula
from jaxrl_mini.objective.credit import shares
from jaxrl_mini.tasks.compiled import CompiledTask
from jaxrl_mini.tasks.situations import Level, stacked

MAX_CELLS, MAX_CASES = 5_000_000, 50_000_000
"""Combinations of counts that are summed over, at most: for a pair of instances, and for all pairs."""


class Moments(NamedTuple):
    """The gradient that a batch's update follows: minus that of the surrogate loss."""

    mean: Float[np.ndarray, "context action"]
    variance: float
    """The trace of the covariance, of one batch."""


def check_size(
    groups: int, group_size: int, variant: Variant, method: str = "grpo", *, steps: int = 6, instances: int = 1
) -> None:
    """Refuses a batch whose moments are sums over too many counts.

    Raises:
      UserError: they are.
    """
    of_batch, of_steps = asks_for_batch(formula(variant.advantage, method)), variant.aggregation == "step-mean"
    episodes = groups * group_size
    cells = group_size**2 * (episodes if of_batch else 1) * (steps * episodes if of_steps else 1)
    pairs = instances * (instances + 1) // 2
    if groups > 1 and (of_batch or of_steps) and (cells > MAX_CELLS or cells * pairs > MAX_CASES):
        counting = [variant.advantage if method == "grpo" else method] * of_batch + ["step-mean"] * of_steps
        what = " and ".join(counting) + f" on {instances} instances" * (instances > 1)
        raise UserError(
            f"--groups {groups} of {group_size} are too many for {what}: ask for fewer, they make {cells * pairs} "
            f"combinations of counts, {cells} at once, of up to {MAX_CASES} and {MAX_CELLS}"
        )


class _Counts(NamedTuple):
    """What a coefficient depends on, beside its own episode; the axes broadcast."""

    group: np.ndarray
    """Successes of the group."""
    batch: np.ndarray
    """Successes of the batch."""
    steps: np.ndarray
    """Actions of the batch."""


class _Ending(NamedTuple):
    """What of an episode's end is told apart; its actions are not, where they are not counted over the batch."""

    reward: int
    actions: int


def batch_moments(laws: Sequence[Law], groups: int, group_size: int, variant: Variant, method: str = "grpo") -> Moments:
    """The moments of the gradient of a batch, exactly; every group plays one of the laws' instances, all as likely.

    E[g] = N * mean over instances of the sum over endings of E[coefficient | instance, ending] * scores, and E|g|^2 is
    the sum over an episode with itself, with another of its group, and with one of another group.

    Raises:
      UserError: the batch is so large that the sums over its counts are.
    """
    steps, instances = laws[0].ends.shape[1] - 1, len(laws)
    check_size(groups, group_size, variant, method, steps=steps, instances=instances)
    episodes = groups * group_size
    function = formula(variant.advantage, method)
    of_batch, of_steps = asks_for_batch(function), variant.aggregation == "step-mean"
    share = np.append(0.0, shares(variant.aggregation, steps))  # no episode has length 0
    if of_steps:
        endings = [_Ending(reward, length) for reward in range(REWARDS) for length in range(1, steps + 1)]
        scores = np.stack([law.scores[:, 1:].reshape(len(endings), -1) for law in laws])
        squares = np.stack([law.squared_scores[:, 1:].ravel() for law in laws])
    else:
        share = share / episodes
        endings = [_Ending(reward, 0) for reward in range(REWARDS)]
        scores = np.stack([np.einsum("l,rlca->rca", share, law.scores).reshape(REWARDS, -1) for law in laws])
        squares = np.stack([law.squared_scores @ share**2 for law in laws])
    ends = [law.ends if of_steps else law.ends.sum(axis=1, keepdims=True) for law in laws]
    group = np.mean([_power(one, group_size) for one in ends], axis=0)

    def others(mates: list[tuple[int, int]]) -> tuple[np.ndarray, tuple[list[np.ndarray], np.ndarray, np.ndarray]]:
        """The law of what counts beside the episodes at hand: with so many mates of theirs, on an instance each."""
        strangers = group if of_batch else group.sum(axis=0, keepdims=True)
        return _beside([_power(ends[i], count) for i, count in mates], _power(strangers, groups - len(mates)))

    def coefficient(reward: int, counts: _Counts) -> np.ndarray:
        def batch() -> tuple[np.ndarray, int]:
            return counts.batch.astype(np.float64), episodes

        advantage = credited(function, float(reward), counts.group.astype(np.float64), group_size, batch)
        return advantage / counts.steps if of_steps else advantage

    def with_one(instance: int) -> np.ndarray:
        """E[coefficient] and E[coefficient^2] of an episode, [power, ending]."""
        chance, counts = others([(instance, group_size - 1)])
        values = [coefficient(one.reward, _joined(counts, 0, [one], [one])) for one in endings]
        return np.array([[(chance * value**power).sum() for value in values] for power in (1, 2)])

    def with_two(mates: list[tuple[int, int]]) -> np.ndarray:
        """E[coefficient * coefficient] of two episodes, of one group or of two, [ending, ending]."""
        chance, counts = others(mates)
        found: dict[tuple[int, int, int], float] = {}  # actions matter by their sum
        for one, other in itertools.product(endings, endings):
            key = one.reward, other.reward, one.actions + other.actions
            if key not in found:
                both = [one, other]
                where = (0, 0) if len(mates) == 1 else (0, 1)
                first, second = (_joined(counts, g, both, both if where == (0, 0) else [both[g]]) for g in where)
                found[key] = float((chance * coefficient(one.reward, first) * coefficient(other.reward, second)).sum())
        values = [found[one.reward, other.reward, one.actions + other.actions] for one in endings for other in endings]
        return np.array(values).reshape(len(endings), -1)

    each = range(instances)
    alone = [with_one(i) for i in each]
    mean = episodes * np.mean([alone[i][0] @ scores[i] for i in each], axis=0)
    second = episodes * np.mean([alone[i][1] @ squares[i] for i in each])
    same = [(with_two([(i, group_size - 2)]) * (scores[i] @ scores[i].T)).sum() for i in each]
    second += episodes * (group_size - 1) * np.mean(same)
    if groups > 1:
        if of_batch or of_steps:
            apart = sum(
                (1 if i == j else 2)  # a pair of instances counts in both orders
                * (with_two([(i, group_size - 1), (j, group_size - 1)]) * (scores[i] @ scores[j].T)).sum()
                for i, j in itertools.combinations_with_replacement(each, 2)
            )
            second += episodes * (episodes - group_size) * apart / instances**2
        else:
            second += (1.0 - 1.0 / groups) * (mean @ mean)
    return Moments(mean.reshape(laws[0].probs.shape), float(second - mean @ mean))


def _joined(
    counts: tuple[list[np.ndarray], np.ndarray, np.ndarray], group: int, present: list[_Ending], members: list[_Ending]
) -> _Counts:
    """The counts with the named episodes added: all to the batch, and the members to the group."""
    by_group, strangers, steps = counts
    own = by_group[group] + sum(one.reward for one in members)
    batch = sum(by_group) + strangers + sum(one.reward for one in present)
    return _Counts(own, batch, steps + sum(one.actions for one in present))


def _beside(
    mates: list[np.ndarray], strangers: np.ndarray
) -> tuple[np.ndarray, tuple[list[np.ndarray], np.ndarray, np.ndarray]]:
    """The law of what the other episodes count, on the axes [successes of each group's mates..., strangers', actions].

    An axis that nothing depends on has length 1.

    Returns:
      The probabilities, and the counts along the axes: by group of mates, of the strangers, and of all actions.
    """
    joint = mates[0]
    for part in [*mates[1:], strangers]:
        # Successes side by side, actions added up.
        wide = np.zeros((*joint.shape[:-1], part.shape[0], joint.shape[-1] + part.shape[-1] - 1))
        for steps in range(part.shape[-1]):
            wide[..., steps : steps + joint.shape[-1]] += joint[..., None, :] * part[:, steps, None]
        joint = wide
    axes = [np.arange(size).reshape([-1 if i == axis else 1 for i in range(joint.ndim)]) for axis, size in
            enumerate(joint.shape)]  # fmt: skip
    return joint, (axes[: len(mates)], axes[-2], axes[-1])


def _power(one: Float[np.ndarray, "successes actions"], count: int) -> Float[np.ndarray, "more_successes more_actions"]:
    """The law of the successes and the actions of so many, each for itself."""
    total = np.ones((1, 1))
    for _ in range(count if one.size > 1 else 0):
        more = np.zeros((total.shape[0] + one.shape[0] - 1, total.shape[1] + one.shape[1] - 1))
        for successes, actions in np.argwhere(one > 0):
            more[successes : successes + total.shape[0], actions : actions + total.shape[1]] += (
                one[successes, actions] * total
            )
        total = more
    return total


# The KL term


def kl_moments(
    laws: Sequence[Law], reference: Float[np.ndarray, "context action"], kl: str, aggregation: str, group_size: int = 1
) -> Moments:
    """The moments of the gradient of the KL term.

    The mean of a batch is that of an episode. The variance is a batch's, times its episodes: the variance of an episode
    given its instance, and `group_size` times that of its mean between instances.

    Args:
      laws: of the policy's episodes, by instance.
      reference: log-probabilities of the reference policy.
      kl: "exact", "k1", "k2" or "k3".
      aggregation: "episode-mean" or "fixed-length".
      group_size: episodes that play the same instance.
    """
    found = [_kl_of_episode(law, reference, kl, aggregation) for law in laws]
    mean = np.mean([one.mean for one in found], axis=0)
    between = np.mean([((one.mean - mean) ** 2).sum() for one in found])
    return Moments(mean, float(np.mean([one.variance for one in found]) + group_size * between))


def _kl_of_episode(law: Law, reference: Float[np.ndarray, "context action"], kl: str, aggregation: str) -> Moments:
    share = np.append(0.0, shares(aggregation, law.ends.shape[1] - 1))
    choices, probs = law.choices.sum(axis=0), law.probs
    gap = _log(probs) - reference
    if kl == "exact":
        each = probs * (gap - (probs * gap).sum(axis=1, keepdims=True))
        visits = choices.sum(axis=2)
        mean = np.einsum("l,lc->c", share, visits)[:, None] * each
        second = np.einsum("l,lc,ca->", share**2, visits, each**2)
    else:
        rarest = np.where(probs > 0, 1.0, np.nan)  # there, k3 weighs with reference / 0
        weight = {"k1": np.ones_like(gap), "k2": gap, "k3": (1.0 - np.exp(-gap)) * rarest}[kl]
        weighted = np.einsum("l,lca->ca", share, choices) * weight
        mean = weighted - probs * weighted.sum(axis=1, keepdims=True)
        squares = 1.0 - 2.0 * probs + (probs**2).sum(axis=1, keepdims=True)
        second = np.einsum("l,lca,ca->", share**2, choices * weight, weight * squares)
    return Moments(mean, float(second - (mean**2).sum()))


def _log(probs: Float[np.ndarray, "context action"]) -> Float[np.ndarray, "context action"]:
    """The logarithm, and any number where the probability is 0: p log p is 0 there."""
    return np.log(np.where(probs > 0, probs, 1.0))


def episode_kl_gradient(
    task: CompiledTask, probs: Float[np.ndarray, "context action"], reference: Float[np.ndarray, "context action"]
) -> Float[np.ndarray, "context action"]:
    """The gradient, by the logits, of KL(policy || reference) between their distributions of whole episodes.

    That divergence is the expected sum of the steps' divergences, and its gradient has a part that the KL term of the
    loss leaves out: an action also leads to contexts where the policies differ more, or less.
    """
    gap, found, instances = _log(probs) - reference, stacked(task, "train"), len(task.splits["train"])

    def gain(level: Level, step: Any) -> np.ndarray:
        return gap[level.context[level.source], level.action][:, None]

    cost = ahead(found, probs, reach(found, probs), gain, kinds=1)[1][0, :, :, 0] / instances
    return cost - probs * cost.sum(axis=1, keepdims=True)
