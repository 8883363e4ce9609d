"""Statistics of sweeps, each against a value worked out by hand or by another way."""

import itertools
import json
import math

import numpy as np
import pytest

from jaxrl_mini.sweeps import statistics
from jaxrl_mini.sweeps.engine import run_sweep
from jaxrl_mini.sweeps.grid import Grid


def runs(success, finite=None, actions=4.0, to_90=-1):
    count = len(success)
    return {
        "success": np.array(success, float),
        "finite": np.ones(count, bool) if finite is None else np.array(finite),
        "after_exact_mean_actions": np.full(count, actions),
        "after_successes": np.round(8 * np.array(success)).astype(int),
        "eval_episodes": np.full(count, 8),
        "iterations_to_90": np.broadcast_to(to_90, count),
    }


def test_figures_of_eight_runs():
    found = statistics.describe(runs([0.0, 0.5, 0.25, 0.75, 1.0, 1.0, 0.5, 0.0], to_90=[1, 2, 3, 4, 5, -1, -1, -1]))
    assert found["success_mean"] == 0.5 and found["success_median"] == 0.5
    assert found["success_iqm"] == 0.5 and found["sampled_success_mean"] == 0.5
    assert found["success_deviation"] == pytest.approx(math.sqrt(1.125 / 7))
    assert found["iterations_to_90"] == 4.5 and found["reached_90"] == 5
    low, high = found["success_mean_interval"]
    assert 0.2 < low < 0.4 and 0.6 < high < 0.8


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert statistics.describe(runs([0, 0, 0.5, 0.5, 0.5, 0.6, 1, 1]))["success_iqm"] == pytest.approx(0.525)


def test_iterations_to_90_are_unknown_where_half_of_the_runs_never_reached_it():
    assert statistics.describe(runs([0.5] * 4, to_90=[3, 4, -1, -1]))["iterations_to_90"] is None
    assert statistics.describe(runs([0.5] * 4, to_90=[3, 4, 5, -1]))["iterations_to_90"] == 4.5


def test_failed_runs_are_counted_and_weigh_as_failures():
    found = statistics.describe(runs([0.0, 1.0, 1.0], finite=[False, True, True]))
    assert found["failed"] == 1 and found["success_mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_runs_that_are_all_alike_still_have_an_interval_with_a_width(value):
    low, high = statistics.interval(np.full(300, value), np.mean)
    assert high - low == pytest.approx(0.01) and 0 <= low <= value <= high <= 1
    assert statistics.interval(np.ones(1), np.mean) is None


def test_bootstrap_intervals_cover_the_mean_about_as_often_as_they_say():
    generator = np.random.default_rng(0)
    samples = generator.beta(8, 2, size=(150, 40))
    hits = sum(low <= 0.8 <= high for low, high in (statistics.interval(sample, np.mean) for sample in samples))
    assert 0.88 * 150 <= hits <= 150
    assert statistics.interval(samples[0], np.mean) == statistics.interval(samples[0], np.mean)


def test_differences_are_paired_by_seed():
    seeds, noise = np.arange(12), np.linspace(0, 0.6, 12)
    one, other = (seeds, noise), (seeds[::-1][:10], (noise + 0.1)[::-1][:10])
    (found,) = statistics.differences({0: one, 3: other})
    assert found["settings"] == [0, 3] and found["pairs"] == 10
    assert found["mean_difference"] == pytest.approx(0.1) and found["better"] == 10
    assert found["sign_p"] == pytest.approx(2 / 2**10)
    low, high = found["mean_difference_interval"]
    assert low <= 0.1 <= high < 0.2


def test_the_signed_rank_test_equals_the_enumeration_of_all_signs():
    gap = np.array([0.11, -0.02, 0.05, 0.07, 0.13, -0.01, 0.19])
    ranks = np.argsort(np.argsort(np.abs(gap))) + 1
    observed = ranks[gap > 0].sum()
    sums = [sum(rank for rank, up in zip(ranks, ups, strict=True) if up) for ups in itertools.product((0, 1), repeat=7)]
    upper = np.mean([total >= observed for total in sums])
    seeds = np.arange(7)
    (found,) = statistics.differences({0: (seeds, np.full(7, 0.5)), 1: (seeds, 0.5 + gap)})
    assert found["wilcoxon_p"] == pytest.approx(2 * upper)


def test_equal_settings_do_not_differ():
    seeds = np.arange(5)
    (found,) = statistics.differences({0: (seeds, seeds / 5), 1: (seeds, seeds / 5)})
    assert (found["mean_difference"], found["sign_p"], found["wilcoxon_p"]) == (0.0, 1.0, 1.0)


def test_holms_correction_of_three():
    assert statistics.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert statistics.holm([0.9, 0.9]) == [1.0, 1.0] and statistics.holm([]) == []


def test_many_settings_are_compared_with_the_first_alone():
    seeds = np.arange(3)
    found = statistics.differences(dict.fromkeys(range(25), (seeds, seeds / 3)))
    assert [one["settings"] for one in found] == [[0, i] for i in range(1, 25)]


def test_a_summary_is_that_of_the_rows(tmp_path):
    grid = Grid.product(range(6), lr=[0.02, 0.08], iterations=20, eval_episodes=8)
    dataset = run_sweep(grid, tmp_path / "out")
    summary = statistics.summarize(dataset)
    rows = dataset.runs().to_pandas()
    for one in summary["settings"]:
        mine = rows[rows["setting"] == one["setting"]]
        assert one["values"] == {"lr": mine["lr"].iloc[0]}
        assert one["success_mean"] == pytest.approx(mine["after_exact_success_rate"].mean(), abs=1e-15)
        assert one["mean_actions"] == pytest.approx(mine["after_exact_mean_actions"].mean())
    assert len(summary["differences"]) == 1 and json.dumps(summary, allow_nan=False)
    text = statistics.as_text(summary)
    assert "lr=0.02" in text and "1 - 0" in text


def test_a_summary_of_an_empty_folder_says_so(tmp_path):
    from jaxrl_mini.sweeps.dataset import Dataset

    summary = statistics.summarize(Dataset.create(tmp_path / "out", Grid.product(range(6)), {}))
    assert summary["runs"] == 0 and summary["settings"] == [] and "0 of 6 runs" in statistics.as_text(summary)
