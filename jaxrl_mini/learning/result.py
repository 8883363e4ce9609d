"""What a finished run gives back."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrl_mini.config import Config
from jaxrl_mini.episodes.play import Play
from jaxrl_mini.learning.evaluation import Evaluation
from jaxrl_mini.learning.metrics import History
from jaxrl_mini.types import ByContent


@dataclass(frozen=True, eq=False)
class Result(ByContent):
    """A finished run; equal to another where all but `timing` is, to the bit."""

    config: Config
    before: Evaluation
    after: Evaluation
    history: History
    """An array [iteration] per metric."""
    logits: np.ndarray | None
    """float32 [iteration + 1, state, action]: the table policy before the first and after every iteration."""
    packed_episodes: np.ndarray | None
    """int32 [iteration, group, episode]: the sampled episodes (see `packed.Episodes`); None on another task."""
    timing: dict[str, float] = field(compare=False)
    """Seconds: `compile_seconds`, `run_seconds`, and `train_and_final_eval_seconds`, which both are part of."""
    checkpoint: Any = None
    """The trained language model, a `pretrained.Checkpoint`."""
    behavior: np.ndarray | None = None
    """float32 [iteration, group, episode, step]: a language model's log-probabilities of the actions when sampled."""
    rewards: np.ndarray | None = None
    """float32 [iteration, group, episode], where they are not the verifier's verdicts on the sampled episodes."""
    mesh: dict[str, int] | None = None
    """Devices by axis, where a language model had several."""
    played: Play | None = None
    """The sampled episodes of a task that is not the article's, [iteration, ...]."""
    passed: np.ndarray | None = None
    """float32 [iteration, group, episode]: the verifier's verdicts on them."""
    shown: np.ndarray | None = None
    """int32 [iteration, group, episode, step]: what a language model saw of them before each action."""

    @property
    def logits_crc32(self) -> int:
        """`crc32` of the final logits, or of a language model's weights, which identifies the policy to the bit."""
        if self.logits is not None:
            return crc32([self.logits[-1]])
        return crc32(jax.tree.leaves(self.checkpoint.params))


def crc32(arrays: Iterable[Any]) -> int:
    """The CRC-32 of the arrays' values as little-endian float32, one array after the other."""
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array, "<f4").data, checksum)
    return checksum
