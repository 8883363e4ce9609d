"""How long this process has spent compiling."""

import jax.monitoring

_durations: list[float] = []


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event.startswith("/jax/core/compile/"):
        _durations.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_listen)


def seconds() -> float:
    """Seconds spent so far tracing, lowering and compiling jitted functions."""
    return sum(_durations)
