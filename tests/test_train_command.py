"""The train command: its record, its output, what it refuses, and that every option does what it says."""

import json
import os
import subprocess
import sys
from importlib.resources import files

import jax
import jsonschema
import pytest

from jaxrl_mini.config import Config
from jaxrl_mini.learning import loop
from jaxrl_mini.runs import records

SHORT = ("--iterations", 3, "--eval-episodes", 20)


def schema() -> dict:
    return json.loads(files("jaxrl_mini.runs").joinpath("record.schema.json").read_text())


@pytest.fixture
def record_of(train_command, tmp_path):
    """The record of a short run with further options."""

    def run(*arguments) -> dict:
        outcome = train_command(*SHORT, "--output", "record.json", "--overwrite", *arguments)
        assert outcome.code == 0, outcome.err
        return json.loads((tmp_path / "record.json").read_text())

    return run


def without_times(record: dict) -> dict:
    return {name: part for name, part in record.items() if name != "timing"}


def run_process(folder, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=folder, capture_output=True, text=True)


# The record


@pytest.mark.parametrize("arguments", [(), ("--method", "rs-sft"), ("--eval-episodes", 1, "--lr", 0.01)])
def test_records_are_as_the_published_schema_says(record_of, arguments):
    record = record_of(*arguments)
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(record, schema(), cls=jsonschema.Draft202012Validator)


OLDER_DO_NOT_SAY = {
    "vector_instructions", "numpy_dispatch", "environment", "threads", "device_version", "mesh", "logits_crc32"
}  # fmt: skip
"""Fields that records of earlier versions are without."""


def test_the_schema_is_strict(record_of):
    """No field can be renamed, added or dropped anywhere without the schema saying so."""
    record, validator = record_of("--method", "rs-sft"), jsonschema.Draft202012Validator(schema())
    parts = [record, *(record[name] for name in ("config", "runtime", "before", "after", "timing"))]
    for part in [*parts, record["runtime"]["precision"], record["history"][1]]:
        part["extra"] = 1
        assert not validator.is_valid(record)
        del part["extra"]
        for name in {*part} - OLDER_DO_NOT_SAY:
            value = part.pop(name)
            assert not validator.is_valid(record), name
            part[name] = value
    assert validator.is_valid(record)


def test_a_record_holds_the_settings_the_figures_and_their_intervals(record_of):
    record = record_of("--seed", 11)
    assert record["config"] == Config(seed=11, iterations=3, eval_episodes=20).to_dict()
    assert record["config"]["effective_lr"] == 0.08
    assert [row["iteration"] for row in record["history"]] == [0, 1, 2]
    for part in (record["before"], record["after"]):
        assert part["episodes"] == 20
        assert part["success_rate"] == part["successes"] / 20
        low, high = part["success_rate_interval"]
        assert low <= part["success_rate"] <= high
        low, high = part["mean_actions_interval"]
        assert low <= part["mean_actions"] <= high
    assert record["before"]["exact_success_rate"] == pytest.approx(0.06526491769547325, abs=1e-6)
    assert record["after"]["exact_success_rate"] == pytest.approx(record["history"][2]["exact_success_rate"], abs=1e-6)
    assert record["runtime"]["jax"] == jax.__version__
    assert record["timing"]["train_and_final_eval_seconds"] > 0


def test_the_same_command_gives_the_same_record_but_for_times(record_of):
    assert without_times(record_of("--seed", 3)) == without_times(record_of("--seed", 3))


def test_a_process_of_its_own_gives_the_record_of_the_library(tmp_path, grpo_run):
    """With the article's settings; metrics as JSON lines every 20 iterations, then before, after and output."""
    done = run_process(tmp_path, "-m", "jaxrl_mini.train", "--seed", 7)
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads((tmp_path / "runs/table-grpo-seed-7.json").read_text())
    expected = records.build(grpo_run)
    for part in ("config", "before", "after", "history", "scope", "schema_version"):
        assert record[part] == expected[part], part
    *metrics, last = map(json.loads, done.stdout.splitlines())
    assert metrics == [record["history"][i] for i in (19, 39, 59, 79, 99)]
    assert last == {
        "before": record["before"], "after": record["after"], "output": "runs/table-grpo-seed-7.json"
    }  # fmt: skip
    assert record["after"]["success_rate"] >= 0.97


def test_the_last_iteration_is_reported_even_if_it_is_no_twentieth(train_command):
    outcome = train_command("--iterations", 23, "--eval-episodes", 1, "--output", "r.json")
    assert [json.loads(line).get("iteration") for line in outcome.out] == [19, 22, None]


# What is refused, before anything is computed


@pytest.fixture
def never_run(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("it ran")

    monkeypatch.setattr(loop, "run", refuse)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--iterations", "0"], ["--iterations", "0", "from 1"]),
        (["--epochs", "-3"], ["--epochs", "-3", "from 1"]),
        (["--groups", "0"], ["--groups", "0", "from 1"]),
        (["--eval-episodes", "0"], ["--eval-episodes", "0", "from 1"]),
        (["--group-size", "1"], ["--group-size", "1", "from 2"]),
        (["--clip", "1.5"], ["--clip", "1.5", "from 1.2e-07 to 0.9999999"]),
        (["--clip", "0"], ["--clip", "0.0", "from 1.2e-07 to 0.9999999"]),
        (["--clip", "1"], ["--clip", "1.0", "from 1.2e-07 to 0.9999999"]),
        (["--clip", "nan"], ["--clip", "nan", "from 1.2e-07 to 0.9999999"]),
        (["--clip", "1e-12"], ["--clip", "1e-12", "from 1.2e-07 to 0.9999999"]),
        (["--beta", "-1"], ["--beta", "-1.0", "0 or a number from"]),
        (["--beta", "1e39"], ["--beta", "1e+39", "to 3.4e+38"]),
        (["--lr", "nan"], ["--lr", "nan", "from 1.2e-38 to 3.4e+38"]),
        (["--lr", "inf"], ["--lr", "inf", "from 1.2e-38 to 3.4e+38"]),
        (["--lr", "1e-60"], ["--lr", "1e-60", "from 1.2e-38 to 3.4e+38"]),
        (["--lr", "fast"], ["--lr", "'fast'", "from 1.2e-38 to 3.4e+38"]),
        (["--seed", "-1"], ["--seed", "-1", "0 to 4294967295"]),
        (["--seed", "99999999999999999999"], ["--seed", "99999999999999999999", "0 to 4294967295"]),
        (["--seed", "abc"], ["--seed", "'abc'", "a whole number from 0 to 4294967295"]),
        (["--seed", "1.5"], ["--seed", "'1.5'", "a whole number from 0 to 4294967295"]),
        (["--seed", "9" * 5000], ["--seed", "99999", "a whole number from 0 to 4294967295"]),
        (["--method", "ppo"], ["--method", "'ppo'", "grpo", "rs-sft"]),
        (["--backend", "torch"], ["--backend", "'torch'", "table", "hf"]),
        (["--backend", "hf"], ["--model", "hf"]),
        (["--model", "folder"], ["--model", "folder", "hf"]),
        (["--device", "warp"], ["--device", "'warp'", "cpu", "gpu", "tpu"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["--iter", "5"], ["--iter"]),
        (["--output", "/proc/nope/x.json"], ["output", "/proc/nope/x.json"]),
        (["--output", "/"], ["output", "/", "folder"]),
        (["--output", ""], ["--output", "''"]),
        (["--output", "x" * 300], ["output", "File name too long"]),
        (["--output", "new/folder/r.json", "--trajectories", "/proc/nope/x.npz"], ["/proc/nope/x.npz"]),
        (["--frob\nnicate"], ["--frob nicate"]),
        (["--output", "/dev/null"], ["output", "/dev/null", "regular file"]),
        (["--trajectories", "/proc/nope/x.npz"], ["/proc/nope/x.npz"]),
        (["--trajectories", "o.json"], ["--trajectories", "o.json"]),
    ],
)
def test_bad_input_is_one_line_that_names_it_exit_2_and_nothing_written(
    train_command, never_run, tmp_path, arguments, parts
):
    outcome = train_command("--output", "o.json", *arguments)
    assert outcome.code == 2
    assert outcome.out == []
    assert len(outcome.err) == 1
    for part in parts:
        assert part in outcome.err[0]
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_refused_naming_those_that_are(train_command, never_run, tmp_path):
    platforms = {device.platform for device in jax.devices()}
    absent = "tpu" if "tpu" not in platforms else "gpu"
    outcome = train_command("--device", absent)
    assert outcome.code == 2
    assert outcome.err == [f"error: --device {absent} is not there: this machine offers {', '.join(sorted(platforms))}"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", [f"jaxrl_mini.{name}" for name in ("train", "replay", "play", "reproduce")])
def test_help_answers_without_importing_jax(tmp_path, module):
    done = run_process(tmp_path, "-X", "importtime", "-m", module, "--help")
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "jaxrl_mini.config" in imported
    assert not imported & {"jax", "numpy", "scipy", "optax", "flax", "transformers", "tqdm"}


def test_help_describes_every_flag_with_its_default(train_command):
    outcome = train_command("--help")
    assert outcome.code == 0
    flags = "\n".join(outcome.out).split("\n  --")
    lines = {"--" + text.split()[0]: text for text in flags[1:]}
    for flag, default in [
        ("--backend", "[table]"), ("--method", "[grpo]"), ("--seed", "[7]"), ("--iterations", "[100]"),
        ("--groups", "[4]"), ("--group-size", "[8]"), ("--epochs", "[2]"), ("--lr", "[0.08 table, 1e-06 hf]"),
        ("--clip", "[0.2]"), ("--beta", "[0.02]"), ("--eval-episodes", "[500]"), ("--model", ""),
        ("--device", "{cpu,gpu,cuda,tpu}"), ("--output", "[runs/BACKEND-METHOD-SETTINGS-seed-"),
        ("--overwrite", ""), ("--trajectories", ".npz"),
    ]:  # fmt: skip
        assert default in lines[flag]


# Whole or not at all


def test_an_output_of_the_same_config_is_replaced(train_command, tmp_path):
    first = train_command(*SHORT, "--output", "r.json")
    written = (tmp_path / "r.json").stat().st_ino
    assert train_command(*SHORT, "--output", "r.json").code == first.code == 0
    assert (tmp_path / "r.json").stat().st_ino != written
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]


@pytest.mark.parametrize("there", ["another run", "no record", ""])
def test_any_other_file_is_refused_unless_overwrite_is_said(train_command, record_of, tmp_path, monkeypatch, there):
    if there == "another run":
        there = json.dumps(record_of("--seed", 8))
        (tmp_path / "record.json").unlink()
    (tmp_path / "r.json").write_text(there)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "run", None)
        outcome = train_command(*SHORT, "--output", "r.json")
    assert outcome.code == 2
    assert len(outcome.err) == 1 and "r.json" in outcome.err[0] and "--overwrite" in outcome.err[0]
    assert (tmp_path / "r.json").read_text() == there
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]
    assert train_command(*SHORT, "--output", "r.json", "--overwrite").code == 0
    assert records.read(tmp_path / "r.json")["config"]["seed"] == 7


def test_the_refusal_names_what_differs(train_command, record_of):
    record_of("--seed", 8)
    outcome = train_command(*SHORT, "--output", "record.json")
    assert "seed 8 there, 7 here" in outcome.err[0]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_and_no_other(train_command, tmp_path, monkeypatch, failing):
    train_command(*SHORT, "--output", "r.json")
    before = (tmp_path / "r.json").read_bytes()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    target = (os, "fsync") if failing == "fsync" else (type(tmp_path), "replace")
    monkeypatch.setattr(*target, no_space)
    outcome = train_command(*SHORT, "--output", "r.json")
    assert outcome.code == 2
    assert len(outcome.err) == 1 and "No space left on device" in outcome.err[0]
    assert (tmp_path / "r.json").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]


def test_an_interrupted_run_leaves_nothing(train_command, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "run", interrupted)
    outcome = train_command("--output", "r.json", "--trajectories", "t.npz")
    assert (outcome.code, outcome.err) == (130, ["interrupted: nothing was written"])
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_in_one_line(train_command, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as where it is not installed
    outcome = train_command("--output", "r.json")
    assert outcome.code == 2 and len(outcome.err) == 1
    assert f"{sys.executable} has no tqdm: run the command in an environment that has it" in outcome.err[0]


# Every option has its effect


@pytest.mark.parametrize(
    "change", [("--seed", 8), ("--lr", 0.2), ("--beta", 0.5), ("--clip", 0.01), ("--method", "rs-sft"), ("--epochs", 1)]
)
def test_an_option_changes_the_course_of_training(record_of, change):
    plain, changed = record_of(), record_of(*change)
    assert [row["loss"] for row in changed["history"]] != [row["loss"] for row in plain["history"]]
    assert changed["after"]["exact_success_rate"] != plain["after"]["exact_success_rate"]
    differing = {name for name in plain["config"] if plain["config"][name] != changed["config"][name]}
    assert differing - {"effective_lr"} == {change[0].lstrip("-").replace("-", "_")}


def test_clip_decides_what_counts_as_outside(record_of):
    def outside(clip: float) -> list[float]:
        return [row["ratio_outside_clip_fraction"] for row in record_of("--clip", clip)["history"]]

    assert all(narrow > wide for narrow, wide in zip(outside(0.001), outside(0.9), strict=True))


def test_epochs_are_the_optimizer_steps_of_a_batch(record_of):
    """After sampling the policy has not moved yet: with one epoch no ratio can lie outside."""
    history = record_of("--epochs", 1, "--clip", 0.001)["history"]
    assert [row["optimizer_steps"] for row in history] == [1, 1, 1]
    assert [row["ratio_outside_clip_fraction"] for row in history] == [0, 0, 0]
    assert [row["optimizer_steps"] for row in record_of()["history"]] == [2, 2, 2]


@pytest.mark.parametrize(("flag", "size"), [("--groups", 3), ("--group-size", 5)])
def test_groups_and_their_size_make_the_batch(record_of, flag, size):
    episodes = {"--groups": 3 * 8, "--group-size": 4 * 5}[flag]
    successes = [row["train_success_rate"] * episodes for row in record_of(flag, size)["history"]]
    assert any(successes) and successes == pytest.approx([round(count) for count in successes], abs=1e-5)


def test_eval_episodes_change_the_evaluation_and_nothing_else(record_of):
    few, many = record_of("--eval-episodes", 7), record_of("--eval-episodes", 900)
    assert (few["before"]["episodes"], many["after"]["episodes"]) == (7, 900)
    assert few["history"] == many["history"]
    assert few["after"]["exact_success_rate"] == many["after"]["exact_success_rate"]


def test_device_decides_where(record_of):
    assert record_of("--device", "cpu")["runtime"]["device_platform"] == "cpu"


def test_output_names_the_file_and_its_folders_are_made(train_command, tmp_path):
    outcome = train_command(*SHORT, "--output", "a/b/r.json")
    assert json.loads(outcome.out[-1])["output"] == "a/b/r.json"
    assert records.read(tmp_path / "a/b/r.json")["config"]["iterations"] == 3
