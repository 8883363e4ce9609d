"""Advantages: what an episode is credited with, from the rewards of its group.

Rewards are 0 or 1, so an advantage is a function of counts:

    f(reward, successes, size)

    reward      the episode's, the number 0.0 or 1.0
    successes   in its group, a float array; the advantages have its shape, or are one number for all
    size        of its group, a whole number

A function that also names `batch_successes` or `batch_size` is given these of the whole batch; in the expected loss,
as of infinitely many groups, of one of 2^40 episodes. Each formula is written once and works on JAX arrays in float32
and on NumPy arrays in float64 alike: training, the expected loss and the moments of gradients all ask it. It is asked
for every count from 0 to the size, whichever the reward, so it has to be finite there, too. Those of this file take
plain numbers as well, and are exactly 0 where all rewards of a group are equal, but for `reinforce`.

One of a user's own is added by `objective.own`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from jaxrl_mini.config import ADVANTAGES, OWN_ADVANTAGES, OWN_FORM, UserError

Formula = Callable[..., Any]
Numbers = Any
"""A number, or an array of floats; those that a function takes broadcast against each other."""
BATCH = ("batch_successes", "batch_size")
INFINITE = 2.0**40
"""The episodes of a batch that stands for infinitely many: with one more, float32 counts the same."""


def built_in(function: Formula) -> Formula:
    """Registers a formula under the name of its function, with hyphens."""
    ADVANTAGES[function.__name__.replace("_", "-")] = function
    return function


def _namespace(counts: Numbers) -> Any:
    """jax.numpy for JAX arrays, numpy for NumPy's and for plain numbers."""
    if isinstance(counts, int | float):
        import numpy as np

        return np
    return counts.__array_namespace__()


@built_in
def group_std(reward: Numbers, successes: Numbers, size: Numbers) -> Numbers:
    """(reward - group mean) / group standard deviation, the population's.

    For rewards of 0 and 1 that is -sqrt(k / (n - k)) and sqrt((n - k) / k), with k successes among n episodes. Source:
    group-relative advantage of GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1.2.
    """
    xp = _namespace(successes)
    failures = size - successes
    mixed = (successes > 0) & (failures > 0)
    odds = xp.where(mixed, successes, 1.0) / xp.where(mixed, failures, 1.0)
    return xp.where(mixed, xp.where(reward > 0, xp.sqrt(1.0 / odds), -xp.sqrt(odds)), 0.0)


@built_in
def group_sample_std(reward: Numbers, successes: Numbers, size: Numbers) -> Numbers:
    """`group_std` with the sample's standard deviation, so sqrt((n - 1) / n) of it.

    The paper writes std(r) without saying which. TRL and verl take the sample's (torch.std's default) and add 1e-4 or
    1e-6 to it; here nothing is added.
    """
    return ((size - 1) / size) ** 0.5 * group_std(reward, successes, size)


@built_in
def group_mean(reward: Numbers, successes: Numbers, size: Numbers) -> Numbers:
    """The reward - group mean, so -k / n and (n - k) / n. Source: Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783)."""
    return _margin(reward, successes, size) / size


@built_in
def batch_std(
    reward: Numbers, successes: Numbers, size: Numbers, batch_successes: Numbers, batch_size: Numbers
) -> Numbers:
    """(reward - group mean) / standard deviation of all rewards of the batch; 0 where they are all equal.

    The deviation is the population's, about the mean of the batch, as in `group_std`; TRL (`scale_rewards="batch"`)
    takes the sample's. Source: Liu et al. 2025 (arXiv 2508.08221).
    """
    xp = _namespace(batch_successes)
    rate = batch_successes / batch_size
    deviation = xp.sqrt(rate * (1.0 - rate))
    scale = xp.where(deviation > 0, 1.0 / xp.where(deviation > 0, deviation, 1.0), 0.0)
    return scale * group_mean(reward, successes, size)


@built_in
def rloo(reward: Numbers, successes: Numbers, size: Numbers) -> Numbers:
    """The reward - mean reward of the group's other episodes, so -k / (n - 1) and (n - k) / (n - 1).

    The baseline does not depend on the episode, so it biases nothing. Source: Ahmadian et al. 2024 (arXiv 2402.14740),
    after Kool et al. 2019. There the KL is part of the reward; here it stays in the loss.
    """
    return _margin(reward, successes, size) / (size - 1)


@built_in
def maxrl(reward: Numbers, successes: Numbers, size: Numbers) -> Numbers:
    """(reward - group mean) / group mean, so -1 and (n - k) / k; 0 in a group without success.

    Its expectation is the gradient of log p as a series in 1 - p, cut off after n - 1 terms: one fewer than with the
    successes alone, since a group without success has no advantage at all. Source: Tajwar et al. 2026
    (arXiv 2602.02710).
    """
    xp = _namespace(successes)
    some = successes > 0
    success = xp.where(some, (size - successes) / xp.where(some, successes, 1.0), 0.0)
    return xp.where(reward > 0, success, xp.where(some & (successes < size), -1.0, 0.0))


def _margin(reward: Numbers, successes: Numbers, size: Numbers) -> Numbers:
    """The group's size times (reward - group mean), without rounding."""
    return _namespace(successes).where(reward > 0, size - successes, -successes)


@built_in
def reinforce(reward: Numbers, successes: Numbers, size: Numbers) -> Numbers:
    """The reward itself, without a baseline. Source: Williams 1992 (doi:10.1007/BF00992696)."""
    return reward


def retention(
    reward: Numbers, successes: Numbers, size: Numbers, batch_successes: Numbers, batch_size: Numbers
) -> Numbers:
    """Rejection sampling as an advantage: 0 for a failure, episodes / retained episodes for a success."""
    xp = _namespace(batch_successes)
    some = batch_successes > 0
    return xp.where((reward > 0) & some, batch_size / xp.where(some, batch_successes, 1.0), 0.0)


def formula(advantage: str, method: str = "grpo") -> Formula:
    """What episodes are credited by.

    Raises:
      UserError: it is a user's own, of a file that nobody named yet.
    """
    if method == "rs-sft":
        return retention
    found = ADVANTAGES.get(advantage) or OWN_ADVANTAGES.get(advantage)
    if found is None:
        raise UserError(f"the advantage {advantage} is not here: name its file, --advantage {OWN_FORM}")
    return found


def asks_for_batch(function: Formula) -> bool:
    """Whether a formula depends on the other groups."""
    return any(name in inspect.signature(function).parameters for name in BATCH)


def ask(
    function: Formula,
    reward: float,
    successes: Numbers,
    size: int,
    batch: Callable[[], tuple[Numbers, Numbers]],
) -> Any:
    """What a formula gives for the episodes with a reward.

    Args:
      function: the formula.
      reward: 0.0 or 1.0.
      successes: in each group.
      size: of a group.
      batch: gives successes and episodes of the batch; called only for a formula that asks for them.
    """
    names = [name for name in BATCH if name in inspect.signature(function).parameters]
    wide = dict(zip(BATCH, batch(), strict=True)) if names else {}
    return function(reward=reward, successes=successes, size=size, **{name: wide[name] for name in names})


def credited(
    function: Formula, reward: float, successes: Numbers, size: int, batch: Callable[[], tuple[Numbers, Numbers]]
) -> Numbers:
    """The same as an array in the type of `successes`, which broadcasts against it."""
    value = ask(function, reward, successes, size, batch)
    return _namespace(successes).asarray(value, dtype=successes.dtype)
