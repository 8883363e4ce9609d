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
from jaxtyping import Array, Bool, Float, Int

from jaxrl_mini import objective
from jaxrl_mini.config import DEFAULT_VARIANT, Variant
from jaxrl_mini.episodes import play, rollout
from jaxrl_mini.episodes.grounds import Grounds
from jaxrl_mini.episodes.packed import Episodes
from jaxrl_mini.episodes.play import Play
from jaxrl_mini.episodes.rewards import rewards_of, worrying
from jaxrl_mini.exact import expected
from jaxrl_mini.machine.xla import repeat, stage, total
from jaxrl_mini.policies import table
from jaxrl_mini.tasks.compiled import CompiledTask
from jaxrl_mini.tasks.repair import NUM_ACTIONS, NUM_STATES
from jaxrl_mini.types import AnyArray, Credit, Distribution, Seeds, Settings

MAX_GRADIENT_NORM = 1.0
CHUNK = 20
"""Iterations per call of `advance`, at most; also how often the command line reports."""


class Sizes(NamedTuple):
    """The settings that shape the program: changing one needs a new compilation."""

    method: str
    groups: int
    group_size: int
    epochs: int
    variant: Variant = DEFAULT_VARIANT
    task: CompiledTask | None = None
    """None is the article's, whose episodes fit in an integer each."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of a policy's logits: contexts and actions."""
        return (NUM_STATES, NUM_ACTIONS) if self.task is None else self.task.shape


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


class Moments(NamedTuple):
    """Adam's."""

    count: Int[AnyArray, "*run"]
    """Steps taken."""
    first: Any
    """Running means of the gradient, like the parameters."""
    second: Any
    """Running means of its square."""


class State(NamedTuple):
    """Everything a run's future depends on, beside its settings and the number of the next iteration."""

    params: Any
    """The policy's parameters: logits[state, action, *run], or a language model's weights."""
    moments: Moments
    policy: Any
    """The `Distribution` that the table policy's parameters stand for; None for a language model."""


Backward = Callable[[State, Batch, LossGradient], tuple[Float[Array, "context action *run"], Any]]
"""A policy's log-probabilities in the contexts of a batch, and the loss's gradient by the policy's parameters."""


class Log(NamedTuple):
    """What an iteration leaves behind."""

    episodes: Episodes | Play
    """The batch, [group, episode, *run]."""
    credit: Credit
    """What the episodes were credited with, by [context, action, *run]."""
    behavior: Float[AnyArray, "context action *run"]
    """Log-probabilities of the policy that sampled the batch."""
    log_probs: Float[AnyArray, "context action *run"]
    """Log-probabilities before the last optimizer step."""
    gradient_norm: Float[AnyArray, "*run"]
    """The gradient's norm at the last optimizer step, before it is clipped."""
    rewards: Float[AnyArray, "group episode *run"] | None = None
    """The rewards, where they are not the verifier's verdicts."""
    passed: Float[AnyArray, "group episode *run"] | None = None
    """The verifier's verdicts, where they are drawn."""


def initial_state(params: Any, policy: Distribution | None = None, run_shape: tuple[int, ...] = ()) -> State:
    """A state before the first iteration; each run counts its own optimizer steps."""
    first, second = (jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params) for _ in range(2))
    return State(params, Moments(np.zeros(run_shape, np.int32), first, second), policy)


def update(
    state: State,
    backward: Backward,
    batch: Batch,
    settings: Settings,
    sizes: Sizes,
    *,
    policy_of: Callable[[Any], Distribution | None] = lambda params: None,
) -> tuple[State, Float[Array, "context action *run"], Float[Array, "*run"]]:
    """Takes the optimizer steps on one batch.

    The gradient is scaled by min(1, 1 / (norm + 1e-6)), its norm taken per run over all parameters. With rs-sft, a
    run whose batch retained nothing keeps its parameters and moments as they are, to the bit.

    Returns:
      The new state; the log-probabilities and the gradient's norm of the last step, before it is taken.
    """
    learns = _has_credit(batch.credit) if sizes.method == "rs-sft" else None

    def loss_gradient(log_probs: Array, part: Batch) -> Array:
        return _loss_gradient(log_probs, *part, settings, method=sizes.method, variant=sizes.variant)

    def step(_: Array, carry: tuple[State, Array, Array]) -> tuple[State, Array, Array]:
        state, _, _ = carry
        log_probs, gradient = backward(state, batch, loss_gradient)
        params, moments, norm = _optimizer_step(state.params, state.moments, gradient, learns, settings.lr)
        return State(params, moments, policy_of(params)), log_probs, norm

    # Every step writes its own log-probabilities and norm over what it is given.
    return repeat(sizes.epochs, step, (state, batch.behavior, settings.lr))


@partial(stage, static_argnames=("method", "variant"))
def _loss_gradient(
    log_probs: Float[Array, "context action *run"],
    behavior: Float[Array, "context action *run"],
    reference: Float[Array, "context action *run"],
    credit: Credit,
    settings: Settings,
    *,
    method: str,
    variant: Variant,
) -> Float[Array, "context action *run"]:
    """The loss is a sum over contexts and actions, so its gradient by the log-probabilities is elementwise."""

    def loss(log_probs: Array) -> Array:
        return jnp.sum(objective.loss_terms(log_probs, behavior, reference, credit, settings, method, variant))

    return jax.grad(loss)(log_probs)


@stage
def _optimizer_step(
    params: Any,
    moments: Moments,
    gradient: Any,
    learns: Bool[Array, "*run"] | None,
    lr: Float[Array, "*run"],
) -> tuple[Any, Moments, Float[Array, "*run"]]:
    """One step, but where `learns` is False, parameters and moments stay as they are; also the gradient's norm."""
    norm, scale = _norm_and_scale(gradient, run_axes=lr.ndim)
    after = _adam_step(params, moments, gradient, scale, lr)
    if learns is not None:
        after = jax.tree.map(partial(jnp.where, learns), after, (params, moments))
    return *after, norm


@partial(stage, static_argnames="run_axes")
def _norm_and_scale(gradient: Any, *, run_axes: int) -> tuple[Float[Array, "*run"], Float[Array, "*run"]]:
    """The Euclidean norm over all parameters, per run (the last `run_axes` axes), and the factor that clips it."""
    if run_axes:
        squares = [
            functools.reduce(lambda x, _: total(x), range(leaf.ndim - run_axes), jnp.square(leaf))
            for leaf in jax.tree.leaves(gradient)
        ]
        norm = jnp.sqrt(functools.reduce(jnp.add, squares))
    else:
        norm = jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(gradient)))
    return norm, jnp.minimum(1.0, MAX_GRADIENT_NORM / (norm + 1e-6))


def _adam_step(
    params: Any,
    moments: Moments,
    gradient: Any,
    scale: Float[Array, "*run"],
    lr: Float[Array, "*run"],
) -> tuple[Any, Moments]:
    """Leaf by leaf: those of the same shape are traced once."""

    def step(leaf: Array, first: Array, second: Array, slope: Array) -> tuple[Array, Moments]:
        return _adam_step_of_leaf(leaf, Moments(moments.count, first, second), slope, scale, lr)

    steps = jax.tree.map(step, params, moments.first, moments.second, gradient)
    after, counted = jax.tree.transpose(jax.tree.structure(params), None, steps)
    return after, Moments(jax.tree.leaves(counted.count)[0], counted.first, counted.second)


@stage
def _adam_step_of_leaf(
    params: Float[Array, "..."],
    moments: Moments,
    gradient: Float[Array, "..."],
    scale: Float[Array, "*run"],
    lr: Float[Array, "*run"],
) -> tuple[Float[Array, "..."], Moments]:
    import optax  # a process that finds its program compiled has no use for it

    adam = optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8)
    step, after = adam.update(gradient * scale, optax.ScaleByAdamState(*moments))
    return params - lr * step, Moments(*after)


@stage
def _has_credit(credit: Credit) -> Bool[Array, "*run"]:
    return total(total(credit.plus)) > 0


@partial(stage, static_argnames="sizes")
def learn(
    state: State,
    episodes: Episodes | Play,
    rewards: Float[Array, "group episode *run"],
    reference: Float[Array, "context action *run"],
    settings: Settings,
    sizes: Sizes,
    credit: Credit | None = None,
) -> tuple[State, Log]:
    """The table policy learns from rewarded episodes, which it sampled; or from `credit`, if it is given."""
    if credit is None:
        credit = _credit(episodes, rewards, sizes=sizes)
    batch = Batch(state.policy.log_probs, reference, credit)
    state, log_probs, norm = update(state, _table_backward, batch, settings, sizes, policy_of=table.distribution)
    logged = None if sizes.variant.reward == "verifier" else rewards
    return state, Log(episodes, batch.credit, batch.behavior, log_probs, norm, logged)


@partial(stage, static_argnames="sizes")
def _credit(episodes: Episodes | Play, rewards: Float[Array, "group episode *run"], *, sizes: Sizes) -> Credit:
    advantages = objective.advantages(rewards, method=sizes.method, advantage=sizes.variant.advantage)
    if isinstance(episodes, Episodes):
        return objective.state_credit(episodes, rewards, advantages, sizes.variant)
    contexts, actions = sizes.shape
    views = contexts // len(episodes.choices)
    return objective.play_credit(episodes, rewards, advantages, sizes.variant, views=views, actions=actions)


def _table_backward(state: State, batch: Batch, loss_gradient: LossGradient) -> tuple[Array, Array]:
    gradient = loss_gradient(state.policy.log_probs, batch)
    return state.policy.log_probs, table.logit_gradient(state.policy.probs, gradient)


def iterate(
    state: State,
    seeds: Seeds,
    reference: Float[Array, "context action *run"],
    settings: Settings,
    number: Int[Array, ""],
    verdicts: Bool[Array, "20 group variant"] | Grounds,
    sizes: Sizes,
) -> tuple[State, Log]:
    """One iteration of the table policy: sample episodes, grade them, learn from them."""
    if isinstance(verdicts, Grounds):
        return _iterate_any(state, seeds, reference, settings, number, verdicts, sizes)
    episodes = rollout.rollout(
        state.policy.probs, seeds, number, stream=rollout.TRAINING, groups=sizes.groups, group_size=sizes.group_size
    )
    rewards = rewards_of(episodes, verdicts, seeds, number, reward=sizes.variant.reward)
    credit = None
    if sizes.variant.exact_gradient:
        credit = expected.expected_credit(
            state.policy.probs,
            verdicts[number % CHUNK],
            group_size=sizes.group_size,
            method=sizes.method,
            variant=sizes.variant,
        )
    return learn(state, episodes, rewards, reference, settings, sizes=sizes, credit=credit)


def _iterate_any(
    state: State,
    seeds: Seeds,
    reference: Float[Array, "context action run"],
    settings: Settings,
    number: Int[Array, ""],
    grounds: Grounds,
    sizes: Sizes,
) -> tuple[State, Log]:
    """`iterate` on any task."""
    stream, reward = rollout.TRAINING, sizes.variant.reward
    played = play.play(
        state.policy.probs, seeds, number, grounds.tables, grounds.members,
        stream=stream, groups=sizes.groups, group_size=sizes.group_size,
    )  # fmt: skip
    passed = play.grade(played, grounds.accepted, seeds, number, stream=stream)
    rewards = passed if reward == "verifier" else worrying(passed, seeds, number, reward=reward)
    credit = None
    if grounds.situations is not None:
        credit = expected.expected_play_credit(
            state.policy.probs, grounds.situations, instances=len(grounds.members), groups=sizes.groups,
            group_size=sizes.group_size, method=sizes.method, variant=sizes.variant,
        )  # fmt: skip
    state, log = learn(state, played, rewards, reference, settings, sizes=sizes, credit=credit)
    return state, log._replace(passed=passed)


def advance(
    state: State,
    log: Log,
    seeds: Seeds,
    reference: Float[Array, "context action *run"],
    settings: Settings,
    verdicts: Bool[Array, "20 group variant"] | Grounds,
    first: Int[Array, ""],
    end: Int[Array, ""],
    sizes: Sizes,
) -> tuple[State, Log]:
    """The iterations from `first` to `end - 1`, which all lie in one chunk of 20.

    Both are data, so that any number of iterations, in calls of any size, runs the same compiled loop.

    Args:
      state: before the first of them.
      log: any; `empty_log`, or an earlier one.
      seeds: of the runs.
      reference: log-probabilities of the frozen initial policy.
      settings: of the runs.
      verdicts: the verifier's, for every iteration of the chunk; of another task than the article's, what it is
        played and graded by.
      first: the number of the first iteration.
      end: the number after that of the last one; if it is `first`, nothing changes.
      sizes: the settings that shape the program.

    Returns:
      The new state, and the log of the last iteration.
    """

    def body(number: Array, carry: tuple[State, Log]) -> tuple[State, Log]:
        return iterate(carry[0], seeds, reference, settings, number, verdicts, sizes)

    return jax.lax.fori_loop(first, end, body, (state, log))


def empty_log(sizes: Sizes, run_shape: tuple[int, ...]) -> Log:
    """What `advance` writes over."""
    by_action = np.zeros((*sizes.shape, *run_shape), np.float32)
    packed = np.zeros((sizes.groups, sizes.group_size, *run_shape), np.int32)
    episodes: Episodes | Play = Episodes(packed)
    if sizes.task is not None:
        choices = np.zeros((sizes.task.max_steps, *packed.shape), np.int32)
        episodes = Play(choices, packed, np.zeros((sizes.groups, *run_shape), np.int32))
    taken = by_action if sizes.variant.kl != "exact" else None
    credit = Credit(by_action, by_action, by_action, by_action[:, 0], taken)
    rewards = None if sizes.variant.reward == "verifier" else packed.astype(np.float32)
    passed = None if sizes.task is None else packed.astype(np.float32)
    return Log(episodes, credit, by_action, by_action, np.zeros(run_shape, np.float32), rewards, passed)
