"""What this machine offers, and how jax is made to use it."""

import os
import platform
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_mini.config import UserError

if TYPE_CHECKING:
    import jax


def import_jax() -> None:
    """Imports jax, which reads its environment variables then.

    Raises:
      UserError: one of them is out of range.
    """
    try:
        import jax  # noqa: F401
    except ValueError as error:
        raise UserError(f"an environment variable of jax is out of range: {error}") from error


def devices() -> "list[jax.Device]":
    """Those of the kind that jax computes on: as `jax_default_device` says, by name or as a device, or as it finds.

    Raises:
      UserError: an environment variable asks for devices that are not there.
    """
    import jax

    from jaxrl_mini.machine import jax_settings

    chosen = jax_settings.current("jax_default_device")
    try:
        if chosen is None:
            return jax.devices()
        return jax.devices(chosen if isinstance(chosen, str) else chosen.platform)
    except (RuntimeError, AssertionError, AttributeError) as error:  # the latter two where a plugin is not installed
        asked = f"JAX_PLATFORMS {jax.config.values['jax_platforms'] or ''}"
        if isinstance(chosen, str):
            asked = f"JAX_DEFAULT_DEVICE {chosen}"
        reason = str(error) if isinstance(error, RuntimeError) else "no such device"
        raise UserError(f"{asked} cannot be used here ({reason}): unset the variable, or name what is there") from error


def default_device() -> "jax.Device":
    """Where jax computes unless it is told."""
    from jaxrl_mini.machine import jax_settings

    chosen = jax_settings.current("jax_default_device")
    return devices()[0] if chosen is None or isinstance(chosen, str) else chosen


VECTORS = ("sse", "avx", "fma", "f16c", "amx", "asimd", "bf16", "sve", "neon")
"""What the names of vector instructions begin with, of x86 and of ARM."""


def use_one_thread_per_call() -> None:
    """Makes each call of a compiled program run on the thread that calls it, where jax has not started yet.

    On a CPU, jax otherwise hands calls to one queue and splits array loops over a pool of threads: with one block per
    core in flight, both cost more than they bring. The numbers are the same either way.
    """
    import jax
    from jax._src import xla_bridge

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if xla_bridge.backends_are_initialized():
        return
    _pool.append(1)
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = "1"  # what XLA's CPU client takes as the size of its pool
    try:
        devices()
    finally:
        if before is None:
            del os.environ["NPROC"]
        else:
            os.environ["NPROC"] = before


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_pool: list[int] = []
"""Threads of XLA's pool, where they were chosen here."""


def threads() -> int:
    """Threads over which XLA splits the loops of a call on the CPU."""
    asked = os.environ.get("NPROC", "")
    return _pool[0] if _pool else int(asked) if asked.isdecimal() and int(asked) else cores()


def processor() -> str:
    """What this machine computes with."""
    arm = " ".join(filter(None, map(_first_processor, ("CPU implementer", "CPU part"))))
    return _first_processor("model name") or arm or _apple() or platform.processor() or platform.machine()


def instructions() -> str:
    """The names of the instruction sets that this machine has, where the system tells."""
    return _first_processor("flags") or _first_processor("Features")


def vector_instructions() -> str:
    """Those of them that compute with floats, in order: by them sums are split and products fused, and bits follow."""
    return " ".join(sorted(name for name in instructions().split() if name.startswith(VECTORS)))


def numpy_dispatch() -> str:
    """The instruction sets that NumPy found here and was not told to leave: its functions differ by them."""
    import numpy as np

    return " ".join(np.show_config(mode="dicts")["SIMD Extensions"].get("found", ()))


def _first_processor(field: str) -> str:
    return next((line.partition(":")[2].strip() for line in _about() if line.partition("\t")[0] == field), "")


@lru_cache(maxsize=1)
def _about() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return []


def _apple() -> str:
    if platform.system() != "Darwin":
        return ""
    import subprocess

    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
