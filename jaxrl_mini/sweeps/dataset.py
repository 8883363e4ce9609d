"""A sweep's folder: its grid, and one pair of Parquet files per part, each whole or not there.

    sweep.json           the grid, its digest, the schema version, and where it was started
    runs/000012.parquet     a row per run of part 12
    history/000012.parquet  a row per run and kept iteration, where history is kept
    damaged/             parts that could not be read back, set aside

What is being written has a name in the sweep's folder itself that begins with a dot, so that no reader of `runs` or
`history` finds it. Every page carries a checksum, and the footer of every file the digest of its columns.
"""

import contextlib
import hashlib
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
from jaxrl_mini.sweeps.grid import Grid
from jaxrl_mini.types import Columns

SCHEMA_VERSION = 1

NUMERICAL = ("jaxrl_mini", "jax", "jaxlib", "optax", "numpy", "device_platform", "device_kind")
"""What of a runtime decides the last bits of numbers."""

_LABELS: dict[str, pa.DataType] = {"run": pa.int64(), "setting": pa.int32(), "seed": pa.uint32()}
_METRICS: dict[str, pa.DataType] = {
    "loss": pa.float64(),
    "mean_kl": pa.float64(),
    "ratio_outside_clip_fraction": pa.float64(),
    "entropy": pa.float64(),
    "gradient_norm": pa.float32(),
    "optimizer_steps": pa.int32(),
    "train_success_rate": pa.float64(),
    "mixed_groups": pa.int32(),
    "retained_episodes": pa.int32(),
    "mean_reward": pa.float64(),
}
_EVALUATION: dict[str, pa.DataType] = {
    "successes": pa.int32(),
    "success_rate": pa.float64(),
    "mean_actions": pa.float64(),
    "exact_success_rate": pa.float64(),
    "exact_mean_actions": pa.float64(),
}

RUNS = pa.schema(
    {
        **_LABELS,
        "method": pa.string(),
        "iterations": pa.int32(),
        "groups": pa.int32(),
        "group_size": pa.int32(),
        "epochs": pa.int32(),
        "lr": pa.float64(),
        "clip": pa.float64(),
        "beta": pa.float64(),
        "advantage": pa.string(),
        "aggregation": pa.string(),
        "surrogate": pa.string(),
        "clip_high": pa.float64(),
        "kl": pa.string(),
        "entropy_bonus": pa.float64(),
        "exact_gradient": pa.bool_(),
        "reward": pa.string(),
        "eval_episodes": pa.int32(),
        **{f"before_{name}": kind for name, kind in _EVALUATION.items()},
        **{f"after_{name}": kind for name, kind in _EVALUATION.items()},
        **{f"last_{name}": kind for name, kind in _METRICS.items()},
        "finite": pa.bool_(),
        "iterations_to_90": pa.int32(),
        "logits_crc32": pa.uint32(),
    }
)
"""`clip_high` is the upper clip in use, that of `clip` unless another is set; `last_*` are the metrics of the last
iteration; `finite` whether these and all logits are numbers; `iterations_to_90` the first kept iteration, counted from
1, whose exact success is at least 0.9, null where there is none; `logits_crc32` the checksum of the final logits as
little-endian float32 [state, action]."""

HISTORY = pa.schema({**_LABELS, "iteration": pa.int32(), **_METRICS, "exact_success_rate": pa.float64()})

_SCHEMAS = {"history": HISTORY, "runs": RUNS}  # in the order of writing: a part with its runs is complete


class Damaged(Exception):
    """A part's file cannot be read back as it was written."""


class Dataset:
    """An open sweep folder; `create` and `open` make one.

    Attributes:
      path: the folder.
      grid: what it holds, or will.
      runtime: where it was started (see `machine.runtime`).
    """

    def __init__(self, path: Path, grid: Grid, runtime: dict[str, Any]):
        self.path, self.grid, self.runtime = path, grid, runtime

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
                if folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
                    raise UserError(f"output {path} holds other files and no sweep: name another folder")
                folder.mkdir(parents=True, exist_ok=True)
                _publish(folder, folder / "sweep.json", (json.dumps(about, indent=1) + "\n").encode())
        except OSError as error:
            raise UserError(f"output {path} cannot be written ({error.strerror}): choose another place") from error
        dataset = cls.open(path)
        differences = dataset.grid.differences(grid)
        if differences:
            raise UserError(f"output {path} holds another sweep ({'; '.join(differences)}): name another folder")
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
            if data["schema_version"] != SCHEMA_VERSION:
                raise UserError(f"{about} has schema version {data['schema_version']!r}, not {SCHEMA_VERSION}")
            grid, runtime = Grid.from_dict(data["grid"]), dict(data["runtime"])
            if grid.digest != data["grid_sha256"]:
                raise UserError(f"{about} was changed: its grid does not have the digest beside it")
        except OSError as error:
            raise UserError(f"{path} is no sweep folder: {about} cannot be read ({error.strerror})") from error
        except UserError as error:
            raise UserError(f"{path} is no readable sweep folder: {error}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path} is no readable sweep folder: {about} is damaged ({error!r})") from error
        return cls(Path(path), grid, runtime)

    def refuse_other_runtime(self, runtime: dict[str, Any]) -> None:
        """Refuses to add parts where numbers come out otherwise in their last bits.

        Raises:
          UserError: the sweep was started with another version, or on another kind of device; names both.
        """
        pairs = [
            (name, self.runtime[name], runtime[name]) for name in NUMERICAL if name in {*self.runtime} & {*runtime}
        ]
        others = [f"{name} {there} there, {here} here" for name, there, here in pairs if there != here]
        if others:
            raise UserError(f"output {self.path} was started elsewhere ({'; '.join(others)}): name another folder")

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
            metadata, digest = read.schema.metadata or {}, _digest(read)
        except Exception as error:  # damaged files make Arrow raise errors of many kinds
            raise Damaged(f"{path} cannot be read back ({' '.join(str(error).split())[:80]})") from error
        if not read.schema.equals(_SCHEMAS[table]):
            raise Damaged(f"{path} has another schema")
        if metadata.get(b"sha256") != digest or metadata.get(b"grid") != self.grid.digest.encode():
            raise Damaged(f"{path} does not have the digest it was written with")
        if not self._labels(table, part).equals(read.select([*_LABELS]).replace_schema_metadata(None)):
            raise Damaged(f"{path} holds other runs than those of part {part}")
        return read.replace_schema_metadata(None)

    def _labels(self, table: str, part: int) -> pa.Table:
        """The numbers, settings and seeds of the runs that a part's rows are about."""
        one = self.grid.part(part)
        rows = 1 if table == "runs" else self.grid.history_rows(one.shared)
        labels = (one.numbers, one.setting_numbers, one.seeds)
        return pa.table({name: np.repeat(label, rows) for name, label in zip(_LABELS, labels, strict=True)})

    def commit(self, part: int, runs: Columns, history: Columns) -> None:
        """Stores a part. One that is there with the same content already is fine.

        Raises:
          UserError: the disk refused, or another writer stored other numbers; what is there stays.
        """
        columns = {"history": history, "runs": runs}
        for table in self.tables:
            path, rows = self.file(table, part), _table(columns[table], _SCHEMAS[table])
            rows = rows.replace_schema_metadata({"sha256": _digest(rows), "grid": self.grid.digest})
            try:
                path.parent.mkdir(exist_ok=True)
                while not _publish(self.path, path, _parquet(rows)):
                    try:
                        same = _digest(self.read_part(table, part)) == _digest(rows)
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
        return pa.concat_tables([_empty(RUNS, columns), *self.read("runs", columns)])

    def history(self, columns: list[str] | None = None) -> pa.Table:
        """The history (see `HISTORY`); without rows where none is kept."""
        parts = self.read("history", columns) if self.grid.history_every else ()
        return pa.concat_tables([_empty(HISTORY, columns), *parts])


def _empty(schema: pa.Schema, columns: list[str] | None) -> pa.Table:
    return schema.empty_table().select(columns or schema.names)


def _table(columns: Columns, schema: pa.Schema) -> pa.Table:
    """NumPy columns in a schema's order and types; null where a run lacks one, and for -1 in `iterations_to_90`."""
    optional = {name for name in schema.names if name.endswith(("retained_episodes", "mean_reward"))}
    if set(schema.names) - set(columns) - optional or set(columns) - set(schema.names):
        raise ValueError(f"columns differ from the schema: {sorted(set(columns) ^ set(schema.names))}")
    rows, arrays = len(columns["run"]), []
    for field in schema:
        if field.name not in columns:
            arrays.append(pa.nulls(rows, field.type))
            continue
        column = columns[field.name]
        if column.dtype.kind == "U":
            arrays.append(pa.array(column.tolist(), field.type))
            continue
        kind = np.bool_ if field.type == pa.bool_() else field.type.to_pandas_dtype()
        mask = column < 0 if field.name == "iterations_to_90" else None
        arrays.append(pa.array(column.astype(kind, copy=False), field.type, mask=mask))
    return pa.Table.from_arrays(arrays, schema=schema)


def _parquet(rows: pa.Table) -> bytes:
    file = io.BytesIO()
    options = {"use_dictionary": False, "write_statistics": False, "compression": "zstd", "compression_level": 1}
    pq.write_table(rows, file, write_page_checksum=True, **options)
    return file.getvalue()


def _digest(rows: pa.Table) -> bytes:
    """SHA-256 of all names, types and values, in hexadecimal: the same for equal rows, however they are encoded."""
    digest = hashlib.sha256(str(rows.schema.remove_metadata()).encode())
    for column in rows.combine_chunks().columns:
        array = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
        digest.update(array.is_valid().to_numpy(zero_copy_only=False).tobytes())
        if pa.types.is_string(array.type):
            digest.update("\0".join(array.to_pylist()).encode())
        else:
            values = array.fill_null(0) if array.null_count else array
            digest.update(values.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest().encode()


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
        _flush_folder(path.parent)
        return True
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or stays as a file that nothing reads
            aside.unlink()


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
