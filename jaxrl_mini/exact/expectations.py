"""Exact expectations over all episodes of a policy that sees histories: success, actions, divergence, by instance.

A policy over finite contexts has exact twins by dynamic programming over situations (see `success`, `situations`). A
language model sees what happened, not a state, so its twins go over the tree of histories.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from jaxrl_mini.tasks.histories import Histories


class Expectations(NamedTuple):
    """Exact expectations over the episodes of a policy on some instances, which are equally likely."""

    success: float
    """Probability that something is submitted in time and accepted."""
    mean_actions: float
    mean_kl: float
    """Expected sum of KL(policy || reference) over an episode's actions, by expected actions."""
    by_instance: Float[np.ndarray, " instance"]
    """Success on each instance."""


def expectations(
    found: Histories,
    log_probs: Float[np.ndarray | Array, "history action"],
    instances: Sequence[int] = (0,),
    reference: Float[np.ndarray | Array, "history action"] | None = None,
) -> Expectations:
    """Sums over all episodes, in float64, by one pass down the tree.

    The policy's share of a history is the product of its probabilities of the actions on the way; times the history's
    mass it is the probability of passing there, and times a win's that of winning so.

    Args:
      found: the tree.
      log_probs: of all actions after every history. `success` does not depend on those after which no episode of the
        instances can succeed.
      instances: those that are played.
      reference: log-probabilities of the policy that the divergence is from; the policy itself, if it is not given.
    """
    wide = np.asarray(log_probs, np.float64)
    probs, share = np.exp(wide), np.ones(found.size)
    for step in range(1, int(found.step.max()) + 1):
        (level,) = np.nonzero(found.step == step)
        parent = found.parent[level]
        share[level] = share[parent] * probs[parent, found.action[level]]
    kl = np.zeros(found.size) if reference is None else (probs * (wide - reference)).sum(axis=1)
    count = max(instances) + 1
    won = share[found.wins.history] * probs[found.wins.history, found.wins.action] * found.wins.value
    passing = share[found.mass.history] * found.mass.value
    success, actions, divergence = (
        weights.sums(values, count)[list(instances)]
        for weights, values in (
            (found.wins, won),
            (found.mass, passing),
            (found.mass, passing * kl[found.mass.history]),
        )
    )
    mean_actions = float(actions.mean())
    return Expectations(float(success.mean()), mean_actions, float(divergence.mean()) / mean_actions, success)
