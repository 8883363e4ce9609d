"""Faults of the disk: the n-th call of the system's functions that change files fails, for every n."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.numpy

from jaxrl_mini.machine import arrays

CHANGES = ("open", "write", "fsync", "link", "rename", "replace", "mkdir", "close", "unlink", "rmdir", "chmod")
"""Functions of `os` through which Python changes files; some reading goes through `open` as well."""


class Failing:
    """Makes the n-th change of a file fail, counted over `CHANGES`, writes to open files, safetensors, and orbax.

    A write that fails has written the half of its data.
    """

    def __init__(self, patch: pytest.MonkeyPatch, number: int, code: int):
        self.calls, self.number, self.code = 0, number, code
        for name in CHANGES:
            patch.setattr(os, name, self._wrapped(getattr(os, name)))
        patch.setattr(io, "open", self._opened(io.open))
        patch.setattr(safetensors.numpy, "save_file", self._saved(safetensors.numpy.save_file))
        patch.setattr(arrays, "_orbax", self._orbax(arrays._orbax))

    def is_due(self) -> bool:
        """Counts a call, and says whether it is the one to fail."""
        self.calls += 1
        return self.calls == self.number

    def error(self) -> OSError:
        return OSError(self.code, os.strerror(self.code))

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.is_due():
                raise self.error()
            return function(*arguments, **options)

        return call

    def _opened(self, original: Callable[..., Any]) -> Callable[..., Any]:
        failing = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                if failing.is_due():
                    super().write(data[: len(data) // 2])
                    raise failing.error()
                return super().write(data)

        def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if mode != "wb":
                return original(file, mode, *arguments, **options)
            if self.is_due():
                raise self.error()
            return io.BufferedWriter(Raw(file, "wb"))

        return opened

    def _saved(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def saved(tensors: Any, path: Any, *arguments: Any, **options: Any) -> None:
            original(tensors, path, *arguments, **options)
            if self.is_due():
                os.truncate(path, Path(path).stat().st_size // 2)
                raise safetensors.SafetensorError(os.strerror(self.code))

        return saved

    def _orbax(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def orbax() -> Any:
            checkpointer = original()
            save = checkpointer.save

            def saved(path: Path, *arguments: Any) -> None:
                save(path, *arguments)
                if self.is_due():
                    largest = max(filter(Path.is_file, path.rglob("*")), key=lambda file: file.stat().st_size)
                    os.truncate(largest, largest.stat().st_size // 2)
                    raise ValueError(f"{os.strerror(self.code)}\n(tensorstore)")

            checkpointer.save = saved
            return checkpointer

        return orbax


def every_fault(code: int) -> Iterator[Callable[[], Any]]:
    """For n = 1, 2, ...: a context in which the n-th call fails, until one comes in which none did.

    for fault in every_fault(errno.ENOSPC):
        with fault() as failing:
            ...
    """
    number, calls = 0, 0

    @contextmanager
    def fault() -> Iterator[Failing]:
        nonlocal calls
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, number, code)
            yield failing
            calls = failing.calls

    while calls >= number:
        number += 1
        yield fault
