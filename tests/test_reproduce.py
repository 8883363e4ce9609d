"""Records checked: one changed digit anywhere is found, and what is right is never called wrong."""

import copy
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxrl_mini import reproduce
from jaxrl_mini.config import Config
from jaxrl_mini.episodes import intervals
from jaxrl_mini.learning import loop
from jaxrl_mini.machine import runtime
from jaxrl_mini.runs import audit, records

RUN = loop.run
RESULTS = sorted((Path(__file__).parents[1] / "results").glob("*.json"))
CONFIGS = {
    "grpo": Config(seed=3, iterations=3, eval_episodes=20, clip=0.02),  # so narrow that it clips
    "rs-sft": Config(seed=3, iterations=3, eval_episodes=20, method="rs-sft"),
    "one episode": Config(seed=3, iterations=2, eval_episodes=1),
    "diverged": Config(seed=3, iterations=3, eval_episodes=20, lr=1e38, epochs=9),
}


@pytest.fixture(scope="module")
def runs():
    """Finished runs."""
    return {name: loop.run(config) for name, config in CONFIGS.items()}


@pytest.fixture
def record(runs):
    """The record of a run of grpo."""
    return records.build(runs["grpo"])


@pytest.fixture
def check(command, tmp_path, runs, monkeypatch):
    """Runs the command on a record, without computing what the settings lead to again."""
    finished = {result.config: result for result in runs.values()}
    monkeypatch.setattr(loop, "run", finished.__getitem__)

    def run(record, *flags):
        (tmp_path / "r.json").write_text(json.dumps(record))
        outcome = command(reproduce, "r.json", *flags)
        return outcome, [json.loads(line) for line in outcome.out]

    return run


def places(value, *place):
    """Every leaf of plain data, as a sequence of keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield place
    else:
        for key, item in items:
            yield from places(item, *place, key)


def put(record, place, change):
    """A copy with one leaf changed."""
    record = copy.deepcopy(record)
    *outer, last = place
    part = record
    for key in outer:
        part = part[key]
    part[last] = change(part.get(last) if isinstance(part, dict) else part[last])
    return record


def last_digit(value):
    """The number with its last digit changed: the next one, or the next float."""
    return value + 1 if isinstance(value, int) else math.nextafter(value, math.inf)


# What holds


def test_a_record_reproduces_bit_for_bit_and_a_changed_figure_is_named(train_command, command, tmp_path):
    flags = ("--seed", 5, "--iterations", 3, "--eval-episodes", 20)
    assert train_command(*flags, "--output", "r.json").code == 0
    outcome = command(reproduce, "r.json")
    assert (outcome.code, outcome.err) == (0, [])
    assert json.loads(outcome.out[0]) == {
        "file": "r.json", "figures": 2 * 10 + 3 * 10, "tolerance": 0.0, "elsewhere": {}, "findings": 0, "ok": True
    }  # fmt: skip
    record = json.loads((tmp_path / "r.json").read_text())
    changed = put(record, ("history", 1, "loss"), lambda loss: loss + 1e-3)
    (tmp_path / "t.json").write_text(json.dumps(changed))
    outcome = command(reproduce, "r.json", "t.json")
    assert outcome.code == 1
    fine, finding, summary = map(json.loads, outcome.out)
    assert fine["ok"] and not summary["ok"] and summary["findings"] == 1
    assert (finding["file"], finding["figure"]) == ("t.json", "history[1].loss")
    assert (finding["record"], finding["expected"]) == (changed["history"][1]["loss"], record["history"][1]["loss"])
    assert finding["difference"] == pytest.approx(1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_run_writes_holds(check, runs, name):
    record = records.build(runs[name])
    assert check(record)[0].code == check(record, "--static")[0].code == 0
    if name == "diverged":
        assert record["history"][-1]["loss"] is None


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_committed_records_hold_in_themselves(command, path):
    assert len(RESULTS) == 6
    assert command(reproduce, "--static", path).code == 0


def test_a_record_of_before_there_were_checksums_holds(check, record):
    del record["logits_crc32"]
    assert check(record)[0].code == check(record, "--static")[0].code == 0


def test_another_final_policy_is_found_where_bits_can_agree(check, record):
    other = record | {"logits_crc32": record["logits_crc32"] ^ 1}
    outcome, lines = check(other)
    assert outcome.code == 1 and lines[0]["figure"] == "logits_crc32"
    elsewhere = other | {"runtime": {**other["runtime"], "jax": "0.0.1"}}
    outcome, lines = check(elsewhere)
    assert outcome.code == 0 and lines[0]["tolerance"] == audit.TOLERANCE


SMALL = {"iterations": 4, "eval_episodes": 3, "groups": 2, "group_size": 2}
REWARDED = ("verifier", "public-test", "constant", "noisy:0.3"), ("grpo", "rs-sft"), (False, True)


def together():
    """Every reward with every method and gradient; `make test` has every two of them together."""
    for place, chosen in enumerate(itertools.product(*REWARDED)):
        settings = SMALL | dict(zip(("reward", "method", "exact_gradient"), chosen, strict=True))
        yield pytest.param(settings, marks=pytest.mark.full if place.bit_count() % 2 else ())


@pytest.mark.parametrize(
    "settings",
    [
        *together(),
        *[{"iterations": 3, "eval_episodes": 3, "lr": lr, "seed": seed}
          for lr, seed in itertools.product((100.0, 1e4, 1e8), (2, 3))],
        SMALL | {"group_size": 8, "lr": 1e8, "advantage": "group-mean"},
        {"iterations": 9, "eval_episodes": 3, "lr": 3e38, "method": "rs-sft", "seed": 1},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items() if name not in SMALL),
)  # fmt: skip
def test_every_record_that_is_written_holds_in_itself(settings):
    """Whatever is rewarded, and however far the logits go."""
    config = Config(**settings)
    with np.errstate(all="ignore"):
        record = records.build(RUN(config))
    again, findings = audit.check_form("r.json", record)
    assert again == config and not findings and not audit.inconsistencies(record, config)


# One digit


@pytest.mark.parametrize("name", ["grpo", "rs-sft"])
@pytest.mark.parametrize("part", ["before", "after", "history", "timing"])
def test_one_changed_digit_anywhere_is_found(check, runs, name, part):
    """The last digit of each figure; of the times, which differ from run to run, the first ones."""
    record = records.build(runs[name])
    assert name == "rs-sft" or any(row["ratio_outside_clip_fraction"] for row in record["history"])
    found = 0
    for place in places(record[part], part):
        changed = put(record, place, (lambda x: 1.1 * x + 0.1) if part == "timing" else last_digit)
        outcome, _ = check(changed)
        assert outcome.code == 1, place
        found += 1
    assert found == {"before": 10, "after": 10, "history": 3 * (10 + (name == "rs-sft")), "timing": 3}[part]


@pytest.mark.parametrize("changes", [{"seed": 4}, {"lr": 0.09, "effective_lr": 0.09}, {"clip": 0.03}, {"beta": 0.021}])
def test_a_changed_setting_is_found_by_the_run(check, record, monkeypatch, changes):
    monkeypatch.setattr(loop, "run", RUN)
    outcome, lines = check({**record, "config": record["config"] | changes})
    assert outcome.code == 1 and lines[-1]["figures"] == 50


@pytest.mark.parametrize("changes", [{"iterations": 4}, {"epochs": 3}, {"eval_episodes": 21}, {"lr": 0.09}])
def test_a_changed_setting_that_the_figures_contradict_is_found_without_a_run(check, record, monkeypatch, changes):
    monkeypatch.setattr(loop, "run", None)
    assert check({**record, "config": record["config"] | changes})[0].code == 1


def test_a_missing_or_added_row_is_found_without_a_run(check, record, monkeypatch):
    monkeypatch.setattr(loop, "run", None)
    for history in (record["history"][:-1], [*record["history"], record["history"][-1]]):
        outcome, lines = check({**record, "history": history})
        assert outcome.code == 1 and lines[0]["figure"] == "length of history" and lines[0]["expected"] == 3


# Without a run


@pytest.mark.parametrize(
    ("name", "place", "value", "figure", "expected"),
    [
        ("grpo", "config.effective_lr", 0.09, "config.effective_lr", 0.08),
        ("grpo", "after.episodes", 21, "after.episodes", 20),
        ("grpo", "after.successes", 21, "after.successes", 20),
        ("grpo", "after.success_rate", 1.5, "after.success_rate", 1),
        ("grpo", "before.success_rate", 0.11, "before.success_rate", ...),
        ("grpo", "before.success_rate_interval.0", 0.5, "before.success_rate_interval[0]", ...),
        ("grpo", "before.mean_actions", 3.99, "before.mean_actions", ...),
        ("grpo", "before.mean_actions_interval.1", 4.4, "before.mean_actions_interval[1]", ...),
        ("grpo", "before.mean_actions_interval", None, "length of before.mean_actions_interval", 2),
        ("grpo", "before.exact_success_rate", -0.1, "before.exact_success_rate", 0),
        ("grpo", "before.exact_mean_actions", 6.1, "before.exact_mean_actions", 6),
        ("grpo", "after.exact_success_rate", 0.5, "after.exact_success_rate", ...),
        ("grpo", "before.exact_mean_kl", 0.0, "presence of before.exact_mean_kl", False),
        ("grpo", "history.1.iteration", 2, "history[1].iteration", 1),
        ("grpo", "history.1.optimizer_steps", 1, "history[1].optimizer_steps", 2),
        ("grpo", "history.1.train_success_rate", 0.1, "history[1].train_success_rate", 3 / 32),
        ("grpo", "history.1.mixed_groups", 5, "history[1].mixed_groups", ...),
        ("grpo", "history.1.retained_episodes", 2, "history[1].retained_episodes", None),
        ("grpo", "history.1.entropy", 1.8, "history[1].entropy", math.log(6)),
        ("grpo", "history.1.mean_kl", 0.5, "history[1].mean_kl", ...),
        ("grpo", "history.1.ratio_outside_clip_fraction", 1.1, "history[1].ratio_outside_clip_fraction", 1),
        ("grpo", "history.1.gradient_norm", -1, "history[1].gradient_norm", 0),
        ("rs-sft", "history.1.retained_episodes", 32, "history[1].retained_episodes", ...),
        ("rs-sft", "history.1.optimizer_steps", 3, "history[1].optimizer_steps", 2),
        ("one episode", "after.mean_actions_interval", [1.0, 6.0], "length of after.mean_actions_interval", 1),
        ("grpo", "timing.run_seconds", 1e6, "timing.run_seconds", ...),
    ],
)
def test_a_record_that_contradicts_itself_is_found_without_a_run(
    check, runs, monkeypatch, name, place, value, figure, expected
):
    monkeypatch.setattr(loop, "run", None)
    keys = [int(key) if key.isdigit() else key for key in place.split(".")]
    changed = put(records.build(runs[name]), keys, lambda _: value)
    for flags in ((), ("--static",)):
        outcome, lines = check(changed, *flags)
        assert outcome.code == 1
        finding = next(line for line in lines if line.get("figure") == figure)
        assert finding["expected"] != finding["record"]
        assert expected is ... or finding["expected"] == pytest.approx(expected)


def test_a_batch_without_success_teaches_rs_sft_nothing(check, runs):
    record = records.build(runs["rs-sft"])
    empty = {"train_success_rate": 0.0, "mixed_groups": 0, "retained_episodes": 0, "optimizer_steps": 0}
    record["history"][1] |= empty | {"loss": 0.0, "gradient_norm": 0.0}
    assert check(record, "--static")[0].code == 0
    for name, value in {"loss": 0.1, "gradient_norm": 0.1, "optimizer_steps": 2}.items():
        outcome, lines = check(put(record, ("history", 1, name), lambda _: value), "--static")  # noqa: B023
        assert outcome.code == 1 and lines[0]["figure"] == f"history[1].{name}"


def test_exact_figures_of_a_language_model_stand_where_they_are_due(record):
    """Every third iteration and the last: the first and second, and the fourth of four, are not all due."""
    config = Config(backend="hf", model="m", iterations=4, exact_every=3)
    due = [config.evaluates(number) for number in range(4)]
    assert due == [False, False, True, True]


def test_the_possible_numbers_of_mixed_groups_are_those_of_an_enumeration():
    for groups, size in [(1, 2), (3, 2), (4, 2), (2, 3), (3, 4)]:
        possible = {}
        for counts in itertools.product(range(size + 1), repeat=groups):
            mixed = sum(0 < count < size for count in counts)
            possible.setdefault(sum(counts), set()).add(mixed)
        for successes, right in possible.items():
            for value in range(groups + 3):
                nearest = audit._nearest_mixed(value, successes, groups, size)
                assert nearest in right and abs(nearest - value) == min(abs(value - one) for one in right)


def test_the_interval_of_any_episodes_is_found_from_its_width_alone_and_no_other():
    draw = np.random.default_rng(0)
    for _ in range(300):
        episodes = int(draw.integers(2, 2000))
        lengths = draw.integers(1, draw.integers(2, 8), episodes)
        total, squares = int(lengths.sum()), int((lengths**2).sum())
        interval = intervals.mean_interval(total, squares, episodes)
        steps = int(draw.integers(lengths.max(), 9))
        low, high = audit._nearest_mean_interval(interval, total, episodes, steps)
        assert (low, high) == interval
        wider = audit._nearest_mean_interval((low - 1e-5, high + 1e-5), total, episodes, steps)
        assert wider != (low - 1e-5, high + 1e-5)


# On another machine


def elsewhere(record, **runtime):
    return {**record, "runtime": record["runtime"] | runtime}


OTHER = {
    "jax": "0.10.1", "processor": "another", "platform": "Linux-6.1-aarch64-with-glibc2.36", "device_kind": "H200",
    "vector_instructions": "sse sse2", "numpy_dispatch": "", "environment": {"GLIBC_TUNABLES": "x"},
    "device_version": "cuda 13", "mesh": {"data": 2, "model": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_on_another_platform_or_version_figures_have_a_tolerance_and_counts_none(check, record, name):
    there = elsewhere(record, **{name: OTHER[name]})
    outcome, lines = check(put(there, ("history", 1, "loss"), lambda loss: loss + 4e-4))
    assert outcome.code == 0 and lines[-1]["tolerance"] == 5e-4
    assert lines[-1]["elsewhere"] == {name: [OTHER[name], runtime.runtime().get(name)]} or name == "platform"
    assert check(put(there, ("history", 1, "loss"), lambda loss: loss + 6e-4))[0].code == 1
    outcome, lines = check(put(there, ("history", 1, "mixed_groups"), lambda groups: groups + 1))
    assert outcome.code == 1


def test_a_record_that_does_not_say_what_decided_its_bits_has_a_tolerance(check, record):
    added = {"vector_instructions", "numpy_dispatch", "environment", "threads", "device_version", "mesh"}
    for name in added:
        del record["runtime"][name]
    outcome, lines = check(put(record, ("history", 1, "loss"), last_digit))
    assert outcome.code == 0 and set(lines[-1]["elsewhere"]) == added - {"threads", "mesh"}


@pytest.mark.parametrize("change", [{"python": "3.12.1"}, {"cores": 99}, {"git_commit": "0" * 40}, {"device_count": 8}])
def test_what_has_no_influence_leaves_the_comparison_bit_for_bit(check, record, change):
    outcome, lines = check(put(elsewhere(record, **change), ("history", 1, "loss"), last_digit))
    assert outcome.code == 1 and lines[-1]["elsewhere"] == {}


# What is no record


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        (("history", 1, "loss"), "0.1", "history[1].loss: '0.1' is not of type 'number', 'null'"),
        (("history", 1, "loss"), math.nan, "not JSON with finite numbers"),
        (("history", 1, "loss"), 10**400, "not JSON with finite numbers"),
        (("history", 1), {}, "history[1]: 'iteration' is a required property"),
        (("history",), [], "history: [] should be non-empty"),
        (("after",), [], "after: [] is not of type 'object'"),
        (("runtime", "git_dirty"), "no", "runtime.git_dirty"),
        (("config", "seed"), -1, "--seed -1 is out of range"),
        (("config", "seed"), True, "config.seed"),
        (("config", "method"), "ppo", "config.method"),
        (("schema_version",), 2, "schema version 1"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(check, record, place, value, part):
    outcome, lines = check(put(record, place, lambda _: value))
    assert outcome.code == 2 and lines == [] and len(outcome.err) == 1
    assert "r.json" in outcome.err[0] and part in outcome.err[0]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1e999", "[" * 10**5, "\udcff"])
def test_what_is_no_json_is_refused_in_one_line(command, tmp_path, text):
    (tmp_path / "r.json").write_bytes(text.encode(errors="surrogateescape"))
    outcome = command(reproduce, "r.json")
    assert outcome.code == 2 and outcome.out == [] and len(outcome.err) == 1 and "r.json" in outcome.err[0]


def test_all_files_are_read_before_anything_runs(check, command, record, monkeypatch):
    check(record)
    monkeypatch.setattr(loop, "run", None)
    assert command(reproduce, "r.json", "missing.json").code == 2


def test_a_language_model_that_is_not_here_is_refused_unless_nothing_runs(check, record):
    hf = {"backend": "hf", "model": "models/gpt2", "effective_lr": 1e-6}
    for part in (record["before"], record["after"]):
        part["exact_mean_kl"] = 0.0
    for row in record["history"][:-1]:
        row["exact_success_rate"] = None
    record["config"] |= hf
    outcome, lines = check(record)
    assert outcome.code == 2 and lines == [] and len(outcome.err) == 1 and "models/gpt2" in outcome.err[0]
    assert check(record, "--static")[0].code == 0
    outcome, lines = check(put(record, ("history", 0, "exact_success_rate"), lambda _: 0.5), "--static")
    assert outcome.code == 1 and lines[0]["figure"] == "history[0].exact_success_rate"
