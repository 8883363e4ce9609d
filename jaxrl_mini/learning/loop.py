"""A run from its first iteration to its result: `run` trains one policy of either kind."""

import contextlib
import importlib
import time
from collections.abc import Callable

import jax
import numpy as np

from jaxrl_mini.config import Config
from jaxrl_mini.episodes import verifier
from jaxrl_mini.episodes.play import Play
from jaxrl_mini.learning.block import Block
from jaxrl_mini.learning.checkpoint import Checkpoints, Snapshot
from jaxrl_mini.learning.metrics import History, history_of, joined
from jaxrl_mini.learning.result import Result
from jaxrl_mini.learning.training import CHUNK
from jaxrl_mini.machine import compilation, jax_settings
from jaxrl_mini.objective.advantage import formula
from jaxrl_mini.types import Columns

AHEAD = 5 * CHUNK
"""Iterations whose verdicts are computed before the first."""


@jax_settings.own()
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
      checkpoints: where to keep the run on the way, and what to go on from; entered here, if the caller has not.
      mesh: the devices of a language model (see `placement`); None is jax's default device.

    Raises:
      UserError: the advantage is a user's own and is not here, the model cannot be read, or the checkpoints are of
        another run, or as on entering them.
    """
    formula(config.advantage)
    with checkpoints.of_run(config, mesh) if checkpoints else contextlib.nullcontext():
        if config.backend == "hf":
            from jaxrl_mini.learning import language_training  # imports flax, for which a table should not wait

            return language_training.run(config, on_chunk=on_chunk, checkpoints=checkpoints, mesh=mesh)
        return _run_table(config, on_chunk, checkpoints)


def _run_table(config: Config, on_chunk: Callable[[History], None] | None, checkpoints: Checkpoints | None) -> Result:
    compiled, block = compilation.seconds(), Block.of_config(config)
    past = checkpoints.restore(block.state) if checkpoints else None
    before = past.before if past else block.evaluate(config.eval_episodes)[0]
    # While the program is compiled or loaded, what else takes time: for the record's intervals, and for the iterations.
    importlib.import_module("scipy.special")
    for first in range(0, min(config.iterations, AHEAD) if block.sizes.task is None else 0, CHUNK):
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
        left = {"logits": policies, **log.episodes._asdict(), "passed": log.passed, "rewards": log.rewards}
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
    played = Play(*(left[name] for name in Play._fields)) if "choices" in left else None
    figures = before, after, joined(histories), logits, left.get("packed"), timing
    return Result(config, *figures, rewards=left.get("rewards"), played=played, passed=left.get("passed"))
