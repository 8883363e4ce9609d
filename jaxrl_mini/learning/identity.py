"""All that a run's numbers depend on but its initial state: its settings, its model's files, and what computes it.

Two runs with the same identity and the same initial state are the same, to the bit.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_mini import config as settings
from jaxrl_mini.config import Config
from jaxrl_mini.learning.block import task_of
from jaxrl_mini.machine import runtime

Identity = Mapping[str, Mapping[str, Any]]
"""`config`: the settings. `model`: digests of the task and of each file of the language model. `runtime`: what decides
of it."""


def of(config: Config, mesh: jax.sharding.Mesh | None = None) -> Identity:
    """The identity of a run here.

    Raises:
      UserError: the model's files cannot be read.
    """
    model: dict[str, str] = {}
    if (task := task_of(config)) is not None:
        model[f"task {config.task}"] = task.digest
    if config.model is not None:
        from jaxrl_mini.policies.folders import digests  # imports safetensors, for which a table should not wait

        model |= digests(config.model)
    here = {**runtime.without_commit(), "mesh": None if mesh is None else dict(mesh.shape)}
    deciding = runtime.deciding(here, threads=config.backend == "hf")
    return {"config": config.to_dict(), "model": model, "runtime": deciding}


def read(data: Any) -> Identity:
    """An identity from JSON; that of an earlier version stated less, side by side.

    Raises:
      ValueError: it is something else.
    """
    if isinstance(data, dict) and "runtime" not in data:
        config = {name: data[name] for name in Config().to_dict() if name in data}
        names = {name: "device_platform" if name == "platform" else name for name in data if name not in config}
        data = {"config": config, "runtime": {name: data[there] for there, name in names.items()}}
    parts = {"config", "model", "runtime"}
    if not isinstance(data, dict) or not parts - {"model"} <= {*data} <= parts:
        raise ValueError("the identity of a run is missing")
    if not all(isinstance(part, dict) for part in data.values()):
        raise ValueError("the identity of a run is damaged")
    return data


def differences(there: Identity, here: Identity) -> str:
    """In what a run cannot be the continuation of another, by name: all but the number of iterations."""
    found = [
        settings.differences(there["config"], here["config"], except_for=("iterations",)),
        settings.differences(there["model"], here["model"]) if "model" in there else "",
        runtime.differences(there["runtime"], here["runtime"]),
    ]
    return ", ".join(filter(None, found))


def unknown(there: Identity, here: Identity) -> list[str]:
    """What an earlier version did not write of a run."""
    model = "model" not in there and here["model"]
    return [*runtime.unknown(there["runtime"], here["runtime"]), *["files of the model"] * bool(model)]
