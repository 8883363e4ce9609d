"""Computes the missing parts of a sweep's folder: on all cores and devices of this machine, or on a Ray cluster.

A part depends on the grid and its number alone, and every part is committed by whoever computed it, so workers share
nothing but the folder.
"""

import itertools
import logging
import queue
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax

from jaxrl_mini.config import OWN_ADVANTAGES, UserError
from jaxrl_mini.learning.block import task_of
from jaxrl_mini.machine import jax_settings
from jaxrl_mini.machine.compilation import use_compilation_cache
from jaxrl_mini.machine.hardware import cores, default_device, use_one_thread_per_call
from jaxrl_mini.machine.runtime import runtime
from jaxrl_mini.objective.advantage import formula
from jaxrl_mini.sweeps import table_part
from jaxrl_mini.sweeps.dataset import Dataset
from jaxrl_mini.sweeps.grid import Grid

PATIENCE = 1.5
"""Seconds that an interrupted sweep waits for its threads."""

ENGINES = ("local", "ray")
ACCELERATOR_THREADS = 2
"""Parts in flight per accelerator: while one computes, the other's results are fetched and written."""

RETRIES = 20
"""How often a part is given to another Ray worker after its worker died."""


@jax_settings.own()
def run_sweep(
    grid: Grid,
    output: str | Path,
    *,
    shard: tuple[int, int] = (1, 1),
    engine: str = "local",
    address: str | None = None,
    on_part: Callable[[int], None] = lambda runs: None,
    on_damage: Callable[[str], None] = lambda message: None,
    say: Callable[[str], object] = warnings.warn,
) -> Dataset:
    """Computes what is missing of a sweep and returns its folder, opened.

    On a CPU it is faster after `hardware.use_one_thread_per_call()`, which is for the process as a whole.

    Args:
      grid: the runs.
      output: the folder; the same grid goes on in it.
      shard: (i, n): only every n-th part, from the i-th on, counted from 1.
      engine: "local", all cores and devices of this machine, or "ray".
      address: of the Ray cluster; None is the one Ray finds.
      on_part: called with a number of runs, first those that are there already, then those of each part committed.
      on_damage: called with a line for each part that was there and could not be read back.
      say: takes a line for the user.

    Raises:
      UserError: the folder holds something else or cannot be written, an advantage is not here, or there is no such
        engine or cluster.
    """
    if engine not in ENGINES:
        raise UserError(f"--engine {engine!r} is unknown: expected one of {', '.join(ENGINES)}")
    for advantage in {config.advantage for config in grid.settings}:
        formula(advantage)
    numbers = shard_parts(grid, shard)
    here = here_for(grid, engine)
    dataset = Dataset.create(output, grid, here)
    present = dataset.present() & set(numbers)
    damaged = dataset.set_damaged_aside(present)
    for message in damaged.values():
        on_damage(message)
    present -= set(damaged)
    on_part(sum(grid.part_runs(number) for number in present))
    missing = [number for number in numbers if number not in present]
    if missing:
        if unknown := dataset.refuse_other_runtime(here):
            said = f"output {output} does not say with which {', '.join(unknown)} it was started"
            say(f"{said}: if with others, parts from here on differ in the last bits of their numbers")
        for number in (
            compute_locally(dataset, missing) if engine == "local" else compute_on_ray(dataset, missing, address)
        ):
            on_part(grid.part_runs(number))
    return dataset


def shard_parts(grid: Grid, shard: tuple[int, int]) -> range:
    """The parts of shard i of n: every n-th, from the i-th on, counted from 1.

    Raises:
      UserError: i is not from 1 to n.
    """
    i, n = shard
    if not 1 <= i <= n:
        raise UserError(f"--shard {i}/{n} is out of range: expected i/n with i from 1 to n")
    return range(i - 1, grid.parts, n)


def here_for(grid: Grid, engine: str = "local") -> dict[str, Any]:
    """Where parts of a grid would be computed: `machine.runtime`, and digests of its tasks and its models' files."""
    here = runtime() | ({"threads": 1} if engine == "ray" else {})  # as `_opened` has it, whatever started the sweep
    tasks = {config.task: task for config in grid.settings if (task := task_of(config)) is not None}
    if tasks:
        here |= {"tasks": {name: task.digest for name, task in tasks.items()}}
    folders = sorted({config.model for config in grid.settings if config.model is not None})
    if not folders:
        return here
    from jaxrl_mini.policies.folders import digests  # imports safetensors, for which a table should not wait

    return here | {"models": {path: digest for folder in folders for path, digest in digests(folder).items()}}


@jax_settings.own()
def compute_part(
    dataset: Dataset, number: int, device: jax.Device | None = None, stopped: Callable[[], bool] = lambda: False
) -> int:
    """Trains the runs of a part and commits it; returns its number."""
    train_part = table_part.train_part
    if dataset.grid.part(number).shared.backend == "hf":
        from jaxrl_mini.sweeps.language_part import train_part  # imports flax, for which a table policy should not wait
    runs, history = train_part(dataset.grid, number, device=device, stopped=stopped)
    dataset.commit(number, runs, history)
    return number


def compute_locally(dataset: Dataset, numbers: Sequence[int]) -> Iterator[int]:
    """Computes parts on every device of this machine, and yields their numbers as they are committed.

    A thread per core hands blocks to the CPU; with several devices each thread keeps to its own. When the iterator is
    closed or an error is raised in it, parts that are not done are given up between two chunks of iterations.
    """
    devices = jax.local_devices(backend=default_device().platform)
    per_device = -(-cores() // len(devices)) if devices[0].platform == "cpu" else ACCELERATOR_THREADS
    places: list[jax.Device | None] = [None] if len(devices) == 1 else [*devices]
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
    stop = threading.Event()
    for number in numbers:
        todo.put(number)

    precision = jax_settings.current("jax_default_matmul_precision")  # which the caller's thread may have to itself

    def work(device: jax.Device | None) -> None:
        try:
            with jax.default_matmul_precision(precision):
                while not stop.is_set():
                    done.put(compute_part(dataset, todo.get_nowait(), device, stop.is_set))
        except (queue.Empty, table_part.Stopped):
            pass
        except BaseException as error:
            done.put(error)

    language_models = [config for config in dataset.grid.settings if config.backend == "hf"]
    if language_models:  # their libraries are imported by one thread, before others ask for the same parts of them
        from jaxrl_mini.sweeps import language_part

        language_part.loaded(language_models[0])
    workers = [device for _ in range(per_device) for device in places][: len(numbers)]
    threads = [threading.Thread(target=work, args=(device,), daemon=True) for device in workers]
    for thread in threads:
        thread.start()
    try:
        for _ in numbers:
            outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome
    finally:
        stop.set()
        deadline = time.monotonic() + PATIENCE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def compute_on_ray(dataset: Dataset, numbers: Sequence[int], address: str | None) -> Iterator[int]:
    """Computes parts as tasks of a Ray cluster that sees the folder under the same path; yields their numbers.

    A task takes one core. When its worker dies, or its machine, the part is given to another worker.

    Raises:
      UserError: ray is not installed, or there is no such cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError("--engine ray needs Ray: pip install '.[ray]' in the source folder") from error
    if not ray.is_initialized():
        try:
            _check_answers(address)
            ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError, OSError, OverflowError) as error:
            raise UserError(f"--address {address or 'auto'}: no Ray cluster answers there ({error})") from error
    task = ray.remote(num_cpus=1, max_retries=RETRIES)(_compute_remotely)
    folder, todo = str(dataset.path.resolve()), iter(numbers)
    own = dict(OWN_ADVANTAGES)  # by value: the workers need not see the files that `--advantage` names
    in_flight = max(
        2,
        2 * int(ray.cluster_resources().get("CPU", 1)),
    )
    waiting = [task.remote(folder, number, own) for number in itertools.islice(todo, in_flight)]
    try:
        while waiting:
            (first,), waiting = ray.wait(waiting, num_returns=1)
            try:
                number = ray.get(first)
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, UserError) else error from None
            waiting += [task.remote(folder, another, own) for another in itertools.islice(todo, 1)]
            yield number
    finally:
        for one in waiting:
            ray.cancel(one, force=True)


def _check_answers(address: str | None) -> None:
    """Ray itself would try for two minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


@lru_cache(maxsize=1)
def _opened(folder: str) -> Dataset:
    jax_settings.use_own()
    use_one_thread_per_call()
    use_compilation_cache()
    dataset = Dataset.open(folder)
    dataset.refuse_other_runtime(here_for(dataset.grid))
    return dataset


def _compute_remotely(folder: str, number: int, own: dict[str, Any]) -> int:
    OWN_ADVANTAGES.update(own)
    return compute_part(_opened(folder), number)
