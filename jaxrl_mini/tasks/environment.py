"""Any task as an environment of Gymnasium: what others' trainers reach can be held against the exact figures."""

import operator
from typing import Any, SupportsIndex

from jaxrl_mini.config import UserError
from jaxrl_mini.tasks.specification import load_task, make_task

try:
    import gymnasium
except ModuleNotFoundError as error:
    raise UserError("an environment needs the package gymnasium: install the extra [gymnasium]") from error

OBSERVATIONS = ("context", "text")


class TaskEnv(gymnasium.Env):  # type: ignore[misc]
    """A task, played by numbers of actions. `reset` draws an instance; all that is random follows from its `seed`.

    The reward is the private verifier's verdict, 1 or 0, after the last step, and 0 before. An episode that is out of
    steps is terminated, not truncated: the limit is part of the task.

    Args:
      task: as `--task` says it.
      split: whose instances are played.
      observations: `context`, the number of the context in a table of logits, and that after the last one once the
        episode is over; or `text`, what the task shows. Either way `info["text"]` has the text.

    Raises:
      UserError: gymnasium is missing, there is no such task or split, or `observations` is something else.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012, as Gymnasium has it

    def __init__(self, task: str, split: str = "train", observations: str = "context"):
        tables = load_task(task)
        if split not in tables.splits:
            raise UserError(f"split {split!r} is not there: expected one of {', '.join(tables.splits)}")
        if observations not in OBSERVATIONS:
            raise UserError(f"observations {observations!r} are not there: expected one of {', '.join(OBSERVATIONS)}")
        self.task, self.split, self.observations = make_task(task), split, observations
        self.task.chance = self._chance  # type: ignore[method-assign]
        self._width, self._over = tables.width, tables.shape[0]
        self._contexts = {(context // self._width, view): context for context, view in tables.views.items()}
        self.action_space = gymnasium.spaces.Discrete(len(tables.actions))
        self.observation_space = gymnasium.spaces.Discrete(self._over + 1)
        if observations == "text":
            characters = "".join(sorted(set("".join(tables.texts)))) or " "
            longest = max(1, *map(len, tables.texts))
            self.observation_space = gymnasium.spaces.Text(longest, min_length=0, charset=characters)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode; see Gymnasium."""
        super().reset(seed=seed)
        members = self.task.splits[self.split]
        self._instance, self._steps = members[int(self.np_random.integers(len(members)))], 0
        return self._seen(self.task.reset(self._instance))

    def step(self, action: SupportsIndex) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes an action by its number; see Gymnasium."""
        text, reward = self.task.step(self.task.actions[operator.index(action)]), 0.0
        self._steps += 1
        if self.task.ended and self.task.submission is not None:
            accepted = float(self.task.verify(self.task.submission, self._instance))
            reward = float(self.np_random.random() < accepted)
        observation, info = self._seen(text)
        return observation, reward, bool(self.task.ended), False, info

    def _seen(self, text: str) -> tuple[Any, dict[str, Any]]:
        if self.observations == "text":
            return text, {"text": text}
        return self._over if self.task.ended else self._contexts[self._steps, self.task.view], {"text": text}

    def _chance(self, weights: Any) -> int:
        shares = [float(weight) for weight in weights]
        return int(self.np_random.choice(len(shares), p=[share / sum(shares) for share in shares]))
