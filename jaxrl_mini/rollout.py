"""Episodes sampled from a policy through the transition tables."""

import functools
import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxrl_mini.task import MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS, TABLES
from jaxrl_mini.types import CHOICE_BITS, Episodes, Seeds
from jaxrl_mini.xla import pick, stage

TRAINING, EVALUATION = 0, 1
"""Streams of random numbers."""


@jax.jit
def threefry2x32(
    key: tuple[UInt32[Array, "*#shape"], UInt32[Array, "*#shape"]],
    counter: tuple[UInt32[Array, "*#shape"], UInt32[Array, "*#shape"]],
) -> tuple[UInt32[Array, "*#shape"], UInt32[Array, "*#shape"]]:
    """The counter-based generator behind `jax.random` (Salmon et al. 2011, doi:10.1145/2063384.2063405).

    The same function as jax's, but over broadcast arrays of keys and counters in any layout, so that the draws of
    many runs come out with the run axis last.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for block in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation)))
        x, y = x + keys[(block + 1) % 3], y + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x, y


def draw_uniforms(
    seeds: Seeds, stream: int, iteration: Int[Array, ""], groups: int, group_size: int
) -> list[Float[Array, "group episode *run"]]:
    """A uniform number per step of every episode: multiples of 2^-24 in [0, 1), one array per step.

    Each is a function of (seed, stream, iteration, number of the episode in the batch, step) alone.
    """
    zero = jnp.zeros_like(seeds)
    key = threefry2x32((zero, seeds), (zero + np.uint32(stream), zero + jnp.asarray(iteration, jnp.uint32)))
    episode = np.arange(groups * group_size, dtype=np.uint32).reshape(groups, group_size, *[1] * seeds.ndim)
    pairs = [threefry2x32(key, (jnp.asarray(episode), jnp.uint32(pair))) for pair in range(MAX_STEPS // 2)]
    return [(bits >> 8).astype(jnp.float32) * np.float32(2**-24) for pair in pairs for bits in pair]


def rollout(
    probs: Float[Array, "24 6 *run"],
    seeds: Seeds,
    iteration: Int[Array, ""],
    *,
    stream: int,
    groups: int,
    group_size: int,
) -> Episodes:
    """Plays a batch of episodes per run with a policy over the 24 states.

    An action is drawn by inversion: its number is how many cumulative probabilities, of the first five actions in
    their order, lie at or below the uniform number.

    Args:
      probs: probabilities of the actions in every state.
      seeds: a seed per run; with `iteration` and `stream` it decides the episodes.
      iteration: the number of the batch.
      stream: `TRAINING` or `EVALUATION`.
      groups: groups in the batch.
      group_size: episodes in a group.
    """
    by_step = probs.reshape(MAX_STEPS, NUM_VARIANTS, NUM_ACTIONS, *probs.shape[2:])
    return _play(by_step, seeds, iteration, stream=stream, groups=groups, group_size=group_size)


@partial(stage, static_argnames=("stream", "groups", "group_size"))
def _play(
    probs: Float[Array, "6 4 6 *run"],
    seeds: Seeds,
    iteration: Int[Array, ""],
    *,
    stream: int,
    groups: int,
    group_size: int,
) -> Episodes:
    """Plays whole episodes in one loop."""
    uniforms = draw_uniforms(seeds, stream, iteration, groups, group_size)
    variants = packed = jnp.zeros(uniforms[0].shape, jnp.int32)
    active = packed + 1
    for step in range(MAX_STEPS):
        by_action = [probs[step, :, action] for action in range(NUM_ACTIONS - 1)]
        actions = _draw_actions(by_action, uniforms[step], variants)
        choice, variants, active = _move(actions, variants, active, step=step)
        packed |= (choice + 1) << CHOICE_BITS * step
    return Episodes(packed)


@jax.jit
def _draw_actions(
    probs: list[Float[Array, "4 *run"]],
    uniforms: Float[Array, "group episode *run"],
    variants: Int[Array, "group episode *run"],
) -> Int[Array, "group episode *run"]:
    """Actions by inversion of their cumulative probabilities; the last action's is not needed."""
    actions, below = jnp.zeros_like(variants), jnp.zeros(())
    for prob in probs:
        below += pick(prob, variants)
        actions += (uniforms >= below).astype(jnp.int32)
    return actions


def _move(
    actions: Int[Array, "*batch"], variants: Int[Array, "*batch"], active: Int[Array, "*batch"], *, step: int
) -> tuple[Int[Array, "*batch"], Int[Array, "*batch"], Int[Array, "*batch"]]:
    """Takes one step through the tables.

    Returns:
      The choices, variant * 6 + action, -1 where an episode had ended; the artifacts after the step; and which
      episodes go on.
    """
    moves = np.argwhere(TABLES.next_variant[step] != np.arange(NUM_VARIANTS)[:, None])
    rules = tuple((int(v) * NUM_ACTIONS + int(a), int(TABLES.next_variant[step, v, a])) for v, a in moves)
    endings = tuple(int(v) * NUM_ACTIONS + int(a) for v, a in np.argwhere(TABLES.ends[step]))
    return _apply(actions, variants, active, rules=rules, endings=endings)


@partial(jax.jit, static_argnames=("rules", "endings"))
def _apply(
    actions: Array, variants: Array, active: Array, *, rules: tuple[tuple[int, int], ...], endings: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    choice = jnp.where(active > 0, variants * NUM_ACTIONS + actions, -1)
    for moved, variant in rules:
        variants = jnp.where(choice == moved, variant, variants)
    for ending in endings:
        active = jnp.where(choice == ending, 0, active)
    return choice, variants, active


def episodes_from_actions(actions: Int[Array, "6 group episode *run"]) -> Episodes:
    """Plays given actions, -1 after the end, through the tables."""
    variants = packed = jnp.zeros(actions.shape[1:], jnp.int32)
    active = packed + 1
    for step in range(MAX_STEPS):
        choice, variants, active = _move(actions[step], variants, active, step=step)
        packed |= (choice + 1) << CHOICE_BITS * step
    return Episodes(packed)


def grade(
    episodes: Episodes, verdicts: Bool[Array | np.ndarray, "group variant"]
) -> Float[Array | np.ndarray, "group episode *run"]:
    """Rewards: 1 where an artifact was submitted that the group's verdicts accept, else 0."""
    accepted = verdicts.reshape(*verdicts.shape, *[1] * (episodes.packed.ndim - 1))
    passed = [episodes.submitted(variant) & accepted[:, variant] for variant in range(NUM_VARIANTS)]
    return functools.reduce(operator.or_, passed).astype(np.float32)
