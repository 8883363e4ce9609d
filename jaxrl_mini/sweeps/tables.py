"""The two tables of a sweep: what a row holds, in which types, and how rows become bytes."""

import hashlib
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jaxrl_mini.config import EXACT_EVERY, MICRO_BATCH, Config
from jaxrl_mini.types import Columns

SCHEMA_VERSION = 3
"""Version 2 lacks `TASK_COLUMNS`; version 1 also `MODEL_COLUMNS`, and has NaN for a success that was not evaluated. A
folder keeps its version."""

LABELS: dict[str, pa.DataType] = {"run": pa.int64(), "setting": pa.int32(), "seed": pa.uint32()}
MODEL_COLUMNS: dict[str, pa.DataType] = {
    "backend": pa.string(),
    "model": pa.string(),
    "dtype": pa.string(),
    "micro_batch": pa.int32(),
    "exact_every": pa.int32(),
}
HELD_OUT: dict[str, pa.DataType] = {
    "before_held_out_exact_success_rate": pa.float64(),
    "after_held_out_exact_success_rate": pa.float64(),
}
TASK_COLUMNS: dict[str, pa.DataType] = {"task": pa.string(), **HELD_OUT}
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
        **LABELS,
        "task": pa.string(),
        **MODEL_COLUMNS,
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
        **HELD_OUT,
        **{f"last_{name}": kind for name, kind in _METRICS.items()},
        "finite": pa.bool_(),
        "iterations_to_90": pa.int32(),
        "logits_crc32": pa.uint32(),
    }
)
"""`*_held_out_exact_success_rate` is that on the split of this name, null where a task has none; `model`, `dtype`,
`micro_batch` and `exact_every` are those in use, null for a table policy; `clip_high` is the upper clip in use, that
of `clip` unless another is set; `last_*` are the metrics of the last iteration; `finite` whether these and all
logits are numbers; `iterations_to_90` the first kept iteration, counted from 1, whose exact success is at least 0.9,
null where none is known; `logits_crc32` the final policy's checksum, as a record has it."""

HISTORY = pa.schema({**LABELS, "iteration": pa.int32(), **_METRICS, "exact_success_rate": pa.float64()})
"""`exact_success_rate` is null where it was not evaluated, as a language model's in most iterations."""

SCHEMAS = {"history": HISTORY, "runs": RUNS}  # in the order of writing: a part with its runs is complete


def schema_of(table: str, version: int) -> pa.Schema:
    """The schema of a table in a folder of this version."""
    lacks = [*(TASK_COLUMNS if version < 3 else ()), *(MODEL_COLUMNS if version < 2 else ())]
    return pa.schema([one for one in SCHEMAS[table] if one.name not in lacks])


def empty(schema: pa.Schema, columns: list[str] | None) -> pa.Table:
    """No rows, of all columns or of some."""
    return schema.empty_table().select(columns or schema.names)


def completed(table: str, rows: pa.Table, shared: Config) -> pa.Table:
    """A part's rows, of any version, as the newest has them.

    Args:
      table: the table's name.
      rows: as they are computed, or as they were read.
      shared: the settings that all runs of the part have in common.
    """
    added: dict[str, Any] = {}
    if table == "runs":
        values: dict[str, Any] = {"task": shared.task, "backend": shared.backend}
        if shared.backend == "hf":
            values |= {
                "model": shared.model, "dtype": shared.dtype or "float32",
                "micro_batch": shared.micro_batch or MICRO_BATCH, "exact_every": shared.exact_every or EXACT_EVERY,
            }  # fmt: skip
        missing = [name for name in HELD_OUT if name not in rows.schema.names]
        for name, kind in {"task": pa.string(), **MODEL_COLUMNS, **{name: HELD_OUT[name] for name in missing}}.items():
            added[name] = pa.repeat(pa.scalar(values.get(name), kind), rows.num_rows)
    elif shared.backend == "hf":
        evaluated = shared.evaluates(rows["iteration"].to_numpy())
        added["exact_success_rate"] = pc.if_else(pa.array(evaluated), rows["exact_success_rate"], None)
    schema = SCHEMAS[table]
    return pa.Table.from_arrays([added[name] if name in added else rows[name] for name in schema.names], schema=schema)


def of_columns(table: str, columns: Columns, shared: Config) -> pa.Table:
    """NumPy columns, all but those of the model, as a table's rows (see `completed`).

    They get the table's order and types, null where a run lacks one, and for -1 in `iterations_to_90`.
    """
    held_out = {name: HELD_OUT[name] for name in columns if name in HELD_OUT}
    schema = pa.schema([*schema_of(table, 1), *(pa.field(*one) for one in held_out.items())])
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
    return completed(table, pa.Table.from_arrays(arrays, schema=schema), shared)


def to_parquet(rows: pa.Table) -> bytes:
    """A file's bytes, with a checksum for every page."""
    file = io.BytesIO()
    options = {"use_dictionary": False, "write_statistics": False, "compression": "zstd", "compression_level": 1}
    pq.write_table(rows, file, write_page_checksum=True, **options)
    return file.getvalue()


def digest(rows: pa.Table) -> bytes:
    """SHA-256 of all names, types and values, in hexadecimal: the same for equal rows, however they are encoded."""
    found = hashlib.sha256(str(rows.schema.remove_metadata()).encode())
    for column in rows.combine_chunks().columns:
        array = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
        found.update(array.is_valid().to_numpy(zero_copy_only=False).tobytes())
        if pa.types.is_string(array.type):
            found.update("\0".join(array.fill_null("").to_pylist()).encode())
        else:
            values = array.fill_null(0) if array.null_count else array
            found.update(values.to_numpy(zero_copy_only=False).tobytes())
    return found.hexdigest().encode()
