"""Success probability and expected actions of a table policy, exactly, by dynamic programming over the tables."""

import functools
import operator

import numpy as np
from jaxtyping import Float

from jaxrl_mini.policies.table import log_probs_of_logits
from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS
from jaxrl_mini.tasks.tables import TABLES
from jaxrl_mini.types import AnyArray, Exact


def exact(log_probs: Float[AnyArray, "24 6 *run"], accepted: Float[AnyArray, " variant"]) -> Exact:
    """Success probability and expected actions of a policy, by one pass over the steps.

    The probability mass over artifacts moves through the transition tables; what is submitted counts with the
    verifier's acceptance of it. Works on NumPy and on JAX arrays, in the precision of `log_probs`.

    Args:
      log_probs: log-probabilities of the actions in every state.
      accepted: the share of verifier inputs that accept each artifact.
    """
    xp = log_probs.__array_namespace__()
    run_shape = log_probs.shape[2:]
    probs = xp.exp(log_probs).reshape(MAX_STEPS, NUM_VARIANTS, NUM_ACTIONS, *run_shape)
    zero = xp.zeros(run_shape, dtype=probs.dtype)
    mass = [zero + 1] + [zero] * (NUM_VARIANTS - 1)
    success = actions = zero
    for step in range(MAX_STEPS):
        after = [zero] * NUM_VARIANTS
        for variant, action in np.ndindex(NUM_VARIANTS, NUM_ACTIONS):
            flow = mass[variant] * probs[step, variant, action]
            if TABLES.submits[step, variant, action]:
                success = success + flow * accepted[variant]
            elif not TABLES.ends[step, variant, action]:
                target = TABLES.next_variant[step, variant, action]
                after[target] = after[target] + flow
        actions = actions + functools.reduce(operator.add, mass)
        mass = after
    return Exact(success, actions)


def exact_of_logits(logits: Float[AnyArray, "24 6 *run"], accepted: Float[np.ndarray, " variant"]) -> Exact:
    """`exact` of a table policy, in float64."""
    return exact(log_probs_of_logits(logits), accepted)
