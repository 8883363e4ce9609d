"""A language model's episodes: drawn, graded and evaluated, by the streams of random numbers of the table policy's."""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxrl_mini.config import UserError
from jaxrl_mini.episodes import play as play_any
from jaxrl_mini.episodes import rollout
from jaxrl_mini.episodes.grounds import grounds
from jaxrl_mini.episodes.play import CHANCE, INSTANCE, SPLIT, Play
from jaxrl_mini.learning.evaluation import CHUNK
from jaxrl_mini.policies.language import LanguagePolicy
from jaxrl_mini.policies.scenes import Played, Prompts, Scene, Start, first_openings, scene
from jaxrl_mini.tasks.compiled import CompiledTask
from jaxrl_mini.tasks.segments import segments
from jaxrl_mini.types import AnyArray, Seeds

EVALUATED_AT_ONCE = 32
"""Episodes played at once in a sampled evaluation; a batch of the default size shares the compiled program."""


class Batch(NamedTuple):
    """Episodes of an iteration after their end, group by group."""

    played: Played
    instance: Int[AnyArray, " group"]

    @property
    def shape(self) -> tuple[int, int]:
        """Groups, and episodes in each."""
        return len(self.instance), self.played.choices.shape[1] // len(self.instance)

    @property
    def by_group(self) -> Play:
        """The same in the form of a table policy's, [..., group, episode]."""
        choices, submission, _ = self.played
        return Play(choices.reshape(len(choices), *self.shape), submission.reshape(self.shape), self.instance)

    @property
    def shown(self) -> Int[np.ndarray, "group episode step"]:
        """The text before each action: at first the opening, then the segment of the action before (see `segments`)."""
        openings, appended = (np.asarray(one) for one in self.played.prompts)
        return np.concatenate([openings[None], appended]).T.reshape(*self.shape, -1).astype(np.int32)


@partial(jax.jit, static_argnames="policy")
def play(
    policy: LanguagePolicy, params: PyTree, here: Scene, start: Start
) -> tuple[Played, Float[Array, "step episode action"]]:
    """`LanguagePolicy.sample`, for training and evaluation: compiled once where they play as many episodes at once."""
    return policy.placement.whole(policy.sample(params, here, start))


def begin(
    task: CompiledTask, split: str, seed: Seeds, number: int, *, stream: int, groups: int, group_size: int
) -> tuple[Int[np.ndarray, " group"], Start]:
    """The instance of each group, and where its episodes begin, drawn as `play.play` draws them."""
    here, batch = grounds(task, split), (groups, group_size, 1)
    keys = {name: rollout.key_of(seed[None], number, stream=stream + name) for name in (0, CHANCE, INSTANCE)}
    steps, _, _, draws = here.tables.next_row.shape

    def numbers(name: int) -> Float[np.ndarray, "step episode"]:
        return np.stack([rollout.uniforms_of(keys[name], step, batch) for step in range(steps)]).reshape(steps, -1)

    instance = play_any.instances(keys[INSTANCE], here.members, groups=groups)
    first = play_any.drawn(
        here.tables.start_bounds, instance[:, None], rollout.uniforms_of(keys[CHANCE], steps, batch)
    ).ravel()
    rows, openings = (table.ravel()[first] for table in (here.tables.start_row, first_openings(task)))
    return instance[:, 0], Start(rows, openings, numbers(0), numbers(CHANCE) if draws > 1 else None)


def sample(
    policy: LanguagePolicy, params: PyTree, seed: Seeds, number: int, *, groups: int, group_size: int
) -> tuple[Batch, Float[Array, "step episode action"]]:
    """Episodes of one iteration, and the log-probabilities they were drawn from, 0 after the end."""
    task = policy.task.task
    shape = {"groups": groups, "group_size": group_size}
    instance, start = begin(task, "train", seed, number, stream=rollout.TRAINING, **shape)
    played, behavior = play(policy, params, scene(task), start)
    return Batch(jax.tree.map(np.asarray, played), instance), behavior


def grade(
    task: CompiledTask, batch: Batch, seed: Seeds, number: int, *, stream: int = rollout.TRAINING
) -> Float[np.ndarray, "group episode"]:
    """The verifier's verdicts, 0 or 1."""
    with_run = jax.tree.map(lambda leaf: leaf[..., None], batch.by_group)
    return np.asarray(play_any.grade(with_run, grounds(task).accepted, seed[None], number, stream=stream))[..., 0]


def evaluate(policy: LanguagePolicy, params: PyTree, split: str, seed: Seeds, episodes: int) -> Int[np.ndarray, " 3"]:
    """Successes, actions and squared lengths of so many sampled episodes of a split, each a group of its own."""
    task, sums = policy.task.task, np.zeros(3, np.int64)
    stream = rollout.EVALUATION + SPLIT * list(task.splits).index(split)
    for chunk, first in enumerate(range(0, episodes, CHUNK)):
        instance, start = begin(task, split, seed, chunk, stream=stream, groups=CHUNK, group_size=1)
        parts = range(0, min(CHUNK, episodes - first), EVALUATED_AT_ONCE)
        cut = [jax.tree.map(lambda x, i=i: x[..., i : i + EVALUATED_AT_ONCE], start) for i in parts]
        done = [play(policy, params, scene(task), one)[0] for one in cut]
        played = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=-1), *done)
        batch = Batch(played, instance[: played.choices.shape[1]])
        lengths = (played.choices >= 0).sum(axis=0)[:, None]
        columns = grade(task, batch, seed, chunk, stream=stream), lengths, lengths * lengths
        sums += [column[: episodes - first].sum(dtype=np.int64) for column in columns]
    return sums


def taken(batch: Batch, actions: int) -> Int[np.ndarray, "step episode"]:
    """The actions of a batch's episodes, -1 after the end."""
    choices = np.asarray(batch.played.choices)
    return np.where(choices >= 0, choices % actions, -1)


def recorded(
    choices: Int[np.ndarray, "step group episode"],
    submission: Int[np.ndarray, "group episode"],
    instance: Int[np.ndarray, " group"],
    shown: Int[np.ndarray, "group episode step"],
) -> Batch:
    """The batch of `Batch.by_group` and `Batch.shown`."""
    openings, *appended = shown.reshape(-1, shown.shape[2]).T
    prompts = Prompts(openings, np.array(appended, np.int32).reshape(-1, len(openings)))
    return Batch(Played(choices.reshape(len(choices), -1), submission.ravel(), prompts), instance)


def replayed(task: CompiledTask, actions: Int[np.ndarray, "step group episode"]) -> Batch:
    """The episodes that took these actions, -1 after the end, of a task in which nothing else decides an episode.

    Raises:
      UserError: the task has several instances, or draws of chance.
    """
    here = scene(task)
    steps, rows, count, draws = here.next_row.shape
    if len(task.start_node) > 1 or draws > 1:
        raise UserError(f"task {task.name} has instances or chance: actions alone do not tell what happened in it")
    flat = np.asarray(actions, np.int32).reshape(steps, -1)
    row, submission = np.zeros(flat.shape[1], np.int32), np.zeros(flat.shape[1], np.int32)
    choices, shown = np.full(flat.shape, -1, np.int32), np.full(flat.shape, segments(task).nothing, np.int32)
    for step, action in enumerate(flat):
        row = np.where(action < 0, rows, row)
        alive, place = row < rows, (step, np.minimum(row, rows - 1), np.maximum(action, 0), 0)
        choices[step] = np.where(alive, here.view[step][row] * count + action, -1)
        shown[step] = np.where(alive, here.segment[place], shown[step])
        submission = np.where(alive, here.submission[place], submission)
        row = np.where(alive, here.next_row[place], rows)
    played = Played(choices, submission, Prompts(np.zeros(flat.shape[1], np.int32), shown[:-1]))
    return Batch(played, np.zeros(actions.shape[1], np.int32))


def of_taken(behavior: AnyArray, batch: Batch) -> Float[np.ndarray, "group episode step"]:
    """Of log-probabilities [step, episode, action] those of the actions that were taken, 0 after the end."""
    log_probs = np.asarray(behavior)
    actions = taken(batch, log_probs.shape[2])
    chosen = np.take_along_axis(log_probs, np.maximum(actions, 0)[..., None], axis=2)[..., 0]
    return np.where(actions >= 0, chosen, 0.0).T.reshape(*batch.shape, len(actions))


def behavior_of_taken(
    chosen: Float[np.ndarray, "group episode step"], batch: Batch, count: int
) -> Float[np.ndarray, "step batch action"]:
    """The reverse of `of_taken`, for so many actions; 0 for those that were not taken."""
    is_taken = taken(batch, count)[..., None] == np.arange(count)  # [step, episode, action]
    return np.where(is_taken, chosen.reshape(-1, chosen.shape[2]).T[..., None], 0.0).astype(np.float32)
