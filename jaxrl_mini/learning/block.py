"""Many table-policy runs at once, in blocks of one fixed shape; a single run is a block padded with copies.

Float results can change with array shapes, so every run, alone or among thousands, goes through the same compiled
programs at the same shapes: its numbers never depend on its neighbours.
"""

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxrl_mini.config import ARTICLE, BLOCK, OWN_ADVANTAGES, Config
from jaxrl_mini.episodes import verifier
from jaxrl_mini.episodes.grounds import Grounds, grounds
from jaxrl_mini.learning import evaluation, training
from jaxrl_mini.learning.evaluation import Evaluations
from jaxrl_mini.learning.training import CHUNK, Log, Sizes, State
from jaxrl_mini.machine import compilation, hardware
from jaxrl_mini.policies import table
from jaxrl_mini.tasks.compiled import CompiledTask
from jaxrl_mini.tasks.repair import NUM_VARIANTS
from jaxrl_mini.tasks.specification import load_task
from jaxrl_mini.types import Columns, Distribution, Settings


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
        device = device or hardware.default_device()
        self.seeds, self.settings, self.state, self.log = jax.device_put(data, device)
        self._reference = _reference(sizes.shape, device)
        self._grounds = None if sizes.task is None else jax.device_put(_grounds(sizes), device)
        self._program = program(sizes, tuple(name for name in Settings._fields if name in settings), device)
        self.iteration = 0

    @classmethod
    def of_config(cls, config: Config) -> "Block":
        """A block of one run."""
        return cls(sizes_of(config), np.array([config.seed]), settings_of([config]))

    def advance(self, count: int) -> None:
        """Runs `count` iterations, to the end of their chunk of 20 at most."""
        first = self.iteration - self.iteration % CHUNK
        verdicts = self._grounds
        if verdicts is None:
            verdicts = verifier.training_verdicts(first, CHUNK, self.sizes.groups)
        numbers = np.int32(self.iteration), np.int32(self.iteration + count)
        data = (self.seeds, self._reference, self.settings, verdicts, *numbers)
        self.state, self.log = self._program(self.state, self.log, *data)
        self.iteration += count

    def record(
        self, iterations: Int[np.ndarray, " iteration"]
    ) -> tuple[Log, Float[np.ndarray, "iteration context action run"]]:
        """Runs to the last of some iterations of one chunk; returns the log of each, and the policies after each."""
        logs, logits = [], []
        for number in iterations.tolist():
            self.advance(number + 1 - self.iteration)
            logs.append(self.logged())
            logits.append(self.logits())
        return jax.tree.map(lambda *leaves: np.stack(leaves), *logs), np.stack(logits)

    def logged(self) -> Log:
        """What the last iteration left behind, as NumPy arrays [..., run]."""
        return jax.tree.map(lambda leaf: np.array(np.asarray(leaf)[..., : self.runs]), self.log)

    def go_on(self, state: State, iteration: int) -> None:
        """Takes over the state of a like block after so many iterations."""
        self.state, self.iteration = jax.device_put(state, self.seeds.device), iteration

    def logits(self) -> np.ndarray:
        """float32 [state, action, run]: the policies now."""
        return np.array(np.asarray(self.state.params)[..., : self.runs])

    def evaluate(self, episodes: int) -> Evaluations:
        """Evaluates the policies over so many sampled episodes, and exactly; of any task, on each of its splits."""
        seeds = np.asarray(self.seeds)[: self.runs]
        if self.sizes.task is not None:
            return evaluation.evaluate_task(self.sizes.task, self.logits(), seeds, episodes)
        return evaluation.evaluate(self.logits(), seeds, verifier.evaluation_verdicts(episodes))


def _padded(column: np.ndarray, kind: type[np.generic]) -> np.ndarray:
    """A column of a whole block: runs that are not asked for are copies of the last."""
    padded = np.full(BLOCK, column[-1], kind)
    padded[: len(column)] = column
    return padded


def sizes_of(config: Config) -> Sizes:
    """The program of a setting."""
    return Sizes(config.method, config.groups, config.group_size, config.epochs, config.variant, task_of(config))


def task_of(config: Config) -> CompiledTask | None:
    """The task of a setting; None for the article's, which has programs of its own."""
    return None if config.task == ARTICLE else load_task(config.task)


def _grounds(sizes: Sizes) -> Grounds:
    assert sizes.task is not None
    return grounds(sizes.task, expected=sizes.variant.exact_gradient)


def settings_of(configs: Sequence[Config]) -> Columns:
    """The fields of `Settings` that runs of one program use, [run]."""
    columns = zip(*(Settings.of(config) for config in configs), strict=True)
    return {
        name: np.array(column) for name, column in zip(Settings._fields, columns, strict=True) if None not in column
    }


@lru_cache(maxsize=64)
def _start(sizes: Sizes) -> tuple[State, Log]:
    """What every block starts from, as NumPy arrays: the uniform policy."""
    logits, log_probs = table.initial_logits((BLOCK,), sizes.shape), table.uniform_log_probs((BLOCK,), sizes.shape)
    uniform = Distribution(log_probs, np.full_like(logits, 1 / sizes.shape[1]))
    return training.initial_state(logits, uniform, (BLOCK,)), training.empty_log(sizes, (BLOCK,))


def program(sizes: Sizes, used: tuple[str, ...], device: jax.Device) -> Callable[..., tuple[State, Log]]:
    """`training.advance` for a block whose runs use these fields of `Settings`, compiled for a device."""
    with _compiling:  # by one thread, while the others wait for it
        return _compile(sizes, used, device)


_compiling = threading.Lock()


@lru_cache(maxsize=64)
def _compile(sizes: Sizes, used: tuple[str, ...], device: jax.Device) -> Callable[..., tuple[State, Log]]:
    settings = Settings(**{name: np.zeros(BLOCK, np.float32) for name in used})
    verdicts: Any = np.zeros((CHUNK, sizes.groups, NUM_VARIANTS), bool)
    if sizes.task is not None:
        verdicts = _grounds(sizes)
    reference = table.uniform_log_probs((BLOCK,), sizes.shape)
    data = (np.zeros(BLOCK, np.uint32), reference, settings, verdicts, np.int32(0), np.int32(0))
    kept = sizes.variant.advantage not in OWN_ADVANTAGES
    return compilation.compiled_once(training.advance, _start(sizes), *data, static=(sizes,), device=device, kept=kept)


@lru_cache(maxsize=64)
def _reference(shape: tuple[int, int], device: jax.Device) -> jax.Array:
    """The uniform policy is the reference, too."""
    return jax.device_put(table.uniform_log_probs((BLOCK,), shape), device)
