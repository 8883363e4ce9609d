"""The private verifier: (artifact, inputs) -> passed, by running the search.

It runs after episodes end, on an artifact alone. Its inputs depend on (iteration, group) in training and on
the episode in evaluation, never on a run's seed; the two are drawn from disjoint streams. Only four artifacts
exist, so the verdicts on all of them are computed once per set of inputs and looked up per episode.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from jaxrl_mini.tasks.repair import EXTRA_TARGETS, FIXED_ARRAYS, VARIANTS
from jaxrl_mini.types import AnyArray

RANDOM_ARRAYS = 12
MAX_LENGTH = 13
LOWEST, HIGHEST = -40, 40
MISSING, UNDECIDED = -1, -2

TRAINING, EVALUATION = 0, 1
_ROOT_SEED = 20_06  # any number: the inputs are the same for every run
_AT_ONCE = 64  # sets of inputs
_PADDING = HIGHEST + 2  # larger than every value, so a sorted array stays sorted


class Inputs(NamedTuple):
    """Sorted arrays to search, padded at their end."""

    values: Int[AnyArray, "*set array 13"]
    lengths: Int[AnyArray, "*set array"]


def inputs_of(arrays: Sequence[Sequence[int]]) -> Inputs:
    """Sorted arrays of up to 13 distinct integers from -40 to 40."""
    values = np.full((len(arrays), MAX_LENGTH), _PADDING, np.int8)
    for row, array in zip(values, arrays, strict=True):
        row[: len(array)] = array
    return Inputs(values, np.array([len(array) for array in arrays], np.int8))


def draw_inputs(stream: int, index: Sequence[tuple[int, int]]) -> Inputs:
    """Sets of four fixed arrays and twelve random ones of 1 to 13 distinct integers from -40 to 40.

    A set is a pure function of the stream and its two numbers: the raw bits of a counter-based generator (Philox;
    Salmon et al. 2011, doi:10.1145/2063384.2063405), whose counter they are. NumPy draws them, since compiling a
    generator costs far more than running one this rarely.
    """
    candidates = np.arange(LOWEST, HIGHEST + 1, dtype=np.int8)
    generators = [np.random.Philox(key=_ROOT_SEED, counter=[0, second, first, stream]) for first, second in index]
    bits = np.stack([generator.random_raw(RANDOM_ARRAYS * (1 + len(candidates))) for generator in generators])
    bits = bits.reshape(len(index), RANDOM_ARRAYS, -1)
    lengths = (1 + bits[..., 0] % MAX_LENGTH).astype(np.int8)
    drawn = candidates[np.argsort(bits[..., 1:], axis=-1)[..., :MAX_LENGTH]]
    drawn[np.arange(MAX_LENGTH) >= lengths[..., None]] = _PADDING
    drawn.sort(axis=-1)
    fixed = (np.broadcast_to(part, (len(index), *part.shape)) for part in inputs_of(FIXED_ARRAYS))
    return Inputs(*(np.concatenate(parts, axis=1) for parts in zip(fixed, (drawn, lengths), strict=True)))


def questions(
    inputs: Inputs,
) -> tuple[Int[AnyArray, "*set array target"], Int[AnyArray, "*set array target"]]:
    """What is searched for in every array, its elements, -41, 41 and 0, and the right answers: index or -1."""
    xp = inputs.values.__array_namespace__()
    extra = xp.asarray(EXTRA_TARGETS, dtype=inputs.values.dtype)
    shape = (*inputs.lengths.shape, len(EXTRA_TARGETS))
    targets = xp.concatenate([inputs.values, xp.broadcast_to(extra, shape)], axis=-1)
    inside = xp.arange(MAX_LENGTH) < inputs.lengths[..., None]
    equal = (targets[..., None] == inputs.values[..., None, :]) & inside[..., None, :]
    return targets, xp.where(equal.any(axis=-1), equal.argmax(axis=-1), MISSING)


def search(
    low_fixed: bool | Bool[AnyArray, ""],
    high_fixed: bool | Bool[AnyArray, ""],
    inputs: Inputs,
    targets: Int[AnyArray, "*set array target"],
) -> Int[AnyArray, "*set array target"]:
    """Runs the artifact's binary searches: an index, -1 for missing, or -2 after 2 * length + 4 iterations."""
    xp = targets.__array_namespace__()
    lengths = inputs.lengths[..., None]
    values = inputs.values.ravel()
    starts = MAX_LENGTH * xp.arange(inputs.lengths.size).reshape(lengths.shape)

    def body(iteration: Any, state: tuple[AnyArray, ...]) -> tuple[AnyArray, ...]:
        low, high, result = state
        mid = (low + high) >> 1
        found = xp.take(values, starts + mid)
        running = (result == UNDECIDED) & (iteration < 2 * lengths + 4)
        outcome = xp.where(low > high, MISSING, xp.where(found == targets, mid, UNDECIDED))
        return (
            xp.where(found < targets, mid + low_fixed, low),
            xp.where(found > targets, mid - high_fixed, high),
            xp.where(running, outcome, result),
        )

    low = xp.zeros_like(targets)
    start = (low, low + lengths - 1, xp.full_like(targets, UNDECIDED))
    return _repeat(2 * MAX_LENGTH + 4, body, start)[2]


def _repeat(
    times: int, body: Callable[[Any, tuple[AnyArray, ...]], tuple[AnyArray, ...]], state: tuple[AnyArray, ...]
) -> tuple[AnyArray, ...]:
    """`jax.lax.fori_loop`, for NumPy arrays, too, where it ends once nothing changes any more."""
    if not isinstance(state[0], np.ndarray):
        return jax.lax.fori_loop(0, times, body, state)
    for i in range(times):
        before, state = state, body(i, state)
        if all(map(np.array_equal, before, state)):
            break
    return state


def verify(
    low_fixed: bool | Bool[AnyArray, ""], high_fixed: bool | Bool[AnyArray, ""], inputs: Inputs
) -> Bool[AnyArray, "*set"] | np.bool:
    """Whether the search finds every element of every array, and reports -41, 41 and 0 missing where they are."""
    targets, expected = questions(inputs)
    return (search(low_fixed, high_fixed, inputs, targets) == expected).all(axis=(-2, -1))


def _all_verdicts(stream: int, index: Sequence[tuple[int, int]]) -> Bool[np.ndarray, "set variant"]:
    """In NumPy, since compiling costs more. What fails on the fixed arrays, which all sets have, meets no others."""
    verdicts = np.zeros((len(index), len(VARIANTS)), bool)
    tried = [(i, artifact) for i, artifact in enumerate(VARIANTS) if verify(*artifact, inputs_of(FIXED_ARRAYS))]
    for first in range(0, len(index), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        inputs = draw_inputs(stream, index[part])
        for i, artifact in tried:
            verdicts[part, i] = verify(*artifact, inputs)
    return verdicts


@lru_cache(maxsize=1024)
def training_verdicts(first: int, iterations: int, groups: int) -> np.ndarray:
    """Whether each artifact passes, bool [iteration, group, variant], for iterations from `first` on."""
    index = [(first + i, group) for i in range(iterations) for group in range(groups)]
    return _all_verdicts(TRAINING, index).reshape(iterations, groups, len(VARIANTS))


@lru_cache(maxsize=16)
def evaluation_verdicts(episodes: int) -> np.ndarray:
    """Whether each artifact passes, bool [episode, variant], for each evaluation episode."""
    return _all_verdicts(EVALUATION, [(episode, 0) for episode in range(episodes)])
