"""Success and actions per episode: exact by dynamic programming, and sampled, with intervals."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_mini.config import BLOCK
from jaxrl_mini.episodes import play as play_any
from jaxrl_mini.episodes import rollout
from jaxrl_mini.episodes.grounds import Grounds, grounds
from jaxrl_mini.episodes.intervals import mean_interval, success_interval
from jaxrl_mini.episodes.packed import Episodes
from jaxrl_mini.exact import situations
from jaxrl_mini.exact.success import exact_of_logits
from jaxrl_mini.machine.xla import unless_numpy
from jaxrl_mini.policies.table import log_probs_of_logits
from jaxrl_mini.tasks.compiled import CompiledTask
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
    exact_success_rate: float | None = None
    """None where a language model's histories are too many."""
    exact_mean_actions: float | None = None
    exact_mean_kl: float | None = None
    """Expected sum of KL(policy || initial policy) over an episode's actions, by expected actions. None for a table."""
    by_instance: tuple[float, ...] | None = None
    """Exact success on each instance of the split, where there are several."""
    splits: Mapping[str, "Evaluation"] = dataclasses.field(default_factory=dict)
    """The figures on the other splits than `train`."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Evaluation":
        """The reverse of `dataclasses.asdict`, from JSON; fields with their defaults may be missing."""
        splits = {name: cls.of(one) for name, one in data.get("splits", {}).items()}
        instances = data.get("by_instance")
        return cls(**{**data, "splits": splits, "by_instance": None if instances is None else tuple(instances)})

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
    by_instance: Float[np.ndarray, "instance run"] | None = None
    """See `Evaluation`."""
    splits: Mapping[str, "Evaluations"] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.successes)

    def __getitem__(self, run: int) -> Evaluation:
        instances = None if self.by_instance is None else tuple(self.by_instance[:, run].tolist())
        splits = {name: one[run] for name, one in self.splits.items()}
        return Evaluation(
            episodes=self.episodes,
            successes=int(self.successes[run]),
            actions=int(self.actions[run]),
            squared_actions=int(self.squared_actions[run]),
            exact_success_rate=float(self.exact.success_rate[run]),
            exact_mean_actions=float(self.exact.mean_actions[run]),
            by_instance=instances,
            splits=splits,
        )


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


def evaluate_task(
    task: CompiledTask, logits: Float[np.ndarray, "context action run"], seeds: Seeds, episodes: int
) -> Evaluations:
    """Evaluates the policy of every run on each split of any task: over so many sampled episodes, and exactly."""
    by_split = {split: _evaluate_split(task, split, logits, seeds, episodes) for split in task.splits}
    train = by_split.pop("train")
    return dataclasses.replace(train, splits=by_split)


def _evaluate_split(
    task: CompiledTask, split: str, logits: Float[np.ndarray, "context action run"], seeds: Seeds, episodes: int
) -> Evaluations:
    sums = play_task(task, split, logits, seeds, episodes)
    success, actions = situations.by_instance(task, log_probs_of_logits(logits), split)
    exact = Exact(success.mean(axis=0), actions.mean(axis=0))
    successes, lengths, squares = sums
    return Evaluations(episodes, successes, lengths, squares, exact, success if len(success) > 1 else None)


def play_task(
    task: CompiledTask, split: str, logits: Float[np.ndarray, "context action run"], seeds: Seeds, episodes: int
) -> Int[np.ndarray, "3 run"]:
    """`play` on a split of any task; each episode plays an instance of its own."""
    runs, stream = len(seeds), rollout.EVALUATION + play_any.SPLIT * list(task.splits).index(split)
    probs = np.exp(log_probs_of_logits(logits)).astype(np.float32)
    rows = CHUNK if episodes > CHUNK else max(MIN_CHUNK, 1 << (episodes - 1).bit_length())
    sums = np.zeros((3, runs), np.int64)
    for first in range(0, runs, BLOCK):  # blocks of one shape, for one program and the same bits
        block = np.arange(first, first + BLOCK).clip(max=runs - 1)
        for chunk, start in enumerate(range(0, episodes, CHUNK)):
            passed, lengths = _play_task_chunk(
                probs[..., block], np.asarray(seeds)[block], chunk, grounds(task, split), rows=rows, stream=stream
            )
            passed, lengths = (np.asarray(one)[: episodes - start, 0, : runs - first] for one in (passed, lengths))
            columns = passed, lengths, lengths * lengths
            sums[:, first : first + BLOCK] += [column.sum(axis=0, dtype=np.int64) for column in columns]
    return sums


@functools.partial(jax.jit, static_argnames=("rows", "stream"))
def _play_task_chunk(
    probs: Float[Array, "context action run"],
    seeds: Seeds,
    chunk: int | Int[Array, ""],
    here: Grounds,
    rows: int,
    stream: int,
) -> tuple[Float[Array, "episode 1 run"], Int[Array, "episode 1 run"]]:
    played = play_any.play(probs, seeds, chunk, here.tables, here.members, stream=stream, groups=rows, group_size=1)
    return play_any.grade(played, here.accepted, seeds, chunk, stream=stream), played.lengths


@functools.partial(unless_numpy, static_argnames="rows")
def _play_chunk(probs: Float[AnyArray, "24 6 run"], seeds: Seeds, chunk: int | Int[Array, ""], rows: int) -> Episodes:
    """Evaluation episodes number 512 * chunk and on, each a group of its own; how many changes none of them."""
    return rollout.rollout(probs, seeds, chunk, stream=rollout.EVALUATION, groups=rows, group_size=1)
