"""gymnasium: the environments of Gymnasium that publish their transition tables, such as FrozenLake and Taxi."""

from typing import Any

from jaxrl_mini.config import UserError
from jaxrl_mini.tasks.task import Task


class ToyText(Task):
    """An environment with a table `P[state][action]`, played for so many steps.

    An episode is accepted if it reached the goal: it ended by a transition with the highest reward that ends one. For
    FrozenLake that is the goal and no hole, for CliffWalking the goal, for Taxi the passenger set down where asked.
    """

    def __init__(self, id: str = "FrozenLake-v1", steps: int | None = None, **options: str):
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise UserError("task gymnasium needs the package gymnasium: install the extra [gymnasium]") from error
        try:
            made: Any = gymnasium.make(id, **{name: _value(text) for name, text in options.items()})
        except (gymnasium.error.Error, TypeError) as error:
            raise UserError(f"task gymnasium:{id} is not there ({error}): expected such as FrozenLake-v1") from error
        table: Any = getattr(made.unwrapped, "P", None)
        if table is None:
            raise UserError(f"task gymnasium:{id} has no table P: expected FrozenLake-v1, CliffWalking-v1, Taxi-v4")
        limit = steps or (made.spec.max_episode_steps if made.spec else None)
        if limit is None:
            raise UserError(f"task gymnasium:{id} has no limit of its own: give one, such as gymnasium:{id},steps=100")
        self.max_steps = limit
        self.table = tuple(
            tuple(
                tuple((float(p), int(s), float(r), bool(end)) for p, s, r, end in table[state][action])
                for action in row
            )
            for state, row in sorted(table.items())
        )
        ends = [one[2] for row in self.table for outcomes in row for one in outcomes if one[3]]
        if not ends:
            raise UserError(f"task gymnasium:{id} never ends: expected one that has a goal")
        self.goal = max(ends)
        self.start = tuple(map(float, made.unwrapped.initial_state_distrib))
        self.actions = NAMES.get(id.partition("-")[0], tuple(f"action_{i}" for i in range(len(self.table[0]))))
        self.header = f"Reach the goal of {id}.\n"

    def reset(self, instance: None) -> str:
        """Draws a first state."""
        self.place, self.steps, self.over, self.submission = self.chance(self.start), 0, False, None
        return self._shown()

    def step(self, action: str) -> str:
        """Draws the next state."""
        outcomes = self.table[self.place][self.actions.index(action)]
        _, self.place, reward, self.over = outcomes[self.chance([one[0] for one in outcomes])]
        self.steps += 1
        self.submission = True if self.over and reward == self.goal else None
        return self._shown()

    def _shown(self) -> str:
        return f"state {self.place}"

    @property
    def ended(self) -> bool:  # type: ignore[override]
        """Ended by itself, or out of steps."""
        return self.over or self.steps == self.max_steps

    @property
    def state(self) -> tuple[int, int]:  # type: ignore[override]
        """The environment's state, and the step."""
        return self.place, self.steps

    @property
    def view(self) -> int:  # type: ignore[override]
        """The environment's state."""
        return self.place

    @staticmethod
    def verify(submission: bool, instance: None) -> float:
        """Accepts the goal."""
        return float(submission)


NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pick_up", "drop_off"),
}
"""Actions in their order; source: Gymnasium's documentation of each environment."""


def _value(text: str) -> Any:
    return {"true": True, "false": False, "none": None}.get(text.lower(), int(text) if text.isdigit() else text)
