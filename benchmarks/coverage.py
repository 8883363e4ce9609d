"""How often do the intervals of `sweep summary` hold the true figure? ``python -m benchmarks.coverage``.

Samples of runs are drawn again and again from distributions whose figures are known: that of 10,000 seeds of grpo, the
same with 2 % failed runs, and one with two modes. Writes the shares of intervals that hold the figure, and prints them
as the table of `docs/sweeps.md`. In the last rows is what no interval can know: 2 % of all runs learn nothing without
failing. ``--fleet sweeps/article`` renews the distributions from the sweep of `make fleet`.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_mini.machine import files
from jaxrl_mini.sweeps import intervals
from jaxrl_mini.sweeps.dataset import Dataset

ROOT = Path(__file__).parents[1]
QUANTILES = ROOT / "tests/fleet_quantiles.npz"
"""float32 [2001] each: quantiles of the exact success of grpo, and of the difference of rs-sft to it seed by seed."""

RUNS = (2, 3, 5, 10, 20, 50, 1000)
FAILED = 0.02
UNTRAINED = 0.0653
"""Success of a run that learned nothing."""
METHODS = {"mean": intervals.mean, "IQM": intervals.interquartile_mean, "difference": intervals.mean}
DISTRIBUTIONS = ("grpo", "grpo, 2 % failed", "two modes", "grpo, 2 % unlearned")
BOUNDED = DISTRIBUTIONS[:3]
"""In these, intervals hold the true figure in 93 to 97 % of the cases, or there is none."""

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def quantile(levels: np.ndarray, of: str) -> np.ndarray:
    """The quantiles of the distribution of `success` or `difference` over 10,000 seeds."""
    with np.load(QUANTILES) as file:
        return np.interp(levels, np.linspace(0, 1, len(file[of])), file[of].astype(np.float64))


def distribution(name: str, figure: str) -> tuple[Draw, float]:
    """How samples [sample, run] are drawn, NaN for a failed run or pair, and what the interval is to hold."""
    levels = (np.arange(10**6) + 0.5) / 10**6
    of, lost, instead = "difference" if figure == "difference" else "success", 0.0, np.nan
    if name == "two modes":
        center = 0.0 if of == "difference" else 0.5

        def draw(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
            modes = center + 0.3 * (2 * generator.integers(0, 2, shape) - 1)
            return np.clip(generator.normal(modes, 0.1), 2 * center - 1, 1)

        return draw, center
    if name != "grpo":
        lost = FAILED if of == "success" else 1 - (1 - FAILED) ** 2
    if name == "grpo, 2 % unlearned":
        instead = UNTRAINED if of == "success" else UNTRAINED - 1.0
        lost = FAILED
    if figure == "IQM":  # a failed run enters with 0; it is below all others, as an unlearned one
        instead = 0.0 if np.isnan(instead) else instead
        middle = levels[(levels > 0.25) & (levels < 0.75)]
        right = quantile((middle - lost) / (1 - lost), of).mean()
    else:
        right = quantile(levels, of).mean()
        if not np.isnan(instead):
            right = (1 - lost) * right + lost * instead

    def draw(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        values = quantile(generator.random(shape), of)
        return np.where(generator.random(shape) < lost, instead, values) if lost else values

    return draw, float(right)


def coverage(figure: str, name: str, runs: int, samples: int) -> float | None:
    """The share of samples, among those with an interval, whose interval holds the true figure; None: none has one."""
    draw, right = distribution(name, figure)
    values = np.sort(draw(np.random.default_rng(0), (samples, runs)), axis=1)  # NaN last
    finite = np.isfinite(values).sum(axis=1)
    held, there = 0, 0
    for count in np.unique(finite[finite > 0]).tolist():
        found = METHODS[figure](values[finite == count, :count])
        if found is not None:
            held += int(((found[0] <= right) & (right <= found[1])).sum())
            there += int((finite == count).sum())
    return held / there if there else None


def study(samples: Callable[[int], int]) -> dict[str, Any]:
    """`coverage` of every figure, distribution and number of runs."""
    return {
        "runs": list(RUNS),
        "samples": [samples(runs) for runs in RUNS],
        "coverage": {
            figure: {
                name: [coverage(figure, name, runs, samples(runs)) for runs in RUNS] for name in DISTRIBUTIONS
            }
            for figure in METHODS
        },
    }  # fmt: skip


def as_text(found: dict[str, Any]) -> str:
    """The study as a table of percentages."""
    lines = [f"{'interval of':12} {'distribution':20}" + "".join(f"{runs:>7,}" for runs in found["runs"]) + " runs"]
    for name in DISTRIBUTIONS:
        for figure, of in found["coverage"].items():
            shown = ("-" if share is None else f"{100 * share:.1f}" for share in of[name])
            lines.append(f"{figure:12} {name:20}" + "".join(f"{one:>7}" for one in shown))
    return "\n".join(lines)


def renew(fleet: Path) -> None:
    """Writes the quantiles of a sweep over the methods grpo and rs-sft."""
    table = Dataset.open(fleet).runs(["setting", "seed", "after_exact_success_rate"])
    setting, seed, success = (column.to_numpy() for column in table.columns)
    grpo, sft = (success[setting == place][np.argsort(seed[setting == place])] for place in (0, 1))
    levels = np.linspace(0, 1, 2001)
    kept = {"success": np.quantile(grpo, levels), "difference": np.quantile(sft - grpo, levels)}
    with files.Output(QUANTILES) as output:
        output.commit(lambda file: np.savez_compressed(file, **{name: q.astype("<f4") for name, q in kept.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", type=Path, help="the folder of `make fleet`, to renew the distributions from")
    parser.add_argument("--output", type=Path, default=ROOT / "results/benchmarks/coverage.json")
    flags = parser.parse_args()
    if flags.fleet:
        renew(flags.fleet)
    found = {"command": "python -m benchmarks.coverage", **study(lambda runs: min(200_000, 4 * 10**7 // runs))}
    flags.output.write_text(json.dumps(found, indent=1) + "\n")
    print(as_text(found))


if __name__ == "__main__":
    main()
