"""What a run's future depends on: whoever goes on with it somewhere else, or with something else, is told so."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_mini.config import Config, UserError
from jaxrl_mini.learning import checkpoint
from jaxrl_mini.learning.checkpoint import Checkpoints, Snapshot
from jaxrl_mini.learning.evaluation import Evaluation
from jaxrl_mini.machine import hardware, runtime
from jaxrl_mini.machine.placement import make_mesh
from jaxrl_mini.sweeps import engine
from jaxrl_mini.sweeps.dataset import Dataset
from jaxrl_mini.sweeps.grid import Grid

MODEL = Path("model")
LANGUAGE = Config(backend="hf", model="model", iterations=2)


@pytest.fixture(scope="module")
def begun(tiny_folder, tmp_path_factory) -> Path:
    """A folder with a language model, and with checkpoints of a run of it."""
    folder = tmp_path_factory.mktemp("begun")
    shutil.copytree(tiny_folder, folder / MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        keep(Path("kept"), LANGUAGE)
    return folder


@pytest.fixture
def here(begun, tmp_path, monkeypatch) -> None:
    """Works in a copy of that folder, which is part of no checkout."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runtime, "_git_state", lambda: {"git_commit": None, "git_dirty": None})


def keep(folder: Path, config: Config) -> None:
    """A checkpoint of a run, without running it."""
    before = Evaluation(3, 1, 9, 30, 0.06, 4.0)
    kept = Snapshot([np.ones(3)], {"iteration": np.arange(2)}, {"packed": np.ones(2)}, before, (1.0, 2.0))
    with Checkpoints(folder, config) as checkpoints:
        checkpoints.restore([np.zeros(3)])
        checkpoints.offer(2, lambda: kept)


def resume(folder: Path, config: Config, mesh=None, say=pytest.fail) -> int | None:
    with Checkpoints(folder, config, mesh=mesh, resume=True, say=say) as checkpoints:
        return checkpoints.newest


def edit(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data and old != new
    path.write_bytes(data.replace(old, new, 1))


CHANGES = {
    "config.json": lambda patch: edit(MODEL / "config.json", b"gelu_new", b"relu"),
    "tokenizer.json": lambda patch: edit(MODEL / "tokenizer.json", b"read", b"reads"),
    "tokenizer_config.json": lambda patch: (MODEL / "tokenizer_config.json").unlink(),
    "added_tokens.json": lambda patch: (MODEL / "added_tokens.json").touch(),
    "model.safetensors": lambda patch: edit(MODEL / "model.safetensors", b"F32", b"F16"),
    **{
        package: lambda patch, package=package: patch.setattr(
            runtime, "_version", lambda name, before=runtime._version: "0" if name == package else before(name)
        )
        for package in runtime.PACKAGES
    },
    "platform": lambda patch: patch.setattr("platform.platform", lambda: "Linux-6.1-aarch64-with-glibc2.36"),
    "processor": lambda patch: patch.setattr(hardware, "processor", lambda: "another"),
    "vector_instructions": lambda patch: patch.setattr(hardware, "vector_instructions", lambda: "sse sse2"),
    "numpy_dispatch": lambda patch: patch.setattr(hardware, "numpy_dispatch", lambda: "NONE"),
    "threads": lambda patch: patch.setattr(hardware, "threads", lambda: 99),
    "xla_flags": lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=SSE4_2"),
    "GLIBC_TUNABLES": lambda patch: patch.setenv("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2"),
    "OPENBLAS_CORETYPE": lambda patch: patch.setenv("OPENBLAS_CORETYPE", "Nehalem"),
    "default_matmul_precision": lambda patch: jax.default_matmul_precision("highest"),
    "jax_random_seed_offset": lambda patch: process_setting("jax_random_seed_offset", 1),
    "jax_disable_most_optimizations": lambda patch: process_setting("jax_disable_most_optimizations", True),
    "device_kind": lambda patch: patch.setattr(jax, "devices", lambda: [Device("H200", "gpu")]),
}
"""What a run of a language model depends on beside its settings and its mesh, by the name in the error."""


KEPT, PLACE = Path("kept"), Path("kept/iteration-000000002")


@contextmanager
def process_setting(name: str, value) -> Iterator[None]:
    """One of jax's that has no context manager of its own."""
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextmanager
def changed(name: str, monkeypatch) -> Iterator[None]:
    with monkeypatch.context() as patch, CHANGES[name](patch) or nullcontext():
        yield


class Device:
    def __init__(self, kind: str, platform: str):
        self.device_kind, self.platform, self.client, self.platform_version = kind, platform, self, "cuda 13"


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_goes_on_only_with_all_that_it_began_with(here, monkeypatch, name):
    assert resume(KEPT, LANGUAGE) == 2
    refused = pytest.raises(UserError, match=rf"kept holds another run \(.*\b{name} .* there, .* here")
    with changed(name, monkeypatch), refused:
        resume(KEPT, LANGUAGE)
    assert checkpoint.read(PLACE)


def test_a_run_goes_on_only_on_the_same_mesh(here):
    with pytest.raises(UserError, match=r"\(mesh None there, {'data': 1, 'model': 1} here\)"):
        resume(KEPT, LANGUAGE, make_mesh("data=1"))


def test_what_decides_no_bit_stops_no_run(tmp_path, monkeypatch):
    """Another Python, kernel or commit; and for a table policy, whose sums no threads share, their number."""
    config = Config(iterations=2)
    keep(tmp_path / "kept", config)
    monkeypatch.setattr(hardware, "threads", lambda: 99)
    monkeypatch.setattr(hardware, "cores", lambda: 99)
    monkeypatch.setattr("platform.python_version", lambda: "3.13.9")
    monkeypatch.setattr(runtime, "_git_state", lambda: {"git_commit": None, "git_dirty": None})
    here = runtime.runtime()["platform"].split("-")
    if here[0] == "Linux":
        monkeypatch.setattr("platform.platform", lambda: "-".join(["Linux-9.9-another", *here[-3:]]))
    assert resume(tmp_path / "kept", config) == 2


def rewrite(place: Path, change) -> None:
    """Another `run.json`, as if it had been written so."""
    data = change(json.loads((place / checkpoint.RUN).read_text()))
    (place / checkpoint.RUN).write_text(json.dumps(data))
    digest = hashlib.sha256((place / checkpoint.RUN).read_bytes()).hexdigest()
    lines = [line for line in (place / checkpoint.SUMS).read_text().splitlines() if not line.endswith(checkpoint.RUN)]
    (place / checkpoint.SUMS).write_text("\n".join([*lines, f"{digest}  {checkpoint.RUN}"]) + "\n")


def as_before(run: dict) -> dict:
    """What the version before wrote of a run: less, side by side."""
    packages = ("jaxrl_mini", "jax", "jaxlib", "flax", "optax", "numpy")
    told = {name: run["runtime"][name] for name in (*packages, "device_kind")}
    return {**run["config"], **told, "platform": run["runtime"]["device_platform"], "mesh": None}


def test_a_checkpoint_of_the_version_before_goes_on_and_one_line_says_what_is_unknown(here, monkeypatch):
    rewrite(PLACE, as_before)
    said = []
    assert resume(KEPT, LANGUAGE, say=said.append) == 2
    assert len(said) == 1 and "does not say with which" in said[0]
    assert all(name in said[0] for name in ("vector_instructions", "numpy_dispatch", "precision", "files of the model"))
    monkeypatch.setattr(runtime, "_version", lambda name: "0")
    with pytest.raises(UserError, match=r"jax '0\.10\.\d' there, '0' here"):
        resume(KEPT, LANGUAGE)


@pytest.mark.parametrize(
    "run", [[], 1, {"runtime": {}}, {"config": [], "runtime": {}}, {"config": {}, "runtime": {}, "x": {}}]
)
def test_what_describes_no_run_is_damage(here, run):
    rewrite(PLACE, lambda _: run)
    with pytest.raises(UserError, match="damaged: iteration-000000002"):
        resume(KEPT, LANGUAGE)


# Sweeps


@pytest.mark.parametrize("name", CHANGES)
def test_a_sweep_goes_on_only_with_all_that_it_began_with(here, monkeypatch, name):
    grid = Grid.product([1, 2], backend="hf", model=str(MODEL), iterations=1)
    one = Dataset.create("sweep", grid, engine.here_for(grid))
    assert one.refuse_other_runtime(engine.here_for(grid)) == []
    refused = pytest.raises(UserError, match=rf"sweep was started elsewhere \(.*\b{name} .* there, .* here")
    with changed(name, monkeypatch), refused:
        Dataset.open("sweep").refuse_other_runtime(engine.here_for(grid))


def test_a_shard_on_another_machine_is_refused_before_it_computes(tmp_path, monkeypatch):
    grid = Grid.product(range(3), iterations=1, eval_episodes=1)
    Dataset.create(tmp_path / "sweep", grid, engine.here_for(grid))
    monkeypatch.setattr(hardware, "vector_instructions", lambda: "avx avx2 fma")
    monkeypatch.setattr(engine, "compute_part", None)
    with pytest.raises(UserError, match=r"vector_instructions .* there, .* here"):
        engine.run_sweep(grid, tmp_path / "sweep", shard=(1, 1))


def test_a_sweep_of_the_version_before_goes_on_and_one_line_says_what_is_unknown(tmp_path):
    grid = Grid.product(range(3), iterations=1, eval_episodes=1)
    new = ("vector_instructions", "numpy_dispatch", "environment", "threads", "device_version")
    here = {name: value for name, value in engine.here_for(grid).items() if name not in new}
    Dataset.create(tmp_path / "sweep", grid, here)
    said = []
    assert engine.run_sweep(grid, tmp_path / "sweep", say=said.append).runs().num_rows == 3
    assert len(said) == 1 and "does not say with which vector_instructions, numpy_dispatch" in said[0]
    engine.run_sweep(grid, tmp_path / "sweep", say=pytest.fail)  # nothing is added


def test_the_threads_of_a_sweep_have_the_precision_of_its_caller(tmp_path, monkeypatch):
    found = []

    def compute_part(dataset, number, *_):
        found.append(jax.config.jax_default_matmul_precision)
        return number

    monkeypatch.setattr(engine, "compute_part", compute_part)
    grid = Grid.product(range(2), iterations=1)
    with jax.default_matmul_precision("highest"):
        one = engine.run_sweep(grid, tmp_path / "sweep")
    engine.run_sweep(grid, tmp_path / "another")
    assert found == ["highest", None] and one.runtime["precision"]["default_matmul_precision"] == "highest"


def test_a_sweep_on_ray_has_the_threads_of_its_workers(here, monkeypatch):
    """Whatever started it: a worker looks where it is itself, and a language model's sums are split over threads."""
    monkeypatch.setattr(hardware, "threads", lambda: 99)
    monkeypatch.setattr(engine, "compute_on_ray", lambda *_: iter(()))
    grid = Grid.product([1, 2], backend="hf", model=str(MODEL), iterations=1)
    one = engine.run_sweep(grid, "sweep", engine="ray")
    monkeypatch.setattr(hardware, "threads", lambda: 1)
    assert one.refuse_other_runtime(engine.here_for(grid)) == []


# As users meet it


def test_other_instructions_are_refused_in_a_new_process_and_a_record_made_with_them_has_a_tolerance(tmp_path):
    def command(name, *arguments, **environment):
        words = [sys.executable, "-m", f"jaxrl_mini.{name}", *map(str, arguments)]
        environment = {**os.environ, **environment}
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    short = ("--iterations", 1, "--eval-episodes", 2, "--checkpoint", "kept", "--resume", "--output")
    older = {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"}
    if dispatch := hardware.numpy_dispatch():
        older["NPY_DISABLE_CPU_FEATURES"] = dispatch
    assert command("train", *short, "r.json", **older).returncode == 0
    refused = command("train", *short, "s.json")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "xla_flags '--xla_cpu_max_isa=SSE4_2' there, '' here" in refused.stderr
    assert not dispatch or f"numpy_dispatch '' there, '{dispatch}' here" in refused.stderr
    again = command("reproduce", "r.json")
    assert again.returncode == 0, again.stdout
    assert json.loads(again.stdout)["tolerance"] == 5e-4 and "precision" in json.loads(again.stdout)["elsewhere"]
