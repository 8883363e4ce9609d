"""Recorded episodes with the losses, KLs and logits they led to: reading them, and replaying them.

A recording is an `.npz` file; `python -m jaxrl_mini.replay --help` lists its arrays.
"""

import io
import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_mini import objective
from jaxrl_mini.config import Config, UserError, differences
from jaxrl_mini.episodes import rollout
from jaxrl_mini.episodes.packed import Episodes
from jaxrl_mini.episodes.verifier import training_verdicts
from jaxrl_mini.learning import training
from jaxrl_mini.learning.result import Result
from jaxrl_mini.learning.training import Sizes, State
from jaxrl_mini.machine import files, jax_settings
from jaxrl_mini.machine.files import Output
from jaxrl_mini.policies import table
from jaxrl_mini.runs import records
from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, NUM_STATES, NUM_VARIANTS
from jaxrl_mini.types import ByContent, Settings

HISTORY = ("loss", "mean_kl", "ratio_outside_clip_fraction")
NAMES = ("config", "actions", "rewards", "advantages", "old_log_probs", "logits", *(f"history_{h}" for h in HISTORY))
"""The arrays that are read."""
CONFIG_KEYS = ("method", "iterations", "groups", "group_size", "epochs", "lr", "clip", "beta")
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
    """The actions as int8, all others as float64 that are finite in float32."""


def read(path: str | Path) -> Recording:
    """Reads and checks a recording; nothing in it is unpickled.

    Raises:
      UserError: the file cannot be read, an array is missing, has another shape or holds a number that is not
        finite in float32, a reward is neither 0 nor 1, or an episode is impossible.
    """
    arrays = _arrays(path)
    config = _config(path, arrays.get("config"))
    batch = (config.iterations, config.groups, config.group_size)
    shapes = {
        "actions": (*batch, MAX_STEPS),
        "rewards": batch,
        "advantages": batch,
        "old_log_probs": (*batch, MAX_STEPS),
        "logits": (config.iterations + 1, NUM_STATES, NUM_ACTIONS),
        "history_loss": batch[:1],
    }
    if config.backend == "hf":
        del shapes["logits"]
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
    _check_actions(path, arrays["actions"])
    return Recording(config, {name: arrays[name].astype(np.int8 if name == "actions" else float) for name in shapes})


def _arrays(path: str | Path, names: Collection[str] = NAMES) -> dict[str, np.ndarray]:
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


def _config(path: str | Path, text: np.ndarray | None) -> Config:
    try:
        data = json.loads(str(text[()]))  # type: ignore[index]
        options = {name: data[name] for name in (*OPTION_KEYS, *LANGUAGE_KEYS) if name in data}
        return Config(**{name: data[name] for name in CONFIG_KEYS}, **options)
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


@jax_settings.own()
def write(result: Result, output: Output) -> None:
    """Writes a run's sampled episodes and what they led to."""
    assert result.packed_episodes is not None  # those of the article's task
    config, sizes = result.config, result.packed_episodes.shape
    episodes = Episodes(result.packed_episodes)
    verdicts = training_verdicts(0, config.iterations, config.groups)
    flat = Episodes(episodes.packed.reshape(-1, config.group_size))
    verdicts = np.asarray(rollout.grade(flat, verdicts.reshape(-1, NUM_VARIANTS))).reshape(sizes)
    rewards = verdicts if result.rewards is None else result.rewards
    by_run = objective.group_advantages(jnp.moveaxis(rewards, 0, -1), config.advantage)
    advantages = np.moveaxis(np.asarray(by_run), -1, 0)
    if result.logits is None:
        policy: dict[str, Any] = {"old_log_probs": result.behavior}
    else:
        log_probs = np.moveaxis(
            np.asarray(table.distribution(jnp.moveaxis(result.logits[:-1], 0, -1)).log_probs), -1, 0
        )
        policy = {"old_log_probs": _of_taken(log_probs, episodes), "logits": result.logits}
    arrays = {
        "config": np.array(json.dumps(_settings(config))),
        "actions": np.moveaxis(np.asarray(episodes.actions, np.int8), 0, -1),
        "rewards": np.asarray(rewards),
        "advantages": np.asarray(advantages if config.method == "grpo" else 0 * rewards),
        **policy,
        **{f"history_{name}": column for name, column in result.history.items() if name != "iteration"},
        "before": np.array(json.dumps(records.finite(records.summary(result.before)))),
        "after": np.array(json.dumps(records.finite(records.summary(result.after)))),
    }
    output.commit(lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))


def _settings(config: Config) -> dict[str, Any]:
    """What a recording says of the settings that its figures depend on."""
    settings = {name: config.to_dict()[name] for name in (*CONFIG_KEYS, "seed", "eval_episodes")}
    settings |= {
        name: getattr(config, name)
        for name in (*OPTION_KEYS, *LANGUAGE_KEYS)
        if getattr(config, name) != getattr(Config, name)
    }
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


@jax_settings.own()
def replay_errors(recording: Recording) -> dict[str, float | None]:
    """The largest absolute difference of each figure between the recording and our update of its episodes.

    Every iteration starts at the recorded policy, with the moments that our Adam accumulated so far, and one
    update must lead to the next recorded policy: a far sharper check than a free run, since an aggressive run is
    chaotic (two correct float32 programs part by 0.1 within 40 iterations). Logits are compared after subtracting
    each state's mean: a constant per state changes no probability, and Adam makes one of 0.06 out of the rounding
    of a gradient that is 0.

    A language model's weights are not in a recording, so all of its updates follow each other, from the folder of
    the model on: the errors are 0 on the machine that recorded, and grow with the iterations on another.

    A figure that is not in the recording gives None, one that is not a number on one side alone infinity.
    """
    config, arrays = recording.config, recording.arrays
    if config.backend == "hf":
        return _language_errors(recording)
    sizes = Sizes(config.method, config.groups, config.group_size, config.epochs, config.variant)
    settings = jax.tree.map(jnp.float32, Settings.of(config))
    logits = jnp.asarray(arrays["logits"], jnp.float32)
    reference = table.distribution(logits[0]).log_probs
    moments = training.initial_state(logits[0]).moments
    actions = np.moveaxis(arrays["actions"], -1, 1).astype(np.int32)
    figures = []
    for i, rewards in enumerate(arrays["rewards"].astype(np.float32)):
        moments, one = _iteration(State(logits[i], moments, None), actions[i], rewards, reference, settings, sizes)
        figures.append(jax.device_get(one))
    theirs = {
        **{name: arrays.get(f"history_{name}") for name in HISTORY},
        "advantages": arrays["advantages"],
        "logits": _centered(arrays["logits"][1:]),
        "behavior_log_probs": arrays["old_log_probs"],
    }
    ours = {name: np.stack([one[name] for one in figures]) for name in figures[0]}
    ours["logits"] = _centered(ours["logits"])
    ours["behavior_log_probs"] = _of_taken(ours["log_probs"], Episodes(ours["packed"]))
    return {name: _max_error(ours[name], theirs[name]) for name in theirs}


def _language_errors(recording: Recording) -> dict[str, float | None]:
    from jaxrl_mini.learning.language_training import Run, behavior_of_taken, of_taken

    config, arrays = recording.config, recording.arrays
    run, figures = Run(config), []
    for actions, rewards, recorded in zip(*(arrays[n] for n in ("actions", "rewards", "old_log_probs")), strict=True):
        taken = jnp.asarray(np.moveaxis(actions, -1, 0), jnp.int32)
        episodes = Episodes(np.asarray(rollout.episodes_from_actions(taken).packed))
        rewards = rewards.astype(np.float32)
        again = run.log_probs(episodes)
        metrics = run.learn(episodes, rewards, behavior_of_taken(recorded, episodes))
        by_group = np.asarray(objective.group_advantages(jnp.asarray(rewards), config.advantage))
        figures.append(
            {
                **{name: metrics[name][0] for name in HISTORY},
                "advantages": by_group if config.method == "grpo" else 0.0 * rewards,
                "behavior_log_probs": of_taken(again, episodes),
            }
        )
    theirs = {**{name: arrays.get(f"history_{name}") for name in HISTORY}, "advantages": arrays["advantages"]}
    theirs["behavior_log_probs"] = arrays["old_log_probs"]
    return {name: _max_error(np.stack([one[name] for one in figures]), theirs[name]) for name in theirs}


@partial(jax.jit, static_argnames="sizes")
def _iteration(
    state: State,
    actions: Int[Array, "step group episode"],
    rewards: Float[Array, "group episode"],
    reference: Float[Array, "state action"],
    settings: Settings,
    sizes: Sizes,
) -> tuple[Any, dict[str, Array]]:
    """One update; the moments after it, and its figures under the names and axes of a recording."""
    episodes = rollout.episodes_from_actions(actions)
    state, log = training.learn(
        state._replace(policy=table.distribution(state.params)), episodes, rewards, reference, settings, sizes=sizes
    )
    measured = objective.measure(
        log.log_probs, log.behavior, reference, log.credit, settings, sizes.method, sizes.variant
    )
    return state.moments, {
        **{name: measured[name] for name in HISTORY},
        "advantages": objective.group_advantages(rewards, sizes.variant.advantage)
        if sizes.method == "grpo"
        else 0.0 * rewards,
        "logits": state.params,
        "log_probs": log.behavior,
        "packed": episodes.packed,
    }


def _of_taken(
    log_probs: Float[np.ndarray, "iteration state action"], episodes: Episodes
) -> Float[np.ndarray, "iteration group episode step"]:
    """The log-probabilities of the actions that were taken, 0 after the end."""
    iterations = np.arange(len(log_probs))[:, None, None]
    taken = np.where(episodes.choices >= 0, log_probs[iterations, episodes.states, episodes.actions], 0.0)
    return np.moveaxis(taken, 0, -1)


def _centered(logits: np.ndarray) -> np.ndarray:
    return logits - logits.mean(axis=-1, keepdims=True, dtype=np.float64)


def _max_error(ours: np.ndarray, theirs: np.ndarray | None) -> float | None:
    if theirs is None:
        return None
    theirs = theirs.astype(ours.dtype)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(ours - theirs))
    return float(np.max(np.where(np.isnan(difference), np.inf, difference)))
