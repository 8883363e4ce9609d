"""Episodes sampled from a policy through the transition tables.

Written for XLA's CPU backend, which recomputes a value in every consumer it is fused into, turns gathers into
scalar loads, and does not vectorize over booleans kept in memory: hence stages, `pick`, and masks of int32.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from jaxrl_mini.stage import stage
from jaxrl_mini.task import MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS, TABLES
from jaxrl_mini.types import Episodes, Seeds

TRAINING, EVALUATION = 0, 1

def threefry2x32(
    key: tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]],
    counter: tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]],
) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
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
    seeds: Seeds, stream: int, iteration: Int[Array, ""], shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """Multiples of 2^-24 in [0, 1): element i of the array is a function of (seed, stream, iteration, i) alone."""
    zero = jnp.zeros_like(seeds)
    key = threefry2x32((zero, seeds), (zero + np.uint32(stream), zero + jnp.asarray(iteration, jnp.uint32)))
    number = np.arange(np.prod(shape), dtype=np.uint32).reshape(*shape, *[1] * seeds.ndim)
    bits, _ = threefry2x32(key, (jnp.asarray(number), jnp.zeros((), jnp.uint32)))
    return (bits >> 8).astype(jnp.float32) * np.float32(2**-24)


def pick(table: Shaped[Array, "row ..."], index: Int[Array, "*batch"]) -> Shaped[Array, "*batch"]:
    """table[index] along the first axis, as selections; entries of `table` broadcast against `index`."""
    picked = jnp.broadcast_to(table[0], index.shape)
    for row in range(1, table.shape[0]):
        picked = jnp.where(index == row, table[row], picked)
    return picked


def choose(cumulative: list[Float[Array, "*batch"]], uniform: Float[Array, "*batch"]) -> Int[Array, "*batch"]:
    """The action by inversion: how many of the first five cumulative probabilities lie at or below `uniform`."""
    return sum((uniform >= bound).astype(jnp.int32) for bound in cumulative)


def cumulative_probs(log_probs: Float[Array, "state action *run"]) -> list[Float[Array, "state *run"]]:
    """Cumulative probabilities of the first five actions, summed in order."""
    probs = jnp.exp(log_probs)
    sums = [probs[:, 0]]
    for action in range(1, NUM_ACTIONS - 1):
        sums.append(sums[-1] + probs[:, action])
    return sums


def rollout(log_probs: Float[Array, "24 6 *run"], uniforms: Float[Array, "6 group episode *run"]) -> Episodes:
    """Plays one episode per (group, episode, run) with a policy over the 24 states.

    Args:
      log_probs: log-probabilities of the actions in every state.
      uniforms: one number in [0, 1) per step.
    """
    bounds = [
        bound.reshape(MAX_STEPS, NUM_VARIANTS, *log_probs.shape[2:]) for bound in stage(cumulative_probs)(log_probs)
    ]
    variants = jnp.zeros(uniforms.shape[1:], jnp.int32)
    active = jnp.ones_like(variants)
    choices, lengths, submitted = [], jnp.zeros_like(variants), jnp.zeros_like(variants)
    for step in range(MAX_STEPS):
        choice = stage(_choose)([bound[step] for bound in bounds], uniforms[step], variants, active)
        lengths = lengths + active
        variants, active, submitted = stage(partial(_transition, step))(choice, variants, active, submitted)
        choices.append(choice)
    return Episodes(stage(jnp.stack)(choices), stage(jnp.asarray)(lengths), variants, submitted)


def _choose(bounds: list[Array], uniforms: Array, variants: Array, active: Array) -> Array:
    """variant * 6 + action, the action by inversion of the cumulative probabilities; -1 where not active."""
    action = choose([pick(bound, variants) for bound in bounds], uniforms)
    return jnp.where(active > 0, variants * NUM_ACTIONS + action, -1)


def _transition(
    step: int, choice: Array, variants: Array, active: Array, submitted: Array
) -> tuple[Array, Array, Array]:
    """The tables' rows at one step; nothing moves where choice is -1."""
    after = variants
    for variant, action in np.ndindex(NUM_VARIANTS, NUM_ACTIONS):
        here = choice == variant * NUM_ACTIONS + action
        if TABLES.next_variant[step, variant, action] != variant:
            after = jnp.where(here, int(TABLES.next_variant[step, variant, action]), after)
        if TABLES.submits[step, variant, action]:
            submitted = jnp.where(here, 1, submitted)
        if TABLES.ends[step, variant, action]:
            active = jnp.where(here, 0, active)
    return after, active, submitted


def episodes_from_actions(actions: Int[Array, "6 group episode *run"]) -> Episodes:
    """Plays given actions, -1 after the end, through the tables."""
    variants = jnp.zeros(actions.shape[1:], jnp.int32)
    active, submitted, choices = jnp.ones_like(variants), jnp.zeros_like(variants), []
    for step in range(MAX_STEPS):
        choices.append(jnp.where(active > 0, variants * NUM_ACTIONS + actions[step], -1))
        variants, active, submitted = _transition(step, choices[-1], variants, active, submitted)
    stacked = jnp.stack(choices)
    return Episodes(stacked, jnp.sum(stacked >= 0, axis=0, dtype=jnp.int32), variants, submitted)


def grade(episodes: Episodes, verdicts: Bool[Array, "group variant"]) -> Float[Array, "group episode *run"]:
    """Rewards: 1 where the episode submitted an artifact that its group's verdicts accept, else 0."""
    run_axes = episodes.variants.ndim - 2
    by_variant = verdicts.T.astype(jnp.int32).reshape(NUM_VARIANTS, -1, *[1] * (1 + run_axes))
    return (episodes.submitted * pick(by_variant, episodes.variants)).astype(jnp.float32)
