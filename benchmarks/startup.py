"""Whole processes, from start to exit: ``python -m jaxrl_mini.train --seed 7`` against the plain PyTorch loop.

``python -m benchmarks.startup --torch-python PYTHON`` alternates three commands: ours with an empty compilation cache,
ours with a full one, and `benchmarks.pytorch_loop` under an interpreter that has torch. A first round is not counted:
after it, Python has kept the bytecode of all that is imported, as it does unless it is told not to.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def seconds(command: list[str], **variables: str) -> float:
    """Wall time of a process."""
    environment = {**os.environ, **variables}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks/startup.json"))
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"cold": [], "warm": [], "pytorch": []}
    with tempfile.TemporaryDirectory() as folder:
        ours = [sys.executable, "-m", "jaxrl_mini.train", "--seed", "7", "--output", f"{folder}/record.json"]
        theirs = [arguments.torch_python, "-m", "benchmarks.pytorch_loop", "--seed", "7"]
        for repeat in range(-1, arguments.repeats):
            cache = f"{folder}/cache-{repeat}"
            cold, warm = (seconds(ours, JAX_COMPILATION_CACHE_DIR=cache) for _ in range(2))
            for name, value in (("cold", cold), ("warm", warm), ("pytorch", seconds(theirs))):
                if repeat >= 0:
                    times[name].append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[name], times["pytorch"], strict=True))
        for name in ("cold", "warm")
    }
    report = {"seconds": times, "median_seconds": medians, "median_ratio_to_pytorch": ratios}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"median_seconds": medians, "median_ratio_to_pytorch": ratios}))


if __name__ == "__main__":
    main()
