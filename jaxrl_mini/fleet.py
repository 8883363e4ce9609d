"""Many table-policy runs at once, in blocks of one fixed shape; a single run is a block padded with copies.

Float results can change with array shapes, so every run, alone or among thousands, goes through the same compiled
programs at the same shapes: its numbers never depend on its neighbours.
"""

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_mini import compilation, evaluation, training, verifier
from jaxrl_mini.config import Config
from jaxrl_mini.evaluation import Evaluation
from jaxrl_mini.policies import table
from jaxrl_mini.result import History, Result, columns
from jaxrl_mini.training import CHUNK, REFERENCE_LOG_PROB, Log, Sizes
from jaxrl_mini.types import Settings

BLOCK = 64
"""Runs in a block."""


class Block:
    """Up to 64 runs that share a program, between two chunks of iterations."""

    def __init__(self, configs: Sequence[Config]):
        if not 1 <= len(configs) <= BLOCK:
            raise ValueError(f"a block holds 1 to {BLOCK} runs, not {len(configs)}")
        first = configs[0]
        self.sizes = Sizes(first.method, first.groups, first.group_size, first.epochs)
        self.runs = len(configs)
        padded = [*configs, *[first] * (BLOCK - len(configs))]
        self.seeds = jnp.array([config.seed for config in padded], jnp.uint32)
        columns = zip(*((config.effective_lr, config.clip, config.beta) for config in padded), strict=True)
        self.settings = Settings(*(jnp.array(column, jnp.float32) for column in columns))
        self.state = training.initial_state(table.initial_logits((BLOCK,)), (BLOCK,))
        self.iteration = 0

    def advance(self, count: int) -> Log:
        """Runs `count` iterations, at most 20."""
        verdicts = verifier.training_verdicts(self.iteration, CHUNK, self.sizes.groups)
        self.state, log = training.advance(
            self.state, self.seeds, self.settings, verdicts, self.iteration, count, self.sizes
        )
        self.iteration += count
        return Log(*jax.tree.map(lambda leaf: np.asarray(leaf)[:count, ..., : self.runs], log))

    def logits(self) -> np.ndarray:
        """float32 [state, action, run]: the policies now."""
        return np.asarray(self.state.params)[..., : self.runs]

    def evaluate(self, episodes: int) -> list[Evaluation]:
        """Evaluates the runs' policies over so many sampled episodes, and exactly."""
        verdicts = verifier.evaluation_verdicts(episodes)
        return evaluation.evaluate(self.state.params, self.seeds, verdicts)[: self.runs]


def run(config: Config, *, on_chunk: Callable[[History], None] | None = None) -> Result:
    """Trains one policy.

    Args:
      config: the settings.
      on_chunk: called with the history of each 20 iterations as soon as they are done.
    """
    if config.backend == "hf":
        from jaxrl_mini import language_training  # imports flax, for which a table policy should not wait

        return language_training.run(config, on_chunk=on_chunk)
    block = Block([config])
    before = block.evaluate(config.eval_episodes)[0]
    logits, packed, histories = [block.logits()[None]], [], []
    started, compiled = time.perf_counter(), compilation.seconds()
    while block.iteration < config.iterations:
        first = block.iteration
        log = block.advance(min(CHUNK, config.iterations - first))
        logits.append(log.params)
        packed.append(log.episodes.packed)
        histories.append(
            {name: column[..., 0] for name, column in history_of(log, first, block.settings, block.sizes).items()}
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


def history_of(log: Log, first: int, settings: Settings, sizes: Sizes) -> History:
    """`result.columns` of a block, and the `exact_success_rate` of the policies after each iteration."""
    accepted = verifier.training_verdicts(first, CHUNK, sizes.groups)[: len(log.params)].mean(axis=(0, 1))
    logits = np.moveaxis(log.params, 0, -2)
    exact = evaluation.exact_of_logits(logits, accepted).success_rate
    reference = np.full_like(log.behavior, REFERENCE_LOG_PROB)
    return {**columns(log, reference, first, settings, sizes), "exact_success_rate": exact}
