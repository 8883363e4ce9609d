"""Runs, episodes, environment steps and updates per second, over fleet sizes, on whatever device is there.

``python -m benchmarks.throughput`` trains grpo with default settings (100 iterations, 32 episodes, 2 steps), without
evaluation on any side, and compares, alternating in one process on the same cores: the package's blocks, a hand-written
C version (where a compiler is), one `vmap` of a straightforward function, and drawing the random numbers alone. With
`--torch-python PYTHON` also the plain PyTorch loop. Every figure is the median and the spread of at least five calls
that are waited for; compiling is timed apart. Wall and CPU time are both given, since other load changes the former.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_mini.config import BLOCK, Config
from jaxrl_mini.machine.hardware import cores, use_one_thread_per_call

ITERATIONS, EPISODES, EPOCHS = 100, 32, 2
STEPS_PER_EPISODE = 4.2
"""Actions of an episode after training, roughly: what an environment step is worth."""

HERE = Path(__file__).parent


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    function()
    return time.perf_counter() - wall, cpu_seconds() - cpu


def block_trainer(config: Config) -> Callable[[int], None]:
    """Trains n runs of a setting in blocks, spread over the cores and devices as a sweep does."""
    import jax
    import numpy as np

    from jaxrl_mini.learning import training
    from jaxrl_mini.learning.block import Block, settings_of, sizes_of

    devices = jax.local_devices()
    workers = cores() if devices[0].platform == "cpu" else 2 * len(devices)
    pool = ThreadPoolExecutor(workers)

    def block(first: int, runs: int) -> None:
        seeds = np.arange(first, min(first + BLOCK, runs))
        columns = settings_of([config] * len(seeds))
        device = None if len(devices) == 1 else devices[first // BLOCK % len(devices)]
        one = Block(sizes_of(config), seeds, columns, device)
        for _ in range(ITERATIONS // training.CHUNK):
            one.advance(training.CHUNK)
        jax.block_until_ready(one.state)

    def train(runs: int) -> None:
        list(pool.map(lambda first: block(first, runs), range(0, runs, BLOCK)))

    return train


def drawer() -> Callable[[int], None]:
    """Draws what n runs need, in blocks."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_mini.episodes import rollout

    @jax.jit
    def draw(seeds: Any) -> Any:
        def body(i: Any, total: Any) -> Any:
            return total + sum(one.sum((0, 1)) for one in rollout.draw_uniforms(seeds, 0, i, 4, 8))

        return jax.lax.fori_loop(0, ITERATIONS, body, jnp.zeros(BLOCK))

    pool = ThreadPoolExecutor(cores())
    seeds = np.arange(BLOCK, dtype=np.uint32)
    return lambda runs: list(pool.map(lambda _: draw(seeds).block_until_ready(), range(-(-runs // BLOCK)))) and None


def vmapped() -> Callable[[int], None]:
    import jax
    import numpy as np

    from benchmarks.plain_vmap import train_many

    return lambda runs: jax.block_until_ready(train_many(np.arange(runs, dtype=np.uint32))) and None


def compile_c(name: str, folder: str) -> str | None:
    """One of the C programs, compiled into a folder; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    program = f"{folder}/{name}"
    options = ["-O3", "-march=native", "-ffast-math", str(HERE / f"c/{name}.c"), "-o", program, "-lm"]
    subprocess.run([compiler, *options], check=True)
    return program


def compiled_c(folder: str) -> Callable[[int, int], None] | None:
    """The C version on all cores, n runs in all; None without a compiler."""
    program = compile_c("training_run", folder)
    if program is None:
        return None

    def run(runs: int, method: int) -> None:
        each = [str(-(-runs // cores())), str(method)]
        processes = [subprocess.Popen([program, *each], stdout=subprocess.DEVNULL) for _ in range(cores())]
        if any(process.wait() for process in processes):
            raise RuntimeError("the C version failed")

    return run


def torch_seconds_a_run(python: str) -> float:
    """One core's seconds of a run without evaluation, from the difference of two run lengths."""
    command = [python, "-m", "benchmarks.pytorch_loop", "--iterations"]
    short, long = (
        timed(lambda n=n: subprocess.run([*command, n], check=True, capture_output=True))[1] for n in ("5", "25")
    )
    return (long - short) / 20 * ITERATIONS


def figures(times: list[tuple[float, float]], runs: int) -> dict[str, float]:
    walls, cpus = ([one[i] for one in times] for i in (0, 1))
    rate = runs / statistics.median(walls)
    return {
        "runs": runs,
        "wall_seconds_median": statistics.median(walls),
        "wall_seconds_min": min(walls),
        "wall_seconds_max": max(walls),
        "cpu_microseconds_a_run": statistics.median(cpus) / runs * 1e6,
        "cpu_microseconds_a_run_min": min(cpus) / runs * 1e6,
        "runs_per_second": rate,
        "episodes_per_second": rate * ITERATIONS * EPISODES,
        "environment_steps_per_second": rate * ITERATIONS * EPISODES * STEPS_PER_EPISODE,
        "updates_per_second": rate * ITERATIONS * EPOCHS,
    }


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    use_one_thread_per_call()
    import jax

    ours = {method: block_trainer(Config(method=method)) for method in ("grpo", "rs-sft")}
    compile_seconds = {method: timed(partial(train, 1))[0] for method, train in ours.items()}
    device = jax.devices()[0]
    report: dict[str, Any] = {
        "device": device.device_kind, "platform": device.platform, "devices": jax.device_count(), "cores": cores(),
        "machine": platform.platform(), "jax": jax.__version__, "load_average": os.getloadavg()[0],
        "compile_seconds": compile_seconds, "fleet_sizes": [],
    }  # fmt: skip
    for runs in arguments.sizes:
        repeats = [timed(partial(ours["grpo"], runs)) for _ in range(arguments.repeats)]
        report["fleet_sizes"].append(figures(repeats, runs))
        print(json.dumps(report["fleet_sizes"][-1]), flush=True)
    runs, c = arguments.compared, compiled_c(folder)
    rivals: dict[str, Callable[[], Any]] = {f"ours, {method}": partial(train, runs) for method, train in ours.items()}
    if c is not None:
        rivals |= {f"C, {method}": partial(c, runs, number) for number, method in enumerate(ours)}
        rivals["C, random numbers alone"] = partial(c, runs, 2)
    draw, plain = drawer(), vmapped()
    rivals["random numbers alone"] = partial(draw, runs)
    rivals["plain vmap, grpo"] = partial(plain, arguments.plain)
    report["compile_seconds"]["plain vmap, grpo"] = timed(rivals["plain vmap, grpo"])[0]
    draw(1)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
    for _ in range(arguments.repeats):
        for name, rival in rivals.items():
            times[name].append(timed(rival))
    counts = {name: arguments.plain if name.startswith("plain") else runs for name in rivals}
    report["compared"] = {name: figures(times[name], counts[name]) for name in rivals}
    for method in ours if c is not None else ():
        pairs = list(zip(times[f"C, {method}"], times[f"ours, {method}"], strict=True))
        report[f"speed_of_C_{method}"] = {
            "wall": statistics.median(theirs[0] / mine[0] for theirs, mine in pairs),
            "cpu": statistics.median(theirs[1] / mine[1] for theirs, mine in pairs),
        }
    if arguments.torch_python:
        report["pytorch_cpu_seconds_a_run"] = torch_seconds_a_run(arguments.torch_python)
    report["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = device.memory_stats() or {}
    report["peak_device_memory_bytes"] = memory.get("peak_bytes_in_use")
    return report


def plot(report: dict[str, Any], path: Path) -> None:
    """Runs per second over fleet sizes; needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    sizes = report["fleet_sizes"]
    figure, axes = plt.subplots(figsize=(6, 4))
    runs = [one["runs"] for one in sizes]
    axes.loglog(runs, [one["runs_per_second"] for one in sizes], "o-", label="jaxrl_mini")
    for name in ("C, grpo", "plain vmap, grpo"):
        if name in report["compared"]:
            axes.axhline(report["compared"][name]["runs_per_second"], linestyle="--", label=name)
            axes.text(runs[0], report["compared"][name]["runs_per_second"], name)
    axes.set(xlabel="runs in the fleet", ylabel="runs per second", title=f"{report['device']}, {report['cores']} cores")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4**i for i in range(9)], help="[1 to 65536]")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compared", type=int, default=4096, help="runs per call of the comparison")
    parser.add_argument("--plain", type=int, default=256, help="runs per call of the plain vmap")
    parser.add_argument("--torch-python", help="an interpreter that has torch")
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks"), help="a folder")
    parser.add_argument("--plot", action="store_true", help="also draw the figure (needs matplotlib)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(arguments, folder)
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / f"throughput-{report['platform']}.json"
    file.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        plot(report, file.with_suffix(".svg"))
    ratios = {name: report[name] for name in report if name.startswith("speed_of_C")}
    print(json.dumps({"output": str(file), **ratios}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
