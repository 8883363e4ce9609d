"""Ways of writing array code that XLA's CPU backend compiles well, and of compiling only where that pays.

Measured with jaxlib 0.10.2 on the training loop of 64 runs: the backend computes a value again in every loop that
reads it, keeps the last axis out of the vectorized loop of a reduction over another axis, turns gathers into scalar
loads, and does not vectorize over booleans kept in memory (masks that are kept are int32 here).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Int, Shaped

from jaxrl_mini.types import AnyArray

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def stage(function: Callable[P, R], *, static_argnames: Sequence[str] = ()) -> Callable[P, R]:
    """Compiles `function` as a computation of its own inside a jitted program: its results are computed once.

    The backend has no fusion with several outputs: without stages a rollout was played six times over.
    `jax.lax.optimization_barrier` does not help, it is dropped before fusion; a call that is marked as not to be
    inlined stays. A stage that is called twice at the same shapes is traced once, but compiled twice.
    """

    def outlined(*args: P.args, **kwargs: P.kwargs) -> R:
        with set_xla_metadata(inlineable=None):
            return function(*args, **kwargs)

    compiled = jax.jit(outlined, static_argnames=static_argnames)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with set_xla_metadata(inlineable="false"):
            return cast(R, compiled(*args, **kwargs))

    return call


def unless_numpy(
    function: Callable[P, R],
    *,
    compile: Callable[..., Callable[P, R]] = jax.jit,
    static_argnames: Sequence[str] = (),
) -> Callable[P, R]:
    """The compiled function, but where no argument is a JAX array, the function itself.

    For functions that serve NumPy, too: on the arrays of a single run they take less time than their compilation.
    """
    compiled = compile(function, static_argnames=static_argnames)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        in_jax = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((args, kwargs)))
        return (compiled if in_jax else function)(*args, **kwargs)

    return call


def total(array: Shaped[Array, "..."], axis: int = 0) -> Shaped[Array, "..."]:
    """The sum over one axis, as a tree of additions of slices."""
    while (length := array.shape[axis]) > 1:
        half = length // 2
        cut = functools.partial(jax.lax.slice_in_dim, array, axis=axis)
        paired = cut(0, half) + cut(half, 2 * half)
        if length % 2 and half == 1:
            paired = paired + cut(2, 3)
        elif length % 2:
            paired = jax.lax.concatenate([paired, cut(2 * half, length)], axis)
        array = paired
    return jax.lax.squeeze(array, (axis,))


def pick(
    table: Sequence[Shaped[AnyArray, "..."]] | Shaped[AnyArray, "row ..."], index: Int[AnyArray, "*batch"]
) -> Shaped[AnyArray, "*batch"]:
    """table[index] along the first axis, as selections; the rows broadcast against `index`."""
    xp = index.__array_namespace__()
    picked = xp.broadcast_to(table[0], index.shape)
    for row in range(1, len(table)):
        picked = xp.where(index == row, table[row], picked)
    return picked


def entry(array: Shaped[AnyArray, "..."], *index: int | Int[AnyArray, ""]) -> Shaped[AnyArray, "..."]:
    """array[index] for whole numbers from 0, known or not when a program is compiled."""
    if not isinstance(array, jax.Array):
        return array[index]
    known, rest = [1] * len(index), array.shape[len(index) :]
    start = [*index, *[0] * len(rest)]
    return jax.lax.dynamic_slice(array, start, [*known, *rest], allow_negative_indices=False).reshape(rest)


def repeat(times: int, body: Callable[[Any, R], R], state: R) -> R:
    """The state after body(times - 1, ... body(0, state)): in a loop of the program, or outside of it with NumPy.

    `jax.lax.fori_loop` counts a known number of times twice, and each counter is a loop to be compiled.
    """
    if not isinstance(jax.tree.leaves(state)[0], jax.Array):
        return functools.reduce(lambda state, index: body(index, state), range(times), state)

    def turn(counted: tuple[Array, R]) -> tuple[Array, R]:
        index, state = counted
        return index + 1, body(index, state)

    return jax.lax.while_loop(lambda counted: counted[0] < times, turn, (jnp.int32(0), state))[1]


def scan(body: Callable[[R, Any], tuple[R, S]], state: R, rows: Any, *, reverse: bool = False) -> tuple[R, S]:
    """`jax.lax.scan` over the rows of a pytree of arrays; where none of all these is JAX's, a plain loop."""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((state, rows))):
        return jax.lax.scan(body, state, rows, reverse=reverse)
    left, numbers = [], range(len(jax.tree.leaves(rows)[0]))
    for number in reversed(numbers) if reverse else numbers:
        state, one = body(state, jax.tree.map(lambda leaf, number=number: leaf[number], rows))
        left.append(one)
    return state, jax.tree.map(lambda *leaves: np.stack(leaves), *(left[::-1] if reverse else left))
