"""Whatever is in a file or a flag: one line and nothing written, or the right result."""

import contextlib
import errno
import io
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import damage
import hostile
import jaxtyping
import numpy as np
import pytest
from hostile import READERS, one_line, watched

from jaxrl_mini import estimators, play, replay, report, reproduce, sweep, tiny_model, train
from jaxrl_mini.config import Config, UserError
from jaxrl_mini.exact import bias  # fmt: skip
from jaxrl_mini.learning import checkpoint, loop
from jaxrl_mini.machine import commandline
from jaxrl_mini.pages import page
from jaxrl_mini.policies import saved
from jaxrl_mini.runs import player, replaying
from jaxrl_mini.sweeps import engine, statistics

EXAMPLES, FIRST = (
    int(os.environ.get(name, default)) for name, default in (("HOSTILE_EXAMPLES", 800), ("HOSTILE_FIRST", 0))
)
"""Cases of each test, and the first of their seeds; `make test-all` asks for more, `python -m benchmarks.hostile` for
others."""


def cases(share: int = 1) -> Iterator[random.Random]:
    """Random numbers for each case."""
    for seed in range(FIRST, FIRST + EXAMPLES // share):
        draw = random.Random(seed)
        draw.seed_of_the_case = seed
        yield draw


@contextlib.contextmanager
def named(draw: random.Random) -> Iterator[None]:
    """What fails in it is said to have failed in this case."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case {draw.seed_of_the_case}")
        raise


@pytest.fixture(autouse=True)
def no_type_checks(monkeypatch):
    """Tests check annotations; a user's process does not, and there the package's own checks must do."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Makes an intact folder of a reader, in a new one, and returns the file to be damaged."""
    return lambda name: READERS[name].place(tmp_path_factory.mktemp("hostile"))


def outcome(reader, path: Path) -> str:
    """Reads; anything but a right result or one line is an error here. Says which it was."""
    root = str(path.parents[1])
    with watched() as events:
        try:
            reader.read(path)
            said = "read"
        except UserError as error:
            assert one_line(error), str(error)
            said = str(error)
        except BaseException as error:
            error.add_note(f"while reading {path}")
            raise
    inside = [event for event in events if event[1].startswith(root) or event[0] in hostile.FORBIDDEN]
    whole = [folder for folder in path.parents if folder.name.startswith(checkpoint.NAME)]
    own = path.parents[1] if path.suffix == ".parquet" else [path.parent, *whole][-1]
    assert all(event == "read" and file.startswith(str(own)) for event, file in inside), inside
    return said


@pytest.mark.parametrize("name", READERS)
def test_what_is_intact_is_read(place, name):
    assert outcome(READERS[name], place(name)) == "read"


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_refused_in_one_line_or_read_rightly(place, name):
    reader, path = READERS[name], place(name)
    intact, refused = path.read_bytes(), 0

    for draw in cases(reader.of):
        with named(draw):
            path.write_bytes(hostile.damaged(reader, intact, draw))
            refused += outcome(reader, path) != "read"
    assert refused > EXAMPLES / reader.of / 4
    assert not (path.parent / "exploded").exists() and not Path("exploded").exists()


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("how", ["missing", "empty", "folder", "pipe", "device", "loop", "dangling", "deep", "denied"])
def test_what_is_no_such_file_is_refused_and_nothing_waits(place, monkeypatch, name, how):
    reader, path = READERS[name], place(name)
    path.unlink()
    if how == "empty":
        path.touch()
    elif how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "device":
        path.symlink_to("/dev/zero")
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "dangling":
        path.symlink_to("nowhere")
    elif how == "deep":
        path.write_text(damage.DEEP)
    elif how == "denied":
        path.touch()
        opened = os.open

        def denied(file, *arguments, **options):
            if os.fspath(file) == str(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return opened(file, *arguments, **options)

        monkeypatch.setattr(os, "open", denied)
    if name in ("runs", "history") and how in ("missing", "dangling", "loop"):
        assert outcome(reader, path) == "read"  # a part that is not there is still to be computed
    elif name == "tokenizer_config" and how in ("missing", "folder", "pipe", "device", "loop", "dangling"):
        assert outcome(reader, path) in ("read", outcome(reader, path))  # it is optional
    else:
        assert outcome(reader, path) != "read"


@pytest.mark.parametrize("name", READERS)
def test_a_link_to_an_intact_file_is_followed(place, name):
    reader, path = READERS[name], place(name)
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    assert (outcome(reader, path) == "read") != name.startswith("checkpoint")  # which holds none


CORPUS = sorted((Path(__file__).parent / "corpus").glob("*/*"))


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: f"{file.parent.name}/{file.name[:8]}")
def test_what_fuzzing_found_worth_keeping_is_refused_or_read(place, file):
    reader, path = READERS[file.parent.name], place(file.parent.name)
    shutil.copyfile(file, path)
    outcome(reader, path)


def test_any_config_from_a_record_is_refused_or_taken_as_it_is():
    refused = 0
    for draw in cases():
        with named(draw):
            intact = draw.choice([Config(), Config(backend="hf", model="folder", micro_batch=2)]).to_dict()
            data = json.loads(damage.json_damage(draw, json.dumps(intact).encode()))
            if not isinstance(data, dict):
                continue
            try:
                config = Config.from_dict(data)
            except UserError as error:
                assert one_line(error)
                refused += 1
            else:
                assert {**data, "effective_lr": config.effective_lr} == config.to_dict()
    assert refused > EXAMPLES / 4


# Flags


class Ran(BaseException):
    """A command got as far as computing."""


def ran(*_, **__):
    raise Ran


WORDS = [
    *(text for text in damage.TEXTS if "\0" not in text and ".." not in text),
    *(str(number) for number in damage.NUMBERS if not number > 10**39),
    *("1e-12", "0x10", "1_0", "٣", "--", "-", "-1e5", "9" * 5000, "1:", "5:9", "0:4294967296", "2/3", "a/b", "word"),
]
PATHS = ["", ".", "..", "/", "x", "a/b/c", "file", "file/x", "folder", "loop", "loop/x", "link", "x" * 300, "/dev/null"]
PATHS += ["/proc/x", "\udcff", "\n", "pipe", "whole", "whole", "whole"]
COUNTS = ["1", "2", "3", "8", "0", "-1", "2147483647", "2147483648", "1048576"]
FLOATS = ["0.5", "0.08", "1e39", "1e-60", "nan", "inf", "-inf", "0", "1", "1e-12", "0.99999999999"]
ADVANTAGE = {"--advantage": ["rloo", "ppo", "none.py:f", "none.py:f@sha256:0", "folder.py:", ".py:f"]}
CONFIG = {
    "--backend": ["table", "hf", "HF"],
    "--method": ["grpo", "rs-sft", "ppo"],
    "--model": PATHS,
    **dict.fromkeys(
        ["--iterations", "--groups", "--group-size", "--epochs", "--eval-episodes", "--micro-batch"], COUNTS
    ),
    "--exact-every": COUNTS,
    **ADVANTAGE,
    **dict.fromkeys(["--lr", "--clip", "--beta"], FLOATS),
    "--dtype": ["float32", "bfloat16", "float64"],
    "--device": ["cpu", "abacus"],
}
TRAIN = {"--seed": COUNTS, "--output": PATHS, "--trajectories": PATHS, "--save-policy": PATHS, "--overwrite": []}
TRAIN |= {"--checkpoint": PATHS, "--checkpoint-every": COUNTS, "--resume": []}
SWEEP = {"--seeds": WORDS, "--history-every": COUNTS, "--output": PATHS, "--shard": WORDS, "--dry-run": []}
SWEEP |= {"--address": WORDS, "--engine": ["local", "here"]}
TINY = dict.fromkeys(["--layers", "--width", "--heads", "--seed"], COUNTS) | {"--warm-start": [], "--overwrite": []}
ESTIMATORS = ADVANTAGE | {"--aggregation": ["step-mean", "mean"], "--reward": WORDS, "--at": COUNTS}
ESTIMATORS |= dict.fromkeys(["--groups", "--group-size", "--seed"], COUNTS) | {"--step": FLOATS}
ESTIMATORS |= {flag: [*PATHS, "x.csv", "folder/x.svg", "file/x.png"] for flag in ("--policy", "--output", "--plot")}
COMMANDS = {
    "train": (train, CONFIG | TRAIN, []),
    "sweep": (sweep, CONFIG | SWEEP, ["--seeds", "5"]),
    "summary": (sweep, {"--json": [], "": PATHS}, ["summary"]),
    "replay": (replay, ADVANTAGE | {"--tolerance": FLOATS, "": PATHS, "--device": CONFIG["--device"]}, []),
    "tiny_model": (tiny_model, TINY | {"--tokenizer": ["word", "bpe", "x"], "": PATHS}, []),
    "play": (
        play,
        {"--episodes": COUNTS, "--human": [], "--seed": COUNTS, "": PATHS, "--device": CONFIG["--device"]},
        [],
    ),
    "reproduce": (reproduce, ADVANTAGE | {"--static": [], "": PATHS, "--device": CONFIG["--device"]}, []),
    "report": (report, {"--output": PATHS, "--figures": PATHS, "--overwrite": [], "": PATHS}, []),
    "estimators": (estimators, ESTIMATORS, []),
}
"""A command's module, its flags (an argument has none) with values, and the words that its line begins with."""


def arguments(draw: random.Random, flags: dict[str, list[str]], first: list[str]) -> list[str]:
    """Some flags of a command with values that fit them or not, some of them twice, some without their value."""
    words = list(first)
    for name in draw.choices([*flags], k=draw.randrange(5)):
        words += [name] if name else []
        if flags[name] and draw.randrange(30):
            words.append(draw.choice(draw.choice([flags[name], flags[name], WORDS])))
    return words


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", COMMANDS)
def test_any_flags_are_refused_in_one_line_with_nothing_written_or_reach_the_computation(tmp_path, monkeypatch, name):
    module, flags, first = COMMANDS[name]
    for target, function in (
        (loop, "run"), (engine, "run_sweep"), (replaying, "replay_errors"), (tiny_model, "make_tiny_model"),
        (statistics, "summarize"), (play, "play"), (player.TablePlayer, "evaluate"), (page, "render"), (bias, "judge"),
    ):  # fmt: skip
        monkeypatch.setattr(target, function, ran)
    work = tmp_path / "work"
    (work / "folder").mkdir(parents=True)
    if name == "summary":
        hostile.sweep(work / "whole")
    elif name == "play":
        saved.save_table(work / "whole", np.zeros((24, 6), np.float32), Config())
    elif name in ("reproduce", "report"):
        shutil.copy(Path(__file__).parents[1] / "results/grpo-seed-7.json", work / "whole")
    elif name == "replay":
        (work / "whole").write_bytes(damage.npz(damage.recorded()))
    (work / "file").write_text("thesis")
    (work / "loop").symlink_to("loop")
    (work / "link").symlink_to("file")
    os.mkfifo(work / "pipe")
    monkeypatch.chdir(work)
    before, codes, cache = listing(tmp_path), [], os.environ["JAX_COMPILATION_CACHE_DIR"]

    for draw in cases():
        with named(draw):
            words = arguments(draw, flags, first)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), watched() as events:
                try:
                    commandline.run_command(module.main, words)
                except SystemExit as ending:
                    code = ending.code or 0
                except Ran:
                    code = -1
            codes.append(code)
            notes = {"train": ("no checkpoint in ", "this takes about "), "sweep": (" compilation",)}.get(name, ())
            said = [line for line in err.getvalue().splitlines() if not any(note in line for note in notes)]
            ended = (code, out.getvalue(), len(said))
            assert ended == (2, "", 1) or (code in (0, -1) and not said), (*ended, said, words)
            changed = [os.path.realpath(path) for event, path in events if event not in ("read", *hostile.FORBIDDEN)]
            assert all(
                path.startswith((str(tmp_path), "/dev/null", "/proc", f"/{checkpoint.LOCK}", cache)) for path in changed
            ), changed
            assert not [event for event in events if event[0] in hostile.FORBIDDEN]
            assert not changed or listing(tmp_path) == before, words
    assert listing(tmp_path) == before and (work / "file").read_text() == "thesis"
    assert codes.count(2) > EXAMPLES / 4 and codes.count(-1) + codes.count(0) > 0
