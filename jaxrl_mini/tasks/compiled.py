"""A task as tables: immutable, with a digest, and an argument wherever a task is needed."""

import hashlib
import itertools
import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_mini.config import UserError
from jaxrl_mini.tasks.enumeration import Enumeration, Outcome, enumerate_task, raised
from jaxrl_mini.tasks.task import Task

MAX_ACTIONS, MAX_STEPS, MAX_INSTANCES = 256, 1000, 4096
MAX_NODES = 500_000
"""Pairs of a step and a state that is open there."""
ENDED = -1
"""In place of a node, where an episode ended; in place of a submission, where nothing was handed in."""


@dataclass(frozen=True, eq=False, repr=False)
class CompiledTask:
    """Everything a task can do, as tables.

    A node is a step with a state that is open there, hidden from the policy; a context is a step with a view, which is
    all that a table policy sees. An outcome is what one draw of chance makes of an action in a node; outcomes are
    sorted by node, then action. Two of these are equal if their digests are.
    """

    name: str
    """The specification: `repair:lines=3`, or `FILE.py:CLASS`."""
    actions: tuple[str, ...]
    max_steps: int
    header: str
    splits: Mapping[str, tuple[int, ...]]
    """Numbers of instances by split."""
    instances: tuple[str, ...]
    """What they are, to be shown."""
    texts: tuple[str, ...]
    """All observations."""
    steps: Int[np.ndarray, " node"]
    contexts: Int[np.ndarray, " node"]
    """step * width + number of the view."""
    views: Mapping[int, Hashable]
    """The view of each context that can be met."""
    width: int
    """Views in a step, at most."""
    start_instance: Int[np.ndarray, " start"]
    start_node: Int[np.ndarray, " start"]
    start_chance: Float[np.ndarray, " start"]
    start_text: Int[np.ndarray, " start"]
    node: Int[np.ndarray, " outcome"]
    action: Int[np.ndarray, " outcome"]
    chance: Float[np.ndarray, " outcome"]
    next_node: Int[np.ndarray, " outcome"]
    """`ENDED` where the episode ends."""
    text: Int[np.ndarray, " outcome"]
    submission: Int[np.ndarray, " outcome"]
    """What is handed in where the episode ends; `ENDED` for nothing."""
    accepted: Float[np.ndarray, "submission instance"]
    """The probability that the private check accepts."""
    idle: Bool[np.ndarray, " action"]
    """It never changes anything but what every action changes."""

    @property
    def shape(self) -> tuple[int, int]:
        """Contexts, those that cannot be met among them, and actions: of a table of logits."""
        return self.max_steps * self.width, len(self.actions)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that a run can depend on, in hexadecimal."""
        texts = [self.actions, self.max_steps, self.header, dict(self.splits), self.texts, self.width]
        digest = hashlib.sha256(json.dumps(texts).encode())
        for name in (
            "steps", "contexts", "start_instance", "start_node", "start_chance", "start_text",
            "node", "action", "chance", "next_node", "text", "submission", "accepted",
        ):  # fmt: skip
            array = getattr(self, name)
            digest.update(f"{name} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array, "<f8" if array.dtype.kind == "f" else "<i4").tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"CompiledTask({self.name!r}, {self.digest!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompiledTask) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def compile_task(task: Task, name: str) -> CompiledTask:
    """Checks a task and enumerates it (see `enumeration`).

    Raises:
      UserError: the task cannot be what it says; the message names the attribute, or state and action.
    """
    _check(task, name)
    instances = tuple(dict.fromkeys(one for split in task.splits.values() for one in split))
    places = {one: number for number, one in enumerate(instances)}
    splits = {split: tuple(places[one] for one in members) for split, members in task.splits.items()}
    found = enumerate_task(task, name, instances)
    nodes, levels = _nodes(found, name)
    contexts, views, width = _contexts(found, levels)
    outcomes = [
        (nodes[step, number], action, step, one)
        for step, level in enumerate(levels)
        for number in level
        for action, possible in enumerate(found.states[number].outcomes)
        for one in possible
    ]
    starts = [(instance, one) for instance, possible in enumerate(found.starts) for one in possible]
    texts = tuple(dict.fromkeys([one.text for _, one in starts] + [one.text for *_, one in outcomes]))
    text_numbers = {text: number for number, text in enumerate(texts)}
    ends = (one.submission for *_, one in outcomes if one.state is None and one.submission is not None)
    submissions = {one: number for number, one in enumerate(dict.fromkeys(ends))}

    def next_node(step: int, one: Outcome) -> int:
        return ENDED if one.state is None else nodes[step + 1, one.state]

    def handed_in(one: Outcome) -> int:
        return ENDED if one.submission is None else submissions[one.submission]

    compiled = CompiledTask(
        name=name,
        actions=tuple(task.actions),
        max_steps=task.max_steps,
        header=task.header,
        splits=splits,
        instances=tuple(map(shown, instances)),
        texts=texts,
        steps=_whole(step for step, level in enumerate(levels) for _ in level),
        contexts=_whole(contexts),
        views=views,
        width=width,
        start_instance=_whole(instance for instance, _ in starts),
        start_node=_whole(nodes[0, one.state] for _, one in starts if one.state is not None),
        start_chance=np.array([one.chance for _, one in starts]),
        start_text=_whole(text_numbers[one.text] for _, one in starts),
        node=_whole(node for node, *_ in outcomes),
        action=_whole(action for _, action, *_ in outcomes),
        chance=np.array([one.chance for *_, one in outcomes]),
        next_node=_whole(next_node(step, one) for _, _, step, one in outcomes),
        text=_whole(text_numbers[one.text] for *_, one in outcomes),
        submission=_whole(handed_in(one) for *_, one in outcomes),
        accepted=_accepted(task, name, tuple(submissions), instances),
        idle=np.all([state.idle for state in found.states if state.idle], axis=0),
    )
    for value in vars(compiled).values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return compiled


def _check(task: Task, name: str) -> None:
    """Refuses attributes that no task can have."""

    def refuse(attribute: str, right: str) -> None:
        value = getattr(task, attribute, None)
        raise UserError(f"task {name} has {attribute} {repr(value)[:200]}: expected {right}")

    actions = getattr(task, "actions", None)
    names = list(actions) if isinstance(actions, list | tuple) else []
    if not all(isinstance(one, str) and one.strip() == one and one.isprintable() and one for one in names):
        refuse("actions", "names without spaces around them, on one line")
    if not 2 <= len(names) <= MAX_ACTIONS or len(set(names)) < len(names):
        refuse("actions", f"a list or tuple of 2 to {MAX_ACTIONS} names, each once")
    steps = getattr(task, "max_steps", None)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
        refuse("max_steps", f"a whole number from 1 to {MAX_STEPS}")
    if not isinstance(getattr(task, "header", None), str) or not task.header.strip():
        refuse("header", "the text that a language model reads first")
    splits = getattr(task, "splits", None)
    if not isinstance(splits, Mapping) or "train" not in splits:
        refuse("splits", "a dict of instances by split, train among them")
    for split, members in task.splits.items():
        if not isinstance(split, str) or not split.strip() or isinstance(members, str) or not _are_hashable(members):
            refuse("splits", f"a list or tuple of hashable instances for split {split!r}")
        if not 1 <= len(members) <= MAX_INSTANCES:
            refuse("splits", f"1 to {MAX_INSTANCES} instances in split {split!r}")
        if len(set(members)) < len(members):
            refuse("splits", f"each instance of split {split!r} once")
    for method in ("reset", "step", "verify"):
        if getattr(type(task), method, None) is getattr(Task, method):
            raise UserError(f"task {name} has no {method}: expected a method of that name (see jaxrl_mini.Task)")


def _are_hashable(members: Any) -> bool:
    try:
        return isinstance(members, list | tuple | range) and all(
            hash(one) is not None and one == one for one in members
        )
    except TypeError:
        return False


def _nodes(found: Enumeration, name: str) -> tuple[dict[tuple[int, int], int], list[list[int]]]:
    """Numbers of (step, state), level by level."""
    if sum(map(len, found.levels)) > MAX_NODES:
        raise UserError(f"task {name} has more than {MAX_NODES} pairs of step and state: expected at most so many")
    pairs = [(step, number) for step, level in enumerate(found.levels) for number in level]
    return {pair: node for node, pair in enumerate(pairs)}, found.levels


def _contexts(found: Enumeration, levels: list[list[int]]) -> tuple[list[int], dict[int, Hashable], int]:
    """The context of each node, their views, and how many views a step has.

    Views that are whole numbers from 0, no more in all than some step has, number themselves; others are numbered in
    each step as they are met.
    """
    by_level = [list(dict.fromkeys(found.states[number].view for number in level)) for level in levels]
    width, every = max(map(len, by_level)), {view for views in by_level for view in views}
    if all(type(view) is int for view in every) and every == set(range(width)):
        by_level = [list(range(width))] * len(levels)
    numbers = [{view: number for number, view in enumerate(views)} for views in by_level]
    contexts, views = [], {}
    for step, level in enumerate(levels):
        for number in level:
            view = found.states[number].view
            contexts.append(step * width + numbers[step][view])
            views[contexts[-1]] = view
    return contexts, views, width


def _accepted(task: Task, name: str, submissions: tuple[Any, ...], instances: tuple[Any, ...]) -> np.ndarray:
    accepted = np.zeros((len(submissions), len(instances)))
    for (i, submission), (j, instance) in itertools.product(enumerate(submissions), enumerate(instances)):
        values = []
        for _ in range(2):
            try:
                values.append(task.verify(submission, instance))
            except Exception as error:
                raise raised(name, f"verify of {submission!r}", error) from error
        try:
            accepted[i, j] = float(values[0])
        except (TypeError, ValueError):
            accepted[i, j] = np.nan
        if not 0 <= accepted[i, j] <= 1:
            raise UserError(f"task {name}: verify of {submission!r} returned {values[0]!r}: expected a probability")
        if values[0] != values[1]:
            raise UserError(f"task {name}: verify of {submission!r} returned {values[0]!r}, then {values[1]!r}: "
                            "it must follow from submission and instance")  # fmt: skip
    return accepted


def _whole(numbers: Any) -> np.ndarray:
    return np.fromiter(numbers, np.int32)


def shown(value: Any) -> str:
    """A view or an instance as text; sets in the order of their elements' texts, which no process changes."""
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(shown, value))) + "}"
    if type(value) is tuple:
        return "(" + ", ".join(map(shown, value)) + ("," if len(value) == 1 else "") + ")"
    return value if isinstance(value, str) else repr(value)
