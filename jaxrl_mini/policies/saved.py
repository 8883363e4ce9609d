"""A table policy in a folder: `policy.safetensors` with its logits, `policy.json` with the run that made it."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from jaxtyping import Float

from jaxrl_mini.config import Config, UserError
from jaxrl_mini.machine import files
from jaxrl_mini.policies import folders
from jaxrl_mini.tasks.repair import ACTIONS, NAME, NUM_ACTIONS, NUM_STATES

WEIGHTS = "policy.safetensors"
LOGITS = "logits"
"""The only tensor: float32 [state, action], the state being step * 4 + 2 * low_fixed + high_fixed."""
DESCRIPTION: dict[str, Any] = {"policy": "table", "task": NAME, "actions": list(ACTIONS)}
"""What `policy.json` holds beside `config`; with another task or other actions the logits mean something else."""
MAX_BYTES = 2**16


def destination(folder: str | os.PathLike[str], config: Config, overwrite: bool = False) -> folders.Destination:
    """The place for a policy of these settings; the same may be there.

    Raises:
      UserError: as `folders.Destination`.
    """
    text = json.dumps({**DESCRIPTION, "config": config.to_dict()}, indent=1) + "\n"
    return folders.Destination(folder, overwrite, {folders.TABLE: text.encode()})


def write_table(place: folders.Destination, logits: Float[np.ndarray, "24 6"]) -> None:
    """Writes a folder that `load_table` reads, whole or not at all.

    Raises:
      UserError: as `Destination.write`.
    """
    place.write(WEIGHTS, {LOGITS: np.ascontiguousarray(logits, np.float32)}, {})


def save_table(
    folder: str | os.PathLike[str], logits: Float[np.ndarray, "24 6"], config: Config, overwrite: bool = False
) -> None:
    """`write_table` to a place named now."""
    write_table(destination(folder, config, overwrite), logits)


def load_table(folder: str | os.PathLike[str]) -> tuple[Float[np.ndarray, "24 6"], Config]:
    """Reads such a folder: the logits, and the settings of the run that made them.

    Raises:
      UserError: a file is missing or damaged, or of another task, or the logits have another shape or are not finite.
    """
    config = _read_description(Path(folder) / folders.TABLE)
    path = Path(folder) / WEIGHTS
    try:
        if not path.is_file():
            raise UserError(f"policy {str(folder)!r} has no {WEIGHTS}")
        with safetensors.safe_open(path, "numpy") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, the file is no mapping
            kinds = {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
            right = {LOGITS: ("F32", [NUM_STATES, NUM_ACTIONS])}
            if kinds != right:
                raise UserError(f"{str(path)!r} holds {str(kinds)[:200]}: expected {right}")
            logits = file.get_tensor(LOGITS)
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}") from error
    if not np.isfinite(logits).all():
        raise UserError(f"{str(path)!r} holds logits that are not finite: the run that made it diverged")
    return logits, config


def _read_description(path: Path) -> Config:
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
    for name, right in DESCRIPTION.items():
        if data.get(name) != right:
            raise UserError(f"{str(path)!r} has {name} {data.get(name)!r}: expected {right!r}")
    return Config.from_dict(data["config"])
