"""Replays a recording: the update of each recorded batch again, and how far its figures are from the recorded ones."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_mini import objective
from jaxrl_mini.episodes import rollout
from jaxrl_mini.episodes.packed import Episodes
from jaxrl_mini.episodes.play import Play
from jaxrl_mini.learning import training
from jaxrl_mini.learning.block import sizes_of
from jaxrl_mini.learning.training import Moments, Sizes, State
from jaxrl_mini.machine import jax_settings
from jaxrl_mini.policies import table
from jaxrl_mini.runs.recording import HISTORY, SHOWN, Recording, of_taken
from jaxrl_mini.tasks.specification import load_task
from jaxrl_mini.types import Settings

if TYPE_CHECKING:
    from jaxrl_mini.learning.language_episodes import Batch


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
    sizes, settings = sizes_of(config), jax.tree.map(jnp.float32, Settings.of(config))
    logits = jnp.asarray(arrays["logits"], jnp.float32)
    reference = table.distribution(logits[0]).log_probs
    moments = training.initial_state(logits[0]).moments
    rewards, figures = arrays["rewards"].astype(np.float32), []
    for i, episodes in enumerate(_batches(recording)):
        moments, one = _iteration(State(logits[i], moments, None), episodes, rewards[i], reference, settings, sizes)
        figures.append(jax.device_get(one))
    theirs = {
        **{name: arrays.get(f"history_{name}") for name in HISTORY},
        "advantages": arrays["advantages"],
        "logits": _centered(arrays["logits"][1:]),
        "behavior_log_probs": arrays["old_log_probs"],
    }
    ours = {name: np.stack([one[name] for one in figures]) for name in figures[0]}
    ours["logits"] = _centered(ours["logits"])
    ours["behavior_log_probs"] = of_taken(ours["log_probs"], *recording.places)
    return {name: _max_error(ours[name], theirs[name]) for name in theirs}


def _batches(recording: Recording) -> Iterator[Episodes | Play]:
    """The recorded episodes, batch by batch; those of another task than the article's have an axis for one run."""
    if recording.task is None:
        actions = np.moveaxis(recording.arrays["actions"], -1, 1)
        yield from (rollout.episodes_from_actions(batch) for batch in actions)
        return
    for played in zip(*_played(recording), strict=True):
        yield Play(*(one[..., None] for one in played))


def _played(recording: Recording) -> Play:
    """The episodes of another task than the article's, [iteration, ...]."""
    task, arrays = recording.task, recording.arrays
    assert task is not None
    actions, views = (np.moveaxis(arrays[name], -1, 1) for name in ("actions", "views"))
    choices = np.where(actions >= 0, views * task.shape[1] + actions, -1)
    return Play(choices, arrays["submissions"], arrays["instances"])


def _language_batches(recording: Recording) -> "Iterator[Batch]":
    """The recorded episodes as a language model played them."""
    from jaxrl_mini.learning import language_episodes

    if recording.task is None:
        task = load_task(recording.config.task)
        for actions in recording.arrays["actions"]:
            yield language_episodes.replayed(task, np.moveaxis(actions, -1, 0))
    else:
        for one in zip(*_played(recording), recording.arrays[SHOWN], strict=True):
            yield language_episodes.recorded(*one)


def _language_errors(recording: Recording) -> dict[str, float | None]:
    from jaxrl_mini.learning.language_episodes import behavior_of_taken, of_taken
    from jaxrl_mini.learning.language_training import Run

    config, arrays = recording.config, recording.arrays
    run, figures = Run(config), []
    batches, columns = _language_batches(recording), (arrays["rewards"], arrays["old_log_probs"])
    for episodes, rewards, recorded in zip(batches, *columns, strict=True):
        rewards = rewards.astype(np.float32)
        again = run.log_probs(episodes)
        metrics = run.learn(episodes, rewards, behavior_of_taken(recorded, episodes, len(run.task.actions)))
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
    episodes: Episodes | Play,
    rewards: Float[Array, "group episode"],
    reference: Float[Array, "context action"],
    settings: Settings,
    sizes: Sizes,
) -> tuple[Moments, dict[str, Array]]:
    """One update; the moments after it, and its figures under the names and axes of a recording."""
    runs = isinstance(episodes, Play)
    data = state, rewards, reference, settings
    if runs:
        data = jax.tree.map(lambda leaf: leaf[..., None], data)
    state, rewards, reference, settings = data
    state, log = training.learn(
        state._replace(policy=table.distribution(state.params)), episodes, rewards, reference, settings, sizes=sizes
    )
    measured = objective.measure(
        log.log_probs, log.behavior, reference, log.credit, settings, sizes.method, sizes.variant
    )
    advantages = objective.group_advantages(rewards, sizes.variant.advantage)
    figures = {
        **{name: measured[name] for name in HISTORY},
        "advantages": advantages if sizes.method == "grpo" else 0.0 * rewards,
        "logits": state.params,
        "log_probs": log.behavior,
    }
    if runs:
        return jax.tree.map(lambda leaf: leaf[..., 0], (state.moments, figures))
    return state.moments, figures


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
