"""Statistics of a sweep: each setting's figures with intervals, and paired differences between settings.

Runs whose numbers left the finite ones are counted as failed and enter every figure with success rate 0.
"""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from jaxrl_mini.config import Config
from jaxrl_mini.episodes.intervals import CONFIDENCE
from jaxrl_mini.sweeps.dataset import Dataset
from jaxrl_mini.sweeps.grid import Grid

RESAMPLES = 2000
LEVELS = (0.025, 0.25, 0.75, 0.975)
MAX_COMPARED = 20
"""Settings up to which all pairs are compared; with more, each is compared with the first."""

COLUMNS = ["setting", "seed", "finite", "after_exact_success_rate", "after_exact_mean_actions", "after_successes",
           "eval_episodes", "iterations_to_90"]  # fmt: skip


def summarize(dataset: Dataset) -> dict[str, Any]:
    """The figures of a sweep's runs as far as they are there, as plain data."""
    table = dataset.runs(COLUMNS)
    columns = {name: table[name].to_numpy() for name in COLUMNS if name != "iterations_to_90"}
    columns["iterations_to_90"] = table["iterations_to_90"].fill_null(-1).to_numpy()
    columns["success"] = np.where(columns["finite"], columns["after_exact_success_rate"], 0.0)
    by_setting = {}
    for place in range(len(dataset.grid.settings)):
        mine = columns["setting"] == place
        if mine.any():
            by_setting[place] = {name: column[mine] for name, column in columns.items()}
    return {
        "runs": table.num_rows,
        "runs_in_the_grid": dataset.grid.runs,
        "confidence": CONFIDENCE,
        "settings": [
            {"setting": place, **_varied(dataset.grid)[place], **describe(runs)} for place, runs in by_setting.items()
        ],
        "differences": differences({place: (runs["seed"], runs["success"]) for place, runs in by_setting.items()}),
    }


def describe(runs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The figures of one setting.

    Args:
      runs: columns [run], those of `COLUMNS` and `success`.

    Returns:
      Counts; mean, median, interquartile mean (the mean without the lowest and the highest quarter: Agarwal et al.
      2021, arXiv 2108.13264) and quantiles of the exact success rate; mean actions of the finite runs; the median of
      the iterations to 90 % success, null where half of the runs are not known to have reached it.
    """
    success, finite = runs["success"], runs["finite"]
    reached = runs["iterations_to_90"]
    actions = runs["after_exact_mean_actions"][finite]
    sampled = float((np.where(finite, runs["after_successes"], 0) / runs["eval_episodes"]).mean())
    halfway = np.where(reached < 0, np.inf, reached)
    return {
        "runs": len(success),
        "failed": int((~finite).sum()),
        "success_mean": float(success.mean()),
        "success_mean_interval": interval(success, np.mean),
        "success_median": float(np.median(success)),
        "success_median_interval": interval(success, np.median),
        "success_iqm": float(stats.trim_mean(success, 0.25)),
        "success_iqm_interval": interval(success, _interquartile_mean),
        "success_deviation": float(success.std(ddof=1)) if len(success) > 1 else None,
        "success_quantiles": {str(level): float(np.quantile(success, level)) for level in LEVELS},
        "sampled_success_mean": sampled,
        "mean_actions": float(actions.mean()) if len(actions) else None,
        "mean_actions_interval": interval(actions, np.mean, bounds=None) if len(actions) else None,
        "iterations_to_90": float(np.median(halfway)) if np.isfinite(np.median(halfway)) else None,
        "reached_90": int((reached >= 0).sum()),
    }


def _interquartile_mean(values: np.ndarray, axis: int = -1) -> Any:
    return stats.trim_mean(values, 0.25, axis=axis)


def interval(values: np.ndarray, statistic: Any, bounds: tuple[float, float] | None = (0.0, 1.0)) -> list[float] | None:
    """The 95 % bootstrap interval of a statistic over runs; None for fewer than two runs.

    Bias-corrected and accelerated (Efron 1987, doi:10.1080/01621459.1987.10478410) up to 1,000 runs, percentiles of
    resamples above or where that is not defined, always from the same random numbers. Where the values are bounded,
    the interval also covers what n runs cannot exclude: that a share of up to 3 / n of all runs (the rule of three,
    Hanley and Lippman-Hand 1983) end at the bound farther away. So runs that are all alike still give an interval
    with a width.
    """
    count = len(values)
    if count < 2:
        return None
    low = high = float(statistic(values))
    for method in ("BCa", "percentile") if np.ptp(values) > 0 else ():
        if method == "BCa" and count > 1000:
            continue
        with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", stats.DegenerateDataWarning)
            found = stats.bootstrap(
                (values,), statistic, confidence_level=CONFIDENCE, n_resamples=RESAMPLES,
                batch=max(1, 10**7 // count), method=method, rng=np.random.default_rng(0),
            ).confidence_interval  # fmt: skip
        if np.isfinite(found.low) and np.isfinite(found.high):
            low, high = float(found.low), float(found.high)
            break
    if bounds is not None and (np.ptp(values) == 0 or low == high):
        unseen = min(1.0, 3.0 / count)
        low, high = low - unseen * (low - bounds[0]), high + unseen * (bounds[1] - high)
    return [low, high]


def differences(settings: dict[int, tuple[np.ndarray, np.ndarray]]) -> list[dict[str, Any]]:
    """Compares settings over the seeds they share.

    The runs of two settings with one seed draw the same random numbers, so differences are taken seed by seed. Two
    tests: Wilcoxon's signed-rank test of the differences (exact up to 50 untied pairs), and the exact sign test. The
    p-values of each are corrected for the number of comparisons by Holm's method (1979).

    Args:
      settings: seeds [run] and success rates [run] by the setting's number.
    """
    pairs = list(itertools.combinations(settings, 2))
    if len(settings) > MAX_COMPARED:
        first, *others = settings
        pairs = [(first, other) for other in others]
    found: list[dict[str, Any]] = []
    for one, other in pairs:
        _, mine, theirs = np.intersect1d(settings[one][0], settings[other][0], return_indices=True)
        gap = settings[other][1][theirs] - settings[one][1][mine]
        if not len(gap):
            continue
        better, worse = int((gap > 0).sum()), int((gap < 0).sum())
        found.append(
            {
                "settings": [one, other],
                "pairs": len(gap),
                "mean_difference": float(gap.mean()),
                "mean_difference_interval": interval(gap, np.mean, bounds=(-1.0, 1.0)),
                "better": better,
                "worse": worse,
                "sign_p": float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0,
                "wilcoxon_p": float(stats.wilcoxon(gap).pvalue) if better + worse else 1.0,
            }
        )
    for test in ("sign_p", "wilcoxon_p"):
        for comparison, corrected in zip(found, holm([one[test] for one in found]), strict=True):
            comparison[f"{test}_holm"] = corrected
    return found


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down correction: the i-th smallest of n times n - i + 1, never falling, at most 1."""
    order = np.argsort(p_values, kind="stable")
    corrected, highest = [1.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected


def _varied(grid: Grid) -> list[dict[str, Any]]:
    """What tells each setting from the others."""
    rows = [config.to_dict() for config in grid.settings]
    names = [name for name in Config.__dataclass_fields__ if len({row[name] for row in rows}) > 1]
    return [{"values": {name: row[name] for name in names}} for row in rows]


def as_text(summary: dict[str, Any]) -> str:
    """The figures as tables for people."""
    lines = [f"{summary['runs']:,} of {summary['runs_in_the_grid']:,} runs; exact success rates, 95 % intervals", ""]
    head = (
        "",
        "runs",
        "failed",
        "mean",
        "interval",
        "median",
        "IQM",
        "2.5 % to 97.5 %",
        "actions",
        "to 90 %",
        "setting",
    )
    rows = [head]
    for one in summary["settings"]:
        quantiles = one["success_quantiles"]
        rows.append(
            (
                str(one["setting"]), f"{one['runs']:,}", str(one["failed"]), f"{one['success_mean']:.5f}",
                _pair(one["success_mean_interval"]), f"{one['success_median']:.5f}", f"{one['success_iqm']:.5f}",
                _pair([quantiles["0.025"], quantiles["0.975"]]), _number(one["mean_actions"], 4),
                _number(one["iterations_to_90"], 1), _label(one["values"]),
            )
        )  # fmt: skip
    lines += _aligned(rows)
    if summary["differences"]:
        table: list[tuple[str, ...]] = [
            ("settings", "pairs", "difference", "interval", "better", "worse", "sign p", "Wilcoxon p (both Holm)")
        ]
        for one in summary["differences"]:
            first, second = one["settings"]
            table.append(
                (
                    f"{second} - {first}", f"{one['pairs']:,}", f"{one['mean_difference']:+.5f}",
                    _pair(one["mean_difference_interval"]), str(one["better"]), str(one["worse"]),
                    f"{one['sign_p_holm']:.2g}", f"{one['wilcoxon_p_holm']:.2g}",
                )
            )  # fmt: skip
        lines += ["", *_aligned(table)]
    return "\n".join(lines)


def _label(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items()) or "the only one"


def _pair(ends: list[float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:.5f} to {ends[1]:.5f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
