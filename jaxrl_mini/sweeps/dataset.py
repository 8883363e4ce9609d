"""A sweep's folder: its grid, and one pair of Parquet files per part, each whole or not there.

    sweep.json           the grid, its digest, the schema version, and where it was started
    runs/000012.parquet     a row per run of part 12
    history/000012.parquet  a row per run and kept iteration, where history is kept
    damaged/             parts that could not be read back, set aside

What is being written has a name in the sweep's folder itself that begins with a dot, so that no reader of `runs` or
`history` finds it. Every page carries a checksum, and the footer of every file the digest of its columns.
"""

import contextlib
import io
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl_mini.config import UserError
from jaxrl_mini.machine import files
from jaxrl_mini.machine.runtime import deciding, differences, unknown
from jaxrl_mini.sweeps import tables
from jaxrl_mini.sweeps.grid import Grid
from jaxrl_mini.sweeps.tables import HISTORY, LABELS, RUNS, SCHEMA_VERSION
from jaxrl_mini.types import Columns


class Damaged(Exception):
    """A part's file cannot be read back as it was written."""


class Dataset:
    """An open sweep folder; `create` and `open` make one.

    Attributes:
      path: the folder.
      grid: what it holds, or will.
      runtime: where it was started (see `machine.runtime`), and digests of the files of its `models`, if there are.
      version: of the schema that its files have (see `tables`); what is read has the newest.
    """

    def __init__(self, path: Path, grid: Grid, runtime: dict[str, Any], version: int = SCHEMA_VERSION):
        self.path, self.grid, self.runtime, self.version = path, grid, runtime, version

    @classmethod
    def create(cls, path: str | Path, grid: Grid, runtime: dict[str, Any]) -> "Dataset":
        """Opens the folder of this grid, made if it is not there.

        Raises:
          UserError: it holds another grid (the message says what differs) or something else, or cannot be written.
        """
        folder = Path(path)
        about = {
            "schema_version": SCHEMA_VERSION,
            "grid_sha256": grid.digest,
            "runs": grid.runs,
            "parts": grid.parts,
            "grid": grid.to_dict(),
            "runtime": runtime,
        }
        try:
            if not (folder / "sweep.json").exists():
                if folder.exists() and not folder.is_dir():
                    raise UserError(f"output {path} is a file: name a folder")
                others = folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir())
                if others and not (folder / "sweep.json").exists():  # another process may have begun the sweep just now
                    raise UserError(f"output {path} holds other files and no sweep: name another folder")
                folder.mkdir(parents=True, exist_ok=True)
                _publish(folder, folder / "sweep.json", (json.dumps(about, indent=1) + "\n").encode())
        except OSError as error:
            raise UserError(f"output {path} cannot be written ({error.strerror}): choose another place") from error
        dataset = cls.open(path)
        if odd := dataset.grid.differences(grid):
            raise UserError(f"output {path} holds another sweep ({'; '.join(odd)}): name another folder")
        return dataset

    @classmethod
    def open(cls, path: str | Path) -> "Dataset":
        """Opens a sweep folder to read.

        Raises:
          UserError: it is none, or of another schema version.
        """
        about = Path(path) / "sweep.json"
        try:
            data = json.loads(files.read(about))
            version = data["schema_version"]
            if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
                raise UserError(f"{about} has schema version {version!r}: expected one from 1 to {SCHEMA_VERSION}")
            grid, runtime = Grid.from_dict(data["grid"]), dict(data["runtime"])
            if grid.digest != data["grid_sha256"]:
                raise UserError(f"{about} was changed: its grid does not have the digest beside it")
        except OSError as error:
            raise UserError(f"{path} is no sweep folder: {about} cannot be read ({error.strerror})") from error
        except UserError as error:
            raise UserError(f"{path} is no readable sweep folder: {error}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path} is no readable sweep folder: {about} is damaged ({error!r})") from error
        return cls(Path(path), grid, runtime, version)

    def refuse_other_runtime(self, runtime: dict[str, Any]) -> list[str]:
        """Refuses to add parts where numbers come out otherwise in their last bits.

        Returns:
          What would have to agree, too, but was not written when the sweep was started.

        Raises:
          UserError: the sweep was started with other versions, another model, or on another machine; names both.
        """
        threads = any(config.backend == "hf" for config in self.grid.settings)
        there, here = (deciding(one, threads=threads) for one in (self.runtime, runtime))
        if odd := differences(there, here):
            raise UserError(f"output {self.path} was started elsewhere ({odd}): name another folder")
        return unknown(there, here)

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables of this sweep, in the order in which a part's are written."""
        return ("history", "runs") if self.grid.history_every else ("runs",)

    def file(self, table: str, part: int) -> Path:
        """Where a part's file of a table is, or will be."""
        return self.path / table / f"{part:06d}.parquet"

    def present(self) -> set[int]:
        """The parts that are there, undamaged or not."""
        return {
            part for part in range(self.grid.parts) if all(self.file(table, part).exists() for table in self.tables)
        }

    def set_damaged_aside(self, parts: set[int]) -> dict[int, str]:
        """Reads the named parts back; those that fail go to `damaged`.

        Returns:
          For each such part, what was wrong and where its file is now.
        """
        found = {}
        for part in sorted(parts):
            for table in self.tables:
                try:
                    self.read_part(table, part)
                except Damaged as error:
                    found[part] = f"{error}, now {self._set_aside(table, part)}"
        return found

    def read_part(self, table: str, part: int) -> pa.Table:
        """A part's rows, checked.

        Raises:
          Damaged: a checksum, the digest or the schema is wrong, the file is not readable, or it holds other runs.
        """
        path = self.file(table, part)
        try:
            data = files.read(path)
            read = pq.read_table(io.BytesIO(data), page_checksum_verification=True, use_threads=False)
            metadata, digest = read.schema.metadata or {}, tables.digest(read)
        except Exception as error:  # damaged files make Arrow raise errors of many kinds
            raise Damaged(f"{path} cannot be read back ({' '.join(str(error).split())[:80]})") from error
        if not read.schema.equals(tables.schema_of(table, self.version)):
            raise Damaged(f"{path} has another schema")
        if metadata.get(b"sha256") != digest or metadata.get(b"grid") != self.grid.digest.encode():
            raise Damaged(f"{path} does not have the digest it was written with")
        if not self._labels(table, part).equals(read.select([*LABELS]).replace_schema_metadata(None)):
            raise Damaged(f"{path} holds other runs than those of part {part}")
        return tables.completed(table, read.replace_schema_metadata(None), self.grid.part(part).shared)

    def _labels(self, table: str, part: int) -> pa.Table:
        """The numbers, settings and seeds of the runs that a part's rows are about."""
        one = self.grid.part(part)
        rows = 1 if table == "runs" else self.grid.history_rows(one.shared)
        labels = (one.numbers, one.setting_numbers, one.seeds)
        return pa.table({name: np.repeat(label, rows) for name, label in zip(LABELS, labels, strict=True)})

    def commit(self, part: int, runs: Columns, history: Columns) -> None:
        """Stores a part. One that is there with the same content already is fine.

        Raises:
          UserError: the disk refused, or another writer stored other numbers; what is there stays.
        """
        columns, shared = {"history": history, "runs": runs}, self.grid.part(part).shared
        for table in self.tables:
            path, rows = self.file(table, part), tables.of_columns(table, columns[table], shared)
            written = rows.select(tables.schema_of(table, self.version).names)
            written = written.replace_schema_metadata({"sha256": tables.digest(written), "grid": self.grid.digest})
            try:
                path.parent.mkdir(exist_ok=True)
                while not _publish(self.path, path, tables.to_parquet(written)):
                    try:
                        same = tables.digest(self.read_part(table, part)) == tables.digest(rows)
                    except Damaged:
                        self._set_aside(table, part)
                        continue
                    if not same:
                        raise UserError(
                            f"{path} was written meanwhile with other numbers, by another device or version of jax: "
                            f"give each its own folder"
                        )
                    break
            except OSError as error:
                raise UserError(
                    f"{path} could not be written ({error.strerror}): the parts before it are kept, and the same "
                    f"command goes on from there"
                ) from error

    def _set_aside(self, table: str, part: int) -> Path:
        path = self.file(table, part)
        target = self.path / "damaged" / f"{table}-{part:06d}-{uuid.uuid4().hex[:8]}"
        try:
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
        except FileNotFoundError:
            pass  # another process set it aside
        except OSError as error:
            raise UserError(f"{path} is damaged and cannot be set aside ({error.strerror})") from error
        return target

    def read(self, table: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """The parts of a table that are there, one after the other.

        Raises:
          UserError: one is damaged.
        """
        for part in sorted(self.present()):
            try:
                rows = self.read_part(table, part)
            except Damaged as error:
                raise UserError(f"{error}: run the sweep's command again, it computes the part anew") from error
            yield rows if columns is None else rows.select(columns)

    def runs(self, columns: list[str] | None = None) -> pa.Table:
        """The table of runs (see `RUNS`)."""
        return pa.concat_tables([tables.empty(RUNS, columns), *self.read("runs", columns)])

    def history(self, columns: list[str] | None = None) -> pa.Table:
        """The history (see `HISTORY`); without rows where none is kept."""
        parts = self.read("history", columns) if self.grid.history_every else ()
        return pa.concat_tables([tables.empty(HISTORY, columns), *parts])


def _publish(folder: Path, path: Path, data: bytes) -> bool:
    """Makes a file appear under its name whole; False, and nothing done, where there is one already.

    It is written in `folder` under a name that no reader takes, flushed to the disk, and linked without overwriting.
    """
    aside = folder / f".{path.name}.{uuid.uuid4().hex}.writing"
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not files.link_new(aside, path):
            return False
        files.flush(path.parent)
        return True
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or stays as a file that nothing reads
            aside.unlink()
