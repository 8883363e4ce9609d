"""The task's histories as a tree, and exact expectations over all episodes of a policy that sees histories.

A policy over finite states has exact twins by dynamic programming over the states. A language model sees what
happened, not a state, so its twins go over the 3,906 = 5^0 + ... + 5^5 sequences of actions after which an
episode is still open.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from jaxrl_mini.task import ACTIONS, MAX_STEPS, NUM_ACTIONS, TABLES, VARIANTS

FINISH = ACTIONS.index("finish")


class Histories(NamedTuple):
    """Open histories, level by level: first the empty one, then those of one action, and so on."""

    parent: np.ndarray
    """int [history]: the history without its last action; 0 for the empty one."""
    action: np.ndarray
    """int [history]: its last action; 0 for the empty one."""
    step: np.ndarray
    """int [history]: actions in it."""
    variant: np.ndarray
    """int [history]: the artifact after it."""
    ancestors: np.ndarray
    """int [history, MAX_STEPS - 2]: proper ancestors but the empty one, oldest first; 0 where there is none."""


def enumerate_histories(can_succeed: bool = False) -> Histories:
    """Lists all 3,906 open histories, or the 1,590 after which the task can still be solved in time."""
    rows: list[tuple[int, int, int, int, tuple[int, ...]]] = [(0, 0, 0, 0, ())]
    for parent, (_, _, step, variant, ancestors) in enumerate(rows):
        if step == MAX_STEPS - 1:
            break
        for action in range(NUM_ACTIONS):
            if not TABLES.ends[step, variant, action]:
                after = int(TABLES.next_variant[step, variant, action])
                repairs_left = 2 - sum(VARIANTS[after])
                if not can_succeed or step + 1 + repairs_left < MAX_STEPS:
                    older = (*ancestors, parent) if parent else ()
                    rows.append((parent, action, step + 1, after, older))
    *columns, ancestors_of = zip(*rows, strict=True)
    padded = [[*older, *[0] * (MAX_STEPS - 2 - len(older))] for older in ancestors_of]
    return Histories(*(np.array(column, np.int32) for column in (*columns, padded)))


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
      histories: the tree. Of one without hopeless histories only `success` and `reach` are right.
      log_probs: of all six actions after every history.
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
