"""Which estimator learns best here, and is it the least biased one? ``python -m benchmarks.variants``.

Every variant with every seed and the same budget: exact success over the iterations with bands, iterations to 90 %,
final actions and entropy, differences seed by seed with intervals corrected for their number, and beside them the exact
bias and variance of the variant's gradient. Then the controls: rewards that should teach nothing, or the wrong thing.
Writes `variants.json` and the pictures `variants.svg` and `controls.svg`, which need matplotlib. Killed, it goes on
where it was.
"""

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import log_softmax

from jaxrl_mini.config import AGGREGATIONS, ARTICLE, BLOCK, Config
from jaxrl_mini.exact import bias, success
from jaxrl_mini.learning import loop
from jaxrl_mini.learning.block import Block, settings_of, sizes_of
from jaxrl_mini.machine import commandline, files, hardware, runtime
from jaxrl_mini.runs import records
from jaxrl_mini.sweeps import engine, intervals
from jaxrl_mini.sweeps.dataset import Dataset
from jaxrl_mini.sweeps.grid import Grid
from jaxrl_mini.sweeps.statistics import interval
from jaxrl_mini.tasks.specification import load_task

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
    **{
        f"{name}, no KL": {"beta": 0.0, **settings}
        for name, settings in {
            "rloo": {"advantage": "rloo"},
            "maxrl": {"advantage": "maxrl"},
            "reinforce": {"advantage": "reinforce"},
            "fixed-length": {"aggregation": "fixed-length"},
            "rloo, fixed-length": {"advantage": "rloo", "aggregation": "fixed-length"},
        }.items()
    },
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
"""Without the KL, the size of an advantage has nothing to hold against. With two steps on a batch no ratio of the
default leaves its bounds, in 2,000 seeds; with eight they do. `benchmarks.many_seeds` looks at more."""

OTHERS: dict[str, tuple[str, ...]] = {
    "rloo, fixed-length": ("rloo",),
    "reinforce": ("rs-sft",),
    "k1": ("no KL",),
    **{name: ("no KL",) for name in VARIANTS if name.endswith(", no KL")},
    **{name: ("clip, 8 epochs",) for name in VARIANTS if name.endswith(", 8 epochs") and name != "clip, 8 epochs"},
    "cispo, 8 epochs": ("clip, 8 epochs", "no clip, 8 epochs"),
}
"""What variants are compared with beside the default."""

METRICS = ("after_exact_success_rate", "iterations_to_90", "after_exact_mean_actions", "last_entropy")
COMPARISONS = math.comb(len(VARIANTS), 2) * len(METRICS)
"""Intervals hold for any two variants and any metric at once, so which of them are shown may be chosen afterwards."""

LEVELS = (0.025, 0.25, 0.5, 0.75, 0.975)
BAND = (0.025, 0.975)
ACCEPTED = np.array([0.0, 0.0, 0.0, 1.0])
JUDGED_AT = (0, 10, 20, 100)
DRAWN = ("default", "rloo, fixed-length", "maxrl", "reinforce", "exact gradient", "rs-sft", "cispo, 8 epochs")


def figures(dataset: Dataset) -> dict[str, Any]:
    """Per variant: the metrics, their differences to others, and the course of the exact success."""
    columns = ["setting", "seed", "finite", *METRICS]
    table = dataset.runs(columns)
    values = {name: table[name].to_numpy() for name in columns if name != "iterations_to_90"}
    # A run that never gets there is counted at one more than the budget.
    never = dataset.grid.settings[0].iterations + 1
    values["iterations_to_90"] = table["iterations_to_90"].fill_null(never).to_numpy()
    order = np.lexsort((values["seed"], values["setting"]))
    by_setting = {name: column[order].reshape(len(VARIANTS), -1) for name, column in values.items()}
    names = list(VARIANTS)
    found: dict[str, Any] = {}
    for place, (label, history) in enumerate(zip(names, histories(dataset), strict=True)):
        one: dict[str, Any] = {"settings": VARIANTS[label], "failed": int((~by_setting["finite"][place]).sum())}
        for name in METRICS:
            metric = by_setting[name].astype(float)
            one[name] = {
                "mean": metric[place].mean(),
                "interval": interval(metric[place], intervals.mean, bounds=(0, np.inf)),
            }
            one[name]["quantiles"] = dict(zip(map(str, LEVELS), np.quantile(metric[place], LEVELS), strict=True))
            others = [other for other in ("default", *OTHERS.get(label, ())) if other != label]
            one[name]["minus"] = {other: paired(metric[place] - metric[names.index(other)]) for other in others}
        found[label] = {**one, **history}
    return found


def paired(gap: np.ndarray) -> dict[str, Any]:
    """The mean difference over seeds, with Student's 95 % interval corrected by Bonferroni's method."""
    half = stats.t.ppf(1 - 0.025 / COMPARISONS, len(gap) - 1) * gap.std(ddof=1) / math.sqrt(len(gap))
    return {
        "mean": gap.mean(),
        "interval": [gap.mean() - half, gap.mean() + half],
        "seeds_that_differ": int((gap != 0).sum()),
    }


def histories(dataset: Dataset) -> list[dict[str, Any]]:
    """Per setting: the exact success after every iteration, mean and quantiles over the seeds; ratios out of bounds."""
    grid = dataset.grid
    names = ("exact_success_rate", "ratio_outside_clip_fraction")
    kept = np.full((2, len(grid.settings), len(grid.seeds), grid.settings[0].iterations), np.nan, np.float32)
    for part in dataset.read("history", ["setting", "seed", "iteration", *names]):
        setting, seed, iteration, *columns = (column.to_numpy() for column in part.columns)
        kept[:, setting, seed.astype(np.int64) - grid.seeds[0], iteration] = columns
    return [
        {
            "course": {
                "mean": success.mean(axis=0),
                **dict(zip(map(str, BAND), np.quantile(success, BAND, axis=0), strict=True)),
            },
            "ratio_outside_clip": {"mean": outside.mean(), "highest": outside.max()},
        }
        for success, outside in zip(*kept, strict=True)
    ]


def judged() -> list[dict[str, Any]]:
    """Exact bias and variance at policies of the default run of seed 7."""
    logits = loop.run(Config(seed=7)).logits
    advantages = sorted({settings.get("advantage", "group-std") for settings in VARIANTS.values()})
    rows = []
    for at in JUDGED_AT:
        rows += bias.judge(f"after {at}", logits[at], load_task(ARTICLE), advantages=advantages,
                           aggregations=AGGREGATIONS, groups=4, group_size=8)  # fmt: skip
    return rows


def controls(seeds: int) -> dict[str, Any]:
    """Final policies under each reward, exactly: private success and how many episodes submit."""
    found = {}
    for reward in ("verifier", "public-test", "shuffled", "constant", "noisy:0.2"):
        config = Config(reward=reward)
        logits = []
        for start in range(0, seeds, BLOCK):
            runs = np.arange(start, min(start + BLOCK, seeds))
            block = Block(sizes_of(config), runs, settings_of([config] * len(runs)))
            while block.iteration < config.iterations:
                block.advance(min(20, config.iterations - block.iteration))
            logits.append(block.logits())
        log_probs = log_softmax(np.concatenate(logits, axis=-1).astype(np.float64), axis=1)
        private, submitted = (success.exact(log_probs, accepted).success_rate for accepted in (ACCEPTED, np.ones(4)))
        found[reward] = {
            "seeds": seeds,
            "private_success": described(private),
            "submission_rate": described(submitted),
            "moved": int((log_probs != log_probs[:, :1]).any(axis=(0, 1)).sum()),
            "private_success_by_seed": np.round(private, 4),
        }
    return found


def described(values: np.ndarray) -> dict[str, Any]:
    """Mean with interval, deviation, extremes."""
    return {
        "mean": values.mean(),
        "interval": interval(values, intervals.mean),
        "deviation": values.std(ddof=1),
        "lowest": values.min(),
        "highest": values.max(),
    }


def draw_variants(study: dict[str, Any]) -> Any:
    """How the failures of some variants fall, with bands, and where all of them end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label in DRAWN:
        course = study["variants"][label]["course"]
        iterations = np.arange(1, len(course["mean"]) + 1)
        failures = {name: 1 - np.array(values) for name, values in course.items()}
        (line,) = left.plot(iterations, failures["mean"], label=label)
        left.fill_between(
            iterations, *(failures[str(level)] for level in BAND), color=line.get_color(), alpha=0.1, lw=0
        )
    left.set(xlabel="iteration", ylabel="exact failure probability: mean, and 95 % of the seeds", yscale="log")
    left.legend(loc="upper right", fontsize="small")
    shown = sorted(study["variants"].items(), key=lambda item: item[1]["after_exact_success_rate"]["mean"])
    for place, (_, one) in enumerate(shown):
        success, quantiles = one["after_exact_success_rate"], one["after_exact_success_rate"]["quantiles"]
        right.plot([1 - quantiles[str(level)] for level in BAND], [place, place], color="#9ab8dc", linewidth=3)
        right.plot(1 - success["mean"], place, "o", color="#1f4e8c", markersize=5)
    right.set(xlabel="exact failure probability after training: mean, and 95 % of the seeds", xscale="log")
    right.set_yticks(range(len(shown)), [label for label, _ in shown], fontsize="small")
    right.axvline(1 - study["variants"]["default"]["after_exact_success_rate"]["mean"], color="#888888", linestyle=":")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def draw_controls(study: dict[str, Any]) -> Any:
    """The distribution of the final success over the seeds, under each reward."""
    from matplotlib.figure import Figure

    controls = study["controls"]
    figure = Figure(figsize=(9, 6), layout="constrained")
    rows = figure.subplots(len(controls), 1, sharex=True)
    for axes, (reward, one) in zip(rows, controls.items(), strict=True):
        axes.hist(one["private_success_by_seed"], bins=np.linspace(0, 1, 101), histtype="stepfilled", color="#2a78d6")
        axes.axvline(controls["constant"]["private_success"]["mean"], color="#c4600c", linestyle=":")
        axes.set(yscale="log", ylim=(0.7, 2 * one["seeds"]), xlim=(0, 1))
        axes.set_yticks([1, 10, 100, 1000])
        axes.set_yticklabels(["1", "10", "100", "1,000"], fontsize="small")
        axes.minorticks_off()
        text = f"reward: {reward}\nmean {one['private_success']['mean']:.3f}"
        text += f", submits {100 * one['submission_rate']['mean']:.1f} %"
        axes.text(0.5, 0.9, text, transform=axes.transAxes, ha="center", va="top")
        axes.grid(alpha=0.3)
    rows[0].set_title("Seeds by what the private verifier accepts after training; dotted: before training", fontsize=11)
    figure.supylabel("seeds", fontsize=10)
    rows[-1].set_xlabel("exact private success after training")
    return figure


def as_text(study: dict[str, Any]) -> str:
    """The study as a table."""
    bias_of = {(row["policy"], row["advantage"], row["aggregation"]): row for row in study["estimators"]}
    lines = [f"{'variant':25} success  minus default (corrected 95 %)   to 90 %  actions  entropy  angle  signal"]
    for label, one in study["variants"].items():
        gap = one["after_exact_success_rate"]["minus"].get("default")
        shown = "" if gap is None else f"{gap['mean']:+.5f} [{gap['interval'][0]:+.5f}, {gap['interval'][1]:+.5f}]"
        settings = one["settings"]
        kind = "rs-sft" if "method" in settings else settings.get("advantage", "group-std")
        row = bias_of["after 10", kind, settings.get("aggregation", "episode-mean")]
        means = [one[name]["mean"] for name in METRICS]
        lines.append(
            f"{label:25} {means[0]:.5f}  {shown:31}  {means[1]:7.2f}  {means[2]:7.3f}  {means[3]:7.3f}"
            f"  {row['angle']:5.2f}  {'-' if 'exact_gradient' in settings else format(row['signal_to_noise'], '.3f')}"
        )
    for reward, one in study["controls"].items():
        private, submitted = one["private_success"], one["submission_rate"]
        lines.append(
            f"reward {reward:13} private success {private['mean']:.4f} (deviation {private['deviation']:.4f}, highest "
            f"{private['highest']:.4f}), submits {submitted['mean']:.4f}"
        )
    return "\n".join(lines)


def compact(value: Any) -> Any:
    """Numbers with six significant digits; nothing that is shown has more."""
    if isinstance(value, dict):
        return {key: compact(item) for key, item in value.items()}
    if isinstance(value, (list, np.ndarray)):
        return [compact(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, (float, np.floating)) else value


def write(study: dict[str, Any], folder: Path) -> None:
    """The study and its pictures."""
    text = json.dumps(records.finite(compact(study)), indent=1, allow_nan=False)
    text = re.sub(r"\[[^][{}]*\]", lambda numbers: re.sub(r"\s*([][,])\s*", r"\1", numbers[0]), text) + "\n"
    with files.Output(folder / "variants.json", overwrite=True) as output:
        output.commit(lambda file: file.write(text.encode()))
    for name, figure in (("variants", draw_variants(study)), ("controls", draw_controls(study))):
        with files.Output(folder / f"{name}.svg", overwrite=True) as output:
            output.commit(lambda file, figure=figure: figure.savefig(file, format="svg", metadata={"Date": None}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--control-seeds", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path("sweeps/variants"), help="of the sweep itself")
    parser.add_argument("--output", type=Path, default=Path("results/variants"), help="folder of the results")
    flags = parser.parse_args()
    commandline.use_device(None)
    hardware.use_one_thread_per_call()
    grid = Grid(tuple(Config(**settings) for settings in VARIANTS.values()), range(flags.seeds))
    dataset = engine.run_sweep(grid, flags.folder)
    study = {
        "command": f"python -m benchmarks.variants --seeds {flags.seeds} --control-seeds {flags.control_seeds}",
        "runtime": runtime.runtime(),
        "seeds": flags.seeds,
        "comparisons": COMPARISONS,
        "variants": figures(dataset),
        "estimators": judged(),
        "controls": controls(flags.control_seeds),
    }
    write(study, flags.output)
    print(as_text(study))


if __name__ == "__main__":
    main()
