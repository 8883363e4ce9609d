"""What commands write: what may be replaced, what is kept when it may not, and that nothing else keeps it from disk."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from jaxrl_mini import estimators, report, sweep, tiny_model, train
from jaxrl_mini.config import Config, UserError
from jaxrl_mini.learning import loop
from jaxrl_mini.machine import commandline, files, runtime
from jaxrl_mini.policies import folders, saved
from jaxrl_mini.policies.pretrained import load_checkpoint
from jaxrl_mini.runs import recording, records
from jaxrl_mini.sweeps.engine import run_sweep
from jaxrl_mini.sweeps.grid import Grid

SHORT = ("--iterations", 1, "--eval-episodes", 1)
ALL = ("--output", "r.json", "--trajectories", "t.npz", "--save-policy", "p")


def seeds() -> tuple[int, ...]:
    """Of what stands in the three outputs, and of what is kept beside them."""
    found = [json.loads(Path("r.json").read_text())["config"]["seed"], recording_seed("t.npz")]
    return *found, saved.load_table("p")[1].seed


def recording_seed(path: str) -> int:
    with np.load(path) as arrays:
        return json.loads(str(arrays["config"]))["seed"]


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def meanwhile(monkeypatch, train_command):
    """Has the next run, while it computes, wait for another one with these arguments to write its outputs."""

    def plan(*arguments):
        run = loop.run

        def first_another(config, **options):
            monkeypatch.setattr(loop, "run", run)
            result = run(config, **options)
            with pytest.raises(SystemExit) as ending:
                commandline.run_command(train.main, [str(word) for word in arguments])
            assert not ending.value.code
            return result

        monkeypatch.setattr(loop, "run", first_another)

    return plan


# Whose output it is


def test_of_three_runs_with_one_output_one_has_it_and_the_others_are_told(tmp_path):
    command = [sys.executable, "-m", "jaxrl_mini.train", *map(str, SHORT), "--output", "same.json", "--lr"]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    runs = [subprocess.Popen([*command, rate], **options) for rate in ("0.04", "0.08", "0.16")]
    said = [run.communicate()[1].splitlines() for run in runs]
    codes = [run.returncode for run in runs]
    assert sorted(codes) == [0, 2, 2], said
    assert [len(lines) for lines in said] == [0 if code == 0 else 1 for code in codes]
    assert all("same.json holds another run (lr 0." in line for lines in said for line in lines)
    kept = [records.read(path)["config"]["lr"] for path in tmp_path.glob("*.json")]
    assert len(set(kept)) == len(kept) == 1 + sum("see same-kept-" in line for lines in said for line in lines)


@pytest.mark.parametrize("before", ["nothing", "overwritten"])
def test_what_another_run_writes_meanwhile_stays_and_ones_own_is_kept_and_named(
    train_command, meanwhile, tmp_path, before
):
    words = [*SHORT, *ALL]
    if before == "overwritten":
        assert train_command(*words, "--seed", 1).code == 0
        words.append("--overwrite")
    meanwhile(*words, "--seed", 2)
    outcome = train_command(*words, "--seed", 3)
    assert outcome.code == 2 and len(outcome.err) == 3
    for line, name, kept in zip(
        outcome.err, ("r.json", "t.npz", "'p'"), ("r-kept-1.json", "t-kept-1.npz", "p-kept-1"), strict=True
    ):
        assert name in line and "meanwhile" in line and kept in line
    assert json.loads(outcome.out[-1])["output"] is None
    assert seeds() == (2, 2, 2)
    assert records.read("r-kept-1.json")["config"]["seed"] == recording_seed("t-kept-1.npz") == 3
    assert saved.load_table("p-kept-1")[1].seed == 3
    assert visible(tmp_path) == {"r.json", "t.npz", "p", "r-kept-1.json", "t-kept-1.npz", "p-kept-1"}


def test_the_same_run_meanwhile_is_no_conflict(train_command, meanwhile, tmp_path):
    meanwhile(*SHORT, *ALL)
    assert train_command(*SHORT, *ALL).code == 0
    assert visible(tmp_path) == {"r.json", "t.npz", "p"}


def test_the_same_settings_replace_their_outputs_and_others_do_not(train_command, tmp_path):
    """So a job's script may say the same twice, and with --resume."""
    for words in ([], [], ["--checkpoint", "kept", "--resume"], ["--checkpoint", "kept", "--resume"]):
        assert train_command(*SHORT, *ALL, *words).code == 0
    for flag, place in zip(ALL[::2], ALL[1::2], strict=True):
        outcome = train_command(*SHORT, "--seed", 8, "--output", "new.json", flag, place)
        assert outcome.code == 2 and len(outcome.err) == 1 and place in outcome.err[0]
    assert seeds() == (7, 7, 7) and not Path("new.json").exists()
    assert train_command(*SHORT, *ALL, "--seed", 8, "--overwrite").code == 0 and seeds() == (8, 8, 8)


def test_a_file_of_ones_own_in_a_policys_folder_stays(train_command):
    assert train_command(*SHORT, *ALL).code == 0
    Path("p/thesis.txt").touch()
    assert train_command(*SHORT, *ALL).code == 2 and Path("p/thesis.txt").exists()


def test_the_same_language_model_is_saved_and_made_again(train_command, command, monkeypatch, grpo_run):
    words = ["--backend", "hf", "--iterations", 3, "--save-policy", "p"]
    assert command(tiny_model, "m", "--layers", 1, "--width", 8).code == 0
    trained = dataclasses.replace(grpo_run, logits=None, checkpoint=load_checkpoint("m"))
    monkeypatch.setattr(loop, "run", lambda config, **_: dataclasses.replace(trained, config=config))
    for folder in ("m", "./m/"):
        assert train_command(*words, "--model", folder).code == 0
    assert [path.name for path in Path("runs").iterdir()] == ["hf-grpo-m-iterations-3-seed-7.json"]
    assert train_command(*words, "--model", "m", "--lr", 1e-3).code == 2
    assert command(tiny_model, "m", "--layers", 1, "--width", 8).code == 0
    assert command(tiny_model, "m", "--layers", 1, "--width", 8, "--seed", 1).code == 2


def test_default_outputs_are_named_by_the_settings_that_are_not_the_defaults():
    def name(**settings):
        return train.default_output(Config(**settings)).removeprefix("runs/").removesuffix(".json")

    assert name() == "table-grpo-seed-7"
    assert name(lr=0.04, seed=3) == "table-grpo-lr-0.04-seed-3"
    assert name(exact_gradient=True, reward="noisy:0.2") == "table-grpo-exact-gradient-reward-noisy-0.2-seed-7"
    assert name(backend="hf", model="a/tiny-gpt2/", lr=1e-3) == "hf-grpo-tiny-gpt2-lr-0.001-seed-7"
    odd = {name(backend="hf", model=model, seed=2**32 - 1) for model in ("x" * 300, "x" * 299, "ä b", "é\nb", "..")}
    assert len(odd) == 5 and all(len(one) <= 120 and one.isascii() and not set(one) & set("/ \n") for one in odd)
    assert all(one.endswith("-seed-4294967295") for one in odd)


# Whatever fails, the rest is written


def test_a_recording_and_a_policy_that_fail_do_not_cost_the_record(train_command, monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    outcome = train_command(*SHORT, *ALL)
    assert outcome.code == 2 and len(outcome.err) == 2 and json.loads(outcome.out[-1])["output"] == "r.json"
    assert "t.npz" in outcome.err[0] and "'p'" in outcome.err[1]
    assert all("No space left on device" in line for line in outcome.err)
    assert records.read("r.json")["config"]["seed"] == 7 and visible(tmp_path) == {"r.json"}


def test_an_interruption_while_writing_says_what_is_written(train_command, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(recording, "write", interrupted)
    outcome = train_command(*SHORT, *ALL)
    assert (outcome.code, outcome.err) == (130, ["interrupted: written so far: the record"])
    assert Path("r.json").exists()


# Links, and what is no file


def test_what_a_link_names_is_written_and_the_link_stays(train_command, tmp_path):
    for name in ("r.json", "t.npz", "p"):
        Path(name).symlink_to(f"there/{name}")
    Path("there/p").mkdir(parents=True)
    for _ in range(2):
        assert train_command(*SHORT, *ALL).code == 0
        assert all(Path(name).is_symlink() for name in ("r.json", "t.npz", "p")) and seeds() == (7, 7, 7)
    assert visible(tmp_path / "there") == {"r.json", "t.npz", "p"}
    assert train_command(*SHORT, *ALL, "--seed", 8).code == 2 and seeds() == (7, 7, 7)


OUTPUTS = [
    (train, ["--output"]), (train, ["--trajectories"]), (train, ["--save-policy"]), (train, ["--checkpoint"]),
    (sweep, ["--seeds", "1", "--output"]), (report, ["x", "--output"]), (report, ["x", "--figures"]),
    (estimators, ["--output"]), (estimators, ["--plot"]), (tiny_model, []),
]  # fmt: skip


@pytest.mark.parametrize(("module", "words"), OUTPUTS)
def test_a_dash_is_no_output(command, tmp_path, module, words):
    outcome = command(module, *words, "-")
    assert outcome.code == 2 and len(outcome.err) == 1 and "'-'" in outcome.err[0] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("output", ["printed", "/dev/stdout"])
def test_a_record_does_not_go_where_the_command_prints(tmp_path, output):
    code = "import sys; from jaxrl_mini.machine import files; files.Output(sys.argv[1], overwrite=True)"
    with (tmp_path / "printed").open("w") as printed:
        command = [sys.executable, "-c", code, output]
        done = subprocess.run(command, stdout=printed, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert f"output {output} is where this command prints" in done.stderr and visible(tmp_path) == {"printed"}


# Files of the other commands


def test_estimators_replaces_its_own_files_alone(command, tmp_path):
    words = ["--at", 0, "--advantage", "rloo", "--aggregation", "fixed-length"]
    for ending, picture in ((".csv", ".svg"), (".parquet", ".png"), (".parquet", ".pdf")):
        outputs = ["--output", f"e{ending}", "--plot", f"e{picture}"]
        for _ in range(2):
            assert command(estimators, *words, *outputs).code == 0
        for name in (f"e{ending}", f"e{picture}"):
            written = Path(name).read_bytes()
            Path(name).write_text("thesis")
            outcome = command(estimators, *words, *outputs)
            assert outcome.code == 2 and name in outcome.err[0] and "--overwrite" in outcome.err[0]
            assert Path(name).read_text() == "thesis"
            Path(name).write_bytes(written)
    Path("e.csv").write_text("thesis")
    assert command(estimators, *words, "--output", "e.csv", "--overwrite").code == 0
    assert Path("e.csv").read_text() != "thesis"


def test_a_page_that_another_process_writes_meanwhile_stays(command, tmp_path, monkeypatch, grpo_run):
    with files.Output("run.json") as output:
        records.write(records.build(grpo_run), output)
    from jaxrl_mini.pages import page

    render = page.render
    for text in (report.MARK.decode(), "thesis"):

        def rendered(*sources, text=text):
            Path("report.html").write_text(text)
            return render(*sources)

        monkeypatch.setattr(page, "render", rendered)
        Path("report.html").unlink(missing_ok=True)
        outcome = command(report, "run.json")
        assert outcome.code == 2 and len(outcome.err) == 1 and "report-kept-" in outcome.err[0]
        assert Path("report.html").read_text() == text
    assert visible(tmp_path) == {"run.json", "report.html", "report-kept-1.html", "report-kept-2.html"}


# Whose they are


@pytest.mark.parametrize(("umask", "folder", "file"), [(0o077, 0o700, 0o600), (0o027, 0o750, 0o640)])
def test_permissions_are_those_of_the_umask_and_the_group_that_of_the_folder(
    train_command, tmp_path, umask, folder, file
):
    tmp_path.chmod(0o2777)
    groups = [group for group in (os.getgroups() if os.geteuid() else [12345]) if group != os.getegid()]
    if groups:
        os.chown(tmp_path, -1, groups[0])
    before = os.umask(umask)
    try:
        assert train_command(*SHORT, *ALL).code == 0
    finally:
        os.umask(before)
    group = tmp_path.stat().st_gid
    for path in (Path("p"), Path("r.json"), Path("t.npz"), *Path("p").iterdir()):
        about = path.stat()
        assert stat.S_IMODE(about.st_mode) & 0o777 == (folder if path.is_dir() else file), path
        assert about.st_gid == group, path
    assert Path("p").stat().st_mode & stat.S_ISGID


def test_the_commit_in_a_record_is_that_of_the_beginning(train_command, monkeypatch):
    commits, run = ["beginning"], loop.run
    monkeypatch.setattr(runtime, "_git_state", lambda: {"git_commit": commits[-1], "git_dirty": False})
    monkeypatch.setattr(loop, "run", lambda config, **options: (run(config, **options), commits.append("end"))[0])
    assert train_command(*SHORT, "--output", "r.json").code == 0
    assert records.read("r.json")["runtime"]["git_commit"] == "beginning"


def test_a_sweep_from_python_leaves_jax_as_it_is(tmp_path, monkeypatch):
    import jax

    for value in (True, False):
        monkeypatch.setitem(os.environ, "NPROC", "3")
        jax.config.update("jax_cpu_enable_async_dispatch", value)
        run_sweep(Grid.product(range(2), iterations=1, eval_episodes=1), tmp_path / str(value))
        assert jax.config.values["jax_cpu_enable_async_dispatch"] is value


# The names themselves


def test_a_link_that_appears_meanwhile_stays(tmp_path):
    with files.Output(tmp_path / "x") as output:
        (tmp_path / "x").symlink_to("nowhere")
        with pytest.raises(UserError, match="x-kept-1"):
            output.commit(lambda file: file.write(b"1"))
    assert (tmp_path / "x").is_symlink() and (tmp_path / "x-kept-1").read_bytes() == b"1"


def test_a_lock_that_someone_holds_delays_and_does_not_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0.05)
    with files.alone_in(tmp_path), files.Output(tmp_path / "x") as output:
        started = time.monotonic()
        output.commit(lambda file: file.write(b"1"))
    assert (tmp_path / "x").read_bytes() == b"1" and time.monotonic() - started < 5


def test_a_policys_place_is_looked_at_again_when_it_is_filled(tmp_path):
    place = saved.destination(tmp_path / "p", Config())
    (tmp_path / "p").write_text("thesis")
    with pytest.raises(UserError, match="p-kept-1"):
        saved.write_table(place, np.zeros((24, 6)))
    assert (tmp_path / "p").read_text() == "thesis" and saved.load_table(tmp_path / "p-kept-1")
    assert folders.TABLE in visible(tmp_path / "p-kept-1") and visible(tmp_path) == {"p", "p-kept-1"}
