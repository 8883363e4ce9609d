"""What a language model is shown of a task, in pieces that follow each other.

A prompt begins with an opening, which has the first observation. Every action then appends one segment: the action, and
the observation it led to. Which pieces these were is a history, all that a language model can tell episodes apart by.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxrl_mini.tasks.compiled import ENDED, CompiledTask


class Segments(NamedTuple):
    """The pieces by number, and which of them a start and an outcome show."""

    openings: tuple[str, ...]
    """First observations."""
    actions: Int[np.ndarray, " segment"]
    texts: tuple[str, ...]
    """The observations of the segments."""
    of_start: Int[np.ndarray, " start"]
    of_outcome: Int[np.ndarray, " outcome"]
    """`nothing` where the episode ends: no action follows, so what is seen then does not matter."""

    @property
    def nothing(self) -> int:
        """In place of a segment, where an episode is over or has not begun: their number."""
        return len(self.texts)


@lru_cache(maxsize=64)
def segments(task: CompiledTask) -> Segments:
    """A task's, the segments in the order of their actions."""
    first, of_start = np.unique(task.start_text, return_inverse=True)
    goes_on = task.next_node != ENDED
    keys = task.action[goes_on].astype(np.int64) * len(task.texts) + task.text[goes_on]
    pairs, numbers = np.unique(keys, return_inverse=True)
    of_outcome = np.full(len(task.node), len(pairs), np.int32)
    of_outcome[goes_on] = numbers
    actions, texts = np.divmod(pairs, len(task.texts))
    return Segments(
        openings=tuple(task.texts[text] for text in first),
        actions=actions.astype(np.int32),
        texts=tuple(task.texts[text] for text in texts),
        of_start=of_start.astype(np.int32),
        of_outcome=of_outcome,
    )
