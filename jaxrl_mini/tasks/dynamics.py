"""A compiled task in the shapes that array programs use: dense by step, row, action and draw of chance.

A row is an open node of a step, numbered from 0 in every step; one more stands for an episode that is over.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxrl_mini.config import UserError
from jaxrl_mini.tasks.compiled import ENDED, CompiledTask
from jaxrl_mini.types import AnyArray

MAX_CELLS = 50_000_000
"""Steps x rows x actions x draws, at most."""


class Dynamics(NamedTuple):
    """Where every action leads. Draws of chance are made by inversion: the first whose bound lies above a number."""

    bounds: Float[AnyArray, "step row action bound"]
    """Cumulative probabilities of the draws but the last, float32; there may be one draw alone."""
    next_row: Int[AnyArray, "step row action draw"]
    """In the next step; the number of rows where the episode is over."""
    submission: Int[AnyArray, "step row action draw"]
    """What is handed in where the episode ends, counted from 1; 0 for nothing, and where it goes on."""
    view: Int[AnyArray, "step place"]
    """What the policy sees of a row; 0 of an episode that is over."""
    start_bounds: Float[AnyArray, "instance bound"]
    """Like `bounds`, for the first row of an instance."""
    start_row: Int[AnyArray, "instance draw"]


class _Places(NamedTuple):
    """Where outcomes and starts stand in dense arrays."""

    outcomes: tuple[int, ...]
    """The shape of an array [step, row, action, draw]."""
    of_outcome: tuple[np.ndarray, ...]
    starts: tuple[int, ...]
    """The shape of an array [instance, draw]."""
    of_start: tuple[np.ndarray, ...]


@lru_cache(maxsize=64)
def _places(task: CompiledTask) -> _Places:
    first = np.searchsorted(task.steps, np.arange(task.max_steps + 1))
    rows, draw = int(np.diff(first).max()), _numbers_within(task.node * len(task.actions) + task.action)
    shape = task.max_steps, rows, len(task.actions), int(draw.max()) + 1
    if (cells := int(np.prod(shape, dtype=np.int64))) > MAX_CELLS:
        raise UserError(f"task {task.name} needs tables of {cells} cells: expected at most {MAX_CELLS}")
    step, start_draw = task.steps[task.node], _numbers_within(task.start_instance)
    return _Places(
        shape,
        (step, task.node - first[step], task.action, draw),
        (len(task.instances), int(start_draw.max()) + 1),
        (task.start_instance, start_draw),
    )


def by_outcome(
    task: CompiledTask, values: Int[np.ndarray, " outcome"], elsewhere: int
) -> Int[np.ndarray, "step row action draw"]:
    """Values of outcomes in the shape of `Dynamics.next_row`, with another where there is no outcome.

    Raises:
      UserError: the table would be too large.
    """
    dense = np.full(_places(task).outcomes, elsewhere, np.int32)
    dense[_places(task).of_outcome] = values
    return dense


def by_start(task: CompiledTask, values: Int[np.ndarray, " start"]) -> Int[np.ndarray, "instance draw"]:
    """Values of starts in the shape of `Dynamics.start_row`."""
    dense = np.zeros(_places(task).starts, np.int32)
    dense[_places(task).of_start] = values
    return dense


@lru_cache(maxsize=64)
def dynamics(task: CompiledTask) -> Dynamics:
    """A task's, made once.

    Raises:
      UserError: the tables would be too large.
    """
    places = _places(task)
    rows, step = places.outcomes[1], places.of_outcome[0]
    first = np.searchsorted(task.steps, np.arange(task.max_steps + 1))
    ended = task.next_node == ENDED
    view = np.zeros((task.max_steps, rows + 1), np.int32)
    view[task.steps, np.arange(len(task.steps)) - first[task.steps]] = task.contexts % task.width
    return Dynamics(
        bounds=_bounds(places.outcomes, places.of_outcome, task.chance),
        next_row=by_outcome(task, np.where(ended, rows, task.next_node - first[step + 1]), rows),
        submission=by_outcome(task, task.submission - ENDED, 0),
        view=view,
        start_bounds=_bounds(places.starts, places.of_start, task.start_chance),
        start_row=by_start(task, task.start_node),
    )


def _numbers_within(sorted_keys: Int[np.ndarray, " row"]) -> Int[np.ndarray, " row"]:
    """The number of each row among those of its key."""
    starts = np.r_[True, sorted_keys[1:] != sorted_keys[:-1]]
    numbers = np.arange(len(sorted_keys))
    return numbers - np.maximum.accumulate(np.where(starts, numbers, 0))


def _bounds(shape: tuple[int, ...], place: tuple[np.ndarray, ...], chance: Float[np.ndarray, " row"]) -> np.ndarray:
    """Cumulative along the last axis, without its end; 1 behind the last draw, so that none of those is made."""
    dense = np.zeros(shape)
    dense[place] = chance
    drawn = np.zeros(shape, bool)
    drawn[place] = True
    bounds = np.cumsum(dense, axis=-1)
    bounds[..., :-1][~drawn[..., 1:]] = 1.0
    return bounds[..., :-1].astype(np.float32)
