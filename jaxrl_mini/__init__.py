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

import jaxrl_mini.objective.advantage  # noqa: F401, registers what `Config` knows, and takes no time either

if TYPE_CHECKING:
    __version__: str
    from jaxrl_mini.config import Config, UserError
    from jaxrl_mini.learning.evaluation import Evaluation
    from jaxrl_mini.learning.loop import run
    from jaxrl_mini.learning.result import Result
    from jaxrl_mini.objective.own import register_advantage
    from jaxrl_mini.runs.player import load_player
    from jaxrl_mini.sweeps.dataset import Dataset
    from jaxrl_mini.sweeps.engine import run_sweep
    from jaxrl_mini.sweeps.grid import Grid
    from jaxrl_mini.tasks.environment import TaskEnv as TaskEnv
    from jaxrl_mini.tasks.repair import ACTIONS, BinarySearchRepair
    from jaxrl_mini.tasks.specification import register
    from jaxrl_mini.tasks.task import Task

_HOMES = {
    "ACTIONS": "tasks.repair",
    "BinarySearchRepair": "tasks.repair",
    "Config": "config",
    "Dataset": "sweeps.dataset",
    "Evaluation": "learning.evaluation",
    "Grid": "sweeps.grid",
    "Result": "learning.result",
    "Task": "tasks.task",
    "TaskEnv": "tasks.environment",
    "UserError": "config",
    "load_player": "runs.player",
    "register": "tasks.specification",
    "register_advantage": "objective.own",
    "run": "learning.loop",
    "run_sweep": "sweeps.engine",
}

__all__ = [  # without `TaskEnv`, which needs an extra
    "ACTIONS",
    "BinarySearchRepair",
    "Config",
    "Dataset",
    "Evaluation",
    "Grid",
    "Result",
    "Task",
    "UserError",
    "load_player",
    "register",
    "register_advantage",
    "run",
    "run_sweep",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # as installed; pyproject.toml is the one place that says it
        return importlib.import_module("importlib.metadata").version(__name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
