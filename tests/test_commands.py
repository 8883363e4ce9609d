"""Every command of the pages runs as it stands there, and prints what is shown.

A page's commands run in order, each in a process of its own, in one new copy of the sources, as a reader would follow
the page; so do the programs of pages that `test_docs_programs` does not run. What is shown after commands has to stand,
word for word, in what they printed; `...` leaves out what it likes, and numbers may differ as far as another machine's
rounding goes.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = ("extending.md", "first-run.md")
"""Pages whose programs `test_docs_programs` runs; the Chinese README has the blocks of the English one."""
QUICK = ("checks.md",)
"""Pages that take seconds; the others train language models, or six thousand runs and more."""

NOT_RUN = {"make test": "this is it"}
"""Commands that are not run, and why. What `make` would install before a command is there already."""
PRINTED_ELSEWHERE = ("interval of", "train  sweep")
"""How blocks begin that no command above them prints: `test_docs` has those of the results, and the layout is drawn."""
TYPED = {"--human": "fix_low\nfix_high\nfinish\n"}


class Step(NamedTuple):
    """A block of a page."""

    kind: str
    """commands, python, shown, or the name of a program's file."""
    parts: list[str]


def steps(path: Path) -> list[Step]:
    found = []
    for language, name, text in BLOCK.findall(path.read_text()):
        if language == "python":
            found.append(Step(name or "python", [text]))
        elif text.startswith("#!/bin/bash"):
            found.append(Step("commands", [text]))
        elif text.startswith(("python -m ", "make ", "jaxrl-mini ")):
            lines = text.replace("\\\n", " ").splitlines()
            found.append(Step("commands", [line.partition(" #")[0].strip() for line in lines]))
        elif language in ("", "text") and not text.startswith(PRINTED_ELSEWHERE):
            found.append(Step("shown", [text]))
    return found


PAGES = {
    path.name: found
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.name not in PROGRAMS and (found := steps(path))
}


def sources(folder: Path) -> Path:
    """A checkout in which everything that `make` installs is there."""
    made, left = {"build", "runs", "sweeps", "__pycache__"}, {"__pycache__"}

    def without(place: str, names: list[str]) -> set[str]:
        return {name for name in names if name.startswith(".") or name in (made if Path(place) == ROOT else left)}

    shutil.copytree(ROOT, folder, ignore=without)
    environment = folder / ".venv"
    environment.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.suffix != ".stamp":
            (environment / entry.name).symlink_to(entry)
    for name in ("train", "test", "docs"):
        (environment / f"{name}.stamp").touch()
    return folder


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page in QUICK else pytest.mark.full, id=page) for page in PAGES]
)
def test_the_commands_of_a_page_run_in_order_and_print_what_is_shown(page, tmp_path):
    folder, printed = sources(tmp_path / "jaxrl_mini"), ""
    # As of a new shell that has activated the environment; a job array's task has its number.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{folder / '.venv/bin'}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "1"}
    for kind, parts in PAGES[page]:
        if kind == "shown":
            assert_printed(parts[0], printed)
            continue
        printed = ""
        if kind.endswith(".py"):
            (folder / kind).write_text(parts[0])
            kind, parts = "commands", [f"python {kind}"]
        for part in parts:
            if part in NOT_RUN:
                continue
            done = subprocess.run(
                [sys.executable, "-c", part] if kind == "python" else ["bash", "-c", part],
                input=next((text for flag, text in TYPED.items() if flag in part), ""),
                cwd=folder, env=environment, capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, (part, done.stdout, done.stderr)
            assert kind == "python" or "Traceback" not in done.stderr, (part, done.stderr)
            printed += done.stdout


def assert_printed(shown: str, printed: str) -> None:
    words = iter(WORD.findall(printed))
    for word in WORD.findall(shown):
        if word != "...":
            assert any(alike(word, other) for other in words), (word, shown, printed)


WORD = re.compile(r"[^\s{}\[\](),]+")


def alike(shown: str, printed: str) -> bool:
    if shown.endswith("..."):
        return printed.startswith(shown.removesuffix("..."))
    try:
        return float(printed) == pytest.approx(float(shown), rel=0.005, abs=0.002)
    except ValueError:
        return shown == printed


def test_what_is_not_run_stands_in_a_page():
    """And what is shown is compared with something."""
    commands = {part for found in PAGES.values() for kind, parts in found for part in parts if kind == "commands"}
    assert {*NOT_RUN} <= commands
    assert all(any(flag in part for part in commands) for flag in TYPED)
    assert {*QUICK, "README.md"} <= {*PAGES}
    with pytest.raises(AssertionError):
        assert_printed("a 1.25... b", "a 1.24 b")
    with pytest.raises(AssertionError):
        assert_printed("a 1.25 b", "a 1.26 b")
    assert_printed('{"a": 1.2..., ...}', 'x {"b": 0, "a": 1.25}')
