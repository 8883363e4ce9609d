"""Training of a language model in the loop of the table policy: the same episodes, credit, loss and optimizer.

Apart from `training`, so that a table policy does not wait for the neural network library.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxrl_mini import compilation, evaluation, objective, rollout, training, verifier
from jaxrl_mini.config import Config
from jaxrl_mini.evaluation import Evaluation
from jaxrl_mini.histories import enumerate_histories, expectations
from jaxrl_mini.policies.language import LanguagePolicy, load_policy
from jaxrl_mini.result import COUNTS, History, Result
from jaxrl_mini.task import MAX_STEPS, NUM_ACTIONS
from jaxrl_mini.training import Backward, Batch, LossGradient, Sizes, State
from jaxrl_mini.types import Episodes, Metrics, Sampled, Seeds, Settings

MICRO_BATCH = 4
"""Episodes of an update at once, by default: on a CPU, faster than more, since their arrays stay in its caches."""
EXACT_EVERY = 10
"""Iterations between exact evaluations, by default."""
EVALUATED_AT_ONCE = 32
"""Episodes played at once in a sampled evaluation."""


def in_parts(
    policy: LanguagePolicy, params: PyTree, rows: objective.Merged, size: int
) -> Float[Array, "context action"]:
    """Log-probabilities in the contexts (row, step), so many rows at a time; 0 in padding."""

    def add(i: Array, log_probs: Array) -> Array:
        part = policy.log_probs(params, _cut(rows.episodes.actions, i, size, axis=1))
        return _put(log_probs, _by_context(part), i)

    contexts = rows.episodes.packed.size * MAX_STEPS
    return lax.fori_loop(0, _parts(rows, size), add, jnp.zeros((contexts, NUM_ACTIONS)))


def accumulated(policy: LanguagePolicy, rows: objective.Merged, size: int) -> Backward:
    """The language model's `Backward`: gradients add up over micro-batches of `size` rows, padding takes none."""

    def backward(params: PyTree, batch: Batch, loss_gradient: LossGradient) -> tuple[Array, PyTree]:
        def add(i: Array, carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            log_probs, gradient = carry
            actions = _cut(rows.episodes.actions, i, size, axis=1)
            part, pullback = jax.vjp(lambda p: _by_context(policy.log_probs(p, actions)), params)
            in_part = jax.tree.map(lambda x: _cut(x, i, size * MAX_STEPS, axis=0), batch)
            (more,) = pullback(loss_gradient(part, in_part))
            return _put(log_probs, part, i), jax.tree.map(jnp.add, gradient, more)

        start = jnp.zeros_like(batch.behavior), jax.tree.map(jnp.zeros_like, params)
        return lax.fori_loop(0, _parts(rows, size), add, start)

    return backward


def _parts(rows: objective.Merged, size: int) -> Int[Array, ""]:
    return (rows.filled + size - 1) // size


def _cut(array: Array, part: Array, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(array, part * size, size, axis)


def _put(array: Array, part: Array, i: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(array, part, i * part.shape[0], axis=0)


def _by_context(log_probs: Float[Array, "step row action"]) -> Float[Array, "context action"]:
    return log_probs.swapaxes(0, 1).reshape(-1, NUM_ACTIONS)


@partial(jax.jit, static_argnames=("policy", "sizes", "micro_batch"), donate_argnames="state")
def iterate(
    policy: LanguagePolicy,
    state: State,
    initial: PyTree,
    seed: Seeds,
    settings: Settings,
    number: Int[Array, ""],
    verdicts: Bool[Array, "group variant"],
    *,
    sizes: Sizes,
    micro_batch: int,
) -> tuple[State, Metrics, Episodes]:
    """One iteration: sample episodes, grade them, learn from them.

    Episodes that took the same actions are scored once, as are the steps before the first action.

    Args:
      policy: the network, and the task in its tokens.
      state: the weights and Adam's moments; its buffers are used up.
      initial: the weights of the frozen reference policy.
      seed: of the run.
      settings: the settings that are data.
      number: of the iteration.
      verdicts: the verifier's, per group.
      sizes: the settings that shape the program.
      micro_batch: rows of a gradient at once.
    """
    batch_shape = (sizes.groups, sizes.group_size)
    uniforms = jnp.stack(rollout.draw_uniforms(seed, rollout.TRAINING, number, *batch_shape))
    actions, behavior = policy.sample(state.params, uniforms.reshape(MAX_STEPS, -1))
    episodes = rollout.episodes_from_actions(actions.reshape(MAX_STEPS, *batch_shape))
    rewards = rollout.grade(episodes, verdicts)
    advantages = objective.advantages(rewards, method=sizes.method)
    padded = -(-rewards.size // micro_batch) * micro_batch
    rows, credit = objective.history_credit(episodes, rewards, advantages, padded)
    batch = Batch(_by_context(behavior[:, rows.first]), in_parts(policy, initial, rows, micro_batch), credit)
    state, last_step = training.update(state, accumulated(policy, rows, micro_batch), batch, settings, sizes)
    return state, Metrics(**last_step, **training.batch_metrics(rewards, sizes=sizes)), episodes


@partial(jax.jit, static_argnames="policy")
def evaluate_chunk(
    policy: LanguagePolicy,
    params: PyTree,
    seed: Seeds,
    chunk: Int[Array, ""],
    count: Int[Array, ""],
    verdicts: Bool[Array, "512 variant"],
) -> Sampled:
    """Plays the first `count` of the chunk's 512 evaluation episodes and sums over them."""
    uniforms = jnp.stack(rollout.draw_uniforms(seed, rollout.EVALUATION, chunk, evaluation.CHUNK, 1))
    parts = uniforms.reshape(MAX_STEPS, -1, EVALUATED_AT_ONCE).swapaxes(0, 1)
    actions = lax.map(lambda part: policy.sample(params, part)[0], parts)  # [part, step, episode]
    episodes = rollout.episodes_from_actions(actions.swapaxes(0, 1).reshape(MAX_STEPS, -1, 1))
    return evaluation.tally(episodes, count, verdicts)


class Run:
    """One run between two iterations."""

    def __init__(self, config: Config):
        self.config = config
        self.policy, self.checkpoint = load_policy(str(config.model), config.dtype or "float32")
        self.sizes = Sizes(config.method, config.groups, config.group_size, config.epochs)
        self.settings = Settings(*(jnp.float32(value) for value in (config.effective_lr, config.clip, config.beta)))
        self.seed = jnp.uint32(config.seed)
        self.state = training.initial_state(jax.tree.map(jnp.copy, self.checkpoint.params))
        self.iteration = 0
        self._histories, self._open_histories = enumerate_histories(), enumerate_histories(can_succeed=True)
        self._log_probs, self._open_log_probs = (
            jax.jit(partial(self.policy.history_log_probs, histories=histories))
            for histories in (self._histories, self._open_histories)
        )
        self._reference: np.ndarray | None = None

    def advance(self) -> tuple[Metrics, Episodes]:
        """Runs one iteration."""
        verdicts = verifier.training_verdicts(self.iteration, 1, self.sizes.groups)[0]
        self.state, metrics, episodes = iterate(
            self.policy,
            self.state,
            self.checkpoint.params,
            self.seed,
            self.settings,
            self.iteration,
            verdicts,
            sizes=self.sizes,
            micro_batch=self.config.micro_batch or MICRO_BATCH,
        )
        self.iteration += 1
        return jax.device_get((metrics, episodes))

    def exact_success_rate(self) -> float:
        """Success probability of the policy now, over the histories that can still succeed."""
        accepted = verifier.training_verdicts(0, 1, 1)[0, 0].astype(float)
        log_probs = self._open_log_probs(self.state.params)
        return expectations(self._open_histories, log_probs, accepted).success

    def evaluate(self) -> Evaluation:
        """Evaluates the policy over sampled episodes, and exactly over all histories."""
        verdicts = verifier.evaluation_verdicts(self.config.eval_episodes)
        sums = np.zeros(3, np.int64)
        for chunk, start in enumerate(range(0, len(verdicts), evaluation.CHUNK)):
            graded = verdicts[start : start + evaluation.CHUNK]
            padded = np.pad(graded, ((0, evaluation.CHUNK - len(graded)), (0, 0)))
            sums += np.array(evaluate_chunk(self.policy, self.state.params, self.seed, chunk, len(graded), padded))
        log_probs = np.asarray(self._log_probs(self.state.params), np.float64)
        self._reference = log_probs if self._reference is None else self._reference
        exact = expectations(self._histories, log_probs, verdicts.mean(axis=0))
        kl = (np.exp(log_probs) * (log_probs - self._reference)).sum(axis=1)
        successes, actions, squared_actions = sums.tolist()
        return Evaluation(
            episodes=len(verdicts),
            successes=successes,
            actions=actions,
            squared_actions=squared_actions,
            exact_success_rate=exact.success,
            exact_mean_actions=exact.mean_actions,
            exact_mean_kl=float((exact.reach * kl).sum()) / exact.mean_actions,
        )


def run(config: Config, *, on_chunk: Callable[[History], None] | None = None) -> Result:
    """Trains one language model; see `fleet.run`."""
    one = Run(config)
    before = one.evaluate()
    packed, histories, rows = [], [], []
    started, compiled = time.perf_counter(), compilation.seconds()
    while one.iteration < config.iterations:
        metrics, episodes = one.advance()
        last = one.iteration == config.iterations
        exact = one.exact_success_rate() if last or one.iteration % (config.exact_every or EXACT_EVERY) == 0 else None
        packed.append(episodes.packed)
        rows.append((one.iteration - 1, *metrics, np.nan if exact is None else exact))
        if len(rows) == training.CHUNK or last:
            histories.append(_columns(rows))
            rows = []
            if on_chunk:
                on_chunk(histories[-1])
    after = one.evaluate()
    elapsed, compiled = time.perf_counter() - started, compilation.seconds() - compiled
    return Result(
        config,
        before,
        after,
        {name: np.concatenate([part[name] for part in histories]) for name in histories[0]},
        None,
        np.stack(packed),
        {"train_and_final_eval_seconds": elapsed, "compile_seconds": compiled, "run_seconds": elapsed - compiled},
        dataclasses.replace(one.checkpoint, params=one.state.params),
    )


def _columns(rows: list[tuple[Any, ...]]) -> History:
    names = ("iteration", *Metrics._fields, "exact_success_rate")
    whole = ("iteration", *COUNTS)
    columns = zip(names, np.array(rows, np.float64).T, strict=True)
    return {name: column.astype(np.int32) if name in whole else column for name, column in columns}
