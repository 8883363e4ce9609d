"""Exact expectations over all episodes of a policy that sees histories: reach, visits, success, actions.

A policy over finite states has exact twins by dynamic programming over the states (see `success`). A language model
sees what happened, not a state, so its twins go over the tree of histories.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from jaxrl_mini.tasks.histories import Histories
from jaxrl_mini.tasks.repair import ACTIONS, MAX_STEPS

FINISH = ACTIONS.index("finish")


class Expectations(NamedTuple):
    """Exact expectations over the episodes of a policy."""

    reach: Float[np.ndarray, " history"]
    """Probability that an episode passes through each history."""
    visits: Float[np.ndarray, " history"]
    """Expectation of 1 / (actions of the episode) there, 0 for episodes that do not pass."""
    success: float
    """Probability that an artifact is submitted in time and accepted."""
    mean_actions: float


def expectations(
    histories: Histories,
    log_probs: Float[np.ndarray | Array, "history action"],
    accepted: Float[np.ndarray, " variant"],
) -> Expectations:
    """Sums over all episodes, in float64, by one pass down the tree and one up.

    reach[h] = reach[parent] * pi(action | parent); success = sum of reach * pi(finish) * accepted[artifact]; mean
    actions = sum of reach; visits[h] = reach[h] * E[1 / length | h]. So the expectation of a mean over an episode's
    actions of some f(h) is sum(visits * f), as in the KL term of the loss.

    Args:
      histories: the tree.
      log_probs: of all six actions after every history. `success` does not depend on those after which the task cannot
        be solved in time, as long as only its solution is accepted.
      accepted: the share of verifier inputs that accept each artifact.
    """
    probs = np.exp(np.asarray(log_probs, np.float64))
    levels = [np.nonzero(histories.step == step)[0] for step in range(MAX_STEPS)]
    reach = np.ones(len(probs))
    for level in levels[1:]:
        parent = histories.parent[level]
        reach[level] = reach[parent] * probs[parent, histories.action[level]]
    inverse_length = probs[:, FINISH] / (histories.step + 1)
    inverse_length[levels[-1]] = 1 / MAX_STEPS
    for level in reversed(levels[1:]):
        parent = histories.parent[level]
        np.add.at(inverse_length, parent, probs[parent, histories.action[level]] * inverse_length[level])
    return Expectations(
        reach=reach,
        visits=reach * inverse_length,
        success=float((reach * probs[:, FINISH] * accepted[histories.variant]).sum()),
        mean_actions=float(reach.sum()),
    )
