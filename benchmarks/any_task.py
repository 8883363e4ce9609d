"""Runs per second on other tasks than the article's: against C, and over their sizes.

``python -m benchmarks.any_task`` trains grpo with default settings, without evaluation on any side, on all cores: on
`repair:lines=3,steps=7`, alternating with a scalar C program that has the task's tables as data; and on corridors of
many sizes, alternating with the article's task. Figures are medians over the repeats, of wall time.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.throughput import ITERATIONS, block_trainer, compile_c
from jaxrl_mini.config import Config
from jaxrl_mini.episodes.grounds import grounds
from jaxrl_mini.machine.hardware import cores, use_one_thread_per_call
from jaxrl_mini.tasks.specification import load_task, register
from jaxrl_mini.tasks.task import Task

COMPARED = "repair:lines=3,steps=7"
SHAPES = [(8, 8, 4), (8, 16, 4), (8, 32, 4), (8, 64, 4), (8, 64, 10), (16, 64, 10), (8, 250, 4), (8, 1000, 4)]
"""Steps, contexts of a step and actions of the corridors."""


class Corridor(Task):
    """Of `places` places, one is right at the end; an action moves on by its number, from place to place."""

    header = "Go to the first place."

    def __init__(self, steps: int, places: int, actions: int):
        self.places, self.max_steps, self.actions = places, steps, tuple(f"go_{i}" for i in range(actions))
        self.splits = {"train": tuple(range(places))}

    def reset(self, instance: int) -> str:
        """Starts at a place."""
        self.place, self.steps, self.submission = instance, 0, None
        return f"place {self.place}"

    def step(self, action: str) -> str:
        """Moves on, round the end."""
        self.place = (self.place + self.actions.index(action)) % self.places
        self.steps += 1
        if self.ended:
            self.submission = self.place
        return f"place {self.place}"

    ended = property(lambda self: self.steps == self.max_steps)  # type: ignore[assignment]
    state = property(lambda self: (self.place, self.steps))  # type: ignore[assignment]
    view = property(lambda self: self.place)  # type: ignore[assignment]

    @staticmethod
    def verify(submission: int, instance: int) -> float:
        """Accepts the first place."""
        return float(submission == 0)


def write_tables(specification: str, path: Path) -> None:
    """A task's tables as `task_run.c` reads them."""
    task = load_task(specification)
    here = grounds(task)
    tables, accepted = here.tables, np.asarray(here.accepted)
    steps, rows, actions, draws = tables.next_row.shape
    if draws > 1 or tables.start_row.shape[1] > 1 or not np.isin(accepted, (0, 1)).all():
        raise ValueError(f"{specification} has chance, which the C program has not")
    members = np.asarray(here.members)
    sizes = steps, rows, task.width, actions, len(members), len(accepted)
    parts = (
        sizes, tables.next_row, tables.submission, tables.view, tables.start_row[members], accepted[:, members]
    )  # fmt: skip
    path.write_bytes(b"".join(np.ascontiguousarray(part, "<i4").tobytes() for part in parts))


def seconds(function: Callable[[], Any]) -> float:
    """Wall time of a call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def alternating(rivals: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Wall times of several, turn by turn."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, rival in rivals.items():
            times[name].append(seconds(rival))
    return times


def against_c(folder: Path, runs: int, repeats: int) -> dict[str, Any]:
    """Both on all cores."""
    program, tables = compile_c("task_run", str(folder)), folder / "tables"
    if program is None:
        return {"missing": "a C compiler"}
    write_tables(COMPARED, tables)

    def c() -> None:
        command = [program, str(tables), str(-(-runs // cores()))]
        processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(cores())]
        if any(process.wait() for process in processes):
            raise RuntimeError("the C version failed")

    train = block_trainer(Config(task=COMPARED))
    train(1)
    times = alternating({"ours": partial(train, runs), "C": c}, repeats)
    ratios = [theirs / mine for theirs, mine in zip(times["C"], times["ours"], strict=True)]
    microseconds = {name: 1e6 * statistics.median(walls) / runs for name, walls in times.items()}
    return {"task": COMPARED, "microseconds_a_run": microseconds, "speed_of_C": statistics.median(ratios)}


def over_sizes(runs: int, repeats: int) -> dict[str, Any]:
    """Each corridor beside the article's task."""
    register("corridor", Corridor)
    article, found = block_trainer(Config()), []
    article(1)
    for steps, places, actions in SHAPES:
        train = block_trainer(Config(task=f"corridor:steps={steps},places={places},actions={actions}"))
        train(1)
        times = alternating({"corridor": partial(train, runs), "article": partial(article, runs)}, repeats)
        ratios = [one / other for one, other in zip(times["corridor"], times["article"], strict=True)]
        size = {"steps": steps, "contexts_a_step": places, "actions": actions, "cells": steps * places * actions}
        found.append({**size, "times_the_article": statistics.median(ratios)})
        print(json.dumps(found[-1]), flush=True)
    return {"corridors": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1024, help="per call [1024]")
    parser.add_argument("--sizes-runs", type=int, default=128, help="the same of the corridors [128]")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks/any-task.json"))
    arguments = parser.parse_args()
    use_one_thread_per_call()
    with tempfile.TemporaryDirectory() as folder:
        report = against_c(Path(folder), arguments.runs, arguments.repeats)
    print(json.dumps(report), flush=True)
    report |= over_sizes(arguments.sizes_runs, arguments.repeats)
    report |= {"cores": cores(), "iterations": ITERATIONS, "load_average": os.getloadavg()[0]}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
