"""Folders of a kept policy, which appear whole or not at all."""

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_mini.config import ARTICLE, UserError
from jaxrl_mini.machine import files
from jaxrl_mini.machine.files import flush
from jaxrl_mini.tasks.compiled import CompiledTask

TABLE, LANGUAGE = "policy.json", "config.json"
"""The file that says what a folder holds: a table policy, or a Hugging Face checkpoint."""
WEIGHTS = ("policy.safetensors", "model.safetensors")
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""The files beside a language model's weights that go from a loaded folder to a saved one."""
MADE_BY = "made-by.json"
"""The file beside a checkpoint that says what settings it came from."""
MAX_BYTES = 2**20
"""Of the files of an `Origin`, where they are compared."""

Origin = Mapping[str, bytes]
"""What a folder came from, as files in it: the same again may replace it unasked."""


def made_by(settings: Mapping[str, object], task: CompiledTask) -> Origin:
    """The origin of a checkpoint that was made for a task."""
    of_task = {} if task.name == ARTICLE else {"task": task.name, "task_digest": task.digest}
    return {MADE_BY: (json.dumps({**settings, **of_task}, indent=1) + "\n").encode()}


def task_of(folder: str | os.PathLike[str]) -> tuple[str, str] | None:
    """The task that a checkpoint was made for, and its digest; None where the folder says of none.

    Raises:
      UserError: what it says cannot be read.
    """
    path = Path(folder) / MADE_BY
    try:
        data = json.loads(files.read(path, MAX_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} is not JSON") from error
    task, digest = (data.get(name) for name in ("task", "task_digest")) if isinstance(data, dict) else (None, None)
    if task is None and digest is None:
        return None
    if not isinstance(task, str) or not isinstance(digest, str):
        raise UserError(f"{str(path)!r} names task {task!r} with digest {digest!r}: expected text")
    return task, digest


def digests(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Of each file of a language model on which a run depends, the first 16 digits of its SHA-256, by path.

    Raises:
      UserError: one of them cannot be read.
    """
    folder, found = Path(folder), dict[str, str]()
    weights = {path for ending in ("", ".index.json") for path in folder.glob(f"*.safetensors{ending}")}
    try:
        for path in sorted({*weights, *(folder / name for name in COMPANIONS)}):
            if path.is_file():
                with path.open("rb") as file:
                    found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise UserError(f"model {str(folder)!r} cannot be read: {error}") from error
    return found


class Destination:
    """The place of a policy's folder, which `write` fills. Where it is a link, it is what the link names.

    Args:
      folder: the place; folders above it are made.
      overwrite: replace a policy that is there now.
      origin: files to write with the others; a folder that holds these and no file of another name is replaced, too.

    Raises:
      UserError: it is a file, or holds something that is not to be overwritten, or something else than a policy, or its
        place is not writable.
    """

    def __init__(self, folder: str | os.PathLike[str], overwrite: bool = False, origin: Origin | None = None):
        self.folder, self._origin = Path(folder), dict(origin or {})
        try:
            self._target = Path(os.path.realpath(self.folder))
            if self.folder.exists() and not self.folder.is_dir():
                raise self._refusal("it is a file, give a folder")
            self._seen = files.identity(self._target) if self._is_taken() else None
            if self._seen and not self._is_of_the_same_origin():
                if not overwrite:
                    raise self._refusal("it is not empty, give a new folder")
                if not any((self._target / name).is_file() for name in (TABLE, LANGUAGE)):
                    raise self._refusal("it holds no policy, give a new folder")
            above = self._target.parent
            while not above.exists():
                above = above.parent
            if not above.is_dir() or not os.access(above, os.W_OK):
                raise self._refusal(f"{str(above)!r} is not writable")
        except OSError as error:
            raise self._refusal(error.strerror) from error

    def write(self, weights: str, tensors: Mapping[str, np.ndarray], companions: Mapping[str, bytes]) -> None:
        """Writes a folder beside its place, flushes it, and renames it.

        Args:
          weights: the name of the safetensors file.
          tensors: what that file holds.
          companions: the other files by name, beside those of the origin.

        Raises:
          UserError: the disk refused, and what was there is as before; or something has been put there since, and the
            policy is beside it under another name.
        """
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            aside = self._target.with_name(f".{self._target.name}-{uuid.uuid4().hex[:8]}")
            try:
                aside.mkdir()
                _fill(aside, weights, tensors, {**companions, **self._origin})
                placed = self._place(aside)
                kept = None if placed else files.keep(self.folder, self._target, lambda name: _renamed(aside, name))
                flush(self._target.parent)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
        except (OSError, safetensors.SafetensorError) as error:
            raise self._refusal(getattr(error, "strerror", None) or error) from error
        if kept:
            raise self._refusal(f"another process wrote it meanwhile, see {str(kept)!r} for this one's")

    def _place(self, aside: Path) -> bool:
        """Puts the folder in its place, if what is there may go."""
        with files.alone_in(self._target.parent):
            if not self._is_taken():
                return _renamed(aside, self._target)
            if files.identity(self._target) != self._seen and not self._is_of_the_same_origin():
                return False
            replaced = aside.with_name(aside.name + "-replaced")
            self._target.rename(replaced)
            try:
                aside.rename(self._target)
            except BaseException:
                replaced.rename(self._target)
                raise
        shutil.rmtree(replaced, ignore_errors=True)
        return True

    def _is_taken(self) -> bool:
        return os.path.lexists(self._target) and not (self._target.is_dir() and not any(self._target.iterdir()))

    def _is_of_the_same_origin(self) -> bool:
        try:
            there = {name: files.read(self._target / name, MAX_BYTES) for name in self._origin}
            others = {path.name for path in self._target.iterdir()} - {*WEIGHTS, *COMPANIONS, *there}
        except OSError:
            return False
        return bool(there) and there == self._origin and not others

    def _refusal(self, reason: object) -> UserError:
        return UserError(f"cannot save a policy to {str(self.folder)!r}: {reason}")


def _fill(folder: Path, weights: str, tensors: Mapping[str, np.ndarray], companions: Mapping[str, bytes]) -> None:
    for name, data in companions.items():
        (folder / name).write_bytes(data)
    safetensors.numpy.save_file(dict(tensors), folder / weights, metadata={"format": "pt"})
    (folder / weights).chmod((folder / next(iter(companions))).stat().st_mode)  # the library makes it private
    for path in (*folder.iterdir(), folder):
        flush(path)


def _renamed(aside: Path, name: Path) -> bool:
    """Renames a folder to a name that nothing has, or an empty folder; False where something else has it."""
    try:
        aside.rename(name)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
    return True
