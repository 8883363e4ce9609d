"""What the episodes of a split of any task are played and graded by."""

from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxrl_mini.tasks.compiled import CompiledTask
from jaxrl_mini.tasks.dynamics import Dynamics, dynamics
from jaxrl_mini.tasks.situations import Stacked, stacked
from jaxrl_mini.types import AnyArray


class Grounds(NamedTuple):
    """Arrays that programs take as data."""

    tables: Dynamics
    members: Int[AnyArray, " member"]
    """The instances of the split."""
    accepted: Float[AnyArray, "outcome instance"]
    """The probability that the verifier accepts; 0 for no submission."""
    situations: Stacked | None = None
    """What expectations are computed over, where they are."""


@lru_cache(maxsize=64)
def grounds(task: CompiledTask, split: str = "train", *, expected: bool = False) -> Grounds:
    """What a split's episodes are played and graded by, as NumPy arrays; if asked, with what is `expected` of them."""
    accepted = np.concatenate([np.zeros((1, len(task.instances))), task.accepted]).astype(np.float32)
    found = jax.tree.map(_narrow, stacked(task, split)) if expected else None
    return Grounds(dynamics(task), np.array(task.splits[split], np.int32), accepted, found)


def _narrow(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
