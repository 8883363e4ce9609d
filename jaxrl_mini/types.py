"""Every pytree that crosses a door, with the shape of each field.

Axis names are the same words everywhere: run, iteration, group, episode, step, state, variant, action,
context. Arrays of the table policy may carry a last axis `run`: many runs side by side, written as
`*run` in signatures, so that the same functions serve one run and a fleet.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, UInt32

from jaxrl_mini.config import Config

# Arrays of either kind, where a function serves inside and outside of jitted programs.
if TYPE_CHECKING:
    AnyArray = Any
else:
    AnyArray = Array | np.ndarray

Seeds = UInt32[AnyArray, "*run"]
Columns = dict[str, np.ndarray]
"""A table: an array per column, all of one length."""


class Settings(NamedTuple):
    """The settings that are data: sweeping them needs no new compilation."""

    lr: Float[AnyArray, "*run"]
    """Adam's learning rate."""
    clip: Float[AnyArray, "*run"]
    """Ratios are clipped to [1 - clip, 1 + clip]."""
    beta: Float[AnyArray, "*run"]
    """Coefficient of KL(policy || reference)."""
    clip_high: Float[AnyArray, "*run"] | None = None
    """Where it is not None, ratios are clipped to [1 - clip, 1 + clip_high]."""
    entropy_bonus: Float[AnyArray, "*run"] | None = None
    """Coefficient of the entropy, where there is a bonus."""

    @classmethod
    def of(cls, config: Config) -> "Settings":
        """A run's, as Python numbers."""
        return cls(config.effective_lr, config.clip, config.beta, config.clip_high, config.entropy_bonus or None)


class Distribution(NamedTuple):
    """A policy over the 24 states."""

    log_probs: Float[AnyArray, "state action *run"]
    probs: Float[AnyArray, "state action *run"]


class Advantages(NamedTuple):
    """What the episodes of a group are credited with; rewards are 0 or 1, so there are two values a group."""

    failure: Float[Array, "group *run"]
    success: Float[Array, "group *run"]


class Credit(NamedTuple):
    """A batch as the few sums its loss depends on; the context is the state, or a history."""

    plus: Float[AnyArray, "context action *batch"]
    """Sum of advantage * share over the actions with a positive advantage; the share of an action is that of the
    aggregation (`objective.credit`), by default 1 / (length of its episode * episodes)."""
    minus: Float[AnyArray, "context action *batch"]
    """The same over those with a negative advantage."""
    counts: Float[AnyArray, "context action *batch"]
    """How often each action was taken."""
    visits: Float[AnyArray, "context *batch"]
    """Sum of the shares of all actions."""
    taken: Float[AnyArray, "context action *batch"] | None = None
    """The same by action, where the KL term is estimated from the sampled actions."""


class Exact(NamedTuple):
    """A policy's expectations, by dynamic programming."""

    success_rate: Float[AnyArray, "*run"]
    mean_actions: Float[AnyArray, "*run"]


class ByContent:
    """For dataclasses that hold arrays: equal where all fields that are compared are, to the bit.

    Arrays by their types, shapes and content, a NaN like any other number. Such values have no hash.
    """

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self) if field.compare]  # type: ignore[arg-type]
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "dtype") != hasattr(other, "dtype"):
        return False
    if hasattr(one, "dtype"):
        a, b = np.asarray(one), np.asarray(other)
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))
    return bool(one == other or (one != one and other != other))
