"""Checkpoints: what a run needs to go on as if it had never stopped, in folders that appear whole or not at all.

A checkpoint is a folder `iteration-N` with `arrays/` (written by orbax), `run.json` and `SHA256SUMS`, which covers
every other file: `sha256sum -c SHA256SUMS` checks it. Nothing is given to a parser before its digest is right.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

from jaxrl_mini.config import Config, UserError, differences
from jaxrl_mini.learning import identity
from jaxrl_mini.learning.evaluation import Evaluation
from jaxrl_mini.machine import arrays, files, signals
from jaxrl_mini.machine.files import flush
from jaxrl_mini.machine.signals import Interrupted
from jaxrl_mini.types import ByContent

KEPT = 3
"""Checkpoints of a folder; older ones are deleted."""
EVERY = 20
"""Iterations between checkpoints, by default."""
NAME, PART, LOCK = "iteration-", ".part-iteration-", ".checkpoints.lock"
SUMS, RUN, ARRAYS = "SHA256SUMS", "run.json", "arrays"
MAX_BYTES = 2**20
"""Of `SHA256SUMS` and `run.json`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot(ByContent):
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

    def history_by(self, chunk: int) -> list[dict[str, np.ndarray]]:
        """The history of all whole chunks of iterations, and that of the rest."""
        first = self.iteration - self.iteration % chunk
        return [
            {name: column[part] for name, column in self.history.items()} for part in (slice(first), slice(first, None))
        ]


class Checkpoints:
    """The checkpoints of one run in a folder, which no other process may use meanwhile.

    A context manager, which `run` enters where the caller has not. Within it, each of `signals.not_ignored()`
    stops the run after its current iteration, with a checkpoint; the second one, at once. Nothing is deleted but
    older checkpoints of the same run.

    Args:
      folder: their place; it is created.
      config: of the run.
      mesh: its devices, as `Config`'s settings do not say.
      every: iterations between checkpoints; there is one after the last iteration, too.
      resume: go on from the newest one, if there is any.
      say: takes a line for the user.

    Raises:
      UserError: on entering: the folder cannot be used, another process uses it, it holds checkpoints and `resume` is
        false, none of them can be read, or they are of a run with other settings, another model, on another machine,
        or with more iterations.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Config,
        *,
        mesh: jax.sharding.Mesh | None = None,
        every: int = EVERY,
        resume: bool = False,
        say: Callable[[str], object] = warnings.warn,
    ):
        if every < 1:
            raise UserError(f"--checkpoint-every {every} is out of range: expected a whole number from 1")
        self.folder, self.config, self.every, self.resume, self._say = Path(folder), config, every, resume, say
        self._mesh = mesh
        self.newest: int | None = None
        """Iterations done in the newest checkpoint."""
        self._identity: identity.Identity = {}
        self._beginning = np.empty(0)
        self._asked: int | None = None
        self._deferring = False
        self._exit: contextlib.ExitStack | None = None

    def __enter__(self) -> "Checkpoints":
        self.newest, self._asked, self._deferring = None, None, False
        self._identity = identity.of(self.config, self._mesh)
        with contextlib.ExitStack() as stack:
            try:
                for folder in (*reversed(self.folder.parents), self.folder):
                    if not folder.is_dir():
                        folder.mkdir(exist_ok=True)
                        stack.callback(_try, folder.rmdir)  # goes again if nothing was kept
                path = self.folder / LOCK
                lock = stack.enter_context(files.open_to_lock(path))
                if not files.lock(lock):
                    self._say(f"checkpoint folder {self.folder} is on a disk without locks: let nobody else use it")
                if not os.path.samestat(os.fstat(lock.fileno()), path.stat()):  # its holder deleted it meanwhile
                    raise BlockingIOError
                stack.callback(lambda: None if self.newest else _try(path.unlink))
                for leftover in self.folder.glob(f"{PART}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                self._find()
            except BlockingIOError as error:
                raise UserError(
                    f"checkpoint folder {self.folder} is in use by another process: wait for it or name another folder"
                ) from error
            except OSError as error:
                raise UserError(
                    f"checkpoint folder {self.folder} cannot be used ({error.strerror}): name another folder"
                ) from error
            if threading.current_thread() is threading.main_thread():
                for number in signals.not_ignored():
                    stack.callback(signal.signal, number, signal.signal(number, self.stop))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self._exit is not None:
            self._exit.close()
        self._exit = None

    @contextlib.contextmanager
    def of_run(self, config: Config, mesh: jax.sharding.Mesh | None) -> Iterator["Checkpoints"]:
        """These, entered, if they are of a run of `config` on `mesh`.

        Raises:
          UserError: they are of another, or as on entering.
        """
        theirs, ours = ((self.config, self._mesh), (config, mesh))
        if odd := differences(*({**one.to_dict(), "mesh": on and dict(on.shape)} for one, on in (theirs, ours))):
            raise UserError(f"checkpoints in {self.folder} are for another run ({odd}): make them for this one")
        with contextlib.nullcontext() if self._exit else self:
            yield self

    def _find(self) -> None:
        """Looks for the newest checkpoint that can be read, and refuses it if the run cannot go on from there."""
        there, damaged = self._there(), []
        if there and not self.resume:
            raise UserError(
                f"checkpoint folder {self.folder} holds a run at iteration {max(there)}: use --resume or another folder"
            )
        for number in sorted(there, reverse=True):
            try:
                run = read(there[number])
            except UserError as error:
                damaged.append(f"{there[number].name} ({error})")
                continue
            if odd := identity.differences(run, self._identity):
                raise UserError(f"checkpoint folder {self.folder} holds another run ({odd}): name another folder")
            if number > self.config.iterations:
                asked = f"--iterations {self.config.iterations} is too few"
                raise UserError(f"{asked}: the run in {self.folder} is at iteration {number}")
            self.newest = number
            if unknown := identity.unknown(run, self._identity):
                said = f"checkpoint {there[number]} does not say with which {', '.join(unknown)} it was made"
                self._say(f"{said}: if with others, the last bits of numbers are others from here on")
            break
        odd = f"damaged: {', '.join(damaged)} in {self.folder}"
        if there and self.newest is None:
            raise UserError(f"{odd}; there is no other checkpoint: name another folder")
        if damaged:
            self._say(f"{odd}; the run goes on from iteration {self.newest}")
        if self.resume and not there:
            self._say(f"no checkpoint in {self.folder}: the run starts at its beginning")

    def restore(self, state: Any) -> Snapshot | None:
        """What to go on from; None at the run's beginning.

        Args:
          state: the run's initial one.

        Raises:
          UserError: the run in the folder began with another initial state, or its arrays are not this program's, or
            the folder was not entered.
        """
        if self._exit is None:
            raise UserError(f"checkpoint folder {self.folder} is not locked: use it in a with statement")
        self._beginning = _digest(state)
        if self.newest is None:
            return None
        place = self._there()[self.newest]
        try:
            tree = arrays.read(place / ARRAYS)
            history = {name.partition(" ")[2]: column for name, column in sorted(tree["history"].items())}
            before = Evaluation.of(tree["before"])
            if {len(column) for column in (*history.values(), *tree["left"].values())} != {self.newest}:
                raise ValueError("arrays of other lengths than the iterations done")
            if not np.array_equal(tree["beginning"], self._beginning):
                raise ValueError(f"it began with other parameters than {self.config.model or 'this version'} has")
            wanted, structure = jax.tree.flatten(state)
            if [_kind(leaf) for leaf in tree["state"]] != [_kind(leaf) for leaf in wanted]:
                raise ValueError("parameters or moments of other types or shapes")
        except Exception as error:  # orbax raises many kinds
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"checkpoint {place} is not of this run ({reason}): name another folder") from error
        state = jax.tree.unflatten(structure, tree["state"])
        return Snapshot(state, history, tree["left"], before, tuple(tree["seconds"]))

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
        self._deferring, last = True, iteration == self.config.iterations
        if last or self._asked is not None or iteration % self.every == 0:
            self._save(snapshot())
        self._deferring = not last
        if self._asked is not None:
            raise self._interrupted(self._asked)

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler."""
        if not self._deferring or self._asked is not None:
            raise self._interrupted(number)
        self._asked = number

    def _interrupted(self, number: int) -> Interrupted:
        kept = f"{self.newest} iterations are kept in {self.folder}; the same command with --resume goes on from there"
        return Interrupted(number, "no iteration was kept" if self.newest is None else kept)

    def _save(self, snapshot: Snapshot) -> None:
        place = self.folder / f"{NAME}{snapshot.iteration:09d}"
        aside = place.with_name(f"{PART}{snapshot.iteration}")
        try:
            aside.mkdir()
            self._write(snapshot, aside)
            with contextlib.suppress(FileNotFoundError):  # one that could not be read
                place.rename(place.with_name(f"damaged-{place.name}-{uuid.uuid4().hex[:8]}"))
            aside.rename(place)
            flush(self.folder)
        except OSError as error:
            raise UserError(
                f"checkpoint {place} could not be written ({error.strerror}): earlier ones are as before"
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self.newest = snapshot.iteration
        there = self._there()
        for number in sorted(number for number in there if number <= snapshot.iteration)[:-KEPT]:
            if self._is_own(there[number]):
                _try(_remove, there[number])

    def _is_own(self, place: Path) -> bool:
        """Whether a checkpoint is of this run, as far as `run.json` says; arrays may be damaged."""
        try:
            return not identity.differences(read(place, whole=False), self._identity)
        except UserError:
            return False

    def _write(self, snapshot: Snapshot, folder: Path) -> None:
        """Fills a new folder."""
        history = {f"{place:02} {name}": column for place, (name, column) in enumerate(snapshot.history.items())}
        before = {name: value for name, value in dataclasses.asdict(snapshot.before).items() if value is not None}
        tree = {
            "state": jax.tree.map(np.asarray, jax.tree.leaves(snapshot.state)),
            "history": history,  # orbax returns it sorted by name
            "left": snapshot.left,
            "before": before,
            "seconds": list(snapshot.seconds),
            "beginning": self._beginning,
        }
        arrays.write(folder / ARRAYS, tree)
        (folder / RUN).write_text(json.dumps(self._identity, indent=1) + "\n")
        sums = [f"{_sha256(path)}  {path.relative_to(folder)}\n" for path in _files(folder)]
        (folder / SUMS).write_text("".join(sums))
        for path in (*folder.rglob("*"), folder):
            flush(path)

    def _there(self) -> dict[int, Path]:
        """The checkpoints by iteration."""
        paths = {path.name.removeprefix(NAME): path for path in self.folder.glob(f"{NAME}*")}
        return {int(number): path for number, path in paths.items() if number.isascii() and number.isdigit()}


def read(place: Path, *, whole: bool = True) -> identity.Identity:
    """What a checkpoint's run depends on beside its state (see `identity`), if every file is as it was written.

    Args:
      place: its folder.
      whole: look at every file; else at the one that says this.

    Raises:
      UserError: it is not.
    """
    try:
        lines = files.read(place / SUMS, MAX_BYTES).decode("ascii").removesuffix("\n").split("\n")
        written = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        there = {str(path.relative_to(place)): path for path in _files(place) if path != place / SUMS}
        if odd := {RUN, *there} ^ {*written} or {RUN} - {*there}:
            raise UserError(f"{min(odd)} is missing or unexpected")
        for name, path in there.items():
            if (whole or name == RUN) and _sha256(path) != written[name]:
                raise UserError(f"{name} is not as it was written")
        return identity.read(json.loads(files.read(there[RUN], MAX_BYTES)))
    except OSError as error:
        raise UserError(f"{error.strerror}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(" ".join(str(error).split())) from error


def _remove(place: Path) -> None:
    """Deletes a checkpoint, which is there whole or not at all, if there is one."""
    gone = place.with_name(f"{PART}old")
    with contextlib.suppress(FileNotFoundError):
        place.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    """Every file below a folder.

    Raises:
      UserError: there is something that is neither a file nor a folder, or the folder is a link.
    """
    paths = sorted(folder.rglob("*"))
    for path in (folder, *paths):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(f"{path.name} is neither a file nor a folder")
    return [path for path in paths if path.is_file()]


def _try(do: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(OSError):
        do(*arguments)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kind(array: Any) -> tuple[Any, ...]:
    return array.dtype, array.shape


def _digest(state: Any) -> np.ndarray:
    """uint8 [32]: the SHA-256 of a pytree's arrays."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        digest.update(np.asarray(leaf).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)
