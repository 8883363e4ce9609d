"""Compiled programs in the user's cache folder, and how long this process has spent compiling."""

import contextlib
import errno
import hashlib
import importlib.metadata
import math
import os
import platform
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax.experimental import serialize_executable

from jaxrl_mini.machine import hardware

DIGEST = 32
"""Bytes of a SHA-256."""
FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MAX_FILES, MAX_BYTES = 1000, 2**30
"""Of what is kept: a program of a table policy has 300 kB, one of a language model's hundred a tenth."""

_durations: list[float] = []
_hits: list[str] = []


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event.startswith("/jax/core/compile/"):
        _durations.append(duration_secs)


def _listen_for_hits(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _hits.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)
jax.monitoring.register_event_listener(_listen_for_hits)


def seconds() -> float:
    """Seconds spent so far tracing, lowering and compiling jitted functions."""
    return sum(_durations, 0.0)


def use_compilation_cache() -> str | None:
    """Keeps what is compiled in the user's cache folder, or where JAX_COMPILATION_CACHE_DIR says.

    Returns:
      Where that is not possible, a line that says why; everything works without.
    """
    # Whatever is wrong with a cache, jax compiles the program again.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    given, pattern = os.environ.get(FOLDER_VARIABLE), "program-*"
    if given == "" or "://" in (given or ""):  # none is wanted; a place that jax alone can look at
        return None
    try:
        if given is None:
            from platformdirs import user_cache_dir

            given, pattern = user_cache_dir("jaxrl_mini"), "*"  # all of it is ours
        Path(given).mkdir(parents=True, exist_ok=True)
        if not os.access(given, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, RuntimeError) as error:  # platformdirs finds no home
        jax.config.update("jax_compilation_cache_dir", None)
        where = f"{given} cannot be used ({getattr(error, 'strerror', error)})"
        return f"compiled programs are not kept: {where if given else error}"
    jax.config.update("jax_compilation_cache_dir", given)
    _prune(Path(given), pattern)
    return None


def _prune(folder: Path, pattern: str) -> None:
    """Deletes the files that were not used for the longest time, as far as there are too many."""
    found = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            about = path.lstat()
            found.append((max(about.st_atime, about.st_mtime), about.st_size, path))
    size = 0
    for number, (_, more, path) in enumerate(sorted(found, reverse=True)):
        size += more
        if number >= MAX_FILES or size > MAX_BYTES:
            with contextlib.suppress(OSError):  # another process deleted it; it is no file
                path.unlink()


def compiled_once(
    function: Callable[..., Any],
    carried: tuple[Any, ...],
    *data: Any,
    static: tuple[Any, ...],
    device: jax.Device,
    kept: bool = True,
) -> Callable[..., Any]:
    """A jitted `function(*carried, *data, *static) -> carried` that is kept, compiled, for other processes.

    Tracing and lowering take longer than all else that a short run does, and what jax keeps spares neither. A file of
    this one is named after all it depends on: this package's source, the versions below it, jax's settings, the
    machine, the shapes and the static arguments. A file that is not as it was written is made again. Nothing is kept
    without a cache folder, or where jax is told to keep nothing, and on an accelerator or one of several devices jax
    alone keeps what it does. As with that, reading it is running it: the folder is the user's own.

    Args:
      function: pure, returns new values for its first arguments.
      carried: examples of these; their buffers are used up in every call.
      data: examples of the other arguments. Of all examples only shapes and types matter.
      static: what the program depends on; their `repr` says everything.
      device: where it runs.
      kept: false where the program depends on more than that, as on what a user's file imports; what jax keeps is named
        after the lowered program.

    Returns:
      A function of `(*carried, *data)`. It is compiled or loaded in another thread: its first call waits for that,
      and the process, before it ends, for the file to be written.
    """
    jitted = jax.jit(lambda *arguments: function(*arguments, *static), donate_argnums=range(len(carried)))
    if device.platform != "cpu" or device.client.device_count() > 1:
        return jitted
    examples = (*carried, *data)
    file = _file(jax.tree.map(jax.typeof, examples), static) if kept else None
    trees = jax.tree.structure((examples, {})), jax.tree.structure(carried)

    def lower() -> jax.stages.Lowered:
        with jax.default_device(device):
            return jitted.lower(*examples)

    def load() -> tuple[Callable[..., Any], jax.stages.Compiled | None]:
        """The program, and what of it can be kept."""
        kept = _read(file, trees, device) if file else None
        if kept is not None:
            return kept, None
        program = lowered or lower()
        with _past_the_cache_of_jax() if file else contextlib.nullcontext():
            hits = len(_hits)
            compiled = program.compile()
            return compiled, compiled if len(_hits) == hits else None

    def keep() -> None:
        compiled = loading.result()[1]
        if file and compiled is not None:
            _write(file, compiled)

    # Here and not in the thread, since it keeps Python busy, as compiling and loading do not.
    lowered = None if file and file.is_file() else lower()
    thread = ThreadPoolExecutor(1)
    loading = thread.submit(load)
    thread.submit(keep)
    thread.shutdown(wait=False)
    return lambda *arguments: loading.result()[0](*arguments)


@contextlib.contextmanager
def _past_the_cache_of_jax() -> Iterator[None]:
    """Has jax not keep what is compiled meanwhile: what jax has read from its cache cannot be written to a file."""
    name = "jax_persistent_cache_min_compile_time_secs"
    with _compiling:
        before = jax.config.values[name]
        jax.config.update(name, math.inf)
        try:
            yield
        finally:
            jax.config.update(name, before)


_compiling = threading.Lock()


def _file(types: Any, static: tuple[Any, ...]) -> Path | None:
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not (folder and jax.config.values["jax_enable_compilation_cache"]):
        return None
    machine = platform.platform(), hardware.processor(), hardware.instructions()
    settings = {name: value for name, value in sorted(jax.config.values.items()) if "cache" not in name}
    key = repr((_source(), machine, settings, os.environ.get("XLA_FLAGS"), types, static))
    return Path(folder) / f"program-{hashlib.sha256(key.encode()).hexdigest()}"


@lru_cache(maxsize=1)
def _source() -> str:
    """A digest of this package's source, and the versions of what traces it."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")]
    return f"{digest.hexdigest()} {versions}"


def _read(file: Path, trees: tuple[Any, Any], device: jax.Device) -> Callable[..., Any] | None:
    started = time.perf_counter()
    try:
        content = file.read_bytes()
        digest, program = content[:DIGEST], content[DIGEST:]
        if digest != hashlib.sha256(program).digest():
            return None
        compiled = serialize_executable.deserialize_and_load(program, *trees, device.client, [device])
        with contextlib.suppress(OSError):
            os.utime(file)  # it is in use, see `_prune`
    except Exception:  # whatever is wrong with a file of a cache, the program is compiled again
        return None
    _durations.append(time.perf_counter() - started)
    return compiled


def _write(file: Path, compiled: jax.stages.Compiled) -> None:
    with contextlib.suppress(Exception):  # a cache is no reason to fail
        program = serialize_executable.serialize(compiled)[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, aside = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(hashlib.sha256(program).digest() + program)
        Path(aside).replace(file)
