"""95 % intervals over the runs of a setting, by methods that are chosen by the number of runs alone.

A method that needs more runs than there are gives no interval. Below five, runs of two kinds are all of one kind in
12.5 % of the cases and more, and no method can know. How often intervals hold the true figure was simulated with
`python -m benchmarks.coverage`; the table stands in `docs/sweeps.md`. None can speak of what no run has shown: up to
3 / n of all runs can be of another kind without one of n being so (Hanley and Lippman-Hand 1983).
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from jaxrl_mini.episodes.intervals import CONFIDENCE

MEAN_RUNS, IQM_RUNS = 5, 20
"""The fewest runs for an interval of a mean, or of a mean of differences, and of an interquartile mean."""

TRIMMED = 0.25
"""The share of runs that an interquartile mean leaves out at each end."""

Bounds = tuple[Any, Any]
"""The lower and the upper end, [...] each."""


def mean(values: Float[np.ndarray, "... run"], confidence: float = CONFIDENCE) -> Bounds | None:
    """Student's interval of the mean; None for fewer than `MEAN_RUNS`."""
    runs = values.shape[-1]
    if runs < MEAN_RUNS:
        return None
    half = stats.t.ppf((1 + confidence) / 2, runs - 1) * values.std(axis=-1, ddof=1) / math.sqrt(runs)
    center = values.mean(axis=-1)
    return center - half, center + half


def interquartile_mean(values: Float[np.ndarray, "... run"], confidence: float = CONFIDENCE) -> Bounds | None:
    """The interval of the interquartile mean, from the variance of the winsorized runs; None below `IQM_RUNS`.

    With g = floor(n / 4) runs left out at each end and h = n - 2 g that stay: the mean of these plus and minus
    t[h - 1] * s_w * sqrt((n - 1) / (h (h - 1))), where s_w is the deviation after the g lowest runs are set to the
    lowest that stays, and the g highest to the highest. Sources: Tukey and McLaughlin 1963, Sankhya A 25; Yuen 1974,
    doi:10.1093/biomet/61.1.165.
    """
    runs = values.shape[-1]
    if runs < IQM_RUNS:
        return None
    left_out = int(TRIMMED * runs)
    stay = runs - 2 * left_out
    ordered = np.sort(values, axis=-1)
    kept = ordered[..., left_out : runs - left_out]
    deviation = np.clip(ordered, kept[..., :1], kept[..., -1:]).std(axis=-1, ddof=1)
    half = stats.t.ppf((1 + confidence) / 2, stay - 1) * deviation * math.sqrt((runs - 1) / (stay * (stay - 1)))
    center = kept.mean(axis=-1)
    return center - half, center + half


def median(values: Float[np.ndarray, "... run"], confidence: float = CONFIDENCE) -> Bounds | None:
    """The narrowest pair of runs, one as far from the lowest as the other from the highest, that holds the median.

    It does so in at least 95 % of the cases, whatever the distribution, by the binomial distribution of the number of
    runs below the median; None where even the lowest and the highest run do not (fewer than six).
    """
    runs, tail = values.shape[-1], (1 - confidence) / 2
    place = int(stats.binom.ppf(tail, runs, 0.5))
    if stats.binom.cdf(place, runs, 0.5) > tail:
        place -= 1
    if place < 0:
        return None
    ordered = np.sort(values, axis=-1)
    return ordered[..., place], ordered[..., runs - 1 - place]


def share(count: int, runs: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The exact interval of a share, which holds it in at least 95 % of the cases (Clopper and Pearson 1934)."""
    found = stats.binomtest(count, runs).proportion_ci(confidence, method="exact")
    return float(found.low), float(found.high)
