"""Many table-policy runs at once, in blocks of one fixed shape; a single run is a block padded with copies.

Float results can change with array shapes, so every run, alone or among thousands, goes through the same compiled
programs at the same shapes: its numbers never depend on its neighbours.
"""

import importlib
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxrl_mini import compilation, evaluation, training, verifier
from jaxrl_mini.checkpoint import Checkpoints, Snapshot
from jaxrl_mini.config import Config
from jaxrl_mini.evaluation import Evaluations
from jaxrl_mini.grid import BLOCK, SHARED_FIELDS, Grid, history_iterations
from jaxrl_mini.policies import table
from jaxrl_mini.result import History, Result, columns, joined
from jaxrl_mini.task import NUM_ACTIONS, NUM_VARIANTS
from jaxrl_mini.training import CHUNK, Log, Sizes, State
from jaxrl_mini.types import Distribution, Settings

AHEAD = 5 * CHUNK
"""Iterations whose verdicts are computed before the first."""
Columns = dict[str, np.ndarray]
"""A table: an array per column, all of one length."""


class Block:
    """Up to 64 runs that share a program, between two chunks of iterations.

    Args:
      sizes: the program.
      seeds: uint32 [run].
      settings: float [run] for each field of `Settings` that is in use.
      device: where to compute; None is jax's default.
    """

    def __init__(self, sizes: Sizes, seeds: np.ndarray, settings: Columns, device: jax.Device | None = None):
        if not 1 <= len(seeds) <= BLOCK:
            raise ValueError(f"a block holds 1 to {BLOCK} runs, not {len(seeds)}")
        self.sizes = sizes
        self.runs = len(seeds)
        padded = Settings(**{name: _padded(column, np.float32) for name, column in settings.items()})
        data = (_padded(seeds, np.uint32), padded, *_start(sizes))
        device = device or jax.config.values["jax_default_device"] or jax.devices()[0]
        self.seeds, self.settings, self.state, self.log = jax.device_put(data, device)
        self._reference = _reference(device)
        self._program = program(sizes, tuple(name for name in Settings._fields if name in settings), device)
        self.iteration = 0

    @classmethod
    def of_config(cls, config: Config) -> "Block":
        """A block of one run."""
        return cls(sizes_of(config), np.array([config.seed]), settings_of([config]))

    def advance(self, count: int) -> None:
        """Runs `count` iterations, to the end of their chunk of 20 at most."""
        first = self.iteration - self.iteration % CHUNK
        verdicts = verifier.training_verdicts(first, CHUNK, self.sizes.groups)
        numbers = np.int32(self.iteration), np.int32(self.iteration + count)
        data = (self.seeds, self._reference, self.settings, verdicts, *numbers)
        self.state, self.log = self._program(self.state, self.log, *data)
        self.iteration += count

    def record(self, iterations: Int[np.ndarray, " iteration"]) -> tuple[Log, Float[np.ndarray, "iteration 24 6 run"]]:
        """Runs to the last of some iterations of one chunk; returns the log of each, and the policies after each."""
        logs, logits = [], []
        for number in iterations.tolist():
            self.advance(number + 1 - self.iteration)
            logs.append(self.logged())
            logits.append(self.logits())
        return jax.tree.map(lambda *leaves: np.stack(leaves), *logs), np.stack(logits)

    def logged(self) -> Log:
        """What the last iteration left behind, as NumPy arrays [..., run]."""
        return jax.tree.map(lambda leaf: np.array(leaf)[..., : self.runs], self.log)

    def go_on(self, state: State, iteration: int) -> None:
        """Takes over the state of a like block after so many iterations."""
        self.state, self.iteration = jax.device_put(state, self.seeds.device), iteration

    def logits(self) -> np.ndarray:
        """float32 [state, action, run]: the policies now."""
        return np.array(self.state.params)[..., : self.runs]

    def evaluate(self, episodes: int) -> Evaluations:
        """Evaluates the policies over so many sampled episodes, and exactly."""
        verdicts = verifier.evaluation_verdicts(episodes)
        return evaluation.evaluate(self.logits(), np.asarray(self.seeds)[: self.runs], verdicts)


def _padded(column: np.ndarray, kind: type[np.generic]) -> np.ndarray:
    """A column of a whole block: runs that are not asked for are copies of the last."""
    padded = np.full(BLOCK, column[-1], kind)
    padded[: len(column)] = column
    return padded


def sizes_of(config: Config) -> Sizes:
    """The program of a setting."""
    return Sizes(config.method, config.groups, config.group_size, config.epochs, config.variant)


def settings_of(configs: Sequence[Config]) -> Columns:
    """The fields of `Settings` that runs of one program use, [run]."""
    columns = zip(*(Settings.of(config) for config in configs), strict=True)
    return {
        name: np.array(column) for name, column in zip(Settings._fields, columns, strict=True) if None not in column
    }


@lru_cache(maxsize=64)
def _start(sizes: Sizes) -> tuple[State, Log]:
    """What every block starts from, as NumPy arrays: the uniform policy."""
    logits = table.initial_logits((BLOCK,))
    uniform = Distribution(np.full_like(logits, table.UNIFORM_LOG_PROB), np.full_like(logits, 1 / NUM_ACTIONS))
    return training.initial_state(logits, uniform, (BLOCK,)), training.empty_log(sizes, (BLOCK,))


def program(sizes: Sizes, used: tuple[str, ...], device: jax.Device) -> Callable[..., tuple[State, Log]]:
    """`training.advance` for a block whose runs use these fields of `Settings`, compiled for a device."""
    with _compiling:  # by one thread, while the others wait for it
        return _compile(sizes, used, device)


_compiling = threading.Lock()


@lru_cache(maxsize=64)
def _compile(sizes: Sizes, used: tuple[str, ...], device: jax.Device) -> Callable[..., tuple[State, Log]]:
    settings = Settings(**{name: np.zeros(BLOCK, np.float32) for name in used})
    verdicts = np.zeros((CHUNK, sizes.groups, NUM_VARIANTS), bool)
    data = (np.zeros(BLOCK, np.uint32), table.initial_logits((BLOCK,)), settings, verdicts, np.int32(0), np.int32(0))
    return compilation.compiled_once(training.advance, _start(sizes), *data, static=(sizes,), device=device)


@lru_cache(maxsize=64)
def _reference(device: jax.Device) -> jax.Array:
    """The uniform policy is the reference, too."""
    return jax.device_put(np.full_like(table.initial_logits((BLOCK,)), table.UNIFORM_LOG_PROB), device)


def run(
    config: Config,
    *,
    on_chunk: Callable[[History], None] | None = None,
    checkpoints: Checkpoints | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Result:
    """Trains one policy.

    Args:
      config: the settings.
      on_chunk: called with the history of each 20 iterations as soon as they are done.
      checkpoints: where to keep the run on the way, and what to go on from.
      mesh: the devices of a language model (see `placement`); None is jax's default device.
    """
    if config.backend == "hf":
        from jaxrl_mini import language_training  # imports flax, for which a table policy should not wait

        return language_training.run(config, on_chunk=on_chunk, checkpoints=checkpoints, mesh=mesh)
    compiled, block = compilation.seconds(), Block.of_config(config)
    past = checkpoints.restore(block.state) if checkpoints else None
    before = past.before if past else block.evaluate(config.eval_episodes)[0]
    # While the program is compiled or loaded, what else takes time: for the record's intervals, and for the iterations.
    importlib.import_module("scipy.special")
    for first in range(0, min(config.iterations, AHEAD), CHUNK):
        verifier.training_verdicts(first, CHUNK, config.groups)
    block.advance(0)
    initial, histories, lefts, reported = block.logits()[..., 0], list[History](), list[Columns](), 0
    started, compiled = time.perf_counter(), compilation.seconds() - compiled
    if past:
        block.go_on(past.state, past.iteration)
        histories, lefts, reported = past.history_by(CHUNK), [past.left], 1
        started, compiled = started - past.seconds[1], compiled + past.seconds[0]

    def snapshot() -> Snapshot:
        seconds = compiled, time.perf_counter() - started
        return Snapshot(block.state, joined(histories), joined(lefts), before, seconds)

    while block.iteration < config.iterations:
        end = min(block.iteration - block.iteration % CHUNK + CHUNK, config.iterations)
        if checkpoints:
            end = min(end, checkpoints.next_after(block.iteration))
        numbers = np.arange(block.iteration, end)
        log, policies = block.record(numbers)
        history = history_of(log, policies, numbers, block.settings, block.sizes)
        histories.append({name: column[..., 0] for name, column in history.items()})
        left = {"logits": policies, "packed": log.episodes.packed, "rewards": log.rewards}
        lefts.append({name: array[..., 0] for name, array in left.items() if array is not None})
        if on_chunk and (end == config.iterations or end % CHUNK == 0):
            on_chunk(joined(histories[reported:]))
            reported = len(histories)
        if checkpoints:
            checkpoints.offer(end, snapshot)
    after = block.evaluate(config.eval_episodes)[0]
    ran, left = time.perf_counter() - started, joined(lefts)
    timing = {"train_and_final_eval_seconds": compiled + ran, "compile_seconds": compiled, "run_seconds": ran}
    logits = np.concatenate([initial[None], left["logits"]])
    rewards = left.get("rewards")
    return Result(config, before, after, joined(histories), logits, left["packed"], timing, rewards=rewards)


def history_of(
    log: Log,
    logits: Float[np.ndarray, "iteration 24 6 run"],
    iterations: Int[np.ndarray, " iteration"],
    settings: Settings,
    sizes: Sizes,
) -> History:
    """`result.columns` of logged iterations, and the `exact_success_rate` of the policies after them."""
    accepted = verifier.training_verdicts(0, CHUNK, sizes.groups).mean(axis=(0, 1))
    exact = evaluation.exact_of_logits(np.moveaxis(logits, 0, -2), accepted).success_rate
    reference = np.full_like(log.behavior, table.UNIFORM_LOG_PROB)
    return {**columns(log, reference, iterations, settings, sizes), "exact_success_rate": np.asarray(exact)}


class Stopped(Exception):
    """Someone asked to stop before the part was done."""


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # such runs are marked, in `finite`
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
    part, config, every = grid.part(number), grid.part(number).shared, grid.history_every
    labels = {"run": part.numbers, "setting": part.setting_numbers, "seed": part.seeds}
    own = {name: values[part.local_settings] for name, values in settings_of(part.settings).items()}
    places = [slice(first, first + BLOCK) for first in range(0, len(part.seeds), BLOCK)]
    blocks, logs, histories = [], [], []
    for place in places:
        here = {name: column[place] for name, column in own.items()}
        blocks.append(Block(sizes_of(config), part.seeds[place], here, device))
        log, history = _train_block(blocks[-1], config.iterations, every, stopped)
        logs.append(log)
        histories.append(history)
    # NumPy's calls cost more than its loops here: what is left is computed for the part as a whole.
    runs, verdicts = len(part.seeds), verifier.evaluation_verdicts(config.eval_episodes)
    logits = np.concatenate([np.asarray(block.state.params) for block in blocks], axis=-1)
    seeds = [block.seeds for block in blocks]
    before, after = (evaluation.play(policies, seeds, verdicts) for policies in (np.zeros_like(logits), logits))
    exact = evaluation.exact_of_logits(logits, verdicts.mean(axis=0))
    log = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=-1), *logs)
    numbers = np.array([config.iterations - 1])
    settings = Settings(**{name: np.float32(column) for name, column in own.items()})
    last = history_of(log, logits[None, ..., :runs], numbers, settings, sizes_of(config))
    last = {name: column[0] for name, column in last.items()}
    uniform = _exact_of_uniform(config.eval_episodes)
    logits, before, after = (array[..., :runs] for array in (logits, before, after))
    history = joined(histories, axis=1)
    kept = len(history_iterations(config.iterations, every))
    columns = {
        **labels,
        **{name: np.full(runs, getattr(config, name)) for name in SHARED_FIELDS},
        "clip_high": own["clip"],
        "entropy_bonus": np.zeros(runs),
        **own,
        **_evaluation_columns("before", before, config.eval_episodes, [np.full(runs, one) for one in uniform]),
        **_evaluation_columns("after", after, config.eval_episodes, [np.asarray(one)[:runs] for one in exact]),
        **{f"last_{name}": column for name, column in last.items() if name not in ("iteration", "exact_success_rate")},
        "finite": np.all([np.isfinite(logits).all(axis=(0, 1)), *map(np.isfinite, last.values())], axis=0),
        "iterations_to_90": _iterations_to(0.9, history, runs),
        "logits_crc32": _checksums(logits),
    }
    rows = {name: column.T.ravel() for name, column in history.items()}
    return columns, {**{name: np.repeat(column, kept) for name, column in labels.items()}, **rows} if history else {}


@lru_cache(maxsize=16)
def _exact_of_uniform(eval_episodes: int) -> tuple[float, ...]:
    accepted = verifier.evaluation_verdicts(eval_episodes).mean(axis=0)
    exact = evaluation.exact_of_logits(np.asarray(table.initial_logits((BLOCK,))), accepted)
    return tuple(float(column[0]) for column in exact)


def _train_block(block: Block, iterations: int, history_every: int, stopped: Callable[[], bool]) -> tuple[Log, History]:
    """The log of the last iteration, [1, ..., run], and the history that is kept."""
    kept = history_iterations(iterations, history_every)
    histories = []
    for first in range(0, iterations, CHUNK):
        if stopped():
            raise Stopped
        end = min(first + CHUNK, iterations)
        here = kept[(kept >= first) & (kept < end)]
        if len(here):
            log, logits = block.record(here)
            histories.append(history_of(log, logits, here, block.settings, block.sizes))
        if block.iteration < end:
            block.advance(end - block.iteration)
    return jax.tree.map(lambda leaf: leaf[None], block.logged()), joined(histories) if histories else {}


def _evaluation_columns(when: str, sums: np.ndarray, episodes: int, exact: Iterable[Any]) -> Columns:
    exact_success_rate, exact_mean_actions = (np.asarray(column) for column in exact)
    columns = {
        "successes": sums[0],
        "success_rate": sums[0] / episodes,
        "mean_actions": sums[1] / episodes,
        "exact_success_rate": exact_success_rate,
        "exact_mean_actions": exact_mean_actions,
    }
    return {f"{when}_{name}": column for name, column in columns.items()}


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
