"""Advantages, credit and losses: pure functions of arrays, each with its formula and source.

Losses and figures take JAX arrays inside a jitted program and NumPy arrays outside of one.

The ratio of new to behavior probability depends on (context, action) only, so the loss of a batch is a function
of a few sums over the batch (`Credit`). It is exact, its cost does not grow with the batch, and it is a sum over
contexts, so gradients can be accumulated over any partition of them.

In the first epoch after sampling every ratio is 1 and the advantages of a group sum to 0, so the surrogate starts
near 0 by construction while its gradient does not: read the gradient norm and the mixed groups beside the loss. A
group whose rewards are all equal has advantage 0; a batch of such groups has loss beta * KL, and moves by it.
"""

import functools
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_mini.task import MAX_STEPS, NUM_ACTIONS, NUM_STATES, NUM_VARIANTS
from jaxrl_mini.types import CHOICE_BITS, Advantages, AnyArray, Credit, Episodes, Settings
from jaxrl_mini.xla import pick, stage, total


def outcome_advantages(successes: Float[Array, "group *run"], group_size: int) -> Advantages:
    """The advantage of a failure and of a success in a group with k successes among n episodes.

    (reward - group mean) / group standard deviation, the population's; for rewards of 0 and 1 that is
    -sqrt(k / (n - k)) and sqrt((n - k) / k), and exactly 0 where all rewards of a group are equal. Source:
    group-relative advantage of GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1.2.
    """
    failures = group_size - successes
    mixed = (successes > 0) & (failures > 0)
    odds = jnp.where(mixed, successes, 1.0) / jnp.where(mixed, failures, 1.0)
    return Advantages(jnp.where(mixed, -jnp.sqrt(odds), 0.0), jnp.where(mixed, jnp.sqrt(1.0 / odds), 0.0))


def group_advantages(rewards: Float[Array, "group episode *run"]) -> Float[Array, "group episode *run"]:
    """`outcome_advantages` as one number per episode."""
    failure, success = outcome_advantages(total(rewards, axis=1), rewards.shape[1])
    return jnp.where(rewards > 0, success[:, None], failure[:, None])


def retention_weights(successes: Float[Array, "group *run"], group_size: int) -> Advantages:
    """Rejection sampling as an advantage: 0 for a failure, episodes / retained episodes for a success."""
    retained = jnp.maximum(total(successes), 1.0)
    weight = jnp.broadcast_to(successes.shape[0] * group_size / retained, successes.shape)
    return Advantages(jnp.zeros_like(successes), weight)


@partial(stage, static_argnames="method")
def advantages(rewards: Float[Array, "group episode *run"], *, method: str) -> Advantages:
    """What each group's failures and successes are credited with under a method."""
    successes = total(rewards, axis=1)
    return (retention_weights if method == "rs-sft" else outcome_advantages)(successes, rewards.shape[1])


def state_credit(
    episodes: Episodes,
    rewards: Float[Array, "group episode *run"],
    advantages: Advantages,
) -> Credit:
    """Sums a batch over (state, action): what the loss of the table policy depends on.

    An episode of length n adds 1/n of its advantage to each of its choices. Since 60/n is whole, the sums over a
    group are made in integers, three of them in the bits of one: exact, whatever the order.
    """
    groups, group_size, *run_shape = rewards.shape
    part = min(group_size, _PART)
    packed, shares = episodes.packed, _episode_shares(episodes, rewards)
    if group_size % part:
        padding = [(0, 0), (0, -group_size % part)] + [(0, 0)] * len(run_shape)
        packed, shares = jnp.pad(packed, padding), jnp.pad(shares, padding)
    packed, shares = (array.reshape(-1, part, *run_shape) for array in (packed, shares))
    sums = _sums_by_choice(packed, shares)
    if len(packed) > groups:
        advantages = Advantages(*(jnp.repeat(advantage, len(packed) // groups, axis=0) for advantage in advantages))
    return _credit_of_sums(sums, advantages, scale=1.0 / (_SHARES * groups * group_size))


_SHARES = 60  # divisible by every episode length
_FIELD = 12  # bits; two of them hold the shares of 64 episodes, and the rest of an int32 their number
_PART = 32  # episodes of a group that are summed in one loop


@stage
def _episode_shares(
    episodes: Episodes, rewards: Float[Array, "group episode *run"]
) -> Int[Array, "group episode *run"]:
    """From the lowest bits on: 60 / length if the episode failed, 60 / length if it succeeded, and 1."""
    by_length = jnp.array([0] + [_SHARES // length for length in range(1, MAX_STEPS + 1)], jnp.int32)
    shares = pick(by_length, episodes.lengths)
    return jnp.where(rewards > 0, shares << _FIELD, shares) + (1 << 2 * _FIELD)


@stage
def _sums_by_choice(
    packed: Int[Array, "part episode *run"], shares: Int[Array, "part episode *run"]
) -> Int[Array, "part 6 24 *run"]:
    """Sums of the shares of the episodes that made each of the 24 choices at each step."""
    steps = CHOICE_BITS * np.arange(MAX_STEPS, dtype=np.int32).reshape(-1, 1, *[1] * (packed.ndim - 2))
    choices = np.arange(NUM_VARIANTS * NUM_ACTIONS, dtype=np.int32).reshape(-1, *[1] * (packed.ndim - 2))
    field, value = (2**CHOICE_BITS - 1) << steps, (1 + choices) << steps
    terms = [
        jnp.where(packed[:, episode, None, None] & field == value, shares[:, episode, None, None], 0)
        for episode in range(packed.shape[1])
    ]
    return functools.reduce(jnp.add, terms)


@partial(stage, static_argnames="scale")
def _credit_of_sums(
    sums: Int[Array, "part 6 24 *run"],
    advantages: Advantages,
    *,
    scale: float,
) -> Credit:
    mask = 2**_FIELD - 1
    failed, succeeded = ((field & mask).astype(jnp.float32) * scale for field in (sums, sums >> _FIELD))
    by_state_and_action = (
        total(succeeded * advantages.success[:, None, None]),
        total(failed * advantages.failure[:, None, None]),
        total((sums >> 2 * _FIELD).astype(jnp.float32)),
        total(failed + succeeded),
    )
    plus, minus, counts, visits = (
        array.reshape(NUM_STATES, NUM_ACTIONS, *sums.shape[3:]) for array in by_state_and_action
    )
    return Credit(plus, minus, counts, total(visits, axis=1))


class Merged(NamedTuple):
    """A batch with repeated episodes merged; the rows past `filled` are padding."""

    episodes: Episodes
    """[row]"""
    first: Int[Array, " row"]
    """Which of the batch's episodes, flattened, is the first of each row."""
    filled: Int[Array, ""]


def history_credit(
    episodes: Episodes, rewards: Float[Array, "group episode"], advantages: Advantages, rows: int
) -> tuple[Merged, Credit]:
    """Sums a batch over (row, step) and action: what the loss of a policy that sees histories depends on.

    A row is an episode, or several that took the same actions; it counts as often as it was played.

    Args:
      episodes: the batch.
      rewards: of each episode, 0 or 1.
      advantages: what each group's failures and successes are credited with.
      rows: of the result, at least the episodes of the batch.
    """
    count = rewards.size
    packed, first, row_of = jnp.unique(
        episodes.packed.ravel(), return_index=True, return_inverse=True, size=rows, fill_value=0
    )
    merged = Merged(Episodes(packed), first, jnp.max(row_of) + 1)
    credited = jnp.where(rewards > 0, advantages.success[:, None], advantages.failure[:, None])
    share = 1.0 / (episodes.lengths * count)
    per_episode = jnp.stack(
        [jnp.maximum(credited, 0.0) * share, jnp.minimum(credited, 0.0) * share, jnp.ones_like(share), share]
    )
    sums = jnp.zeros((rows, 4)).at[row_of.ravel()].add(per_episode.reshape(4, -1).T)  # [row, what]
    choices = jnp.stack([merged.episodes.choice(step) for step in range(MAX_STEPS)], axis=1)[:, :, None]
    taken = (choices >= 0) & (choices % NUM_ACTIONS == jnp.arange(NUM_ACTIONS))  # [row, step, action]
    plus, minus, counts = (jnp.where(taken, sums[:, i, None, None], 0.0).reshape(-1, NUM_ACTIONS) for i in range(3))
    visits = jnp.where(taken.any(axis=2), sums[:, 3, None], 0.0).ravel()
    return merged, Credit(plus, minus, counts, visits)


def surrogate(
    log_probs: Float[AnyArray, "context action *batch"],
    behavior: Float[AnyArray, "context action *batch"],
    credit: Credit,
    clip: Float[AnyArray, "*run"],
) -> Float[AnyArray, "context action *batch"]:
    """The terms of the clipped surrogate objective: plus * min(ratio, 1 + clip) + minus * max(ratio, 1 - clip).

    Their sum is the mean over episodes of the mean over their actions of
    min(ratio * advantage, clamp(ratio, 1 - clip, 1 + clip) * advantage). Source: Schulman et al. 2017
    (arXiv 1707.06347), equation 7.
    """
    xp = log_probs.__array_namespace__()
    ratio = xp.exp(log_probs - behavior)
    below = xp.where(ratio < 1.0 + clip, ratio, 1.0 + clip)
    above = xp.where(ratio > 1.0 - clip, ratio, 1.0 - clip)
    return credit.plus * below + credit.minus * above


def kl_terms(
    log_probs: Float[AnyArray, "context action *batch"], reference: Float[AnyArray, "context action *batch"]
) -> Float[AnyArray, "context action *batch"]:
    """The terms p * (log p - log q): their sum over the actions is KL(policy || reference), exactly."""
    return log_probs.__array_namespace__().exp(log_probs) * (log_probs - reference)


def loss_terms(
    log_probs: Float[AnyArray, "context action *batch"],
    behavior: Float[AnyArray, "context action *batch"],
    reference: Float[AnyArray, "context action *batch"],
    credit: Credit,
    settings: Settings,
    method: str,
) -> Float[AnyArray, "context action *batch"]:
    """What is minimized is the sum of these.

    grpo: -surrogate + beta * KL, the KL weighted by visits. rs-sft: -log p of the retained actions, their mean over
    an episode's actions, then over the retained episodes; 0 where none is retained.
    """
    if method == "rs-sft":
        return -credit.plus * log_probs
    kl = credit.visits[:, None] * kl_terms(log_probs, reference)
    return settings.beta * kl - surrogate(log_probs, behavior, credit, settings.clip)


def measure(
    log_probs: Float[AnyArray, "context action *batch"],
    behavior: Float[AnyArray, "context action *batch"],
    reference: Float[AnyArray, "context action *batch"],
    credit: Credit,
    settings: Settings,
    method: str,
) -> dict[str, Float[AnyArray, "*batch"]]:
    """The figures of one optimizer step, before it is taken.

    Returns:
      loss: the loss.
      mean_kl: KL(policy || reference), averaged over the sampled actions.
      ratio_outside_clip_fraction: the share of the sampled actions whose ratio lies outside [1 - clip, 1 + clip],
        whatever their advantage.
      entropy: the policy's entropy in nats, averaged over the sampled actions.
    """
    xp = log_probs.__array_namespace__()
    ratio = xp.exp(log_probs - behavior)
    outside = (ratio < 1.0 - settings.clip) | (ratio > 1.0 + settings.clip)
    counts = credit.counts.sum(axis=1)
    share = counts / _over_contexts(counts)
    terms = loss_terms(log_probs, behavior, reference, credit, settings, method).sum(axis=1)
    return {
        "loss": _over_contexts(terms),
        "mean_kl": _over_contexts(share * kl_terms(log_probs, reference).sum(axis=1)),
        "ratio_outside_clip_fraction": _over_contexts((credit.counts * outside).sum(axis=1)) / _over_contexts(counts),
        "entropy": -_over_contexts(share * (xp.exp(log_probs) * log_probs).sum(axis=1)),
    }


def _over_contexts(array: Float[AnyArray, "context *batch"]) -> Float[AnyArray, "*batch"]:
    """The sum over the contexts, by adding halves: NumPy's own sum rounds otherwise for other batch shapes."""
    xp = array.__array_namespace__()
    while len(array) > 1:
        half = len(array) // 2
        paired = array[:half] + array[half : 2 * half]
        array = xp.concatenate([paired, array[2 * half :]]) if len(array) % 2 else paired
    return array[0]
