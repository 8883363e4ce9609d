"""Advantages, credit and losses: pure functions of arrays, each with its formula and source.

The ratio of new to behavior probability depends on (context, action) only, so the loss of a batch is a function
of a few sums over the batch (`Credit`). It is exact, its cost does not grow with the batch, and it is a sum over
contexts, so gradients can be accumulated over any partition of them.

In the first epoch after sampling every ratio is 1 and the advantages of a group sum to 0, so the surrogate starts
near 0 by construction while its gradient does not: read the gradient norm and the mixed groups beside the loss. A
group whose rewards are all equal has advantage 0; a batch of such groups has loss beta * KL, and moves by it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_mini.task import MAX_STEPS, NUM_ACTIONS, NUM_STATES, NUM_VARIANTS
from jaxrl_mini.types import Credit, Episodes


def group_advantages(rewards: Float[Array, "group episode *run"]) -> Float[Array, "group episode *run"]:
    """(reward - group mean) / group standard deviation; exactly 0 where all rewards of a group are equal.

    The deviation is the population's, and equality of the rewards themselves decides, not an epsilon. Source:
    group-relative advantage of GRPO, Shao et al. 2024 (arXiv 2402.03300), equation 4.1.2.
    """
    mean = jnp.mean(rewards, axis=1, keepdims=True)
    variance = jnp.mean(jnp.square(rewards - mean), axis=1, keepdims=True)
    mixed = jnp.max(rewards, axis=1, keepdims=True) > jnp.min(rewards, axis=1, keepdims=True)
    return jnp.where(mixed, (rewards - mean) / jnp.sqrt(jnp.where(mixed, variance, 1.0)), 0.0)


def retention_weights(rewards: Float[Array, "group episode *run"]) -> Float[Array, "group episode *run"]:
    """reward * episodes / retained episodes: rejection sampling as an advantage; all 0 where none is retained."""
    retained = jnp.sum(rewards, axis=(0, 1))
    return rewards * (rewards.shape[0] * rewards.shape[1]) / jnp.maximum(retained, 1.0)


def state_credit(episodes: Episodes, advantages: Float[Array, "group episode *run"]) -> Credit:
    """Sums a batch over (state, action): what the loss of the table policy depends on."""
    run_shape = advantages.shape[2:]
    flat = (-1, *run_shape)
    weight = 1.0 / (episodes.lengths.reshape(flat).astype(jnp.float32) * advantages.shape[0] * advantages.shape[1])
    advantage = advantages.reshape(flat)
    weights = jnp.maximum(advantage, 0.0) * weight, jnp.minimum(advantage, 0.0) * weight, weight, jnp.ones_like(weight)
    bins = np.arange(NUM_VARIANTS * NUM_ACTIONS).reshape(-1, *[1] * len(run_shape))

    def step_sums(_: None, choices: Array) -> tuple[None, tuple[Array, ...]]:
        def add(episode: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            here = choices[episode] == bins
            return tuple(total + jnp.where(here, w[episode], 0.0) for total, w in zip(sums, weights, strict=True))

        zero = jnp.zeros((len(bins), *run_shape))
        return None, jax.lax.fori_loop(0, len(weight), add, (zero,) * 4)

    _, sums = jax.lax.scan(step_sums, None, episodes.choices.reshape(MAX_STEPS, *flat))
    plus, minus, visits, counts = (x.reshape(NUM_STATES, NUM_ACTIONS, *run_shape) for x in sums)
    return Credit(plus, minus, counts, jnp.sum(visits, axis=1))


def surrogate_loss(
    log_probs: Float[Array, "context action *run"],
    behavior: Float[Array, "context action *run"],
    credit: Credit,
    clip: Float[Array, "*run"],
) -> Float[Array, "*run"]:
    """Mean over episodes of the mean over actions of -min(ratio * adv, clamp(ratio, 1 - clip, 1 + clip) * adv).

    From the sums: -sum(plus * min(ratio, 1 + clip) + minus * max(ratio, 1 - clip)). Source: Schulman et al. 2017
    (arXiv 1707.06347), equation 7.
    """
    ratio = jnp.exp(log_probs - behavior)
    return -jnp.sum(
        credit.plus * jnp.minimum(ratio, 1.0 + clip) + credit.minus * jnp.maximum(ratio, 1.0 - clip), axis=(0, 1)
    )


def kl_divergence(
    log_probs: Float[Array, "context action *run"], reference: Float[Array, "context action *run"]
) -> Float[Array, "context *run"]:
    """KL(policy || reference) = sum over all actions of p * (log p - log q), per context."""
    return jnp.sum(jnp.exp(log_probs) * (log_probs - reference), axis=1)


def entropy(log_probs: Float[Array, "context action *run"]) -> Float[Array, "context *run"]:
    """-sum over all actions of p * log p, per context, in nats."""
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)


def likelihood_loss(log_probs: Float[Array, "context action *run"], credit: Credit) -> Float[Array, "*run"]:
    """Mean over retained episodes of the mean over actions of -log p; 0 where none is retained."""
    return -jnp.sum(credit.plus * log_probs, axis=(0, 1))


def ratio_outside_clip_fraction(
    log_probs: Float[Array, "context action *run"],
    behavior: Float[Array, "context action *run"],
    counts: Float[Array, "context action *run"],
    clip: Float[Array, "*run"],
) -> Float[Array, "*run"]:
    """Share of the sampled actions whose ratio lies outside [1 - clip, 1 + clip], whatever their advantage."""
    ratio = jnp.exp(log_probs - behavior)
    outside = (ratio < 1.0 - clip) | (ratio > 1.0 + clip)
    return jnp.sum(jnp.where(outside, counts, 0.0), axis=(0, 1)) / jnp.sum(counts, axis=(0, 1))
