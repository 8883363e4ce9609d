"""What one episode of a policy does, on each instance of a task: all that the moments of gradients are made of."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxrl_mini.config import UserError
from jaxrl_mini.episodes.rewards import rewarded
from jaxrl_mini.exact.situations import added, ahead, reach
from jaxrl_mini.tasks.compiled import ENDED, CompiledTask
from jaxrl_mini.tasks.situations import Level, stacked

REWARDS = 2
MAX_LAW = 10_000_000
"""Numbers in the laws of a task's instances, at most."""


class Law(NamedTuple):
    """What one episode of a policy does, on one instance. An episode passes through a context at most once."""

    choices: Float[np.ndarray, "reward length context action"]
    """The probability that an episode takes the action there and ends with this reward and length."""
    ends: Float[np.ndarray, "reward length"]
    """The probability that it ends with this reward and length."""
    probs: Float[np.ndarray, "context action"]
    """The policy."""

    @property
    def success(self) -> float:
        """The probability of reward 1."""
        return float(self.ends[1].sum())

    @property
    def scores(self) -> Float[np.ndarray, "reward length context action"]:
        """The expectation of the sum of grad log p over an episode with this reward and length, by the logits."""
        return self.choices - self.probs * self.choices.sum(axis=3, keepdims=True)

    @property
    def squared_scores(self) -> Float[np.ndarray, "reward length"]:
        """The same of the squared norm of that sum: its parts in different contexts are orthogonal."""
        squares = 1.0 - 2.0 * self.probs + (self.probs**2).sum(axis=1, keepdims=True)
        return (self.choices * squares).sum(axis=(2, 3))

    @property
    def gradient(self) -> Float[np.ndarray, "context action"]:
        """The gradient of the probability of reward 1 by the logits."""
        return self.scores[1].sum(axis=0)


def laws_of(task: CompiledTask, log_probs: Float[np.ndarray, "context action"], reward: str = "verifier") -> list[Law]:
    """The laws of a table policy's episodes on each instance of the split `train`, by dynamic programming.

    Args:
      task: the task.
      log_probs: of the actions in every context.
      reward: what is rewarded, but `shuffled`; `public-test` of the article's task alone.

    Raises:
      UserError: the task is too large (see `check_task`).
    """
    check_task(task)
    if reward == "public-test":
        task = _public_test(task)
    found, instances, lengths = stacked(task, "train"), len(task.splits["train"]), task.max_steps + 1
    probs = np.exp(np.asarray(log_probs, np.float64))

    def gain(level: Level, step: Any) -> np.ndarray:
        ends, gained = level.target == ENDED, np.zeros((len(level.target), REWARDS, lengths))
        success = rewarded(level.accepted, reward=reward)
        gained[ends, :, step + 1] = np.stack([1.0 - success[ends], success[ends]], axis=1)
        return gained.reshape(len(gained), -1)

    mass = reach(found, probs)
    value, choices = ahead(found, probs, mass, gain, kinds=REWARDS * lengths, instances=instances)
    ends = added(mass[0][:, None] * value, found.levels.instance[0], instances)
    choices = np.moveaxis(choices, 3, 1).reshape(instances, REWARDS, lengths, *probs.shape)
    return [Law(*one, probs) for one in zip(choices, ends.reshape(instances, REWARDS, lengths), strict=True)]


def check_task(task: CompiledTask) -> None:
    """Refuses a task whose laws are too large.

    Raises:
      UserError: they are.
    """
    instances, (contexts, actions) = len(task.splits["train"]), task.shape
    numbers = instances * contexts * actions * REWARDS * (task.max_steps + 1)
    if numbers > MAX_LAW:
        raise UserError(
            f"task {task.name} has {instances} instances x {contexts} contexts x {actions} actions x {task.max_steps} "
            f"steps, which makes {numbers} numbers: expected at most {MAX_LAW}"
        )
    stacked(task, "train")


@lru_cache(maxsize=1)
def _public_test(task: CompiledTask) -> CompiledTask:
    """The article's task with the public test in the verifier's place, which passes whatever is submitted."""
    return dataclasses.replace(task, accepted=np.ones_like(task.accepted))


def mean_success(laws: Sequence[Law]) -> float:
    """The probability of reward 1, with instances that are equally likely."""
    return float(np.mean([law.success for law in laws]))


OBJECTIVES = ("success", "arcsin", "log")
"""What the expected gradient of an estimator can be that of: the mean over the instances of their success p, of
arcsin(sqrt(p)), and of log(p)."""


def objective_gradient(laws: Sequence[Law], objective: str) -> Float[np.ndarray, "context action"]:
    """The gradient of one of `OBJECTIVES` by the logits, the mean over instances of f'(p) * grad p.

    f'(p) is 1, 1 / (2 sqrt(p (1 - p))) and 1 / p. Instances that never succeed, or always, have grad p = 0 and count
    as nothing.
    """

    def slope(p: float) -> float:
        if objective == "success":
            return 1.0
        if not 0.0 < p < 1.0:
            return 0.0
        return 1.0 / p if objective == "log" else 0.5 / (p * (1.0 - p)) ** 0.5

    return np.mean([slope(law.success) * law.gradient for law in laws], axis=0)
