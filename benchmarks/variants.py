"""Which estimator learns best here, and is it the least biased one? ``python -m benchmarks.variants --seeds 2000``.

Every variant with every seed and the same budget: exact success over the iterations with bands, iterations to 90 %,
final actions and entropy, differences to the default seed by seed with intervals corrected for their number, and beside
them the exact bias and variance of the variant's gradient. Then the controls: rewards that should teach nothing, or
the wrong thing. Writes `variants.json` and, with matplotlib, two pictures. Killed, it goes on where it was.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import log_softmax

from jaxrl_mini import bias, commandline, engine, evaluation, fleet, records
from jaxrl_mini.config import AGGREGATIONS, Config
from jaxrl_mini.dataset import Dataset
from jaxrl_mini.grid import BLOCK, Grid
from jaxrl_mini.statistics import interval

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "group-sample-std": {"advantage": "group-sample-std"},
    "group-mean": {"advantage": "group-mean"},
    "batch-std": {"advantage": "batch-std"},
    "rloo": {"advantage": "rloo"},
    "maxrl": {"advantage": "maxrl"},
    "reinforce": {"advantage": "reinforce"},
    "step-mean": {"aggregation": "step-mean"},
    "fixed-length": {"aggregation": "fixed-length"},
    "rloo, fixed-length": {"advantage": "rloo", "aggregation": "fixed-length"},
    "clip-high 0.28": {"clip_high": 0.28},
    "dual-clip": {"surrogate": "dual-clip"},
    "cispo": {"surrogate": "cispo"},
    "no clip": {"surrogate": "none"},
    "k1": {"kl": "k1"},
    "k2": {"kl": "k2"},
    "k3": {"kl": "k3"},
    "no KL": {"beta": 0.0},
    "entropy bonus 0.01": {"entropy_bonus": 0.01},
    "exact gradient": {"exact_gradient": True},
    "rs-sft": {"method": "rs-sft"},
    **{
        f"{name}, 8 epochs": {"epochs": 8, **settings}
        for name, settings in {
            "clip": {},
            "clip-high 0.28": {"clip_high": 0.28},
            "dual-clip": {"surrogate": "dual-clip"},
            "cispo": {"surrogate": "cispo"},
            "no clip": {"surrogate": "none"},
        }.items()
    },
}
"""With two steps a batch no ratio leaves its bounds at these settings; with eight they do."""

METRICS = ("after_exact_success_rate", "iterations_to_90", "after_exact_mean_actions", "last_entropy")
LEVELS = (0.025, 0.25, 0.5, 0.75, 0.975)
ACCEPTED = np.array([0.0, 0.0, 0.0, 1.0])
JUDGED_AT = (0, 10, 20, 100)


def figures(dataset: Dataset) -> dict[str, Any]:
    """Per variant: the metrics, their differences to the default, and the course of the exact success."""
    columns = ["setting", "seed", "finite", *METRICS]
    table = dataset.runs(columns)
    values = {name: table[name].to_numpy() for name in columns if name != "iterations_to_90"}
    # A run that never gets there is counted at one more than the budget.
    never = dataset.grid.settings[0].iterations + 1
    values["iterations_to_90"] = table["iterations_to_90"].fill_null(never).to_numpy()
    order = np.lexsort((values["seed"], values["setting"]))
    by_setting = {name: column[order].reshape(len(VARIANTS), -1) for name, column in values.items()}
    comparisons = (len(VARIANTS) - 1) * len(METRICS)
    found: dict[str, Any] = {}
    for place, (label, course) in enumerate(zip(VARIANTS, courses(dataset), strict=True)):
        one: dict[str, Any] = {"settings": VARIANTS[label], "failed": int((~by_setting["finite"][place]).sum())}
        for name in METRICS:
            mine, default = by_setting[name][place].astype(float), by_setting[name][0].astype(float)
            one[name] = {"mean": mine.mean(), "interval": interval(mine, np.mean, bounds=None)}
            one[name]["quantiles"] = dict(zip(map(str, LEVELS), np.quantile(mine, LEVELS), strict=True))
            if place:
                one[name]["minus_default"] = paired(mine - default, comparisons)
        found[label] = {**one, "course": course}
    return found


def paired(gap: np.ndarray, comparisons: int) -> dict[str, Any]:
    """The mean difference over seeds, with Student's 95 % interval corrected by Bonferroni's method."""
    half = stats.t.ppf(1 - 0.025 / comparisons, len(gap) - 1) * gap.std(ddof=1) / math.sqrt(len(gap))
    return {"mean": gap.mean(), "interval": [gap.mean() - half, gap.mean() + half], "comparisons": comparisons}


def courses(dataset: Dataset) -> list[dict[str, list[float]]]:
    """Exact success after every iteration, per setting: mean and quantiles over the seeds."""
    shape = (len(dataset.grid.settings), len(dataset.grid.seeds), dataset.grid.settings[0].iterations)
    rates = np.full(shape, np.nan, np.float32)
    first = dataset.grid.seeds[0]
    for part in dataset.read("history", ["setting", "seed", "iteration", "exact_success_rate"]):
        setting, seed, iteration, rate = (column.to_numpy() for column in part.columns)
        rates[setting, seed.astype(np.int64) - first, iteration] = rate
    return [
        {
            "mean": one.mean(axis=0).tolist(),
            **{str(level): np.quantile(one, level, axis=0).tolist() for level in LEVELS},
        }
        for one in rates
    ]


def judged() -> list[dict[str, Any]]:
    """Exact bias and variance at policies of the default run of seed 7."""
    logits = fleet.run(Config(seed=7)).logits
    advantages = sorted({settings.get("advantage", "group-std") for settings in VARIANTS.values()})
    rows = []
    for at in JUDGED_AT:
        rows += bias.judge(f"after {at}", logits[at], ACCEPTED, advantages=advantages, aggregations=AGGREGATIONS,
                           groups=4, group_size=8)  # fmt: skip
    return rows


def controls(seeds: int) -> dict[str, Any]:
    """Final policies under each reward, exactly: private success and how many episodes submit."""
    found = {}
    for reward in ("verifier", "public-test", "shuffled", "constant", "noisy:0.2"):
        config = Config(reward=reward)
        logits = []
        for start in range(0, seeds, BLOCK):
            runs = np.arange(start, min(start + BLOCK, seeds))
            block = fleet.Block(fleet.sizes_of(config), runs, fleet.settings_of([config] * len(runs)))
            while block.iteration < config.iterations:
                block.advance(min(20, config.iterations - block.iteration))
            logits.append(block.logits())
        log_probs = log_softmax(np.concatenate(logits, axis=-1).astype(np.float64), axis=1)
        private, submitted = (evaluation.exact(log_probs, accepted).success_rate for accepted in (ACCEPTED, np.ones(4)))
        found[reward] = {
            "seeds": seeds,
            "private_success": described(private),
            "submission_rate": described(submitted),
            "moved": int((log_probs != log_probs[:, :1]).any(axis=(0, 1)).sum()),
            "private_success_by_seed": np.round(private, 6).tolist(),
        }
    return found


def described(values: np.ndarray) -> dict[str, Any]:
    """Mean with interval, deviation, extremes."""
    return {
        "mean": values.mean(),
        "interval": interval(values, np.mean),
        "deviation": values.std(ddof=1),
        "lowest": values.min(),
        "highest": values.max(),
    }


def draw(study: dict[str, Any], folder: Path) -> None:
    """Courses of some variants with bands, and the distribution of the final success under each reward."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label in ("default", "rloo, fixed-length", "maxrl", "reinforce", "exact gradient", "rs-sft"):
        course = study["variants"][label]["course"]
        iterations = np.arange(1, len(course["mean"]) + 1)
        (line,) = left.plot(iterations, course["mean"], label=label)
        left.fill_between(iterations, course["0.025"], course["0.975"], color=line.get_color(), alpha=0.12)
    left.set(xlabel="iteration", ylabel="exact success: mean, and 95 % of the seeds")
    left.legend(loc="lower right", fontsize="small")
    for reward, one in study["controls"].items():
        values = np.sort(one["private_success_by_seed"])
        right.plot(values, (np.arange(len(values)) + 1) / len(values), label=reward)
    right.set(xlabel="exact private success after training", ylabel="share of the seeds up to it")
    right.legend(loc="center", fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(folder / "variants.svg", format="svg")


def as_text(study: dict[str, Any]) -> str:
    """The study as a table."""
    bias_of = {(row["policy"], row["advantage"], row["aggregation"]): row for row in study["estimators"]}
    lines = [f"{'variant':24} success  minus default (corrected 95 %)   to 90 %  actions  entropy  angle  signal"]
    for label, one in study["variants"].items():
        gap = one["after_exact_success_rate"].get("minus_default")
        shown = "" if gap is None else f"{gap['mean']:+.5f} [{gap['interval'][0]:+.5f}, {gap['interval'][1]:+.5f}]"
        settings = one["settings"]
        kind = "rs-sft" if "method" in settings else settings.get("advantage", "group-std")
        row = bias_of["after 10", kind, settings.get("aggregation", "episode-mean")]
        means = [one[name]["mean"] for name in METRICS]
        lines.append(
            f"{label:24} {means[0]:.5f}  {shown:31}  {means[1]:7.2f}  {means[2]:7.3f}  {means[3]:7.3f}"
            f"  {row['angle']:5.2f}  {row['signal_to_noise']:.3f}"
        )
    for reward, one in study["controls"].items():
        private, submitted = one["private_success"], one["submission_rate"]
        lines.append(
            f"reward {reward:13} private success {private['mean']:.4f} (deviation {private['deviation']:.4f}, highest "
            f"{private['highest']:.4f}), submits {submitted['mean']:.4f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--control-seeds", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path("sweeps/variants"), help="of the sweep itself")
    parser.add_argument("--output", type=Path, default=Path("results/variants"), help="folder of the results")
    flags = parser.parse_args()
    commandline.use_device(None)
    grid = Grid(tuple(Config(**settings) for settings in VARIANTS.values()), range(flags.seeds))
    dataset = engine.run_sweep(grid, flags.folder)
    study = {
        "command": f"python -m benchmarks.variants --seeds {flags.seeds} --control-seeds {flags.control_seeds}",
        "runtime": records.runtime(),
        "variants": figures(dataset),
        "estimators": judged(),
        "controls": controls(flags.control_seeds),
    }
    with records.Output(flags.output / "variants.json") as output:
        text = json.dumps(records.finite(study), indent=1, allow_nan=False, default=float) + "\n"
        output.commit(lambda file: file.write(text.encode()))
    draw(study, flags.output)
    print(as_text(study))


if __name__ == "__main__":
    main()
