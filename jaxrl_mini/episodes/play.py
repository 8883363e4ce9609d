"""Episodes of any task, sampled from a table policy through the task's tables, and graded after their end.

All episodes of a group play one instance. What is random, each from a stream of its own: the instance, by (seed,
iteration, group); actions, draws of chance and the verifier's, by (seed, iteration, number of the episode, step).
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_mini.episodes.rollout import key_of, threefry2x32, uniforms_of
from jaxrl_mini.machine.xla import stage, unless_numpy
from jaxrl_mini.tasks.dynamics import Dynamics
from jaxrl_mini.types import AnyArray, Seeds

CHANCE, INSTANCE, VERDICT = 4, 8, 12
"""Added to a stream's number: what is drawn beside the actions."""
SPLIT = 16
"""Between the evaluation streams of a task's splits."""


class Play(NamedTuple):
    """A batch of episodes after their end."""

    choices: Int[AnyArray, "step group episode run"]
    """What was done where: view * actions + action, -1 after the end."""
    submission: Int[AnyArray, "group episode run"]
    """What was handed in, counted from 1; 0 for nothing."""
    instance: Int[AnyArray, "group run"]

    @property
    def lengths(self) -> Int[AnyArray, "group episode run"]:
        """Actions per episode."""
        return (self.choices >= 0).sum(axis=0, dtype="int32")


def play(
    probs: Float[Array, "context action run"],
    seeds: Seeds,
    iteration: int | Int[Array, ""],
    tables: Dynamics,
    members: Int[AnyArray, " member"],
    *,
    stream: int,
    groups: int,
    group_size: int,
) -> Play:
    """Plays a batch of episodes per run.

    Args:
      probs: probabilities of the actions in every context, step * views + view.
      seeds: a seed per run.
      iteration: the number of the batch.
      tables: of the task.
      members: the instances of the split that is played, equally likely.
      stream: with `seeds` and `iteration` it decides the episodes.
      groups: groups in the batch.
      group_size: episodes in a group.
    """
    steps, rows, actions, draws = tables.next_row.shape
    batch = groups, group_size, *seeds.shape
    by_step = probs.reshape(steps, -1, *probs.shape[1:])
    keys = {name: key_of(seeds, iteration, stream=stream + name) for name in (0, CHANCE, INSTANCE)}
    instance = instances(keys[INSTANCE], members, groups=groups)
    first = drawn(tables.start_bounds, instance[:, None], uniforms_of(keys[CHANCE], steps, batch))
    row = jnp.take(tables.start_row.ravel(), first, mode="clip")

    def step(before: tuple[Array, Array], here: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        (row, submission), (number, policy, view, bounds, next_row, handed_in) = before, here
        seen = jnp.take(view, row, mode="clip")
        action = _action(policy, seen, uniforms_of(keys[0], number, batch))
        place = jnp.minimum(row, rows - 1) * actions + action
        if draws > 1:
            place = drawn(bounds.reshape(rows * actions, -1), place, uniforms_of(keys[CHANCE], number, batch))
        after, submission = _after(row, submission, place, next_row.ravel(), handed_in.ravel(), rows=rows)
        return (after, submission), jnp.where(row < rows, seen * actions + action, -1)

    here = jnp.arange(steps), by_step, tables.view, tables.bounds, tables.next_row, tables.submission
    (_, submission), choices = lax.scan(step, (row, jnp.zeros(batch, jnp.int32)), here)
    return Play(choices, submission, instance)


@partial(unless_numpy, compile=stage, static_argnames="groups")
def instances(
    key: UInt32[AnyArray, "2 run"], members: Int[AnyArray, " member"], *, groups: int
) -> Int[AnyArray, "group run"]:
    """The instance that each group plays."""
    xp = key.__array_namespace__()
    group = xp.arange(groups, dtype=xp.uint32)[:, None]
    bits, _ = threefry2x32((key[0], key[1]), (group, xp.zeros_like(group)))
    return xp.take(members, (bits % xp.uint32(members.shape[0])).astype(xp.int32), mode="clip")


@stage
def _action(
    policy: Float[Array, "view action run"],
    seen: Int[Array, "group episode run"],
    uniforms: Float[Array, "group episode run"],
) -> Int[Array, "group episode run"]:
    """By inversion, as `rollout.rollout` draws."""
    runs = policy.shape[-1]
    below, action = jnp.zeros_like(policy[:, 0]), jnp.zeros_like(seen)
    flat = seen.reshape(-1, runs)
    for number in range(policy.shape[1] - 1):
        below = below + policy[:, number]
        bound = jnp.take_along_axis(below, flat, axis=0, mode="clip").reshape(seen.shape)
        action = action + (uniforms >= bound).astype(jnp.int32)
    return action


@partial(unless_numpy, compile=stage)
def drawn(
    bounds: Float[AnyArray, "place bound"], place: Int[AnyArray, "..."], uniforms: Float[AnyArray, "group episode run"]
) -> Int[AnyArray, "group episode run"]:
    """Place * draws + the number of the draw."""
    xp = place.__array_namespace__()
    found = xp.broadcast_to(place * (bounds.shape[1] + 1), uniforms.shape)
    for number in range(bounds.shape[1]):
        found = found + (uniforms >= xp.take(bounds[:, number], place, mode="clip")).astype(xp.int32)
    return found


@partial(stage, static_argnames="rows")
def _after(
    row: Int[Array, "*batch"],
    submission: Int[Array, "*batch"],
    place: Int[Array, "*batch"],
    next_row: Int[Array, " place"],
    handed_in: Int[Array, " place"],
    *,
    rows: int,
) -> tuple[Int[Array, "*batch"], Int[Array, "*batch"]]:
    over = row == rows
    return (
        jnp.where(over, row, jnp.take(next_row, place, mode="clip")),
        jnp.where(over, submission, jnp.take(handed_in, place, mode="clip")),
    )


@partial(stage, static_argnames="stream")
def grade(
    played: Play,
    accepted: Float[AnyArray, "outcome instance"],
    seeds: Seeds,
    iteration: int | Int[Array, ""],
    *,
    stream: int,
) -> Float[Array, "group episode run"]:
    """The private verifier's verdicts, 0 or 1, by its probabilities; those of no submission are 0."""
    chance = accepted[played.submission, played.instance[:, None]]
    drawn = uniforms_of(key_of(seeds, iteration, stream=stream + VERDICT), 0, chance.shape)
    return (drawn < chance).astype(jnp.float32)
