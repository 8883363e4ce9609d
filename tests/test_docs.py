"""The documentation: its programs run, its commands exist, its figures are those of the records."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_mini import __main__ as console
from jaxrl_mini.commandline import Parser

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
PAGES = [*READMES, *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# Programs of the page on extending


def section_blocks() -> dict[str, list[tuple[str, str]]]:
    """By section, the blocks as (language, text)."""
    sections = (ROOT / "docs/extending.md").read_text().split("\n## ")[1:]
    return {text.partition("\n")[0]: BLOCK.findall(text) for text in sections}


@pytest.mark.parametrize("section", section_blocks())
def test_what_the_page_on_extending_shows_works(section, tmp_path):
    shutil.copytree(ROOT / "jaxrl_mini", tmp_path / "jaxrl_mini", ignore=shutil.ignore_patterns("__pycache__"))
    # The compiled programs of the package as it is are no use to a patched one.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    blocks = section_blocks()[section]
    assert {language for language, _ in blocks} <= {"diff", "python"} and blocks[-1][0] == "python"
    for language, text in blocks:
        command = ["git", "apply", "--unidiff-zero", "-"] if language == "diff" else [sys.executable, "-"]
        done = subprocess.run(command, input=text, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


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


# Commands


class Parsed(Exception):
    """The arguments were parsed."""


def commands(path: Path) -> list[str]:
    """What a page tells to run with python, joined over continued lines, without its comment."""
    lines = (
        line.strip() for _, text in BLOCK.findall(path.read_text()) for line in text.replace("\\\n", " ").split("\n")
    )
    parts = (part.strip() for line in lines for part in line.partition("#")[0].split("&&"))
    return [part for part in parts if part.startswith(("python -m jaxrl_mini", "jaxrl-mini "))]


ALL = sorted({(path.name, command) for path in PAGES for command in commands(path)})


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{page}: {command}" for page, command in ALL])
def test_every_command_has_the_options_it_is_shown_with(page, command, monkeypatch):
    """It is parsed by its own parser, and stopped there."""
    words = shlex.split(command.replace("$SLURM_ARRAY_TASK_ID", "1"))
    name, arguments = (words[1], words[2:]) if words[0] == "jaxrl-mini" else (words[2].partition(".")[2], words[3:])
    assert name in console.COMMANDS
    parse = Parser.parse_args

    def stop(self, *given):
        parse(self, *given)
        raise Parsed

    monkeypatch.setattr(Parser, "parse_args", stop)
    with pytest.raises(Parsed):
        importlib.import_module(f"jaxrl_mini.{name}").main(arguments)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_make_target_and_benchmark_that_is_named_exists(path):
    text, makefile = path.read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for name in re.findall(r"python -m benchmarks\.(\w+)", text):
        assert (ROOT / f"benchmarks/{name}.py").is_file(), name


# Figures


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_the_table_of_results_is_that_of_the_records(path):
    text = path.read_text().partition("<!-- results:begin -->")[2].partition("<!-- results:end -->")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.strip().split("\n")][2:]
    assert [(row[0], row[1]) for row in rows] == [(m, s) for m in ("grpo", "rs-sft") for s in ("7", "19", "42")]
    for method, seed, *figures in rows:
        after = json.loads((ROOT / f"results/{method}-seed-{seed}.json").read_text())["after"]
        low, high = after["success_rate_interval"]
        assert figures[0] == str(after["successes"])
        assert re.findall(r"[\d.]+", figures[1]) == [f"{low:.4f}", f"{high:.4f}"]
        assert figures[2] == f"{after['exact_success_rate']:.5f}"
        assert figures[3:5] == [f"{after['mean_actions']:.3f}", f"{after['exact_mean_actions']:.3f}"]


def code(path: Path) -> list[str]:
    """The blocks, without comments and empty lines: what both languages share."""
    blocks = [re.sub(r"\s+#.*$", "", text, flags=re.MULTILINE).strip() for _, text in BLOCK.findall(path.read_text())]
    return [re.sub(r"\n\n+", "\n", text) for text in blocks]


def test_the_chinese_readme_is_in_step_with_the_english_one():
    """It may be shorter; what it shows stands in the other, in the same order, and no command is left out."""
    english, chinese = READMES
    rest = iter(code(english))
    assert code(chinese) and all(block in rest for block in code(chinese))
    figure = re.compile(r"\d+\.\d{3,}")
    assert set(figure.findall(chinese.read_text())) <= set(figure.findall(english.read_text()))
    named = [set(re.findall(r"python -m (jaxrl_mini\.\w+)", path.read_text())) for path in READMES]
    assert {name for name in named[0] if name.partition(".")[2] in console.COMMANDS} <= named[1]


def test_the_site_builds_with_every_link_right(tmp_path):
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site/mathematics/index.html").read_text()
    reference = (tmp_path / "site/reference/index.html").read_text()
    anchors = re.findall(r'href="\.\./reference/#([^"]+)"', page)
    assert len(anchors) > 5
    for anchor in anchors:
        assert f'id="{anchor}"' in reference, anchor
