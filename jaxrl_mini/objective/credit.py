"""Credit: what a batch's episodes are credited with, and the few sums its loss depends on, by (context, action).

An action's share says how steps and episodes are averaged, in a batch of N episodes:

- episode-mean: 1 / (length of its episode * N), the mean over an episode's actions, then over the episodes. Source:
  GRPO, Shao et al. 2024 (arXiv 2402.03300), equation 3; verl's `seq-mean-token-mean`.
- step-mean: 1 / (actions of the batch). Source: DAPO, Yu et al. 2025 (arXiv 2503.14476), which writes it over
  a group; verl's `token-mean` and TRL's `dapo` take it over the batch, as here.
- fixed-length: 1 / (L * N), where L is the longest episode's length, 6 in the article's task. With the reward as
  advantage, less a baseline of the other episodes or none, the expected gradient is that of the expected reward, by L;
  with episode-mean and no baseline it is that of the expectation of reward / length. Source: Dr. GRPO, Liu et al. 2025
  (arXiv 2503.20783). TRL's `dr_grpo` is the same; verl's `seq-mean-token-sum-norm` did not divide by N at first.
"""

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_mini.config import DEFAULT_VARIANT, Variant
from jaxrl_mini.episodes.packed import CHOICE_BITS, CHOICE_MASK, Episodes
from jaxrl_mini.episodes.play import Play
from jaxrl_mini.machine.xla import pick, stage, total
from jaxrl_mini.objective.advantage import credited, formula
from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, NUM_STATES, NUM_VARIANTS
from jaxrl_mini.types import Advantages, AnyArray, Credit


def shares(aggregation: str, steps: int) -> Float[np.ndarray, " length"]:
    """The share of an action by the length of its episode, from 1 to so many steps, times the episodes of the batch.

    Those of `step-mean` are up to its actions.
    """
    if aggregation == "episode-mean":
        return 1.0 / np.arange(1, steps + 1)
    return np.full(steps, 1.0 if aggregation == "step-mean" else 1.0 / steps)


@partial(stage, static_argnames=("method", "advantage"))
def advantages(rewards: Float[Array, "group episode *run"], *, method: str, advantage: str = "group-std") -> Advantages:
    """What each group's failures and successes are credited with under a method."""
    successes, function = total(rewards, axis=1), formula(advantage, method)

    def batch() -> tuple[Array, int]:
        return total(successes), rewards.shape[0] * rewards.shape[1]

    by_reward = (credited(function, reward, successes, rewards.shape[1], batch) for reward in (0.0, 1.0))
    return Advantages(*(jnp.broadcast_to(one, successes.shape) for one in by_reward))


def group_advantages(
    rewards: Float[Array, "group episode *run"], advantage: str = "group-std"
) -> Float[Array, "group episode *run"]:
    """The advantages of a batch as one number per episode."""
    failure, success = advantages(rewards, method="grpo", advantage=advantage)
    return jnp.where(rewards > 0, success[:, None], failure[:, None])


def state_credit(
    episodes: Episodes,
    rewards: Float[Array, "group episode *run"],
    advantages: Advantages,
    variant: Variant = DEFAULT_VARIANT,
) -> Credit:
    """Sums a batch over (state, action): what the loss of the table policy depends on.

    An episode of length n adds 1/n of its advantage to each of its choices. Since 60/n is whole, the sums over a
    group are made in integers, three of them in the bits of one: exact, whatever the order. The other aggregations
    add 1 in place of 60/n.
    """
    by_length = variant.aggregation == "episode-mean"
    groups, group_size, *run_shape = rewards.shape
    part = min(group_size, _PART)
    packed, shares = episodes.packed, _episode_shares(episodes.lengths, rewards, steps=MAX_STEPS, by_length=by_length)
    if group_size % part:
        padding = [(0, 0), (0, -group_size % part)] + [(0, 0)] * len(run_shape)
        packed, shares = jnp.pad(packed, padding), jnp.pad(shares, padding)
    packed, shares = (array.reshape(-1, part, *run_shape) for array in (packed, shares))
    sums = _sums_by_choice(packed, shares)
    if len(packed) > groups:
        advantages = Advantages(*(jnp.repeat(advantage, len(packed) // groups, axis=0) for advantage in advantages))
    credit = _credit_of_sums(
        sums.reshape(len(sums), NUM_STATES, NUM_ACTIONS, *run_shape),
        advantages,
        scale=1.0 / ((_whole_shares(MAX_STEPS) if by_length else MAX_STEPS) * groups * group_size),
        by_action=variant.kl != "exact",
    )
    return _per_step(credit) if variant.aggregation == "step-mean" else credit


def _whole_shares(steps: int) -> int:
    """A number that every episode length divides: 60 for up to 6 steps."""
    return math.lcm(*range(1, steps + 1))


_FIELD = 12  # bits; two of them hold the shares of 64 episodes, and the rest of an int32 their number
_PART = 32  # episodes of a group that are summed in one loop


@partial(stage, static_argnames=("steps", "by_length"))
def _episode_shares(
    lengths: Int[Array, "group episode *run"],
    rewards: Float[Array, "group episode *run"],
    *,
    steps: int,
    by_length: bool,
) -> Int[Array, "group episode *run"]:
    """From the lowest bits on: the share if the episode failed, the share if it succeeded, and 1.

    The share is 60 / length, where 60 is that of so many steps, or 1.
    """
    if by_length:
        whole = _whole_shares(steps)
        shares_by_length = jnp.array([0] + [whole // length for length in range(1, steps + 1)], jnp.int32)
        shares = pick(shares_by_length, lengths)
    else:
        shares = jnp.minimum(lengths, 1)
    return jnp.where(rewards > 0, shares << _FIELD, shares) + (1 << 2 * _FIELD)


@stage
def _sums_by_choice(
    packed: Int[Array, "part episode *run"], shares: Int[Array, "part episode *run"]
) -> Int[Array, "part 6 24 *run"]:
    """Sums of the shares of the episodes that made each of the 24 choices at each step."""
    steps = CHOICE_BITS * np.arange(MAX_STEPS, dtype=np.int32).reshape(-1, 1, *[1] * (packed.ndim - 2))
    choices = np.arange(NUM_VARIANTS * NUM_ACTIONS, dtype=np.int32).reshape(-1, *[1] * (packed.ndim - 2))
    field, value = CHOICE_MASK << steps, (1 + choices) << steps

    @jax.jit  # traced once, and inlined
    def shares_by_choice(packed: Array, shares: Array) -> Array:
        return jnp.where(packed & field == value, shares, 0)

    by_episode = (jax.lax.split(array[:, :, None], [1] * array.shape[1], axis=1) for array in (packed, shares))
    return functools.reduce(jnp.add, map(shares_by_choice, *by_episode))


@partial(stage, static_argnames=("scale", "by_action"))
def _credit_of_sums(
    sums: Int[Array, "part context action *run"],
    advantages: Advantages,
    *,
    scale: float,
    by_action: bool,
) -> Credit:
    mask = 2**_FIELD - 1
    failed, succeeded = ((field & mask).astype(jnp.float32) * scale for field in (sums, sums >> _FIELD))
    by_state_and_action = (
        total(succeeded * advantages.success[:, None, None]),
        total(failed * advantages.failure[:, None, None]),
        total((sums >> 2 * _FIELD).astype(jnp.float32)),
        total(failed + succeeded),
    )
    plus, minus, counts, visits = by_state_and_action
    return Credit(plus, minus, counts, total(visits, axis=1), visits if by_action else None)


@stage
def _per_step(credit: Credit) -> Credit:
    """Shares of 1 / (actions of the batch), in place of equal shares of any size."""
    scale = 1.0 / total(credit.visits)
    taken = None if credit.taken is None else credit.taken * scale
    return Credit(credit.plus * scale, credit.minus * scale, credit.counts, credit.visits * scale, taken)


def play_credit(
    played: Play,
    rewards: Float[Array, "group episode run"],
    advantages: Advantages,
    variant: Variant = DEFAULT_VARIANT,
    *,
    views: int,
    actions: int,
) -> Credit:
    """`state_credit` for episodes of any task.

    The sums are those of integers, and exact, for up to 10 steps; beyond that, or where few of very many choices are
    made, they are float32, in the order of steps, groups and episodes.

    Args:
      played: the batch.
      rewards: of each episode, 0 or 1.
      advantages: what each group's failures and successes are credited with.
      variant: how the loss is put together.
      views: that a step has, at most.
      actions: of the task.
    """
    by_length, (groups, group_size, runs) = variant.aggregation == "episode-mean", rewards.shape
    steps, by_action, lengths = len(played.choices), variant.kl != "exact", played.lengths
    part = _part(group_size, steps if by_length else 1)
    if part and views * actions <= _COMPARED:
        shares = _episode_shares(lengths, rewards, steps=steps, by_length=by_length)
        choices = played.choices
        if group_size % part:
            choices = jnp.pad(choices, [(0, 0), (0, 0), (0, -group_size % part), (0, 0)], constant_values=-1)
            shares = jnp.pad(shares, [(0, 0), (0, -group_size % part), (0, 0)])
        choices, shares = choices.reshape(steps, -1, part, runs), shares.reshape(-1, part, runs)
        sums = _sums_of_choices(choices, shares, number=views * actions)
        if len(shares) > groups:
            advantages = Advantages(*(jnp.repeat(one, len(shares) // groups, axis=0) for one in advantages))
        scale = 1.0 / ((_whole_shares(steps) if by_length else steps) * groups * group_size)
        sums = sums.reshape(len(sums), steps * views, actions, runs)
        credit = _credit_of_sums(sums, advantages, scale=scale, by_action=by_action)
    else:
        share = 1.0 / (groups * group_size * (lengths if by_length else jnp.full_like(lengths, steps)))
        success, failure = (one[:, None] * share for one in (advantages.success, advantages.failure))
        values = jnp.where(rewards > 0, success, 0.0), jnp.where(rewards > 0, 0.0, failure), share, share * 0.0 + 1.0
        added = (_added_up(played.choices, one, number=views * actions) for one in values)
        plus, minus, taken, counts = (one.reshape(steps * views, actions, runs) for one in added)
        credit = Credit(plus, minus, counts, total(taken, axis=1), taken if by_action else None)
    return _per_step(credit) if variant.aggregation == "step-mean" else credit


_COMPARED = 640
"""Choices of a step, up to which each is compared with every episode's: XLA's CPU backend scatters one by one."""


def _part(group_size: int, steps: int) -> int:
    """Episodes of a group whose sums fit in two fields and a count; 0 if those of none do."""
    part = min(group_size, _PART)
    while part and part * _whole_shares(steps) >= 1 << _FIELD:
        part //= 2
    return part


@partial(stage, static_argnames="number")
def _sums_of_choices(
    choices: Int[Array, "step part episode run"], shares: Int[Array, "part episode run"], *, number: int
) -> Int[Array, "part step choice run"]:
    """Sums of the shares of the episodes that made each choice at each step."""
    every = jnp.arange(number, dtype=jnp.int32)[:, None]
    each = zip(jnp.moveaxis(choices, 2, 0), jnp.moveaxis(shares, 1, 0), strict=True)  # [step, part, run], [part, run]
    parts = (
        jnp.where(jnp.moveaxis(choice, 0, 1)[:, :, None] == every, share[:, None, None], 0) for choice, share in each
    )
    return functools.reduce(jnp.add, parts)


@partial(stage, static_argnames="number")
def _added_up(
    choices: Int[Array, "step group episode run"], values: Float[Array, "group episode run"], *, number: int
) -> Float[Array, "step choice run"]:
    """Sums of the values of the episodes that made each choice at each step."""
    steps, runs = len(choices), choices.shape[-1]
    choices = jnp.where(choices < 0, number, choices).reshape(steps, -1, runs)  # the last row is for no choice
    step, run = jnp.arange(steps)[:, None, None], jnp.arange(runs)
    zeros = jnp.zeros((steps, number + 1, runs), jnp.float32)
    return zeros.at[step, choices, run].add(values.reshape(-1, runs)[None], mode="promise_in_bounds")[:, :number]


class Merged(NamedTuple):
    """Which episodes of a batch are repetitions: a row is an episode, or several that were and saw the same."""

    first: Int[AnyArray, " row"]
    """Which of the batch's episodes, flattened, is the first of each row; any for the rows that are padding."""
    row_of: Int[AnyArray, " batch"]
    filled: Int[AnyArray, ""]
    """The rows past these are padding."""


def merge(episodes: Sequence[Int[np.ndarray, "... batch"]], rows: int) -> Merged:
    """Merges episodes that are alike in all of some arrays, in the order of the last step, then of the one before.

    Args:
      episodes: what was done and seen, -1 after the end of an episode.
      rows: of the result, at least the episodes of the batch.
    """
    keys = np.concatenate([array[::-1].T for array in episodes], axis=1)
    _, first, row_of = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    padded = np.pad(first, (0, rows - len(first)))
    return Merged(padded.astype(np.int32), row_of.ravel().astype(np.int32), np.int32(len(first)))


def history_credit(
    merged: Merged,
    taken: Int[Array, "step batch"],
    rewards: Float[Array, "group episode"],
    advantages: Advantages,
    variant: Variant = DEFAULT_VARIANT,
    *,
    actions: int,
) -> tuple[Int[Array, "step row"], Credit]:
    """Sums a batch over (row, step) and action: what the loss of a policy that sees histories depends on.

    A row counts as often as it was played.

    Args:
      merged: the rows.
      taken: actions of the batch's episodes, -1 after the end.
      rewards: of each episode, 0 or 1.
      advantages: what each group's failures and successes are credited with.
      variant: how the loss is put together.
      actions: of the task.

    Returns:
      The rows' actions, -1 after the end and in padding; and the sums.
    """
    count, rows, steps = rewards.size, len(merged.first), len(taken)
    lengths = jnp.sum(taken >= 0, axis=0).reshape(rewards.shape)
    credited = jnp.where(rewards > 0, advantages.success[:, None], advantages.failure[:, None])
    if variant.aggregation == "episode-mean":
        share = 1.0 / (lengths * count)
    else:
        all_steps = jnp.sum(lengths) if variant.aggregation == "step-mean" else steps * count
        share = jnp.broadcast_to(1.0 / all_steps, lengths.shape)
    per_episode = jnp.stack(
        [jnp.maximum(credited, 0.0) * share, jnp.minimum(credited, 0.0) * share, jnp.ones_like(share), share]
    )
    sums = jnp.zeros((rows, 4)).at[merged.row_of].add(per_episode.reshape(4, -1).T)  # [row, what]
    own = jnp.where(jnp.arange(rows) < merged.filled, taken[:, merged.first], -1)  # [step, row]
    chosen = own.T[:, :, None] == jnp.arange(actions)  # [row, step, action]
    plus, minus, counts = (jnp.where(chosen, sums[:, i, None, None], 0.0).reshape(-1, actions) for i in range(3))
    visits = jnp.where(chosen.any(axis=2), sums[:, 3, None], 0.0).ravel()
    shares = jnp.where(chosen, sums[:, 3, None, None], 0.0).reshape(-1, actions) if variant.kl != "exact" else None
    return own, Credit(plus, minus, counts, visits, shares)
