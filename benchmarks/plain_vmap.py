"""The same training run as one straightforward single-run JAX function, for `jax.vmap` over seeds.

It is what one writes first: gathers from tables, a scan over steps, a loss over padded episodes, autodiff, optax. What
`benchmarks.throughput` compares the package with; nothing else uses it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS
from jaxrl_mini.tasks.tables import TABLES

NEXT = jnp.asarray(TABLES.next_variant)
SUBMITS = jnp.asarray(TABLES.submits)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.08))


def play(logits, key):
    def step(carry, inputs):
        (variant, active), (number, key) = carry, inputs
        state = number * NUM_VARIANTS + variant
        action = jax.random.categorical(key, logits[state])
        submitted = active & SUBMITS[number, variant, action]
        after = jnp.where(active, NEXT[number, variant, action], variant)
        return (after, active & ~submitted), (state, action, active, submitted & (variant == NUM_VARIANTS - 1))

    steps = (jnp.arange(MAX_STEPS), jax.random.split(key, MAX_STEPS))
    _, (states, actions, taken, solved) = jax.lax.scan(step, (jnp.int32(0), jnp.bool_(True)), steps)
    return states, actions, taken, solved.any().astype(jnp.float32)


def loss(logits, old, states, actions, taken, advantages):
    log_probs = jax.nn.log_softmax(logits)[states]
    chosen = jnp.take_along_axis(log_probs, actions[..., None], axis=-1)[..., 0]
    ratio = jnp.exp(chosen - old)
    advantages = advantages[..., None]
    surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    kl = jnp.sum(jnp.exp(log_probs) * (log_probs + np.log(NUM_ACTIONS)), axis=-1)
    terms = jnp.where(taken, 0.02 * kl - surrogate, 0.0)
    return jnp.mean(terms.sum(-1) / taken.sum(-1))


def train(seed):
    """Logits after 100 iterations of 4 groups of 8 episodes with 2 optimizer steps each."""

    def iterate(carry, number):
        logits, moments = carry
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), (4, 8))
        states, actions, taken, rewards = jax.vmap(jax.vmap(play, (None, 0)), (None, 0))(logits, keys)
        spread = rewards.std(axis=1, keepdims=True)
        deviation = rewards - rewards.mean(axis=1, keepdims=True)
        advantages = jnp.where(spread > 0, deviation / jnp.where(spread > 0, spread, 1.0), 0.0)
        old = jnp.take_along_axis(jax.nn.log_softmax(logits)[states], actions[..., None], axis=-1)[..., 0]
        for _ in range(2):
            gradient = jax.grad(loss)(logits, old, states, actions, taken, advantages)
            change, moments = OPTIMIZER.update(gradient, moments)
            logits = optax.apply_updates(logits, change)
        return (logits, moments), rewards.mean()

    logits = jnp.zeros((MAX_STEPS * NUM_VARIANTS, NUM_ACTIONS))
    (logits, _), success = jax.lax.scan(iterate, (logits, OPTIMIZER.init(logits)), jnp.arange(100))
    return logits, success


train_many = jax.jit(jax.vmap(train))
