"""What a report is made of: records, their recordings, and sweep folders, read and checked."""

import json
import zipfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_mini.config import Config, UserError
from jaxrl_mini.machine import commandline, files
from jaxrl_mini.machine.commandline import file_flag
from jaxrl_mini.pages import figures
from jaxrl_mini.pages.figures import Curves
from jaxrl_mini.runs import records
from jaxrl_mini.runs.recording import Recording
from jaxrl_mini.sweeps.grid import sweep_command
from jaxrl_mini.types import ByContent

SAME = ("task", "backend", "method", "iterations", "groups", "group_size", "epochs", "clip", "beta")
"""The settings, beside the learning rate, that a recording has in common with the record of its run."""


@dataclass(eq=False)
class Source(ByContent):
    """One record or one sweep folder."""

    name: str
    curves: list[Curves]
    tasks: tuple[str, ...]
    config: Config | None = None
    record: dict[str, Any] = field(default_factory=dict)
    recording: Recording | None = None
    recording_name: str = ""
    summary: dict[str, Any] | None = None
    """Of a sweep: `statistics.summarize`."""
    command: str | None = None
    runtime: list[tuple[str, str]] = field(default_factory=list)
    settings: list[tuple[str, str]] = field(default_factory=list)


def read(paths: list[str], tasks: Collection[str] = ()) -> list[Source]:
    """Reads records, sweep folders and recordings; each recording goes to the record of its run.

    Args:
      paths: the files and folders.
      tasks: of a user's own, those that may be imported, for recordings.

    Raises:
      UserError: something cannot be read, or a recording is of none of the records.
    """
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for path in paths:
        kinds[not Path(path).is_dir() and _is_zip(path)].append(path)
    found = [_read_sweep(path) if Path(path).is_dir() else _read_record(path) for path in kinds[False]]
    for path in kinds[True]:
        _attach(path, found, tasks)
    if not found:
        raise UserError(f"{paths[0]} is a recording: name the record of its run too")
    return found


def _is_zip(path: str) -> bool:
    try:
        return Path(path).suffix == ".npz" or (Path(path).is_file() and zipfile.is_zipfile(path))
    except OSError:
        return False


def _read_record(path: str) -> Source:
    record = records.read(path)
    try:
        config = Config.from_dict(record["config"])
    except (UserError, TypeError) as error:
        raise UserError(f"record {path}: {error}") from error
    curves = figures.curves_of_record(record, path)
    for when in ("before", "after"):
        _check_evaluation(record[when], path)
    return Source(
        path, [curves], (config.task,), config, record,
        command=commandline.train_command(config, *file_flag("--output", path)),
        settings=_named(config.to_dict()), runtime=_flat({**_mapping(record, "runtime"), **_mapping(record, "timing")}),
    )  # fmt: skip


def _check_evaluation(evaluation: dict[str, Any], path: str) -> None:
    def number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    for name in ("success_rate", "mean_actions", "exact_success_rate", "exact_mean_actions"):
        value = evaluation.get(name)
        if not (number(value) or (value is None and name.startswith("exact"))):
            raise UserError(f"record {path}: {name} of an evaluation is {value!r}: expected a number")
        pair = evaluation.get(f"{name}_interval")
        if not (pair is None or (isinstance(pair, list) and len(pair) == 2 and all(map(number, pair)))):
            raise UserError(f"record {path}: {name}_interval of an evaluation is {pair!r}: expected two numbers")


def _read_sweep(path: str) -> Source:
    from jaxrl_mini.sweeps import statistics
    from jaxrl_mini.sweeps.dataset import Dataset

    dataset = Dataset.open(path)
    summary = statistics.summarize(dataset)
    if not summary["runs"]:
        raise UserError(f"sweep {path} holds no finished runs yet: run its command first")
    labels = [path] * len(dataset.grid.settings)
    for one in summary["settings"]:
        one["label"] = " ".join(f"{name}={value}" for name, value in one["values"].items())
        labels[one["setting"]] = f"{path}: {one['label']}" if one["label"] else path
        one["to_90"] = statistics.to_90(one)
        one["no_interval"] = statistics.why_no_interval(one["runs"] - one["failed"])
    names = {one["setting"]: one["label"] for one in summary["settings"]}
    for one in summary["differences"]:
        one["names"] = [names[setting] for setting in one["settings"]]
        one["no_interval"] = statistics.why_no_interval(one["pairs"] - one["failed_pairs"])
    curves = figures.curves_of_sweep(dataset, labels)
    grid = dataset.grid
    first, *others = (config.to_dict() for config in grid.settings)
    common = {
        name: value for name, value in first.items()
        if name not in ("seed", "lr") and all(other[name] == value for other in others)
    }  # fmt: skip
    about = json.loads(files.read(Path(path) / "sweep.json"))
    return Source(
        path, curves, tuple(dict.fromkeys(one.task for one in grid.settings)), summary=summary,
        command=sweep_command(grid, *file_flag("--output", path)),
        settings=_named(common), runtime=_flat(_mapping(about, "runtime")),
    )  # fmt: skip


def _named(settings: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name.replace("_", "-"), str(value)) for name, value in settings.items() if value is not None]


def _mapping(data: dict[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name)
    return value if isinstance(value, dict) else {}


def _flat(values: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += _flat(value)
        elif value not in (None, ""):
            rows.append((str(name).replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value)[:200]))
    return rows


def _attach(path: str, sources: list[Source], tasks: Collection[str]) -> None:
    """Gives a recording to the record with the same settings and losses."""
    from jaxrl_mini.runs import recording

    loaded = recording.read(path, tasks)
    for source in sources:
        if source.config is not None and source.recording is None:
            losses = np.array([row["loss"] for row in source.record["history"]], np.float64)
            pairs = [(getattr(source.config, name), getattr(loaded.config, name)) for name in SAME]
            pairs.append((source.config.effective_lr, loaded.config.effective_lr))
            same = all(mine == theirs for mine, theirs in pairs)
            if same and np.array_equal(losses, loaded.arrays["history_loss"], equal_nan=True):
                source.recording, source.recording_name = loaded, path
                files_of_run = *file_flag("--output", source.name), *file_flag("--trajectories", path)
                source.command = commandline.train_command(source.config, *files_of_run)
                return
    raise UserError(f"recording {path} is of none of the records: name the record that the same command wrote")
