"""The table policy: logits[state, action], a softmax per state."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_mini.machine.xla import stage, total
from jaxrl_mini.tasks.repair import NUM_ACTIONS, NUM_STATES
from jaxrl_mini.types import AnyArray, Distribution


def initial_logits(
    run_shape: tuple[int, ...] = (), shape: tuple[int, int] = (NUM_STATES, NUM_ACTIONS)
) -> Float[np.ndarray, "context action *run"]:
    """Zero logits: the uniform policy over so many contexts and actions."""
    return np.zeros((*shape, *run_shape), np.float32)


def uniform_log_probs(
    run_shape: tuple[int, ...] = (), shape: tuple[int, int] = (NUM_STATES, NUM_ACTIONS)
) -> Float[np.ndarray, "context action *run"]:
    """Log-probabilities of the uniform policy, which is the initial one and the reference."""
    return np.full((*shape, *run_shape), -float(np.log(shape[1])), np.float32)


@stage
def distribution(logits: Float[Array, "state action *run"]) -> Distribution:
    """Log-probabilities, logits - log sum exp(logits), and probabilities of the six actions in every state."""
    highest = _highest(logits)
    exponentials = _exponentials(logits, highest)
    normalizer = _action_sum(exponentials)
    return Distribution(_log_probs(logits, highest, _log(normalizer)), _probs(exponentials, normalizer))


@stage
def logit_gradient(
    probs: Float[Array, "state action *run"], gradient: Float[Array, "state action *run"]
) -> Float[Array, "state action *run"]:
    """The gradient by the logits, given that by the log-probabilities: gradient - p * sum over actions of gradient."""
    return _through_softmax(probs, gradient, _action_sum(gradient))


_log = stage(jnp.log)


@stage
def _highest(logits: Float[Array, "state action *run"]) -> Float[Array, "state *run"]:
    return functools.reduce(jnp.maximum, [logits[:, action] for action in range(logits.shape[1])])


@stage
def _exponentials(
    logits: Float[Array, "state action *run"], highest: Float[Array, "state *run"]
) -> Float[Array, "state action *run"]:
    return jnp.exp(logits - highest[:, None])


@stage
def _action_sum(array: Float[Array, "state action *run"]) -> Float[Array, "state *run"]:
    return total(array, axis=1)


@stage
def _log_probs(
    logits: Float[Array, "state action *run"],
    highest: Float[Array, "state *run"],
    log_normalizer: Float[Array, "state *run"],
) -> Float[Array, "state action *run"]:
    return logits - (highest + log_normalizer)[:, None]


@stage
def _probs(
    exponentials: Float[Array, "state action *run"], normalizer: Float[Array, "state *run"]
) -> Float[Array, "state action *run"]:
    return exponentials / normalizer[:, None]


@stage
def _through_softmax(
    probs: Float[Array, "state action *run"],
    gradient: Float[Array, "state action *run"],
    gradient_sum: Float[Array, "state *run"],
) -> Float[Array, "state action *run"]:
    return gradient - probs * gradient_sum[:, None]


def log_probs_of_logits(logits: Float[AnyArray, "context action *run"]) -> Float[np.ndarray, "context action *run"]:
    """A table policy's log-probabilities, in float64."""
    wide = np.asarray(logits, np.float64)
    shifted = wide - wide.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
