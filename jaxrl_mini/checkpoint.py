"""Checkpoints: what a run needs to go on as if it had never stopped, in folders that appear whole or not at all.

A checkpoint is a folder `iteration-N` with `arrays/` (written by orbax), `run.json` and `SHA256SUMS`, which covers
every other file: `sha256sum -c SHA256SUMS` checks it. Nothing is given to a parser before its digest is right.
"""

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_mini import files
from jaxrl_mini.config import Config, UserError
from jaxrl_mini.evaluation import Evaluation
from jaxrl_mini.folders import flush

KEPT = 3
"""Checkpoints of a folder; older ones are deleted."""
EVERY = 20
"""Iterations between checkpoints, by default."""
FORMAT = 1
NUMERICAL = ("jaxrl_mini", "jax", "jaxlib", "flax", "optax", "numpy")
"""Packages that a run's numbers depend on."""
SUMS, RUN, ARRAYS, LOCK, PART = "SHA256SUMS", "run.json", "arrays", "lock", ".part-"
MAX_BYTES = 2**20
"""Of `SHA256SUMS`."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end; the message says how to go on."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.number = number


class Snapshot(NamedTuple):
    """A run between two iterations: all that its future and its record depend on, beside its config."""

    state: Any
    """A pytree of arrays, `training.State`."""
    history: dict[str, np.ndarray]
    """An array [iteration] per metric."""
    left: dict[str, np.ndarray]
    """What the iterations left behind beside metrics, by name: arrays [iteration, ...]."""
    before: Evaluation
    """Of the initial policy."""
    seconds: tuple[float, float]
    """Spent so far on compiling, and on all else."""

    @property
    def iteration(self) -> int:
        """How many are done."""
        return len(self.history["iteration"])


class Checkpoints:
    """The checkpoints of one run in a folder, which no other process may use meanwhile.

    A context manager, within which SIGINT and SIGTERM stop the run after its current iteration, with a checkpoint; the
    second time, at once.

    Args:
      folder: their place; it is created.
      config: of the run.
      every: iterations between checkpoints; there is one after the last iteration, too.
      resume: go on from the newest one, if there is any.
      say: takes a line for the user.

    Raises:
      UserError: on entering: the folder cannot be used, another process uses it, it holds checkpoints and `resume` is
        false, none of them can be read, or they are of a run with other settings or more iterations.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Config,
        *,
        every: int = EVERY,
        resume: bool = False,
        say: Callable[[str], object] = warnings.warn,
    ):
        if every < 1:
            raise UserError(f"--checkpoint-every {every} is out of range: expected a whole number from 1")
        self.folder, self.config, self.every, self.resume, self._say = Path(folder), config, every, resume, say
        self.newest: int | None = None
        """Iterations done in the newest checkpoint."""
        self._asked: int | None = None
        self._deferring = False
        self._handlers: dict[int, Any] = {}
        self._initial_state = ""
        self._run: dict[str, Any] | None = None

    def __enter__(self) -> "Checkpoints":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise UserError(
                f"checkpoint folder {self.folder} cannot be written ({error.strerror}): choose another place"
            ) from error
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self.stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._lock)

    def _open(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"checkpoint folder {self.folder} is in use by another process: wait for it or name another folder"
            ) from error
        for leftover in self.folder.glob(f"{PART}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        there = self._there()
        if there and not self.resume:
            raise UserError(
                f"checkpoint folder {self.folder} holds a run at iteration {max(there)}: use --resume or another folder"
            )
        damaged = []
        for number in sorted(there, reverse=True):
            try:
                self._run = _checked_run(there[number], number)
                break
            except (OSError, ValueError, RecursionError) as error:
                damaged.append(f"{there[number].name} ({' '.join(str(error).split())})")
        if there and self._run is None:
            raise UserError(
                f"checkpoint folder {self.folder} holds only damaged ones: {', '.join(damaged)}; name another folder"
            )
        if self._run is None:
            if self.resume:
                self._say(f"no checkpoint in {self.folder}: the run starts at its beginning")
            return
        self.newest = number
        if damaged:
            self._say(f"damaged: {', '.join(damaged)} in {self.folder}; the run goes on from iteration {number}")
        made_with, here = self._run["made_with"], _made_with()
        if made_with != here:
            odd = [
                f"{name} {made_with.get(name)} there, {now} here"
                for name, now in here.items()
                if made_with.get(name) != now
            ]
            raise UserError(f"the run in {self.folder} was begun with others ({', '.join(odd)}): use those")
        other = self.config.differences(self._run["config"], except_for=("iterations",))
        if other:
            raise UserError(f"checkpoint folder {self.folder} holds another run ({other}): name another folder")
        if number > self.config.iterations:
            raise UserError(
                f"--iterations {self.config.iterations} is too few: the run in {self.folder} is at iteration {number}"
            )

    def restore(self, state: Any) -> Snapshot | None:
        """What to go on from; None at the run's beginning.

        Args:
          state: the run's initial one.

        Raises:
          UserError: the run in the folder began with another initial state, or its arrays are not this program's.
        """
        self._initial_state = _digest(state)
        if self._run is None:
            return None
        if self._run["initial_state"] != self._initial_state:
            raise UserError(
                f"checkpoint folder {self.folder} holds a run that began with other parameters than "
                f"{self.config.model or 'this version'} has: name another folder"
            )
        place = self._there()[self._run["iteration"]]
        try:
            arrays = _orbax().restore(place.absolute() / ARRAYS)
            leaves, structure = _named(state), jax.tree.structure(state)
            saved, history, left = (arrays[name] for name in ("state", "history", "left"))
            if {name: _kind(leaf) for name, leaf in saved.items()} != {n: _kind(leaf) for n, leaf in leaves.items()}:
                raise ValueError("the state's arrays have other names, types or shapes")
            history = {name: history.pop(name) for name in self._run["metrics"]} | history
            if {len(column) for column in (*history.values(), *left.values())} != {self._run["iteration"]}:
                raise ValueError("arrays of other lengths than the iterations done")
            before, (compiling, running) = Evaluation(**self._run["before"]), map(float, self._run["seconds"])
        except Exception as error:  # orbax raises many kinds
            reason = " ".join(str(error).split())
            raise UserError(f"checkpoint {place} is not one of this version ({reason[:200]})") from error
        restored = jax.tree.unflatten(structure, [saved[name] for name in leaves])
        return Snapshot(restored, history, left, before, (compiling, running))

    def next_after(self, iteration: int) -> int:
        """How many iterations are done at the next checkpoint."""
        return iteration - iteration % self.every + self.every

    def offer(self, iteration: int, snapshot: Callable[[], Snapshot]) -> None:
        """Between two iterations: saves if it is time to, or a signal asked to stop.

        Args:
          iteration: how many are done.
          snapshot: gives what to save.

        Raises:
          Interrupted: a signal asked to stop; the snapshot is saved.
          UserError: the disk refused; earlier checkpoints are as before.
        """
        last = iteration == self.config.iterations
        self._deferring = not last
        if last or self._asked is not None or iteration % self.every == 0:
            self._save(snapshot())
        if self._asked is not None:
            raise self._interrupted(self._asked)

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler."""
        if self._deferring and self._asked is None:
            self._asked = number
        else:
            raise self._interrupted(number)

    def _interrupted(self, number: int) -> Interrupted:
        if self.newest is None:
            return Interrupted(number, "no iteration was kept")
        return Interrupted(
            number,
            f"{self.newest} iterations are kept in {self.folder}; the same command with --resume goes on from there",
        )

    def _save(self, snapshot: Snapshot) -> None:
        place = self.folder / f"iteration-{snapshot.iteration:09d}"
        aside: Path | None = None
        try:
            aside = Path(tempfile.mkdtemp(prefix=PART, dir=self.folder))
            aside.chmod(0o755)
            self._write(snapshot, aside)
            self._remove(place)  # one that could not be read
            aside.rename(place)
            flush(self.folder)
            self.newest = snapshot.iteration
            there = self._there()
            keep = sorted(number for number in there if number <= snapshot.iteration)[-KEPT:]
            for number in set(there) - set(keep):
                self._remove(there[number])
        except Exception as error:  # orbax raises many kinds
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise UserError(
                f"checkpoint {place} could not be written ({reason}): earlier ones are as before"
            ) from error
        finally:
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)

    def _write(self, snapshot: Snapshot, folder: Path) -> None:
        arrays = {"state": _named(snapshot.state), "history": snapshot.history, "left": snapshot.left}
        _orbax().save(folder.absolute() / ARRAYS, jax.tree.map(np.asarray, arrays))
        run = {
            "format": FORMAT,
            "config": self.config.to_dict(),
            "iteration": snapshot.iteration,
            "made_with": _made_with(),
            "before": dataclasses.asdict(snapshot.before),
            "seconds": snapshot.seconds,
            "metrics": list(snapshot.history),  # in their order, which orbax does not keep
            "initial_state": self._initial_state,
        }
        (folder / RUN).write_text(json.dumps(run, indent=1) + "\n")
        sums = [f"{_sha256(path)}  {path.relative_to(folder)}\n" for path in _files(folder)]
        (folder / SUMS).write_text("".join(sums))
        for path in (*folder.rglob("*"), folder):
            flush(path)

    def _remove(self, place: Path) -> None:
        """Deletes a checkpoint, so that it is there whole or not at all."""
        if place.exists() or place.is_symlink():
            gone = Path(tempfile.mkdtemp(prefix=PART, dir=self.folder))
            place.rename(gone / place.name)
            shutil.rmtree(gone, ignore_errors=True)

    def _there(self) -> dict[int, Path]:
        """The checkpoints by iteration."""
        try:
            paths = [(path.name.partition("iteration-"), path) for path in self.folder.iterdir()]
        except OSError as error:
            raise UserError(f"checkpoint folder {self.folder} cannot be read ({error.strerror})") from error
        return {int(name[2]): path for name, path in paths if not name[0] and name[2].isascii() and name[2].isdigit()}


def _checked_run(place: Path, number: int) -> dict[str, Any]:
    """What `run.json` says, if every file of a checkpoint is as it was written.

    Raises:
      OSError, ValueError, RecursionError: it is not.
    """
    if place.is_symlink():
        raise ValueError("a link")
    lines = files.read(place / SUMS, MAX_BYTES).decode("ascii").removesuffix("\n").split("\n")
    written = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    there = {str(path.relative_to(place)): path for path in _files(place) if path != place / SUMS}
    if RUN not in there or set(there) != set(written):
        odd = sorted(set(there) ^ set(written)) or [RUN]
        raise ValueError(f"{odd[0]} is missing or unexpected")
    for name, path in there.items():
        if _sha256(path) != written[name]:
            raise ValueError(f"{name} is not as it was written")
    run = json.loads(files.read(there[RUN], MAX_BYTES))
    if not isinstance(run, dict) or run.get("format") != FORMAT or run.get("iteration") != number:
        raise ValueError(f"{RUN} is not of format {FORMAT} or of another iteration")
    if not all(isinstance(run.get(name), dict) for name in ("config", "before", "made_with")):
        raise ValueError(f"{RUN} lacks its config, evaluation or versions")
    if not {"seconds", "initial_state", "metrics"} <= run.keys():
        raise ValueError(f"{RUN} lacks its times, initial state or metrics")
    return run


def _made_with() -> dict[str, str]:
    """What a run's numbers depend on beside its settings."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in NUMERICAL}
    return {**versions, "device_platform": device.platform, "device_kind": device.device_kind}


def _files(folder: Path) -> list[Path]:
    """Every file below a folder.

    Raises:
      ValueError: there is something that is neither a file nor a folder.
    """
    paths = sorted(folder.rglob("*"))
    for path in paths:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path.relative_to(folder)} is neither a file nor a folder")
    return [path for path in paths if path.is_file()]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _named(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a pytree by their places in it, in its order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def _kind(array: np.ndarray) -> tuple[Any, ...]:
    return array.dtype, array.shape


def _digest(tree: Any) -> str:
    digest = hashlib.sha256()
    for name, leaf in _named(tree).items():
        digest.update(f"{name} {_kind(leaf)}".encode())
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _orbax() -> Any:
    import orbax.checkpoint as ocp  # takes a second: a run without checkpoints has no use for it

    return ocp.Checkpointer(ocp.StandardCheckpointHandler())
