"""Pytrees of arrays on the disk, by orbax: with one error of one line where that library has many."""

import logging
import os
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any


def write(place: Path, tree: Any) -> None:
    """Writes a tree of arrays and numbers into a new folder.

    Raises:
      OSError: the disk refused.
    """
    try:
        _orbax().save(place.absolute(), tree)
    except Exception as error:  # orbax raises many kinds
        raise _as_one_line(error) from error


def read(place: Path) -> Any:
    """Reads it back; of the dictionaries in it, the keys are sorted.

    Raises:
      Exception: of many kinds; it is not as it was written.
    """
    return _orbax().restore(place.absolute())


def _as_one_line(error: Exception) -> OSError:
    """With the system's own words, where the error has its number."""
    number = re.search(r"os_error_code='(\d+)'", str(error))
    if isinstance(error, OSError) and error.strerror:
        return error
    if number:
        return OSError(int(number[1]), os.strerror(int(number[1])))
    return OSError(0, " ".join(str(error).split())[:200])


def _orbax() -> Any:
    _silence()
    import orbax.checkpoint as ocp  # takes a second: a run without checkpoints has no use for it

    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


@lru_cache(maxsize=1)
def _silence() -> None:
    """Of what fails in the threads of orbax and tensorstore, `write` raises the first: the rest is not printed, too.

    For they print it in their own time, also after `write` has raised.
    """
    logging.getLogger("absl").addFilter(lambda record: "_SignalingThread.run()" not in str(record.msg))
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook
