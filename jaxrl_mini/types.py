"""Every pytree that crosses a door, with the shape of each field.

Axis names are the same words everywhere: run, iteration, group, episode, step, state, variant, action,
context. Arrays of the table policy may carry a last axis `run`: many runs side by side, written as
`*run` in signatures, so that the same functions serve one run and a fleet.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_mini.task import MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS

CHOICE_BITS = 5

Seeds = UInt32[Array, "*run"]


class Settings(NamedTuple):
    """The settings that are data: sweeping them needs no new compilation."""

    lr: Float[Array, "*run"]
    """Adam's learning rate."""
    clip: Float[Array, "*run"]
    """Ratios are clipped to [1 - clip, 1 + clip]."""
    beta: Float[Array, "*run"]
    """Coefficient of KL(policy || reference)."""


class Episodes(NamedTuple):
    """A batch of episodes, after they ended: what was done where says everything else."""

    packed: Int[Array, "*batch"]
    """A whole episode in one integer, from the lowest bits on: five bits a step, 1 + variant * 6 + action, or 0
    after the end. The axes are [group, episode, *run]."""

    def choice(self, step: int) -> Int[Array, "*batch"]:
        """What was done where at one step: variant * 6 + action, -1 after the end."""
        return ((self.packed >> CHOICE_BITS * step) & (2**CHOICE_BITS - 1)) - 1

    @property
    def choices(self) -> Int[Array, "6 *batch"]:
        """`choice` of every step."""
        return jnp.stack([self.choice(step) for step in range(MAX_STEPS)])

    @property
    def actions(self) -> Int[Array, "6 *batch"]:
        """The sampled actions, -1 after the end."""
        choices = self.choices
        return jnp.where(choices >= 0, choices % NUM_ACTIONS, -1)

    @property
    def states(self) -> Int[Array, "6 *batch"]:
        """The state of each choice, `step * 4 + variant`; 0 after the end."""
        choices = self.choices
        steps = np.arange(MAX_STEPS).reshape(-1, *[1] * self.packed.ndim)
        return jnp.where(choices >= 0, steps * NUM_VARIANTS + choices // NUM_ACTIONS, 0)

    @property
    def lengths(self) -> Int[Array, "*batch"]:
        """Actions per episode, 1 to 6."""
        return functools.reduce(jnp.add, [(self.choice(step) >= 0).astype(jnp.int32) for step in range(MAX_STEPS)])


class Advantages(NamedTuple):
    """What the episodes of a group are credited with; rewards are 0 or 1, so there are two values a group."""

    failure: Float[Array, "group *run"]
    success: Float[Array, "group *run"]


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
    """What one iteration reports; the first five are those of its last optimizer step, before it is taken."""

    loss: Float[Array, "*run"]
    mean_kl: Float[Array, "*run"]
    """KL(policy || reference), averaged over the sampled actions."""
    ratio_outside_clip_fraction: Float[Array, "*run"]
    """Share of the sampled actions whose ratio lies outside [1 - clip, 1 + clip], whatever their advantage."""
    entropy: Float[Array, "*run"]
    """Entropy in nats, averaged over the sampled actions."""
    gradient_norm: Float[Array, "*run"]
    """Norm of the gradient before it is clipped."""
    optimizer_steps: Float[Array, "*run"]
    train_success_rate: Float[Array, "*run"]
    mixed_groups: Float[Array, "*run"]
    """Groups in which some episodes succeeded and some failed."""
    retained_episodes: Float[Array, "*run"]
    """Successful episodes: those that rs-sft keeps."""


class Exact(NamedTuple):
    """A policy's expectations, by dynamic programming."""

    success_rate: Float[Array | np.ndarray, "*run"]
    mean_actions: Float[Array | np.ndarray, "*run"]


class Sampled(NamedTuple):
    """A policy's sampled evaluation: sums over the evaluation episodes."""

    successes: Int[Array, "*run"]
    actions: Int[Array, "*run"]
    squared_actions: Int[Array, "*run"]
    """Sum of squared episode lengths, for the interval of the mean."""
