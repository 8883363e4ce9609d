"""The task's histories as a tree, and exact expectations over all episodes of a policy that sees histories.

A policy over finite states has exact twins by dynamic programming over the states. A language model sees what
happened, not a state, so its twins go over the 3,906 = 5^0 + ... + 5^5 sequences of actions after which an
episode is still open.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_mini.task import ACTIONS, MAX_STEPS, NUM_ACTIONS, TABLES, VARIANTS
from jaxrl_mini.types import AnyArray

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
    can_succeed: np.ndarray
    """bool [history]: the task can still be solved in time."""


@lru_cache(maxsize=1)
def enumerate_histories() -> Histories:
    """Lists all 3,906 open histories; of 1,590 of them the task can still be solved in time."""
    rows: list[tuple[int, int, int, int, tuple[int, ...], bool]] = [(0, 0, 0, 0, (), True)]
    for parent, (_, _, step, variant, ancestors, _) in enumerate(rows):
        if step == MAX_STEPS - 1:
            break
        for action in range(NUM_ACTIONS):
            if not TABLES.ends[step, variant, action]:
                after = int(TABLES.next_variant[step, variant, action])
                repairs_left = 2 - sum(VARIANTS[after])
                older = (*ancestors, parent) if parent else ()
                rows.append((parent, action, step + 1, after, older, step + 1 + repairs_left < MAX_STEPS))
    parents, actions, steps, variants, paths, can_succeed = zip(*rows, strict=True)
    padded = [[*path, *[0] * (MAX_STEPS - 2 - len(path))] for path in paths]
    return Histories(
        parent=np.array(parents, np.int32),
        action=np.array(actions, np.int32),
        step=np.array(steps, np.int32),
        variant=np.array(variants, np.int32),
        ancestors=np.array(padded, np.int32),
        can_succeed=np.array(can_succeed),
    )


def numbers_of(actions: Int[AnyArray, "step *batch"]) -> Int[AnyArray, "step *batch"]:
    """The number of the history before each action of some episodes; any history after an episode's end.

    The five actions that do not end an episode come first, and histories stand in the order of a complete tree: those
    that continue history n are 5 n + 1 to 5 n + 5.
    """
    xp = actions.__array_namespace__()
    numbers = [xp.zeros_like(actions[0])]
    for step in range(MAX_STEPS - 1):
        numbers.append((NUM_ACTIONS - 1) * numbers[-1] + 1 + xp.clip(actions[step], 0, NUM_ACTIONS - 2))
    return xp.stack(numbers)


def in_chunks(wanted: Bool[np.ndarray, " history"], size: int) -> Int[np.ndarray, "chunk row"]:
    """The numbers of histories but the empty one, level by level; a level's last chunk repeats its last history."""
    chunks = []
    for step in range(1, MAX_STEPS):
        (level,) = np.nonzero(wanted & (enumerate_histories().step == step))
        chunks.append(np.pad(level, (0, -len(level) % size), mode="edge").reshape(-1, size))
    return np.concatenate(chunks)


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
