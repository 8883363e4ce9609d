"""Do a thousand runs end where an independent implementation ends? ``python -m benchmarks.agreement --seeds 1000``.

Exact success and mean actions after training with the default settings, over seeds, for both methods, beside the
figures of an eager PyTorch implementation (105 and 81 seeds).
"""

import argparse
import json
from pathlib import Path

import numpy as np

from jaxrl_mini.config import BLOCK, Config
from jaxrl_mini.exact import success
from jaxrl_mini.learning.block import Block, settings_of, sizes_of
from jaxrl_mini.learning.training import CHUNK

EXPECTED = {
    "grpo": {"success_rate": (0.9950, 0.0005), "mean_actions": (4.21, 0.03)},
    "rs-sft": {"success_rate": (0.9973, 0.0008), "mean_actions": (3.06, 0.03)},
}
ACCEPTED = np.array([0.0, 0.0, 0.0, 1.0])


def final_figures(method: str, seeds: int) -> dict[str, np.ndarray]:
    """Exact success and mean actions of each seed's last policy; [seed]."""
    parts = []
    for start in range(0, seeds, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, seeds))
        config = Config(method=method)
        block = Block(sizes_of(config), numbers, settings_of([config] * len(numbers)))
        while block.iteration < 100:
            block.advance(CHUNK)
        parts.append(success.exact_of_logits(block.logits(), ACCEPTED))
    return {name: np.concatenate([getattr(part, name) for part in parts]) for name in parts[0]._fields}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks/agreement.json"))
    arguments = parser.parse_args()
    report: dict[str, dict[str, dict[str, float | bool]]] = {}
    for method, expected in EXPECTED.items():
        report[method] = {}
        for name, values in final_figures(method, arguments.seeds).items():
            center, tolerance = expected[name]
            mean, error = float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)
            report[method][name] = {
                "mean": mean,
                "standard_error": error,
                "standard_deviation": float(values.std(ddof=1)),
                "expected": center,
                "tolerance": tolerance,
                "holds": abs(mean - center) <= tolerance,
            }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"seeds": arguments.seeds, **report}, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
