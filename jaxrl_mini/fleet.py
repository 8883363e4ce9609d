"""Many table-policy runs at once, in blocks of one fixed shape; a single run is a block padded with copies.

Float results can change with array shapes, so every run, alone or among thousands, goes through the same compiled
programs at the same shapes: its numbers never depend on its neighbours.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_mini import compilation, evaluation, objective, rollout, training, verifier
from jaxrl_mini.config import Config
from jaxrl_mini.evaluation import Evaluation
from jaxrl_mini.policies import table
from jaxrl_mini.task import NUM_VARIANTS
from jaxrl_mini.training import CHUNK, REFERENCE_LOG_PROB, Log, Sizes
from jaxrl_mini.types import Episodes, Settings

BLOCK = 64
"""Runs in a block."""

History = dict[str, np.ndarray]
"""A column per metric (see `history_of`), [iteration, run] or [iteration]."""


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
    """The metrics of logged iterations, numbered from `first`, as columns [iteration, run], in float64.

    `iteration`, `objective.measure` of its last optimizer step, `gradient_norm` there before it is clipped,
    `optimizer_steps`, `train_success_rate`, `mixed_groups` (groups with successes and failures), for rs-sft
    `retained_episodes`, and the `exact_success_rate` of the policy after the iteration.
    """
    count, runs = log.gradient_norm.shape
    verdicts = verifier.training_verdicts(first, CHUNK, sizes.groups)[:count]
    by_group = Episodes(log.episodes.packed.reshape(-1, sizes.group_size, runs))
    rewards = rollout.grade(by_group, verdicts.reshape(-1, NUM_VARIANTS)).reshape(log.episodes.packed.shape)
    successes = rewards.sum(axis=2).astype(np.int64)
    retained = successes.sum(axis=1)
    tables = (log.log_probs, log.behavior, log.credit, log.params)
    # From [iteration, ..., run] to [..., iteration, run].
    log_probs, behavior, credit, params = jax.tree.map(lambda leaf: np.moveaxis(leaf, 0, -2).astype(np.float64), tables)
    reference = np.full_like(behavior, REFERENCE_LOG_PROB)
    live = Settings(*(np.asarray(leaf, np.float64)[:runs] for leaf in settings))
    measured = objective.measure(log_probs, behavior, reference, credit, live, sizes.method)
    history = {
        "iteration": np.repeat(np.arange(first, first + count)[:, None], runs, axis=1),
        **measured,
        "gradient_norm": log.gradient_norm,
        "optimizer_steps": np.where((retained > 0) | (sizes.method == "grpo"), sizes.epochs, 0),
        "train_success_rate": retained / (sizes.groups * sizes.group_size),
        "mixed_groups": ((successes > 0) & (successes < sizes.group_size)).sum(axis=1),
        "retained_episodes": retained,
        "exact_success_rate": evaluation.exact_of_logits(params, verdicts.mean(axis=(0, 1))).success_rate,
    }
    if sizes.method == "grpo":
        del history["retained_episodes"]
    return history
