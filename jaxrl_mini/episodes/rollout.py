"""Episodes sampled from a policy through the transition tables.

Inside of jitted programs and, on NumPy arrays, outside of them, with the same results to the bit.
"""

import functools
import operator
from functools import partial

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from jaxrl_mini.episodes.packed import CHOICE_BITS, CHOICE_MASK, Episodes
from jaxrl_mini.machine.xla import entry, pick, repeat, stage, unless_numpy
from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS
from jaxrl_mini.tasks.tables import TABLES
from jaxrl_mini.types import AnyArray, Seeds

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
        x, y = _four_rounds(x, y, rotations=((13, 15, 26, 6), (17, 29, 16, 24))[block % 2])
        x, y = x + keys[(block + 1) % 3], y + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x, y


@partial(unless_numpy, static_argnames="rotations")
def _four_rounds(x: Shaped[AnyArray, "..."], y: AnyArray, *, rotations: tuple[int, ...]) -> tuple[AnyArray, AnyArray]:
    for rotation in rotations:
        x = x + y
        y = x ^ ((y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation)))
    return x, y


def draw_uniforms(
    seeds: Seeds, stream: int, iteration: int | Int[AnyArray, ""], groups: int, group_size: int
) -> list[Float[AnyArray, "group episode *run"]]:
    """A uniform number per step of every episode: multiples of 2^-24 in [0, 1), one array per step.

    Each is a function of (seed, stream, iteration, number of the episode in the batch, step) alone.
    """
    key, batch = key_of(seeds, iteration, stream=stream), (groups, group_size, *seeds.shape)
    return [uniforms_of(key, step, batch) for step in range(MAX_STEPS)]


@partial(unless_numpy, compile=stage, static_argnames="stream")
def key_of(seeds: Seeds, iteration: int | Int[AnyArray, ""], *, stream: int) -> UInt32[AnyArray, "2 *run"]:
    """The two words that all numbers of a batch are drawn with."""
    xp = seeds.__array_namespace__()
    zero = xp.zeros_like(seeds)
    counter = zero + np.uint32(stream), zero + xp.asarray(iteration, dtype=xp.uint32)
    first_or_second = xp.broadcast_to(xp.arange(2).reshape(2, *[1] * seeds.ndim), (2, *seeds.shape))
    return pick(threefry2x32((zero, seeds), counter), first_or_second)


def uniforms_of(
    key: UInt32[AnyArray, "2 *run"], step: int | Int[AnyArray, ""], batch: tuple[int, ...]
) -> Float[AnyArray, "group episode *run"]:
    """The numbers of a step; a call of the generator has those of two."""
    xp = key.__array_namespace__()
    groups, group_size, *run_shape = batch
    episode = xp.arange(groups * group_size, dtype=xp.uint32).reshape(groups, group_size, *[1] * len(run_shape))
    first, second = threefry2x32((key[0], key[1]), (episode, xp.full_like(episode, step >> 1)))
    bits = xp.where(step & 1, second, first)
    return (bits >> 8).astype(xp.float32) * np.float32(2**-24)


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
    xp, run_shape = seeds.__array_namespace__(), probs.shape[2:]
    by_step = probs.reshape(MAX_STEPS, NUM_VARIANTS, NUM_ACTIONS, *run_shape)
    play_step = partial(_play_step, by_step, key_of(seeds, iteration, stream=stream))
    return Episodes(repeat(MAX_STEPS, play_step, xp.zeros((groups, group_size, *run_shape), dtype=xp.int32)))


@partial(unless_numpy, compile=stage)
def _play_step(
    probs: Float[AnyArray, "6 4 6 *run"],
    key: UInt32[AnyArray, "2 *run"],
    step: int | Int[AnyArray, ""],
    packed: Int[AnyArray, "group episode *run"],
) -> Int[AnyArray, "group episode *run"]:
    artifacts, uniforms = _artifacts(packed, step), uniforms_of(key, step, packed.shape)
    xp = packed.__array_namespace__()
    actions, below = xp.zeros_like(packed), xp.zeros_like(uniforms)
    for action in range(NUM_ACTIONS - 1):
        below = below + pick([entry(probs, step, variant, action) for variant in range(NUM_VARIANTS)], artifacts)
        actions = actions + (uniforms >= below).astype(xp.int32)
    return _packed(packed, step, artifacts, actions)


_AFTER = [NUM_VARIANTS, *np.where(TABLES.ends, NUM_VARIANTS, TABLES.next_variant)[0].ravel().tolist()]
"""What a packed choice leads to, at whatever step: an artifact, or `NUM_VARIANTS` where the episode is over."""


def _artifacts(packed: Int[AnyArray, "*batch"], step: int | Int[AnyArray, ""]) -> Int[AnyArray, "*batch"]:
    """The artifacts before a step; `NUM_VARIANTS` where an episode is over."""
    # As if one more choice, which leads to the first artifact, came before all others.
    last = ((packed << CHOICE_BITS | _AFTER.index(0)) >> CHOICE_BITS * step) & CHOICE_MASK
    bits = range(NUM_VARIANTS.bit_length())
    columns = [sum((after >> bit & 1) << choice for choice, after in enumerate(_AFTER)) for bit in bits]
    return functools.reduce(operator.or_, [(column >> last & 1) << bit for bit, column in enumerate(columns)])


def _packed(
    packed: Int[AnyArray, "*batch"],
    step: int | Int[AnyArray, ""],
    artifacts: Int[AnyArray, "*batch"],
    actions: Int[AnyArray, "*batch"],
) -> Int[AnyArray, "*batch"]:
    """Episodes with one more step."""
    xp = packed.__array_namespace__()
    choices = xp.where(artifacts < NUM_VARIANTS, 1 + artifacts * NUM_ACTIONS + actions, 0)
    return packed | choices << CHOICE_BITS * step


def episodes_from_actions(actions: Int[AnyArray, "6 group episode *run"]) -> Episodes:
    """Plays given actions, -1 after the end, through the tables."""
    xp = actions.__array_namespace__()
    packed = xp.zeros(actions.shape[1:], dtype=xp.int32)
    for step in range(MAX_STEPS):
        packed = _packed(packed, step, _artifacts(packed, step), actions[step])
    return Episodes(packed)


def grade(
    episodes: Episodes, verdicts: Bool[Array | np.ndarray, "group variant"]
) -> Float[Array | np.ndarray, "group episode *run"]:
    """Rewards: 1 where an artifact was submitted that the group's verdicts accept, else 0."""
    accepted = verdicts.reshape(*verdicts.shape, *[1] * (episodes.packed.ndim - 1))
    passed = [episodes.submitted(variant) & accepted[:, variant] for variant in range(NUM_VARIANTS)]
    return functools.reduce(operator.or_, passed).astype(np.float32)
