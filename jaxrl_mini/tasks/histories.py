"""A task's histories as a tree.

A language model sees what happened, not a state, so whatever is exact about it goes over all sequences of observations
and actions after which an episode is still open. Where the instance, a state or a draw of chance is hidden, several
pairs of node and instance share a history; how likely each is, actions being given, no policy changes.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_mini.tasks.compiled import ENDED, CompiledTask
from jaxrl_mini.tasks.segments import segments

MAX_HISTORIES = 200_000
"""Of a task whose language models are evaluated exactly."""
MAX_WAYS = 20_000_000
"""The same for the ways in which histories of one length, and what is hidden, can go on."""


class Weights(NamedTuple):
    """What histories weigh for each instance, instance by instance, then in the order of the histories."""

    instance: Int[np.ndarray, " entry"]
    history: Int[np.ndarray, " entry"]
    action: Int[np.ndarray, " entry"]
    value: Float[np.ndarray, " entry"]

    def sums(self, values: Float[np.ndarray, " entry"], instances: int) -> Float[np.ndarray, " instance"]:
        """Of some figures of the entries, by instance."""
        ends = np.searchsorted(self.instance, np.arange(instances + 1))
        return np.array([values[begin:end].sum() for begin, end in itertools.pairwise(ends)])


class Histories(NamedTuple):
    """Open histories, level by level: first the openings, then those of one action, and so on."""

    parent: Int[np.ndarray, " history"]
    """The history without its last action; of an opening, itself."""
    segment: Int[np.ndarray, " history"]
    """What its last action appended (see `segments`); `nothing` for an opening."""
    action: Int[np.ndarray, " history"]
    """Its last action; 0 for an opening."""
    opening: Int[np.ndarray, " history"]
    step: Int[np.ndarray, " history"]
    """Actions in it."""
    ancestors: Int[np.ndarray, "history ancestor"]
    """Proper ancestors but the opening, oldest first; 0, which is an opening, where there is none."""
    factor: int
    keys: Int[np.ndarray, " history"]
    """parent * factor + segment, rising; -1 for an opening."""
    mass: Weights
    """The probability of passing through a history, its actions being given. The action does not matter."""
    wins: Weights
    """The probability that the episode ends with an action there, and that what it hands in is accepted; an entry for
    each action that can hand something in."""

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.parent)

    def can_succeed(self, instances: Sequence[int]) -> Bool[np.ndarray, " history"]:
        """Whether an episode of one of some instances can still succeed."""
        found = np.zeros(self.size, bool)
        found[self.wins.history[(self.wins.value > 0) & np.isin(self.wins.instance, instances)]] = True
        for step in range(int(self.step.max()), 0, -1):
            found[self.parent[found & (self.step == step)]] = True
        return found

    def numbers(
        self, openings: Int[np.ndarray, "*batch"], shown: Int[np.ndarray, "action *batch"]
    ) -> Int[np.ndarray, "step *batch"]:
        """The number of the history before each action of some episodes, and of any after an episode's end.

        Args:
          openings: of the episodes.
          shown: the segment that each action but the last appended, `nothing` after the end.
        """
        numbers = [openings]
        for appended in shown:
            places = np.searchsorted(self.keys, numbers[-1].astype(np.int64) * self.factor + appended)
            numbers.append(np.minimum(places, self.size - 1).astype(np.int32))
        return np.stack(numbers)


class _Level(NamedTuple):
    """The histories of one number of actions, and what they may be about: pairs of node and instance."""

    first: int
    """The number of the first history."""
    parent: Int[np.ndarray, " history"]
    key: Int[np.ndarray, " history"]
    opening: Int[np.ndarray, " history"]
    ancestors: Int[np.ndarray, "history ancestor"]
    history: Int[np.ndarray, " member"]
    """By number; members are sorted by it, then by node and instance."""
    node: Int[np.ndarray, " member"]
    instance: Int[np.ndarray, " member"]
    mass: Float[np.ndarray, " member"]


@lru_cache(maxsize=16)
def histories(task: CompiledTask) -> Histories | None:
    """The histories of all instances of a task; None where there are too many."""
    pieces, nothing = segments(task), segments(task).nothing
    levels, wins = [_first(task)], []
    while True:
        level = levels[-1]
        count = np.diff(np.searchsorted(task.node, np.arange(len(task.steps) + 1)))[level.node]
        if level.first + len(level.parent) > MAX_HISTORIES or count.sum() > MAX_WAYS:
            return None
        member = np.repeat(np.arange(len(count)), count)
        way = np.arange(len(member)) - np.repeat(np.cumsum(count) - count, count)
        way += np.searchsorted(task.node, level.node)[member]
        flow, ended = level.mass[member] * task.chance[way], task.next_node[way] == ENDED
        submits = ended & (task.submission[way] != ENDED)
        instance = level.instance[member[submits]]
        won = flow[submits] * task.accepted[task.submission[way[submits]], instance]
        wins.append((instance, level.history[member[submits]], task.action[way[submits]], won))
        if ended.all():
            break
        levels.append(_next(task, level, member[~ended], way[~ended], flow[~ended]))
    mass = [(one.instance, one.history, 0 * one.history, one.mass) for one in levels]
    keys, width = np.concatenate([one.key for one in levels]), max(1, len(levels) - 2)
    ancestors = [np.pad(one.ancestors, [(0, 0), (0, width)])[:, :width] for one in levels]
    return Histories(
        parent=np.concatenate([one.parent for one in levels]).astype(np.int32),
        segment=np.where(keys < 0, nothing, keys % (nothing + 1)).astype(np.int32),
        action=np.where(keys < 0, 0, np.append(pieces.actions, 0)[keys % (nothing + 1)]).astype(np.int32),
        opening=np.concatenate([one.opening for one in levels]).astype(np.int32),
        step=np.repeat(np.arange(len(levels)), [len(one.parent) for one in levels]).astype(np.int32),
        ancestors=np.concatenate(ancestors).astype(np.int32),
        factor=nothing + 1,
        keys=keys,
        mass=_weights(mass),
        wins=_weights(wins),
    )


def _first(task: CompiledTask) -> _Level:
    pieces = segments(task)
    openings = np.arange(len(pieces.openings))
    started = _summed((pieces.of_start, task.start_node, task.start_instance), task.start_chance)
    return _Level(0, openings, 0 * openings - 1, openings, np.zeros((len(openings), 0), int), *started)


def _next(
    task: CompiledTask,
    level: _Level,
    member: Int[np.ndarray, " way"],
    way: Int[np.ndarray, " way"],
    flow: Float[np.ndarray, " way"],
) -> _Level:
    """The level after another, along the ways that go on."""
    pieces = segments(task)
    key, number = np.unique(
        level.history[member].astype(np.int64) * (pieces.nothing + 1) + pieces.of_outcome[way], return_inverse=True
    )
    parent = key // (pieces.nothing + 1)
    place, own = parent - level.first, [parent[:, None]] if level.first else []
    first = level.first + len(level.parent)
    members = _summed((first + number, task.next_node[way], level.instance[member]), flow)
    return _Level(
        first, parent, key, level.opening[place], np.concatenate([level.ancestors[place], *own], axis=1), *members
    )


def _summed(keys: tuple[np.ndarray, ...], values: Float[np.ndarray, " row"]) -> tuple[np.ndarray, ...]:
    """The keys that there are, in order, and the sum of each one's values."""
    order = np.lexsort(keys[::-1])
    sorted_keys = [key[order] for key in keys]
    new = np.any([np.diff(key, prepend=-1) != 0 for key in sorted_keys], axis=0)
    (starts,) = np.nonzero(new)
    sums = np.add.reduceat(values[order], starts) if len(starts) else values[:0]
    return *(key[starts] for key in sorted_keys), sums


def _weights(levels: Sequence[tuple[np.ndarray, ...]]) -> Weights:
    instance, history, action, value = (np.concatenate(column) for column in zip(*levels, strict=True))
    return Weights(*_summed((instance, history, action), value))
