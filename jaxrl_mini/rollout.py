"""Episodes sampled from a policy through the transition tables."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxrl_mini.task import MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS, TABLES
from jaxrl_mini.types import CHOICE_BITS, Episodes, Seeds
from jaxrl_mini.xla import pick, stage

TRAINING, EVALUATION = 0, 1
"""Streams of random numbers."""


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
    log_probs: Float[Array, "24 6 *run"],
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
      log_probs: log-probabilities of the actions in every state.
      seeds: a seed per run; with `iteration` and `stream` it decides the episodes.
      iteration: the number of the batch.
      stream: `TRAINING` or `EVALUATION`.
      groups: groups in the batch.
      group_size: episodes in a group.
    """
    by_step = log_probs.reshape(MAX_STEPS, NUM_VARIANTS, NUM_ACTIONS, *log_probs.shape[2:])
    return _play(_probs(by_step), seeds, iteration, stream=stream, groups=groups, group_size=group_size)


_probs = stage(jnp.exp)


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
        action, below = jnp.zeros_like(variants), jnp.zeros(())
        for a in range(NUM_ACTIONS - 1):
            below += pick(probs[step, :, a], variants)
            action += (uniforms[step] >= below).astype(jnp.int32)
        choice = jnp.where(active > 0, variants * NUM_ACTIONS + action, -1)
        packed |= (choice + 1) << CHOICE_BITS * step
        variants, active = _transition(step, choice, variants, active)
    return Episodes(packed)


def _transition(
    step: int, choice: Int[Array, "*batch"], variants: Int[Array, "*batch"], active: Int[Array, "*batch"]
) -> tuple[Int[Array, "*batch"], Int[Array, "*batch"]]:
    """The artifacts after the step, and which episodes go on; nothing moves where the choice is -1."""
    after = variants
    for variant, action in np.ndindex(NUM_VARIANTS, NUM_ACTIONS):
        here = choice == variant * NUM_ACTIONS + action
        if TABLES.next_variant[step, variant, action] != variant:
            after = jnp.where(here, int(TABLES.next_variant[step, variant, action]), after)
        if TABLES.ends[step, variant, action]:
            active = jnp.where(here, 0, active)
    return after, active


def episodes_from_actions(actions: Int[Array, "6 group episode *run"]) -> Episodes:
    """Plays given actions, -1 after the end, through the tables."""
    variants = packed = jnp.zeros(actions.shape[1:], jnp.int32)
    active = packed + 1
    for step in range(MAX_STEPS):
        choice = jnp.where(active > 0, variants * NUM_ACTIONS + actions[step], -1)
        packed |= (choice + 1) << CHOICE_BITS * step
        variants, active = _transition(step, choice, variants, active)
    return Episodes(packed)


@stage
def grade(episodes: Episodes, verdicts: Bool[Array, "group variant"]) -> Float[Array, "group episode *run"]:
    """Rewards: 1 where an artifact was submitted that the group's verdicts accept, else 0."""
    run_axes = episodes.packed.ndim - 2
    accepted = verdicts.astype(jnp.int32).reshape(*verdicts.shape, *[1] * (1 + run_axes))
    rewards = jnp.zeros_like(episodes.packed)
    for step, variant, action in np.argwhere(TABLES.submits).tolist():
        rewards += jnp.where(episodes.choice(step) == variant * NUM_ACTIONS + action, accepted[:, variant], 0)
    return rewards.astype(jnp.float32)
