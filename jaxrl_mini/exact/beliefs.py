"""What can be said of a task without any policy: what chance alone reaches, what can be reached at best, how many ways.

A policy that remembers everything it saw knows a belief: how likely each pair of node and instance is, given the
observations. The best that it can reach follows by dynamic programming over beliefs, from the last step to the first.
Source: Åström 1965 (doi:10.1016/0022-247X(65)90154-X).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from jaxrl_mini.config import UserError
from jaxrl_mini.tasks.compiled import ENDED, CompiledTask
from jaxrl_mini.tasks.histories import MAX_HISTORIES, MAX_WAYS, histories

MAX_BELIEFS = 1_000_000
"""Beliefs that are looked at, at most."""
DIGITS = 12
"""To which probabilities of a belief are the same."""


class Reached(NamedTuple):
    """Expectations over the episodes of a split."""

    success: float
    mean_actions: float


Belief = tuple[tuple[int, int, float], ...]
"""Pairs of node and instance, in order, with their probabilities."""


class _Steps:
    """The outcomes of each (node, action) as plain Python."""

    def __init__(self, task: CompiledTask):
        self.task, count = task, len(task.actions)
        self.of: list[list[list[tuple[float, int, int, int]]]] = [[[] for _ in range(count)] for _ in task.steps]
        columns = (task.node, task.action, task.chance, task.next_node, task.text, task.submission)
        for node, action, *outcome in zip(*(column.tolist() for column in columns), strict=True):
            self.of[node][action].append(tuple(outcome))
        self.accepted = task.accepted.tolist()


def uniform(task: CompiledTask, split: str) -> Reached:
    """Success and actions of play in which every action is as likely as any other.

    The probability of each node, instance by instance, moves through the outcomes level by level.
    """
    instances = np.array(task.splits[split])
    place = np.full(len(task.instances), -1)
    place[instances] = np.arange(len(instances))
    mass = np.zeros((len(task.steps), len(instances)))
    of_split = place[task.start_instance] >= 0
    np.add.at(mass, (task.start_node[of_split], place[task.start_instance[of_split]]), task.start_chance[of_split])
    accepted = np.concatenate([task.accepted[:, instances], np.zeros((1, len(instances)))])  # the last row: nothing
    success, first = 0.0, np.searchsorted(task.steps[task.node], np.arange(task.max_steps + 1))
    for step in range(task.max_steps):
        rows = slice(first[step], first[step + 1])
        flow = mass[task.node[rows]] * (task.chance[rows, None] / len(task.actions))
        ended = task.next_node[rows] == ENDED
        success += float((flow[ended] * accepted[task.submission[rows][ended]]).sum())
        np.add.at(mass, task.next_node[rows][~ended], flow[~ended])
    return Reached(success / len(instances), float(mass.sum()) / len(instances))


def best(task: CompiledTask, split: str) -> Reached:
    """The highest success that a policy with memory can have on a split, and its fewest actions.

    The policy knows the split, that its instances are equally likely, and everything about the task but the instance.

    Raises:
      UserError: there are too many beliefs.
    """
    steps, instances = _Steps(task), set(task.splits[split])
    starts = [
        (text, node, instance, chance / len(task.splits[split]))
        for instance, node, chance, text in zip(
            *(getattr(task, f"start_{name}").tolist() for name in ("instance", "node", "chance", "text")), strict=True
        )
        if instance in instances
    ]
    roots = _by_text(starts)
    levels: list[dict[Belief, list[tuple[float, list[tuple[float, Belief]]]]]] = []
    open_now, seen = list(dict.fromkeys(belief for _, belief in roots)), 0
    while open_now:
        seen += len(open_now)
        if seen > MAX_BELIEFS:
            raise UserError(f"task {task.name} has more than {MAX_BELIEFS} beliefs: its best success is out of reach")
        levels.append({belief: _choices(steps, belief) for belief in open_now})
        after = (belief for choices in levels[-1].values() for _, goes_on in choices for _, belief in goes_on)
        open_now = list(dict.fromkeys(after))
    value: dict[Belief, tuple[float, float]] = {}
    for level in reversed(levels):
        value = {belief: _best_of(choices, value) for belief, choices in level.items()}
    success, actions = (sum(chance * value[belief][i] for chance, belief in roots) for i in range(2))
    return Reached(success, actions)


def _choices(steps: _Steps, belief: Belief) -> list[tuple[float, list[tuple[float, Belief]]]]:
    """By action: the probability of success at once, and of what may be believed next."""
    choices = []
    for action in range(len(steps.task.actions)):
        success, goes_on = 0.0, []
        for node, instance, chance in belief:
            for share, after, text, submission in steps.of[node][action]:
                if after != ENDED:
                    goes_on.append((text, after, instance, chance * share))
                elif submission != ENDED:
                    success += chance * share * steps.accepted[submission][instance]
        choices.append((success, _by_text(goes_on)))
    return choices


def _by_text(pairs: Sequence[tuple[int, int, int, float]]) -> list[tuple[float, Belief]]:
    """What may be seen: how likely it is, and what is believed then."""
    seen: dict[int, dict[tuple[int, int], float]] = {}
    for text, node, instance, chance in pairs:
        mass = seen.setdefault(text, {})
        mass[node, instance] = mass.get((node, instance), 0.0) + chance
    beliefs = []
    for mass in seen.values():
        total = sum(mass.values())
        beliefs.append((total, tuple((*pair, round(one / total, DIGITS)) for pair, one in sorted(mass.items()))))
    return beliefs


def _best_of(
    choices: list[tuple[float, list[tuple[float, Belief]]]], value: dict[Belief, tuple[float, float]]
) -> tuple[float, float]:
    """The highest success, and among actions that have it but for rounding the fewest actions."""
    reached = []
    for success, goes_on in choices:
        more = [(chance, *value[belief]) for chance, belief in goes_on]
        reached.append((success + sum(p * s for p, s, _ in more), 1.0 + sum(p * a for p, _, a in more)))
    highest = max(success for success, _ in reached)
    return highest, min(actions for success, actions in reached if success > highest - 10.0**-DIGITS)


def count_histories(task: CompiledTask) -> int:
    """How many sequences of observations and actions there are after which an episode, of any instance, is open."""
    steps = _Steps(task)

    @cache
    def after(nodes: frozenset[int]) -> int:
        total = 1
        for action in range(len(task.actions)):
            seen: dict[int, set[int]] = {}
            for node in nodes:
                for _, following, text, _ in steps.of[node][action]:
                    if following != ENDED:
                        seen.setdefault(text, set()).add(following)
            total += sum(after(frozenset(some)) for some in seen.values())
        return total

    starts: dict[int, set[int]] = {}
    for node, text in zip(task.start_node.tolist(), task.start_text.tolist(), strict=True):
        starts.setdefault(text, set()).add(node)
    return sum(after(frozenset(some)) for some in starts.values())


def too_many(task: CompiledTask) -> str | None:
    """What there is too much of for exact figures of a language model, in words; None where they are computed."""
    if histories(task) is not None:
        return None
    count = count_histories(task)
    if count > MAX_HISTORIES:
        return f"task {task.name} has {count:,} histories: expected at most {MAX_HISTORIES:,}"
    return f"task {task.name} has {count:,} histories of which those of one length go on in more than {MAX_WAYS:,} ways"


def count_episodes(task: CompiledTask) -> int:
    """How many complete episodes there are: starts, actions and draws of chance, over all instances."""
    counts = [0] * len(task.steps)
    for node, following in zip(reversed(task.node.tolist()), reversed(task.next_node.tolist()), strict=True):
        counts[node] += 1 if following == ENDED else counts[following]
    return sum(counts[node] for node in task.start_node.tolist())
