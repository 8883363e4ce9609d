"""Training: the initial state, the optimizer steps on a batch, one iteration, and the loop of iterations.

Pure functions without input or output. The table policy's functions take many runs at once, on a last axis `run`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_mini import evaluation, objective, rollout
from jaxrl_mini.policies import table
from jaxrl_mini.stage import stage
from jaxrl_mini.task import MAX_STEPS
from jaxrl_mini.types import Credit, Episodes, Metrics, Seeds, Settings

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


class State(NamedTuple):
    """Everything a run's future depends on, beside its settings and the number of the next iteration."""

    params: Any
    """The policy's parameters: logits[state, action, *run], or a language model's weights."""
    moments: optax.ScaleByAdamState
    """Adam's moments, and the number of steps taken, [*run]."""


class Batch(NamedTuple):
    """The graded episodes of one iteration."""

    episodes: Episodes
    rewards: Float[Array, "group episode *run"]


def initial_state(params: Any, run_shape: tuple[int, ...] = ()) -> State:
    """A state before the first iteration; each run counts its own optimizer steps."""
    return State(params, OPTIMIZER.init(params)._replace(count=jnp.zeros(run_shape, jnp.int32)))


def update(
    state: State,
    log_probs_of: Callable[[Any], Float[Array, "context action *run"]],
    behavior: Float[Array, "context action *run"],
    reference: Float[Array, "context action *run"],
    credit: Credit,
    settings: Settings,
    method: str,
    epochs: int,
) -> tuple[State, dict[str, Float[Array, "*run"]]]:
    """Takes `epochs` optimizer steps on one batch.

    The gradient is scaled by min(1, 1 / (norm + 1e-6)), its norm taken per run over all parameters. With rs-sft, a
    run whose batch retained nothing keeps its parameters and moments as they are, to the bit.

    Returns:
      The new state, and the metrics of the last step, computed before it is taken.
    """

    def loss_of(params: Any) -> tuple[Array, dict[str, Array]]:
        log_probs = log_probs_of(params)
        kl = objective.kl_divergence(log_probs, reference)
        if method == "rs-sft":
            loss = objective.likelihood_loss(log_probs, credit)
        else:
            loss = objective.surrogate_loss(log_probs, behavior, credit, settings.clip)
            loss += settings.beta * jnp.sum(credit.visits * kl, axis=0)
        share = jnp.sum(credit.counts, axis=1) / jnp.sum(credit.counts, axis=(0, 1))
        metrics = {
            "loss": loss,
            "mean_kl": jnp.sum(share * kl, axis=0),
            "ratio_outside_clip_fraction": objective.ratio_outside_clip_fraction(
                log_probs, behavior, credit.counts, settings.clip
            ),
            "entropy": jnp.sum(share * objective.entropy(log_probs), axis=0),
        }
        return jnp.sum(loss), metrics

    learns = jnp.any(credit.plus > 0, axis=(0, 1)) | (method != "rs-sft")
    for _ in range(epochs):
        gradient, metrics = stage(jax.grad(loss_of, has_aux=True))(state.params)
        norm = stage(partial(gradient_norm, run_axes=settings.lr.ndim))(gradient)
        metrics["gradient_norm"] = norm
        scale = jnp.minimum(1.0, MAX_GRADIENT_NORM / (norm + 1e-6))
        step, moments = OPTIMIZER.update(jax.tree.map(lambda g: g * scale, gradient), state.moments)
        params = jax.tree.map(lambda p, s: p - settings.lr * s, state.params, step)
        state = jax.tree.map(lambda new, old: jnp.where(learns, new, old), State(params, moments), state)
    return state, metrics


def gradient_norm(gradient: Any, run_axes: int) -> Float[Array, "*run"]:
    """The Euclidean norm over all parameters, per run: the last `run_axes` axes are kept."""
    squares = [jnp.sum(jnp.square(leaf), axis=tuple(range(leaf.ndim - run_axes))) for leaf in jax.tree.leaves(gradient)]
    return jnp.sqrt(sum(squares))


def advantages(rewards: Float[Array, "group episode *run"], method: str) -> Float[Array, "group episode *run"]:
    """What an episode's actions are credited with under each method."""
    return objective.retention_weights(rewards) if method == "rs-sft" else objective.group_advantages(rewards)


def learn(
    state: State,
    episodes: Episodes,
    rewards: Float[Array, "group episode *run"],
    reference: Float[Array, "24 6 *run"],
    settings: Settings,
    sizes: Sizes,
) -> tuple[State, dict[str, Array]]:
    """The table policy learns from graded episodes that it sampled, and says how that went."""
    behavior = stage(table.log_probs)(state.params)
    credit = stage(objective.state_credit)(episodes, stage(partial(advantages, method=sizes.method))(rewards))
    state, last_step = update(
        state, table.log_probs, behavior, reference, credit, settings, sizes.method, sizes.epochs
    )
    successes = jnp.sum(rewards, axis=1)
    retained = jnp.sum(successes, axis=0).astype(jnp.int32)
    learns = (retained > 0) | (sizes.method != "rs-sft")
    return state, {
        **last_step,
        "optimizer_steps": jnp.where(learns, sizes.epochs, 0),
        "train_success_rate": retained / (sizes.groups * sizes.group_size),
        "mixed_groups": jnp.sum((successes > 0) & (successes < sizes.group_size), axis=0, dtype=jnp.int32),
        "retained_episodes": retained,
    }


def iterate(
    state: State,
    seeds: Seeds,
    settings: Settings,
    number: Int[Array, ""],
    verdicts: Bool[Array, "group variant"],
    sizes: Sizes,
) -> tuple[State, Metrics, Batch]:
    """One iteration of the table policy: sample episodes, grade them, learn from them."""
    shape = (MAX_STEPS, sizes.groups, sizes.group_size)
    uniforms = stage(partial(rollout.draw_uniforms, stream=rollout.TRAINING, shape=shape))(seeds, iteration=number)
    episodes = rollout.rollout(stage(table.log_probs)(state.params), uniforms)
    rewards = stage(rollout.grade)(episodes, verdicts)
    reference = table.log_probs(table.initial_logits((1,) * seeds.ndim))
    state, metrics = learn(state, episodes, rewards, reference, settings, sizes)
    exact = stage(evaluation.exact)(stage(table.log_probs)(state.params), verdicts.mean(axis=0))
    return state, Metrics(**metrics, exact_success_rate=exact.success_rate), Batch(episodes, rewards)


@partial(jax.jit, static_argnames="sizes")
def advance(
    state: State,
    seeds: Seeds,
    settings: Settings,
    verdicts: Bool[Array, "20 group variant"],
    first: Int[Array, ""],
    count: Int[Array, ""],
    sizes: Sizes,
) -> tuple[State, Metrics, Batch]:
    """The iterations from `first` to `first + count - 1`, with count from 1 to 20.

    The count is data, so that any number of iterations, in chunks of any size, runs the same compiled loop.

    Returns:
      The new state, the metrics [20, run] (of which `count` are filled), and the last batch.
    """

    def body(i: Array, carry: tuple[State, Metrics, Batch]) -> tuple[State, Metrics, Batch]:
        state, history, _ = carry
        state, metrics, batch = iterate(state, seeds, settings, first + i, verdicts[i], sizes)
        return state, jax.tree.map(lambda rows, row: rows.at[i].set(row), history, metrics), batch

    shapes = jax.eval_shape(partial(iterate, sizes=sizes), state, seeds, settings, first, verdicts[0])
    _, history, batch = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    history = jax.tree.map(lambda row: jnp.zeros((CHUNK, *row.shape), row.dtype), history)
    return jax.lax.fori_loop(0, count, body, (state, history, batch))
