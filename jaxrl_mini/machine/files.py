"""Files: read whatever they may be, and written whole or not at all."""

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from jaxrl_mini.config import UserError

MAX_BYTES = 2**31
"""Nothing that is read whole is larger."""


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
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def flush(path: Path) -> None:
    """Has the disk keep a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Output:
    """A file that appears under its name whole, at `commit`, or not at all.

    Opening it creates the temporary file beside the target, so that a folder that cannot be written to is found
    before anything is computed. Folders that were made for it go again, where nothing was committed.

    Raises:
      UserError: the target is a folder or not a regular file, or its folder cannot be created or written.
    """

    def __init__(self, path: str | Path):
        self.path, self._part = Path(path), None
        self._made: list[Path] = []
        try:
            if self.path.is_dir():
                raise UserError(f"output {path} is a folder: name a file in it")
            if self.path.exists() and not self.path.is_file():
                raise UserError(f"output {path} is not a regular file: name another")
            for folder in (*reversed(self.path.parent.parents), self.path.parent):
                if not folder.is_dir():
                    folder.mkdir(exist_ok=True)
                    self._made.append(folder)
            descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".part", dir=self.path.parent)
            self._part = Path(name)
            os.close(descriptor)
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
        """Writes beside the target, flushes to disk, and renames over it.

        Raises:
          UserError: the disk refused; the target is as it was before.
        """
        assert self._part is not None
        try:
            with self._part.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            self._part.chmod(0o666 & ~umask)
            self._part.replace(self.path)
        except OSError as error:
            raise UserError(f"output {self.path} could not be written ({error.strerror}): it is as before") from error


@contextmanager
def optional_output(path: str | None) -> Iterator[Output | None]:
    """An `Output`, or None where no file is asked for."""
    if path is None:
        yield None
    else:
        with Output(path) as output:
            yield output
