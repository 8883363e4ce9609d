"""The task's histories as a tree.

A language model sees what happened, not a state, so whatever is exact about it goes over the 3,906 = 5^0 + ... + 5^5
sequences of actions after which an episode is still open.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, VARIANTS
from jaxrl_mini.tasks.tables import TABLES
from jaxrl_mini.types import AnyArray


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
