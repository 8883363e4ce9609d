"""Contents of files, made up and intact, and ways to damage them: functions of (random numbers, the intact bytes)."""

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import random
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl_mini.config import Config
from jaxrl_mini.runs import recording
from jaxrl_mini.sweeps import tables
from jaxrl_mini.sweeps.grid import Grid

GOLDEN = Path(__file__).parent / "golden"
ROWS = 5
GRID = Grid.product(range(ROWS), iterations=2, eval_episodes=3)


# Intact contents


def record() -> dict[str, Any]:
    """A record as `train` writes it, made up."""
    figures = {"episodes": 3, "successes": 1, "success_rate": 1 / 3, "success_rate_interval": [0.1, 0.8]}
    return {
        "schema_version": 1,
        "scope": "One run.",
        "config": Config().to_dict(),
        "runtime": {"jax": "0.10.0", "precision": {"enable_x64": False}},
        "before": figures,
        "after": figures,
        "history": [{"iteration": 0, "loss": 0.1, "exact_success_rate": None}],
        "timing": {"run_seconds": 1.5},
    }


def recorded() -> dict[str, np.ndarray]:
    """The arrays of a recording of three iterations."""
    return dict(_recorded())


@lru_cache
def _recorded() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "rs-sft-sparse-seed-5.npz", allow_pickle=False) as file:
        arrays = dict(file)
    config = json.loads(str(arrays.pop("config"))) | {"iterations": 3}
    arrays = {name: arrays[name][: 4 if name == "logits" else 3] for name in recording.NAMES if name in arrays}
    return {"config": np.array(json.dumps(config)), **arrays}


def npz(arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def rows(table: str) -> dict[str, np.ndarray]:
    """Columns of the only part of `GRID`, made up but for the labels."""
    repeats = {"runs": 1, "history": 2}[table]
    part = GRID.part(0)
    columns: dict[str, np.ndarray] = {}
    for number, field in enumerate(tables.schema_of(table, 1)):  # a folder adds the columns of a model
        if field.type == pa.string():
            columns[field.name] = np.full(ROWS * repeats, "grpo")
        else:
            columns[field.name] = (np.arange(ROWS * repeats) % 2 + number).astype(field.type.to_pandas_dtype())
    labels = {"run": part.numbers, "setting": part.setting_numbers, "seed": part.seeds}
    return columns | {name: np.repeat(label, repeats) for name, label in labels.items()}


# Damaged contents

Damage = Callable[[random.Random, bytes], bytes]

TEXTS = [
    "",
    " ",
    "\0",
    "\n",
    "\x85",
    "x",
    "../../etc/passwd",
    "/",
    "🦉",
    "\ud800",
    "NaN",
    "0",
    "table",
    "None",
    "a" * 3000,
]
NUMBERS = [
    *(0, -1, 1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, 10**400, -(2**63), 0.5, 1.0, -0.0, 1e-60, 1e39),
    *(1e308, math.nan, math.inf, -math.inf),
]
DEEP = "[" * 200_000


def value(draw: random.Random, depth: int = 2) -> Any:
    """Any value that JSON can say."""
    kind = draw.randrange(7 if depth else 5)
    if kind < 2:
        return draw.choice(TEXTS)
    if kind < 4:
        return draw.choice(NUMBERS)
    if kind == 4:
        return draw.choice([None, True, False])
    inner = [value(draw, depth - 1) for _ in range(draw.randrange(3))]
    return inner if kind == 5 else {draw.choice(TEXTS): one for one in inner}


def json_damage(draw: random.Random, data: bytes) -> bytes:
    """One to three values of a JSON document replaced, removed, renamed, repeated or added."""
    document = json.loads(data)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(document))
        if not places or draw.randrange(50) == 0:
            document = value(draw)
            continue
        (parent, key), how = draw.choice(places), draw.randrange(6)
        if how == 0:
            del parent[key]
        elif how == 1 and isinstance(parent, dict):
            parent[draw.choice(TEXTS)] = parent.pop(key)
        elif how == 2:
            parent[key] = [parent[key]] * 2
        elif how == 3 and isinstance(parent, dict):
            parent[draw.choice(TEXTS)] = value(draw)
        else:
            parent[key] = value(draw)
    return json.dumps(document).encode()


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, inner in itertools.islice(items, 50):
        yield document, key
        yield from _places(inner)


def signed_json_damage(draw: random.Random, data: bytes) -> bytes:
    """`json_damage` of a sweep's description, half of the time with a digest to match."""
    document = json.loads(json_damage(draw, data))
    if draw.randrange(2) and isinstance(document, dict) and "grid" in document:
        document["grid_sha256"] = hashlib.sha256(json.dumps(document["grid"], sort_keys=True).encode()).hexdigest()
    return json.dumps(document).encode()


def byte_damage(draw: random.Random, data: bytes) -> bytes:
    """Bits flipped, the end cut off, bytes put in or replaced, or something else altogether."""
    changed, how, place = bytearray(data), draw.randrange(10), draw.randrange(max(1, len(data)))
    filling = draw.randbytes(draw.randrange(17))
    if how < 4:
        for _ in range(draw.randint(1, 8)):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    elif how < 6:
        changed = changed[:place]
    elif how < 9:
        changed[place : place + (draw.randrange(64) if how == 8 else 0)] = filling
    else:
        return filling
    return bytes(changed)


class Bomb:
    """Unpickling it makes a folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("exploded",))


KINDS = ["i1", "u1", "i8", "u8", "f2", "f4", "f8", "longdouble", "c8", "U3", "S2", "M8[s]", "V4", "?", "O"]


def array_damage(draw: random.Random, _: bytes) -> bytes:
    """An array of a recording dropped, or of other values, another type or another shape."""
    arrays = recorded()
    name, how, kind = draw.choice(list(arrays)), draw.randrange(7), draw.choice(KINDS)
    array = arrays[name]
    if draw.randrange(10) == 0:
        del arrays[name]
        file = io.BytesIO(npz(arrays))
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(f"{name}.npy", draw.choice([b"", b"no array", b"\x93NUMPY\x01\x00\xff\xff"]))
        return file.getvalue()
    if name == "config":
        arrays[name] = np.array(json_damage(draw, str(array).encode()).decode())
    elif how == 0:
        del arrays[name]
    elif how == 1:
        with np.errstate(all="ignore"):
            arrays[name] = np.array(Bomb(), object) if kind == "O" else array.astype("i8").astype(kind)
    elif how == 2:
        arrays[name] = array.reshape(draw.choice([(-1,), (1, *array.shape), (*array.shape, 1), array.shape[::-1]]))
    elif how == 3:
        arrays[name] = draw.choice([array[:0], array[..., :1], array[1:], np.array(3.0)])
    else:
        changed = array.astype("f8") if draw.randrange(2) else array.copy()
        with np.errstate(all="ignore"):
            number = np.float64(
                draw.choice([-2, -1, 0, 0.5, 1, 5, 6, 127, 1e39, -1e300, math.nan, math.inf, -math.inf])
            )
            changed.flat[draw.randrange(array.size)] = number.astype(changed.dtype)
        arrays[name] = changed
    return npz(arrays)


def column_damage(draw: random.Random, data: bytes) -> bytes:
    """A column of a part dropped, renamed, or of other values or another type, with or without a digest to match."""
    read = pq.read_table(io.BytesIO(data), use_threads=False)
    metadata, number, how = dict(read.schema.metadata), draw.randrange(read.num_columns), draw.randrange(5)
    field, column = read.schema.field(number), read.column(number)
    if how == 0:
        read = read.remove_column(number)
    elif how == 1:
        read = read.set_column(number, "other", column)
    elif how == 2:
        read = read.slice(draw.randrange(3), draw.randrange(read.num_rows + 1))
    elif how == 3:
        kind = draw.choice([pa.int8(), pa.int64(), pa.float64(), pa.string(), pa.bool_(), pa.null()])
        read = read.set_column(number, field.name, pa.nulls(read.num_rows, kind))
    else:
        values = column.to_pylist()
        values[draw.randrange(len(values))] = draw.choice([None, values[-1]])
        read = read.set_column(number, field, pa.array(values, field.type))
    if draw.randrange(2):
        with contextlib.suppress(TypeError, ValueError):
            metadata[b"sha256"] = tables.digest(read)
    file = io.BytesIO()
    pq.write_table(read.replace_schema_metadata(metadata), file, write_page_checksum=draw.random() < 0.7)
    return file.getvalue()


def tensor_damage(draw: random.Random, data: bytes) -> bytes:
    """The header of a safetensors file changed, its length kept or corrected; or numbers that are not finite."""
    length = int.from_bytes(data[:8], "little")
    if draw.randrange(4) == 0:
        place = 8 + length + 4 * draw.randrange((len(data) - 8 - length) // 4)
        return data[:place] + np.float32(draw.choice([math.nan, math.inf])).tobytes() + data[place + 4 :]
    header = json_damage(draw, data[8 : 8 + length])
    return (data[:8] if draw.randrange(2) else len(header).to_bytes(8, "little")) + header + data[8 + length :]
