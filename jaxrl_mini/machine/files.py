"""Files: read whatever they may be, and written whole or not at all."""

import errno
import itertools
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO

from jaxrl_mini.config import UserError

MAX_BYTES = 2**31
"""Nothing that is read whole is larger."""
UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""What disks answer that cannot do what was asked, such as network disks and locks."""


def read(path: str | Path, limit: int = MAX_BYTES) -> bytes:
    """The content of a regular file, or of one that a link names; never waits for a pipe or a device.

    Raises:
      OSError: there is none, it is no regular file, it is larger than `limit` bytes, or it cannot be read.
    """
    try:
        opened = open(path, "rb", opener=_without_waiting)  # noqa: SIM115, Path.open takes no opener
    except ValueError as error:  # no system has such a name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    with opened as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if about.st_size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
        return file.read(limit)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)


def flush(path: Path) -> None:
    """Has the disk keep a file, or the names in a folder, as far as it does that for folders."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in {*UNSUPPORTED, errno.EBADF, errno.EACCES} or not path.is_dir():
            raise


def open_to_lock(path: Path) -> IO[bytes]:
    """A file, created if it is not there, but not through a link."""
    return open(path, "ab", opener=_without_links)


def _without_links(path: str, flags: int) -> int:
    return _without_waiting(path, flags | getattr(os, "O_NOFOLLOW", 0))


def lock(file: IO[bytes] | int) -> bool:
    """Keeps others from locking an open file or folder until it is closed, or this process ends in whatever way.

    Returns:
      Whether they are kept from it: some systems and network disks have no locks.

    Raises:
      BlockingIOError: another process holds it.
      OSError: the system refused for another reason.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        return False
    except OSError as error:
        if error.errno not in {*UNSUPPORTED, errno.ENOLCK}:
            raise
        return False
    return True


Odd = Callable[[Path, bool], str | None]
"""Why a file that is there may not be replaced unasked, or None; whether it was written while we computed."""


def anything(path: Path, meanwhile: bool) -> str | None:
    """The `Odd` of outputs that say nothing of what made them."""
    return "exists"


def not_marked(mark: bytes, kind: str) -> Odd:
    """The `Odd` of files that any run may replace which writes such files, but not one that another is writing.

    Args:
      mark: what they have among their first or last bytes.
      kind: what they are, in a word.
    """

    def odd(path: Path, meanwhile: bool) -> str | None:
        try:
            with path.open("rb") as file:
                ends = file.read(ENDS)
                file.seek(max(file.tell(), path.stat().st_size - ENDS))
                ends += file.read(ENDS)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        return f"exists and is no {kind}" if mark not in ends else "exists" if meanwhile else None

    return odd


ENDS = 2**16
"""Bytes at either end of a file in which its mark is looked for."""


class Output:
    """A file that appears under its name whole, at `commit`, or not at all.

    Opening it creates the temporary file beside the target, so that a folder that cannot be written to is found
    before anything is computed. Folders that were made for it go again, where nothing was committed. Where the name is
    that of a link, it is what the link names that is written.

    Args:
      path: the target.
      odd: why a file that is there may not be replaced.
      overwrite: replace whatever is there now; still not what another process writes from now on.

    Raises:
      UserError: the target is a folder or not a regular file, or where this process prints, or may not be replaced, or
        its folder cannot be created or written.
    """

    def __init__(self, path: str | Path, odd: Odd = anything, overwrite: bool = False):
        self.path, self._odd, self._part = Path(path), odd, None
        self._made: list[Path] = []
        try:
            if self.path.is_dir():
                raise UserError(f"output {path} is a folder: name a file in it")
            if self.path.exists() and not self.path.is_file():
                raise UserError(f"output {path} is not a regular file: name another")
            self._target = Path(os.path.realpath(self.path))
            self._seen = identity(self._target)
            if _is_printed_to(self._target):
                raise UserError(f"output {path} is where this command prints: name another file")
            if self._seen and not overwrite and (why := odd(self.path, False)):
                raise UserError(f"output {path} {why}: name another file or use --overwrite")
            for folder in (*reversed(self._target.parent.parents), self._target.parent):
                if not folder.is_dir():
                    folder.mkdir(exist_ok=True)
                    self._made.append(folder)
            part = self._target.with_name(f".{self._target.name}.{uuid.uuid4().hex[:8]}.part")
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            self._part = part
        except OSError as error:
            self._clear()
            raise UserError(f"output {path} cannot be written ({error.strerror}): choose another place") from error

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def _clear(self) -> None:
        """Takes away what was made, as far as the disk lets us and nothing was put there."""
        with suppress(OSError):
            if self._part is not None:
                self._part.unlink(missing_ok=True)
            for folder in reversed(self._made):
                folder.rmdir()

    def commit(self, write: Callable[[IO[bytes]], object]) -> None:
        """Writes beside the target, flushes to disk, and puts it in its place.

        Raises:
          UserError: the disk refused, and the target is as it was before; or another process has written it since this
            was opened, and what was computed is beside it under another name.
        """
        assert self._part is not None
        try:
            with self._part.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if why := self._place(self._part):
                kept = keep(self.path, self._target, partial(link_new, self._part))
                raise UserError(
                    f"output {self.path} {why}, written meanwhile by another process: see {kept} for this one's"
                )
        except OSError as error:
            raise UserError(f"output {self.path} could not be written ({error.strerror}): it is as before") from error

    def _place(self, part: Path) -> str | None:
        """Gives the target its content, or says why not."""
        with alone_in(self._target.parent):
            while True:
                there = identity(self._target)
                if there is None:
                    if link_new(part, self._target):
                        return None
                elif there != self._seen and (why := self._odd(self.path, True)):
                    return why
                else:
                    part.replace(self._target)
                    return None


def optional_output(
    path: str | None, odd: Odd = anything, overwrite: bool = False
) -> AbstractContextManager[Output | None]:
    """An `Output`, or None where no file is asked for."""
    return nullcontext() if path is None else Output(path, odd, overwrite)


def write_all(writes: Mapping[str, Callable[[], object]]) -> dict[str, UserError]:
    """Writes all that can be written, by name, in order; returns the errors.

    Raises:
      KeyboardInterrupt: it says what is written so far.
    """
    errors, written = dict[str, UserError](), list[str]()
    for name, write in writes.items():
        try:
            write()
            written.append(name)
        except UserError as error:
            errors[name] = error
        except KeyboardInterrupt as interruption:
            said = f"written so far: {', '.join(written) or 'nothing'}"
            interruption.args = (f"{said}; {interruption}" if str(interruption) else said,)
            raise
    return errors


def identity(path: Path) -> tuple[int, ...] | None:
    """What tells a file or folder from one that takes its place; None where there is none."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return None
    return about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size


def _is_printed_to(path: Path) -> bool:
    """Whether a file is the standard output or error of this process."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return True
    return False


def link_new(part: Path, path: Path) -> bool:
    """Gives a file a name that nothing has yet; False, and nothing done, where something has it."""
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
            raise
        if path.exists():
            return False
        part.rename(path)  # a file system without hard links
    return True


def keep(path: Path, target: Path, place: Callable[[Path], bool]) -> Path:
    """The first free name beside the target of a path at which `place` could put something, as it says."""
    names = (target.with_name(f"{target.stem}-kept-{number}{target.suffix}") for number in itertools.count(1))
    kept = next(filter(place, names))
    near = path.with_name(kept.name)  # in the words of the user, where no link leads elsewhere
    return near if near.exists() else kept


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps others within this function waiting, while one looks what a folder holds and then changes it.

    Not for long, and not where the disk has no locks: what may not be replaced is then found a moment too late.
    """
    descriptor = _locked(folder)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder as far as there is one."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            lock(descriptor)
        except BlockingIOError:
            time.sleep(0.005)
        except OSError:
            break
        else:
            break
    return descriptor


PATIENCE = 5.0
"""Seconds that another process may hold a folder's lock."""
