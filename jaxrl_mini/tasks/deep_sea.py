"""deep-sea: one path among 2^N is right, and nothing on the way says so."""

from jaxrl_mini.tasks.task import Task


class DeepSea(Task):
    """Dive through a square of N x N cells from its left upper corner: every action goes down, left or right.

    The treasure lies in the right lower corner, so only N times `right` finds it. Source: Osband et al. 2020,
    "Behaviour Suite for Reinforcement Learning" (arXiv 1908.03568), without its cost of going right.
    """

    actions = ("left", "right")
    header = "Dive for a treasure: every action goes one row down, to the left or to the right.\n"

    def __init__(self, size: int = 10):
        if not 1 <= size <= 64:
            raise ValueError(f"size={size} is out of range: expected 1 to 64")
        self.size = self.max_steps = size

    def reset(self, instance: None) -> str:
        """Starts in the left upper corner."""
        self.row = self.column = self.rights = 0
        return self._place()

    def step(self, action: str) -> str:
        """Goes down one row."""
        self.row += 1
        self.rights += action == "right"
        self.column = min(self.column + 1, self.size - 1) if action == "right" else max(self.column - 1, 0)
        return self._place()

    def _place(self) -> str:
        return f"row {self.row} of {self.size}, column {self.column}"

    @property
    def ended(self) -> bool:  # type: ignore[override]
        """Below the last row."""
        return self.row == self.size

    @property
    def state(self) -> tuple[int, int, bool]:  # type: ignore[override]
        """The cell, and whether it was reached without going left."""
        return self.row, self.column, self.rights == self.row

    @property
    def view(self) -> int:  # type: ignore[override]
        """The column; the row is the step."""
        return self.column

    @property
    def submission(self) -> bool:  # type: ignore[override]
        """Whether the treasure was found."""
        return self.rights == self.size

    @staticmethod
    def verify(submission: bool, instance: None) -> float:
        """Accepts the treasure."""
        return float(submission)
