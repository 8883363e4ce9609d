"""A laboratory for agent-RL training loops in JAX: every number is exact or comes with an interval.

    import jaxrl_mini
    result = jaxrl_mini.run(jaxrl_mini.Config(seed=7))
    result.after.exact_success_rate, result.history["loss"]

The names below are imported on first use, so that `import jaxrl_mini` takes no time.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_mini.config import Config, UserError
    from jaxrl_mini.evaluation import Evaluation
    from jaxrl_mini.fleet import run
    from jaxrl_mini.result import Result
    from jaxrl_mini.task import ACTIONS, BinarySearchRepair

_HOMES = {
    "ACTIONS": "task",
    "BinarySearchRepair": "task",
    "Config": "config",
    "Evaluation": "evaluation",
    "Result": "result",
    "UserError": "config",
    "run": "fleet",
}

__all__ = ["ACTIONS", "BinarySearchRepair", "Config", "Evaluation", "Result", "UserError", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
