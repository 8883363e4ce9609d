"""What a language model's programs are given of a task, and what its episodes leave behind, as arrays.

Steps, actions and draws of chance are those of `dynamics`; pieces of text have the numbers of `segments`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_mini.tasks.compiled import CompiledTask
from jaxrl_mini.tasks.dynamics import by_outcome, by_start, dynamics
from jaxrl_mini.tasks.histories import Histories
from jaxrl_mini.tasks.segments import segments
from jaxrl_mini.types import AnyArray

HISTORIES_AT_ONCE = 32
"""Rows of one step of exact evaluation: small enough for the caches of a GPT-2, large enough to fill two cores."""


class Prompts(NamedTuple):
    """What some episodes were shown."""

    openings: Int[AnyArray, " episode"]
    segments: Int[AnyArray, "action episode"]
    """What each action but the last of an episode of full length appended; `nothing` from an episode's end on."""


class Played(NamedTuple):
    """Episodes after their end."""

    choices: Int[AnyArray, "step episode"]
    """What was done where: view * actions + action, -1 after the end."""
    submission: Int[AnyArray, " episode"]
    """What was handed in, counted from 1; 0 for nothing."""
    prompts: Prompts


def prompts_of(task: CompiledTask, observations: Sequence[str], actions: Sequence[int]) -> Prompts:
    """What an episode was shown that has taken these actions and is still open."""
    pieces = segments(task)
    numbers = {pair: number for number, pair in enumerate(zip(pieces.actions.tolist(), pieces.texts, strict=True))}
    shown = np.full((task.max_steps - 1, 1), pieces.nothing, np.int32)
    for step, seen in enumerate(zip(actions, observations[1:], strict=True)):
        shown[step] = numbers[seen]
    return Prompts(np.array([pieces.openings.index(observations[0])], np.int32), shown)


class Scene(NamedTuple):
    """Where every action leads, and what it shows; see `Dynamics`."""

    bounds: Float[AnyArray, "step row action bound"]
    next_row: Int[AnyArray, "step row action draw"]
    submission: Int[AnyArray, "step row action draw"]
    segment: Int[AnyArray, "step row action draw"]
    view: Int[AnyArray, "step place"]


class Start(NamedTuple):
    """Where episodes begin, and the numbers in [0, 1) that they are drawn with."""

    rows: Int[AnyArray, " episode"]
    openings: Int[AnyArray, " episode"]
    uniforms: Float[AnyArray, "step episode"]
    """For actions."""
    chances: Float[AnyArray, "step episode"] | None
    """For draws of chance; None where a task makes none after the start."""


@lru_cache(maxsize=16)
def scene(task: CompiledTask) -> Scene:
    """A task's, as NumPy arrays."""
    tables, pieces = dynamics(task), segments(task)
    shown = by_outcome(task, pieces.of_outcome, pieces.nothing)
    return Scene(tables.bounds, tables.next_row, tables.submission, shown, tables.view)


@lru_cache(maxsize=16)
def first_openings(task: CompiledTask) -> Int[np.ndarray, "instance draw"]:
    """What an instance and a draw of chance show first."""
    return by_start(task, segments(task).of_start)


class Pages(NamedTuple):
    """Histories, and the places of what is kept of them while they are read: a page for each that goes on."""

    segment: Int[AnyArray, " history"]
    opening: Int[AnyArray, " history"]
    ancestors: Int[AnyArray, "history ancestor"]
    page: Int[AnyArray, " history"]
    """Beyond the last page where none is needed. Trees that are read one after the other share theirs."""


class Reading(NamedTuple):
    """How histories are read."""

    pages: Pages
    room: int
    """Pages."""
    waves: Int[np.ndarray, " opening"]
    """Trees of openings in one wave are read level by level; a wave follows the other, in the same pages."""


def reading(found: Histories) -> Reading:
    """Lays the histories out in as few pages as the largest tree needs."""
    goes_on = np.unique(found.parent[found.step > 0])
    sizes = np.bincount(found.opening[goes_on], minlength=int(found.opening.max()) + 1)
    room, waves, used = max(1, int(sizes.max())), np.zeros(len(sizes), np.int32), 0
    for opening, size in enumerate(sizes.tolist()):
        fits = used + size <= room
        waves[opening] = waves[opening - 1] + (not fits) if opening else 0
        used = used + size if fits else size
    page = np.full(found.size, room, np.int32)
    of_page = waves[found.opening[goes_on]]
    for wave in range(int(waves[-1]) + 1):
        mine = goes_on[of_page == wave]
        page[mine] = np.arange(len(mine))
    return Reading(Pages(found.segment, found.opening, found.ancestors, page), room, waves)


def in_chunks(
    found: Histories, wanted: Bool[np.ndarray, " history"], waves: Int[np.ndarray, " opening"], size: int
) -> Int[np.ndarray, "chunk row"]:
    """The numbers of wanted histories but the openings, wave by wave, level by level.

    The last chunk of a level repeats its last history.
    """
    (numbers,) = np.nonzero(wanted & (found.step > 0))
    keys = waves[found.opening[numbers]].astype(np.int64) * (int(found.step.max()) + 1) + found.step[numbers]
    chunks = [np.zeros((0, size), np.int64)]
    for key in np.unique(keys):
        level = numbers[keys == key]
        chunks.append(np.pad(level, (0, -len(level) % size), mode="edge").reshape(-1, size))
    return np.concatenate(chunks).astype(np.int32)
