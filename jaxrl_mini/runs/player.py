"""A kept policy of either kind, ready to play: what it would do in an episode, and its figures."""

import abc
import dataclasses
import os
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.special import softmax

from jaxrl_mini.config import ARTICLE, BLOCK, Config, UserError
from jaxrl_mini.episodes import rollout, verifier
from jaxrl_mini.episodes.packed import Episodes
from jaxrl_mini.learning import evaluation
from jaxrl_mini.learning.evaluation import Evaluation
from jaxrl_mini.machine import jax_settings
from jaxrl_mini.policies import folders
from jaxrl_mini.policies.saved import load_table
from jaxrl_mini.tasks.repair import NUM_STATES, NUM_VARIANTS
from jaxrl_mini.tasks.specification import load_again, load_task, make_task
from jaxrl_mini.tasks.task import Episode


class Player(abc.ABC):
    """What the two kinds of policy have in common."""

    task: str
    """What it plays, as `--task` says it."""

    @abc.abstractmethod
    def probabilities_in(self, episode: Episode) -> Float[np.ndarray, " action"]:
        """Of the actions, where an open episode is."""

    def probabilities(self, actions: Sequence[int]) -> Float[np.ndarray, " action"]:
        """Of the actions, after those that an open episode has taken.

        Raises:
          UserError: on this task that depends on the instance or on chance, too.
        """
        if self.task != ARTICLE:
            task = load_task(self.task)
            if len(task.start_node) > 1 or (task.chance < 1).any():
                raise UserError(f"what is seen after actions of task {self.task} is not sure: ask for probabilities_in")
        episode = Episode(make_task(self.task), *make_task(self.task).splits["train"])
        for action in actions:
            episode.step(action)
        return self.probabilities_in(episode)

    @abc.abstractmethod
    def episode(self, seed: int) -> list[int]:
        """The actions of the first evaluation episode of a seed."""

    @abc.abstractmethod
    def evaluate(self, episodes: int, seed: int) -> Evaluation:
        """Plays evaluation episodes, and computes their expectations exactly.

        With the seed and the episodes of the run that made the policy: the figures after training in its record.
        """


def load_player(folder: str | os.PathLike[str], tasks: Collection[str] = ()) -> Player:
    """Reads what `train --save-policy` wrote, or a Hugging Face checkpoint.

    Args:
      folder: the folder.
      tasks: of a user's own, those that may be imported.

    Raises:
      UserError: the folder cannot be read as either, or the policy's task is not here or not what it was.
    """
    if not Path(folder).is_dir():
        raise UserError(f"policy {str(folder)!r} is not a folder: give one that train --save-policy wrote")
    if (Path(folder) / folders.TABLE).exists():
        logits, config = load_table(folder, tasks)
        return TablePlayer(logits, config.task)
    return LanguagePlayer(folder, tasks)


class TablePlayer(Player):
    """A table of logits, float32 [context, action]."""

    def __init__(self, logits: Float[np.ndarray, "context action"], task: str = ARTICLE):
        self.logits, self.task = logits, task
        self.probs = softmax(logits.astype(np.float64), axis=1)
        views: Mapping[int, Hashable] = {state: state % NUM_VARIANTS for state in range(NUM_STATES)}
        width = NUM_VARIANTS
        if task != ARTICLE:
            views, width = load_task(task).views, load_task(task).width
        self._contexts = {(context // width, view): context for context, view in views.items()}

    def probabilities_in(self, episode: Episode) -> Float[np.ndarray, " action"]:
        """See `Player`."""
        return self.probs[self._contexts[len(episode.actions), episode.task.view]]

    @jax_settings.own()
    def episode(self, seed: int) -> list[int]:
        """See `Player`."""
        if self.task != ARTICLE:
            raise UserError(f"an episode of task {self.task} is more than its actions: play one")
        probs = jnp.asarray(self.probs, jnp.float32)
        played = rollout.rollout(
            probs, jnp.uint32(seed), jnp.int32(0), stream=rollout.EVALUATION, groups=1, group_size=1
        )
        return _taken(Episodes(np.asarray(played.packed)).actions)

    @jax_settings.own()
    def evaluate(self, episodes: int, seed: int) -> Evaluation:
        """See `Player`."""
        if self.task != ARTICLE:
            task, one = load_task(self.task), np.array([seed], np.uint32)
            return evaluation.evaluate_task(task, self.logits[..., None], one, episodes)[0]
        copies = np.repeat(self.logits[..., None], BLOCK, axis=-1)
        seeds = jnp.full(BLOCK, seed, jnp.uint32)
        return evaluation.evaluate(copies, seeds, verifier.evaluation_verdicts(episodes))[0]


class LanguagePlayer(Player):
    """A language model's checkpoint folder.

    Args:
      folder: the folder.
      tasks: of a user's own, those that may be imported; of a folder that says of no task, the first is what it plays,
        and the article's where there is none.
    """

    @jax_settings.own()
    def __init__(self, folder: str | os.PathLike[str], tasks: Collection[str] = ()):
        from jaxrl_mini.policies.language import load_policy  # imports flax, for which a table should not wait

        self.folder = str(folder)
        made_for = folders.task_of(folder)
        self.task = made_for[0] if made_for else next(iter(tasks), ARTICLE)
        task = load_task(self.task) if made_for is None else load_again(f"policy {self.folder!r}", *made_for, tasks)
        self.policy, self.checkpoint = load_policy(self.folder, task=task)
        self._log_probs = jax.jit(self.policy.log_probs)

    @jax_settings.own()
    def probabilities_in(self, episode: Episode) -> Float[np.ndarray, " action"]:
        """See `Player`."""
        from jaxrl_mini.policies.scenes import prompts_of

        prompts = prompts_of(self.policy.task.task, episode.observations, episode.actions)
        return np.exp(np.asarray(self._log_probs(self.checkpoint.params, prompts)[len(episode.actions), 0]))

    @jax_settings.own()
    def episode(self, seed: int) -> list[int]:
        """See `Player`."""
        from jaxrl_mini.learning import language_episodes
        from jaxrl_mini.policies.scenes import scene

        if self.task != ARTICLE:
            raise UserError(f"an episode of task {self.task} is more than its actions: play one")
        task, stream = self.policy.task.task, rollout.EVALUATION
        instance, start = language_episodes.begin(
            task, "train", np.array(seed, np.uint32), 0, stream=stream, groups=1, group_size=1
        )
        played, _ = language_episodes.play(self.policy, self.checkpoint.params, scene(task), start)
        return _taken(language_episodes.taken(language_episodes.Batch(played, instance), len(task.actions)))

    @jax_settings.own()
    def evaluate(self, episodes: int, seed: int) -> Evaluation:
        """See `Player`; without `exact_mean_kl`, since nothing tells the policy that training started from."""
        from jaxrl_mini.learning.language_training import Run

        config = Config(task=self.task, backend="hf", model=self.folder, seed=seed, eval_episodes=episodes)
        found = Run(config, loaded=(self.policy, self.checkpoint)).evaluate()
        splits = {name: dataclasses.replace(one, exact_mean_kl=None) for name, one in found.splits.items()}
        return dataclasses.replace(found, exact_mean_kl=None, splits=splits)


def _taken(actions: Array | np.ndarray) -> list[int]:
    """The actions of an episode up to its end."""
    return [action for action in np.asarray(actions).ravel().tolist() if action >= 0]
