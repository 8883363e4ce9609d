"""jax's settings under which every number here comes about, whatever the user's environment or process has set."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

OWN: dict[str, tuple[Any, Callable[[Any], contextlib.AbstractContextManager[Any]]]] = {
    # What decides numbers.
    "jax_enable_x64": (False, jax.enable_x64),
    "jax_numpy_dtype_promotion": ("standard", jax.numpy_dtype_promotion),
    "jax_default_prng_impl": ("threefry2x32", jax.default_prng_impl),
    "jax_threefry_partitionable": (True, jax.threefry_partitionable),
    "jax_softmax_custom_jvp": (False, jax.softmax_custom_jvp),
    # What refuses programs that are right, or runs them piece by piece.
    "jax_numpy_rank_promotion": ("allow", jax.numpy_rank_promotion),
    "jax_disable_jit": (False, jax.disable_jit),
    "jax_debug_nans": (False, jax.debug_nans),
    "jax_debug_infs": (False, jax.debug_infs),
    "jax_check_tracer_leaks": (False, jax.check_tracer_leaks),
    "jax_transfer_guard_host_to_device": ("allow", jax.transfer_guard_host_to_device),
    "jax_transfer_guard_device_to_device": ("allow", jax.transfer_guard_device_to_device),
    "jax_transfer_guard_device_to_host": ("allow", jax.transfer_guard_device_to_host),
}
"""By jax's name for it: the value, and jax's context manager for it.

`jax_default_matmul_precision` is not among them: it is the user's choice, and stands in every record.
"""

OF_PROCESSES = {
    "jax_random_seed_offset": 0,
    "jax_disable_most_optimizations": False,
    "jax_optimization_level": "UNKNOWN",
    "jax_exec_time_optimization_effort": 0.0,
}
"""The same, without a context manager: for processes of our own."""


def current(name: str) -> Any:
    """The value of a setting here, in this thread; `jax.config.values` has that of the process."""
    return getattr(jax.config, name)


def _others() -> Iterator[str]:
    """The names in `OWN` that are otherwise here; a transfer guard that nobody set is None, which allows."""
    return (name for name, (value, _) in OWN.items() if current(name) not in (value, None))


def use_own() -> None:
    """Sets them for the process, which has to be our own."""
    for name in _others():
        jax.config.update(name, OWN[name][0])
    for name, value in OF_PROCESSES.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)


@contextlib.contextmanager
def own() -> Iterator[None]:
    """Sets them for what this thread does meanwhile; also a decorator, for functions that users call in theirs."""
    with contextlib.ExitStack() as stack:
        for name in _others():
            value, context = OWN[name]
            stack.enter_context(context(value))
        yield
