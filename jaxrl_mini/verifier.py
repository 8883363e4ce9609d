"""The private verifier: (artifact, inputs) -> passed, by running the search.

It runs after episodes end, on an artifact alone. Its inputs depend on (iteration, group) in training and on
the episode in evaluation, never on a run's seed; the two are drawn from disjoint streams. Only four artifacts
exist, so the verdicts on all of them are computed once per set of inputs and looked up per episode.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxrl_mini.task import VARIANTS

FIXED_ARRAYS = ((), (1,), (1, 3), (-2, 0, 4))
RANDOM_ARRAYS = 12
MAX_LENGTH = 13
LOWEST, HIGHEST = -40, 40
EXTRA_TARGETS = (LOWEST - 1, HIGHEST + 1, 0)

TRAINING, EVALUATION = 0, 1
_ROOT_SEED = 20_06  # any number: the inputs are the same for every run
_CHUNK = 64
_PADDING = HIGHEST + 2  # larger than every value and target, so a sorted array stays sorted


class Inputs(NamedTuple):
    """Sorted arrays to search, padded at their end, and what the search must return."""

    values: Int[Array | np.ndarray, "array 13"]
    lengths: Int[Array | np.ndarray, " array"]
    targets: Int[Array | np.ndarray, "array 16"]
    """The array's elements, -41, 41 and 0."""
    expected: Int[Array | np.ndarray, "array 16"]
    """The target's index, -1 where it is missing."""


def inputs_of(arrays: Sequence[Sequence[int]]) -> Inputs:
    """Sorted arrays of up to 13 distinct integers from -40 to 40, with their targets.

    Padding lies beyond every value and target, and a target that is padding is expected missing, as it is.
    """
    values = np.full((len(arrays), MAX_LENGTH), _PADDING, np.int32)
    for row, array in zip(values, arrays, strict=True):
        row[: len(array)] = array
    lengths = np.array([len(array) for array in arrays], np.int32)
    extra = np.broadcast_to(np.array(EXTRA_TARGETS, np.int32), (len(arrays), len(EXTRA_TARGETS)))
    targets = np.concatenate([values, extra], axis=1)
    equal = (targets[:, :, None] == values[:, None, :]) & (values[:, None, :] != _PADDING)
    expected = np.where(equal.any(axis=2), equal.argmax(axis=2), -1).astype(np.int32)
    return Inputs(values, lengths, targets, expected)


def draw_inputs(stream: int, first: int, second: int) -> Inputs:
    """The four fixed arrays and twelve random ones of 1 to 13 distinct integers from -40 to 40.

    They are a pure function of the three numbers: the raw bits of a counter-based generator (Philox; Salmon
    et al. 2011, doi:10.1145/2063384.2063405), whose counter they are. NumPy draws them, since compiling a
    generator costs far more than running one this rarely.
    """
    candidates = np.arange(LOWEST, HIGHEST + 1)
    generator = np.random.Philox(key=_ROOT_SEED, counter=[0, second, first, stream])
    bits = generator.random_raw(RANDOM_ARRAYS * (1 + len(candidates))).reshape(RANDOM_ARRAYS, -1)
    shuffled = candidates[np.argsort(bits[:, 1:], axis=1)]
    lengths = 1 + bits[:, 0] % MAX_LENGTH
    drawn = [sorted(row[:length].tolist()) for row, length in zip(shuffled, lengths, strict=True)]
    return inputs_of([*FIXED_ARRAYS, *drawn])


def search(
    low_fixed: Bool[Array, ""],
    high_fixed: Bool[Array, ""],
    values: Int[Array, " value"],
    length: Int[Array, ""],
    target: Int[Array, ""],
) -> Int[Array, ""]:
    """Runs the artifact's binary search: an index, -1 for missing, or -2 after 2 * length + 4 iterations."""

    def body(_: Array, state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        low, high, result, left = state
        mid = (low + high) // 2
        found = values[mid]
        running = (result == -2) & (left > 0)
        outcome = jnp.where(low > high, -1, jnp.where(found == target, mid, -2))
        low, high = (
            jnp.where(found < target, mid + low_fixed, low),
            jnp.where(found > target, mid - high_fixed, high),
        )
        return low, high, jnp.where(running, outcome, result), left - 1

    budget = 2 * length + 4
    start = (jnp.zeros_like(length), length - 1, jnp.full_like(length, -2), budget)
    return jax.lax.fori_loop(0, 2 * values.shape[0] + 4, body, start)[2]


def verify(low_fixed: Bool[Array, ""], high_fixed: Bool[Array, ""], inputs: Inputs) -> Bool[Array, ""]:
    """Whether the search finds every element of every array, and reports -41, 41 and 0 missing where they are."""
    by_target = jax.vmap(search, in_axes=(None, None, None, None, 0))
    by_array = jax.vmap(by_target, in_axes=(None, None, 0, 0, 0))
    results = by_array(low_fixed, high_fixed, *(jnp.asarray(part) for part in inputs[:3]))
    return jnp.all(results == inputs.expected)


@jax.jit
def _verdicts(inputs: Inputs) -> Bool[Array, "set variant"]:
    low, high = (jnp.array(fixed) for fixed in zip(*VARIANTS, strict=True))
    on_all_variants = jax.vmap(verify, in_axes=(0, 0, None))
    return jax.vmap(lambda one_set: on_all_variants(low, high, one_set))(inputs)


def _all_verdicts(stream: int, index: list[tuple[int, int]]) -> np.ndarray:
    """`_verdicts` in chunks of one shape, so that it compiles once."""
    verdicts = []
    for i in range(0, len(index), _CHUNK):
        chunk = index[i : i + _CHUNK]
        drawn = [draw_inputs(stream, *pair) for pair in [*chunk, *[(0, 0)] * (_CHUNK - len(chunk))]]
        inputs = Inputs(*(np.stack(parts) for parts in zip(*drawn, strict=True)))
        verdicts.append(np.asarray(_verdicts(inputs))[: len(chunk)])
    return np.concatenate(verdicts)


@lru_cache(maxsize=1024)
def training_verdicts(first: int, iterations: int, groups: int) -> np.ndarray:
    """Whether each artifact passes, bool [iteration, group, variant], for iterations from `first` on."""
    index = [(first + i, group) for i in range(iterations) for group in range(groups)]
    return _all_verdicts(TRAINING, index).reshape(iterations, groups, len(VARIANTS))


@lru_cache(maxsize=16)
def evaluation_verdicts(episodes: int) -> np.ndarray:
    """Whether each artifact passes, bool [episode, variant], for each evaluation episode."""
    return _all_verdicts(EVALUATION, [(episode, 0) for episode in range(episodes)])
