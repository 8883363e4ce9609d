"""What a task is: a class in readable Python that a person can play, and from which everything else is made."""

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, SupportsFloat

alternative: Callable[[Sequence[Any]], int] | None = None
"""What `Task.chance` asks while a task is enumerated."""


class Task:
    """A finite task. A subclass says what the attributes are and what `reset`, `step` and `verify` do.

    A person plays it: `reset`, then `step` until `ended`. Tables are made of it by enumeration, so all that it does
    must follow from `state`, the action and `chance`; it owns no generator of random numbers, no clock, no counter
    outside of `state`. What `submission` is when an episode ends is handed to `verify`, after the end.
    """

    actions: Sequence[str]
    """Names of the actions, at least two."""
    max_steps: int
    """Actions in an episode, at most; `ended` is true after so many."""
    header: str
    """What a language model reads first."""
    splits: Mapping[str, Sequence[Hashable]] = {"train": (None,)}
    """Instances of the task by the name of their split; a group of training plays one of `train`."""
    ended: bool = False
    """No action follows. An attribute or a property."""
    state: Hashable
    """Whatever the future depends on: equal states have equal futures, but for what `verify` says."""
    view: Hashable
    """What a table policy may tell apart; it follows from `state`. With the step, the policy's context."""
    submission: Hashable | None = None
    """What was handed in when the episode ended; None: nothing, reward 0."""

    def reset(self, instance: Any) -> str:
        """Starts an episode of one instance and returns the first observation."""
        raise NotImplementedError

    def step(self, action: str) -> str:
        """Takes one of `actions` and returns the observation."""
        raise NotImplementedError

    @staticmethod
    def verify(submission: Any, instance: Any) -> float:
        """The probability that the private check accepts what was handed in."""
        raise NotImplementedError

    def chance(self, weights: Sequence[SupportsFloat]) -> int:
        """The number of an alternative, by their weights: drawn when a person plays, enumerated for tables."""
        if alternative:
            return alternative(weights)
        (drawn,) = random.choices(range(len(weights)), [float(weight) for weight in weights])
        return drawn


class Episode:
    """An episode of a task on its way: what was seen and done so far.

    Args:
      task: the task; while this goes on nothing else may play it.
      instance: what is played.
    """

    def __init__(self, task: Task, instance: Any):
        self.task, self.instance = task, instance
        self.observations = [task.reset(instance)]
        self.actions: list[int] = []

    def step(self, action: int) -> None:
        """Takes an action, by its number."""
        self.observations.append(self.task.step(self.task.actions[action]))
        self.actions.append(action)
