"""What a finished run gives back, and the metrics of its iterations."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_mini.config import Config
from jaxrl_mini.learning.evaluation import Evaluation
from jaxrl_mini.learning.metrics import History


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
    """int32 [iteration, group, episode]: the sampled episodes (see `packed.Episodes`)."""
    timing: dict[str, float]
    """Seconds: `compile_seconds`, `run_seconds`, and `train_and_final_eval_seconds`, which both are part of."""
    checkpoint: Any = None
    """The trained language model, a `pretrained.Checkpoint`."""
    behavior: np.ndarray | None = None
    """float32 [iteration, group, episode, step]: a language model's log-probabilities of the actions when sampled."""
    rewards: np.ndarray | None = None
    """float32 [iteration, group, episode], where they are not the verifier's verdicts on the sampled episodes."""
