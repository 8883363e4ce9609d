"""Statistics of sweeps, each against a value worked out by hand or by another way."""

import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats

from jaxrl_mini.config import Config
from jaxrl_mini.sweeps import intervals, statistics
from jaxrl_mini.sweeps.engine import run_sweep
from jaxrl_mini.sweeps.grid import Grid

HF = {"backend": "hf", "model": "m"}


def runs(success, finite=None, actions=4.0, to_90=-1, seed=None):
    count = len(success)
    return {
        "seed": np.arange(count) if seed is None else seed,
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
    values = stats.ttest_1samp([0.0, 0.5, 0.25, 0.75, 1.0, 1.0, 0.5, 0.0], 0).confidence_interval()
    assert found["success_mean_interval"] == pytest.approx(list(values)) and found["finite_success_mean"] == 0.5
    assert found["success_median_interval"] == [0.0, 1.0]  # the lowest and the highest: 99.2 %; the next ones, 93 %
    assert found["success_iqm_interval"] is None and found["mean_actions_interval"] is None


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert statistics.describe(runs([0, 0, 0.5, 0.5, 0.5, 0.6, 1, 1]))["success_iqm"] == pytest.approx(0.525)


def test_iterations_to_90_are_none_where_half_of_the_runs_never_reached_it():
    found = statistics.describe(runs([0.5] * 4, to_90=[3, 4, -1, -1]))
    assert found["iterations_to_90"] is None and found["reached_90"] == 2 and statistics.to_90(found) == "not reached"
    found = statistics.describe(runs([0.5] * 4, to_90=[3, 4, 5, -1]))
    assert found["iterations_to_90"] == 4.5 and statistics.to_90(found) == "4.5"


def test_without_history_it_is_unknown_who_reached_90():
    found = statistics.describe(runs([0.95] * 4), resolution=None)
    assert found["iterations_to_90"] is found["reached_90"] is None and statistics.to_90(found) == "unknown"


@pytest.mark.parametrize(
    ("settings", "every", "expected"),
    [
        ({}, 1, 1),
        ({}, 0, None),
        ({}, 50, 50),
        ({"iterations": 120}, 50, 50),  # after 50, 100 and 120
        ({"iterations": 20}, 50, 20),
        (HF, 1, 10),
        (HF, 50, 50),
        (HF, 3, 30),  # evaluated after 10, 20, ...; kept after 3, 6, ...
        (HF | {"exact_every": 4}, 1, 4),
    ],
)
def test_iterations_to_90_are_as_fine_as_what_is_kept(settings, every, expected):
    config = Config(**settings)
    assert statistics.resolution(Grid((config,), range(3), every), config) == expected
    found = statistics.describe(runs([0.95] * 4, to_90=expected or -1), expected)
    assert statistics.to_90(found) == {None: "unknown", 1: "1"}.get(expected, f"1 to {expected}")


def test_failed_runs_are_counted_and_weigh_as_failures():
    found = statistics.describe(runs([0.0, 1.0, 1.0], finite=[False, True, True]))
    assert found["failed"] == 1 and found["success_mean"] == pytest.approx(2 / 3)


def test_failed_runs_have_their_own_interval_and_did_not_reach_90():
    """They had, before they failed: what is counted is what a setting gives in the end."""
    good = [0.97, 0.98, 0.99, 0.96, 0.95]
    found = statistics.describe(runs([0.0, *good], finite=[False] + [True] * 5, to_90=12))
    assert found["reached_90"] == 5 and found["failed_interval"] == pytest.approx([0.00421, 0.64123], abs=1e-5)
    assert found["success_mean"] == pytest.approx(np.sum(good) / 6)
    assert found["finite_success_mean"] == pytest.approx(np.mean(good))
    low, high = stats.ttest_1samp(good, 0).confidence_interval()
    assert found["success_mean_interval"] == pytest.approx([low, min(high, 1.0)])
    lost = statistics.describe(runs([0.0] * 6, finite=[False] * 6, to_90=12))
    assert lost["finite_success_mean"] is lost["mean_actions"] is lost["success_mean_interval"] is None
    assert lost["reached_90"] == 0 and lost["iterations_to_90"] is None


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_runs_that_are_all_alike_do_not_say_how_others_spread(value):
    assert statistics.interval(np.full(300, value) + np.linspace(0, 3e-16, 300), intervals.mean) is None
    assert statistics.why_no_interval(300) == "all alike" and statistics.why_no_interval(4) == "too few runs (4)"


def test_differences_are_paired_by_seed():
    seeds, noise = np.arange(12), np.linspace(0, 0.6, 12)
    one, other = runs(noise, seed=seeds), runs((noise + 0.1 + noise / 10)[::-1][:10], seed=seeds[::-1][:10])
    (found,) = statistics.differences({0: one, 3: other})
    gap = (0.1 + noise / 10)[2:]
    assert found["settings"] == [0, 3] and found["pairs"] == 10
    assert found["mean_difference"] == pytest.approx(gap.mean()) and found["better"] == 10
    assert found["sign_p"] == pytest.approx(2 / 2**10)
    assert found["mean_difference_interval"] == pytest.approx([*stats.ttest_1samp(gap, 0).confidence_interval()])


def test_intervals_of_differences_are_corrected_for_their_number():
    values = np.random.default_rng(0).random((3, 8))
    found = statistics.differences({place: runs(one) for place, one in enumerate(values)})
    for one in found:
        first, second = one["settings"]
        expected = stats.ttest_1samp(values[second] - values[first], 0).confidence_interval(1 - 0.05 / 3)
        assert one["mean_difference_interval"] == pytest.approx([max(-1, expected.low), min(1, expected.high)])


def test_a_failed_run_enters_differences_with_0_but_not_their_interval():
    steady, other = np.linspace(0.5, 0.6, 7), np.linspace(0.6, 0.8, 7)
    failed = runs(np.append(other, 0.0), finite=[True] * 7 + [False])
    (found,) = statistics.differences({0: runs(np.append(steady, 0.5)), 1: failed})
    gap = other - steady
    assert (found["pairs"], found["failed_pairs"], found["better"], found["worse"]) == (8, 1, 7, 1)
    assert found["mean_difference"] == pytest.approx((gap.sum() - 0.5) / 8)
    assert found["finite_mean_difference"] == pytest.approx(gap.mean())
    assert found["mean_difference_interval"] == pytest.approx([*stats.ttest_1samp(gap, 0).confidence_interval()])


def test_a_difference_of_rounding_is_a_tie():
    (found,) = statistics.differences({0: runs([1.0, 1.0, 0.5]), 1: runs([1 + 2.3e-16, 1.0, 0.6])})
    assert (found["better"], found["worse"], found["sign_p"]) == (1, 0, 1.0)


def test_the_signed_rank_test_equals_the_enumeration_of_all_signs():
    gap = np.array([0.11, -0.02, 0.05, 0.07, 0.13, -0.01, 0.19])
    ranks = np.argsort(np.argsort(np.abs(gap))) + 1
    observed = ranks[gap > 0].sum()
    sums = [sum(rank for rank, up in zip(ranks, ups, strict=True) if up) for ups in itertools.product((0, 1), repeat=7)]
    upper = np.mean([total >= observed for total in sums])
    (found,) = statistics.differences({0: runs(np.full(7, 0.5)), 1: runs(0.5 + gap)})
    assert found["wilcoxon_p"] == pytest.approx(2 * upper)


def test_equal_settings_do_not_differ():
    (found,) = statistics.differences({0: runs(np.arange(5) / 5), 1: runs(np.arange(5) / 5)})
    assert found["mean_difference_interval"] is None
    assert (found["mean_difference"], found["sign_p"], found["wilcoxon_p"]) == (0.0, 1.0, 1.0)


def test_holms_correction_of_three():
    assert statistics.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert statistics.holm([0.9, 0.9]) == [1.0, 1.0] and statistics.holm([]) == []


def test_many_settings_are_compared_with_the_first_alone():
    found = statistics.differences(dict.fromkeys(range(25), runs(np.arange(3) / 3)))
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


def test_what_is_printed_says_what_is_missing_and_counts_in_words():
    """Setting 0: one run. Setting 1: 1,200 runs, one of them failed, all others alike."""
    many = runs([0.0] + [1.0] * 1199, finite=[False] + [True] * 1199, to_90=1_200)
    by_setting = {0: runs([0.5]), 1: many}
    settings = [
        {"setting": 0, "values": {"lr": 0.1}, **statistics.describe(by_setting[0], 1)},
        {"setting": 1, "values": {"lr": 0.2}, **statistics.describe(by_setting[1], 1_000)},
    ]
    differences = statistics.differences(by_setting)
    summary = {"runs": 1201, "runs_in_the_grid": 2400, "settings": settings, "differences": differences}
    first, _, head, one, thousand, *rest = statistics.as_text(summary).splitlines()
    assert first.startswith("1,201 of 2,400 runs;") and "without failed" in head
    assert "too few runs (1)" in one and "0 to 97.5 %" in one and "not reached" in one
    assert " 1,200 " in thousand and "all alike" in thousand and "201 to 1,200" in thousand
    assert "0.99917  1.00000" in thousand
    assert rest[1].startswith("1 comparison,") and "too few runs (0)" in rest[-1]


def test_no_p_value_is_printed_as_0():
    low, high = np.linspace(0.1, 0.2, 5000), np.linspace(0.3, 0.5, 5000)
    by_setting = {0: runs(low), 1: runs(high)}
    settings = [{"setting": i, "values": {}, **statistics.describe(one)} for i, one in by_setting.items()]
    differences = statistics.differences(by_setting)
    text = statistics.as_text({"runs": 1, "runs_in_the_grid": 1, "settings": settings, "differences": differences})
    assert text.startswith("1 of 1 run;") and text.split()[-4:] == ["5,000", "0", "<1e-300", "<1e-300"]


def test_a_summary_of_an_empty_folder_says_so(tmp_path):
    from jaxrl_mini.sweeps.dataset import Dataset

    summary = statistics.summarize(Dataset.create(tmp_path / "out", Grid.product(range(6)), {}))
    assert summary["runs"] == 0 and summary["settings"] == []
    assert statistics.as_text(summary).startswith("0 of 6 runs: nothing to summarize yet")
