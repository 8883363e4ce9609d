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

from jaxrl_mini import evaluation, objective, training, verifier
from jaxrl_mini.config import Config
from jaxrl_mini.evaluation import Evaluation
from jaxrl_mini.policies import table
from jaxrl_mini.training import CHUNK, Batch, Sizes
from jaxrl_mini.types import Settings

BLOCK = 64
"""Runs in a block."""

History = dict[str, np.ndarray]
"""One array per metric of `types.Metrics`, and the iteration's number; [iteration, run] or [iteration]."""


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

    def advance(self, count: int) -> tuple[History, Batch]:
        """Runs `count` iterations, at most 20; returns their metrics [iteration, run], and the last batch."""
        first = self.iteration
        verdicts = verifier.training_verdicts(first, CHUNK, self.sizes.groups)
        self.state, metrics, batch = training.advance(
            self.state, self.seeds, self.settings, verdicts, first, count, self.sizes
        )
        self.iteration += count
        columns = jax.device_get(metrics)._asdict()
        history = {name: column[:count, : self.runs] for name, column in columns.items()}
        return {"iteration": np.arange(first, first + count), **history}, batch

    def logits(self) -> np.ndarray:
        """float32 [state, action, run]: the policies now."""
        return np.asarray(self.state.params)[..., : self.runs]

    def evaluate(self, episodes: int) -> list[Evaluation]:
        """Evaluates the runs' policies over so many sampled episodes, and exactly."""
        verdicts = verifier.evaluation_verdicts(episodes)
        return evaluation.evaluate(self.state.params, self.seeds, verdicts)[: self.runs]


class Recorder:
    """Advances a block one iteration at a time and keeps the batches and policies of its first run.

    The compiled program is the same, so recording a run does not change it.
    """

    def __init__(self, block: Block):
        self._block = block
        self._logits = [block.logits()[..., 0]]
        self._batches: list[Batch] = []

    def advance(self, count: int) -> History:
        """Like `Block.advance`."""
        parts = []
        for _ in range(count):
            history, batch = self._block.advance(1)
            parts.append(history)
            self._batches.append(jax.tree.map(lambda leaf: np.asarray(leaf)[..., 0], batch))
            self._logits.append(self._block.logits()[..., 0])
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def arrays(self) -> dict[str, np.ndarray]:
        """The recording, with the axes [iteration, group, episode, step] of the format that `replay` reads."""
        episodes = [batch.episodes for batch in self._batches]
        actions = np.stack([batch.actions for batch in episodes]).transpose(0, 2, 3, 1)
        states = np.stack([batch.states for batch in episodes]).transpose(0, 2, 3, 1)
        rewards = np.stack([batch.rewards for batch in self._batches])
        logits = np.stack(self._logits)
        log_probs = np.asarray(table.log_probs(jnp.asarray(logits[:-1]).transpose(1, 2, 0))).transpose(2, 0, 1)
        sampled = log_probs[np.arange(len(actions))[:, None, None, None], states, actions]
        method = self._block.sizes.method
        advantages = [objective.group_advantages(jnp.asarray(batch)) if method == "grpo" else 0 * batch for batch in rewards]
        return {
            "actions": actions.astype(np.int8),
            "rewards": rewards,
            "advantages": np.stack(advantages).astype(np.float32),
            "old_log_probs": np.where(actions >= 0, sampled, 0.0).astype(np.float32),
            "logits": logits,
        }


@dataclass(frozen=True)
class Result:
    """A finished run."""

    config: Config
    before: Evaluation
    after: Evaluation
    history: History
    """An array [iteration] per metric."""
    logits: np.ndarray
    """float32 [state, action]: the policy after the last iteration."""
    timing: dict[str, float]
    """Seconds."""
    trajectories: dict[str, np.ndarray] | None = None
    """The sampled episodes and what they led to, if asked for: arrays as `replay` reads them."""


def run(
    config: Config, *, on_chunk: Callable[[History], None] | None = None, trajectories: bool = False
) -> Result:
    """Trains one policy.

    Args:
      config: the settings.
      on_chunk: called with the history of each 20 iterations as soon as they are done.
      trajectories: keep every batch and the policy after every iteration.
    """
    started = time.perf_counter()
    block = Block([config])
    before = block.evaluate(config.eval_episodes)[0]
    parts: list[History] = []
    recorder = Recorder(block) if trajectories else None
    while block.iteration < config.iterations:
        count = min(CHUNK, config.iterations - block.iteration)
        part = recorder.advance(count) if recorder else block.advance(count)[0]
        parts.append({name: column if name == "iteration" else column[:, 0] for name, column in part.items()})
        if on_chunk:
            on_chunk(parts[-1])
    after = block.evaluate(config.eval_episodes)[0]
    history = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if config.method == "grpo":
        del history["retained_episodes"]
    return Result(
        config,
        before,
        after,
        history,
        block.logits()[..., 0],
        {"train_and_final_eval_seconds": time.perf_counter() - started},
        recorder.arrays() if recorder else None,
    )
