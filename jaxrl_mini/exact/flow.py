"""How probability flows through a table policy's states: how much comes where, moves where, and is handed in where.

All of it is exact, by one pass over the steps. An array over states is written as [step, variant] here.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, NUM_STATES, NUM_VARIANTS
from jaxrl_mini.tasks.tables import TABLES

MOVES_ON = ~TABLES.submits[..., None] & (TABLES.next_variant[..., None] == np.arange(NUM_VARIANTS))
"""bool [step, variant, action, next variant]: the action leads on to that artifact; past the last step, to the end of
an episode that handed nothing in."""

MOVES = tuple(map(tuple, np.argwhere(MOVES_ON.any(axis=2)).tolist()))
"""The moves that there are, as (step, variant, next variant)."""

SCALE = 1000
"""Frames hold probabilities as thousandths."""


class Flow(NamedTuple):
    """Where the probability of an episode goes."""

    visits: Float[np.ndarray, "*policy 6 4"]
    """That an episode acts in this state; they sum to the expected number of actions."""
    moves: Float[np.ndarray, "*policy 6 4 4"]
    """That it acts there and goes on to this artifact."""
    submissions: Float[np.ndarray, "*policy 6 4"]
    """That it acts there by handing the artifact in."""


class Likeliest(NamedTuple):
    """The most probable episode."""

    probability: float
    actions: tuple[int, ...]


class Frames(NamedTuple):
    """A policy as it forms, as whole numbers that a page can show one after the other."""

    iterations: Int[np.ndarray, " frame"]
    """Finished iterations."""
    values: Int[np.ndarray, "frame value"]
    """Thousandths, side by side: what `LAYOUT` names."""
    likeliest: list[Likeliest]


LAYOUT = {
    "visits": NUM_STATES,
    "policy": NUM_STATES * NUM_ACTIONS,
    "moves": len(MOVES),
    "submissions": NUM_STATES,
    "out_of_steps": NUM_VARIANTS,
    "submitted": 1,
    "success": 1,
}
"""What a frame holds, in this order, and how many numbers each part has."""


def flow(probs: Float[np.ndarray, "*policy 24 6"]) -> Flow:
    """Follows the probability of an episode from its start.

    visits[0] = (1, 0, 0, 0); moves[step, v, w] = visits[step, v] * sum of p(a) over the actions a that lead from v
    to w; visits[step + 1, w] = sum_v moves[step, v, w].

    Args:
      probs: the probabilities of the actions in every state, of one policy or of several.
    """
    by_step = probs.reshape(*probs.shape[:-2], MAX_STEPS, NUM_VARIANTS, NUM_ACTIONS)
    found = Flow(*(np.zeros((*by_step.shape[:-1], *more)) for more in ((), (NUM_VARIANTS,), ())))
    found.visits[..., 0, 0] = 1.0
    for step in range(MAX_STEPS):
        taken = found.visits[..., step, :, None] * by_step[..., step, :, :]
        found.moves[..., step, :, :] = np.einsum("...va,vaw->...vw", taken, MOVES_ON[step])
        found.submissions[..., step, :] = (taken * TABLES.submits[step]).sum(axis=-1)
        if step + 1 < MAX_STEPS:
            found.visits[..., step + 1, :] = found.moves[..., step, :, :].sum(axis=-2)
    return found


def likeliest(probs: Float[np.ndarray, "24 6"]) -> Likeliest:
    """The most probable episode, from the last step back: best[s] = max_a p(a | s) * best[where a leads]."""
    by_step = probs.reshape(MAX_STEPS, NUM_VARIANTS, NUM_ACTIONS)
    best = np.ones((MAX_STEPS + 1, NUM_VARIANTS))
    for step in reversed(range(MAX_STEPS)):
        onward = np.where(TABLES.ends[step], 1.0, best[step + 1][TABLES.next_variant[step]])
        best[step] = (by_step[step] * onward).max(axis=-1)
    actions: list[int] = []
    step = variant = 0
    ended = False
    while not ended:
        onward = np.where(TABLES.ends[step, variant], 1.0, best[step + 1][TABLES.next_variant[step, variant]])
        action = int(np.argmax(by_step[step, variant] * onward))
        actions.append(action)
        ended = bool(TABLES.ends[step, variant, action])
        step, variant = step + 1, int(TABLES.next_variant[step, variant, action])
    return Likeliest(float(best[0, 0]), tuple(actions))


def evenly(count: int, most: int) -> Int[np.ndarray, " kept"]:
    """Up to `most` (at least 2) of the numbers 0 to count - 1, evenly, always with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def frames(logits: Float[np.ndarray, "iteration 24 6"], accepted: Float[np.ndarray, "4"], most: int) -> Frames:
    """A policy's history as frames.

    Args:
      logits: before the first and after every iteration.
      accepted: the share of verifier inputs that accept each artifact.
      most: how many frames at most; where there are more iterations, they are taken evenly.
    """
    iterations = evenly(len(logits), most)
    probs = softmax(logits[iterations])
    through = flow(probs)
    parts = {
        "visits": through.visits,
        "policy": probs,
        "moves": through.moves[:, *np.transpose(MOVES)],
        "submissions": through.submissions,
        "out_of_steps": through.moves[:, -1].sum(axis=-2),
        "submitted": through.submissions.sum(axis=(-2, -1)),
        "success": (through.submissions * accepted).sum(axis=(-2, -1)),
    }
    flat = np.concatenate([parts[name].reshape(len(probs), size) for name, size in LAYOUT.items()], axis=1)
    return Frames(iterations, np.rint(SCALE * flat).astype(int), [likeliest(one) for one in probs])


def softmax(logits: Float[np.ndarray, "*policy 24 6"]) -> Float[np.ndarray, "*policy 24 6"]:
    """Probabilities of the actions, in float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
