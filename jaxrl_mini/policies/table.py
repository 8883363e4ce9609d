"""The table policy: logits[state, action], a softmax per state."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_mini.task import NUM_ACTIONS, NUM_STATES
from jaxrl_mini.xla import stage, total


def initial_logits(run_shape: tuple[int, ...] = ()) -> Float[Array, "24 6 *run"]:
    """Zero logits: the uniform policy, which is also the reference policy."""
    return jnp.zeros((NUM_STATES, NUM_ACTIONS, *run_shape), jnp.float32)


@jax.custom_vjp
def log_probs(logits: Float[Array, "state action *run"]) -> Float[Array, "state action *run"]:
    """Log-probabilities of the six actions in every state: logits - log sum exp(logits).

    The derivative is written out, gradient - p * sum(gradient), so that each sum over actions is computed once.
    """
    highest = _highest(logits)
    return _normalized(logits, _log_normalizer(highest, _exponentials(logits, highest)))


def _forward(logits: Array) -> tuple[Array, Array]:
    value = log_probs(logits)
    return value, value


def _backward(value: Array, gradient: Array) -> tuple[Array]:
    return (_through_softmax(value, gradient, _action_sum(gradient)),)


log_probs.defvjp(_forward, _backward)


@stage
def _highest(logits: Float[Array, "state action *run"]) -> Float[Array, "state *run"]:
    return functools.reduce(jnp.maximum, [logits[:, action] for action in range(logits.shape[1])])


@stage
def _exponentials(
    logits: Float[Array, "state action *run"], highest: Float[Array, "state *run"]
) -> Float[Array, "state action *run"]:
    return jnp.exp(logits - highest[:, None])


@stage
def _log_normalizer(
    highest: Float[Array, "state *run"], exponentials: Float[Array, "state action *run"]
) -> Float[Array, "state *run"]:
    return highest + jnp.log(total(exponentials, axis=1))


@stage
def _normalized(
    logits: Float[Array, "state action *run"], log_normalizer: Float[Array, "state *run"]
) -> Float[Array, "state action *run"]:
    return logits - log_normalizer[:, None]


@stage
def _action_sum(gradient: Float[Array, "state action *run"]) -> Float[Array, "state *run"]:
    return total(gradient, axis=1)


@stage
def _through_softmax(
    value: Float[Array, "state action *run"],
    gradient: Float[Array, "state action *run"],
    gradient_sum: Float[Array, "state *run"],
) -> Float[Array, "state action *run"]:
    return gradient - jnp.exp(value) * gradient_sum[:, None]
