"""Trackers: what they keep is the record's history, read back; what is refused; nothing is sent unasked."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxrl_mini.config import UserError
from jaxrl_mini.runs import trackers

SHORT = ("--iterations", "23", "--eval-episodes", "20", "--seed", "5", "--output", "run.json")


def tracked(folder: Path, target: str) -> tuple[dict, subprocess.CompletedProcess]:
    """A run of 23 iterations, two chunks, tracked: its history by iteration, and the process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TRACKIO_"))}
    environment |= {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_DIR": str(folder)}
    command = [sys.executable, "-m", "jaxrl_mini.train", *SHORT, "--track", target]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((folder / "run.json").read_text())["history"]
    return {row.pop("iteration"): row for row in rows}, done


@pytest.mark.full
def test_tensorboard_keeps_the_history(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    expected, done = tracked(tmp_path, "tensorboard:logs/a")
    events = EventAccumulator(str(tmp_path / "logs/a"), size_guidance={"tensors": 0}).Reload()
    found: dict = {}
    for name in events.Tags()["tensors"]:
        for event in events.Tensors(name):
            found.setdefault(event.step, {})[name] = make_ndarray(event.tensor_proto).item()
    assert found == {step: pytest.approx(row, rel=1e-6) for step, row in expected.items()}  # kept as float32
    assert [json.loads(line).get("iteration") for line in done.stdout.splitlines()] == [19, 22, None]


@pytest.mark.full
def test_wandb_keeps_the_history_and_the_settings_offline(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    expected, done = tracked(tmp_path, "wandb")
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found, settings = {}, {}
    for data in log_records(path.read_bytes()):
        record = Record.FromString(data)
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        if row:
            found[row["_step"]] = {name: value for name, value in row.items() if not name.startswith("_")}
        settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    assert found == expected
    assert (settings["seed"], settings["iterations"], settings["effective_lr"]) == (5, 23, 0.08)
    assert [json.loads(line).get("iteration") for line in done.stdout.splitlines()] == [19, 22, None]


def log_records(data: bytes) -> list[bytes]:
    """The records of a LevelDB log with wandb's header: in blocks of 32 KiB, fragments with checksum, length, kind."""
    assert data.startswith(b":W&B")
    found, parts, place = [], b"", 7
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if kind == 0:
            break
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last fragment
            found.append(parts)
            parts = b""
    return found


@pytest.mark.full
def test_trackio_keeps_the_history_and_the_settings_on_this_machine(tmp_path):
    pytest.importorskip("trackio")
    expected, done = tracked(tmp_path, "trackio")
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s; (run,) = s.get_runs('jaxrl_mini'); "
        "print(json.dumps([run, s.get_logs('jaxrl_mini', run), s.get_run_config('jaxrl_mini', run)], default=str))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    read = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    run, logs, settings = json.loads(read.stdout)
    assert run == "run"
    found = {row["step"]: {name: row[name] for name in expected[0]} for row in logs}
    assert found == expected
    assert (settings["seed"], settings["iterations"], settings["effective_lr"]) == (5, 23, 0.08)
    assert [json.loads(line).get("iteration") for line in done.stdout.splitlines()] == [19, 22, None]


def test_what_is_no_number_is_not_sent():
    """As exact success that was not evaluated, and the loss of a run that failed."""
    sent = []

    class Run:
        def log(self, metrics, step):
            sent.append((step, metrics))

    success, loss = np.array([np.nan, 0.5]), np.array([0.25, np.inf])
    trackers._log_rows(Run(), {"iteration": np.array([4, 5]), "exact_success_rate": success, "loss": loss})
    assert sent == [(4, {"loss": 0.25}), (5, {"exact_success_rate": 0.5})]


# What is refused, before anything is computed


@pytest.mark.parametrize("target", ["", "mlflow", "tensorboard", "tensorboard:", "wandb:x", "trackio:", "Wandb"])
def test_what_is_no_tracker_is_refused_naming_those_there_are(target):
    with pytest.raises(UserError, match=f"--track {target!r} is unknown: expected one of tensorboard:DIR, wandb, trac"):
        trackers.check([target])


def test_a_library_that_is_not_here_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--track wandb needs wandb: pip install '.\[wandb\]'"):
        trackers.check(["wandb"])


@pytest.fixture
def installed(monkeypatch):
    """As if every library were here."""
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name)


def test_a_tracker_is_named_once(installed):
    with pytest.raises(UserError, match="--track wandb wandb names a tracker twice"):
        trackers.check(["wandb", "wandb"])


@pytest.mark.parametrize("there", ["file", "run"])
def test_a_folder_of_another_run_is_refused(installed, tmp_path, there):
    path = tmp_path / "logs"
    if there == "file":
        path.write_text("")
    else:
        path.mkdir()
        (path / "events.out.tfevents.1.host").write_text("")
    with pytest.raises(UserError, match=f"--track tensorboard:{path} is a file or holds a run already"):
        trackers.check([f"tensorboard:{path}"])
    with pytest.raises(UserError) if there == "file" else contextlib.nullcontext():  # or the run itself goes on there
        trackers.check([f"tensorboard:{path}"], resuming=True)


def test_the_command_refuses_before_it_runs(train_command, tmp_path):
    outcome = train_command("--track", "mlflow")
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 1)
    assert list(tmp_path.iterdir()) == []
