"""Exact expectations of a table policy on any task, by dynamic programming over its situations.

`by_instance` gives success and actions. `reach` and `ahead` are the two passes of everything that has a gradient: from
the first step to the last, and back. They work on NumPy and on JAX arrays, in the precision of the probabilities.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxrl_mini.machine.xla import scan
from jaxrl_mini.policies.table import log_probs_of_logits
from jaxrl_mini.tasks.compiled import ENDED, CompiledTask
from jaxrl_mini.tasks.situations import Level, Situations, Stacked, situations
from jaxrl_mini.types import AnyArray, Exact


def taken(
    found: Situations, probs: Float[np.ndarray, "context action run"]
) -> Iterator[tuple[Level, Float[np.ndarray, "situation run"], Float[np.ndarray, "way run"]]]:
    """Step by step: the probability of being in each situation, and of leaving it each way, by instance."""
    mass = np.repeat(found.start[:, None], probs.shape[-1], axis=1)
    for level in found.levels:
        flow = mass[level.source] * probs[level.context[level.source], level.action] * level.chance[:, None]
        yield level, mass, flow
        goes_on = level.target != ENDED
        mass = summed(flow[goes_on], level.target[goes_on])


def summed(
    values: Float[np.ndarray, "row run"], places: Int[np.ndarray, " row"], size: int | None = None
) -> np.ndarray:
    """The sums of the rows that go to each place, in their order."""
    from scipy import sparse  # for which a run of the article's task should not wait

    size = int(places.max(initial=-1)) + 1 if size is None else size
    chosen = sparse.csr_matrix((np.ones(len(places)), (places, np.arange(len(places)))), (size, len(places)))
    return np.asarray(chosen @ values)


def by_instance(
    task: CompiledTask, log_probs: Float[AnyArray, "context action *run"], split: str
) -> tuple[Float[np.ndarray, "instance *run"], Float[np.ndarray, "instance *run"]]:
    """Success probability and expected actions of a policy on each instance of a split, in float64."""
    probs, size = np.exp(np.asarray(log_probs, np.float64)), len(task.splits[split])
    runs = probs.shape[2:]
    success = actions = np.zeros((size, int(np.prod(runs))))
    for level, mass, flow in taken(situations(task, split), probs.reshape(*probs.shape[:2], -1)):
        success = success + summed(flow * level.accepted[:, None], level.instance[level.source], size)
        actions = actions + summed(mass, level.instance, size)
    return success.reshape(size, *runs), actions.reshape(size, *runs)


def exact(task: CompiledTask, log_probs: Float[AnyArray, "context action *run"], split: str) -> Exact:
    """Success probability and expected actions of a policy on a split, whose instances are equally likely."""
    success, actions = by_instance(task, log_probs, split)
    return Exact(success.mean(axis=0), actions.mean(axis=0))


def exact_of_logits(task: CompiledTask, logits: Float[AnyArray, "context action *run"], split: str) -> Exact:
    """`exact` of a table policy."""
    return exact(task, log_probs_of_logits(logits), split)


# Two passes over all steps


Gain = Callable[[Level, Any], Float[AnyArray, "way kind *run"]]
"""What an episode gains by leaving the situations of a step each way, in as many kinds as one likes; given the number
of the step."""


def reach(found: Stacked, probs: Float[AnyArray, "context action *run"]) -> Float[AnyArray, "step situation *run"]:
    """The probability of being in each situation, its instance being given."""
    xp = probs.__array_namespace__()
    start = _wide(xp.asarray(found.start, dtype=probs.dtype), probs.ndim - 1)

    def step(mass: AnyArray, level: Level) -> tuple[AnyArray, AnyArray]:
        return added(mass[level.source] * _leaving(level, probs), level.target, len(mass)), mass

    return scan(step, xp.broadcast_to(start, (*start.shape[:1], *probs.shape[2:])), found.levels)[1]


def ahead(
    found: Stacked,
    probs: Float[AnyArray, "context action *run"],
    mass: Float[AnyArray, "step situation *run"],
    gain: Gain,
    *,
    kinds: int,
    instances: int = 1,
) -> tuple[Float[AnyArray, "situation kind *run"], Float[AnyArray, "instance context action kind *run"]]:
    """What an episode gains from a situation on, in expectation, and from a choice on.

    Entry [instance, context, action] of the latter is the expectation of what an episode gains there and later if it
    takes the action there, and of 0 if it does not. It does so once at most, for it is in no context twice.

    Args:
      found: the situations.
      probs: of the actions in every context.
      mass: by `reach`.
      gain: of each way.
      kinds: of gains.
      instances: that are told apart: all of them; or 1, and the sum is taken over them.

    Returns:
      The former for the situations of the first step, and the latter; each as if its instance were given.
    """
    xp, steps = probs.__array_namespace__(), len(found.levels.context)
    contexts, actions, *run = probs.shape
    views = contexts // steps

    def step(value: AnyArray, here: tuple[Any, Level, AnyArray]) -> tuple[AnyArray, AnyArray]:
        number, level, mass = here
        on = xp.where(_wide(level.target == ENDED, value.ndim), 0.0, value[level.target])
        on = on + gain(level, number)
        choice = level.context[level.source] % views * actions + level.action
        if instances > 1:
            choice = choice + level.instance[level.source] * (views * actions)
        leaving = _leaving(level, probs)
        by_choice = added((mass[level.source] * leaving)[:, None] * on, choice, instances * views * actions)
        return added(leaving[:, None] * on, level.source, len(value)), by_choice

    nothing = xp.zeros((mass.shape[1], kinds, *run), dtype=probs.dtype)
    value, by_choice = scan(step, nothing, (np.arange(steps), found.levels, mass), reverse=True)
    by_choice = xp.moveaxis(by_choice.reshape(steps, instances, views, actions, kinds, *run), 1, 0)
    return value, by_choice.reshape(instances, contexts, actions, kinds, *run)


def _leaving(level: Level, probs: Float[AnyArray, "context action *run"]) -> Float[AnyArray, "way *run"]:
    """The probability of leaving a situation each way, once there."""
    flat = probs.reshape(-1, *probs.shape[2:])
    choice = level.context[level.source] * probs.shape[1] + level.action
    return flat[choice] * _wide(flat.__array_namespace__().asarray(level.chance, dtype=flat.dtype), flat.ndim)


def _wide(array: AnyArray, ndim: int) -> AnyArray:
    """With further axes of length 1."""
    return array.reshape(*array.shape, *[1] * (ndim - array.ndim))


def added(
    values: Float[AnyArray, "row *rest"], places: Int[AnyArray, " row"], size: int
) -> Float[AnyArray, "place *rest"]:
    """The sums of the rows that go to each place; to `ENDED`, none does."""
    if isinstance(values, np.ndarray):
        kept, flat = places != ENDED, values.reshape(len(values), -1)
        return summed(flat[kept], places[kept], size).reshape(size, *values.shape[1:])
    sums = jnp.zeros((size, *values.shape[1:]), values.dtype)
    return sums.at[jnp.where(places == ENDED, size, places)].add(values, mode="drop")
