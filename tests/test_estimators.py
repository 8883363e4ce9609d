"""The command that judges estimators: its table, its files, and what it refuses."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.special import log_softmax

from jaxrl_mini import estimators, train
from jaxrl_mini.config import Variant
from jaxrl_mini.exact import bias, laws, moments, situations
from jaxrl_mini.tasks.specification import load_task

TASK = load_task("binary-search-repair")
UNIFORM = np.zeros((24, 6))
SMALL = ("--advantage", "rloo", "group-std", "--aggregation", "episode-mean", "fixed-length", "--at", "0")


@pytest.fixture
def judge(command):
    return lambda *arguments: command(estimators, *arguments)


def rows_of(**options) -> list[dict]:
    settings = {"advantages": ["rloo"], "aggregations": ["fixed-length"], "groups": 4, "group_size": 8} | options
    return bias.judge("uniform", UNIFORM, TASK, **settings)


def test_the_table_says_which_estimator_points_elsewhere(judge, tmp_path):
    outcome = judge(*SMALL, "--output", "e.csv", "--plot", "e.svg")
    assert outcome.code == 0
    lines = [line.split() for line in outcome.out]
    assert lines[0][0] == "policy"
    by_name = {tuple(line[3:5]): line for line in lines if line[2] == "success"}
    assert by_name["rloo", "fixed-length"][5:8] == ["0.1667", "1.000000", "0.00"]
    assert float(by_name["rloo", "episode-mean"][7]) == pytest.approx(32.92, abs=0.01)
    with (tmp_path / "e.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(lines) - 1
    assert b"<svg" in (tmp_path / "e.svg").read_bytes()


def test_a_parquet_file_holds_the_rows_unrounded(judge, tmp_path):
    assert judge(*SMALL, "--output", "e.parquet").code == 0
    rows = pq.read_table(tmp_path / "e.parquet").to_pylist()
    expected = rows_of(advantages=["rloo", "group-std"], aggregations=["episode-mean", "fixed-length"])
    assert [row["size"] for row in rows if row["what"] == "success"] == [
        row["size"] for row in expected if row["what"] == "success"
    ]


def test_a_step_gains_what_the_exact_success_says():
    """To first order, along the gradient itself, its norm times the step."""
    row = rows_of(step=1e-4)[0]
    gradient = laws.laws_of(TASK, np.full((24, 6), -np.log(6)))[0].gradient
    assert row["gain"] == pytest.approx(1e-4 * np.linalg.norm(gradient), rel=1e-3)
    assert row["success"] == pytest.approx(0.06526491769547325, abs=1e-12)


def test_the_variance_is_that_of_a_batch_times_its_episodes():
    (law,) = laws.laws_of(TASK, np.full((24, 6), -np.log(6)))
    for row, variant, method in (
        (rows_of()[0], Variant("rloo", "fixed-length"), "grpo"),
        (rows_of()[1], Variant(), "rs-sft"),
    ):
        assert row["advantage"] == (variant.advantage if method == "grpo" else method)
        found = moments.batch_moments([law], 4, 8, variant, method)
        assert row["variance"] == pytest.approx(32 * found.variance, rel=1e-12)


def test_a_step_against_the_kl_goes_back_to_the_uniform_policy():
    logits = np.random.default_rng(0).normal(size=(24, 6))
    settings = {"advantages": ["rloo"], "aggregations": ["fixed-length"], "groups": 4, "group_size": 8, "step": 1e-3}
    rows = bias.judge("random", logits, TASK, **settings)
    (row,) = (row for row in rows if row["kl"] == "k2")
    log_probs = log_softmax(logits, axis=1)
    (law,) = laws.laws_of(TASK, log_probs)
    mean = moments.kl_moments([law], np.full((24, 6), -np.log(6)), "k2", "fixed-length", 8).mean
    back = logits - 1e-3 * mean / np.linalg.norm(mean)
    gain = float(situations.exact_of_logits(TASK, back, "train").success_rate) - row["success"]
    assert row["cosine"] > 0 and row["gain"] == pytest.approx(gain, rel=1e-9)
    assert np.abs(log_softmax(back, axis=1) + np.log(6)).sum() < np.abs(log_probs + np.log(6)).sum()


def test_a_reward_for_the_public_test_points_away_from_success():
    """Its gradient submits at once, whatever the code."""
    row = rows_of(reward="public-test")[0]
    assert row["cosine"] < 0 and row["gain"] < 0


def test_the_policy_of_a_recording_is_judged_and_one_that_was_kept(command, judge, tmp_path):
    command(train, "--iterations", 20, "--output", "r.json", "--trajectories", "r.npz", "--save-policy", "kept")
    outcome, kept = (judge(*SMALL, "--policy", policy) for policy in ("r.npz", "kept"))
    assert [line.split()[1:] for line in kept.out] == [line.split()[1:] for line in outcome.out]
    with np.load(tmp_path / "r.npz", allow_pickle=False) as file:
        expected = bias.judge("r.npz", file["logits"][-1], TASK, advantages=["rloo"], aggregations=["episode-mean"],
                              groups=4, group_size=8)  # fmt: skip
    line = next(line for line in outcome.out if "rloo" in line and "episode-mean" in line)
    assert line.split()[1] == f"{expected[0]['success']:.4f}" and f"{expected[0]['cosine']:.6f}" in line


def test_the_policy_of_another_task_is_judged_where_that_is_named(command, judge):
    task = "bandit:success=0.2/0.5/0.8"
    command(
        train, "--task", task, "--iterations", 3, "--eval-episodes", 1,
        "--output", "r.json", "--trajectories", "r.npz", "--save-policy", "kept",
    )  # fmt: skip
    after = json.loads(Path("r.json").read_text())["after"]["exact_success_rate"]
    for policy in ("r.npz", "kept"):
        assert judge(*SMALL, "--task", task, "--policy", policy, "--output", "e.csv", "--overwrite").code == 0
        (found,) = {float(line.split(",")[1]) for line in Path("e.csv").read_text().splitlines()[1:]}
        assert found == pytest.approx(after, abs=1e-9)
        outcome = judge(*SMALL, "--policy", policy)
        assert outcome.code == 2 and f"is of another task: add --task {task}" in outcome.err[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--output", "e.json"), "--output e.json has no known ending"),
        (("--plot", "e.gif"), "--plot e.gif has no known ending"),
        (("--at", "-1"), "--at -1 is out of range"),
        (
            ("--at", "10", "200000000"),
            "--at 200000000 is out of range: expected numbers of iterations from 0 to 1000000",
        ),
        (("--step", "0"), "--step 0.0 is out of range"),
        (("--group-size", "1"), "--group-size 1 is out of range"),
        (("--reward", "shuffled"), "--reward shuffled depends on the other episodes"),
        (("--reward", "nothing"), "--reward 'nothing' is unknown"),
        (("--policy", "none.npz"), "recording none.npz cannot be read"),
        (("--policy", "."), "has no policy.json: expected what train --save-policy wrote of a table policy"),
        (("--groups", "64", "--group-size", "64", "--at", "0"), "are too many for step-mean"),
        (("--groups", 2**18, "--group-size", 4, "--advantage", "rloo", "--aggregation", "fixed-length"), "for rs-sft"),
        (
            ("--task", "guess:numbers=4", "--reward", "public-test"),
            "--reward public-test is for task binary-search-rep",
        ),
        (("--task", "bandit:success=2"), "task bandit:success=2: "),
        (("--task", "repair:lines=2", "--groups", 16), "are too many for batch-std and step-mean on 2 instances"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_one_line(judge, tmp_path, arguments, words):
    outcome = judge(*arguments)
    assert outcome.code == 2 and len(outcome.err) == 1 and words in outcome.err[0]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def certain(gap: float) -> np.ndarray:
    """A policy that reads first, by so much."""
    logits = np.zeros((24, 6))
    logits[0, 0] = gap
    return logits


def test_a_probability_of_zero_counts_as_nothing_where_that_is_the_limit_and_is_no_number_else():
    """At a gap of 800 five probabilities are 0 in float64; at 600 they are 1e-261."""
    settings = {"advantages": ["rloo"], "aggregations": ["fixed-length"], "groups": 4, "group_size": 8}
    names = ("size", "cosine", "angle", "variance", "gain")
    at, limit = (bias.judge("certain", certain(gap), TASK, **settings) for gap in (800, 600))
    for row, expected in zip(at, limit, strict=True):
        figures, wanted = ([one[name] for name in names] for one in (row, expected))
        if row["kl"] == "k3":
            assert np.isnan(figures).all() and np.isnan(row["signal_to_noise"])
        else:
            np.testing.assert_allclose(figures, wanted, rtol=1e-9, atol=1e-12)
    (line,) = (line.split() for line in bias.as_text(at).splitlines() if " k3 " in line)
    assert line[5:] == ["-"] * 6


def test_what_is_no_number_is_said(judge):
    from jaxrl_mini.config import Config
    from jaxrl_mini.policies.saved import save_table

    save_table("kept", certain(800).astype(np.float32), Config())
    outcome = judge(*SMALL, "--policy", "kept", "--output", "e.csv")
    assert outcome.code == 0
    assert [line for line in outcome.err if "a probability of 0" in line] == outcome.err[:1]


def test_signal_is_the_size_of_the_mean_by_the_deviation_of_an_episode():
    row = rows_of()[0]
    norm = row["size"] * np.linalg.norm(laws.laws_of(TASK, np.full((24, 6), -np.log(6)))[0].gradient)
    assert row["signal_to_noise"] == pytest.approx(norm / row["variance"] ** 0.5, rel=1e-12)
