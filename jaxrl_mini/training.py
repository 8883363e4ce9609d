"""Training: the initial state, the optimizer steps on a batch, one iteration, and the loop of iterations.

Pure functions without input or output. The table policy's functions take many runs at once, on a last axis `run`.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_mini import objective, rollout
from jaxrl_mini.policies import table
from jaxrl_mini.task import NUM_ACTIONS
from jaxrl_mini.types import AnyArray, Credit, Episodes, Seeds, Settings
from jaxrl_mini.xla import stage, total

MAX_GRADIENT_NORM = 1.0
CHUNK = 20
"""Iterations per call of `advance`, at most; also how often the command line reports."""

REFERENCE_LOG_PROB = -float(np.log(NUM_ACTIONS))
"""The table policy's reference is its initial policy: uniform."""

OPTIMIZER = optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8)


class Sizes(NamedTuple):
    """The settings that shape the program: changing one needs a new compilation."""

    method: str
    groups: int
    group_size: int
    epochs: int


class Batch(NamedTuple):
    """What the loss of a batch depends on, beside the policy that learns."""

    behavior: Float[Array, "context action *run"]
    """Log-probabilities of the policy that sampled."""
    reference: Float[Array, "context action *run"]
    """Log-probabilities of the frozen initial policy."""
    credit: Credit


LossGradient = Callable[[Float[Array, "context action *run"], Batch], Float[Array, "context action *run"]]
"""The derivative of the loss by the policy's log-probabilities. The loss is a sum over contexts, so it takes any part
of a batch."""

Backward = Callable[[Any, Batch, LossGradient], tuple[Float[Array, "context action *run"], Any]]
"""A policy's log-probabilities in the contexts of a batch, and the loss's gradient by the policy's parameters."""


class State(NamedTuple):
    """Everything a run's future depends on, beside its settings and the number of the next iteration."""

    params: Any
    """The policy's parameters: logits[state, action, *run], or a language model's weights."""
    moments: optax.ScaleByAdamState
    """Adam's moments, and the number of steps taken, [*run]."""


class Log(NamedTuple):
    """What one iteration leaves behind; `advance` puts an axis `iteration` in front of every array."""

    episodes: Episodes
    """The batch, [group, episode, *run]."""
    credit: Credit
    """What the episodes were credited with, by [context, action, *run]."""
    behavior: Float[AnyArray, "context action *run"]
    """Log-probabilities of the policy that sampled the batch."""
    log_probs: Float[AnyArray, "context action *run"]
    """Log-probabilities before the last optimizer step."""
    gradient_norm: Float[AnyArray, "*run"]
    """The gradient's norm at the last optimizer step, before it is clipped."""
    params: Any
    """The policy after the iteration; None for a language model."""


def initial_state(params: Any, run_shape: tuple[int, ...] = ()) -> State:
    """A state before the first iteration; each run counts its own optimizer steps."""
    return State(params, OPTIMIZER.init(params)._replace(count=jnp.zeros(run_shape, jnp.int32)))


def update(
    state: State,
    backward: Backward,
    batch: Batch,
    settings: Settings,
    sizes: Sizes,
) -> tuple[State, Float[Array, "context action *run"], Float[Array, "*run"]]:
    """Takes the optimizer steps on one batch.

    The gradient is scaled by min(1, 1 / (norm + 1e-6)), its norm taken per run over all parameters. With rs-sft, a
    run whose batch retained nothing keeps its parameters and moments as they are, to the bit.

    Returns:
      The new state; the log-probabilities and the gradient's norm of the last step, before it is taken.
    """
    learns = _has_credit(batch.credit) if sizes.method == "rs-sft" else None

    def loss_gradient(log_probs: Array, part: Batch) -> Array:
        return _loss_gradient(log_probs, *part, settings, method=sizes.method)

    def step(_: Array, carry: tuple[State, Array, Array]) -> tuple[State, Array, Array]:
        state, _, _ = carry
        log_probs, gradient = backward(state.params, batch, loss_gradient)
        norm = _norm(gradient, run_axes=settings.lr.ndim)
        return _adam_step(state, gradient, norm, learns, settings.lr), log_probs, norm

    start = (state, jnp.zeros_like(batch.behavior), jnp.zeros_like(settings.lr))
    return jax.lax.fori_loop(0, sizes.epochs, step, start)


def whole_batch(log_probs_of: Callable[[Any], Float[Array, "context action *run"]]) -> Backward:
    """The `Backward` of a policy that is asked for all contexts of a batch at once."""

    def backward(params: Any, batch: Batch, loss_gradient: LossGradient) -> tuple[Array, Any]:
        log_probs, pullback = jax.vjp(log_probs_of, params)
        (gradient,) = pullback(loss_gradient(log_probs, batch))
        return log_probs, gradient

    return backward


@partial(stage, static_argnames="method")
def _loss_gradient(
    log_probs: Float[Array, "context action *run"],
    behavior: Float[Array, "context action *run"],
    reference: Float[Array, "context action *run"],
    credit: Credit,
    settings: Settings,
    *,
    method: str,
) -> Float[Array, "context action *run"]:
    """The loss is a sum over contexts and actions, so its gradient by the log-probabilities is elementwise."""

    def loss(log_probs: Array) -> Array:
        return jnp.sum(objective.loss_terms(log_probs, behavior, reference, credit, settings, method))

    return jax.grad(loss)(log_probs)


@partial(stage, static_argnames="run_axes")
def _norm(gradient: Any, *, run_axes: int) -> Float[Array, "*run"]:
    """The Euclidean norm over all parameters, per run: the last `run_axes` axes are kept."""
    if not run_axes:
        return optax.tree.norm(gradient)
    squares = [
        functools.reduce(lambda x, _: total(x), range(leaf.ndim - run_axes), jnp.square(leaf))
        for leaf in jax.tree.leaves(gradient)
    ]
    return jnp.sqrt(functools.reduce(jnp.add, squares))


@stage
def _has_credit(credit: Credit) -> Bool[Array, "*run"]:
    return total(total(credit.plus)) > 0


@stage
def _adam_step(
    state: State,
    gradient: Any,
    norm: Float[Array, "*run"],
    learns: Bool[Array, "*run"] | None,
    lr: Float[Array, "*run"],
) -> State:
    """One step, but where `learns` is False, all of the state stays as it is."""
    scale = jnp.minimum(1.0, MAX_GRADIENT_NORM / (norm + 1e-6))
    step, moments = OPTIMIZER.update(jax.tree.map(lambda g: g * scale, gradient), state.moments)
    params = jax.tree.map(lambda p, s: p - lr * s, state.params, step)
    after = State(params, moments)
    return after if learns is None else jax.tree.map(lambda new, old: jnp.where(learns, new, old), after, state)


def learn(
    state: State,
    episodes: Episodes,
    rewards: Float[Array, "group episode *run"],
    behavior: Float[Array, "24 6 *run"],
    reference: Float[Array, "24 6 *run"],
    settings: Settings,
    sizes: Sizes,
) -> tuple[State, Log]:
    """The table policy learns from graded episodes, which it sampled with log-probabilities `behavior`."""
    advantages = objective.advantages(rewards, method=sizes.method)
    credit = objective.state_credit(episodes, rewards, advantages)
    state, log_probs, norm = update(
        state, whole_batch(table.log_probs), Batch(behavior, reference, credit), settings, sizes
    )
    return state, Log(episodes, credit, behavior, log_probs, norm, state.params)


def iterate(
    state: State,
    seeds: Seeds,
    settings: Settings,
    number: Int[Array, ""],
    verdicts: Bool[Array, "group variant"],
    sizes: Sizes,
) -> tuple[State, Log]:
    """One iteration of the table policy: sample episodes, grade them, learn from them."""
    behavior = table.log_probs(state.params)
    episodes = rollout.rollout(
        behavior, seeds, number, stream=rollout.TRAINING, groups=sizes.groups, group_size=sizes.group_size
    )
    reference = jnp.full_like(behavior, REFERENCE_LOG_PROB)
    return learn(state, episodes, _grade(episodes, verdicts), behavior, reference, settings, sizes)


@stage
def _grade(episodes: Episodes, verdicts: Bool[Array, "group variant"]) -> Float[Array, "group episode *run"]:
    return jnp.asarray(rollout.grade(episodes, verdicts))


@partial(jax.jit, static_argnames="sizes")
def advance(
    state: State,
    seeds: Seeds,
    settings: Settings,
    verdicts: Bool[Array, "20 group variant"],
    first: Int[Array, ""],
    count: Int[Array, ""],
    sizes: Sizes,
) -> tuple[State, Log]:
    """The iterations from `first` to `first + count - 1`, with count from 1 to 20.

    The count is data, so that any number of iterations, in chunks of any size, runs the same compiled loop.

    Returns:
      The new state, and a log of 20 iterations, of which `count` are filled.
    """

    def body(i: Array, carry: tuple[State, Log]) -> tuple[State, Log]:
        state, logs = carry
        state, log = iterate(state, seeds, settings, first + i, verdicts[i], sizes)
        return state, jax.tree.map(lambda rows, row: jax.lax.dynamic_update_index_in_dim(rows, row, i, 0), logs, log)

    _, log = jax.eval_shape(partial(iterate, sizes=sizes), state, seeds, settings, first, verdicts[0])
    logs = jax.tree.map(lambda leaf: jnp.zeros((CHUNK, *leaf.shape), leaf.dtype), log)
    return jax.lax.fori_loop(0, count, body, (state, logs))
