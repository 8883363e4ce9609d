"""After a power failure a name has all that belongs to it, or is not there: what is flushed, and in what order."""

import os
from functools import partial
from pathlib import Path

import pytest

from jaxrl_mini import sweep, train

SHORT = ("--iterations", 1, "--eval-episodes", 1)


class Disk:
    """Watches what a process has the disk keep, and the names that it gives.

    Attributes:
      lost: what was not kept, by the name under which it appeared.
    """

    def __init__(self, monkeypatch):
        self.lost: dict[Path, list[Path]] = {}
        self._kept: set[tuple[int, ...]] = set()
        monkeypatch.setattr(os, "fsync", partial(self._keep, os.fsync))
        for name in ("rename", "replace", "link"):
            monkeypatch.setattr(os, name, partial(self._name, getattr(os, name)))

    def _keep(self, fsync, descriptor) -> None:
        fsync(descriptor)
        self._kept.add(self._content(os.fstat(descriptor)))
        for name, lost in self.lost.items():
            if name.parent in lost and os.path.samestat(name.parent.stat(), os.fstat(descriptor)):
                lost.remove(name.parent)

    def _name(self, function, source, target, **where) -> None:
        function(source, target, **where)
        name = Path(target).absolute()
        parts = [name, *name.rglob("*")]
        self.lost[name] = [path for path in parts if self._content(path.stat()) not in self._kept] + [name.parent]

    @staticmethod
    def _content(about: os.stat_result) -> tuple[int, ...]:
        return about.st_ino, about.st_size, about.st_mtime_ns


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_all_that_a_run_writes_is_kept(command, disk, tmp_path):
    for seed, more in ((7, ()), (8, ("--overwrite",))):
        words = (*SHORT, "--seed", seed, "--output", "r.json", "--trajectories", "r.npz", "--save-policy", "p", *more)
        assert command(train, *words, "--checkpoint", f"c{seed}").code == 0
        names = {tmp_path / name for name in ("r.json", "r.npz", "p", f"c{seed}/iteration-000000001")}
        assert {name: disk.lost.pop(name) for name in names} == {name: [] for name in names}


def test_the_parts_of_a_sweep_are_kept(command, disk, tmp_path):
    assert command(sweep, *SHORT, "--seeds", "7:8", "--output", "s").code == 0
    parts = [*(tmp_path / "s").rglob("*.parquet")]
    assert len(parts) == 2 and all(disk.lost[part] == [] for part in parts)
