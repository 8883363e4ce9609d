"""Commands in a process of their own, with streams that are closed, full or left, without a home, and two threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_mini.runs import records

SHORT = ["--iterations", "1", "--eval-episodes", "1", "--output", "r.json"]


def start(
    folder: Path, *words: str, environment: dict[str, str] | None = None, closing: str = "", **streams
) -> subprocess.Popen:
    command = ["sh", "-c", f'exec "$0" "$@" {closing}', sys.executable, "-W", "error", *words]
    variables = {**os.environ, **(environment or {})}
    return subprocess.Popen(command, cwd=folder, env=variables, text=True, **streams)


def test_what_is_printed_may_not_arrive_but_the_record_is_written(tmp_path):
    """Closed streams are no error; a reader that leaves, and a disk that is full, are told of at the end."""
    closing = {"all": "<&- >&- 2>&-", "errors": "2>&-", "out": ">&-"}
    read, left = os.pipe()
    os.close(read)  # the reader has left
    full, runs = os.open("/dev/full", os.O_WRONLY), {}
    for name in (*closing, "left", "full"):
        (tmp_path / name).mkdir()
        out = {"left": left, "full": full}.get(name, subprocess.DEVNULL)
        options = {"stdout": out, "stderr": subprocess.PIPE, "closing": closing.get(name, "")}
        runs[name] = start(tmp_path / name, "-m", "jaxrl_mini.train", *SHORT, **options)
    said = {name: run.communicate()[1] for name, run in runs.items()}
    os.close(left)
    os.close(full)
    for name, run in runs.items():
        reason = {"left": "Broken pipe", "full": "No space left on device"}.get(name)
        line = f"error: standard output could not be written ({reason}): all else was done\n"
        assert (run.returncode, said[name]) == ((0, "") if reason is None else (1, line)), name
        assert records.read(tmp_path / name / "r.json")["config"]["iterations"] == 1


HOMELESS = """
import os, pwd, runpy, sys
def nobody(number): raise KeyError(number)
pwd.getpwuid = nobody
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "home", [pytest.param("/dev/null", marks=pytest.mark.full, id="unwritable"), pytest.param(None, id="none")]
)
def test_commands_work_without_a_home_and_say_so_in_a_line(tmp_path, home):
    hidden = {"JAX_COMPILATION_CACHE_DIR", "HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR"}
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    if home:
        variables["HOME"] = home
    words = ["--at", "0", "--advantage", "rloo", "--aggregation", "fixed-length"]
    commands = (["train", *SHORT], ["estimators", *words, "--output", "e.csv", "--plot", "e.svg"])
    for command, *arguments in commands:
        program = [sys.executable, "-W", "error", "-c", HOMELESS, f"jaxrl_mini.{command}", *arguments]
        done = subprocess.run(program, cwd=tmp_path, env=variables, capture_output=True, text=True)
        said = [line for line in done.stderr.splitlines() if not line.startswith("written: ")]
        assert done.returncode == 0 and len(said) == 1, done.stderr
        assert said[0].startswith("compiled programs are not kept: ")
    assert {path.name for path in tmp_path.iterdir()} == {"r.json", "e.csv", "e.svg"}


THREADS = """
import sys, threading
from jaxrl_mini.policies.pretrained import load_checkpoint
sys.setswitchinterval(1e-5)
def read():
    load_checkpoint(sys.argv[1])
    print(end="read ")
threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_of_a_new_process_read_a_language_model(tmp_path, tiny_folder):
    """The library that reads it imports its parts when they are asked for."""
    words = ["-W", "ignore", "-c", THREADS, str(tiny_folder)]
    out, _ = start(tmp_path, *words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).communicate()
    assert out.split() == ["read"] * 4


@pytest.mark.full
def test_a_new_process_sweeps_a_language_model(tmp_path, tiny_folder, quick_process):
    words = ["--backend", "hf", "--model", str(tiny_folder), "--lr", "1e-3", "--iterations", "1", "--seeds", "2"]
    words += ["--groups", "1", "--group-size", "2", "--eval-episodes", "1", "--output", "out"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = start(tmp_path, "-W", "ignore", "-m", "jaxrl_mini.sweep", *words, environment=quick_process, **pipes)
    out, said = run.communicate()
    assert run.returncode == 0, said
    assert json.loads(out) == {"runs": 2, "parts": 2, "output": "out"}
