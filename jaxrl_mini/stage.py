"""Stages: parts of a jitted program whose results are computed once and stored."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

P = ParamSpec("P")
R = TypeVar("R")


def stage(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` as a computation of its own wherever it is called inside a jitted program.

    XLA's CPU backend has no fusion with several outputs: it computes a value again in every loop that reads it, so
    that a rollout was played six times over. `jax.lax.optimization_barrier` is dropped before fusion; a call that is
    marked as not to be inlined stays. The values are the same with and without.
    """

    def outlined(*args: P.args, **kwargs: P.kwargs) -> R:
        with set_xla_metadata(inlineable=None):
            return function(*args, **kwargs)

    compiled = jax.jit(outlined)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with set_xla_metadata(inlineable="false"):
            return compiled(*args, **kwargs)

    return call
