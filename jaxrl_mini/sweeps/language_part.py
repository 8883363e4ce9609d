"""A sweep's runs of a language model: one after the other, in the columns of the table policy's (see `table_part`)."""

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jaxrl_mini.config import Config
from jaxrl_mini.learning import language_training
from jaxrl_mini.learning.evaluation import Evaluation
from jaxrl_mini.learning.result import Result
from jaxrl_mini.policies.language import load_policy
from jaxrl_mini.sweeps.grid import SHARED_FIELDS, Grid, history_iterations
from jaxrl_mini.sweeps.table_part import Stopped
from jaxrl_mini.tasks.specification import load_task
from jaxrl_mini.types import Columns, Settings


def loaded(config: Config) -> language_training.Loaded:
    """The model of a run; the runs of a sweep share what is read and compiled of it."""
    with _reading:  # by one thread, while the others wait for it
        return _loaded(str(config.model), config.dtype or "float32", load_task(config.task))


_loaded = lru_cache(maxsize=2)(load_policy)
_reading = threading.Lock()


def train_part(
    grid: Grid, number: int, *, device: jax.Device | None = None, stopped: Callable[[], bool] = lambda: False
) -> tuple[Columns, Columns]:
    """`table_part.train_part` for a language model, whose parts have one run.

    `logits_crc32` is the checksum of its weights, in the order of their names.
    """
    part = grid.part(number)
    config = grid.config_of(part)

    def stop(_: Any) -> None:
        if stopped():
            raise Stopped

    with jax.default_device(device):
        result = language_training.run(config, on_chunk=stop, loaded=loaded(config))
    labels = {"run": part.numbers, "setting": part.setting_numbers, "seed": part.seeds}
    kept = history_iterations(config.iterations, grid.history_every)
    history = {name: column[kept] for name, column in result.history.items()}
    values = {name: np.array([getattr(config, name)]) for name in (*SHARED_FIELDS, *Settings._fields)}
    values["clip_high"] = values["clip"] if config.clip_high is None else values["clip_high"]
    columns = {
        **labels,
        **values,
        **_evaluation_columns("before", result.before),
        **_evaluation_columns("after", result.after),
        **{
            f"last_{name}": column[-1:]
            for name, column in result.history.items()
            if name not in ("iteration", "exact_success_rate")
        },
        "finite": np.array([_finite(result)]),
        "iterations_to_90": np.array([_iterations_to(0.9, history)], np.int32),
        "logits_crc32": np.array([result.logits_crc32], np.uint32),
    }
    rows = {**{name: np.repeat(column, len(kept)) for name, column in labels.items()}, **history}
    return columns, rows if len(kept) else {}


def _evaluation_columns(when: str, evaluation: Evaluation) -> Columns:
    names = ("successes", "success_rate", "mean_actions", "exact_success_rate", "exact_mean_actions")
    columns = {name: np.array([getattr(evaluation, name)]) for name in names}
    if "held-out" in evaluation.splits:
        columns["held_out_exact_success_rate"] = np.array([evaluation.splits["held-out"].exact_success_rate])
    return {f"{when}_{name}": column for name, column in columns.items()}


def _finite(result: Result) -> bool:
    last = [column[-1] for name, column in result.history.items()]
    return bool(np.isfinite(last).all() and all(np.isfinite(leaf).all() for leaf in _weights(result)))


def _iterations_to(success_rate: float, history: Columns) -> int:
    """After how many iterations exact success was first seen at a rate; -1 where it was not."""
    reached = history["exact_success_rate"] >= success_rate
    return int(history["iteration"][np.argmax(reached)]) + 1 if reached.any() else -1


def _weights(result: Result) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result.checkpoint.params)]
