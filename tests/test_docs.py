"""The documentation: its commands exist, and its figures are those of the records."""

import dataclasses
import importlib
import json
import pkgutil
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from benchmarks import variants
from jaxrl_mini import __main__ as console
from jaxrl_mini.exact import bias, success
from jaxrl_mini.learning import loop
from jaxrl_mini.machine.commandline import Parser
from jaxrl_mini.objective.advantage import group_std
from jaxrl_mini.policies import table
from jaxrl_mini.tasks.histories import MAX_HISTORIES
from jaxrl_mini.tasks.specification import load_task

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
PAGES = [*READMES, *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)(?: title=\"[\w.]+\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"^```python title=\"([\w.]+)\"\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


def test_runs_that_are_shown_do_not_want_each_others_outputs(train_command, monkeypatch, grpo_run):
    """All that the pages and `make` train, in order and once more, in one folder."""
    monkeypatch.setattr(loop, "run", lambda config, **_: dataclasses.replace(grpo_run, config=config))
    made = [line.strip().replace("$(BIN)/", "") for line in (ROOT / "Makefile").read_text().splitlines()]
    shown = [*made, *(command for path in PAGES if path != READMES[1] for command in commands(path))]
    words = [
        shlex.split(line)[3:] for line in shown if line.startswith("python -m jaxrl_mini.train") and "$" not in line
    ]
    assert len(words) > 7
    for name, text in (block for path in PAGES for block in NAMED.findall(path.read_text())):
        Path(name).write_text(text)
    for arguments in (*words, *words):
        outcome = train_command(*arguments)
        assert (outcome.code, [line for line in outcome.err if "no checkpoint in" not in line]) == (0, []), arguments


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
    succeeded, actions = (
        {method: agreement[method][name]["mean"] for method in ("grpo", "rs-sft")}
        for name in ("success_rate", "mean_actions")
    )
    return {
        "10,000 seeds": f"the mean exact success is {grpo['success_mean']:.5f} for grpo (standard deviation "
        f"{grpo['success_deviation']:.5f}, {grpo['mean_actions']:.3f} actions) and {sft['success_mean']:.5f} "
        f"for rs-sft ({sft['success_deviation']:.5f}, {sft['mean_actions']:.3f} actions), "
        f"{grpo['sampled_success_mean']:.5f} and {sft['sampled_success_mean']:.5f} as sampled.",
        "1,000 seeds": f"Over {agreement['seeds']:,} seeds (`python -m benchmarks.agreement`) the mean exact success "
        f"is {succeeded['grpo']:.5f} for grpo and {succeeded['rs-sft']:.5f} for rs-sft, with {actions['grpo']:.3f} and "
        f"{actions['rs-sft']:.3f} actions;",
        # The recordings' source, as test_golden_statistics has it.
        "another implementation": "gave 0.99501 and 0.99726, with 4.210 and 3.062.",
        **{label: f"| {label} | {speed['compared'][name]['runs_per_second']:,.0f} |" for label, name in SPEEDS.items()},
        "PyTorch": f"| a plain PyTorch loop, grpo | {speed['cores'] / speed['pytorch_cpu_seconds_a_run']:.2f} |",
        "large fleet": f"{large['runs_per_second']:,.0f} grpo runs a second at a fleet of {large['runs']:,} are "
        f"{large['episodes_per_second'] / 1e6:.0f} million episodes.",
    }


METRICS = dict(zip(("success", "to 90", "actions", "entropy"), variants.METRICS, strict=True))
SAID_BY_README = ("variants", "unbiased", "with KL", "without KL", "cispo", "public test", "shuffled", "bounds")


def findings() -> dict[str, str]:
    """What the page on the estimators says of their study, as the study says it."""
    study = results("variants/variants")
    of, controls, at = study["variants"], study["controls"], variants.JUDGED_AT

    def mean(label: str, metric: str) -> float:
        return of[label][METRICS[metric]]["mean"]

    def gap(label: str, other: str, metric: str) -> str:
        found, digits = of[label][METRICS[metric]]["minus"][other], 5 if metric == "success" else 2
        low, high = found["interval"]
        return f"{found['mean']:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"

    def judged(after: int, estimator: str, aggregation: str = "episode-mean", what: str = "success") -> dict:
        wanted = (f"after {after}", what, estimator, aggregation)
        keys = ("policy", "what", "advantage" if what == "success" else "kl", "aggregation")
        (row,) = (row for row in study["estimators"] if tuple(row[key] for key in keys) == wanted)
        return row

    same = [(name, "default") for name in ("clip-high 0.28", "dual-clip", "cispo", "no clip")]
    for label, other in [*same, ("dual-clip, 8 epochs", "clip, 8 epochs")]:
        assert not any(of[label][metric]["minus"][other]["seeds_that_differ"] for metric in variants.METRICS)
    assert of["default"]["ratio_outside_clip"]["highest"] == 0 == controls["constant"]["moved"]
    assert all(judged(one, "rloo")["cosine"] == judged(one, "group-std")["cosine"] for one in at)
    assert all(judged(one, "group-std", "fixed-length")["angle"] < 1e-4 for one in at)
    angles = [judged(one, "group-std")["angle"] for one in at]
    (exact,) = set(of["exact gradient"][METRICS["to 90"]]["quantiles"].values())
    k1, term = (judged(10, kl, what="kl") for kl in ("k1", "exact"))
    scores = controls["shuffled"]["private_success_by_seed"]
    many, moved = results("variants/many-seeds"), results("variants/many-seeds")["controls"]
    assert {one["seeds"] for one in controls.values()} == {len(scores)} == {1000}
    assert {one["moved"] for one in moved.values()} == {many["seeds"]} == {10000}
    differ = many["seeds_that_differ"]
    assert differ["cispo"] == differ["no clip"] == len(many["seeds_outside"])
    assert differ["clip-high 0.28"] == differ["dual-clip"] == 0 and min(many["seeds_outside"]) >= study["seeds"]

    def ends(control: str) -> tuple[str, str]:
        return f"{moved[control]['mean']:.4f}", f"{moved[control]['standard_error']:.4f}"

    private = {name: one["private_success"]["mean"] for name, one in controls.items()}
    return {
        "variants": f"{len(of)} variants with {study['seeds']:,} seeds each",
        "comparisons": f"all {study['comparisons']:,} comparisons",
        "angles": f"{judged(10, 'group-std')['angle']:.0f} degrees away from the gradient of the success probability "
        f"there, and {min(angles):.0f} to {max(angles):.0f} over the four policies",
        "unbiased": f"`fixed-length` takes {gap('fixed-length', 'default', 'to 90')} iterations more to 90 %, and its "
        f"final success differs by {gap('fixed-length', 'default', 'success')}",
        "signal": f"{judged(10, 'group-std')['signal_to_noise']:.3f} against "
        f"{judged(10, 'group-std', 'fixed-length')['signal_to_noise']:.3f}",
        "reinforce": f"`reinforce`, {judged(100, 'reinforce')['angle']:.0f} degrees away at the last of them, ends "
        f"higher than all others with a KL: {mean('reinforce', 'success'):.5f}, with "
        f"{mean('reinforce', 'actions'):.3f} actions",
        "size": f"{judged(100, 'rloo')['size']:.3f} of the true gradient's size where the default has "
        f"{judged(100, 'group-std')['size']:.3f}",
        "with KL": f"final success differs by {gap('rloo', 'default', 'success')}",
        "without KL": f"{gap('rloo, no KL', 'no KL', 'success')} where neither has a KL",
        "maxrl": f"remains {gap('maxrl, no KL', 'no KL', 'success')}",
        "same": f"not one of {study['seeds']:,} seeds differs",
        "outside": f"{100 * of['clip, 8 epochs']['ratio_outside_clip']['mean']:.0f} % of the sampled actions",
        "eight": f"{mean('clip, 8 epochs', 'to 90'):.2f} iterations in place of {mean('default', 'to 90'):.2f}",
        "cispo": f"`cispo` takes {gap('cispo, 8 epochs', 'clip, 8 epochs', 'to 90')} iterations more to 90 % "
        "than `clip`",
        "no clip": f"{gap('cispo, 8 epochs', 'no clip, 8 epochs', 'to 90')} more than `none`",
        "noise": f"90 % after {exact:.0f} iterations, with every seed; the default takes "
        f"{mean('default', 'to 90'):.2f}",
        "price": gap("exact gradient", "default", "to 90"),
        "k1": f"`k1` differs by {gap('k1', 'default', 'success')} from the exact KL and by "
        f"{gap('k1', 'no KL', 'success')} from no KL",
        "k1's gradient": f"{100 * k1['size'] / term['size']:.0f} % of the size of that of the term it replaces, and "
        f"{k1['angle']:.0f} degrees away from the gradient of the KL between whole episodes",
        "k2": f"`k2` differs by {gap('k2', 'default', 'success')}",
        "k3": f"`k3` by {gap('k3', 'default', 'success')}",
        "variance": f"{judged(100, 'k3', what='kl')['variance']:.0f} against "
        f"{judged(100, 'exact', what='kl')['variance']:.3f}",
        "public test": f"submits {controls['public-test']['submission_rate']['mean']:.3f} of its episodes and succeeds "
        f"in {private['public-test']:.3f}, less than the {private['constant']:.3f} of the untrained policy",
        "shuffled": f"{private['shuffled']:.3f} on average, with a standard deviation of "
        f"{controls['shuffled']['private_success']['deviation']:.3f}, but seed {np.argmax(scores)} got to "
        f"{max(scores):.3f}",
        "bounds": f"in {study['seeds']:,} seeds, and in {len(many['seeds_outside'])} of {many['seeds']:,}",
        "many seeds": f"to a KL of {moved['shuffled']['mean_kl']:.3f} nats on average, and their mean success is "
        f"{ends('shuffled')[0]} with a standard error of {ends('shuffled')[1]}, where {many['before']:.4f} was before",
        "coins": "{}, standard error {}".format(*ends("coins")),
        "reinforce, shuffled": "{} (standard error {})".format(*ends("shuffled, reinforce, fixed-length")),
        "noisy": f"{private['noisy:0.2']:.3f} in place of {private['verifier']:.3f}",
    }


def test_what_is_said_of_the_study_of_estimators_is_what_it_found():
    pages = (ROOT / "docs/estimators.md", READMES[0], ROOT / "docs/first-run.md")
    page, readme, notebook = (" ".join(path.read_text().split()) for path in pages)
    for name, sentence in findings().items():
        assert sentence in page, name
        assert name not in SAID_BY_README or sentence in readme, name
    many = results("variants/many-seeds")
    assert (
        f"{many['controls']['shuffled']['mean']:.4f} with a standard error of "
        f"{many['controls']['shuffled']['standard_error']:.4f} from {many['before']:.4f}"
    ) in notebook
    blocks = [text for _, text in BLOCK.findall((ROOT / "docs/estimators.md").read_text())]
    assert variants.as_text(results("variants/variants")) + "\n" in blocks


def test_what_the_readme_says_of_the_results_is_what_they_say():
    text = " ".join(READMES[0].read_text().split())
    for name, sentence in sentences().items():
        assert sentence in text, name


def test_what_is_said_of_start_up_is_what_was_measured():
    seconds = results("benchmarks/startup")["median_seconds"]
    said = (
        f"takes {seconds['cold']:.1f} s from start to exit at first and {seconds['warm']:.1f} s from then on; "
        f"a plain PyTorch loop takes {seconds['pytorch']:.1f} s"
    )
    assert said in " ".join((ROOT / "docs/machines.md").read_text().split())


def test_the_figures_of_the_task_are_exact():
    """Of uniform play, of the mathematics' example, and of the histories of a language model."""
    uniform = success.exact(np.full((24, 6), -np.log(6.0)), np.array([0.0, 0.0, 0.0, 1.0]))
    assert uniform.success_rate == pytest.approx(0.06526491769547325, rel=1e-14)
    assert uniform.mean_actions == pytest.approx(3.9906121399176955, rel=1e-14)
    one = np.float64(1.0)
    assert [f"{group_std(reward, one, 8):.6f}" for reward in (1.0, 0.0)] == ["2.645751", "-0.377964"]
    assert sum(5**step for step in range(6)) == 3906  # five actions that go on, six cues


def test_the_table_of_estimators_is_what_the_command_prints():
    rows = bias.judge(
        "uniform", np.zeros((24, 6)), load_task("binary-search-repair"), groups=4, group_size=8,
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


@pytest.mark.parametrize("path", READMES)
def test_the_table_of_language_model_speed_is_that_of_the_benchmark(path):
    lines = (ROOT / "results/benchmarks/language-cpu.jsonl").read_text().splitlines()
    of = {(row["size"], row["measure"]): row for row in map(json.loads, lines)}
    (packed, small_packed), (rollout, small_rollout) = (
        [of[size, measure]["speedup"] for size in ("tiny", "small")] for measure in ("packed", "rollout")
    )
    pytorch, exact = of["tiny", "pytorch"], of["tiny", "exact"]["all"]
    rows = [
        [f"{packed:.0f}", f"{small_packed:.0f}"],
        [f"{rollout:.1f}", f"{small_rollout:.1f}"],
        [f"{of['tiny', 'iteration']['seconds']:.2f} s", f"{pytorch['speedup']:.0f}"],
        [f"{exact['seconds']:.2f} s"],
        [f"{of['small', 'memory']['host_gigabytes']:.1f} GiB"],
        [f"{of['tiny', 'iteration']['first_seconds']:.0f} s"],
    ]
    text = path.read_text()
    section = text[text.index("runs/bpe") :]
    table = [line for line in section.splitlines() if line.startswith("| ")][1 : 1 + len(rows)]
    for line, figures in zip(table, rows, strict=True):
        shown = line.split("|", 2)[2]
        assert all(figure in shown for figure in figures), (line, figures)
    assert packed > 12 and small_packed > 12 and rollout > 3 and small_rollout > 3 and pytorch["speedup"] > 15


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_figure_stands_there_that_nothing_checks(path):
    """Every figure of three decimals or with thousands; those of programs that run are checked by running them."""
    if path.name in ("extending.md", "first-run.md"):
        return
    checked = COUNTS | {"0.06526491769547325", "3.9906121399176955", "2.645751", "0.377964", "3,906"}
    checked |= {f"{MAX_HISTORIES:,}", *FIGURE.findall(" ".join([*sentences().values(), *findings().values()]))}
    text = re.sub(r"<!-- results:begin -->.*<!-- results:end -->", "", path.read_text(), flags=re.DOTALL)
    if path in READMES or path.name == "estimators.md":
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
