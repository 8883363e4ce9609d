"""Run records: what is in them, how they are written whole or not at all, and how they are read back."""

import json
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_mini.config import ARTICLE, Config, UserError, differences
from jaxrl_mini.learning.block import task_of
from jaxrl_mini.learning.evaluation import Evaluation
from jaxrl_mini.learning.result import Result
from jaxrl_mini.machine import files
from jaxrl_mini.machine.files import Output
from jaxrl_mini.machine.runtime import runtime
from jaxrl_mini.tasks.compiled import CompiledTask
from jaxrl_mini.tasks.specification import load_again

SCHEMA_VERSION = 1
SCOPE = (
    "One run on one small, fully observable task with a private verifier. It shows how a training loop behaves "
    "here, exactly; it says nothing about agents in open environments."
)
SCOPE_OF_ANY = (
    "One run on one finite task with a private verifier. It shows how a training loop behaves here, exactly; it says "
    "nothing about agents in open environments."
)
PASS_AT = (1, 2, 4, 8, 16, 32, 64)
"""Episodes, one of which has to succeed."""


def build(result: Result, began: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The record of a run, as plain data (see `record.schema.json` beside this file).

    Args:
      result: the run.
      began: what `runtime()` was when it began; now, if it is not given.
    """
    columns = {name: column.tolist() for name, column in result.history.items()}
    history = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    task = task_of(result.config)
    return finite(
        {
            "schema_version": SCHEMA_VERSION,
            "scope": SCOPE if task is None else SCOPE_OF_ANY,
            "config": result.config.to_dict(),
            **({} if task is None else {"task": description(task)}),
            "runtime": {**(began or runtime()), "mesh": result.mesh},
            "before": summary(result.before, task),
            "after": summary(result.after, task),
            "logits_crc32": result.logits_crc32,
            "history": history,
            "timing": dict(result.timing),
        }
    )


def check_task(what: str, record: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuses a record of a task that is not here, or not what it was.

    Raises:
      UserError: it is, or the task is a user's own that is not among the `given`.
    """
    name, there = record["config"].get("task", ARTICLE), record.get("task")
    if name != ARTICLE:
        digest = there.get("digest") if isinstance(there, dict) else None
        task = load_again(what, name, digest, given, ", or use --static")
        if description(task) != there:
            raise UserError(f"{what} says of task {name} what is not so: expected {description(task)}")


def description(task: CompiledTask) -> dict[str, Any]:
    """What a record says of a task that is not the article's."""
    members = {split: [task.instances[one] for one in places] for split, places in task.splits.items()}
    return {"digest": task.digest, "actions": list(task.actions), "max_steps": task.max_steps, "splits": members}


def summary(evaluation: Evaluation, task: CompiledTask | None = None, split: str = "train") -> dict[str, Any]:
    """An evaluation's figures, each with its 95 % interval and its exact twin.

    Where a split has several instances, also the exact success on each, and pass@k: the expectation over them of
    1 - (1 - success)^k, that one of k episodes succeeds. Of any task, the same of its other splits. All that is exact
    is None of a language model whose task has too many histories.
    """
    several: dict[str, Any] = {}
    if task is not None and evaluation.by_instance is not None:
        names = [task.instances[one] for one in task.splits[split]]
        failure = 1.0 - np.array(evaluation.by_instance)
        several = {
            "exact_success_by_instance": dict(zip(names, evaluation.by_instance, strict=True)),
            "exact_pass_at": {str(k): float(np.mean(1.0 - failure**k)) for k in PASS_AT},
        }
    splits = {name: summary(one, task, name) for name, one in evaluation.splits.items()}
    has_kl = evaluation.exact_mean_kl is not None or evaluation.exact_success_rate is None
    return {
        "episodes": evaluation.episodes,
        "successes": evaluation.successes,
        "success_rate": evaluation.success_rate,
        "success_rate_interval": evaluation.success_rate_interval,
        "exact_success_rate": evaluation.exact_success_rate,
        "mean_actions": evaluation.mean_actions,
        "mean_actions_interval": evaluation.mean_actions_interval,
        "exact_mean_actions": evaluation.exact_mean_actions,
        **({"exact_mean_kl": evaluation.exact_mean_kl} if has_kl else {}),
        **several,
        **({"splits": splits} if splits else {}),
    }


def finite(value: Any) -> Any:
    """`value` with tuples as lists, and None in place of what JSON cannot say (NaN and the infinities)."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def not_of(config: Config) -> files.Odd:
    """The `Odd` of a record: another run's, or no record at all; one of the same settings has the same figures."""

    def odd(path: Path, meanwhile: bool) -> str | None:
        try:
            there = read(path)["config"]
        except UserError:
            return "exists and is no record"
        with suppress(UserError):
            there = Config.from_dict(there).to_dict()  # in today's form
        different = differences(there, config.to_dict())
        return f"holds another run ({different})" if different else None

    return odd


def write(record: Mapping[str, Any], output: Output) -> None:
    """Writes a record as JSON."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    output.commit(lambda file: file.write(text.encode()))


def read(path: str | Path) -> dict[str, Any]:
    """Reads a record back.

    Raises:
      UserError: the file cannot be read, or is not a record of a schema this version knows.
    """
    try:
        data = json.loads(files.read(path), parse_constant=_finite, parse_int=_finite, parse_float=_finite)
    except OSError as error:
        raise UserError(f"record {path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"record {path} is not JSON with finite numbers") from error
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"record {path} is not of schema version {SCHEMA_VERSION}")
    if not isinstance(data.get("config"), dict) or not isinstance(data.get("history"), list):
        raise UserError(f"record {path} lacks its config or history")
    return data


def _finite(text: str) -> int | float:
    """Reads a number that float64 holds."""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is not finite")
    return int(text) if text.lstrip("-").isdigit() else float(text)
