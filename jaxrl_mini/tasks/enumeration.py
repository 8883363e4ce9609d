"""Every state of a task and every draw of chance, found by playing copies of it; `compiled` makes tables of them.

Breadth-first over states, of all instances. Every step is made twice, from copies; where a state was reached in two
ways, from one copy of each. So what is no function of state, action and chance is found, and refused in one line.
"""

import copy
import pickle
import sys
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsFloat

from jaxrl_mini.config import UserError
from jaxrl_mini.tasks import task as definition
from jaxrl_mini.tasks.task import Task

MAX_STATES = 50_000
"""States of a task, without the step."""
MAX_ALTERNATIVES = 4096
"""Draws of chance in one step, all combinations."""

_IMMUTABLE = (str, bytes, int, float, complex, bool, type(None))


class Outcome(NamedTuple):
    """What one draw of chance makes of a step, or of a reset."""

    chance: float
    state: int | None
    """Its number; None where the episode ended."""
    text: str
    """The observation."""
    submission: Hashable | None
    """What was handed in, where the episode ended."""


@dataclass
class State:
    """An open state."""

    value: Hashable
    view: Hashable
    saved: Any
    """A copy of the task in it, and `how` it got there: an instance and actions."""
    how: tuple[Any, ...]
    again: Any = None
    """Another copy of the task in it, which got there `how_again`."""
    how_again: tuple[Any, ...] = ()
    outcomes: list[list[Outcome]] = field(default_factory=list)
    """By action."""
    idle: list[bool] = field(default_factory=list)
    """By action: it changed nothing but what every action changes, such as a count of steps."""


class Enumeration(NamedTuple):
    """Everything a task can do."""

    states: list[State]
    starts: list[list[Outcome]]
    """By instance."""
    levels: list[list[int]]
    """The states that are open after so many actions."""


def enumerate_task(task: Task, name: str, instances: Sequence[Any]) -> Enumeration:
    """Plays everything that a task can do.

    Args:
      task: an instance of the user's class, checked as far as its attributes go.
      name: what it is called in errors.
      instances: of all splits.

    Raises:
      UserError: a step is no function of state, action and chance, equal states have other futures, an episode goes on
        after `max_steps` actions, there are too many states, or the task's code raised or returned something wrong.
    """
    player = _Player(task, name)
    starts = [player.start(instance) for instance in instances]
    level = list(dict.fromkeys(one.state for start in starts for one in start if one.state is not None))
    levels = []
    for step in range(task.max_steps):
        for number in level:
            player.explore(number)
        player.explore_again()
        levels.append(level)
        states = [player.states[number] for number in level]
        found = (one.state for state in states for outcomes in state.outcomes for one in outcomes)
        level = list(dict.fromkeys(number for number in found if number is not None))
        if level and step + 1 == task.max_steps:
            raise player.error(
                f"goes on after {task.max_steps} actions ({_told(player.states[level[0]].how)}): "
                "`ended` must be true after max_steps"
            )
    return Enumeration(player.states, starts, [one for one in levels if one])


class _Player:
    """Plays copies of a task and numbers what it finds."""

    def __init__(self, task: Task, name: str):
        self.task, self.name, self.actions = task, name, tuple(task.actions)
        self.states: list[State] = []
        self._numbers: dict[Hashable, int] = {}
        self._met_again: list[int] = []
        self._constant = {key: value for key, value in vars(task).items() if _is_immutable(value)}

    def error(self, message: str) -> UserError:
        return UserError(f"task {self.name} {message}")

    def start(self, instance: Any) -> list[Outcome]:
        """What `reset` makes of an instance."""
        saved, how = self._save(self.task), (instance,)
        first, again = ([self._outcome(*one, how) for one in self._play(saved, "reset", instance)] for _ in range(2))
        if first != again:
            raise self.error(f"resets instance {instance!r} in two ways: what it does must follow from the instance")
        if any(one.state is None for one in first):
            raise self.error(f"has ended before the first action of instance {instance!r}")
        return first

    def explore(self, number: int) -> None:
        """Makes every step from a state, twice."""
        state = self.states[number]
        if not state.outcomes:
            before, after = vars(self._load(state.saved)), []
            for action in self.actions:
                played = list(self._play(state.saved, "step", action))
                after.append([vars(task) for _, task, _ in played])
                state.outcomes.append([self._outcome(*one, (*state.how, action)) for one in played])
            state.idle = _idle(before, after)
            self._check(state, state.saved, state.how)

    def explore_again(self) -> None:
        """Makes every step from a state once more, for those that were reached in a second way."""
        while self._met_again:
            state = self.states[self._met_again.pop()]
            if state.again != state.saved:
                self.explore(self._numbers[state.value])
                self._check(state, state.again, state.how_again)

    def _check(self, state: State, saved: Any, how: tuple[Any, ...]) -> None:
        for action, outcomes in zip(self.actions, state.outcomes, strict=True):
            again = [self._outcome(*one, (*how, action)) for one in self._play(saved, "step", action)]
            if again == outcomes:
                continue
            where = f"in state {state.value!r}, action {action!r}"
            if how is state.how:
                raise self.error(f"{where} does two things: a step must follow from state, action and chance")
            raise self.error(
                f"{where} does one thing after {_told(state.how)} and another after {_told(how)}: "
                "equal states must have equal futures"
            )

    def _play(self, saved: Any, method: str, argument: Any) -> Iterator[tuple[float, Task, str]]:
        """Every way in which chance lets a call go: its probability, the task afterwards, the observation."""
        scripts: list[tuple[int, ...]] = [()]
        for played in range(MAX_ALTERNATIVES + 1):
            if not scripts:
                return
            if played == MAX_ALTERNATIVES:
                raise self.error(f"draws more than {MAX_ALTERNATIVES} alternatives in {method} {argument!r}")
            task, script = self._load(saved), scripts.pop()
            drawn = _Script(script, lambda message: self.error(f"{message} in {method} {argument!r}"))
            definition.alternative = drawn
            try:
                text = self._call(f"{method} {argument!r}", getattr(task, method), argument)
            finally:
                definition.alternative = None
            if not isinstance(text, str):
                raise self.error(f"{method} {argument!r} returned {text!r}: expected an observation, a str")
            for place in reversed(range(len(script), len(drawn.taken))):
                taken, others = drawn.taken[: place + 1], drawn.possible[place]
                scripts += [(*taken[:-1], other) for other in reversed(others) if other > taken[-1]]
            yield drawn.chance, task, text

    def _outcome(self, chance: float, task: Task, text: str, how: tuple[Any, ...]) -> Outcome:
        ended = self._call("ended", lambda: task.ended)
        if not isinstance(ended, bool):
            raise self.error(f"has `ended` {ended!r} after {_told(how)}: expected True or False")
        if ended:
            submission = self._hashable("submission", task, how)
            return Outcome(chance, None, text, submission)
        value = self._hashable("state", task, how)
        view = self._hashable("view", task, how)
        number = self._numbers.get(value)
        if number is None:
            if len(self.states) == MAX_STATES:
                raise self.error(f"has more than {MAX_STATES} states: expected at most so many")
            number = self._numbers[value] = len(self.states)
            self.states.append(State(value, view, self._save(task), how))
            return Outcome(chance, number, text, None)
        state = self.states[number]
        if state.view != view:
            raise self.error(
                f"shows state {value!r} as {state.view!r} and as {view!r}: a view must follow from the state"
            )
        if not state.how_again and how != state.how:
            state.again, state.how_again = self._save(task), how
            self._met_again.append(number)
        return Outcome(chance, number, text, None)

    def _hashable(self, attribute: str, task: Task, how: tuple[Any, ...]) -> Hashable:
        value = self._call(attribute, getattr, task, attribute)
        try:
            hash(value)
        except TypeError:
            raise self.error(f"has {attribute} {value!r} after {_told(how)}: expected something hashable") from None
        if value != value:
            raise self.error(f"has {attribute} {value!r} after {_told(how)}, which does not equal itself")
        return value

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except UserError:
            raise
        except Exception as error:
            raise raised(self.name, what, error) from error

    def _save(self, task: Task) -> Any:
        """A copy of a task's attributes but those that never change; bytes where that is possible, which is quick."""
        changing = {key: value for key, value in vars(task).items() if self._constant.get(key, self) is not value}
        try:
            return pickle.dumps(changing, pickle.HIGHEST_PROTOCOL)
        except Exception:  # objects raise what they like
            return self._call("copying it", copy.deepcopy, changing)

    def _load(self, saved: Any) -> Task:
        task = object.__new__(type(self.task))
        vars(task).update(self._constant)
        vars(task).update(pickle.loads(saved) if isinstance(saved, bytes) else copy.deepcopy(saved))
        return task


class _Script:
    """Chance as it is enumerated: alternatives as given, then the first of each draw."""

    def __init__(self, script: Sequence[int], error: Callable[[str], UserError]):
        self._script, self._error = script, error
        self.taken: list[int] = []
        self.possible: list[list[int]] = []
        self.chance = 1.0

    def __call__(self, weights: Sequence[SupportsFloat]) -> int:
        try:
            numbers = [float(weight) for weight in weights]
        except (TypeError, ValueError):
            raise self._error(f"chance got {weights!r}: expected weights") from None
        total = sum(numbers)
        if not all(0 <= number < float("inf") for number in numbers) or not 0 < total < float("inf"):
            raise self._error(f"chance got {weights!r}: expected weights from 0, one of them above")
        possible, place = [i for i, number in enumerate(numbers) if number > 0], len(self.taken)
        taken = self._script[place] if place < len(self._script) else possible[0]
        if taken not in possible:
            raise self._error(f"chance got other weights for the same draws: {weights!r}")
        self.taken.append(taken)
        self.possible.append(possible)
        self.chance *= numbers[taken] / total
        return taken


def raised(name: str, what: str, error: BaseException) -> UserError:
    """One line for an exception in a task's own code, with its place there."""
    ours = sys.modules[__package__].__path__[0]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return UserError(f"task {name}: {what} raised {type(error).__name__}: {str(error)[:200]}{place}")


def _is_immutable(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_immutable, value))
    return type(value) in _IMMUTABLE


def _idle(before: dict[str, Any], after: list[list[dict[str, Any]]]) -> list[bool]:
    """By action: whatever differs between actions is as before."""
    every = [attributes for outcomes in after for attributes in outcomes]
    names = {name for attributes in every for name in attributes}
    own = [name for name in names if any(one.get(name) != every[0].get(name) for one in every)]
    return [all(one.get(name) == before.get(name) for one in outcomes for name in own) for outcomes in after]


def _told(how: tuple[Any, ...]) -> str:
    instance, *actions = how
    of = "" if instance is None else f" of instance {instance!r}"
    return (", ".join(map(str, actions)) or "the start") + of
