"""The sweep command: what it says, refuses, continues and survives."""

import json
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrl_mini import sweep, train
from jaxrl_mini.machine import signals
from jaxrl_mini.sweeps import table_part
from jaxrl_mini.sweeps.dataset import Dataset
from jaxrl_mini.sweeps.grid import Grid

SMALL = ["--iterations", "3", "--groups", "2", "--group-size", "4", "--eval-episodes", "8"]


@pytest.fixture
def sweep_command(command):
    return lambda *arguments: command(sweep, *arguments)


def parts(path: str | Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(Path(path).glob("*/*.parquet"))}


def start(*arguments: str, **options) -> "subprocess.Popen[str]":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job passes on that it is ignored
    command = [sys.executable, "-m", "jaxrl_mini.sweep", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_a_sweep_writes_every_run_and_says_so(sweep_command):
    done = sweep_command("--seeds", 3, "--lr", 0.04, 0.08, *SMALL, "--output", "out")
    assert done.code == 0 and json.loads(done.out[-1]) == {"runs": 6, "parts": 1, "output": "out"}
    assert "6 runs: 2 settings x 3 seeds, 1 compilation, about 4 s on" in done.err[0]
    runs = Dataset.open("out").runs()
    assert runs["lr"].to_pylist() == [0.04] * 3 + [0.08] * 3 and runs["seed"].to_pylist() == [0, 1, 2] * 2


def test_a_row_of_a_sweep_is_the_record_of_train(command):
    assert command(sweep, "--seeds", "5:9", *SMALL, "--output", "out").code == 0
    assert command(train, "--seed", 7, *SMALL, "--output", "7.json").code == 0
    record, row = json.loads(Path("7.json").read_text()), Dataset.open("out").runs().to_pylist()[2]
    history = [one for one in Dataset.open("out").history().to_pylist() if one["seed"] == 7]
    assert row["seed"] == 7
    for when in ("before", "after"):
        for name in ("successes", "success_rate", "mean_actions", "exact_success_rate", "exact_mean_actions"):
            assert row[f"{when}_{name}"] == record[when][name]
    for mine, theirs in zip(history, record["history"], strict=True):
        assert {name: mine[name] for name in theirs} == theirs


def test_the_default_folder_is_named_by_the_grid(sweep_command):
    first = json.loads(sweep_command("--seeds", 2, *SMALL).out[-1])
    second = json.loads(sweep_command("--seeds", 2, *SMALL).out[-1])
    third = json.loads(sweep_command("--seeds", 3, *SMALL).out[-1])
    assert first == {**second, "parts": 1} and second["parts"] == 0 and third["output"] != first["output"]


def test_a_dry_run_says_what_would_be_and_writes_nothing(sweep_command):
    done = sweep_command("--seeds", 10000, "--method", "grpo", "rs-sft", "--lr", 0.04, 0.08, "--dry-run")
    assert done.code == 0 and done.out == [] and list(Path().iterdir()) == []
    assert "40,000 runs: 4 settings x 10,000 seeds, 2 compilations, about" in done.err[0] and "MB" in done.err[0]


def test_a_dry_run_needs_no_jax(tmp_path):
    code = "import sys; from jaxrl_mini import sweep; sweep.main(sys.argv[1:]); sys.exit('jax' in sys.modules)"
    command = [sys.executable, "-c", code, "--seeds", "5", "--dry-run"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--seeds"),
        (["--seeds", "0"], "--seeds"),
        (["--seeds", "5", "5"], "twice"),
        (["--seeds", "3:1"], "--seeds"),
        (["--seeds", "3", "--seed", "4"], "--seed"),
        (["--seeds", "3", "--lr", "nan"], "--lr"),
        (["--seeds", "3", "--clip", "0.2", "1"], "--clip"),
        (["--seeds", "3", "--group-size", "1"], "--group-size"),
        (["--seeds", "3", "--beta", "0.1", "0.1"], "twice"),
        (["--seeds", "3", "--history-every", "-1"], "--history-every"),
        (["--seeds", "3", "--shard", "0/2"], "--shard"),
        (["--seeds", "3", "--shard", "3/2"], "--shard"),
        (["--seeds", "3", "--shard", "x"], "--shard"),
        (["--seeds", "3", "--address", "here"], "--address"),
        (["--seeds", "3", "--backend", "hf"], "--model"),
        (["--seeds", "3", "--device", "abacus"], "--device"),
        (["--seeds", "3", "--output", "/proc/sweep"], "/proc/sweep"),
        (["--seeds", "3", "--output", "/dev/null"], "/dev/null"),
        (["summary", "nowhere"], "nowhere"),
        (["summary"], "DIR"),
    ],
)
def test_bad_input_is_one_line_and_code_2_and_writes_nothing(sweep_command, arguments, word):
    done = sweep_command(*arguments)
    said = [line for line in done.err if " runs: " not in line]
    assert (done.code, done.out, len(said)) == (2, [], 1) and word in said[0]
    assert list(Path().iterdir()) == []


def test_another_grid_in_the_folder_is_refused_and_named(sweep_command):
    sweep_command("--seeds", 2, *SMALL, "--output", "out")
    before = parts("out")
    done = sweep_command("--seeds", 2, *SMALL, "--clip", 0.3, "--output", "out")
    assert done.code == 2 and "clip 0.2 there, 0.3 here" in done.err[-1] and parts("out") == before


def test_a_damaged_part_is_named_and_computed_again(sweep_command):
    arguments = ["--seeds", 130, *SMALL, "--output", "out"]
    sweep_command(*arguments)
    before, torn = parts("out"), Path("out/runs/000001.parquet")
    torn.write_bytes(torn.read_bytes()[:-9])
    done = sweep_command(*arguments)
    assert done.code == 0 and json.loads(done.out[-1]) == {"runs": 130, "parts": 1, "output": "out"}
    assert "damaged: out/runs/000001.parquet" in done.err[1] and parts("out") == before


def test_shards_in_any_order_make_the_sweep(sweep_command):
    arguments = ["--seeds", 300, *SMALL]
    sweep_command(*arguments, "--output", "whole")
    counts = [json.loads(sweep_command(*arguments, "--shard", f"{i}/3", "--output", "out").out[-1]) for i in (3, 1, 2)]
    assert [count["parts"] for count in counts] == [1, 2, 2]
    assert parts("out") == parts("whole") and len(parts("out")) == 10


def test_one_core_and_two_devices_give_the_same_files(sweep_command, devices, tmp_path):
    arguments = ["--seeds", "0", "7", "12345", *[str(seed) for seed in range(100, 200)], *SMALL]
    sweep_command(*arguments, "--output", "here")
    other = start(*arguments, "--output", "there", env=devices(2))
    _, errors = other.communicate()
    assert other.returncode == 0, errors
    assert parts("here") == parts("there")


LONG = ["--seeds", "4000", "--iterations", "20", "--eval-episodes", "8", "--history-every", "20"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    path = tmp_path_factory.mktemp("uninterrupted") / "out"
    process = start(*LONG, "--output", str(path))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return parts(path)


KILLED = """
import os, pickle, random, signal, sys, time
from pathlib import Path
from jaxrl_mini import sweep
from jaxrl_mini.sweeps import engine, table_part

trained = pickle.loads(Path(sys.argv[1]).read_bytes())
path, moments = Path(sys.argv[-1]), random.Random(0)
found = lambda: len(list(path.glob("*/*.parquet")))

def stored_part(grid, number, **_):
    time.sleep(moments.uniform(0, 0.02))
    return trained[number]

table_part.train_part = stored_part
for kill in range(int(sys.argv.pop(2))):
    before, child = found(), os.fork()  # jax is imported, but not started
    if not child:
        sweep.main(sys.argv[2:])
        os._exit(0)
    while found() == before and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    time.sleep(moments.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    print("killed", os.waitpid(child, 0)[1] == signal.SIGKILL, found() - before, flush=True)
"""


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.full)])
def test_a_sweep_killed_at_random_moments_loses_nothing(tmp_path, kills):
    """Kills fall between and into the writing of parts, each after a new file; what is trained is stored beforehand."""
    seeds = 480 * kills
    arguments = ["--seeds", seeds, "--iterations", 2, "--groups", 1, "--group-size", 2, "--eval-episodes", 2]
    path, stored = tmp_path / "out", tmp_path / "trained"
    grid = Grid.product(range(seeds), iterations=2, groups=1, group_size=2, eval_episodes=2)
    stored.write_bytes(pickle.dumps([table_part.train_part(grid, number) for number in range(grid.parts)]))
    command = [sys.executable, "-W", "ignore", "-c", KILLED, stored, kills, *arguments, "--output", path]
    killing = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    outcomes = [line.split()[1:] for line in killing.stdout.splitlines() if line.startswith("killed")]
    assert killing.returncode == 0 and "damaged" not in killing.stderr, killing.stderr
    assert len(outcomes) == kills and all(dead == "True" and int(new) > 0 for dead, new in outcomes), outcomes
    found = parts(path)
    for output in (path, tmp_path / "uninterrupted"):
        process = start(*map(str, arguments), "--output", str(output))
        _, errors = process.communicate()
        assert process.returncode == 0 and "damaged" not in errors, errors
    whole = parts(tmp_path / "uninterrupted")
    assert len(found) < len(whole) and all(whole[name] == data for name, data in found.items())
    assert parts(path) == whole


@pytest.mark.parametrize("number", signals.NUMBERS)
def test_an_interrupted_sweep_ends_soon_keeps_its_parts_and_says_how_to_go_on(uninterrupted, tmp_path, number):
    path = tmp_path / "out"
    process = start(*LONG, "--output", str(path))
    while not parts(path):
        time.sleep(0.01)
    process.send_signal(number)
    sent = time.monotonic()
    _, errors = process.communicate()
    assert time.monotonic() - sent < 2.5 and process.returncode == 128 + number
    assert errors.splitlines()[-1].startswith("interrupted: ") and "the same command goes on" in errors
    found = parts(path)
    assert 0 < len(found) < len(uninterrupted) and found.items() < uninterrupted.items()
    if number == signal.SIGTERM:
        process = start(*LONG, "--output", str(path))
        process.communicate()
        assert process.returncode == 0 and parts(path) == uninterrupted


def test_two_sweeps_into_one_folder_end_with_one_of_each_part(uninterrupted, tmp_path):
    processes = [start(*LONG, "--output", str(tmp_path / "out")) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert parts(tmp_path / "out") == uninterrupted


def test_a_row_is_the_run_of_train_with_its_settings_and_seed(sweep_command, command):
    """In a sweep over learning rates row 7 is not `train --seed 7`; the checksum tells which is, as the page shows."""
    assert sweep_command("--seeds", 20, "--lr", 0.04, 0.08, *SMALL, "--output", "sweeps/two").code == 0
    assert command(train, "--seed", 7, *SMALL, "--output", "row-7.json").code == 0
    page = (Path(__file__).parents[1] / "docs/sweeps.md").read_text()
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    record = json.loads(Path("row-7.json").read_text())
    rows = Dataset.open("sweeps/two").runs().to_pylist()
    (same,) = (row for row in rows if row["logits_crc32"] == record["logits_crc32"])
    assert (same["seed"], same["lr"]) == (7, 0.08) and same["run"] != 7


def test_seeds_differ_and_the_summary_counts_them(sweep_command):
    sweep_command("--seeds", 20, *SMALL, "--output", "out")
    runs = Dataset.open("out").runs()
    assert len(np.unique(runs["logits_crc32"].to_numpy())) == 20
    summary = json.loads(sweep_command("summary", "out", "--json").out[0])
    assert summary["runs"] == 20
