"""Every pytree that crosses a door, with the shape of each field.

Axis names are the same words everywhere: run, iteration, group, episode, step, state, variant, action,
context. Arrays of the table policy may carry a last axis `run`: many runs side by side, written as
`*run` in signatures, so that the same functions serve one run and a fleet.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_mini.task import MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS


class Settings(NamedTuple):
    """The settings that are data: sweeping them needs no new compilation."""

    lr: Float[Array, "*run"]
    """Adam's learning rate."""
    clip: Float[Array, "*run"]
    """Ratios are clipped to [1 - clip, 1 + clip]."""
    beta: Float[Array, "*run"]
    """Coefficient of KL(policy || reference)."""


class Episodes(NamedTuple):
    """A batch of episodes, after they ended."""

    choices: Int[Array, "step group episode *run"]
    """What was done where: variant * 6 + action, -1 after the end."""
    lengths: Int[Array, "group episode *run"]
    """Actions per episode, 1 to 6."""
    variants: Int[Array, "group episode *run"]
    """The artifact at the end."""
    submitted: Int[Array, "group episode *run"]
    """1 where the episode handed its artifact in, else 0."""

    @property
    def actions(self) -> Int[Array, "step group episode *run"]:
        """The sampled actions, -1 after the end."""
        return jnp.where(self.choices >= 0, self.choices % NUM_ACTIONS, -1)

    @property
    def states(self) -> Int[Array, "step group episode *run"]:
        """The state of each choice, `step * 4 + variant`; 0 after the end."""
        steps = jnp.arange(MAX_STEPS).reshape(-1, *[1] * (self.choices.ndim - 1))
        return jnp.where(self.choices >= 0, steps * NUM_VARIANTS + self.choices // NUM_ACTIONS, 0)


class Credit(NamedTuple):
    """A batch as the few sums its loss depends on; the context is the state, or a history."""

    plus: Float[Array, "context action *run"]
    """Sum of advantage / episode length / episodes, over the actions with a positive advantage."""
    minus: Float[Array, "context action *run"]
    """The same over those with a negative advantage."""
    counts: Float[Array, "context action *run"]
    """How often each action was taken."""
    visits: Float[Array, "context *run"]
    """Sum of 1 / episode length / episodes, over all actions: sums to 1 over the contexts."""


class Metrics(NamedTuple):
    """What one iteration reports; losses are those of its last optimizer step, before it is taken."""

    loss: Float[Array, "*run"]
    mean_kl: Float[Array, "*run"]
    ratio_outside_clip_fraction: Float[Array, "*run"]
    entropy: Float[Array, "*run"]
    gradient_norm: Float[Array, "*run"]
    optimizer_steps: Int[Array, "*run"]
    train_success_rate: Float[Array, "*run"]
    mixed_groups: Int[Array, "*run"]
    retained_episodes: Int[Array, "*run"]
    exact_success_rate: Float[Array, "*run"]


class Exact(NamedTuple):
    """A policy's expectations, by dynamic programming."""

    success_rate: Float[Array, "*run"]
    mean_actions: Float[Array, "*run"]


class Sampled(NamedTuple):
    """A policy's sampled evaluation: sums over the evaluation episodes."""

    successes: Int[Array, "*run"]
    actions: Int[Array, "*run"]
    squared_actions: Int[Array, "*run"]
    """Sum of squared episode lengths, for the interval of the mean."""


Seeds = UInt32[Array, "*run"]
