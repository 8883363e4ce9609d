"""The compilation cache in the user's cache folder, and how long this process has spent compiling."""

import os

import jax
import jax.monitoring

_durations: list[float] = []


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event.startswith("/jax/core/compile/"):
        _durations.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_listen)


def seconds() -> float:
    """Seconds spent so far tracing, lowering and compiling jitted functions."""
    return sum(_durations)


def use_compilation_cache() -> None:
    """Keeps what is compiled in the user's cache folder, or where JAX_COMPILATION_CACHE_DIR says."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        from platformdirs import user_cache_dir

        jax.config.update("jax_compilation_cache_dir", user_cache_dir("jaxrl_mini"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
