"""The documentation: its programs run, its commands exist, its figures are those of the records."""

import importlib
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_mini import __main__ as console
from jaxrl_mini import bias, evaluation, objective
from jaxrl_mini.commandline import Parser
from jaxrl_mini.policies import table

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
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiles faster; the programs say nothing of the last digit
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


def examples(text: str) -> list[str]:
    """Those of a command's help."""
    return [part.strip() for line in text.splitlines() for part in line.split("&&") if line.startswith("  python -m")]


MODULES = {name: importlib.import_module(f"jaxrl_mini.{name}") for name in console.COMMANDS}
ALL = sorted(
    {(path.name, command) for path in PAGES for command in commands(path)}
    | {(f"{name} --help", command) for name, module in MODULES.items() for command in examples(module.EXAMPLES)}
)


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
        MODULES[name].main(arguments)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_make_target_and_benchmark_that_is_named_exists(path):
    text, makefile = path.read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for name in re.findall(r"python -m benchmarks\.(\w+)", text):
        assert (ROOT / f"benchmarks/{name}.py").is_file(), name


# Figures

FIGURE = re.compile(r"\d+\.\d{3,}|\d{1,3}(?:,\d{3})+(?!\d)")
SPEEDS = {
    "`jaxrl_mini`, grpo": "ours, grpo",
    "the same run in hand-written C, grpo": "C, grpo",
    "`jaxrl_mini`, rs-sft": "ours, rs-sft",
    "the same run in hand-written C, rs-sft": "C, rs-sft",
    "one `vmap` of a straightforward JAX function, grpo": "plain vmap, grpo",
}
"""The README's rows, and what the benchmark calls them."""
COUNTS = {"1,000", "10,000", "65,536", "100,000"}
"""How many seeds, as a command beside them says."""


def results(name: str) -> dict:
    return json.loads((ROOT / f"results/{name}.json").read_text())


def sentences() -> dict[str, str]:
    """What the README says of the results, as the results say it."""
    grpo, sft = results("fleet/summary")["settings"]
    agreement, speed = results("benchmarks/agreement"), results("benchmarks/throughput-cpu")
    assert [(one["values"]["method"], one["runs"]) for one in (grpo, sft)] == [("grpo", 10000), ("rs-sft", 10000)]
    (large,) = (row for row in speed["fleet_sizes"] if row["runs"] == 65536)
    success, actions = (
        {method: agreement[method][name]["mean"] for method in ("grpo", "rs-sft")}
        for name in ("success_rate", "mean_actions")
    )
    return {
        "10,000 seeds": f"the mean exact success is {grpo['success_mean']:.5f} for grpo (standard deviation "
        f"{grpo['success_deviation']:.5f}, {grpo['mean_actions']:.3f} actions) and {sft['success_mean']:.5f} "
        f"for rs-sft ({sft['success_deviation']:.5f}, {sft['mean_actions']:.3f} actions), "
        f"{grpo['sampled_success_mean']:.5f} and {sft['sampled_success_mean']:.5f} as sampled.",
        "1,000 seeds": f"Over {agreement['seeds']:,} seeds (`python -m benchmarks.agreement`) the mean exact success "
        f"is {success['grpo']:.5f} for grpo and {success['rs-sft']:.5f} for rs-sft, with {actions['grpo']:.3f} and "
        f"{actions['rs-sft']:.3f} actions;",
        # The recordings' source, as test_golden_statistics has it.
        "another implementation": "gave 0.99501 and 0.99726, with 4.210 and 3.062.",
        **{label: f"| {label} | {speed['compared'][name]['runs_per_second']:,.0f} |" for label, name in SPEEDS.items()},
        "PyTorch": f"| a plain PyTorch loop, grpo | {speed['cores'] / speed['pytorch_cpu_seconds_a_run']:.2f} |",
        "large fleet": f"{large['runs_per_second']:,.0f} grpo runs a second at a fleet of {large['runs']:,} are "
        f"{large['episodes_per_second'] / 1e6:.0f} million episodes.",
    }


def test_what_the_readme_says_of_the_results_is_what_they_say():
    text = " ".join(READMES[0].read_text().split())
    for name, sentence in sentences().items():
        assert sentence in text, name


def test_the_figures_of_the_task_are_exact():
    """Of uniform play, of the mathematics' example, and of the histories of a language model."""
    uniform = evaluation.exact(np.full((24, 6), -np.log(6.0)), np.array([0.0, 0.0, 0.0, 1.0]))
    assert uniform.success_rate == pytest.approx(0.06526491769547325, rel=1e-14)
    assert uniform.mean_actions == pytest.approx(3.9906121399176955, rel=1e-14)
    failure, success = objective.outcome_advantages(jnp.array([1.0]), 8)
    assert (f"{success[0]:.6f}", f"{failure[0]:.6f}") == ("2.645751", "-0.377964")
    assert sum(5**step for step in range(6)) == 3906  # five actions that go on, six cues


def test_the_table_of_estimators_is_what_the_command_prints():
    rows = bias.judge(
        "uniform", np.zeros((24, 6)), np.array([0.0, 0.0, 0.0, 1.0]), groups=4, group_size=8,
        advantages=["group-std", "rloo"], aggregations=["episode-mean", "step-mean", "fixed-length"],
    )  # fmt: skip
    printed = [line.split() for line in bias.as_text(rows).splitlines()]
    (block,) = (text for _, text in BLOCK.findall(READMES[0].read_text()) if text.startswith("policy "))
    shown = [line.split() for line in block.splitlines()]
    assert len(shown) == 5 and all(line in printed for line in shown)
    turned = next(row["angle"] for row in rows if row["aggregation"] == "episode-mean")
    for path in (READMES[0], ROOT / "docs/estimators.md"):
        assert f"turns the gradient by {turned:.0f} degrees" in " ".join(path.read_text().split())


def test_what_train_and_play_are_shown_to_print_is_what_they_print(grpo_run):
    blocks = [text for _, text in BLOCK.findall(READMES[0].read_text())]
    before, after = grpo_run.before, grpo_run.after
    (shown,) = (text for text in blocks if text.startswith('{"before"'))
    rates = re.findall(r"_rate\": ([\d.]+)", shown)
    actual = (before.success_rate, before.exact_success_rate, after.success_rate, after.exact_success_rate)
    assert all(str(value).startswith(rate.rstrip(".")) for value, rate in zip(actual, rates, strict=True))
    assert f'"mean_actions": {after.mean_actions:.3f}' in shown
    (shown,) = (text for text in blocks if "result.after" in text)
    assert f"({after.success_rate_interval[0]:.3f}..., 1.0)" in shown and str(after.exact_success_rate)[:7] in shown
    (shown,) = (text for text in blocks if text.endswith("> fix_low\n"))
    assert shown.startswith("low = mid\nhigh = mid - 1\nstep 1 of 6\n")
    probs = table.distribution(grpo_run.logits[-1]).probs[4 + 1]
    printed = [float(value) for value in re.findall(r"  \w+ +(0\.\d{4})", shown)]
    assert printed == pytest.approx(np.asarray(probs).tolist(), abs=6e-5)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_figure_stands_there_that_nothing_checks(path):
    """Every figure of three decimals or with thousands; those of programs that run are checked by running them."""
    if path.name in ("extending.md", "first-run.md"):
        return
    checked = COUNTS | {"0.06526491769547325", "3.9906121399176955", "2.645751", "0.377964", "3,906"}
    checked |= set(FIGURE.findall(" ".join(sentences().values())))
    text = re.sub(r"<!-- results:begin -->.*<!-- results:end -->", "", path.read_text(), flags=re.DOTALL)
    if path in READMES:
        for _, block in BLOCK.findall(text):
            text = text.replace(block, "")
    assert set(FIGURE.findall(text)) <= checked


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
    """The same blocks, figures, options, commands and files, in the same order."""
    english, chinese = READMES
    assert code(chinese) == code(english)
    assert FIGURE.findall(chinese.read_text()) == FIGURE.findall(english.read_text())
    named = [set(re.findall(r"make [a-z-]+|python -m [\w.]+|results/[\w./-]+\w", path.read_text())) for path in READMES]
    assert named[0] == named[1]
    options = [set(re.findall(r"--[a-z-]+", path.read_text())) for path in READMES]
    assert options[0] == options[1]


# Links; those of the site are checked where it is built, by `make docs`


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_file_that_is_linked_or_named_exists(path):
    text = BLOCK.sub("", path.read_text())
    for target in re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", text):
        assert (path.parent / target).exists(), target
    for name in re.findall(r"`((?:results|benchmarks|jaxrl_mini|tests|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def test_every_function_named_beside_a_formula_is_in_the_reference():
    anchors = re.findall(r"\(reference\.md#([\w.]+)\)", (ROOT / "docs/mathematics.md").read_text())
    assert len(anchors) > 8
    shown = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    for name in [*anchors, *shown]:
        pkgutil.resolve_name(name)
    for name in anchors:
        assert name in shown or name.rpartition(".")[0] in shown, name
