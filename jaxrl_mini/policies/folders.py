"""Folders of a kept policy, which appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_mini.config import UserError
from jaxrl_mini.machine.files import flush

TABLE, LANGUAGE = "policy.json", "config.json"
"""The file that says what a folder holds: a table policy, or a Hugging Face checkpoint."""


def check_destination(folder: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Refuses a folder that `write` could not write, before any work is done for it.

    Raises:
      UserError: it is a file, or holds something and is not to be overwritten, or something else than a policy, or its
        place is not writable.
    """
    folder = Path(folder)
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"cannot save a policy to {str(folder)!r}: it is a file, give a folder")
        if folder.is_dir() and any(folder.iterdir()):
            if not overwrite:
                raise UserError(f"cannot save a policy to {str(folder)!r}: it is not empty, give a new folder")
            if not any((folder / name).is_file() for name in (TABLE, LANGUAGE)):
                raise UserError(f"cannot save a policy to {str(folder)!r}: it holds no policy, give a new folder")
        above = folder.absolute().parent
        while not above.exists():
            above = above.parent
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise UserError(f"cannot save a policy to {str(folder)!r}: {str(above)!r} is not writable")
    except OSError as error:
        raise UserError(f"cannot save a policy to {str(folder)!r}: {error.strerror}") from error


def write(
    folder: str | os.PathLike[str],
    weights: str,
    tensors: Mapping[str, np.ndarray],
    companions: Mapping[str, bytes],
    overwrite: bool = False,
) -> None:
    """Writes a folder beside its place, flushes it, and renames it.

    Args:
      folder: its place; what is there is replaced if `overwrite` says so.
      weights: the name of the safetensors file.
      tensors: what that file holds.
      companions: the other files by name.
      overwrite: replace a policy that is there.

    Raises:
      UserError: as `check_destination`, or the disk refused; what was there is as before.
    """
    check_destination(folder, overwrite)
    try:
        _write(Path(folder).absolute(), weights, tensors, companions)
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot save a policy to {str(folder)!r}: {reason}") from error


def _write(folder: Path, weights: str, tensors: Mapping[str, np.ndarray], companions: Mapping[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        aside.chmod(0o755)
        safetensors.numpy.save_file(dict(tensors), aside / weights, metadata={"format": "pt"})
        for name, data in companions.items():
            (aside / name).write_bytes(data)
        (aside / weights).chmod((aside / next(iter(companions))).stat().st_mode)  # the library makes it private
        for path in (*aside.iterdir(), aside):
            flush(path)
        if folder.exists() and any(folder.iterdir()):
            replaced = aside.with_name(aside.name + "-replaced")
            folder.rename(replaced)
            try:
                aside.rename(folder)
            except BaseException:
                replaced.rename(folder)
                raise
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            aside.rename(folder)  # over nothing, or an empty folder
        flush(folder.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
