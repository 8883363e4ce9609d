"""Episodes sampled from a policy through the transition tables.

Inside of jitted programs and, on NumPy arrays, outside of them, with the same results to the bit.
"""

import functools
import operator
from functools import partial

import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxrl_mini.task import MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS, TABLES
from jaxrl_mini.types import CHOICE_BITS, AnyArray, Episodes, Seeds
from jaxrl_mini.xla import pick, stage, unless_numpy

TRAINING, EVALUATION = 0, 1
"""Streams of random numbers."""


@unless_numpy
def threefry2x32(
    key: tuple[UInt32[AnyArray, "*#shape"], UInt32[AnyArray, "*#shape"]],
    counter: tuple[UInt32[AnyArray, "*#shape"], UInt32[AnyArray, "*#shape"]],
) -> tuple[UInt32[AnyArray, "*#shape"], UInt32[AnyArray, "*#shape"]]:
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
    seeds: Seeds, stream: int, iteration: int | Int[AnyArray, ""], groups: int, group_size: int
) -> list[Float[AnyArray, "group episode *run"]]:
    """A uniform number per step of every episode: multiples of 2^-24 in [0, 1), one array per step.

    Each is a function of (seed, stream, iteration, number of the episode in the batch, step) alone.
    """
    xp = seeds.__array_namespace__()
    zero = xp.zeros_like(seeds)
    key = threefry2x32((zero, seeds), (zero + np.uint32(stream), zero + xp.asarray(iteration, dtype=xp.uint32)))
    episode = xp.arange(groups * group_size, dtype=xp.uint32).reshape(groups, group_size, *[1] * seeds.ndim)
    pairs = [threefry2x32(key, (episode, xp.full_like(episode, pair))) for pair in range(MAX_STEPS // 2)]
    return [(bits >> 8).astype(xp.float32) * np.float32(2**-24) for pair in pairs for bits in pair]


def rollout(
    probs: Float[AnyArray, "24 6 *run"],
    seeds: Seeds,
    iteration: int | Int[AnyArray, ""],
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


@partial(unless_numpy, compile=stage, static_argnames=("stream", "groups", "group_size"))
def _play(
    probs: Float[AnyArray, "6 4 6 *run"],
    seeds: Seeds,
    iteration: int | Int[AnyArray, ""],
    *,
    stream: int,
    groups: int,
    group_size: int,
) -> Episodes:
    """Plays whole episodes in one loop."""
    uniforms = draw_uniforms(seeds, stream, iteration, groups, group_size)
    xp = seeds.__array_namespace__()
    variants = packed = xp.zeros(uniforms[0].shape, dtype=xp.int32)
    active = packed + 1
    for step in range(MAX_STEPS):
        by_action = [probs[step, :, action] for action in range(NUM_ACTIONS - 1)]
        actions = _draw_actions(by_action, uniforms[step], variants)
        choice, variants, active = _move(actions, variants, active, step=step)
        packed = packed | (choice + 1) << CHOICE_BITS * step
    return Episodes(packed)


@unless_numpy
def _draw_actions(
    probs: list[Float[AnyArray, "4 *run"]],
    uniforms: Float[AnyArray, "group episode *run"],
    variants: Int[AnyArray, "group episode *run"],
) -> Int[AnyArray, "group episode *run"]:
    """Actions by inversion of their cumulative probabilities; the last action's is not needed."""
    xp = variants.__array_namespace__()
    actions, below = xp.zeros_like(variants), xp.zeros_like(uniforms)
    for prob in probs:
        below = below + pick(prob, variants)
        actions = actions + (uniforms >= below).astype(xp.int32)
    return actions


def _move(
    actions: Int[AnyArray, "*batch"], variants: Int[AnyArray, "*batch"], active: Int[AnyArray, "*batch"], *, step: int
) -> tuple[Int[AnyArray, "*batch"], Int[AnyArray, "*batch"], Int[AnyArray, "*batch"]]:
    """Takes one step through the tables.

    Returns:
      The choices, variant * 6 + action, -1 where an episode had ended; the artifacts after the step; and which
      episodes go on.
    """
    moves = np.argwhere(TABLES.next_variant[step] != np.arange(NUM_VARIANTS)[:, None])
    rules = tuple((int(v) * NUM_ACTIONS + int(a), int(TABLES.next_variant[step, v, a])) for v, a in moves)
    endings = tuple(int(v) * NUM_ACTIONS + int(a) for v, a in np.argwhere(TABLES.ends[step]))
    return _apply(actions, variants, active, rules=rules, endings=endings)


@partial(unless_numpy, static_argnames=("rules", "endings"))
def _apply(
    actions: AnyArray,
    variants: AnyArray,
    active: AnyArray,
    *,
    rules: tuple[tuple[int, int], ...],
    endings: tuple[int, ...],
) -> tuple[AnyArray, AnyArray, AnyArray]:
    xp = actions.__array_namespace__()
    choice = xp.where(active > 0, variants * NUM_ACTIONS + actions, -1)
    for moved, variant in rules:
        variants = xp.where(choice == moved, variant, variants)
    for ending in endings:
        active = xp.where(choice == ending, 0, active)
    return choice, variants, active


def episodes_from_actions(actions: Int[AnyArray, "6 group episode *run"]) -> Episodes:
    """Plays given actions, -1 after the end, through the tables."""
    xp = actions.__array_namespace__()
    variants = packed = xp.zeros(actions.shape[1:], dtype=xp.int32)
    active = packed + 1
    for step in range(MAX_STEPS):
        choice, variants, active = _move(actions[step], variants, active, step=step)
        packed = packed | (choice + 1) << CHOICE_BITS * step
    return Episodes(packed)


def grade(
    episodes: Episodes, verdicts: Bool[Array | np.ndarray, "group variant"]
) -> Float[Array | np.ndarray, "group episode *run"]:
    """Rewards: 1 where an artifact was submitted that the group's verdicts accept, else 0."""
    accepted = verdicts.reshape(*verdicts.shape, *[1] * (episodes.packed.ndim - 1))
    passed = [episodes.submitted(variant) & accepted[:, variant] for variant in range(NUM_VARIANTS)]
    return functools.reduce(operator.or_, passed).astype(np.float32)
