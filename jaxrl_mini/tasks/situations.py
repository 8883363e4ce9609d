"""Where an episode of any task can be, as nobody but the task knows it: a node with the instance that is played.

The policy sees its context, the verifier its instance.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxrl_mini.config import UserError
from jaxrl_mini.tasks.compiled import ENDED, CompiledTask

MAX_WAYS = 250_000
"""Steps x ways out of the situations of a step, at most, in arrays of one shape for all steps."""


class Level(NamedTuple):
    """The situations of a step, and the ways out of them: one for each action and draw of chance.

    Stacked, the arrays have one more axis, of steps, in front; ways that only fill a row up have chance 0.
    """

    instance: Int[Any, "*step situation"]
    """Its place in the split."""
    context: Int[Any, "*step situation"]
    source: Int[Any, "*step way"]
    """The situation that it leads out of."""
    action: Int[Any, "*step way"]
    chance: Float[Any, "*step way"]
    target: Int[Any, "*step way"]
    """A situation of the next step; `ENDED` where the episode is over."""
    accepted: Float[Any, "*step way"]
    """The probability that the verifier accepts what is handed in; 0 where nothing is."""


class Situations(NamedTuple):
    """Of one split of a task."""

    start: Float[np.ndarray, " situation"]
    """The probability of each situation of the first step, its instance being given."""
    levels: list[Level]


class Stacked(NamedTuple):
    """The same as arrays over the steps, for programs that loop over these."""

    start: Float[Any, " situation"]
    levels: Level


@lru_cache(maxsize=64)
def situations(task: CompiledTask, split: str) -> Situations:
    """All that an episode of a split can be in."""
    members = np.array(task.splits[split])
    place = np.full(len(task.instances), -1)
    place[members] = np.arange(len(members))
    starts = place[task.start_instance] >= 0
    pairs, numbers = np.unique(
        np.stack([task.start_node[starts], place[task.start_instance[starts]]]), axis=1, return_inverse=True
    )
    start = np.bincount(numbers.ravel(), task.start_chance[starts], pairs.shape[1])
    accepted = np.concatenate([task.accepted[:, members], np.zeros((1, len(members)))])  # the last row: nothing
    first, levels = np.searchsorted(task.node, np.arange(len(task.steps) + 1)), []
    while pairs.shape[1]:
        node, instance = pairs
        count = first[node + 1] - first[node]
        source = np.repeat(np.arange(len(node)), count)
        way = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count) + first[node[source]]
        after, ended = task.next_node[way], task.next_node[way] == ENDED
        onward = np.stack([after, instance[source]])[:, ~ended]
        pairs, numbers = np.unique(onward, axis=1, return_inverse=True)
        target = np.full(len(source), ENDED)
        target[~ended] = numbers.ravel()
        levels.append(
            Level(
                instance=instance,
                context=task.contexts[node],
                source=source,
                action=task.action[way],
                chance=task.chance[way],
                target=target,
                accepted=np.where(ended, accepted[task.submission[way], instance[source]], 0.0),
            )
        )
    return Situations(start, levels)


@lru_cache(maxsize=64)
def stacked(task: CompiledTask, split: str) -> Stacked:
    """`situations` in arrays of one shape for all steps.

    Raises:
      UserError: the arrays would be too large.
    """
    found, steps = situations(task, split), task.max_steps
    here, ways = (max(len(getattr(level, name)) for level in found.levels) for name in ("context", "source"))
    if steps * ways > MAX_WAYS:
        raise UserError(
            f"task {task.name} has {steps} steps with up to {ways} ways out of their situations: expected at most "
            f"{MAX_WAYS} in all for its exact gradient"
        )
    start = np.zeros(here)
    start[: len(found.start)] = found.start
    columns = []
    for name, first in zip(Level._fields, found.levels[0], strict=True):
        size = here if name in ("instance", "context") else ways
        column = np.full((steps, size), ENDED if name == "target" else 0, first.dtype)
        for row, level in zip(column, found.levels, strict=False):  # there may be steps that no episode reaches
            row[: len(getattr(level, name))] = getattr(level, name)
        columns.append(column)
    return Stacked(start, Level(*columns))
