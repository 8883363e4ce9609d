"""Trains every setting with every seed into a folder of Parquet files: ``python -m jaxrl_mini.sweep --seeds 10000``."""

import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_mini.config import ARTICLE, HISTORY_EVERY, Config, UserError
from jaxrl_mini.machine import commandline, effort, signals
from jaxrl_mini.machine.hardware import cores
from jaxrl_mini.objective.own import load_advantage

if TYPE_CHECKING:
    from jaxrl_mini.sweeps.grid import Grid

EXAMPLES = """\
examples:
  python -m jaxrl_mini.sweep --seeds 10000
  python -m jaxrl_mini.sweep --method grpo rs-sft --lr 0.04 0.08 0.16 --seeds 1000 --output sweeps/lr
  python -m jaxrl_mini.sweep summary sweeps/lr

seeds: `--seeds 10000` is 0 to 9999, `--seeds 100:200` is 100 to 199, `--seeds 7 19 42` are these three.
The same command again computes only what is missing in the folder. On a cluster without an engine, give each of n
jobs its share of one folder on a shared disk: --shard 1/n to --shard n/n.
"""

SUMMARY_EXAMPLES = """\
examples:
  python -m jaxrl_mini.sweep summary sweeps/lr
  python -m jaxrl_mini.sweep summary sweeps/lr --json
"""

SECONDS_PER_HISTORY_ROW, SECONDS_PER_COMPILATION = 8e-5, 4.0
"""Of what is kept of an iteration, and of a compilation with the start of the processes, beside `effort.shared`."""

RUN_BYTES, HISTORY_ROW_BYTES = 150, 30
"""What a row takes on the disk, about."""


def main(arguments: list[str]) -> None:
    """Parses, computes what is missing, says what there is."""
    if arguments[:1] == ["summary"]:
        summarize(arguments[1:])
        return
    parser = commandline.Parser("sweep", description="Trains many policies.", epilog=EXAMPLES)
    commandline.add_config_flags(parser, several=True)
    commandline.add_device_flag(parser)
    parser.add_argument("--seeds", nargs="+", required=True, metavar="SEEDS", help="N, several numbers, or a:b")
    parser.add_argument(
        "--history-every",
        type=commandline.number(int, HISTORY_EVERY),
        default=1,
        metavar="K",
        help="keep every K-th iteration [1]; 0: none",
    )
    parser.add_argument(
        "--output", type=commandline.output, metavar="DIR", help="the folder [sweeps/DIGEST-OF-THE-GRID]"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    parser.add_argument("--shard", metavar="i/n", default="1/1", help="compute only the i-th of n shares")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="where parts are computed [local]")
    parser.add_argument("--address", help="of the Ray cluster [the one Ray finds]")
    flags = parser.parse_args(arguments)
    if flags.address is not None and flags.engine != "ray":
        raise UserError(f"--address {flags.address} has no use with engine {flags.engine}: use --engine ray")
    from jaxrl_mini.sweeps.grid import Grid, parse_seeds

    flags.advantage = [load_advantage(one) for one in flags.advantage]
    values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(Config) if field.name != "seed"}
    grid = Grid.product(parse_seeds(flags.seeds), flags.history_every, **values)
    from jaxrl_mini.exact.beliefs import too_many
    from jaxrl_mini.tasks.situations import stacked
    from jaxrl_mini.tasks.specification import load_task

    tasks = ((config.task, config.exact_gradient, config.backend) for config in grid.settings if config.task != ARTICLE)
    for name, of_expectations, backend in dict.fromkeys(tasks):
        task = load_task(name)
        if of_expectations:
            stacked(task, "train")
        if backend == "hf" and (why := too_many(task)):
            raise UserError(f"{why} for the exact figures that a sweep compares")
    shard = _parse_shard(flags.shard)
    output = Path(flags.output or f"sweeps/{grid.digest[:12]}")
    commandline.note(estimate(grid, output))
    if flags.dry_run:
        return
    _compute(grid, output, shard, flags)


def _compute(grid: "Grid", output: Path, shard: tuple[int, int], flags: object) -> None:
    device, engine, address = (getattr(flags, name) for name in ("device", "engine", "address"))
    for number in signals.not_ignored():
        signal.signal(number, signals.interrupt)
    runs, parts = 0, 0
    try:
        commandline.use_device(device, one_thread_per_call=True)
        from tqdm import tqdm

        from jaxrl_mini.sweeps.engine import run_sweep, shard_parts

        total = grid.runs if shard == (1, 1) else sum(map(grid.part_runs, shard_parts(grid, shard)))
        with tqdm(total=total, unit="run", disable=not sys.stderr.isatty(), smoothing=0.05) as bar:

            def report(more: int) -> None:
                nonlocal runs, parts
                if not parts:
                    bar.initial = more
                runs, parts = runs + more, parts + 1
                bar.update(more)

            options = {"engine": engine, "address": address, "say": commandline.note}
            run_sweep(grid, output, shard=shard, on_part=report, on_damage=_warn, **options)
    except KeyboardInterrupt as interruption:
        commandline.note(
            f"interrupted: {commandline.counted(runs, 'run')} kept in {output}; the same command goes on from there"
        )
        # At once, even while another thread compiles; what is committed is on the disk already.
        commandline.end(128 + getattr(interruption, "number", signal.SIGINT))
    commandline.say(json.dumps({"runs": runs, "parts": parts - 1, "output": str(output)}))


def estimate(grid: "Grid", output: Path) -> str:
    """How many runs and compilations, how long, and how many bytes, in a line."""
    seeds, seconds, rows = len(grid.seeds), 0.0, 0
    for config in grid.settings:
        seconds += effort.shared(config) * seeds
        rows += grid.history_rows(config)
    seconds = (seconds + rows * seeds * SECONDS_PER_HISTORY_ROW) / cores() + grid.programs * SECONDS_PER_COMPILATION
    size = grid.runs * RUN_BYTES + rows * seeds * HISTORY_ROW_BYTES
    counts = {"run": grid.runs, "setting": len(grid.settings), "seed": seeds, "compilation": grid.programs}
    runs, settings, of_seeds, compilations = (commandline.counted(number, noun) for noun, number in counts.items())
    return (
        f"{runs}: {settings} x {of_seeds}, {compilations}, about {effort.in_words(seconds)} on "
        f"{commandline.counted(cores(), 'core')} and {effort.in_bytes(size)} in {output}"
    )


def summarize(arguments: list[str]) -> None:
    """Prints the statistics of a folder."""
    parser = commandline.Parser(
        "sweep summary",
        description="Statistics of a sweep, per setting and between settings.",
        epilog=SUMMARY_EXAMPLES,
    )
    parser.add_argument("folder", type=commandline.path, metavar="DIR", help="a sweep's folder")
    parser.add_argument("--json", action="store_true", help="as one JSON object instead of tables")
    flags = parser.parse_args(arguments)
    from jaxrl_mini.sweeps import statistics
    from jaxrl_mini.sweeps.dataset import Dataset

    summary = statistics.summarize(Dataset.open(flags.folder))
    print(json.dumps(summary, allow_nan=False) if flags.json else statistics.as_text(summary))


def _parse_shard(text: str) -> tuple[int, int]:
    from jaxrl_mini.sweeps.grid import parse_number

    i, slash, n = text.partition("/")
    share, shares = parse_number(i), parse_number(n)
    if not slash or share is None or shares is None or not 1 <= share <= shares:
        raise UserError(f"--shard {text} is out of range: expected i/n with i from 1 to n")
    return share, shares


def _warn(message: str) -> None:
    commandline.note(f"damaged: {message}")


if __name__ == "__main__":
    commandline.run_command(main)
