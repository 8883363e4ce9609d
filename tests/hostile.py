"""Hostile input, for the tests and the longer scripts in `benchmarks`: readers, and ways to damage what they read.

A reader is one entry of `READERS`; whoever adds a reader to the package adds one here, and every test and script
covers it.
"""

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from damage import (
    GOLDEN,
    GRID,
    Damage,
    array_damage,
    byte_damage,
    column_damage,
    json_damage,
    npz,
    record,
    recorded,
    rows,
    signed_json_damage,
    tensor_damage,
)

from jaxrl_mini.config import Config, UserError
from jaxrl_mini.learning import checkpoint, identity
from jaxrl_mini.learning.checkpoint import Checkpoints, Snapshot
from jaxrl_mini.learning.evaluation import Evaluation
from jaxrl_mini.policies import pretrained, saved, tokenizer
from jaxrl_mini.runs import recording, records
from jaxrl_mini.sweeps import tables
from jaxrl_mini.sweeps.dataset import Dataset

# Intact folders


def sweep(folder: Path) -> Dataset:
    """A whole sweep folder."""
    one = Dataset.create(folder, GRID, {"jax": "0.10.0"})
    one.commit(0, rows("runs"), rows("history"))
    return one


# How it is read


@dataclass(frozen=True)
class Reader:
    """Something of the package that reads a file.

    Attributes:
      place: makes an intact folder in an empty one, and returns the file in it that will be damaged.
      read: reads it, and fails an assertion where what came out is wrong; raises `UserError` where it refuses.
      damage: other contents that keep some of the structure, a function of (random numbers, the intact bytes).
      of: how many entries of `READERS` share the cases of one kind of folder.
    """

    place: Callable[[Path], Path]
    read: Callable[[Path], object]
    damage: Damage
    of: int = 1


def _in_folder(name: str, data: Callable[[], bytes]) -> Callable[[Path], Path]:
    def place(folder: Path) -> Path:
        (folder / name).write_bytes(data())
        return folder / name

    return place


def _in_sweep(name: str) -> Callable[[Path], Path]:
    return lambda folder: sweep(folder / "sweep").path / name


def _in_model(kind: str, name: str) -> Callable[[Path], Path]:
    def place(folder: Path) -> Path:
        shutil.copytree(GOLDEN / f"tiny-gpt2-{kind}", folder / "model", copy_function=shutil.copyfile)
        return folder / "model" / name

    return place


def _in_policy(name: str) -> Callable[[Path], Path]:
    def place(folder: Path) -> Path:
        saved.save_table(folder / "policy", np.zeros((24, 6), np.float32), Config())
        return folder / "policy" / name

    return place


def _in_checkpoint(pattern: str) -> Callable[[Path], Path]:
    def place(folder: Path) -> Path:
        before = Evaluation(3, 1, 9, 30, 0.06, 4.0)
        kept = Snapshot([np.ones(3)], {"iteration": np.arange(2)}, {"packed": np.ones(2)}, before, (1.0, 2.0))
        with Checkpoints(folder / "kept", Config(iterations=2)) as checkpoints:
            checkpoints.restore([np.zeros(3)])
            checkpoints.offer(2, lambda: kept)
        files = (folder / "kept/iteration-000000002").glob(pattern)
        return max(files, key=lambda path: (path.stat().st_size, path))

    return place


def _read_checkpoint(path: Path) -> None:
    root = next(folder for folder in path.parents if folder.name.startswith(checkpoint.NAME))
    assert checkpoint.read(root) == identity.of(Config(iterations=2))


def _read_signed(path: Path) -> None:
    """As if whoever changed it had renewed its digest: it can only be found to be of another run."""
    lines = (path.parent / checkpoint.SUMS).read_text().splitlines()
    digests = {path.parent / name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_sha256", digests.__getitem__)
        there, here = checkpoint.read(path.parent), identity.of(Config(iterations=2))
    if odd := identity.differences(there, here):
        raise UserError(f"checkpoint holds another run ({odd})")


def _read_policy(path: Path) -> None:
    logits, config = saved.load_table(path.parent)
    assert logits.shape == (24, 6) and logits.dtype == np.float32 and np.isfinite(logits).all()
    assert Config.from_dict(config.to_dict()) == config


def _read_record(path: Path) -> None:
    read = records.read(path)
    config = Config.from_dict(read["config"])
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    records.not_of(config)(path, False)


def _read_recording(path: Path) -> None:
    one = recording.read(path)
    batch = (one.config.iterations, one.config.groups, one.config.group_size)
    assert one.arrays["actions"].shape == (*batch, 6) and one.arrays["logits"].shape == (batch[0] + 1, 24, 6)
    assert set(np.unique(one.arrays["rewards"])) <= {0.0, 1.0}
    assert all(np.isfinite(array).all() for array in one.arrays.values())


def _read_sweep(path: Path) -> None:
    one = Dataset.open(path.parent)
    assert 0 < one.grid.runs < 2**60 and one.grid.parts > 0
    assert one.grid.part(one.grid.parts - 1).seeds.dtype == np.uint32
    one.refuse_other_runtime({"jax": "0.10.0"})
    assert one.grid.differences(one.grid) == []


def _read_part(path: Path) -> None:
    for read in Dataset(path.parent.parent, GRID, {}).read(path.parent.name):
        assert read.select(["run", "setting", "seed"]).equals(_labels(path.parent.name))
        assert read.schema.equals(tables.SCHEMAS[path.parent.name])


@lru_cache
def _labels(table: str) -> pa.Table:
    return pa.table({name: rows(table)[name] for name in ("run", "setting", "seed")})


def _read_model_config(path: Path) -> None:
    _, config = pretrained._read_config(path.parent)
    assert all(1 <= size < 2**31 for size in (config.vocab_size, config.longest[1], config.layers[1]))


def _read_weights(path: Path) -> None:
    files = pretrained._weight_files(path.parent)
    shapes, family = _shapes()
    pretrained._read_weights(path.parent, dict(pretrained._tensors(files, family)), shapes, family, tied=True)


@lru_cache
def _shapes() -> tuple[Any, Any]:
    from flax import nnx

    family, config = pretrained._read_config(GOLDEN / "tiny-gpt2-word")
    return nnx.split(nnx.eval_shape(lambda: family.network(config, np.float32, rngs=nnx.Rngs(0))))[1], family


def _read_tokenizer(path: Path) -> None:
    encode, end_of_text, _ = tokenizer.read_tokenizer(path.parent)
    assert isinstance(end_of_text, int)
    assert all(isinstance(token, int) for ids in encode([" read", " <|endoftext|>"]) for token in ids)


def _record_bytes() -> bytes:
    return json.dumps(record()).encode()


READERS = {
    "record": Reader(_in_folder("record.json", _record_bytes), _read_record, json_damage),
    "recording": Reader(_in_folder("run.npz", lambda: npz(recorded())), _read_recording, array_damage),
    "sweep.json": Reader(_in_sweep("sweep.json"), _read_sweep, signed_json_damage),
    "runs": Reader(_in_sweep("runs/000000.parquet"), _read_part, column_damage, 2),
    "history": Reader(_in_sweep("history/000000.parquet"), _read_part, column_damage, 2),
    "config.json": Reader(_in_model("word", "config.json"), _read_model_config, json_damage, 2),
    "weights": Reader(_in_model("word", "model.safetensors"), _read_weights, tensor_damage, 2),
    "tokenizer": Reader(_in_model("word", "tokenizer.json"), _read_tokenizer, json_damage, 2),
    "policy.json": Reader(_in_policy("policy.json"), _read_policy, json_damage, 2),
    "policy": Reader(_in_policy("policy.safetensors"), _read_policy, tensor_damage, 2),
    "tokenizer_config": Reader(_in_model("word", "tokenizer_config.json"), _read_tokenizer, json_damage, 2),
    "checkpoint": Reader(_in_checkpoint("arrays/d/*"), _read_checkpoint, byte_damage, 4),
    "checkpoint's metadata": Reader(_in_checkpoint("arrays/_METADATA"), _read_checkpoint, json_damage, 4),
    "checkpoint's run": Reader(_in_checkpoint("run.json"), _read_signed, json_damage, 4),
    "checkpoint's digests": Reader(_in_checkpoint("SHA256SUMS"), _read_checkpoint, byte_damage, 4),
}


def damaged(reader: Reader, intact: bytes, draw: random.Random) -> bytes:
    """Other contents of a reader's file."""
    return draw.choice([byte_damage, reader.damage, reader.damage])(draw, intact)


def one_line(error: UserError) -> bool:
    """Whether an error is one line that says something."""
    return len(str(error)) > 10 and len(str(error).splitlines()) == 1


# What must not happen meanwhile

FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "urllib.Request")
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")
_watched: list[tuple[str, str]] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None:
        return
    if event in FORBIDDEN:
        if event == "pickle.find_class" and str(arguments[0]).startswith("jaxrl_mini.tasks."):
            return  # the state of a task is copied so, in memory, where it is enumerated
        _watched.append((event, str(arguments)))
    elif event in CHANGES:
        _watched.append((event, os.fspath(arguments[0]) if isinstance(arguments[0], (str, os.PathLike)) else ""))
    elif event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        _watched.append(("write" if writes else "read", os.fspath(arguments[0])))


@contextmanager
def watched() -> Iterator[list[tuple[str, str]]]:
    """What this process asks of the system meanwhile: (event, path), as far as it is Python that asks."""
    global _watched
    if not hasattr(sys, "_jaxrl_mini_audited"):
        sys._jaxrl_mini_audited = True  # type: ignore[attr-defined]  # a hook stays for the life of the process
        sys.addaudithook(_audit)
    _watched = []
    try:
        yield _watched
    finally:
        _watched = None
