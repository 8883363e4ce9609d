"""Compiled and traced programs in the user's cache folder, and how long this process has spent compiling."""

import contextlib
import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax import export

_durations: list[float] = []


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event.startswith("/jax/core/compile/"):
        _durations.append(duration_secs)


jax.monitoring.register_event_duration_secs_listener(_listen)


def seconds() -> float:
    """Seconds spent so far tracing, lowering and compiling jitted functions."""
    return sum(_durations, 0.0)


def use_compilation_cache() -> None:
    """Keeps what is compiled in the user's cache folder, or where JAX_COMPILATION_CACHE_DIR says."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        from platformdirs import user_cache_dir

        jax.config.update("jax_compilation_cache_dir", user_cache_dir("jaxrl_mini"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def traced_once(function: Callable[..., Any], carried: Any, *data: Any, static: tuple[Any, ...]) -> Callable[..., Any]:
    """A jitted `function(*carried, *data, *static) -> carried` whose trace is kept beside what is compiled from it.

    Tracing takes longer than all else that a short run does, so another process should not do it again. The trace is
    StableHLO, in a file named after all it depends on: this package's source, the versions below it, the platform, the
    shapes and the static arguments. A file that cannot be read is made again; without a cache folder there is none.

    Args:
      function: pure, returns new values for its first arguments.
      carried: examples of these, a tuple; their buffers are used up in every call.
      data: examples of the other arguments. Of all examples only shapes and types matter.
      static: what the program depends on; their `repr` says everything.

    Returns:
      A function of `(*carried, *data)`.
    """
    leaves, structure = jax.tree.flatten((*carried, *data))
    kept, carried_structure = jax.tree.flatten(carried)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves), *static))

    types, platform = tuple(jax.typeof(leaf) for leaf in leaves), jax.default_backend()
    all_of_it = (_source(), jax.config.values["jax_enable_x64"], platform, types, structure, static)
    name = hashlib.sha256(repr(all_of_it).encode()).hexdigest()
    folder = jax.config.values["jax_compilation_cache_dir"]
    file = Path(folder) / f"trace-{name}" if folder else None
    exported = _read(file) if file else None
    if exported is None:
        exported = export.export(jax.jit(flat), platforms=[platform])(*types)
        if file:
            _write(file, bytes(exported.serialize()))
    compiled = jax.jit(exported.call, donate_argnums=range(len(kept)))

    def call(*arguments: Any) -> Any:
        return jax.tree.unflatten(carried_structure, compiled(*jax.tree.leaves(arguments)))

    return call


@lru_cache(maxsize=1)
def _source() -> str:
    """A digest of this package's source, and the versions of what traces it."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")]
    return f"{digest.hexdigest()} {versions}"


def _read(file: Path) -> export.Exported | None:
    try:
        return export.deserialize(bytearray(file.read_bytes()))
    except Exception:  # whatever is wrong with a file of a cache, the program is traced again
        return None


def _write(file: Path, content: bytes) -> None:
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, aside = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
        Path(aside).replace(file)
