"""A table policy in a folder: `policy.safetensors` with its logits, `policy.json` with the run that made it."""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from jaxtyping import Float

from jaxrl_mini.config import ARTICLE, Config, UserError
from jaxrl_mini.machine import files
from jaxrl_mini.policies import folders
from jaxrl_mini.tasks.repair import ACTIONS, NUM_ACTIONS, NUM_STATES
from jaxrl_mini.tasks.specification import load_again, load_task

WEIGHTS = "policy.safetensors"
LOGITS = "logits"
"""The only tensor: float32 [context, action]. A context of the article's task is a state, step * 4 + 2 * low_fixed +
high_fixed; that of another is step * `CompiledTask.width` + number of the view."""
MAX_BYTES = 2**16


def destination(folder: str | os.PathLike[str], config: Config, overwrite: bool = False) -> folders.Destination:
    """The place for a policy of these settings; the same may be there.

    Raises:
      UserError: as `folders.Destination`.
    """
    task: dict[str, Any] = {"task": config.task, "actions": list(ACTIONS)}
    if config.task != ARTICLE:
        compiled = load_task(config.task)
        task = {"task": config.task, "actions": list(compiled.actions), "digest": compiled.digest}
    text = json.dumps({"policy": "table", **task, "config": config.to_dict()}, indent=1) + "\n"
    return folders.Destination(folder, overwrite, {folders.TABLE: text.encode()})


def write_table(place: folders.Destination, logits: Float[np.ndarray, "context action"]) -> None:
    """Writes a folder that `load_table` reads, whole or not at all.

    Raises:
      UserError: as `Destination.write`.
    """
    place.write(WEIGHTS, {LOGITS: np.ascontiguousarray(logits, np.float32)}, {})


def save_table(
    folder: str | os.PathLike[str], logits: Float[np.ndarray, "context action"], config: Config, overwrite: bool = False
) -> None:
    """`write_table` to a place named now."""
    write_table(destination(folder, config, overwrite), logits)


def load_table(
    folder: str | os.PathLike[str], tasks: Collection[str] = ()
) -> tuple[Float[np.ndarray, "context action"], Config]:
    """Reads such a folder: the logits, and the settings of the run that made them.

    Args:
      folder: the folder.
      tasks: of a user's own, those that may be imported.

    Raises:
      UserError: a file is missing or damaged, the task is not here or not what it was, or the logits have another shape
        or are not finite.
    """
    config, shape = _read_description(Path(folder) / folders.TABLE, tasks)
    path = Path(folder) / WEIGHTS
    try:
        if not path.is_file():
            raise UserError(f"policy {str(folder)!r} has no {WEIGHTS}")
        with safetensors.safe_open(path, "numpy") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, the file is no mapping
            kinds = {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
            right = {LOGITS: ("F32", list(shape))}
            if kinds != right:
                raise UserError(f"{str(path)!r} holds {str(kinds)[:200]}: expected {right}")
            logits = file.get_tensor(LOGITS)
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}") from error
    if not np.isfinite(logits).all():
        raise UserError(f"{str(path)!r} holds logits that are not finite: the run that made it diverged")
    return logits, config


def _read_description(path: Path, tasks: Collection[str]) -> tuple[Config, tuple[int, int]]:
    """The settings, and the shape of the logits."""
    try:
        data = json.loads(files.read(path, MAX_BYTES))
    except FileNotFoundError as error:
        right = "what train --save-policy wrote of a table policy"
        raise UserError(f"policy {str(path.parent)!r} has no {path.name}: expected {right}") from error
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} is not JSON") from error
    if not isinstance(data, dict) or not isinstance(data.get("config"), dict):
        raise UserError(f"{str(path)!r} describes no policy: config is missing")
    config, actions, shape = Config.from_dict(data["config"]), list(ACTIONS), (NUM_STATES, NUM_ACTIONS)
    if config.task != ARTICLE:
        task = load_again(f"policy {str(path.parent)!r}", config.task, data.get("digest"), tasks)
        actions, shape = list(task.actions), task.shape
    expected: dict[str, Any] = {"policy": "table", "task": config.task, "actions": actions}
    for name, right in expected.items():
        if data.get(name) != right:
            raise UserError(f"{str(path)!r} has {name} {data.get(name)!r}: expected {right!r}")
    return config, shape
