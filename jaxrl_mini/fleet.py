"""Many table-policy runs at once, in blocks of one fixed shape; a single run is a block padded with copies.

Float results can change with array shapes, so every run, alone or among thousands, goes through the same compiled
programs at the same shapes: its numbers never depend on its neighbours.
"""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_mini import compilation, evaluation, training, verifier
from jaxrl_mini.config import Config
from jaxrl_mini.evaluation import Evaluation, Evaluations
from jaxrl_mini.grid import BLOCK, SHARED_FIELDS, Grid, Part, history_iterations
from jaxrl_mini.policies import table
from jaxrl_mini.training import CHUNK, Log, Sizes, State
from jaxrl_mini.types import Metrics, Settings

COUNTS = ("optimizer_steps", "mixed_groups", "retained_episodes")
"""Metrics that are whole numbers."""

History = dict[str, np.ndarray]
"""A column per metric: the iteration's number, `types.Metrics`, and the exact success rate after the iteration."""


Columns = dict[str, np.ndarray]
"""A table: an array per column, all of one length."""


class Block:
    """Up to 64 runs that share a program, between two chunks of iterations.

    Args:
      sizes: the program.
      seeds: uint32 [run].
      settings: float [run] for each field of `Settings`.
      device: where to compute; None is jax's default.
    """

    def __init__(self, sizes: Sizes, seeds: np.ndarray, settings: Columns, device: jax.Device | None = None):
        if not 1 <= len(seeds) <= BLOCK:
            raise ValueError(f"a block holds 1 to {BLOCK} runs, not {len(seeds)}")
        self.sizes = sizes
        self.runs = len(seeds)
        padded = [
            np.pad(np.asarray(column, kind), (0, BLOCK - self.runs), mode="edge")
            for column, kind in zip(
                (seeds, *(settings[name] for name in Settings._fields)),
                (np.uint32, *[np.float32] * len(settings)),
                strict=True,
            )
        ]
        self.seeds, *columns = jax.device_put(padded, device)
        self.settings = Settings(*columns)
        self.state = _initial_state(device)
        self.iteration = 0

    @classmethod
    def of_config(cls, config: Config) -> "Block":
        """A block of one run."""
        settings = {"lr": config.effective_lr, "clip": config.clip, "beta": config.beta}
        return cls(
            sizes_of(config), np.array([config.seed]), {name: np.array([value]) for name, value in settings.items()}
        )

    def advance(self, count: int) -> Log:
        """Runs `count` iterations, at most 20; the log has 20, and 64 runs (see `taken`)."""
        verdicts = verifier.training_verdicts(self.iteration, CHUNK, self.sizes.groups)
        self.state, log = training.advance(
            self.state, self.seeds, self.settings, verdicts, self.iteration, count, self.sizes
        )
        self.iteration += count
        return log

    def logits(self) -> np.ndarray:
        """float32 [state, action, run]: the policies now."""
        return np.asarray(self.state.params)[..., : self.runs]

    def evaluate(self, episodes: int) -> Evaluations:
        """Evaluates the policies, those of the padding too, over so many sampled episodes, and exactly."""
        verdicts = verifier.evaluation_verdicts(episodes)
        return evaluation.evaluate(self.state.params, self.seeds, verdicts)


def sizes_of(config: Config) -> Sizes:
    """The program of a setting."""
    return Sizes(config.method, config.groups, config.group_size, config.epochs)


@lru_cache(maxsize=64)
def _initial_state(device: jax.Device | None) -> State:
    """Every block of a device starts from the same arrays."""
    return jax.device_put(training.initial_state(table.initial_logits((BLOCK,)), (BLOCK,)), device)


def taken(log: Log, count: int, runs: int) -> Log:
    """What `count` iterations of `runs` runs left in a log, as NumPy arrays."""
    return Log(*jax.tree.map(lambda leaf: np.asarray(leaf)[:count, ..., :runs], log))


@dataclass(frozen=True)
class Result:
    """A finished run."""

    config: Config
    before: Evaluation
    after: Evaluation
    history: History
    """An array [iteration] per metric."""
    logits: np.ndarray
    """float32 [iteration + 1, state, action]: the policy before the first and after every iteration."""
    packed_episodes: np.ndarray
    """int32 [iteration, group, episode]: the sampled episodes (see `types.Episodes`)."""
    timing: dict[str, float]
    """Seconds: `compile_seconds`, `run_seconds`, and `train_and_final_eval_seconds`, which both are part of."""


def run(config: Config, *, on_chunk: Callable[[History], None] | None = None) -> Result:
    """Trains one policy.

    Args:
      config: the settings.
      on_chunk: called with the history of each 20 iterations as soon as they are done.
    """
    block = Block.of_config(config)
    before = block.evaluate(config.eval_episodes)[0]
    logits, packed, histories = [block.logits()[None]], [], []
    started, compiled = time.perf_counter(), compilation.seconds()
    while block.iteration < config.iterations:
        first = block.iteration
        count = min(CHUNK, config.iterations - first)
        log = taken(block.advance(count), count, 1)
        logits.append(log.params)
        packed.append(log.episodes.packed)
        numbers = np.arange(first, first + count)
        histories.append(
            {name: column[..., 0] for name, column in history_of(log.metrics, log.params, numbers).items()}
        )
        if on_chunk:
            on_chunk(histories[-1])
    after = block.evaluate(config.eval_episodes)[0]
    elapsed, compiled = time.perf_counter() - started, compilation.seconds() - compiled
    timing = {"train_and_final_eval_seconds": elapsed, "compile_seconds": compiled, "run_seconds": elapsed - compiled}
    return Result(
        config,
        before,
        after,
        {name: np.concatenate([part[name] for part in histories]) for name in histories[0]},
        np.concatenate(logits)[..., 0],
        np.concatenate(packed)[..., 0],
        timing,
    )


def history_of(
    metrics: Float[Array | np.ndarray, "iteration metric run"],
    policies: Float[Array | np.ndarray, "iteration 24 6 run"],
    iterations: Int[np.ndarray, " iteration"],
) -> History:
    """The metrics of some iterations of one chunk, given their numbers, as columns [iteration, run]."""
    runs = metrics.shape[-1]
    history: History = {"iteration": np.repeat(iterations[:, None], runs, axis=1)}
    for name, column in zip(Metrics._fields, np.moveaxis(np.asarray(metrics), 1, 0), strict=True):
        history[name] = column.astype(np.int32) if name in COUNTS else column
    accepted = verifier.training_verdicts(int(iterations[0]) // CHUNK * CHUNK, CHUNK, 1).mean(axis=(0, 1))
    exact = evaluation.exact_of_logits(np.moveaxis(np.asarray(policies), 0, -1), accepted)
    history["exact_success_rate"] = np.asarray(exact.success_rate).T
    return history


class Stopped(Exception):
    """Someone asked to stop before the part was done."""


def train_part(
    grid: Grid, number: int, *, device: jax.Device | None = None, stopped: Callable[[], bool] = lambda: False
) -> tuple[Columns, Columns]:
    """Trains the runs of one part of a grid, block after block.

    Args:
      grid: the sweep.
      number: the part's.
      device: where to compute; None is jax's default.
      stopped: asked between chunks of iterations.

    Returns:
      The columns [run] of the table of runs, and those [run * iteration] of the history, run by run; the
      latter has no columns where none is kept.

    Raises:
      Stopped: `stopped()` was true.
    """
    part = grid.part(number)
    columns = [
        _train_block(grid, part, slice(first, first + BLOCK), device, stopped)
        for first in range(0, len(part.seeds), BLOCK)
    ]
    runs, history = ([one[table] for one in columns] for table in (0, 1))
    return _joined(runs), _joined(history)


def _train_block(
    grid: Grid, part: Part, place: slice, device: jax.Device | None, stopped: Callable[[], bool]
) -> tuple[Columns, Columns]:
    config = part.shared
    own = {name: np.array([getattr(one, name) for one in part.settings]) for name in ("lr", "clip", "beta")}
    own = {name: values[part.local_settings[place]] for name, values in own.items()}
    block = Block(sizes_of(config), part.seeds[place], own, device)
    before = block.evaluate(config.eval_episodes)
    kept = history_iterations(config.iterations, grid.history_every)
    histories = []
    while block.iteration < config.iterations:
        if stopped():
            raise Stopped
        first = block.iteration
        count = min(CHUNK, config.iterations - first)
        log = block.advance(count)
        here = kept[(kept >= first) & (kept < first + count)]
        if len(here):
            rows = here - first
            metrics, policies = (np.asarray(leaf)[rows, ..., : block.runs] for leaf in (log.metrics, log.params))
            histories.append(history_of(metrics, policies, here))
    after = block.evaluate(config.eval_episodes)
    last = np.asarray(log.metrics)[count - 1, :, : block.runs]
    numbers, settings, seeds = part.numbers[place], part.setting_numbers[place], part.seeds[place]
    history = {name: np.concatenate([one[name] for one in histories]) for name in histories[0]} if histories else {}
    logits = block.logits()
    shared = {name: np.full(block.runs, getattr(config, name)) for name in SHARED_FIELDS}
    runs = {
        "run": numbers,
        "setting": settings,
        "seed": seeds,
        **shared,
        **own,
        **_evaluation_columns("before", before, block.runs),
        **_evaluation_columns("after", after, block.runs),
        **{
            f"last_{name}": column.astype(np.int32) if name in COUNTS else column
            for name, column in zip(Metrics._fields, last, strict=True)
        },
        "finite": np.isfinite(logits).all(axis=(0, 1)) & np.isfinite(last).all(axis=0),
        "iterations_to_90": _iterations_to(0.9, history, block.runs),
        "logits_crc32": _checksums(logits),
    }
    labels = {"run": numbers, "setting": settings, "seed": seeds}
    by_run = {name: np.repeat(column, len(kept)) for name, column in labels.items()}
    return runs, {**by_run, **{name: column.T.ravel() for name, column in history.items()}} if history else {}


def _evaluation_columns(when: str, evaluations: Evaluations, runs: int) -> Columns:
    columns = {
        "successes": evaluations.successes,
        "success_rate": evaluations.successes / evaluations.episodes,
        "mean_actions": evaluations.actions / evaluations.episodes,
        "exact_success_rate": np.asarray(evaluations.exact.success_rate),
        "exact_mean_actions": np.asarray(evaluations.exact.mean_actions),
    }
    return {f"{when}_{name}": column[:runs] for name, column in columns.items()}


def _iterations_to(success_rate: float, history: History, runs: int) -> np.ndarray:
    """After how many iterations a run's exact success first reached a rate; -1 where no kept iteration did."""
    if not history:
        return np.full(runs, -1, np.int32)
    reached = history["exact_success_rate"] >= success_rate
    first = history["iteration"][np.argmax(reached, axis=0), np.arange(runs)] + 1
    return np.where(reached.any(axis=0), first, -1).astype(np.int32)


def _checksums(logits: np.ndarray) -> np.ndarray:
    """The CRC-32 of each run's logits, as little-endian float32 [state, action]."""
    by_run = np.ascontiguousarray(np.moveaxis(logits, -1, 0), "<f4")
    return np.array([zlib.crc32(one) for one in by_run], np.uint32)


def _joined(tables: list[Columns]) -> Columns:
    return {name: np.concatenate([one[name] for one in tables]) for name in tables[0]}
