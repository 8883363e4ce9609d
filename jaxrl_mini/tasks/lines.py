"""repair: some lines of a program are wrong, and a private check accepts it when none is."""

from jaxrl_mini.tasks.task import Task


class Repair(Task):
    """Turn the wrong lines over, and no others, then finish.

    A line is right or wrong, and `edit_i` turns line i over, right to wrong as well. The public test looks at line 1
    only. The lines are shown at every step; if hidden, after `read` alone, so that a look has the price of a step.

    Instances are the non-empty sets of wrong lines, numbered by the sum of 2^(i - 1) over them; those whose number is
    a multiple of 3 are the split `held-out`, the others `train`.
    """

    def __init__(self, lines: int = 3, steps: int = 7, hidden: bool = False):
        if not 1 <= lines <= 8:
            raise ValueError(f"lines={lines} is out of range: expected 1 to 8")
        self.lines, self.max_steps, self.hidden = lines, steps, hidden
        self.actions = ("read", *(f"edit_{line + 1}" for line in range(lines)), "test", "finish")
        self.header = (
            f"Repair a program of {lines} lines, each right or wrong.\n"
            "Actions: read shows the lines, edit_i turns line i over, test runs the public test, finish submits.\n"
        )
        numbered = {number: frozenset(i for i in range(lines) if number >> i & 1) for number in range(1, 2**lines)}
        held_out = tuple(wrong for number, wrong in numbered.items() if number % 3 == 0)
        self.splits = {"train": tuple(wrong for number, wrong in numbered.items() if number % 3)}
        if held_out:
            self.splits["held-out"] = held_out

    def reset(self, instance: frozenset[int]) -> str:
        """Starts with these lines wrong."""
        self.right = tuple(line not in instance for line in range(self.lines))
        self.known = (not self.hidden,) * self.lines
        self.turned = (False,) * self.lines
        self.steps, self.submission = 0, None
        return self._shown()

    def step(self, action: str) -> str:
        """Acts on the program."""
        self.steps += 1
        if action == "finish":
            self.submission = self.right
            return ""
        if action == "read":
            self.known = (True,) * self.lines
        elif action == "test":
            self.known = (True, *self.known[1:])
            return f"{self._shown()}\npublic test: {'passed' if self.right[0] else 'failed'}"
        else:
            line = int(action.removeprefix("edit_")) - 1
            self.right = tuple(right != (i == line) for i, right in enumerate(self.right))
            self.turned = tuple(turned != (i == line) for i, turned in enumerate(self.turned))
        return self._shown(all_lines=action == "read")

    def _shown(self, all_lines: bool = False) -> str:
        lines = [f"line {line + 1}: {'right' if right else 'wrong'}" for line, right in enumerate(self.right)]
        return "\n".join([*(lines if all_lines or not self.hidden else ()), f"step {self.steps} of {self.max_steps}"])

    @property
    def ended(self) -> bool:  # type: ignore[override]
        """Submitted, or out of steps."""
        return self.submission is not None or self.steps == self.max_steps

    @property
    def state(self) -> tuple[object, ...]:  # type: ignore[override]
        """The lines, what was seen of them, and the step."""
        return self.right, self.view, self.steps

    @property
    def view(self) -> tuple[object, ...]:  # type: ignore[override]
        """Of each line what is known: whether it is right, or whether it was turned over."""
        lines = zip(self.known, self.right, self.turned, strict=True)
        return tuple(
            ("right" if right else "wrong") if known else f"? turned {turned:d}" for known, right, turned in lines
        )

    @staticmethod
    def verify(submission: tuple[bool, ...], instance: frozenset[int]) -> float:
        """Accepts a program without a wrong line."""
        return float(all(submission))
