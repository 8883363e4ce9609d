"""What is installed: the console command, the version, the citation, the wheel and the source distribution."""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import jaxrl_mini
from jaxrl_mini import __main__ as console
from jaxrl_mini import train

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def process(*arguments, folder=None) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=folder)


# The console command


def test_the_console_command_runs_our_main():
    module, _, name = PROJECT["scripts"]["jaxrl-mini"].partition(":")
    assert getattr(importlib.import_module(module), name) is console.main


def test_every_module_that_is_a_command_is_a_subcommand():
    package = Path(jaxrl_mini.__file__).parent
    commands = {path.stem for path in package.glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}
    assert set(console.COMMANDS) == commands - {"__main__"}


def test_a_subcommand_gets_the_arguments_after_it_and_its_exit_code_is_ours(monkeypatch):
    def main(arguments):
        assert arguments == ["--seed", "3", "--help"]
        return 7

    monkeypatch.setattr(train, "main", main)
    with pytest.raises(SystemExit) as ending:
        console.main(["train", "--seed", "3", "--help"])
    assert ending.value.code == 7


def test_a_subcommand_may_have_a_hyphen(capsys):
    with pytest.raises(SystemExit) as ending:
        console.main(["tiny-model", "--help"])
    assert ending.value.code == 0 and capsys.readouterr().out.startswith("usage: jaxrl-mini tiny_model")


@pytest.mark.parametrize("arguments", [[], ["nope"], ["--seed"], ["trai"]])
def test_what_is_no_command_is_one_line_and_exit_2(capsys, arguments):
    with pytest.raises(SystemExit) as ending:
        console.main(arguments)
    captured = capsys.readouterr()
    assert (ending.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert "COMMAND" in captured.err or arguments[0] in captured.err


COMMANDS = ["", *console.COMMANDS, "sweep summary"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_answers_without_importing_what_takes_time(command):
    done = process("-X", "importtime", "-m", "jaxrl_mini", *command.split(), "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {f'jaxrl-mini {command}'.strip()} [-h]")
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "jaxrl_mini.machine.commandline" in imported
    slow = {"jax", "numpy", "scipy", "optax", "flax", "transformers", "tqdm", "pyarrow", "matplotlib"}
    assert not imported & slow


def help_of(main, arguments, capsys) -> str:
    with pytest.raises(SystemExit) as ending:
        main([*arguments, "--help"])
    assert ending.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_help_shows_examples_and_names_commands_as_they_were_called(command, capsys):
    name, *more = command.split()
    by_module = help_of(importlib.import_module(f"jaxrl_mini.{name}").main, more, capsys)
    by_console = help_of(console.main, [name, *more], capsys)
    assert "\nexamples:\n  python -m jaxrl_mini." in by_module and "\nexamples:\n  jaxrl-mini " in by_console
    assert f"  python -m jaxrl_mini.{command}" in by_module and f"  jaxrl-mini {command}" in by_console
    assert by_module.startswith(f"usage: python -m jaxrl_mini.{command} ") and "python -m" not in by_console


def test_the_same_option_means_the_same_kind_of_value_everywhere(capsys):
    """What stands after an option in the help, where several commands have it."""
    kinds: dict[str, set[str]] = {}
    for command in COMMANDS[1:]:
        name, *more = command.split()
        text = help_of(importlib.import_module(f"jaxrl_mini.{name}").main, more, capsys)
        for option, value in re.findall(r"^  (--[\w-]+)(?: ([\w.]+|\{[\w,-]+\}))?(?= |$)", text, re.MULTILINE):
            kinds.setdefault(option, set()).add(value)
    same = {option: values for option, values in kinds.items() if option != "--output"}  # a file or a folder
    assert len(same) > 20 and {option: values for option, values in same.items() if len(values) > 1} == {}


# The version and the citation


def test_the_version_is_said_once(capsys):
    assert jaxrl_mini.__version__ == importlib.metadata.version("jaxrl_mini") == PROJECT["version"]
    with pytest.raises(SystemExit):
        console.main(["--version"])
    assert capsys.readouterr().out == f"jaxrl-mini {PROJECT['version']}\n"
    assert "version" not in citation()


def test_the_citation_is_as_cff_wants_it():
    """Required: cff-version, message, title, authors (Citation File Format 1.2.0)."""
    there = citation()
    assert there["cff-version"] == "1.2.0"
    assert there["message"] and there["title"].startswith("jaxrl_mini")
    assert there["license"] == PROJECT["license"]
    assert all("name" in author for author in there["authors"])


def citation() -> dict:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


# Wheel and source distribution


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with both, built from what git would commit."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\n")
    if not any(names):
        pytest.skip("this is no git checkout")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    done = process("-m", "build", "--no-isolation", "--outdir", output, source)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return output


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        points = next(name for name in names if name.endswith("entry_points.txt"))
        assert "jaxrl-mini = jaxrl_mini.__main__:main" in wheel.read(points).decode()
    package = {f"jaxrl_mini/{path.relative_to(ROOT / 'jaxrl_mini')}" for path in (ROOT / "jaxrl_mini").rglob("*.*")}
    package = {name for name in package if "__pycache__" not in name}
    assert {name for name in names if ".dist-info/" not in name} == package
    assert {"jaxrl_mini/runs/record.schema.json", "jaxrl_mini/py.typed"} <= names


def test_the_source_distribution_can_run_its_tests(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [path for folder in ("tests", "results") for path in (ROOT / folder).rglob("*.*")]
    wanted = {str(path.relative_to(ROOT)) for path in wanted if "__pycache__" not in path.parts}
    assert wanted | {"Makefile", "requirements.lock", "CITATION.cff", "LICENSE", "README.md", "CHANGELOG.md"} <= names


@pytest.mark.full
def test_both_pass_twine_check(built):
    pytest.importorskip("twine")
    done = process("-m", "twine", "check", "--strict", *built.iterdir())
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout


def test_the_wheel_works_where_the_checkout_is_not(built, tmp_path):
    """Its data is found, in another folder and from the wheel's files alone."""
    (path,) = built.glob("*.whl")
    zipfile.ZipFile(path).extractall(tmp_path)
    code = (
        "import json, jaxrl_mini; from importlib.resources import files; "
        "schema = files('jaxrl_mini.runs').joinpath('record.schema.json').read_text(); "
        "print(json.dumps([jaxrl_mini.__file__, len(schema)]))"
    )
    done = process("-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}", folder=tmp_path)
    place, size = json.loads(done.stdout)
    assert place == str(tmp_path / "jaxrl_mini/__init__.py") and size > 1000


@pytest.mark.full
def test_the_wheel_works_in_a_new_environment(built, tmp_path):
    """All that it needs is named in it, and nothing of the machine or the checkout helps."""
    (path,) = built.glob("*.whl")
    venv.create(tmp_path / "new", with_pip=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(command, *arguments):
        words = [str(tmp_path / "new/bin" / command), *map(str, arguments)]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    run("pip", "install", "--quiet", "--constraint", ROOT / "requirements.lock", f"{path}[report]")
    run("pip", "check")
    run("jaxrl-mini", "train", "--iterations", 2, "--output", "run.json", "--trajectories", "run.npz")
    run("jaxrl-mini", "replay", "run.npz")
    run("jaxrl-mini", "reproduce", "run.json")
    run("jaxrl-mini", "report", "run.json", "run.npz", "--output", "run.html")
    run("jaxrl-mini", "tiny-model", "tiny")
    run("jaxrl-mini", "play", "tiny", "--seed", 1)
    place = run("python", "-c", "import jaxrl_mini; print(jaxrl_mini.__file__)")
    assert Path(place.strip()).is_relative_to(tmp_path / "new")
