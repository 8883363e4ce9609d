"""The report: one file with the record's numbers, nothing from outside, and nothing of a file taken as markup."""

import base64
import copy
import hashlib
import json
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from jaxrl_mini import report, sweep, train
from jaxrl_mini.config import Config
from jaxrl_mini.episodes.verifier import evaluation_verdicts, training_verdicts
from jaxrl_mini.machine import commandline
from jaxrl_mini.machine.files import Output
from jaxrl_mini.pages import page, sources
from jaxrl_mini.runs import recording, records
from jaxrl_mini.sweeps.dataset import Dataset
from jaxrl_mini.sweeps.grid import Grid, sweep_command
from jaxrl_mini.tasks.repair import VARIANTS

SMALL = ["--iterations", "3", "--groups", "2", "--group-size", "4", "--eval-episodes", "8"]


@pytest.fixture(scope="module")
def record(grpo_run):
    return json.loads(json.dumps(records.build(grpo_run)))


@pytest.fixture
def report_command(command):
    return lambda *arguments: command(report, *arguments)


@pytest.fixture
def files(grpo_run, record, tmp_path):
    """A record and its recording, as `train` writes them."""
    (tmp_path / "run.json").write_text(json.dumps(record))
    with Output(tmp_path / "run.npz") as output:
        recording.write(grpo_run, output)
    return tmp_path


class Elements(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)

    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def test_one_small_file_with_the_records_numbers(report_command, files, record):
    outcome = report_command("run.json", "run.npz")
    text = Path("report.html").read_text()
    assert (outcome.code, outcome.err) == (0, [])
    assert json.loads(outcome.out[0]) == {"output": "report.html", "bytes": len(text.encode())}
    assert len(text.encode()) < 1_000_000
    assert {path.name for path in files.iterdir()} == {"run.json", "run.npz", "report.html"}
    words = Elements(text).words()
    after = record["after"]
    assert f"{after['successes']} of 500" in words and f"{100 * after['exact_success_rate']:.3f} %" in words
    low, high = after["success_rate_interval"]
    assert f"{100 * low:.1f} to {100 * high:.1f} %" in words
    for value in (record["runtime"]["jax"], record["runtime"]["platform"], "python -m jaxrl_mini.train --seed 7"):
        assert value in words


def test_nothing_comes_from_outside_and_the_policy_names_what_may_run(report_command, files):
    report_command("run.json", "run.npz")
    text = Path("report.html").read_text()
    elements = Elements(text).elements
    links = [value for _, attributes in elements for name, value in attributes.items() if name in ("src", "href")]
    assert links and all(link.startswith("#") for link in links)
    assert not any("style" in attributes or any(n.startswith("on") for n in attributes) for _, attributes in elements)
    (policy,) = [attributes["content"] for _, attributes in elements if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy


HOSTILE = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>&amp;{{7*7}}'


def test_what_files_say_is_text(report_command, files, record):
    odd = copy.deepcopy(record)
    odd["runtime"] |= {"platform": HOSTILE, HOSTILE: HOSTILE, "git_commit": ["\ud800", HOSTILE]}
    odd["timing"] = {"compile_seconds": HOSTILE}
    odd["before"]["successes"] = 40
    name = HOSTILE.replace("/", "_") + ".json"
    Path(name).write_text(json.dumps(odd))
    plain = report_command("run.json", "run.npz", "--output", "plain.html")
    outcome = report_command(name, "run.npz", "--output", "odd.html")
    assert plain.code == outcome.code == 0, outcome.err
    tags = [[tag for tag, _ in Elements(Path(file).read_text()).elements] for file in ("plain.html", "odd.html")]
    for tag in ("script", "img", "style", "svg", "a"):
        assert tags[0].count(tag) == tags[1].count(tag)
    assert HOSTILE in Elements(Path("odd.html").read_text()).words()


def test_a_record_alone_says_how_to_get_the_policies(report_command, files):
    assert report_command("run.json").code == 0
    words = Elements(Path("report.html").read_text()).words()
    assert "python -m jaxrl_mini.train --seed 7 --output run.json --trajectories run.npz" in words
    assert "python -m jaxrl_mini.report run.json run.npz --output report.html" in words


def test_the_page_says_how_to_get_all_of_it_again(report_command, files):
    assert report_command("run.json", "run.npz", "--output", "a b.html", "--figures", "plots").code == 0
    words = Elements(Path("a b.html").read_text()).words()
    assert "python -m jaxrl_mini.train --seed 7 --output run.json --trajectories run.npz" in words
    assert "python -m jaxrl_mini.report run.json run.npz --output 'a b.html' --figures plots" in words


def test_a_run_without_sampled_episodes_is_not_asked_for_them(command, tmp_path):
    assert command(train, "--exact-gradient", *SMALL, "--output=-r.json").code == 0
    assert command(report, "./-r.json").code == 0
    words = Elements(Path("report.html").read_text()).words()
    assert "--trajectories" not in words and "--exact-gradient" in words


def test_the_commands_that_the_report_names_make_the_missing_parts(command, files):
    """From a record on, following what the page says leads to the page with the policies."""
    Path("run.npz").unlink()
    Path("run.json").unlink()
    assert command(train, "--seed", 11, "--lr", 0.1, *SMALL, "--output", "a b.json").code == 0
    assert command(report, "a b.json").code == 0
    words = Elements(Path("report.html").read_text()).words()
    again = shlex.split(re.search(r"python -m jaxrl_mini.train [^$]*?'a b.npz'", words)[0])
    assert command(train, *again[3:]).code == 0
    assert command(report, "a b.json", "a b.npz").code == 0
    assert "comes here" in Elements(Path("report.html").read_text()).words()


def test_a_recording_goes_to_the_record_of_its_run(report_command, files, record):
    other = copy.deepcopy(record)
    other["config"]["seed"] = 8
    other["history"][5]["loss"] += 1e-9
    Path("other.json").write_text(json.dumps(other))
    found = sources.read(["other.json", "run.npz", "run.json"])
    assert [one.recording_name for one in found] == ["", "run.npz"]
    for arguments in (["other.json", "run.npz"], ["run.npz"], ["run.json", "run.npz", "run.npz"]):
        outcome = report_command(*arguments)
        assert outcome.code == 2 and "run.npz" in outcome.err[0] and not Path("report.html").exists()


def test_a_recording_of_a_language_model_goes_to_its_record_and_shows_its_episodes(command, tiny_folder, tmp_path):
    flags = ["--backend", "hf", "--model", tiny_folder, "--iterations", 3, "--eval-episodes", 8, "--output", "lm.json"]
    assert command(train, *flags, "--trajectories", "lm.npz").code == 0
    outcome = command(report, "lm.json", "lm.npz")
    assert (outcome.code, outcome.err) == (0, [])
    words = Elements(Path("report.html").read_text()).words()
    assert "lm.json: iteration 0, the first" in words and "Of the 32 episodes of iteration 2," in words
    assert "Percent of each action" not in words


def test_the_verifiers_verdict_is_shown_whatever_the_reward(command, tmp_path):
    assert command(train, *SMALL, "--reward", "public-test", "--output", "r.json", "--trajectories", "r.npz").code == 0
    (found,) = sources.read(["r.json", "r.npz"])
    for iteration in (0, 2):
        batch = page.describe_batch(found.recording, iteration)
        assert batch["private"] == round(8 * found.record["history"][iteration]["train_success_rate"])


def test_the_episodes_are_those_of_the_recording(files, grpo_arrays):
    found = sources.read([str(files / "run.json"), str(files / "run.npz")])[0]
    for iteration in (0, 99):
        batch = page.describe_batch(found.recording, iteration)
        actions, rewards = grpo_arrays["actions"][iteration], grpo_arrays["rewards"][iteration]
        assert (batch["episodes"], batch["private"]) == (32, rewards.sum())
        assert batch["submitted"] == batch["public"] == (actions == 5).any(axis=-1).sum()
        for group, episode in enumerate(batch["shown"]):
            names = [name for name, _ in episode["steps"]]
            assert names == [page.ACTIONS[action] for action in actions[group, 0] if action >= 0]
            assert episode["reward"] == rewards[group, 0]
            last = [seen for _, seen in episode["steps"] if seen]
            assert not last or last[-1].startswith("\n".join(episode["lines"]))


def test_the_report_knows_what_the_verifier_accepts():
    accepted = [page.fault(artifact) is None for artifact in VARIANTS]
    assert (evaluation_verdicts(500) == accepted).all() and (training_verdicts(0, 100, 4) == accepted).all()
    assert page.fault(VARIANTS[0]) == "the search for -41 in [1] never ends"


# Several, and sweeps


def test_runs_and_a_sweep_stand_side_by_side(command, files):
    swept = command(sweep, "--seeds", 4, "--lr", 0.04, 0.08, *SMALL, "--output", "swept")
    outcome = command(report, "run.json", "swept", "run.npz", "--figures", "plots")
    assert (swept.code, outcome.code, outcome.err) == (0, 0, [])
    words = Elements(Path("report.html").read_text()).words()
    for part in ("run.json", "swept: lr=0.04", "swept: lr=0.08", "8 of 8 runs", "lr=0.08 minus lr=0.04"):
        assert part in words
    assert words.count("too few runs (4)") == 3  # two settings, one difference
    assert words.count("effective-lr") == 1  # that of the run: the sweep's settings have two
    assert "python -m jaxrl_mini.sweep --seeds 0:4 --iterations 3 --groups 2 --group-size 4 --lr 0.04 0.08" in words
    assert {path.name for path in Path("plots").iterdir()} == {f"{name}.png" for name in page.METRICS}


def test_a_sweep_of_one_run_without_history_says_so(command, tmp_path):
    command(sweep, "--seeds", 1, *SMALL, "--history-every", 0, "--output", "swept")
    assert command(report, "swept").code == 0
    words = Elements(Path("report.html").read_text()).words()
    assert "1 of 1 run." in words and "too few runs (1)" in words and "unknown" in words
    assert "1 runs" not in words and "effective-lr 0.08" in words
    assert "keeps no history" in Elements(Path("report.html").read_text()).words()


def test_a_language_models_record_is_shown_too(report_command, files, record):
    model = copy.deepcopy(record)
    model["config"] |= {"backend": "hf", "model": "<b>folder", "lr": 0.08}
    for row in model["history"]:
        row["exact_success_rate"] = None
    Path("lm.json").write_text(json.dumps(model))
    assert report_command("lm.json").code == 0
    words = Elements(Path("report.html").read_text()).words()
    assert "<b>folder" in words and "trained a language model" in words


@pytest.mark.parametrize("value", [Config(), Config(seed=0, lr=1e-7, beta=0.0, eval_episodes=3),
                                   Config(backend="hf", model="a b'c", dtype="bfloat16", exact_every=2)])  # fmt: skip
def test_the_command_of_a_run_gives_its_config(value):
    words = shlex.split(commandline.train_command(value, "--output", "x y.json"))
    assert words[:3] == ["python", "-m", "jaxrl_mini.train"] and words[-2:] == ["--output", "x y.json"]
    parser = commandline.Parser("test")
    commandline.add_config_flags(parser)
    assert commandline.config_from(parser.parse_args(words[3:-2])) == value


@pytest.mark.parametrize(
    "grid",
    [
        Grid.product(range(5, 9), method=["grpo", "rs-sft"], lr=[0.04, 0.08], history_every=7),
        Grid.product([7, 19, 42], history_every=0, iterations=[3, 5]),
    ],
)
def test_the_command_of_a_sweep_gives_its_grid(command, grid, tmp_path):
    words = shlex.split(sweep_command(grid, "--output", "x"))
    Dataset.create(tmp_path / "x", grid, {})
    outcome = command(sweep, *words[3:], "--shard", "999999/999999")  # nothing to compute; another grid is refused
    assert outcome.code == 0, outcome.err


def test_a_grid_that_is_no_product_has_no_command():
    assert sweep_command(Grid((Config(lr=0.1, clip=0.1), Config(lr=0.2, clip=0.3)), range(3))) is None


# What is refused


def changed(record, path, value):
    odd = copy.deepcopy(record)
    *way, last = path
    place = odd
    for name in way:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return odd


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (("config", "seed"), None, "seed"),
        (("config", "seed"), -1, "--seed"),
        (("config",), {"a": 1}, "config"),
        (("history",), [], "history"),
        (("history",), [3], "history"),
        (("history", 4, "mean_kl"), "<b>", "mean_kl"),
        (("history", 4, "mixed_groups"), None, "mixed_groups"),
        (("before",), None, "evaluation"),
        (("after",), [1], "evaluation"),
        (("after", "successes"), 501, "success"),
        (("after", "episodes"), 0, "success"),
        (("after", "mean_actions"), "4", "mean_actions"),
        (("after", "success_rate_interval"), [0.1], "success_rate_interval"),
        (("after", "mean_actions_interval"), "ab", "mean_actions_interval"),
    ],
)
def test_a_record_that_is_none_is_refused_in_one_line(report_command, files, record, path, value, word):
    Path("odd.json").write_text(json.dumps(changed(record, path, value)))
    outcome = report_command("odd.json")
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 1)
    assert "odd.json" in outcome.err[0] and word in outcome.err[0]
    assert not Path("report.html").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00", '{"schema_version": 2}', None, "folder"])
def test_a_file_that_is_no_source_is_refused_in_one_line(report_command, tmp_path, content):
    if content == "folder":
        Path("odd").mkdir()
    elif content is not None:
        Path("odd").write_text(content)
    outcome = report_command("odd")
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 1) and "odd" in outcome.err[0]
    assert not Path("report.html").exists()


def test_files_that_no_report_wrote_stay(report_command, files):
    Path("mine.html").write_text("precious")
    Path("plots").mkdir()
    Path("plots/loss.png").write_text("precious")
    for arguments in (["--output", "mine.html"], ["--figures", "plots"], ["--output", "run.json"]):
        before = {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}
        outcome = report_command("run.json", *arguments)
        assert outcome.code == 2 and "--overwrite" in outcome.err[0] and len(outcome.err) == 1
        assert before == {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}
    arguments = ("run.json", "--figures", "plots", "--output", "mine.html")
    assert report_command(*arguments, "--overwrite").code == 0
    assert report_command(*arguments).code == 0  # our own files are replaced


def test_without_its_libraries_the_report_names_the_extra(report_command, files, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "jinja2" or name == "jaxrl_mini.pages.page"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("jaxrl_mini.pages.page")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    outcome = report_command("run.json")
    assert outcome.code == 2 and "jinja2" in outcome.err[0] and "[report]" in outcome.err[0]


def test_help_needs_neither_jax_nor_matplotlib(tmp_path):
    code = (
        "import sys; from jaxrl_mini import report\ntry: report.main(['--help'])\n"
        "except SystemExit: sys.exit(any(name in sys.modules for name in ('jax', 'matplotlib', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "examples:" in done.stdout


def test_a_long_run_with_its_policies_stays_under_a_megabyte(files, grpo_run, record):
    long = copy.deepcopy(record)
    long["config"]["iterations"] = 3000
    long["history"] = [{**long["history"][i % 100], "iteration": i} for i in range(3000)]
    found = sources.read([str(files / "run.json"), str(files / "run.npz")])[0]
    arrays = found.recording.arrays
    arrays["logits"] = np.random.default_rng(0).normal(size=(3001, 24, 6)).astype(np.float32)
    found.curves[:] = [page.figures.curves_of_record(long, "long")]
    text = page.render([found])
    assert "Of 3000 iterations, 600 are shown" in text and len(text.encode()) < 1_000_000
