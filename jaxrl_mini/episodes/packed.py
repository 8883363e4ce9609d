"""A batch of episodes after their end, each packed in one integer."""

import functools
import operator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS
from jaxrl_mini.tasks.tables import TABLES
from jaxrl_mini.types import AnyArray

CHOICE_BITS = 5


CHOICE_MASK = 2**CHOICE_BITS - 1


class Episodes(NamedTuple):
    """A batch of episodes, after they ended: what was done where says everything else.

    The derived arrays are plain operations on `packed`: on JAX arrays they are traced, on NumPy arrays computed.
    """

    packed: Int[AnyArray, "*batch"]
    """A whole episode in one integer, from the lowest bits on: five bits a step, 1 + variant * 6 + action, or 0
    after the end. The axes are [group, episode, *run]."""

    def choice(self, step: int) -> Int[AnyArray, "*batch"]:
        """What was done where at one step: variant * 6 + action, -1 after the end."""
        return ((self.packed >> CHOICE_BITS * step) & CHOICE_MASK) - 1

    @property
    def choices(self) -> Int[np.ndarray, "6 *batch"]:
        """`choice` of every step."""
        return np.stack([np.asarray(self.choice(step)) for step in range(MAX_STEPS)])

    @property
    def actions(self) -> Int[np.ndarray, "6 *batch"]:
        """The sampled actions, -1 after the end."""
        choices = self.choices
        return np.where(choices >= 0, choices % NUM_ACTIONS, -1)

    @property
    def states(self) -> Int[np.ndarray, "6 *batch"]:
        """The state of each choice, `step * 4 + variant`; 0 after the end."""
        choices = self.choices
        steps = np.arange(MAX_STEPS).reshape(-1, *[1] * self.packed.ndim)
        return np.where(choices >= 0, steps * NUM_VARIANTS + choices // NUM_ACTIONS, 0)

    @property
    def lengths(self) -> Int[AnyArray, "*batch"]:
        """Actions per episode, 1 to 6."""
        taken = [(self.packed >= 1 << CHOICE_BITS * step).astype(np.int32) for step in range(MAX_STEPS)]
        return functools.reduce(operator.add, taken)

    def submitted(self, variant: int) -> Bool[AnyArray, "*batch"]:
        """Whether the episode handed this artifact in."""
        submissions = np.argwhere(TABLES.submits[:, variant]).tolist()
        choices = [(CHOICE_BITS * step, 1 + variant * NUM_ACTIONS + action) for step, action in submissions]
        hits = [self.packed & CHOICE_MASK << place == choice << place for place, choice in choices]
        return functools.reduce(operator.or_, hits)
