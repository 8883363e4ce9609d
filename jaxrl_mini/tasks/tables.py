"""The article's task alone as arrays, for the programs that are made for it; any task becomes tables in `compiled`."""

from copy import copy
from typing import NamedTuple

import numpy as np

from jaxrl_mini.tasks.repair import ACTIONS, MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS, VARIANTS, BinarySearchRepair


class Tables(NamedTuple):
    """The task's transitions as arrays; entry [step, variant, action] says what taking the action there does.

    The policy's finite index is ``state = step * 4 + variant``, so an array over states reshapes to
    [step, variant, ...] and back.
    """

    next_variant: np.ndarray
    """int [step, variant, action]: the artifact after the action."""
    submits: np.ndarray
    """bool [step, variant, action]: the action hands the artifact in."""
    ends: np.ndarray
    """bool [step, variant, action]: no further action follows, by submission or for want of steps."""


def compile_tables(task: type[BinarySearchRepair] = BinarySearchRepair) -> Tables:
    """Enumerates every step, artifact and action of the Python task into `Tables`."""
    shape = (MAX_STEPS, NUM_VARIANTS, NUM_ACTIONS)
    tables = Tables(np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, bool))
    start = task()
    for index in np.ndindex(shape):
        steps, variant, action = index
        after = copy(start)
        after.steps, after.artifact = steps, VARIANTS[variant]
        after.step(ACTIONS[action])
        tables.next_variant[index] = after.artifact.variant
        tables.submits[index] = after.submitted
        tables.ends[index] = after.ended
    for table in tables:
        table.flags.writeable = False
    return tables


TABLES = compile_tables()
