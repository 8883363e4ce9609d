"""A part of a sweep, trained: the rows of its runs and of their history, for the table policy."""

from collections.abc import Callable
from functools import lru_cache

import jax
import numpy as np

from jaxrl_mini.config import BLOCK
from jaxrl_mini.episodes import verifier
from jaxrl_mini.exact import success
from jaxrl_mini.learning import evaluation
from jaxrl_mini.learning.block import Block, settings_of, sizes_of, task_of
from jaxrl_mini.learning.evaluation import Evaluations
from jaxrl_mini.learning.metrics import History, history_of, joined
from jaxrl_mini.learning.result import crc32
from jaxrl_mini.learning.training import CHUNK, Log
from jaxrl_mini.policies import table
from jaxrl_mini.sweeps.grid import SHARED_FIELDS, Grid, history_iterations
from jaxrl_mini.types import Columns, Exact, Settings


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
    runs, task = len(part.seeds), task_of(config)
    logits = np.concatenate([np.asarray(block.state.params) for block in blocks], axis=-1)
    if task is None:
        evaluations = _evaluate(logits, [block.seeds for block in blocks], runs, config.eval_episodes)
    else:
        logits = logits[..., :runs]
        evaluations = [
            evaluation.evaluate_task(task, policies, part.seeds.astype(np.uint32), config.eval_episodes)
            for policies in (np.zeros_like(logits), logits)
        ]
    log = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=-1), *logs)
    numbers = np.array([config.iterations - 1])
    settings = Settings(**{name: np.float32(column) for name, column in own.items()})
    last = history_of(log, logits[None, ..., :runs], numbers, settings, sizes_of(config))
    last = {name: column[0] for name, column in last.items()}
    logits = logits[..., :runs]
    by_run = np.ascontiguousarray(np.moveaxis(logits, -1, 0))
    history = joined(histories, axis=1)
    kept = len(history_iterations(config.iterations, every))
    columns = {
        **labels,
        **{name: np.full(runs, getattr(config, name)) for name in SHARED_FIELDS},
        "clip_high": own["clip"],
        "entropy_bonus": np.zeros(runs),
        **own,
        **_evaluation_columns("before", evaluations[0]),
        **_evaluation_columns("after", evaluations[1]),
        **{f"last_{name}": column for name, column in last.items() if name not in ("iteration", "exact_success_rate")},
        "finite": np.all([np.isfinite(logits).all(axis=(0, 1)), *map(np.isfinite, last.values())], axis=0),
        "iterations_to_90": _iterations_to(0.9, history, runs),
        "logits_crc32": np.array([crc32([one]) for one in by_run], np.uint32),
    }
    rows = {name: column.T.ravel() for name, column in history.items()}
    return columns, {**{name: np.repeat(column, kept) for name, column in labels.items()}, **rows} if history else {}


@lru_cache(maxsize=16)
def _exact_of_uniform(eval_episodes: int) -> tuple[float, ...]:
    accepted = verifier.evaluation_verdicts(eval_episodes).mean(axis=0)
    exact = success.exact_of_logits(np.asarray(table.initial_logits((BLOCK,))), accepted)
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


def _evaluate(logits: np.ndarray, seeds: list[jax.Array], runs: int, episodes: int) -> list[Evaluations]:
    """Before and after training, on the article's task; before it, all runs have the same policy."""
    verdicts = verifier.evaluation_verdicts(episodes)
    before, after = (evaluation.play(policies, seeds, verdicts) for policies in (np.zeros_like(logits), logits))
    uniform = Exact(*(np.full(runs, one) for one in _exact_of_uniform(episodes)))
    exact = Exact(*(np.asarray(one)[:runs] for one in success.exact_of_logits(logits, verdicts.mean(axis=0))))
    return [
        Evaluations(episodes, successes[:runs], actions[:runs], squared_actions[:runs], expected)
        for (successes, actions, squared_actions), expected in ((before, uniform), (after, exact))
    ]


def _evaluation_columns(when: str, found: Evaluations) -> Columns:
    columns = {
        "successes": found.successes,
        "success_rate": found.successes / found.episodes,
        "mean_actions": found.actions / found.episodes,
        "exact_success_rate": found.exact.success_rate,
        "exact_mean_actions": found.exact.mean_actions,
    }
    if "held-out" in found.splits:
        columns["held_out_exact_success_rate"] = found.splits["held-out"].exact.success_rate
    return {f"{when}_{name}": column for name, column in columns.items()}


def _iterations_to(success_rate: float, history: History, runs: int) -> np.ndarray:
    """After how many iterations a run's exact success first reached a rate; -1 where no kept iteration did."""
    if not history:
        return np.full(runs, -1, np.int32)
    reached = history["exact_success_rate"] >= success_rate
    first = history["iteration"][np.argmax(reached, axis=0), np.arange(runs)] + 1
    return np.where(reached.any(axis=0), first, -1).astype(np.int32)
