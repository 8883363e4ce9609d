"""bandit: one choice among arms, each accepted with a probability of its own."""

from jaxrl_mini.tasks.task import Task


class Bandit(Task):
    """Pull the arm that is accepted most often."""

    max_steps = 1
    header = "Pull one of the arms.\n"

    def __init__(self, success: str = "0.2/0.5/0.8"):
        self.success = tuple(float(one) for one in success.split("/"))
        if len(self.success) < 2 or not all(0 <= one <= 1 for one in self.success):
            raise ValueError(f"success={success} is no list of probabilities: expected P1/P2/..., each from 0 to 1")
        self.actions = tuple(f"arm_{arm + 1}" for arm in range(len(self.success)))
        self.splits = {"train": (self.success,)}

    def reset(self, instance: tuple[float, ...]) -> str:
        """Starts before the only choice."""
        self.pulled, self.submission, self.ended = (), None, False
        return "some arms"

    def step(self, action: str) -> str:
        """Pulls an arm."""
        self.submission, self.ended = self.actions.index(action), True
        return ""

    @property
    def state(self) -> bool:  # type: ignore[override]
        """There is one open state."""
        return self.ended

    view = 0

    @staticmethod
    def verify(submission: int, instance: tuple[float, ...]) -> float:
        """The arm's probability."""
        return instance[submission]
