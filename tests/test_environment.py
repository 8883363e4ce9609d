"""Commands in whatever environment a user's shell or cluster has: the usual numbers, or one line that says what."""

import dataclasses
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from jaxrl_mini import estimators
from jaxrl_mini.config import Config
from jaxrl_mini.learning import loop
from jaxrl_mini.machine import hardware
from jaxrl_mini.runs import records

NUMBERS = {
    "JAX_ENABLE_X64": "1",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "JAX_SOFTMAX_CUSTOM_JVP": "1",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_DEBUG_NANS": "1",
    "JAX_DEBUG_INFS": "1",
    "JAX_CHECK_TRACER_LEAKS": "1",
    "JAX_TRANSFER_GUARD": "disallow",
    "JAX_DISABLE_JIT": "1",
    "JAX_DEFAULT_DEVICE": "cpu",
}
PROCESS = {
    "JAX_RANDOM_SEED_OFFSET": "3",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_OPTIMIZATION_LEVEL": "O0",
    "JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-0.5",
    "JAX_NUM_CPU_DEVICES": "2",
    "JAX_COORDINATOR_ADDRESS": "localhost:1",
    "PYTHONOPTIMIZE": "2",
    "PYTHONWARNINGS": "error",
    "PYTHONHASHSEED": "5",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "LC_ALL": "C",
    "TERM": "dumb",
    "COLUMNS": "1",
}
SHORT = ("--iterations", "1", "--eval-episodes", "1")
JUDGED = ("--at", "0", "--advantage", "rloo", "--aggregation", "episode-mean", "--output", "e.csv")
COMMANDS = {
    "tiny_model": ("m", "--layers", "1", "--width", "16"),
    "train": (*SHORT, "--output", "r.json", "--trajectories", "r.npz", "--save-policy", "p"),
    "estimators": JUDGED,
    "sweep": (*SHORT, "--seeds", "7:8", "--output", "s"),
    "replay": ("r.npz",),
    "reproduce": ("r.json",),
    "play": ("p", "--episodes", "1"),
    "report": ("r.json", "r.npz", "s"),
}


def run_in(folder, variables, *words) -> subprocess.CompletedProcess:
    """A process of its own with further variables."""
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Every command, in a folder of its own, under all of the variables that should make no difference."""
    folder = tmp_path_factory.mktemp("hostile")

    def run(*words):
        return run_in(folder, NUMBERS | PROCESS, "-m", *words)

    language = ("jaxrl_mini.train", *SHORT, "--backend", "hf", "--model", "m", "--output", "h.json")
    steps = [
        {name: (f"jaxrl_mini.{name}", *COMMANDS[name]) for name in ("tiny_model", "train", "estimators", "sweep")},
        {name: (f"jaxrl_mini.{name}", *COMMANDS[name]) for name in ("replay", "reproduce", "play", "report")}
        | {"language": language, "help": ("jaxrl_mini", "--help"), "summary": ("jaxrl_mini.sweep", "summary", "s")},
    ]
    done = {}
    for step in steps:
        with ThreadPoolExecutor(2) as pool:
            done |= dict(zip(step, pool.map(lambda words: run(*words), step.values()), strict=True))
    return folder, done


@pytest.fixture(scope="module")
def usual():
    """What the run of these commands gives without the variables."""
    return records.build(loop.run(Config(iterations=1, eval_episodes=1)))


def figures(record: dict) -> dict:
    return {name: record[name] for name in ("before", "after", "history")}


@pytest.mark.full
def test_every_command_works(hostile):
    _, done = hostile
    said = {name: one.stderr for name, one in done.items() if one.returncode or "warning" in one.stderr.lower()}
    assert not said and "commands:" in done["help"].stdout


@pytest.mark.full
def test_a_run_has_the_usual_numbers(hostile, usual):
    folder, done = hostile
    record = records.read(folder / "r.json")
    assert figures(record) == figures(usual)
    assert record["runtime"]["precision"]["enable_x64"] is False and record["runtime"]["device_platform"] == "cpu"
    assert json.loads(done["play"].stdout)["success_rate"] == usual["after"]["success_rate"]
    assert json.loads(done["reproduce"].stdout)["ok"] and json.loads(done["replay"].stdout)["ok"]
    row = pq.read_table(next((folder / "s").glob("runs*/*.parquet"))).to_pylist()[0]
    assert row["after_exact_success_rate"] == usual["after"]["exact_success_rate"]


@pytest.mark.full
def test_a_model_and_its_run_have_the_usual_numbers(hostile, tiny_folder):
    folder, _ = hostile
    assert (folder / "m/model.safetensors").read_bytes() == (tiny_folder / "model.safetensors").read_bytes()
    config = Config(backend="hf", model=str(tiny_folder), iterations=1, eval_episodes=1)
    assert figures(records.read(folder / "h.json")) == figures(records.build(loop.run(config)))


@pytest.mark.full
def test_estimators_judge_as_usual(hostile, command):
    _, done = hostile
    assert done["estimators"].stdout.splitlines() == command(estimators, *JUDGED).out


LIBRARY = """
import json, jax, jaxrl_mini
from jaxrl_mini.runs import records
config = jaxrl_mini.Config(iterations=1, eval_episodes=1)
result = jaxrl_mini.run(config)
sweep = jaxrl_mini.run_sweep(jaxrl_mini.Grid.product([7], iterations=1, eval_episodes=1), "s")
row = sweep.runs().to_pylist()[0]
print(json.dumps([records.build(result), row["after_exact_success_rate"]]))
assert jax.config.jax_enable_x64 and jax.config.jax_disable_jit
"""


def test_a_users_process_keeps_its_settings_and_gets_the_usual_numbers(tmp_path, usual):
    done = run_in(tmp_path, NUMBERS, "-c", LIBRARY)
    assert done.returncode == 0, done.stderr
    record, rate = json.loads(done.stdout)
    assert figures(record) == figures(usual) and rate == usual["after"]["exact_success_rate"]
    assert record["runtime"]["precision"]["enable_x64"] is False


@pytest.mark.full
def test_a_platform_that_is_not_there_is_refused_by_every_command(hostile, tmp_path):
    folder, _ = hostile
    words = {name: (*COMMANDS[name], *(["--overwrite"] if name == "train" else [])) for name in COMMANDS}
    del words["report"]  # it computes nothing
    words["tiny_model"] = ("new",)

    def run(name):
        return run_in(folder, {"JAX_PLATFORMS": "cuda"}, "-m", f"jaxrl_mini.{name}", *words[name])

    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("it is there")
    with ThreadPoolExecutor(2) as pool:
        for name, done in zip(words, pool.map(run, words), strict=True):
            *estimate, line = done.stderr.splitlines()
            assert done.returncode == 2 and "JAX_PLATFORMS cuda cannot be used here" in line, (name, done.stderr)
            assert len(estimate) == (name == "sweep")
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("JAX_ENABLE_X64", "banana", "an environment variable of jax is out of range: invalid truth value 'banana'"),
        ("JAX_DEFAULT_DEVICE", "tpu", "JAX_DEFAULT_DEVICE tpu cannot be used here"),
        ("JAX_PLATFORMS", "banana", "JAX_PLATFORMS banana cannot be used here"),
    ],
)
def test_what_jax_cannot_read_or_use_is_named_in_one_line(tmp_path, variable, value, words):
    done = run_in(tmp_path, {variable: value}, "-m", "jaxrl_mini.train", *SHORT)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and words in done.stderr
    assert variable in done.stderr and not list(tmp_path.iterdir())


def test_a_command_compiles_even_where_jit_is_disabled(tmp_path):
    done = run_in(tmp_path, {"JAX_DISABLE_JIT": "1"}, "-m", "jaxrl_mini.train", *SHORT)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_default_device_may_be_a_name_a_device_or_set_for_a_while():
    first = jax.devices()[0]
    for chosen in (first.platform, first):
        with jax.default_device(chosen):
            assert hardware.default_device() == first and first in hardware.devices()
            result = loop.run(Config(iterations=1, eval_episodes=1))
    assert np.isfinite(result.history["loss"]).all()
    assert dataclasses.replace(result, timing={}) == result
