"""What the episodes of a split of any task are played and graded by."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxrl_mini.tasks.compiled import CompiledTask
from jaxrl_mini.tasks.dynamics import Dynamics, dynamics
from jaxrl_mini.types import AnyArray


class Grounds(NamedTuple):
    """Arrays that programs take as data."""

    tables: Dynamics
    members: Int[AnyArray, " member"]
    """The instances of the split."""
    accepted: Float[AnyArray, "outcome instance"]
    """The probability that the verifier accepts; 0 for no submission."""


@lru_cache(maxsize=64)
def grounds(task: CompiledTask, split: str = "train") -> Grounds:
    """What a split's episodes are played and graded by, as NumPy arrays."""
    accepted = np.concatenate([np.zeros((1, len(task.instances))), task.accepted]).astype(np.float32)
    return Grounds(dynamics(task), np.array(task.splits[split], np.int32), accepted)
