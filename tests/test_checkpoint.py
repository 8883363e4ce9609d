"""Checkpoints: a run that stops anywhere and goes on is the run that never stopped, to the bit."""

import errno
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest
from kills import killed_and_resumed
from stopping import assert_same, kept_run, stop_after_each_iteration

from jaxrl_mini.config import Config, UserError
from jaxrl_mini.learning import checkpoint, identity, loop
from jaxrl_mini.learning.block import Block
from jaxrl_mini.learning.checkpoint import Checkpoints
from jaxrl_mini.machine import signals
from jaxrl_mini.machine.placement import make_mesh
from jaxrl_mini.runs import records
from jaxrl_mini.sweeps.engine import run_sweep
from jaxrl_mini.sweeps.grid import Grid

SHORT = ("--iterations", 12, "--eval-episodes", 20, "--output", "r.json")
RUNS = {"grpo": {}, "rs-sft": {"method": "rs-sft", "reward": "shuffled"}}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_a_run_that_stops_at_each_of_its_iterations_is_one_that_never_stops(tmp_path, settings):
    config = Config(iterations=12, eval_episodes=20, **settings)
    never = kept_run(tmp_path / "never", config, every=12)
    stop_after_each_iteration(tmp_path / "stopping", config)
    assert_same(kept_run(tmp_path / "stopping", config), never)
    assert len(never[0].history["iteration"]) == 12
    plain = loop.run(config)
    assert {**records.build(plain), "timing": None} == {**records.build(never[0]), "timing": None}


def test_more_iterations_continue_a_finished_run(tmp_path):
    """And the metrics of all its iterations are reported, those since the last report again."""
    short, config = (Config(iterations=iterations, eval_episodes=20) for iterations in (25, 42))
    reported = [[], []]
    runs = [partial(loop.run, on_chunk=lambda part, to=to: to.append(part["iteration"].tolist())) for to in reported]
    kept_run(tmp_path / "more", short, run=runs[0])
    assert_same(kept_run(tmp_path / "more", config, run=runs[1]), kept_run(tmp_path / "never", config))
    whole = [list(range(first, end)) for first, end in ((0, 20), (20, 25), (20, 40), (40, 42))]
    assert reported == [whole[:2], whole[2:]]


def iterations_in(folder):
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("iteration-*"))


def test_there_is_a_checkpoint_as_often_as_asked_and_at_the_end_and_the_last_three_stay(train_command, tmp_path):
    assert train_command(*SHORT, "--checkpoint", "kept", "--checkpoint-every", 5).code == 0
    assert iterations_in(tmp_path / "kept") == [5, 10, 12]
    assert train_command(*SHORT[2:], "--iterations", 30, "--overwrite", "--checkpoint", "kept", "--resume").code == 0
    assert iterations_in(tmp_path / "kept") == [12, 20, 30]
    words = ("--iterations", 51, "--checkpoint-every", 7, "--overwrite", "--checkpoint", "kept", "--resume")
    assert train_command(*SHORT[2:], *words).code == 0
    assert iterations_in(tmp_path / "kept") == [42, 49, 51]
    assert not list((tmp_path / "kept").glob(".part*"))


def test_the_digests_are_those_of_the_usual_tool(train_command, tmp_path):
    assert train_command(*SHORT, "--checkpoint", "kept").code == 0
    place = tmp_path / "kept/iteration-000000012"
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", checkpoint.SUMS], cwd=place, check=True)


def test_without_resume_a_run_that_is_there_stays(train_command):
    assert train_command(*SHORT, "--checkpoint", "kept").code == 0
    outcome = train_command(*SHORT, "--checkpoint", "kept")
    assert (outcome.code, outcome.err) == (
        2,
        ["error: checkpoint folder kept holds a run at iteration 12: use --resume or another folder"],
    )


def test_with_nothing_to_resume_a_run_starts_at_its_beginning(train_command):
    outcome = train_command(*SHORT, "--checkpoint", "kept", "--resume")
    assert (outcome.code, outcome.err) == (0, ["no checkpoint in kept: the run starts at its beginning"])


def test_another_run_is_refused_with_the_settings_that_differ(train_command, tmp_path):
    assert train_command(*SHORT, "--checkpoint", "kept").code == 0
    outcome = train_command(*SHORT, "--overwrite", "--checkpoint", "kept", "--resume", "--seed", 8, "--clip", 0.1)
    assert outcome.code == 2
    differing = "seed 7 there, 8 here, clip 0.2 there, 0.1 here"
    assert outcome.err == [f"error: checkpoint folder kept holds another run ({differing}): name another folder"]
    outcome = train_command(*SHORT[2:], "--iterations", 11, "--overwrite", "--checkpoint", "kept", "--resume")
    assert outcome.err == ["error: --iterations 11 is too few: the run in kept is at iteration 12"]
    assert iterations_in(tmp_path / "kept") == [12]


def test_a_run_enters_its_checkpoints_itself_and_goes_on_from_them(tmp_path):
    short, config = (Config(iterations=iterations, eval_episodes=20) for iterations in (10, 12))
    loop.run(short, checkpoints=Checkpoints(tmp_path, short, every=2))
    assert iterations_in(tmp_path) == [6, 8, 10]
    first = []
    checkpoints = Checkpoints(tmp_path, config, every=2, resume=True)
    result = loop.run(config, checkpoints=checkpoints, on_chunk=lambda part: first.append(part["iteration"][0]))
    assert first == [0] and iterations_in(tmp_path) == [8, 10, 12]
    np.testing.assert_array_equal(result.logits, loop.run(config).logits)
    with pytest.raises(UserError, match="holds a run at iteration 12: use --resume"):
        loop.run(config, checkpoints=Checkpoints(tmp_path, config))
    with checkpoints, pytest.raises(UserError, match="in use"):
        loop.run(config, checkpoints=Checkpoints(tmp_path, config, resume=True))


def test_checkpoints_of_another_run_are_refused(tmp_path):
    config, other = (Config(seed=seed, iterations=1, eval_episodes=1) for seed in (7, 8))
    for checkpoints in (Checkpoints(tmp_path, other), Checkpoints(tmp_path, config, mesh=make_mesh("data=1"))):
        with pytest.raises(UserError, match=r"for another run \((seed 8 there, 7 here|mesh {.*} there, None here)\)"):
            loop.run(config, checkpoints=checkpoints)
    with pytest.raises(UserError, match="not locked"):
        Checkpoints(tmp_path, config).restore({})
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_deleted_but_older_checkpoints_of_the_run(train_command, tmp_path):
    """Not another run's that was put there, and not a damaged one, which stays under another name."""
    kept = tmp_path / "kept"
    assert train_command(*SHORT, "--seed", 8, "--checkpoint", "other").code == 0
    assert train_command(*SHORT, "--overwrite", "--checkpoint", "kept", "--checkpoint-every", 6).code == 0
    (tmp_path / "other/iteration-000000012").rename(kept / "iteration-000000003")
    flip(kept / "iteration-000000012/run.json")
    damaged = (kept / "iteration-000000012/run.json").read_bytes()
    more = ("--iterations", 14, "--overwrite", "--checkpoint", "kept", "--resume", "--checkpoint-every", 1)
    assert train_command(*SHORT[2:], *more).code == 0
    assert iterations_in(kept) == [3, 12, 13, 14]
    (aside,) = kept.glob("damaged-iteration-000000012-*")
    assert (aside / "run.json").read_bytes() == damaged
    assert checkpoint.read(kept / "iteration-000000003")["config"]["seed"] == 8


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_without_locks_one_line_says_so(train_command, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    outcome = train_command(*SHORT, "--checkpoint", "kept")
    said = "checkpoint folder kept is on a disk without locks: let nobody else use it"
    assert (outcome.code, outcome.err) == (0, [said])


def test_without_the_module_of_locks_too(tmp_path):
    """As on Windows, where it is not there."""
    program = "import sys; sys.modules['fcntl'] = None; from jaxrl_mini.__main__ import main; main()"
    words = ["train", *map(str, SHORT), "--iterations", "1", "--checkpoint", "kept"]
    python = [sys.executable, "-W", "ignore:only soft file lock"]  # what a library of jax would not say on Windows
    done = subprocess.run([*python, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr.endswith("is on a disk without locks: let nobody else use it\n")
    assert len(done.stderr.splitlines()) == 1 and iterations_in(tmp_path / "kept") == [1]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_disk_that_cannot_flush_folders_will_do_but_not_one_that_cannot_flush_files(
    train_command, tmp_path, monkeypatch, code
):
    fsync, of_files = os.fsync, []

    def refusing(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) or of_files:
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    assert train_command(*SHORT, "--checkpoint", "kept", "--save-policy", "policy").code == 0
    grid = Grid.product(range(2), iterations=1, eval_episodes=1)
    assert run_sweep(grid, tmp_path / "sweep").runs().num_rows == 2
    of_files.append(True)
    outcome = train_command(*SHORT, "--seed", 8, "--overwrite", "--checkpoint", "more")
    assert outcome.code == 2 and len(outcome.err) == 1 and os.strerror(code) in outcome.err[0]


def test_a_full_disk_is_one_line(tmp_path):
    """Whatever the library that writes arrays prints in its threads; files are limited here, as a disk would be."""
    program = """if True:
        import resource, sys
        from jaxrl_mini import train
        from jaxrl_mini.machine import arrays, commandline
        write = arrays.write
        def limited(*arguments):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))
            try:
                write(*arguments)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        arrays.write = limited
        commandline.run_command(train.main)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, SHORT), "--checkpoint", "kept"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    expected = "kept/iteration-000000012 could not be written (File too large): earlier ones are as before"
    assert (done.returncode, done.stderr) == (2, f"error: checkpoint {expected}\n")
    assert not (tmp_path / "kept").exists()


def test_a_run_in_several_processes_is_refused(train_command, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    outcome = train_command(*SHORT, "--checkpoint", "kept")
    assert outcome.err == ["error: --checkpoint kept is for a run in one process: leave it out"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--resume",), "--resume has no use without --checkpoint"),
        (("--checkpoint-every", 3), "--checkpoint-every has no use without --checkpoint"),
        (("--checkpoint", "kept", "--checkpoint-every", 0), "--checkpoint-every 0 is out of range: expected"),
        (("--checkpoint", "file"), "checkpoint folder file cannot be used"),
        (("--checkpoint", "file/kept"), "checkpoint folder file/kept cannot be used"),
    ],
)
def test_bad_flags_are_one_line(train_command, tmp_path, arguments, message):
    (tmp_path / "file").write_text("")
    outcome = train_command(*SHORT, *arguments)
    assert outcome.code == 2
    assert len(outcome.err) == 1 and message in outcome.err[0]
    assert not (tmp_path / "r.json").exists()


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def linked(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES = [
    lambda path: os.truncate(path, 10),
    lambda path: path.unlink(),
    linked,
    lambda path: (path.unlink(), path.mkdir()),
]


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(train_command, tmp_path):
    """Whatever file is damaged; the run ends as if nothing had been."""
    assert train_command(*SHORT, "--checkpoint", "kept", "--checkpoint-every", 5).code == 0
    whole = {**json.loads((tmp_path / "r.json").read_text()), "timing": None}
    config = Config(iterations=12, eval_episodes=20)
    place = tmp_path / "kept/iteration-000000012"
    names = [path.relative_to(place) for path in sorted(place.rglob("*")) if path.is_file()]
    assert len(names) > 8
    for name, damage in [*zip(names, itertools.repeat(flip)), *zip(itertools.repeat(names[0]), DAMAGES)]:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "kept", tmp_path / "copy")
        damage(tmp_path / "copy" / place.name / name)
        said = []
        with Checkpoints("copy", config, resume=True, say=said.append) as checkpoints:
            assert checkpoints.newest == 10, (name, damage)
        assert len(said) == 1 and said[0].startswith("damaged: iteration-000000012 (")
    outcome = train_command(*SHORT, "--checkpoint", "copy", "--resume")
    assert outcome.code == 0
    assert outcome.err[0].endswith("in copy; the run goes on from iteration 10") and len(outcome.err) == 1
    assert {**json.loads((tmp_path / "r.json").read_text()), "timing": None} == whole
    assert checkpoint.read(tmp_path / "copy" / place.name)


def test_what_a_checkpoint_is_of_is_read_without_its_arrays(train_command, tmp_path):
    assert train_command(*SHORT, "--checkpoint", "kept").code == 0
    place = tmp_path / "kept/iteration-000000012"
    next((place / checkpoint.ARRAYS).rglob("d/*")).write_bytes(b"")
    wanted = identity.of(Config(iterations=12, eval_episodes=20))
    assert not identity.differences(checkpoint.read(place, whole=False), wanted)
    with pytest.raises(UserError, match="is not as it was written"):
        checkpoint.read(place)
    (place / checkpoint.RUN).write_text((place / checkpoint.RUN).read_text().replace("7", "8"))
    with pytest.raises(UserError, match=r"run.json is not as it was written"):
        checkpoint.read(place, whole=False)


def test_where_all_are_damaged_the_run_is_refused_and_they_stay(train_command, tmp_path):
    assert train_command(*SHORT, "--checkpoint", "kept").code == 0
    flip(tmp_path / "kept/iteration-000000012/run.json")
    outcome = train_command(*SHORT, "--checkpoint", "kept", "--resume")
    assert outcome.code == 2
    assert outcome.err == [
        "error: damaged: iteration-000000012 (run.json is not as it was written) in kept; "
        "there is no other checkpoint: name another folder"
    ]
    assert iterations_in(tmp_path / "kept") == [12]


def test_a_folder_in_use_is_refused(train_command, tmp_path):
    with Checkpoints(tmp_path / "kept", Config()):
        outcome = train_command(*SHORT, "--checkpoint", "kept")
    assert outcome.code == 2
    assert outcome.err == [
        "error: checkpoint folder kept is in use by another process: wait for it or name another folder"
    ]
    assert train_command(*SHORT, "--checkpoint", "kept").code == 0


def signalled(monkeypatch, at, numbers):
    """Makes signals arrive while the iteration `at` is computed."""
    record, left = Block.record, list(numbers)

    def recorded(self, iterations):
        while at in iterations and left:
            signal.raise_signal(left.pop(0))
        return record(self, iterations)

    monkeypatch.setattr(Block, "record", recorded)


@pytest.mark.parametrize("number", signals.NUMBERS)
def test_a_signal_leads_to_a_checkpoint_first(train_command, tmp_path, monkeypatch, number):
    arguments = ("--iterations", 60, "--eval-episodes", 20, "--checkpoint", "kept", "--resume", "--output")
    assert train_command(*arguments[:4], "--output", "plain.json").code == 0
    handlers = [signal.getsignal(each) for each in signals.NUMBERS]
    with monkeypatch.context() as patch:
        signalled(patch, 25, [number])
        outcome = train_command(*arguments, "r.json", "--checkpoint-every", 100)
    assert outcome.code == 128 + number
    assert outcome.err[1:] == [
        "interrupted: 40 iterations are kept in kept; the same command with --resume goes on from there"
    ]
    assert [signal.getsignal(each) for each in signals.NUMBERS] == handlers
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "plain.json"]
    assert train_command(*arguments, "r.json").code == 0
    plain, resumed = (json.loads((tmp_path / name).read_text()) for name in ("plain.json", "r.json"))
    assert {**plain, "timing": None} == {**resumed, "timing": None}


def test_a_signal_that_is_ignored_stays_so(train_command, tmp_path, monkeypatch):
    """As `nohup` has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signalled(monkeypatch, 8, [signal.SIGHUP])
        assert train_command(*SHORT, "--checkpoint", "kept").code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_signal_stops_at_once(train_command, tmp_path, monkeypatch):
    signalled(monkeypatch, 8, [signal.SIGINT, signal.SIGTERM])
    outcome = train_command(*SHORT, "--checkpoint", "kept", "--checkpoint-every", 5)
    assert outcome.code == 143
    assert iterations_in(tmp_path / "kept") == [5]


def test_before_the_first_iteration_there_is_nothing_to_keep(train_command, tmp_path, monkeypatch):
    signalled(monkeypatch, 0, [signal.SIGINT])
    outcome = train_command(*SHORT, "--checkpoint", "kept")
    assert (outcome.code, outcome.err) == (130, ["interrupted: no iteration was kept"])
    assert not (tmp_path / "r.json").exists()


def test_a_disk_that_refuses_leaves_earlier_checkpoints_as_they_were(train_command, tmp_path, monkeypatch):
    flush, calls = checkpoint.flush, []

    def full(path):
        calls.append(path)
        if iterations_in(tmp_path / "kept") == [5] and checkpoint.PART in str(path):
            raise OSError(28, "No space left on device")
        flush(path)

    monkeypatch.setattr(checkpoint, "flush", full)
    outcome = train_command(*SHORT, "--checkpoint", "kept", "--checkpoint-every", 5)
    assert outcome.code == 2 and len(calls) > 10
    assert len(outcome.err) == 1 and "could not be written (No space left on device)" in outcome.err[0]
    assert iterations_in(tmp_path / "kept") == [5]
    assert checkpoint.read(tmp_path / "kept/iteration-000000005")
    assert not list((tmp_path / "kept").glob(".part*"))


def test_a_killed_run_goes_on_until_it_is_done(train_command, tmp_path):
    arguments = ("--iterations", 15, "--eval-episodes", 20, "--output")
    assert train_command(*arguments, "plain.json").code == 0
    kills = killed_and_resumed(tmp_path / "kept", 2, 1, *arguments, tmp_path / "killed.json", "--checkpoint-every", 1)
    assert kills > 0
    plain, killed = (json.loads((tmp_path / name).read_text()) for name in ("plain.json", "killed.json"))
    for record in (plain, killed):
        del record["timing"], record["runtime"]["threads"]  # this process had started jax before
    assert plain == killed


def test_without_checkpoints_orbax_is_not_imported():
    program = "import sys, jaxrl_mini.train, jaxrl_mini.learning.block; sys.exit('orbax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
