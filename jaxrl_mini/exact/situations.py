"""Exact expectations of a table policy on any task, by dynamic programming over situations.

A situation is a node together with the instance that is played: where an episode is, as nobody but the task knows it.
The policy sees its context, the verifier its instance.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxrl_mini.policies.table import log_probs_of_logits
from jaxrl_mini.tasks.compiled import ENDED, CompiledTask
from jaxrl_mini.types import AnyArray, Exact


class Level(NamedTuple):
    """The situations of a step, and the ways out of them: one for each action and draw of chance."""

    instance: Int[np.ndarray, " situation"]
    """Its place in the split."""
    context: Int[np.ndarray, " situation"]
    source: Int[np.ndarray, " way"]
    """The situation that it leads out of."""
    action: Int[np.ndarray, " way"]
    chance: Float[np.ndarray, " way"]
    target: Int[np.ndarray, " way"]
    """A situation of the next step; `ENDED` where the episode is over."""
    accepted: Float[np.ndarray, " way"]
    """The probability that the verifier accepts what is handed in; 0 where nothing is."""


class Situations(NamedTuple):
    """Of one split of a task."""

    start: Float[np.ndarray, " situation"]
    """The probability of each situation of the first step, its instance being given."""
    levels: list[Level]


@lru_cache(maxsize=64)
def situations(task: CompiledTask, split: str) -> Situations:
    """All that an episode of a split can be in."""
    members = np.array(task.splits[split])
    place = np.full(len(task.instances), -1)
    place[members] = np.arange(len(members))
    starts = place[task.start_instance] >= 0
    pairs, numbers = np.unique(
        np.stack([task.start_node[starts], place[task.start_instance[starts]]]), axis=1, return_inverse=True
    )
    start = np.bincount(numbers.ravel(), task.start_chance[starts], pairs.shape[1])
    accepted = np.concatenate([task.accepted[:, members], np.zeros((1, len(members)))])  # the last row: nothing
    first, levels = np.searchsorted(task.node, np.arange(len(task.steps) + 1)), []
    while pairs.shape[1]:
        node, instance = pairs
        count = first[node + 1] - first[node]
        source = np.repeat(np.arange(len(node)), count)
        way = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count) + first[node[source]]
        after, ended = task.next_node[way], task.next_node[way] == ENDED
        onward = np.stack([after, instance[source]])[:, ~ended]
        pairs, numbers = np.unique(onward, axis=1, return_inverse=True)
        target = np.full(len(source), ENDED)
        target[~ended] = numbers.ravel()
        levels.append(
            Level(
                instance=instance,
                context=task.contexts[node],
                source=source,
                action=task.action[way],
                chance=task.chance[way],
                target=target,
                accepted=np.where(ended, accepted[task.submission[way], instance[source]], 0.0),
            )
        )
    return Situations(start, levels)


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
