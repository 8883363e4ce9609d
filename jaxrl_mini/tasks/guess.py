"""guess: a hidden number, and questions that have a price."""

from jaxrl_mini.tasks.task import Task


class Guess(Task):
    """Find the hidden number from 1 to N: ask whether it is greater than some, then say it.

    Every question takes a step, and makes the check accept a right answer less often, by the factor 1 - price.
    """

    def __init__(self, numbers: int = 8, price: float = 0.05, steps: int | None = None):
        if not 2 <= numbers <= 64:
            raise ValueError(f"numbers={numbers} is out of range: expected 2 to 64")
        if not 0 <= price <= 1:
            raise ValueError(f"price={price} is out of range: expected 0 to 1")
        self.numbers, self.price = numbers, price
        self.max_steps = 1 + (numbers - 1).bit_length() if steps is None else steps
        asking = (f"above_{number}" for number in range(1, numbers))
        self.actions = (*asking, *(f"say_{number}" for number in range(1, numbers + 1)))
        self.header = (
            f"Find a number from 1 to {numbers}.\n"
            "Actions: above_i asks whether it is greater than i, say_i says that it is i and ends.\n"
        )
        self.splits = {"train": tuple(range(1, numbers + 1))}

    def reset(self, instance: int) -> str:
        """Hides a number."""
        self.number, self.low, self.high = instance, 1, self.numbers
        self.asked, self.said = 0, 0
        return f"a number from 1 to {self.numbers}"

    def step(self, action: str) -> str:
        """Asks or says."""
        verb, number = action.split("_")
        if verb == "say":
            self.said = int(number)
            return ""
        self.asked += 1
        if self.number > int(number):
            self.low = max(self.low, int(number) + 1)
            return f"it is greater than {number}"
        self.high = min(self.high, int(number))
        return f"it is not greater than {number}"

    @property
    def ended(self) -> bool:  # type: ignore[override]
        """Said, or out of steps."""
        return self.said > 0 or self.asked == self.max_steps

    @property
    def state(self) -> tuple[int, ...]:  # type: ignore[override]
        """The number, what is known of it, and the questions so far."""
        return self.number, self.low, self.high, self.asked

    @property
    def view(self) -> tuple[int, int]:  # type: ignore[override]
        """From where to where the number can lie."""
        return self.low, self.high

    @property
    def submission(self) -> tuple[int, float] | None:  # type: ignore[override]
        """What was said, and how much of its worth the questions left."""
        return (self.said, (1 - self.price) ** self.asked) if self.said else None

    @staticmethod
    def verify(submission: tuple[int, float], instance: int) -> float:
        """What the questions left, if the number is right."""
        said, worth = submission
        return worth if said == instance else 0.0
