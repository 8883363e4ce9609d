"""The task: repair a binary search with six tool actions, in plain Python that a person can read and play by hand.

Two lines of the search can be wrong, ``low = mid`` (right: ``mid + 1``) and ``high = mid`` (right:
``mid - 1``), and both start wrong. `tables` compiles arrays from it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_mini.tasks.task import Task

NAME = "binary-search-repair"
ACTIONS = ("read", "fix_low", "fix_high", "undo_low", "test", "finish")
MAX_STEPS = 6
NUM_ACTIONS = len(ACTIONS)
NUM_VARIANTS = 4
NUM_STATES = MAX_STEPS * NUM_VARIANTS


HEADER = (
    "Repair a binary search. Right is low = mid + 1 and high = mid - 1.\n"
    "Actions: read looks, fix_low and fix_high repair a line, undo_low breaks one again, "
    "test runs the public test, find 3 in [1, 3, 5], finish submits.\n"
)
FIXED_ARRAYS = ((), (1,), (1, 3), (-2, 0, 4))
EXTRA_TARGETS = (-41, 41, 0)


class Artifact(NamedTuple):
    """The code under repair: which of its two update lines are right."""

    low_fixed: bool = False
    high_fixed: bool = False

    @property
    def variant(self) -> int:
        """The artifact as a number from 0 (nothing repaired) to 3 (all repaired)."""
        return 2 * self.low_fixed + self.high_fixed

    @property
    def lines(self) -> tuple[str, str]:
        """The two update lines as source code."""
        return (
            "low = mid + 1" if self.low_fixed else "low = mid",
            "high = mid - 1" if self.high_fixed else "high = mid",
        )

    def __str__(self) -> str:
        return "; ".join(self.lines)


VARIANTS = tuple(Artifact(low, high) for low in (False, True) for high in (False, True))


def binary_search(artifact: Artifact, values: Sequence[int], target: int) -> int | None:
    """Runs the artifact: the index of `target` in sorted `values`, -1 if missing, None if it never ends."""
    low, high = 0, len(values) - 1
    for _ in range(2 * len(values) + 4):
        if low > high:
            return -1
        mid = (low + high) // 2
        if values[mid] == target:
            return mid
        if values[mid] < target:
            low = mid + artifact.low_fixed
        else:
            high = mid - artifact.high_fixed
    return None


def public_test_passes(artifact: Artifact) -> bool:
    """The public smoke test, find 3 in [1, 3, 5]. It passes even for the wrong code."""
    return binary_search(artifact, [1, 3, 5], 3) == 1


class BinarySearchRepair(Task):
    """The task as a person plays it: `reset`, then `step` until `ended`.

    Every observation shows the two lines and the step, so the process is fully observable. After an
    episode ends nothing moves any more: the artifact that is graded is the artifact that was submitted.
    """

    actions = ACTIONS
    max_steps = MAX_STEPS
    header = HEADER

    def __init__(self) -> None:
        self.reset()

    def reset(self, instance: None = None) -> str:
        """Starts an episode and returns the first observation."""
        self.artifact = Artifact()
        self.steps = 0
        self.submitted = False
        return self._describe()

    @property
    def ended(self) -> bool:  # type: ignore[override]
        """Whether the episode is over: submitted, or out of steps."""
        return self.submitted or self.steps == MAX_STEPS

    def step(self, action: str) -> str:
        """Takes one of `ACTIONS` and returns the observation, empty after a submission.

        Raises:
          ValueError: the action is unknown or the episode has ended.
        """
        if action not in ACTIONS:
            raise ValueError(f"unknown action {action!r}: expected one of {', '.join(ACTIONS)}")
        if self.ended:
            raise ValueError(f"action {action!r} after the episode ended: call reset first")
        self.steps += 1
        if action == "fix_low":
            self.artifact = self.artifact._replace(low_fixed=True)
        elif action == "undo_low":
            self.artifact = self.artifact._replace(low_fixed=False)
        elif action == "fix_high":
            self.artifact = self.artifact._replace(high_fixed=True)
        elif action == "finish":
            self.submitted = True
            return ""
        return self._describe(show_test=action == "test")

    @property
    def state(self) -> tuple[Artifact, int]:  # type: ignore[override]
        """The artifact and the step."""
        return self.artifact, self.steps

    @property
    def view(self) -> int:  # type: ignore[override]
        """The artifact's number; with the step, the policy's finite index `step * 4 + variant`."""
        return self.artifact.variant

    @property
    def submission(self) -> Artifact | None:  # type: ignore[override]
        """The artifact, once it was submitted."""
        return self.artifact if self.submitted else None

    @staticmethod
    def verify(submission: Artifact, instance: None) -> float:
        """Accepts what finds every element of the fixed arrays, and misses what is not there.

        No random array changes this verdict: the fixed ones tell the four artifacts apart (see `episodes.verifier`).
        """
        for array in FIXED_ARRAYS:
            for target in {*array, *EXTRA_TARGETS}:
                right = array.index(target) if target in array else -1
                if binary_search(submission, array, target) != right:
                    return 0.0
        return 1.0

    def _describe(self, show_test: bool = False) -> str:
        low_line, high_line = self.artifact.lines
        text = f"{low_line}\n{high_line}\nstep {self.steps} of {MAX_STEPS}"
        if show_test:
            verdict = "passed" if public_test_passes(self.artifact) else "failed"
            text += f"\npublic test: {verdict}"
        return text
