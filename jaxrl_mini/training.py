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
from jaxrl_mini.types import Credit, Episodes, Metrics, Seeds, Settings
from jaxrl_mini.xla import stage, total

MAX_GRADIENT_NORM = 1.0
CHUNK = 20
"""Iterations per call of `advance`, at most; also how often the command line reports."""

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
    """What iterations leave behind."""

    metrics: Float[Array, "iteration metric *run"]
    """The fields of `Metrics`, in their order."""
    episodes: Episodes
    """The batches, [iteration, group, episode, *run]."""
    params: Any
    """The policy after each iteration, [iteration, ...]."""


def initial_state(params: Any, run_shape: tuple[int, ...] = ()) -> State:
    """A state before the first iteration; each run counts its own optimizer steps."""
    return State(params, OPTIMIZER.init(params)._replace(count=jnp.zeros(run_shape, jnp.int32)))


def update(
    state: State,
    backward: Backward,
    batch: Batch,
    settings: Settings,
    sizes: Sizes,
) -> tuple[State, dict[str, Float[Array, "*run"]]]:
    """Takes the optimizer steps on one batch.

    The gradient is scaled by min(1, 1 / (norm + 1e-6)), its norm taken per run over all parameters. With rs-sft, a
    run whose batch retained nothing keeps its parameters and moments as they are, to the bit.

    Returns:
      The new state, and the metrics of the last step, computed before it is taken.
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
    state, log_probs, norm = jax.lax.fori_loop(0, sizes.epochs, step, start)
    metrics = _step_metrics(log_probs, *batch, settings, sizes.method)
    return state, {**metrics, "gradient_norm": norm}


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


def _step_metrics(
    log_probs: Array, behavior: Array, reference: Array, credit: Credit, settings: Settings, method: str
) -> dict[str, Array]:
    rows = _metric_rows(log_probs, behavior, reference, credit, settings, method=method)
    loss, kl, entropy, outside, counts = (_over_contexts(row) for row in rows)
    return {
        "loss": loss,
        "mean_kl": kl / counts,
        "entropy": entropy / counts,
        "ratio_outside_clip_fraction": outside / counts,
    }


@partial(stage, static_argnames="method")
def _metric_rows(
    log_probs: Array, behavior: Array, reference: Array, credit: Credit, settings: Settings, *, method: str
) -> list[Float[Array, "context *run"]]:
    counts = total(credit.counts, axis=1)
    outside = objective.outside_clip(log_probs, behavior, settings.clip)
    return [
        total(objective.loss_terms(log_probs, behavior, reference, credit, settings, method), axis=1),
        counts * total(objective.kl_terms(log_probs, reference), axis=1),
        counts * total(-jnp.exp(log_probs) * log_probs, axis=1),
        total(jnp.where(outside, credit.counts, 0.0), axis=1),
        counts,
    ]


_over_contexts = stage(total)


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
) -> tuple[State, Metrics]:
    """The table policy learns from graded episodes, sampled at log-probabilities `behavior`, and says how that went."""
    advantages = objective.advantages(rewards, method=sizes.method)
    credit = objective.state_credit(episodes, rewards, advantages)
    state, last_step = update(state, _table_backward, Batch(behavior, reference, credit), settings, sizes)
    return state, Metrics(**last_step, **batch_metrics(rewards, sizes=sizes))


def _table_backward(
    params: Float[Array, "24 6 *run"], batch: Batch, loss_gradient: LossGradient
) -> tuple[Float[Array, "24 6 *run"], Float[Array, "24 6 *run"]]:
    log_probs, pullback = jax.vjp(table.log_probs, params)
    (gradient,) = pullback(loss_gradient(log_probs, batch))
    return log_probs, gradient


@partial(stage, static_argnames="sizes")
def batch_metrics(rewards: Float[Array, "group episode *run"], *, sizes: Sizes) -> dict[str, Array]:
    """Those of `Metrics` that say how a batch went, not how the policy learned from it."""
    successes = total(rewards, axis=1)
    retained = total(successes)
    learns = retained > 0 if sizes.method == "rs-sft" else jnp.full(retained.shape, True)
    return {
        "optimizer_steps": jnp.where(learns, float(sizes.epochs), 0.0),
        "train_success_rate": retained / (sizes.groups * sizes.group_size),
        "mixed_groups": total(((successes > 0) & (successes < sizes.group_size)).astype(jnp.float32)),
        "retained_episodes": retained,
    }


def iterate(
    state: State,
    seeds: Seeds,
    settings: Settings,
    number: Int[Array, ""],
    verdicts: Bool[Array, "group variant"],
    sizes: Sizes,
) -> tuple[State, Metrics, Episodes]:
    """One iteration of the table policy: sample episodes, grade them, learn from them."""
    behavior = table.log_probs(state.params)
    episodes = rollout.rollout(
        behavior, seeds, number, stream=rollout.TRAINING, groups=sizes.groups, group_size=sizes.group_size
    )
    rewards = rollout.grade(episodes, verdicts)
    reference = jnp.full_like(behavior, -np.log(NUM_ACTIONS))
    state, metrics = learn(state, episodes, rewards, behavior, reference, settings, sizes)
    return state, metrics, episodes


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
    runs = seeds.shape
    rows = jnp.zeros((CHUNK, len(Metrics._fields), *runs))
    packed = jnp.zeros((CHUNK, sizes.groups, sizes.group_size, *runs), jnp.int32)
    logits = jnp.zeros((CHUNK, *state.params.shape))

    def body(i: Array, carry: tuple[State, Array, Array, Array]) -> tuple[State, Array, Array, Array]:
        state, rows, packed, logits = carry
        state, metrics, episodes = iterate(state, seeds, settings, first + i, verdicts[i], sizes)
        return (
            state,
            jax.lax.dynamic_update_index_in_dim(rows, _stacked(metrics), i, 0),
            jax.lax.dynamic_update_index_in_dim(packed, episodes.packed, i, 0),
            jax.lax.dynamic_update_index_in_dim(logits, state.params, i, 0),
        )

    state, rows, packed, logits = jax.lax.fori_loop(0, count, body, (state, rows, packed, logits))
    return state, Log(rows, Episodes(packed), logits)


@stage
def _stacked(metrics: Metrics) -> Float[Array, "metric *run"]:
    return jnp.stack(metrics)
