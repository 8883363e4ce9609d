"""Intervals over runs: by hand, and by how often they hold the true figure."""

import json

import numpy as np
import pytest
from scipy import stats

from benchmarks import coverage
from jaxrl_mini.sweeps import intervals


@pytest.mark.parametrize("name", coverage.BOUNDED)
@pytest.mark.parametrize("figure", coverage.METHODS)
def test_95_percent_intervals_hold_the_figure_in_93_to_97_percent_of_all_cases_or_there_is_none(figure, name):
    for runs in coverage.RUNS:
        found = coverage.coverage(figure, name, runs, samples=20_000 if runs < 1000 else 2000)
        if runs < (20 if figure == "IQM" else 5):
            assert found is None
        else:
            assert found is not None and 0.93 <= found <= 0.97, (runs, found)


def test_the_kept_study_is_that_of_these_methods():
    kept = json.loads((coverage.ROOT / "results/benchmarks/coverage.json").read_text())
    for figure, name, runs in [
        ("mean", "grpo", 5),
        ("IQM", "two modes", 20),
        ("difference", "grpo, 2 % unlearned", 10),
    ]:
        again = coverage.coverage(figure, name, runs, samples=20_000)
        assert kept["coverage"][figure][name][kept["runs"].index(runs)] == pytest.approx(again, abs=0.01)


def test_the_distribution_is_that_of_the_fleet():
    fleet = json.loads((coverage.ROOT / "results/fleet/summary.json").read_text())
    mean = coverage.distribution("grpo", "mean")[1]
    assert mean == pytest.approx(fleet["settings"][0]["success_mean"], abs=1e-5)
    gap = coverage.distribution("grpo", "difference")[1]
    assert gap == pytest.approx(fleet["differences"][0]["mean_difference"], abs=1e-5)


def test_the_mean_of_five_by_hand():
    """1, 2, 3, 4, 5: deviation sqrt(2.5), t[4] = 2.776445."""
    low, high = intervals.mean(np.arange(1.0, 6.0))
    assert (3 - low, high - 3) == pytest.approx((2.776445 * np.sqrt(0.5),) * 2, rel=1e-6)


def test_the_interquartile_mean_of_twenty_by_hand():
    """Of 1 to 20, 6 to 15 stay; winsorized, these with five more 6 and 15; t[9] = 2.262157."""
    low, high = intervals.interquartile_mean(np.random.default_rng(0).permutation(np.arange(1.0, 21.0)))
    squares = 2 * (sum((10.5 - x) ** 2 for x in range(6, 11)) + 5 * 4.5**2)
    assert (10.5 - low, high - 10.5) == pytest.approx((2.262157 * np.sqrt(squares / (10 * 9)),) * 2, rel=1e-6)
    assert intervals.interquartile_mean(np.arange(19.0)) is None


def test_the_median_lies_between_two_runs_by_the_binomial_distribution():
    """Each is the innermost pair that holds it in 95 % of the cases, counted over all sides of the median."""
    assert intervals.median(np.arange(5.0)) is None
    for runs in (6, 7, 8, 9, 12, 20, 51):
        low, high = (int(end) for end in intervals.median(np.arange(float(runs))[::-1]))
        assert low + high == runs - 1

        def holds(place, runs=runs):
            return 1 - 2 * stats.binom.cdf(place, runs, 0.5)

        assert holds(low) >= 0.95 > holds(low + 1)


def test_a_share_is_never_known_to_be_0():
    """Of five runs without a failure, 52 % may fail: 0.48 to the fifth power is 0.025."""
    low, high = intervals.share(0, 5)
    assert low == 0.0 and (1 - high) ** 5 == pytest.approx(0.025)
    assert intervals.share(5, 5) == pytest.approx((1 - high, 1.0))


def test_the_table_of_the_documentation_is_that_of_the_study():
    kept = json.loads((coverage.ROOT / "results/benchmarks/coverage.json").read_text())
    page = (coverage.ROOT / "docs/sweeps.md").read_text()
    assert f"```\n{coverage.as_text(kept)}\n```\n" in page
