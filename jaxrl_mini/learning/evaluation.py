"""Success and actions per episode: exact by dynamic programming, and sampled, with intervals."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_mini.episodes import rollout
from jaxrl_mini.episodes.intervals import mean_interval, success_interval
from jaxrl_mini.episodes.packed import Episodes
from jaxrl_mini.exact.success import exact_of_logits
from jaxrl_mini.machine.xla import unless_numpy
from jaxrl_mini.policies.table import log_probs_of_logits
from jaxrl_mini.types import AnyArray, ByContent, Exact, Seeds

CHUNK = 512
"""Sampled evaluation episodes per call, at most."""

MIN_CHUNK = 32
"""The fewest that a program is compiled for; fewer than `CHUNK` are rounded up to a power of two."""


@dataclass(frozen=True)
class Evaluation:
    """One policy's figures: sampled, each with its interval, and exact."""

    episodes: int
    successes: int
    actions: int
    """Actions over all episodes."""
    squared_actions: int
    """The sum of squared episode lengths."""
    exact_success_rate: float
    exact_mean_actions: float
    exact_mean_kl: float | None = None
    """Expected sum of KL(policy || initial policy) over an episode's actions, by expected actions. None for a table."""

    @property
    def success_rate(self) -> float:
        """Share of successful episodes."""
        return self.successes / self.episodes

    @property
    def success_rate_interval(self) -> tuple[float, float]:
        """95 % interval of the success rate."""
        return success_interval(self.successes, self.episodes)

    @property
    def mean_actions(self) -> float:
        """Actions per episode."""
        return self.actions / self.episodes

    @property
    def mean_actions_interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean actions; None for a single episode."""
        return mean_interval(self.actions, self.squared_actions, self.episodes)


@dataclass(frozen=True, eq=False)
class Evaluations(ByContent):
    """The figures of many policies, as arrays; indexed by a run's place, those of one."""

    episodes: int
    """Sampled episodes per run."""
    successes: Int[np.ndarray, " run"]
    actions: Int[np.ndarray, " run"]
    squared_actions: Int[np.ndarray, " run"]
    exact: Exact

    def __len__(self) -> int:
        return len(self.successes)

    def __getitem__(self, run: int) -> Evaluation:
        sums = (int(column[run]) for column in (self.successes, self.actions, self.squared_actions))
        return Evaluation(self.episodes, *sums, *(float(column[run]) for column in self.exact))


def play(
    logits: Float[AnyArray, "24 6 run"], seeds: Sequence[Seeds], verdicts: Bool[np.ndarray, "episode variant"]
) -> Int[np.ndarray, "3 run"]:
    """Plays the evaluation episodes of every run.

    Args:
      logits: a policy per run.
      seeds: the runs' seeds, block after block; each block is one call, compiled if they are JAX arrays. The
        evaluation stream depends on the seed alone, so it is the same before and after.
      verdicts: the verifier's verdicts; as many episodes are played.

    Returns:
      Sums over the episodes: successes, actions, and squared actions.
    """
    rows = CHUNK if len(verdicts) > CHUNK else max(MIN_CHUNK, 1 << (len(verdicts) - 1).bit_length())
    probs = np.exp(log_probs_of_logits(logits)).astype(np.float32)
    policies = np.split(probs, np.cumsum([len(block) for block in seeds])[:-1], axis=-1)

    def play_blocks(chunk: int) -> Episodes:
        played = [_play_chunk(policy, block, chunk, rows).packed for policy, block in zip(policies, seeds, strict=True)]
        return Episodes(np.concatenate(played, axis=-1))

    return sum_over_episodes(play_blocks, verdicts)


def sum_over_episodes(
    play: Callable[[int], Episodes], verdicts: Bool[np.ndarray, "episode variant"]
) -> Int[np.ndarray, "3 *run"]:
    """Successes, actions and squared lengths of as many evaluation episodes as there are verdicts.

    Args:
      play: returns a chunk's episodes, up to 512 and at least those that are graded, [episode, 1, *run].
      verdicts: the verifier's verdicts.
    """
    sums = []
    for chunk, start in enumerate(range(0, len(verdicts), CHUNK)):
        graded = verdicts[start : start + CHUNK]
        episodes = Episodes(np.asarray(play(chunk).packed)[: len(graded)])
        lengths = episodes.lengths
        columns = (rollout.grade(episodes, graded), lengths, lengths * lengths)
        sums.append([column.sum(axis=(0, 1), dtype=np.int64) for column in columns])
    return np.sum(sums, axis=0)


def evaluate(
    logits: Float[AnyArray, "24 6 run"], seeds: Seeds, verdicts: Bool[np.ndarray, "episode variant"]
) -> Evaluations:
    """Evaluates the policy of every run, by its episodes (see `play`) and exactly."""
    successes, actions, squared_actions = play(logits, [seeds], verdicts)
    expected = exact_of_logits(logits, verdicts.mean(axis=0))
    return Evaluations(len(verdicts), successes, actions, squared_actions, expected)


@functools.partial(unless_numpy, static_argnames="rows")
def _play_chunk(probs: Float[AnyArray, "24 6 run"], seeds: Seeds, chunk: int | Int[Array, ""], rows: int) -> Episodes:
    """Evaluation episodes number 512 * chunk and on, each a group of its own; how many changes none of them."""
    return rollout.rollout(probs, seeds, chunk, stream=rollout.EVALUATION, groups=rows, group_size=1)
