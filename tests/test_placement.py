"""A language model on a mesh of devices, in one process and in two, learns what it learns on one device."""

import json
import socket
import subprocess
import sys

import pytest

from jaxrl_mini.config import Config, UserError
from jaxrl_mini.learning import loop
from jaxrl_mini.machine import files
from jaxrl_mini.machine.placement import make_mesh
from jaxrl_mini.runs import recording, records, replaying

pytestmark = pytest.mark.usefixtures("quick_to_compile")

FIGURES = ("loss", "mean_kl", "entropy", "gradient_norm", "train_success_rate")

ON_EIGHT = """
import json, sys, jax, numpy as np
from jaxrl_mini.config import Config, UserError
from jaxrl_mini.learning.language_training import Run
from jaxrl_mini.machine.placement import make_mesh
config = Config(backend="hf", model=sys.argv[1], lr=3e-3, groups=2, group_size=4, reward="public-test")
run = Run(config, make_mesh("data=4,model=2"))
kernel = run.state.params["h"]["attn"]["c_attn"]["kernel"][...]
history = [{name: column.item() for name, column in run.advance()[0].items()} for _ in range(2)]
try:
    Run(Config(backend="hf", model=sys.argv[1], micro_batch=6), run.policy.placement.mesh)
except UserError as error:
    refused = str(error)
after = run.state.params["h"]["attn"]["c_attn"]["kernel"][...]
moment = run.state.moments.first["h"]["mlp"]["c_proj"]["kernel"][...]
print(json.dumps({
    "devices": len(kernel.sharding.device_set), "history": history,
    "shards": [list(array.sharding.shard_shape(array.shape)) for array in (kernel, after, moment)],
    "shapes": [list(array.shape) for array in (kernel, after, moment)],
    "refused": refused,
    "whole": run.checkpoint().params["wte"]["embedding"][...].is_fully_replicated,
}))
"""


def settings(folder, **changes):
    """A short run whose reward an untrained model gets in some episodes: without one the gradient is rounding alone."""
    few = {"groups": 2, "group_size": 4, "iterations": 2, "eval_episodes": 40, "reward": "public-test"}
    return {"backend": "hf", "model": str(folder), "lr": 3e-3, **few} | changes


@pytest.fixture(scope="module")
def alone(tiny_folder, quick_to_compile):
    return loop.run(Config(**settings(tiny_folder)))


@pytest.mark.full
def test_eight_devices_learn_what_one_learns(tiny_folder, alone, devices, quick_process):
    command = [sys.executable, "-c", ON_EIGHT, str(tiny_folder)]
    environment = devices(8, quick_process)
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    eight = json.loads(shown.stdout.splitlines()[-1])
    for number, row in enumerate(eight["history"]):
        for name in FIGURES:
            assert row[name] == pytest.approx(alone.history[name][number], rel=1e-3, abs=1e-5), name
    assert eight["refused"] == "--micro-batch 6 cannot be split over data=4: expected a multiple of it"
    assert eight["devices"] == 8 and eight["whole"]
    (layers, rows, columns), same, (_, inner, width) = eight["shapes"]
    assert same == [layers, rows, columns]
    half = [layers, rows, columns // 2]
    assert eight["shards"] == [half, half, [layers, inner // 2, width]]


@pytest.mark.full
def test_two_processes_learn_what_one_learns(tiny_folder, alone, tmp_path):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings(tiny_folder).items()]
    flags += ["--mesh", "data=2", "--device", "cpu", "--num-processes", "2"]
    command = [sys.executable, "-m", "jaxrl_mini.train", *flags, "--coordinator-address", f"127.0.0.1:{port}"]
    both = [
        subprocess.Popen(
            [*command, "--process-id", str(number), "--output", str(tmp_path / f"{number}.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        shown = [process.communicate(timeout=600)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], shown
    assert not (tmp_path / "1.json").exists()  # the first alone writes
    record = records.read(tmp_path / "0.json")
    for number, row in enumerate(record["history"]):
        for name in FIGURES:
            assert row[name] == pytest.approx(alone.history[name][number], rel=1e-3, abs=1e-5), name
    assert record["after"]["exact_success_rate"] == pytest.approx(alone.after.exact_success_rate, abs=1e-5)


@pytest.mark.parametrize("text", ["", "data", "data=0", "data=2,data=2", "rows=2", "data=-1", "data=1000000"])
def test_what_is_no_mesh_here_is_refused(text):
    with pytest.raises(UserError, match="--mesh"):
        make_mesh(text)


MODEL = ["--backend", "hf", "--model", "x"]
TWO = [*MODEL, "--num-processes", 2, "--coordinator-address", "127.0.0.1:1", "--process-id"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "data=1"], "--mesh data=1 has no use"),
        ([*MODEL, "--num-processes", 2], "--coordinator-address is missing"),
        ([*TWO, 0], "--mesh is missing"),
        ([*TWO, 2, "--mesh", "data=2"], "--process-id 2"),
        (["--num-processes", 2], "--num-processes has no use with backend table"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(train_command, flags, message):
    outcome = train_command(*flags)
    assert outcome.code == 2 and len(outcome.err) == 1 and message in outcome.err[0]


def test_a_clusters_variables_count_with_a_mesh_alone(train_command, tiny_folder, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    outcome = train_command("--backend", "hf", "--model", tiny_folder, "--mesh", "data=1")
    assert outcome.code == 2 and len(outcome.err) == 1
    assert "JAX_COORDINATOR_ADDRESS in the environment: --num-processes is missing" in outcome.err[0]
    monkeypatch.setenv("JAX_PROCESS_ID", "nonsense")
    assert train_command("--iterations", 1, "--eval-episodes", 1).code == 0


def test_a_language_models_recording_replays(alone, tmp_path):
    """Bit for bit, and not if an episode or a reward is changed."""
    with files.Output(tmp_path / "run.npz") as output:
        recording.write(alone, output)
    recorded = recording.read(tmp_path / "run.npz")
    errors = replaying.replay_errors(recorded)
    assert errors.pop("behavior_log_probs") < 1e-5
    assert errors == dict.fromkeys(["loss", "mean_kl", "ratio_outside_clip_fraction", "advantages"], 0.0)
    recorded.arrays["rewards"][0, 0, 0] = 1 - recorded.arrays["rewards"][0, 0, 0]
    changed = replaying.replay_errors(recorded)
    assert changed["loss"] > 1e-5 and changed["advantages"] > 0.1
