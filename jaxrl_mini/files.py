"""Reading files that may be anything."""

import errno
import os
import stat
from pathlib import Path

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
