"""A laboratory for agent-RL training loops in JAX: every number is exact or comes with an interval.

    import jaxrl_mini
    result = jaxrl_mini.run(jaxrl_mini.Config(seed=7))
    result.after.exact_success_rate, result.history["loss"]

    sweep = jaxrl_mini.run_sweep(jaxrl_mini.Grid.product(seeds=range(1000), lr=[0.04, 0.08]), "sweeps/lr")
    sweep.runs().to_pandas()

The names below are imported on first use, so that `import jaxrl_mini` takes no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from jaxrl_mini.config import Config, UserError
    from jaxrl_mini.dataset import Dataset
    from jaxrl_mini.engine import run_sweep
    from jaxrl_mini.evaluation import Evaluation
    from jaxrl_mini.fleet import run
    from jaxrl_mini.grid import Grid
    from jaxrl_mini.player import load_player
    from jaxrl_mini.result import Result
    from jaxrl_mini.task import ACTIONS, BinarySearchRepair

_HOMES = {
    "ACTIONS": "task",
    "BinarySearchRepair": "task",
    "Config": "config",
    "Dataset": "dataset",
    "Evaluation": "evaluation",
    "Grid": "grid",
    "Result": "result",
    "UserError": "config",
    "load_player": "player",
    "run": "fleet",
    "run_sweep": "engine",
}

__all__ = [
    "ACTIONS",
    "BinarySearchRepair",
    "Config",
    "Dataset",
    "Evaluation",
    "Grid",
    "Result",
    "UserError",
    "load_player",
    "run",
    "run_sweep",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # as installed; pyproject.toml is the one place that says it
        return importlib.import_module("importlib.metadata").version(__name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
