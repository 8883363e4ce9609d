"""Advantages: what an episode is credited with, from the rewards of its group.

Rewards are 0 or 1, so an advantage is a function of the reward and of k, the successes among the n episodes of the
group: two numbers a group. Every formula is exactly 0 where all rewards of a group are equal, but for `reinforce`.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_mini.machine.xla import stage, total
from jaxrl_mini.types import Advantages


def outcome_advantages(successes: Float[Array, "group *run"], group_size: int) -> Advantages:
    """group-std: the advantage of a failure and of a success in a group with k successes among n episodes.

    (reward - group mean) / group standard deviation, the population's; for rewards of 0 and 1 that is
    -sqrt(k / (n - k)) and sqrt((n - k) / k), and exactly 0 where all rewards of a group are equal. Source:
    group-relative advantage of GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1.2.
    """
    failures = group_size - successes
    mixed = (successes > 0) & (failures > 0)
    odds = jnp.where(mixed, successes, 1.0) / jnp.where(mixed, failures, 1.0)
    return Advantages(jnp.where(mixed, -jnp.sqrt(odds), 0.0), jnp.where(mixed, jnp.sqrt(1.0 / odds), 0.0))


def sample_std_advantages(successes: Float[Array, "group *run"], group_size: int) -> Advantages:
    """group-sample-std: `outcome_advantages` with the sample's standard deviation, so sqrt((n - 1) / n) of them.

    The paper writes std(r) without saying which. TRL and verl take the sample's (torch.std's default) and add 1e-4 or
    1e-6 to it; here nothing is added.
    """
    shrink = ((group_size - 1) / group_size) ** 0.5
    return Advantages(*(shrink * one for one in outcome_advantages(successes, group_size)))


def mean_advantages(successes: Float[Array, "group *run"], group_size: int) -> Advantages:
    """group-mean: reward - group mean, so -k / n and (n - k) / n.

    Source: Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783).
    """
    return Advantages(-successes / group_size, (group_size - successes) / group_size)


def batch_std_advantages(
    successes: Float[Array, "group *run"], group_size: int, deviation: Float[Array, "*run"] | None = None
) -> Advantages:
    """batch-std: (reward - group mean) / standard deviation of all rewards of the batch; 0 where they are all equal.

    The deviation is the population's, about the mean of the batch, as in `outcome_advantages`; TRL
    (`scale_rewards="batch"`) takes the sample's. Source: Liu et al. 2025 (arXiv 2508.08221).

    Args:
      successes: k of each group.
      group_size: n.
      deviation: the rewards', if it is known otherwise.
    """
    if deviation is None:
        rate = total(successes) / (successes.shape[0] * group_size)
        deviation = jnp.sqrt(rate * (1.0 - rate))
    scale = jnp.where(deviation > 0, 1.0 / jnp.where(deviation > 0, deviation, 1.0), 0.0)
    return Advantages(*(scale * one for one in mean_advantages(successes, group_size)))


def leave_one_out_advantages(successes: Float[Array, "group *run"], group_size: int) -> Advantages:
    """rloo: reward - mean reward of the group's other episodes, so -k / (n - 1) and (n - k) / (n - 1).

    The baseline does not depend on the episode, so it biases nothing. Source: Ahmadian et al. 2024 (arXiv 2402.14740),
    after Kool et al. 2019. There the KL is part of the reward; here it stays in the loss.
    """
    return Advantages(-successes / (group_size - 1), (group_size - successes) / (group_size - 1))


def likelihood_advantages(successes: Float[Array, "group *run"], group_size: int) -> Advantages:
    """maxrl: (reward - group mean) / group mean, so -1 and (n - k) / k; 0 in a group without success.

    Its expectation is the gradient of log p as a series in 1 - p, cut off after n - 1 terms: one fewer than with the
    successes alone, since a group without success has no advantage at all. Source: Tajwar et al. 2026
    (arXiv 2602.02710).
    """
    some = successes > 0
    positive = jnp.where(some, successes, 1.0)
    return Advantages(
        jnp.where(some & (successes < group_size), -1.0, 0.0), jnp.where(some, (group_size - successes) / positive, 0.0)
    )


def plain_advantages(successes: Float[Array, "group *run"], group_size: int) -> Advantages:
    """reinforce: the reward itself, without a baseline. Source: Williams 1992 (doi:10.1007/BF00992696)."""
    return Advantages(jnp.zeros_like(successes), jnp.ones_like(successes))


def retention_weights(successes: Float[Array, "group *run"], group_size: int) -> Advantages:
    """Rejection sampling as an advantage: 0 for a failure, episodes / retained episodes for a success."""
    retained = jnp.maximum(total(successes), 1.0)
    weight = jnp.broadcast_to(successes.shape[0] * group_size / retained, successes.shape)
    return Advantages(jnp.zeros_like(successes), weight)


BY_NAME: dict[str, Callable[..., Advantages]] = {
    "group-std": outcome_advantages,
    "group-sample-std": sample_std_advantages,
    "group-mean": mean_advantages,
    "batch-std": batch_std_advantages,
    "rloo": leave_one_out_advantages,
    "maxrl": likelihood_advantages,
    "reinforce": plain_advantages,
}
"""The functions of `config.ADVANTAGES`."""


@partial(stage, static_argnames=("method", "advantage"))
def advantages(rewards: Float[Array, "group episode *run"], *, method: str, advantage: str = "group-std") -> Advantages:
    """What each group's failures and successes are credited with under a method."""
    successes = total(rewards, axis=1)
    return (retention_weights if method == "rs-sft" else BY_NAME[advantage])(successes, rewards.shape[1])


def group_advantages(
    rewards: Float[Array, "group episode *run"], advantage: str = "group-std"
) -> Float[Array, "group episode *run"]:
    """The advantages of a batch as one number per episode."""
    failure, success = BY_NAME[advantage](total(rewards, axis=1), rewards.shape[1])
    return jnp.where(rewards > 0, success[:, None], failure[:, None])
