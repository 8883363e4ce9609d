"""Recorded episodes with the losses, KLs and logits they led to: an `.npz` file, written and read.

`python -m jaxrl_mini.replay --help` lists its arrays.
"""

import io
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl_mini import objective
from jaxrl_mini.config import ARTICLE, Config, UserError, differences
from jaxrl_mini.episodes import rollout
from jaxrl_mini.episodes.packed import Episodes
from jaxrl_mini.episodes.verifier import training_verdicts
from jaxrl_mini.learning.block import task_of
from jaxrl_mini.learning.result import Result
from jaxrl_mini.machine import files, jax_settings
from jaxrl_mini.machine.files import Output
from jaxrl_mini.policies import table
from jaxrl_mini.runs import records
from jaxrl_mini.tasks.compiled import ENDED, CompiledTask
from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, NUM_STATES, NUM_VARIANTS
from jaxrl_mini.tasks.segments import segments
from jaxrl_mini.tasks.specification import load_again
from jaxrl_mini.types import ByContent

HISTORY = ("loss", "mean_kl", "ratio_outside_clip_fraction")
NAMES = ("config", "actions", "rewards", "advantages", "old_log_probs", "logits", *(f"history_{h}" for h in HISTORY))
"""The arrays that are read."""
ELSEWHERE = ("views", "instances", "submissions")
"""Those that are read, too, of another task than the article's; beside `actions`, they say all of its episodes."""
SHOWN = "shown"
"""The same of what a language model saw (see `Result`)."""
WHOLE = ("actions", *ELSEWHERE, SHOWN)
"""Arrays of whole numbers."""
CONFIG_KEYS = ("method", "iterations", "groups", "group_size", "epochs", "lr", "clip", "beta")
DIGEST = "task_digest"
"""Beside the settings, that of the task, where it is not the article's."""
LANGUAGE_KEYS = ("backend", "model", "dtype", "micro_batch", "exact_every")
"""Settings that a recording names only if it is a language model's."""
OPTION_KEYS = ("advantage", "aggregation", "surrogate", "clip_high", "kl", "entropy_bonus", "reward")
"""Settings that a recording names only where they are not the defaults."""
MAX_BYTES = 2**31
"""A recording, compressed or not, is not larger."""


@dataclass(frozen=True, eq=False)
class Recording(ByContent):
    """One training run as recorded."""

    config: Config
    arrays: dict[str, np.ndarray]
    """Whole numbers as int32, all others as float64 that are finite in float32."""

    @property
    def task(self) -> CompiledTask | None:
        """None for the article's."""
        return task_of(self.config)

    @property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """The context and the action of every step, whole [iteration, group, episode, step]; -1 after the end."""
        actions = self.arrays["actions"]
        if self.task is None:
            played = rollout.episodes_from_actions(np.moveaxis(actions.astype(np.int32), -1, 0))
            contexts = np.moveaxis(played.states, 0, -1)
        else:
            contexts = np.arange(self.task.max_steps) * self.task.width + self.arrays["views"]
        return np.where(actions >= 0, contexts, -1), actions


def read(path: str | Path, tasks: Collection[str] = ()) -> Recording:
    """Reads and checks a recording; nothing in it is unpickled.

    Args:
      path: the file.
      tasks: of a user's own, those that may be imported.

    Raises:
      UserError: the file cannot be read, an array is missing, has another shape or holds a number that is not
        finite in float32, a reward is neither 0 nor 1, an episode is impossible, or its task is not here or not what it
        was.
    """
    arrays = _arrays(path)
    config = _config(path, arrays.get("config"), tasks)
    task, steps, table_shape = task_of(config), MAX_STEPS, (NUM_STATES, NUM_ACTIONS)
    batch = (config.iterations, config.groups, config.group_size)
    if task is not None:
        steps, table_shape = task.max_steps, task.shape
    shapes = {
        "actions": (*batch, steps),
        "rewards": batch,
        "advantages": batch,
        "old_log_probs": (*batch, steps),
        "logits": (config.iterations + 1, *table_shape),
        "history_loss": batch[:1],
    }
    if task is not None:
        shapes |= {"views": (*batch, steps), "instances": batch[:2], "submissions": batch}
    if config.backend == "hf":
        del shapes["logits"]
        if task is not None:
            shapes[SHOWN] = (*batch, steps)
    shapes |= {f"history_{name}": batch[:1] for name in HISTORY if f"history_{name}" in arrays}
    for name, shape in shapes.items():
        if name not in arrays:
            raise UserError(f"recording {path} lacks the array {name}, shape {list(shape)}")
        if arrays[name].shape != shape or arrays[name].dtype.kind not in "iufb":
            kind = f"{arrays[name].dtype} {list(arrays[name].shape)}"
            raise UserError(f"recording {path}: {name} is {kind}, expected numbers {list(shape)}")
        with np.errstate(over="ignore"):
            finite = np.isfinite(arrays[name].astype(np.float32))
        if not finite.all():
            place = np.argwhere(~finite)[0].tolist()
            raise UserError(f"recording {path}: {name} is {arrays[name][*place]} at {place}, expected finite numbers")
    if not np.isin(arrays["rewards"], (0, 1)).all():
        raise UserError(f"recording {path}: rewards must be 0 or 1")
    for name in filter(shapes.__contains__, WHOLE):
        sizes = np.abs(arrays[name].astype(np.float64))
        if not ((sizes % 1 == 0) & (sizes < 2**31)).all():
            raise UserError(f"recording {path}: {name} must be whole numbers")
    recording = Recording(
        config, {name: arrays[name].astype(np.int32 if name in WHOLE else np.float64) for name in shapes}
    )
    if task is None:
        _check_actions(path, recording.arrays["actions"])
    else:
        _check_episodes(path, recording, task)
    return recording


def _arrays(path: str | Path, names: Collection[str] = (*NAMES, *ELSEWHERE, SHOWN)) -> dict[str, np.ndarray]:
    """Those of an archive's arrays that are read."""
    try:
        data = files.read(path, MAX_BYTES)
    except OSError as error:
        raise UserError(f"recording {path} cannot be read ({error.strerror or error})") from error
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            size = sum(entry.file_size for entry in file.zip.infolist())
            if size <= MAX_BYTES:
                arrays = {name: file[name] for name in file.files if name in names}
                if all(isinstance(array, np.ndarray) for array in arrays.values()):  # other entries are bytes
                    return arrays
                raise ValueError("an entry is no array")
    except Exception as error:  # damaged archives make zipfile, its decompressors and NumPy raise anything
        raise UserError(f"recording {path} is not a readable .npz file") from error
    raise UserError(f"recording {path} holds {size} bytes: expected at most {MAX_BYTES}")


def _config(path: str | Path, text: np.ndarray | None, tasks: Collection[str]) -> Config:
    try:
        data = json.loads(str(text[()]))  # type: ignore[index]
        options = {name: data[name] for name in ("task", *OPTION_KEYS, *LANGUAGE_KEYS) if name in data}
        config = Config(**{name: data[name] for name in CONFIG_KEYS}, **options)
        if config.task != ARTICLE:
            load_again("it", config.task, data.get(DIGEST), tasks)
        return config
    except UserError as error:
        raise UserError(f"recording {path}: {error}") from error
    except (TypeError, ValueError, KeyError, IndexError, RecursionError) as error:
        raise UserError(f"recording {path}: config is not JSON text with {', '.join(CONFIG_KEYS)}") from error


def _check_actions(path: str | Path, actions: np.ndarray) -> None:
    """Episodes start with an action, go on to their end, and stay there."""
    taken = actions >= 0
    finish = actions == NUM_ACTIONS - 1
    ended = np.cumsum(finish, axis=-1) - finish > 0
    if not (np.isin(actions, np.arange(-1, NUM_ACTIONS)).all() and (taken != ended).all()):
        raise UserError(
            f"recording {path}: actions must be 0 to {NUM_ACTIONS - 1} up to the end of an episode, then -1"
        )


def _check_episodes(path: str | Path, recording: Recording, task: CompiledTask) -> None:
    """The same of any task: every step is one that its tables have; an end leaves what is handed in there."""
    contexts, actions = recording.places
    width, last = task.shape[0], len(task.accepted) + 1
    taken, ahead = actions >= 0, np.roll(actions, -1, axis=-1) >= 0
    ahead[..., -1] = False
    instances, submissions = recording.arrays["instances"], recording.arrays["submissions"]
    ended, views = task.next_node == ENDED, recording.arrays["views"]
    right = np.isin(actions, np.arange(-1, task.shape[1])) & ((views >= 0) & (views < task.width) | ~taken)
    right &= np.isin(instances, task.splits["train"])[..., None, None]
    right &= ((submissions >= 0) & (submissions < last))[..., None]
    starts = task.start_instance * width + task.contexts[task.start_node]
    right[..., 0] &= np.isin(instances[..., None] * width + contexts[..., 0], starts)
    there = task.contexts[task.node], task.action
    here = contexts, actions
    moves = _numbered(there, np.where(ended, -1, task.contexts[task.next_node]), task.shape)[~ended]
    right &= np.isin(_numbered(here, np.roll(contexts, -1, axis=-1), task.shape), moves) | ~taken | ~ahead
    ends = _numbered(there, task.submission - ENDED, (last, task.shape[1]))[ended]
    right &= np.isin(_numbered(here, submissions[..., None], (last, task.shape[1])), ends) | ~taken | ahead
    right &= taken | ~ahead
    if SHOWN in recording.arrays:
        right &= _could_be_shown(task, recording.arrays[SHOWN], instances, contexts, actions)
    if not right.all():
        place = np.argwhere(~right)[0].tolist()
        raise UserError(
            f"recording {path}: task {task.name} does not go so at {place}: iteration, group, episode, step"
        )


def _could_be_shown(
    task: CompiledTask,
    shown: Int[np.ndarray, "iteration group episode step"],
    instances: Int[np.ndarray, "iteration group"],
    contexts: Int[np.ndarray, "iteration group episode step"],
    actions: Int[np.ndarray, "iteration group episode step"],
) -> Bool[np.ndarray, "iteration group episode step"]:
    """Whether each piece of text is one that the task shows there."""
    pieces, goes_on = segments(task), task.next_node != ENDED
    right, texts = (shown >= 0) & (shown <= pieces.nothing), pieces.nothing + 1
    first = instances[..., None].astype(np.int64) * task.shape[0] + contexts[..., 0]
    starts = task.start_instance.astype(np.int64) * task.shape[0] + task.contexts[task.start_node]
    right[..., 0] &= np.isin(first * texts + shown[..., 0], starts * texts + pieces.of_start)
    after, sizes = task.contexts[task.next_node[goes_on]].astype(np.int64), (task.shape[0] * texts, task.shape[1])
    there = task.contexts[task.node[goes_on]], task.action[goes_on]
    moves = _numbered(there, after * texts + pieces.of_outcome[goes_on], sizes)
    here = contexts[..., :-1], actions[..., :-1]
    made = _numbered(here, contexts[..., 1:].astype(np.int64) * texts + shown[..., 1:], sizes)
    right[..., 1:] &= np.where(actions[..., 1:] >= 0, np.isin(made, moves), shown[..., 1:] == pieces.nothing)
    return right


def _numbered(place: tuple[np.ndarray, np.ndarray], then: np.ndarray, sizes: tuple[int, int]) -> Int[np.ndarray, "..."]:
    """A context, an action and what followed as one number, of `sizes` of the last and of the actions."""
    follows, actions = sizes
    return (place[0].astype(np.int64) * actions + place[1]) * follows + then


@jax_settings.own()
def write(result: Result, output: Output) -> None:
    """Writes a run's sampled episodes and what they led to."""
    config, arrays = result.config, _episodes(result)
    rewards = arrays["rewards"]
    by_run = objective.group_advantages(jnp.moveaxis(rewards, 0, -1), config.advantage)
    arrays["advantages"] = np.moveaxis(np.asarray(by_run), -1, 0) if config.method == "grpo" else 0 * rewards
    if result.logits is None:
        arrays["old_log_probs"] = result.behavior
    else:
        log_probs = table.distribution(jnp.moveaxis(result.logits[:-1], 0, -1)).log_probs
        places = Recording(config, arrays).places
        arrays["old_log_probs"] = of_taken(np.moveaxis(np.asarray(log_probs), -1, 0), *places)
        arrays["logits"] = result.logits
    arrays |= {f"history_{name}": column for name, column in result.history.items() if name != "iteration"}
    texts = {
        "config": _settings(config),
        "before": records.finite(records.summary(result.before)),
        "after": records.finite(records.summary(result.after)),
    }
    arrays |= {name: np.array(json.dumps(value)) for name, value in texts.items()}
    output.commit(lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))


def _episodes(result: Result) -> dict[str, Any]:
    """A run's episodes and their rewards as arrays of a recording."""
    if result.played is not None:
        task, choices = task_of(result.config), np.moveaxis(result.played.choices, 1, -1)
        assert task is not None  # the article's are packed
        views, actions = (np.where(choices >= 0, one, -1) for one in np.divmod(choices, task.shape[1]))
        rewards = result.passed if result.rewards is None else result.rewards
        played = {"instances": result.played.instance, "submissions": result.played.submission}
        if result.shown is not None:
            played[SHOWN] = result.shown
        return {"actions": actions.astype(np.int16), "views": views.astype(np.int32), **played, "rewards": rewards}
    assert result.packed_episodes is not None
    config, episodes = result.config, Episodes(result.packed_episodes)
    verdicts = training_verdicts(0, config.iterations, config.groups)
    flat = Episodes(episodes.packed.reshape(-1, config.group_size))
    passed = np.asarray(rollout.grade(flat, verdicts.reshape(-1, NUM_VARIANTS))).reshape(episodes.packed.shape)
    rewards = passed if result.rewards is None else result.rewards
    return {"actions": np.moveaxis(np.asarray(episodes.actions, np.int8), 0, -1), "rewards": np.asarray(rewards)}


def of_taken(
    log_probs: Float[np.ndarray, "iteration context action"],
    contexts: Int[np.ndarray, "iteration group episode step"],
    actions: Int[np.ndarray, "iteration group episode step"],
) -> Float[np.ndarray, "iteration group episode step"]:
    """The log-probabilities of the actions that were taken, 0 after the end."""
    iterations = np.arange(len(log_probs)).reshape(-1, 1, 1, 1)
    return np.where(actions >= 0, log_probs[iterations, contexts, actions], 0.0)


def _settings(config: Config) -> dict[str, Any]:
    """What a recording says of the settings that its figures depend on."""
    settings = {name: config.to_dict()[name] for name in (*CONFIG_KEYS, "seed", "eval_episodes")}
    settings |= {
        name: getattr(config, name)
        for name in (*OPTION_KEYS, *LANGUAGE_KEYS)
        if getattr(config, name) != getattr(Config, name)
    }
    if (task := task_of(config)) is not None:
        settings |= {"task": config.task, DIGEST: task.digest}
    return settings | {"lr": config.effective_lr}


def not_of(config: Config) -> files.Odd:
    """The `Odd` of a recording: another run's, or no recording at all."""

    def odd(path: Path, meanwhile: bool) -> str | None:
        try:
            there = dict(json.loads(str(_arrays(path, ("config",))["config"][()])))
        except (UserError, TypeError, ValueError, KeyError, IndexError, RecursionError):
            return "exists and is no recording"
        here = _settings(config)
        different = differences(there, dict.fromkeys(there) | here)
        return f"holds another run's episodes ({different})" if different else None

    return odd
