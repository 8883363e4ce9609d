"""An advantage of a user's own: in every command, in what they write, and what is refused."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxrl_mini
from jaxrl_mini import estimators, play, replay, report, reproduce, sweep, train
from jaxrl_mini.config import ADVANTAGES, OWN_ADVANTAGES, Config, UserError, Variant
from jaxrl_mini.exact import expected
from jaxrl_mini.learning import loop
from jaxrl_mini.objective import own
from jaxrl_mini.sweeps import engine
from jaxrl_mini.sweeps.dataset import Dataset

SMALL = ("--iterations", "1", "--eval-episodes", "1")
DOUBLE = '''def double(reward, successes, size):
    """Twice the centred reward."""
    return 2.0 * (reward - successes / size)
'''
NAME = "own.py:double@sha256:83484c7f41e4ee13"


@pytest.fixture(autouse=True)
def a_new_process():
    """As one that has loaded no file yet."""
    OWN_ADVANTAGES.clear()
    yield
    OWN_ADVANTAGES.clear()


@pytest.fixture
def double(tmp_path) -> Path:
    (tmp_path / "own.py").write_text(DOUBLE)
    return tmp_path / "own.py"


def refused(outcome, *words: str) -> None:
    assert outcome.code == 2 and len(outcome.err) == 1, outcome
    for word in words:
        assert word in outcome.err[0], outcome.err


# What it does


def test_a_run_with_a_formula_of_ones_own_is_the_run_with_the_same_formula_that_comes_along(command, tmp_path):
    """To the bit: `group-mean` written once more, and the deviation of the whole batch."""
    (tmp_path / "own.py").write_text(
        "def mean(reward, successes, size):\n"
        "    xp = successes.__array_namespace__()\n"
        "    return xp.where(reward > 0, size - successes, -successes) / size\n"
        "def batch(reward, successes, size, batch_successes, batch_size):\n"
        "    rate = batch_successes / batch_size\n"
        "    xp, deviation = rate.__array_namespace__(), (rate * (1 - rate)) ** 0.5\n"
        "    return xp.where(deviation > 0, mean(reward, successes, size) / xp.where(deviation > 0, deviation, 1), 0)\n"
    )
    for mine, theirs, exact in (("mean", "group-mean", 0.0), ("batch", "batch-std", 1e-6)):
        runs = []
        for advantage in (f"own.py:{mine}", theirs):
            done = command(
                train, "--advantage", advantage, *SMALL, "--iterations", 3, "--output", "o.json", "--overwrite"
            )
            assert done.code == 0, done
            runs.append(json.loads(Path("o.json").read_text())["history"])
        for one, other in zip(*runs, strict=True):
            assert one == pytest.approx(other, abs=exact, rel=exact)
        credits = [
            expected.expected_credit(
                jax.numpy.full((24, 6), 1 / 6),
                np.eye(4, dtype=bool),
                group_size=8,
                method="grpo",
                variant=Variant(name),
            )
            for name in (own.load_advantage(f"own.py:{mine}"), theirs)
        ]
        np.testing.assert_allclose(*(one.plus for one in credits), rtol=exact)
    rows = {}
    found = command(estimators, "--advantage", "own.py:batch", "batch-std", "own.py:mean", "group-mean", "--at", 0,
                    "--groups", 2, "--group-size", 3, "--aggregation", "fixed-length", "--output", "e.csv")  # fmt: skip
    assert found.code == 0, found
    for line in found.out:
        policy, success, what, advantage, *figures = line.split()
        rows[advantage.partition("@")[0]] = [policy, success, what, *figures]
    assert rows["own.py:batch"] == rows["batch-std"] and rows["own.py:mean"] == rows["group-mean"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What `train` and `sweep` leave of runs with it."""
    there = tmp_path_factory.mktemp("written")
    (there / "own.py").write_text(DOUBLE)
    advantage, flags = (
        f"{there}/own.py:double",
        ("--trajectories", "o.npz", "--save-policy", "kept", "--checkpoint", "on"),
    )
    outputs = [word if word.startswith("--") else f"{there}/{word}" for word in ("--output", "o.json", *flags)]
    train.main(["--advantage", advantage, *SMALL, *outputs])
    sweep.main(["--advantage", "group-std", advantage, "--seeds", "2", *SMALL, "--output", f"{there}/swept"])
    return there


@pytest.fixture
def written(folder, tmp_path) -> Path:
    """A copy of it."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_what_is_written_names_it_with_its_digest(written):
    record, policy = (json.loads((written / name).read_text())["config"] for name in ("o.json", "kept/policy.json"))
    assert record["advantage"] == policy["advantage"] == NAME
    dataset = Dataset.open(written / "swept")
    assert dataset.runs()["advantage"].to_pylist() == ["group-std"] * 2 + [NAME] * 2
    losses = dataset.history()["loss"].to_pylist()
    assert losses[0] != losses[2] and losses[1] != losses[3]


def test_whoever_names_the_file_goes_on_from_it_and_checks_it(command, written):
    given = ("--advantage", "own.py:double")
    for again in (
        (reproduce, *given, "o.json"),
        (replay, "o.npz", *given),
        (train, *given, *SMALL, "--output", "o.json", "--checkpoint", "on", "--resume"),
        (train, "--advantage", NAME, *SMALL, "--output", "o.json"),  # as a report prints it
    ):
        OWN_ADVANTAGES.clear()
        done = command(*again)
        assert done.code == 0, done


def test_nothing_that_is_written_has_it_imported(command, written):
    (written / "own.py").write_text(f"{DOUBLE}import pathlib; pathlib.Path('imported').touch()\n")
    for read in (
        (play, "kept", "--episodes", 1),
        (reproduce, "--static", "o.json"),
        (sweep, "summary", "swept"),
        (report, "o.json", "o.npz", "swept"),
        (estimators, "--advantage", "rloo", "--policy", "o.npz", "--output", "e.csv"),
    ):
        done = command(*read)
        assert done.code == 0, done
    refused(command(reproduce, "o.json"), f"record o.json needs {NAME}", "--advantage FILE.py:FUNCTION", "--static")
    refused(command(replay, "o.npz"), f"recording o.npz needs {NAME}", "--advantage FILE.py:FUNCTION")
    forged = json.loads(Path("o.json").read_text())
    settings = forged["config"] | {"advantage": "own.py:double"}
    Path("forged.json").write_text(json.dumps(forged | {"config": settings}))
    refused(command(reproduce, "forged.json"), "own.py:double")
    with pytest.raises(UserError, match=f"{NAME} is not here"):
        loop.run(Config.from_dict(forged["config"]))
    assert not Path("imported").exists()


def test_its_digest_must_fit(command, written):
    (written / "own.py").write_text(DOUBLE.replace("2.0", "3.0"))
    refused(command(train, "--advantage", NAME, *SMALL), "own.py was changed")
    given = ("--advantage", "own.py:double")
    refused(command(reproduce, *given, "o.json"), f"needs {NAME}, and own.py:double@sha256:", "is another")
    resumed = command(train, *given, *SMALL, "--checkpoint", "on", "--resume", "--output", "p.json")
    refused(resumed, f"'{NAME}' there, 'own.py:double@sha256:")
    swept = command(sweep, "--advantage", "group-std", "own.py:double", "--seeds", 2, *SMALL, "--output", "swept")
    assert swept.code == 2 and f"advantage group-std {NAME} there, group-std own.py:double@sha256:" in swept.err[-1]
    assert not Path("p.json").exists()


def test_a_file_that_nothing_needs_is_refused_and_so_is_one_of_them_twice(command, written):
    given = ("--advantage", "own.py:double")
    Path("others.py").write_text(DOUBLE)
    assert command(train, *SMALL, "--output", "p.json").code == 0
    refused(command(reproduce, "p.json", *given), f"{NAME} has no use with record p.json, of group-std: leave it out")
    refused(
        command(reproduce, "o.json", *given, "--advantage", "others.py:double"), "others.py:double@sha256:", "no use"
    )
    refused(command(reproduce, "--static", "o.json", *given), "own.py:double has no use with --static")
    refused(command(replay, "o.npz", *given, "--advantage", "rloo"), "rloo has no use with recording o.npz")
    twice = ("--advantage", "own.py:double", f"../{written.name}/own.py:double", "--seeds", 1)
    refused(command(sweep, *twice), f"--advantage {NAME} is listed twice")


def test_a_program_registers_a_function_of_its_own_file_or_of_another(tmp_path):
    """Each in the name of the file it stands in, as `--advantage` names it; and no jax is started to look at it."""
    (tmp_path / "own.py").write_text(DOUBLE)
    (tmp_path / "program.py").write_text(
        "import jaxrl_mini, own\n"
        "from jaxrl_mini.objective.own import load_advantage\n"
        "def sign(reward, successes, size):\n"
        "    return (2 * reward - 1) * ((successes > 0) & (successes < size))\n"
        "names = [jaxrl_mini.register_advantage(one) for one in (own.double, sign)]\n"
        "print(*names, load_advantage('own.py:double'))\n"
        "print(*[jaxrl_mini.Config(advantage=name).advantage == name for name in names])\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "nowhere"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    names, taken = (line.split() for line in done.stdout.splitlines())
    assert names[0] == names[2] == NAME and names[1].startswith("program.py:sign@sha256:")
    assert taken == ["True", "True"]


def nested():
    def inner(reward, successes, size):
        return reward

    return inner


@pytest.mark.parametrize("function", [lambda reward, successes, size: reward, nested(), max])
def test_a_function_without_a_file_and_a_name_of_its_own_is_not_registered(function):
    with pytest.raises(UserError, match="at the top level of a file"):
        jaxrl_mini.register_advantage(function)


def test_no_program_is_kept_that_depends_on_what_the_file_imports(tmp_path):
    """What it imports is not in the name; the next process computes with it as it is then."""
    (tmp_path / "own.py").write_text("from factor import K\ndef f(reward, successes, size):\n    return K * reward\n")
    losses = []
    for factor in (2.0, 3.0):
        (tmp_path / "factor.py").write_text(f"K = {factor}\n")
        words = (
            sys.executable,
            "-B",
            "-m",
            "jaxrl_mini.train",
            "--advantage",
            "own.py:f",
            *SMALL,
            "--output",
            "o.json",
        )
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        record = json.loads((tmp_path / "o.json").read_text())
        losses.append(record["history"][0]["loss"])
    assert losses[1] == pytest.approx(1.5 * losses[0], rel=0.01)


def test_a_function_that_its_file_no_longer_has_is_not_registered(tmp_path, monkeypatch):
    """The digest would be that of another function: the file was changed, or is that of a decorator."""
    wrapper = (
        "import functools\ndef wrapped(f):\n    @functools.wraps(f)\n    def g(*a, **k):\n        return f(*a, **k)\n"
    )
    (tmp_path / "decorators_.py").write_text(wrapper + "    return g\n")
    (tmp_path / "changed_.py").write_text(f"import decorators_\n{DOUBLE}wrapped = decorators_.wrapped(double)\n")
    monkeypatch.syspath_prepend(tmp_path)
    changed = importlib.import_module("changed_")
    assert jaxrl_mini.register_advantage(changed.double).startswith("changed_.py:double@sha256:")
    with pytest.raises(UserError, match=r"double is not as .*decorators_.py has it"):
        jaxrl_mini.register_advantage(changed.wrapped)
    for text in (DOUBLE.replace("2.0", "3.0"), "x = ("):
        (tmp_path / "changed_.py").write_text(text)
        with pytest.raises(UserError, match=r"double is not as .*changed_.py has it: import it again"):
            jaxrl_mini.register_advantage(changed.double)


def test_a_worker_on_another_machine_gets_the_function_and_not_its_file(written):
    """What a Ray task is given is all that a process needs that has loaded nothing."""
    own.load_advantage(f"{written}/own.py:double")
    sent = dict(OWN_ADVANTAGES)
    OWN_ADVANTAGES.clear()
    (written / "own.py").unlink()
    part = written / "swept/runs/000001.parquet"
    whole = part.read_bytes()
    part.unlink()
    engine._compute_remotely(str(written / "swept"), 1, sent)
    assert part.read_bytes() == whole


# What is refused

BAD = {
    "raises": ("return 1 / 0", "raises ZeroDivisionError (division by zero) in line 2 of own.py"),
    "a part of the counts": ("return reward if successes else 0.0", "raises ValueError (The truth value", "in line 2"),
    "an unknown name": ("return nothing", "raises NameError (name 'nothing' is not defined) in line 2 of own.py"),
    "nan": ("return (reward - successes / size) / successes", "gives nan for reward 0 with 0 successes among 8"),
    "inf": ("return size / (size - successes)", "gives inf for reward 0 with 8 successes among 8"),
    "past float32 on the way": ("return successes * 1e30 * successes * 1e30 * 1e-60", "gives nan for reward 0 with 1",
                                "among 8 in float32"),
    "ragged": ("return [[1.0], [1.0, 2.0]]", "gives list for 9 groups"),
    "past float32": ("return 1e39 * successes", "gives 1e+39 for reward 0 with 1 successes among 8"),
    "another shape": ("return successes[None]", "gives float64 [1, 9] for 9 groups"),
    "one of many": ("return successes[:1]", "gives float64 [1] for 9 groups"),
    "nothing": ("pass", "gives NoneType for 9 groups"),
    "words": ("return 'much'", "gives str for 9 groups"),
    "chance": ("import random; return random.random() * successes", "gives other numbers when it is asked again"),
    "a mean over groups": ("return reward - successes.mean() / size", "beside other groups"),
    "its arguments changed": ("successes /= size; return reward - successes", "raises ValueError", "read-only"),
    "numpy alone": ("import numpy; return numpy.sqrt(successes)", "raises TracerArrayConversionError",
                    "on JAX arrays: take xp"),
    "jax alone": ("import jax.numpy; return jax.numpy.sqrt(successes)", "gives a JAX array for NumPy arrays: take xp"),
    "an exit": ("raise SystemExit('enough')", "raises SystemExit (enough) in line 2 of own.py"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_function_is_one_line_before_anything_is_computed_or_written(command, tmp_path, monkeypatch, name):
    body, *words = BAD[name]
    (tmp_path / "own.py").write_text(f"def f(reward, successes, size):\n    {body}\n")
    monkeypatch.setattr(loop, "run", None)
    for module, more in ((train, ()), (sweep, ("--seeds", 1)), (estimators, ())):
        refused(command(module, "--advantage", "own.py:f", *more), "error: --advantage own.py:f ", *words)
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


@pytest.mark.parametrize(
    ("text", "source", "words"),
    [
        ("none.py:f", "", ["none.py cannot be read (No such file or directory)"]),
        (".py:f", "", [".py cannot be read"]),
        ("own.py:f", "x = (", ["own.py:f raises SyntaxError ('(' was never closed) in line 1 of own.py"]),
        ("own.py:f", "\n1 / 0\n", ["raises ZeroDivisionError (division by zero) in line 2 of own.py"]),
        ("own.py:f", "\0", ["raises"]),
        ("own.py:f", "import nowhere", ["raises ModuleNotFoundError (No module named 'nowhere') in line 1 of own.py"]),
        ("own.py:g", DOUBLE, ["own.py has no function 'g': expected one of double"]),
        ("own.py:f", "f = 3", ["own.py has no function 'f': expected one that the file defines"]),
        ("own.py:f g", DOUBLE, ["'own.py:f g' is no name", "letters, digits"]),
        ("own.py:", DOUBLE, ["'own.py:' is no name"]),
        ("own.py:double@sha256:1", DOUBLE, ["own.py was changed, it is sha256:83484c7f41e4ee13 now"]),
        ("own.py:f", "def f(reward, successes): pass", ["own.py:f takes (reward, successes): expected (reward, succ"]),
        ("own.py:f", "def f(k, n, r): pass", ["own.py:f takes (k, n, r): expected"]),
        ("own.py:f", "def f(reward, successes, size, epsilon): pass", ["takes (reward, successes, size, epsilon)"]),
        ("own.py:f", "f = min", ["own.py:f"]),
        ("own.py:f", "async def f(reward, successes, size): pass", ["own.py:f is async"]),
    ],
)
def test_a_file_that_holds_no_advantage_is_one_line(command, tmp_path, text, source, words):
    (tmp_path / "own.py").write_text(source)
    for module, more in ((train, ()), (sweep, ("--seeds", 1)), (estimators, ()), (reproduce, ("o.json",))):
        refused(command(module, "--advantage", text, *more), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


def test_the_size_of_the_group_and_the_batch_decide_what_is_finite(command, tmp_path):
    (tmp_path / "own.py").write_text(
        "def sized(reward, successes, size):\n    return successes / (size - 5)\n"
        "def batched(reward, successes, size, batch_successes):\n    return 1 / (batch_successes - 14)\n"
    )
    name = own.load_advantage(str(tmp_path / "own.py:sized"))
    assert Config(advantage=name, group_size=4).advantage == name
    with pytest.raises(UserError, match="gives nan for reward 0 with 0 successes among 5"):
        Config(advantage=name, group_size=5)
    refused(command(sweep, "--advantage", "own.py:sized", "--group-size", 4, 5, "--seeds", 1), "among 5")
    name = own.load_advantage(str(tmp_path / "own.py:batched"))
    assert Config(advantage=name, groups=1).advantage == name
    with pytest.raises(UserError, match="with 2 successes among 8, 14 among the 32 of the batch"):
        Config(advantage=name)
    (tmp_path / "own.py").write_text(
        "def f(reward, successes, size, batch_successes):\n    return batch_successes**4\n"
    )
    name = own.load_advantage(str(tmp_path / "own.py:f"))
    assert Config(advantage=name).advantage == name
    with pytest.raises(UserError, match=r"e.44 for reward 0 with 1 successes among 8, 137438953472 among the 1099"):
        Config(advantage=name, exact_gradient=True)  # of expectations, as of infinitely many groups


def test_help_names_the_form_everywhere(command):
    for module in (train, sweep, estimators, reproduce, replay):
        assert "FILE.py:FUNCTION" in " ".join(command(module, "--help").out), module


def test_numbers_and_arrays_of_any_kind_are_taken(double):
    name = own.load_advantage(str(double).replace("own.py", "own.py:double"))
    formula = OWN_ADVANTAGES[name]
    assert formula(reward=1.0, successes=2.0, size=8) == 1.5
    assert formula(reward=0.0, successes=np.float32(2), size=8).dtype == np.float32
    for name, built_in in ADVANTAGES.items():
        batch = {"batch_successes": 5, "batch_size": 32} if name == "batch-std" else {}
        found = [float(built_in(1.0, kind(3), 8, **batch)) for kind in (int, float, np.float64, np.float32, np.asarray)]
        assert np.isfinite(found).all() and found == pytest.approx([found[0]] * 5, rel=1e-6), name


def test_settings_of_jax_in_a_users_process_or_environment_change_nothing(tmp_path):
    (tmp_path / "own.py").write_text(
        "def f(reward, successes, size, batch_successes, batch_size):\n"
        "    return (2 * reward - 1) * (successes > 0) * batch_successes / batch_size\n"
    )
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        name = own.load_advantage(f"{tmp_path}/own.py:f")
        losses = loop.run(Config(advantage=name, iterations=1, eval_episodes=1)).history["loss"]
    assert np.isfinite(losses).all()
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_mini.train", "--advantage", "own.py:f"],
        cwd=tmp_path, env={**os.environ, "JAX_ENABLE_X64": "banana"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "environment variable of jax is out of range: invalid truth value 'banana'" in done.stderr
