"""The table policy: logits[state, action], a softmax per state."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_mini.task import NUM_ACTIONS, NUM_STATES


def initial_logits(run_shape: tuple[int, ...] = ()) -> Float[Array, "24 6 *run"]:
    """Zero logits: the uniform policy, which is also the reference policy."""
    return jnp.zeros((NUM_STATES, NUM_ACTIONS, *run_shape), jnp.float32)


def log_probs(logits: Float[Array, "state action *run"]) -> Float[Array, "state action *run"]:
    """Log-probabilities of the six actions in every state."""
    return jax.nn.log_softmax(logits, axis=1)
