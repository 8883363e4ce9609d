"""What does not show in 2,000 seeds? ``python -m benchmarks.many_seeds``.

How often a ratio of the default leaves its bounds, where the surrogates then end elsewhere, and what rewards without
verdicts of their own do to the mean of the exact success. Killed, it goes on where it was.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.variants import compact
from jaxrl_mini.config import Config
from jaxrl_mini.machine import commandline, files, runtime
from jaxrl_mini.sweeps import engine
from jaxrl_mini.sweeps.dataset import Dataset
from jaxrl_mini.sweeps.grid import Grid

BOUNDS: dict[str, dict[str, Any]] = {
    "default": {},
    "clip-high 0.28": {"clip_high": 0.28},
    "dual-clip": {"surrogate": "dual-clip"},
    "cispo": {"surrogate": "cispo"},
    "no clip": {"surrogate": "none"},
}
CONTROLS: dict[str, dict[str, Any]] = {
    "shuffled": {"reward": "shuffled"},
    "coins": {"reward": "noisy:0.5"},
    "shuffled, reinforce": {"reward": "shuffled", "advantage": "reinforce"},
    "shuffled, reinforce, fixed-length": {
        "reward": "shuffled", "advantage": "reinforce", "aggregation": "fixed-length"
    },
    "shuffled, rs-sft": {"reward": "shuffled", "method": "rs-sft"},
}  # fmt: skip


def by_seed(dataset: Dataset, setting: int, names: list[str]) -> dict[str, np.ndarray]:
    """Columns of a setting's runs, in the order of the seeds."""
    table = dataset.runs(["setting", "seed", *names])
    mine = table.filter(table["setting"].to_numpy() == setting).sort_by("seed")
    return {name: mine[name].to_numpy() for name in names}


def outside(dataset: Dataset) -> list[int]:
    """The seeds of the first setting whose sampled actions have a ratio out of bounds, at whatever iteration."""
    found: set[int] = set()
    for part in dataset.read("history", ["setting", "seed", "ratio_outside_clip_fraction"]):
        setting, seed, fraction = (column.to_numpy() for column in part.columns)
        found |= set(seed[(setting == 0) & (fraction > 0)].tolist())
    return sorted(found)


def control(dataset: Dataset, setting: int) -> dict[str, Any]:
    """The exact success after training, and how far the policies have moved."""
    runs = by_seed(dataset, setting, ["before_exact_success_rate", "after_exact_success_rate", "last_mean_kl"])
    before, after, kl = runs.values()
    error = after.std(ddof=1) / len(after) ** 0.5
    return {
        "mean": after.mean(),
        "standard_error": error,
        "z": (after.mean() - before[0]) / error,
        "median": np.median(after),
        "highest": after.max(),
        "mean_kl": kl.mean(),
        "moved": int((kl > 0).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10000)
    parser.add_argument("--folder", type=Path, default=Path("sweeps/many-seeds"), help="of the sweeps themselves")
    parser.add_argument("--output", type=Path, default=Path("results/variants/many-seeds.json"))
    flags = parser.parse_args()
    commandline.use_device(None)
    bounds, controls = (
        engine.run_sweep(
            Grid(tuple(Config(**one) for one in settings.values()), range(flags.seeds), history_every),
            flags.folder / name,
        )
        for name, settings, history_every in (("bounds", BOUNDS, 1), ("controls", CONTROLS, 0))
    )
    ends = [by_seed(bounds, setting, ["logits_crc32"])["logits_crc32"] for setting in range(len(BOUNDS))]
    report = {
        "command": f"python -m benchmarks.many_seeds --seeds {flags.seeds}",
        "runtime": runtime.runtime(),
        "seeds": flags.seeds,
        "before": by_seed(controls, 0, ["before_exact_success_rate"])["before_exact_success_rate"][0],
        "seeds_outside": outside(bounds),
        "seeds_that_differ": {name: int((one != ends[0]).sum()) for name, one in zip(BOUNDS, ends, strict=True)},
        "controls": {name: control(controls, setting) for setting, name in enumerate(CONTROLS)},
    }
    text = json.dumps(compact(report), indent=1, allow_nan=False) + "\n"
    with files.Output(flags.output) as output:
        output.commit(lambda file: file.write(text.encode()))
    print(text)


if __name__ == "__main__":
    main()
