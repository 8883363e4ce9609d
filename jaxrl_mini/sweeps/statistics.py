"""Statistics of a sweep: each setting's figures with intervals, and paired differences between settings.

A run whose numbers left the finite ones has failed. It enters success, and its differences, with 0, has never reached
90 %, and has no number of actions. How often runs fail has an interval of its own; the intervals of means are those of
runs that do not fail. An interval of both at once would have to reach far down: of five runs without a failure, up to
half of all could fail.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from jaxrl_mini.config import Config
from jaxrl_mini.episodes.intervals import CONFIDENCE
from jaxrl_mini.machine.commandline import counted
from jaxrl_mini.sweeps import intervals
from jaxrl_mini.sweeps.dataset import Dataset
from jaxrl_mini.sweeps.grid import Grid, history_iterations

LEVELS = (0.025, 0.25, 0.75, 0.975)
ROUNDING = 1e-12
"""Exact success probabilities that differ by no more differ by the rounding of their sums: they are equal."""
MAX_COMPARED = 20
"""Settings up to which all pairs are compared; with more, each is compared with the first."""

COLUMNS = ["setting", "seed", "finite", "after_exact_success_rate", "after_exact_mean_actions", "after_successes",
           "eval_episodes", "iterations_to_90"]  # fmt: skip


def summarize(dataset: Dataset) -> dict[str, Any]:
    """The figures of a sweep's runs as far as they are there, as plain data."""
    table, grid = dataset.runs(COLUMNS), dataset.grid
    columns = {name: table[name].to_numpy() for name in COLUMNS if name != "iterations_to_90"}
    columns["iterations_to_90"] = table["iterations_to_90"].fill_null(-1).to_numpy()
    columns["success"] = np.where(columns["finite"], np.clip(columns["after_exact_success_rate"], 0.0, 1.0), 0.0)
    by_setting = {}
    for place in range(len(grid.settings)):
        mine = columns["setting"] == place
        if mine.any():
            by_setting[place] = {name: column[mine] for name, column in columns.items()}
    varied = _varied(grid)
    return {
        "runs": table.num_rows,
        "runs_in_the_grid": grid.runs,
        "confidence": CONFIDENCE,
        "settings": [
            {"setting": place, **varied[place], **describe(runs, resolution(grid, grid.settings[place]))}
            for place, runs in by_setting.items()
        ],
        "differences": differences(by_setting),
    }


def resolution(grid: Grid, config: Config) -> int | None:
    """Iterations between those after which a sweep keeps a setting's exact success, at most; None: it keeps none."""
    kept = history_iterations(config.iterations, grid.history_every)
    kept = kept[config.evaluates(kept)]
    return int(np.diff(kept + 1, prepend=0).max()) if len(kept) else None


def describe(runs: dict[str, np.ndarray], resolution: int | None = 1) -> dict[str, Any]:
    """The figures of one setting.

    Args:
      runs: columns [run], those of `COLUMNS` and `success`.
      resolution: of the iterations to 90 % success; None: they are unknown.

    Returns:
      Counts; the interval of the share that fails; mean, median, interquartile mean (the mean without the lowest and
      the highest quarter: Agarwal et al. 2021, arXiv 2108.13264) and quantiles of the exact success rate; its mean over
      the runs that did not fail, which `success_mean_interval` belongs to; these runs' mean actions; the median of the
      iterations to 90 % success, of which the last `resolution` - 1 may have been too many, null where half of the runs
      did not reach it or nothing is known; how many runs did, null where nothing is known. An interval is null where
      there are too few runs for its method, or where they are all alike.
    """
    success, finite = runs["success"], runs["finite"]
    reached = finite & (runs["iterations_to_90"] >= 0)
    halfway = np.median(np.where(reached, runs["iterations_to_90"], np.inf))
    actions, learned = runs["after_exact_mean_actions"][finite], success[finite]
    failed = int((~finite).sum())
    sampled = float((np.where(finite, runs["after_successes"], 0) / runs["eval_episodes"]).mean())
    return {
        "runs": len(success),
        "failed": failed,
        "failed_interval": list(intervals.share(failed, len(success))),
        "success_mean": float(success.mean()),
        "finite_success_mean": float(learned.mean()) if len(learned) else None,
        "success_mean_interval": interval(learned, intervals.mean),
        "success_median": float(np.median(success)),
        "success_median_interval": interval(success, intervals.median),
        "success_iqm": float(stats.trim_mean(success, intervals.TRIMMED)),
        "success_iqm_interval": interval(success, intervals.interquartile_mean),
        "success_deviation": float(success.std(ddof=1)) if len(success) > 1 else None,
        "success_quantiles": {str(level): float(np.quantile(success, level)) for level in LEVELS},
        "sampled_success_mean": sampled,
        "mean_actions": float(actions.mean()) if len(actions) else None,
        "mean_actions_interval": interval(actions, intervals.mean, bounds=(1.0, np.inf)),
        "iterations_to_90": float(halfway) if resolution and np.isfinite(halfway) else None,
        "iterations_to_90_resolution": resolution,
        "reached_90": int(reached.sum()) if resolution else None,
    }


def interval(
    values: np.ndarray, method: Any, confidence: float = CONFIDENCE, bounds: tuple[float, float] = (0.0, 1.0)
) -> list[float] | None:
    """The interval that a method of `intervals` gives, no wider than the bounds of all possible values.

    None where there are too few runs for it, and where all values are alike: they say nothing of how others spread.
    """
    found = method(values, confidence)
    if found is None or np.ptp(values) <= ROUNDING:
        return None
    return [float(np.clip(end, *bounds)) for end in found]


def why_no_interval(runs: int) -> str:
    """Why a mean over so many runs has no interval."""
    return f"too few runs ({runs})" if runs < intervals.MEAN_RUNS else "all alike"


def differences(settings: dict[int, dict[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Compares settings over the seeds they share.

    The runs of two settings with one seed draw the same random numbers, so differences are taken seed by seed. Two
    tests: Wilcoxon's signed-rank test of the differences (exact up to 50 untied pairs), and the exact sign test. The
    p-values of each are corrected for the number of comparisons by Holm's method (1979). The intervals hold for all
    comparisons at once, by Bonferroni's method; each belongs to the mean over pairs in which no run failed.

    Args:
      settings: columns [run] `seed`, `success` and `finite`, by the setting's number.
    """
    pairs = list(itertools.combinations(settings, 2))
    if len(settings) > MAX_COMPARED:
        first, *others = settings
        pairs = [(first, other) for other in others]
    gaps = {(one, other): _paired(settings[one], settings[other]) for one, other in pairs}
    gaps = {pair: found for pair, found in gaps.items() if len(found[0])}
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(gaps))
    found: list[dict[str, Any]] = []
    for pair, (gap, finite) in gaps.items():
        better, worse = int((gap > 0).sum()), int((gap < 0).sum())
        found.append(
            {
                "settings": list(pair),
                "pairs": len(gap),
                "failed_pairs": int((~finite).sum()),
                "mean_difference": float(gap.mean()),
                "finite_mean_difference": float(gap[finite].mean()) if finite.any() else None,
                "mean_difference_interval": interval(gap[finite], intervals.mean, confidence, (-1.0, 1.0)),
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


def _paired(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Over the seeds of both: by how much the other's success is higher, and whether neither run failed; [pair]."""
    _, mine, theirs = np.intersect1d(one["seed"], other["seed"], return_indices=True)
    gap = other["success"][theirs] - one["success"][mine]
    return np.where(np.abs(gap) <= ROUNDING, 0.0, gap), one["finite"][mine] & other["finite"][theirs]


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
    rows = [dataclasses.asdict(config) for config in grid.settings]
    names = [name for name in Config.__dataclass_fields__ if len({row[name] for row in rows}) > 1]
    return [{"values": {name: row[name] for name in names}} for row in rows]


def as_text(summary: dict[str, Any]) -> str:
    """The figures as tables for people."""
    there = f"{summary['runs']:,} of {counted(summary['runs_in_the_grid'], 'run')}"
    if not summary["runs"]:
        return f"{there}: nothing to summarize yet, the sweep's command computes them"
    lines = [
        f"{there}; exact success after training, 0 for a failed run; intervals of the mean are those without these"
    ]
    rows = [["", "runs", "failed", "failing, 95 %", "mean", "without failed", "95 % interval", "median", "IQM",
             "2.5 % to 97.5 %", "actions", "iterations to 90 %", "setting"]]  # fmt: skip
    for one in summary["settings"]:
        low, high = (100 * end for end in one["failed_interval"])
        rows.append(
            [
                str(one["setting"]), f"{one['runs']:,}", f"{one['failed']:,}", f"{low:.3g} to {high:.3g} %",
                f"{one['success_mean']:.5f}", _number(one["finite_success_mean"], 5),
                _pair(one["success_mean_interval"]) or why_no_interval(one["runs"] - one["failed"]),
                f"{one['success_median']:.5f}", f"{one['success_iqm']:.5f}",
                str(_pair([one["success_quantiles"][level] for level in ("0.025", "0.975")])),
                _number(one["mean_actions"], 4), to_90(one), _label(one["values"]),
            ]
        )  # fmt: skip
    table = [["settings", "pairs", "difference", "without failed", "interval", "better", "worse", "sign p",
              "Wilcoxon p"]]  # fmt: skip
    for one in summary["differences"]:
        first, second = one["settings"]
        table.append(
            [
                f"{second} - {first}", f"{one['pairs']:,}", _number(one["mean_difference"], 5, "+"),
                _number(one["finite_mean_difference"], 5, "+"),
                _pair(one["mean_difference_interval"]) or why_no_interval(one["pairs"] - one["failed_pairs"]),
                f"{one['better']:,}", f"{one['worse']:,}",
                *(_p_value(one[f"{test}_p_holm"]) for test in ("sign", "wilcoxon")),
            ]
        )  # fmt: skip
    if not any(one["failed"] for one in summary["settings"]):
        rows, table = [row[:5] + row[6:] for row in rows], [row[:3] + row[4:] for row in table]
    lines += ["", *_aligned(rows)]
    if summary["differences"]:
        number = counted(len(summary["differences"]), "comparison")
        about = "seed by seed: 95 % intervals for all at once (Bonferroni), p-values corrected for all (Holm)"
        lines += ["", f"{number}, {about}", "", *_aligned(table)]
    return "\n".join(lines)


def to_90(one: dict[str, Any]) -> str:
    """The iterations to 90 % of a setting, as far as they are known."""
    last, known = one["iterations_to_90"], one["iterations_to_90_resolution"]
    if known is None:
        return "unknown"
    if last is None:
        return "not reached"
    first, last = (f"{end:,.1f}".removesuffix(".0") for end in (last - known + 1, last))
    return last if known == 1 else f"{first} to {last}"


def _label(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items()) or "the only one"


def _pair(ends: list[float] | None) -> str | None:
    return None if ends is None else f"{ends[0]:.5f} to {ends[1]:.5f}"


def _number(value: float | None, digits: int, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}"


def _p_value(value: float) -> str:
    return f"{value:.2g}" if value else "<1e-300"  # float64 has no smaller ones at full precision


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
