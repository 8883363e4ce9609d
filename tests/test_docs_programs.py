"""The programs and patches that stand in the documentation run, and print what is said that they print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full  # they are written for a person to read, not to be quick

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# Programs of pages


def section_blocks(page: str) -> dict[str, list[tuple[str, str, str]]]:
    """By section, the blocks as (language, name of the file, text)."""
    titled = re.compile(r"^```(\w*)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    sections = (ROOT / "docs" / page).read_text().split("\n## ")[1:]
    return {text.partition("\n")[0]: titled.findall(text) for text in sections}


SECTIONS = [
    *(("extending.md", section) for section in section_blocks("extending.md")),
    ("estimators.md", "Instances of different difficulty"),
]


@pytest.mark.parametrize("page, section", SECTIONS)
def test_what_a_section_shows_works(page, section, tmp_path, quick_process):
    """Programs are saved and run, commands run, one after the other; lines that are shown are among those printed."""
    environment = {**quick_process, "PYTHONPATH": str(ROOT)}
    blocks, printed = section_blocks(page)[section], ""
    assert {language for language, *_ in blocks} <= {"python", "text", ""} and blocks[-1][0] in ("python", "text")
    for language, name, text in blocks:
        if language == "text":
            lines = [(words(line), numbers(line)) for line in printed.splitlines()]
            for line in text.splitlines():
                assert any(
                    words(line) == found and numbers(line) == pytest.approx(figures, rel=0.02, abs=1e-4)
                    for found, figures in lines
                ), (line, printed)
            continue
        commands = [line.split() for line in text.splitlines()]
        if language == "python":
            (tmp_path / (name or "program.py")).write_text(text)
            commands = [["python", name or "program.py"]]
        for parts in commands:
            command = [sys.executable if part == "python" else part for part in parts]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            printed = done.stdout


# The notebook


def test_the_notebook_prints_what_stands_in_it(tmp_path):
    """Its cells run from top to bottom in one process; numbers may differ as far as another machine's rounding goes."""
    blocks = BLOCK.findall((ROOT / "docs/first-run.md").read_text())
    assert [language for language, _ in blocks] == ["python", "text"] * (len(blocks) // 2)
    mark = "-- end of cell --"
    program = f"print({mark!r})\n".join(text for language, text in blocks if language == "python")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = [text.strip() for language, text in blocks if language == "text"]
    for printed, text in zip(done.stdout.split(mark), shown, strict=True):
        assert words(printed) == words(text)
        assert numbers(printed) == pytest.approx(numbers(text), rel=0.02, abs=0.01)


def words(text: str) -> list[str]:
    return re.sub(r"[\d.#]+", "", text).split()


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]
