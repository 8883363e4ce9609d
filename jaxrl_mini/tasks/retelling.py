"""What an episode showed, told from its actions and contexts: what was hidden is chosen as the likeliest."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_mini.tasks.compiled import ENDED, CompiledTask


class Way(NamedTuple):
    """How an episode came to a node."""

    chance: float
    texts: tuple[str, ...]


def retold(
    task: CompiledTask, instance: int, contexts: Sequence[int], actions: Sequence[int], submission: int
) -> tuple[str, ...]:
    """The observations of an episode: the first, and that after each action.

    Args:
      task: what was played.
      instance: its number.
      contexts: where the policy saw itself, before each action.
      actions: by their numbers.
      submission: what was handed in, counted from 1; 0 for nothing.

    Raises:
      ValueError: the task has no such episode.
    """
    ways: dict[int, Way] = {}
    for start in np.flatnonzero(task.start_instance == instance):
        node, way = int(task.start_node[start]), Way(task.start_chance[start], (task.texts[task.start_text[start]],))
        if task.contexts[node] == contexts[0]:
            _keep(ways, node, way)
    sorted_keys = task.node.astype(np.int64) * len(task.actions) + task.action
    for step, action in enumerate(actions):
        after: dict[int, Way] = {}
        for node, way in ways.items():
            first, end = np.searchsorted(sorted_keys, np.array([0, 1]) + node * len(task.actions) + action)
            for one in range(first, end):
                target = int(task.next_node[one])
                if step + 1 == len(actions):
                    goes_so = target == ENDED and task.submission[one] - ENDED == submission
                else:
                    goes_so = target != ENDED and task.contexts[target] == contexts[step + 1]
                if goes_so:
                    texts = *way.texts, task.texts[task.text[one]]
                    _keep(after, target, Way(way.chance * task.chance[one], texts))
        ways = after
    if not ways:
        raise ValueError(f"task {task.name} has no such episode")
    return max(ways.values(), key=lambda way: way.chance).texts


def _keep(ways: dict[int, Way], node: int, way: Way) -> None:
    if node not in ways or way.chance > ways[node].chance:
        ways[node] = way
