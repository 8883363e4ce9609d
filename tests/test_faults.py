"""Whichever call of the system fails while `train` writes: the old files or the new ones, and one line."""

import dataclasses
import errno
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from faults import every_fault

from jaxrl_mini.config import Config
from jaxrl_mini.learning import checkpoint, loop
from jaxrl_mini.learning.checkpoint import Checkpoints, Snapshot
from jaxrl_mini.machine import runtime
from jaxrl_mini.policies.pretrained import load_checkpoint


@pytest.fixture(autouse=True)
def same_commit(monkeypatch):
    """A record asks git for it, and says null where that fails."""
    monkeypatch.setattr(runtime, "_git_state", lambda: {"git_commit": None, "git_dirty": None})


CASES = [
    pytest.param(code, old, id=f"{name}-{where}", marks=[pytest.mark.full] if name == "full" and old else ())
    for code, name in ((errno.ENOSPC, "full"), (errno.EROFS, "read-only"))
    for old, where in ((True, "over old files"), (False, "in a new folder"))
]


def contents(path: Path) -> dict[str, object]:
    """The files of a folder, without those whose name begins with a dot, which nothing reads."""
    found: dict[str, object] = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            data = file.read_bytes()
            if file.suffix == ".npz":
                with np.load(io.BytesIO(data)) as arrays:
                    data = b"".join(name.encode() + array.tobytes() for name, array in arrays.items())
            found[str(file.relative_to(path))] = data
    return found


def of_one(files: dict[str, object], what: str) -> dict[str, object]:
    return {name: data for name, data in files.items() if name.split("/")[0] == what}


def check_every_fault(command, tmp_path, code, words, prepare, outputs):
    """Runs a command once for each of its calls of the system, and lets that call fail.

    Args:
      words: the arguments, with files in the folder `there`.
      prepare: fills that folder as it was before.
      outputs: the names in it, each of which must be as before or as after as a whole.
    """
    there = tmp_path / "there"

    def reset():
        shutil.rmtree(there, ignore_errors=True)
        there.mkdir()
        prepare(there)

    reset()
    before = contents(there)
    assert command(*words).code == 0
    after = contents(there)
    assert {name.split("/")[0] for name in after} == set(outputs)
    assert all(of_one(before, name) != of_one(after, name) for name in outputs)
    refused = 0
    for fault in every_fault(code):
        reset()
        with fault() as failing:
            outcome = command(*words)
        now = contents(there)
        assert set(now) <= set(before) | set(after)
        for name in outputs:
            assert of_one(now, name) in (of_one(before, name), of_one(after, name)), (failing.number, name)
        if outcome.code == 0:
            assert (now, outcome.err) == (after, [])
        else:
            assert outcome.code == 2 and len(outcome.err) == 1, outcome
            refused += 1
    assert failing.calls < failing.number and outcome.code == 0
    return refused


@pytest.mark.parametrize("code, old", CASES)
def test_every_fault_of_a_run_with_trajectories(train_command, tmp_path, monkeypatch, grpo_run, code, old):
    monkeypatch.setattr(loop, "run", lambda config, **_: dataclasses.replace(grpo_run, config=config))
    words = ["--output", "there/new/r.json", "--trajectories", "there/t.npz", *["--overwrite"] * old]

    def prepare(there: Path) -> None:
        if old:
            (there / "new").mkdir()
            (there / "new/r.json").write_text("old")
            shutil.copy(Path(__file__).parent / "golden/grpo-seed-7.npz", there / "t.npz")

    assert check_every_fault(train_command, tmp_path, code, words, prepare, ["new", "t.npz"]) > 8


@pytest.mark.parametrize(
    "old", [pytest.param(True, id="over an old one"), pytest.param(False, marks=pytest.mark.full, id="new")]
)
def test_every_fault_of_a_run_with_a_policy(train_command, tmp_path, monkeypatch, grpo_run, golden, old):
    checkpoint = load_checkpoint(golden / "tiny-gpt2-word")
    done = dataclasses.replace(grpo_run, checkpoint=checkpoint)
    monkeypatch.setattr(loop, "run", lambda config, **_: dataclasses.replace(done, config=config))
    words = ["--backend", "hf", "--model", golden / "tiny-gpt2-word", "--output", "there/r.json"]
    words += ["--save-policy", "there/policy", *["--overwrite"] * old]

    def prepare(there: Path) -> None:
        if old:
            (there / "policy").mkdir()
            (there / "policy/config.json").write_text("old")
            (there / "r.json").write_text("old")

    assert check_every_fault(train_command, tmp_path, errno.ENOSPC, words, prepare, ["policy", "r.json"]) > 8


def played(run):
    """A `loop.run` that only keeps checkpoints on its way to a result."""

    def played(config, checkpoints, **_):
        past = checkpoints.restore({"weights": np.zeros(3)})
        for iteration in range(past.iteration + 1 if past else 1, config.iterations + 1):
            checkpoints.offer(iteration, lambda done=iteration: snapshot(run, done))
        return dataclasses.replace(run, config=config)

    return played


def snapshot(run, done):
    left = {"packed": np.full((done, 2), done)}
    return Snapshot({"weights": np.full(3, float(done))}, {"iteration": np.arange(done)}, left, run.before, (1.0, 2.0))


def test_every_fault_of_a_run_with_checkpoints(train_command, tmp_path, monkeypatch, grpo_run):
    """Each checkpoint in the folder is whole, the run can always go on, and no iteration is lost that was kept."""
    monkeypatch.setattr(loop, "run", played(grpo_run))
    monkeypatch.setattr(checkpoint, "KEPT", 1)
    words = ["--checkpoint", "there/kept", "--checkpoint-every", 1, "--resume", "--overwrite", "--output", "there/r"]
    there, refused = tmp_path / "there", 0
    assert train_command(*words, "--iterations", 1).code == 0
    there.rename(tmp_path / "begun")

    def kept(iterations):
        with Checkpoints(there / "kept", Config(iterations=iterations), resume=True, say=pytest.fail) as checkpoints:
            past = checkpoints.restore({"weights": np.zeros(3)})
        wanted = snapshot(grpo_run, past.iteration)
        for name in ("state", "history", "left"):
            np.testing.assert_equal(getattr(past, name), getattr(wanted, name))
        return past.iteration

    for fault in every_fault(errno.ENOSPC):
        shutil.rmtree(there, ignore_errors=True)
        shutil.copytree(tmp_path / "begun", there)
        with fault() as failing:
            outcome = train_command(*words, "--iterations", 2)
        places = list((there / "kept").glob("iteration-*"))
        assert 1 <= len(places) <= 2 and [checkpoint.read(place) for place in places]
        if outcome.code == 0:
            assert kept(2) == 2 and outcome.err == []
        else:
            assert kept(2) >= 1 and outcome.code == 2 and len(outcome.err) == 1, outcome
            refused += 1
    assert failing.calls < failing.number and outcome.code == 0 and refused > 20
    assert [path.name for path in (there / "kept").glob("*iteration*")] == ["iteration-000000002"]


def test_an_output_inside_the_saved_policy_is_refused_first(train_command, monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "run", None)
    words = ["--backend", "hf", "--model", "m", "--save-policy", "policy"]
    for output in ("policy/r.json", "policy", "x/../policy/deep/r.json"):
        outcome = train_command(*words, "--output", output)
        assert outcome.code == 2 and len(outcome.err) == 1 and "--save-policy" in outcome.err[0]
    assert list(tmp_path.iterdir()) == []
