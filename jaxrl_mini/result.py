"""What a finished run gives back."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_mini.config import Config
from jaxrl_mini.evaluation import Evaluation

COUNTS = ("optimizer_steps", "mixed_groups", "retained_episodes")
"""Metrics that are whole numbers."""

History = dict[str, np.ndarray]
"""A column per metric: the iteration's number, `types.Metrics`, and the exact success rate after the iteration."""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    config: Config
    before: Evaluation
    after: Evaluation
    history: History
    """An array [iteration] per metric."""
    logits: np.ndarray | None
    """float32 [iteration + 1, state, action]: the table policy before the first and after every iteration."""
    packed_episodes: np.ndarray
    """int32 [iteration, group, episode]: the sampled episodes (see `types.Episodes`)."""
    timing: dict[str, float]
    """Seconds: `compile_seconds`, `run_seconds`, and `train_and_final_eval_seconds`, which both are part of."""
    checkpoint: Any = None
    """The trained language model, a `pretrained.Checkpoint`."""
