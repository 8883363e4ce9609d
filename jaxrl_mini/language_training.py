"""Training of a language model in the loop of the table policy: the same episodes, credit, loss and optimizer.

Apart from `training`, so that a table policy does not wait for the neural network library.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxrl_mini import compilation, evaluation, objective, rollout, training, verifier
from jaxrl_mini.checkpoint import Checkpoints, Snapshot
from jaxrl_mini.config import Config
from jaxrl_mini.evaluation import Evaluation
from jaxrl_mini.histories import enumerate_histories, expectations
from jaxrl_mini.policies.language import LanguagePolicy, load_policy
from jaxrl_mini.result import History, Result, columns, joined
from jaxrl_mini.rewards import rewards_of
from jaxrl_mini.task import MAX_STEPS, NUM_ACTIONS
from jaxrl_mini.training import Backward, Batch, Log, LossGradient, Sizes, State
from jaxrl_mini.types import Episodes, Seeds, Settings

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
    actions = _actions(rows)

    def add(i: Array, log_probs: Array) -> Array:
        part = policy.log_probs(params, _cut(actions, i, size, axis=1))
        return _put(log_probs, _by_context(part), i)

    contexts = rows.episodes.packed.size * MAX_STEPS
    return lax.fori_loop(0, _parts(rows, size), add, jnp.zeros((contexts, NUM_ACTIONS)))


def accumulated(policy: LanguagePolicy, rows: objective.Merged, size: int) -> Backward:
    """The language model's `Backward`: gradients add up over micro-batches of `size` rows, padding takes none."""
    actions = _actions(rows)

    def backward(state: State, batch: Batch, loss_gradient: LossGradient) -> tuple[Array, PyTree]:
        def add(i: Array, carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            log_probs, gradient = carry
            these = _cut(actions, i, size, axis=1)
            part, pullback = jax.vjp(lambda p: _by_context(policy.log_probs(p, these)), state.params)
            in_part = jax.tree.map(lambda x: _cut(x, i, size * MAX_STEPS, axis=0), batch)
            (more,) = pullback(loss_gradient(part, in_part))
            return _put(log_probs, part, i), jax.tree.map(jnp.add, gradient, more)

        start = jnp.zeros_like(batch.behavior), jax.tree.map(jnp.zeros_like, state.params)
        return lax.fori_loop(0, _parts(rows, size), add, start)

    return backward


def _actions(rows: objective.Merged) -> Int[Array, "step row"]:
    """Of each row, -1 after the end."""
    choices = jnp.stack([rows.episodes.choice(step) for step in range(MAX_STEPS)])
    return jnp.where(choices >= 0, choices % NUM_ACTIONS, -1)


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
) -> tuple[State, Log, Float[Array, "context action"]]:
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

    Returns:
      The new state; what the iteration leaves behind; the reference policy's log-probabilities.
    """
    batch_shape = (sizes.groups, sizes.group_size)
    uniforms = jnp.stack(rollout.draw_uniforms(seed, rollout.TRAINING, number, *batch_shape))
    actions, behavior = policy.sample(state.params, uniforms.reshape(MAX_STEPS, -1))
    episodes = rollout.episodes_from_actions(actions.reshape(MAX_STEPS, *batch_shape))
    rewards = rewards_of(episodes, verdicts[None], seed, number, reward=sizes.variant.reward)
    advantages = objective.advantages(rewards, method=sizes.method, advantage=sizes.variant.advantage)
    padded = -(-rewards.size // micro_batch) * micro_batch
    rows, credit = objective.history_credit(episodes, rewards, advantages, padded, sizes.variant)
    batch = Batch(_by_context(behavior[:, rows.first]), in_parts(policy, initial, rows, micro_batch), credit)
    logged = None if sizes.variant.reward == "verifier" else rewards
    state, log_probs, norm = training.update(state, accumulated(policy, rows, micro_batch), batch, settings, sizes)
    return state, Log(episodes, credit, batch.behavior, log_probs, norm, logged), batch.reference


@partial(jax.jit, static_argnames="policy")
def play_chunk(policy: LanguagePolicy, params: PyTree, seed: Seeds, chunk: Int[Array, ""]) -> Episodes:
    """Evaluation episodes number 512 * chunk and on, each a group of its own."""
    uniforms = jnp.stack(rollout.draw_uniforms(seed, rollout.EVALUATION, chunk, evaluation.CHUNK, 1))
    parts = uniforms.reshape(MAX_STEPS, -1, EVALUATED_AT_ONCE).swapaxes(0, 1)
    actions = lax.map(lambda part: policy.sample(params, part)[0], parts)  # [part, step, episode]
    return rollout.episodes_from_actions(actions.swapaxes(0, 1).reshape(MAX_STEPS, -1, 1))


class Run:
    """One run between two iterations."""

    def __init__(self, config: Config):
        self.config = config
        self.policy, self.checkpoint = load_policy(str(config.model), config.dtype or "float32")
        self.sizes = Sizes(config.method, config.groups, config.group_size, config.epochs, config.variant)
        self.settings = jax.tree.map(jnp.float32, Settings.of(config))
        self.seed = jnp.uint32(config.seed)
        self.state = training.initial_state(jax.tree.map(jnp.copy, self.checkpoint.params))
        self.iteration = 0
        self._histories, self._open_histories = enumerate_histories(), enumerate_histories(can_succeed=True)
        self._log_probs, self._open_log_probs = (
            jax.jit(partial(self.policy.history_log_probs, histories=histories))
            for histories in (self._histories, self._open_histories)
        )
        self._reference: np.ndarray | None = None

    def advance(self) -> tuple[History, np.ndarray]:
        """Runs one iteration; returns its metrics, [1] each, and its packed episodes, [group, episode]."""
        verdicts = verifier.training_verdicts(self.iteration, 1, self.sizes.groups)[0]
        self.state, *left = iterate(
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
        log, reference = jax.tree.map(lambda leaf: np.asarray(leaf)[None, ..., None], left)
        settings = jax.tree.map(lambda leaf: leaf[None], self.settings)
        metrics = columns(log, reference, np.array([self.iteration]), settings, self.sizes)
        self.iteration += 1
        return {name: column[:, 0] for name, column in metrics.items()}, log.episodes.packed[0, ..., 0]

    def exact_success_rate(self) -> float:
        """Success probability of the policy now, over the histories that can still succeed."""
        accepted = verifier.training_verdicts(0, 1, 1)[0, 0].astype(float)
        log_probs = self._open_log_probs(self.state.params)
        return expectations(self._open_histories, log_probs, accepted).success

    def evaluate(self) -> Evaluation:
        """Evaluates the policy over sampled episodes, and exactly over all histories."""
        verdicts = verifier.evaluation_verdicts(self.config.eval_episodes)
        successes, actions, squared_actions = evaluation.sum_over_episodes(
            lambda chunk: play_chunk(self.policy, self.state.params, self.seed, chunk), verdicts
        ).tolist()
        log_probs = np.asarray(self._log_probs(self.state.params), np.float64)
        if self._reference is None:
            first = log_probs if self.iteration == 0 else self._log_probs(self.checkpoint.params)
            self._reference = np.asarray(first, np.float64)
        exact = expectations(self._histories, log_probs, verdicts.mean(axis=0))
        kl = (np.exp(log_probs) * (log_probs - self._reference)).sum(axis=1)
        return Evaluation(
            episodes=len(verdicts),
            successes=successes,
            actions=actions,
            squared_actions=squared_actions,
            exact_success_rate=exact.success,
            exact_mean_actions=exact.mean_actions,
            exact_mean_kl=float((exact.reach * kl).sum()) / exact.mean_actions,
        )


def run(
    config: Config,
    *,
    on_chunk: Callable[[History], None] | None = None,
    checkpoints: Checkpoints | None = None,
) -> Result:
    """Trains one language model; see `fleet.run`."""
    one = Run(config)
    past = checkpoints.restore(one.state) if checkpoints else None
    before = past.before if past else one.evaluate()
    packed, rows, reported = list[np.ndarray](), list[History](), 0
    started, compiled = time.perf_counter(), compilation.seconds()
    every = config.exact_every or EXACT_EVERY
    if past:
        one.state, one.iteration = jax.tree.map(jnp.asarray, past.state), past.iteration
        packed, rows, reported = [past.left["packed"]], [past.history], 1
        if one.iteration < config.iterations and one.iteration % every:
            past.history["exact_success_rate"][-1] = np.nan  # it was the last iteration, and is no longer
        started, compiled = started - sum(past.seconds), compiled - past.seconds[0]

    def snapshot() -> Snapshot:
        compiling = compilation.seconds() - compiled
        seconds = compiling, time.perf_counter() - started - compiling
        return Snapshot(one.state, joined(rows), {"packed": np.concatenate(packed)}, before, seconds)

    while one.iteration < config.iterations:
        metrics, episodes = one.advance()
        last = one.iteration == config.iterations
        due = last or one.iteration % every == 0
        rows.append({**metrics, "exact_success_rate": np.array([one.exact_success_rate() if due else np.nan])})
        packed.append(episodes[None])
        if on_chunk and (last or one.iteration % training.CHUNK == 0):
            on_chunk(joined(rows[reported:]))
            reported = len(rows)
        if checkpoints:
            checkpoints.offer(one.iteration, snapshot)
    after = one.evaluate()
    elapsed, compiled = time.perf_counter() - started, compilation.seconds() - compiled
    timing = {"train_and_final_eval_seconds": elapsed, "compile_seconds": compiled, "run_seconds": elapsed - compiled}
    trained = dataclasses.replace(one.checkpoint, params=one.state.params)
    return Result(config, before, after, joined(rows), None, np.concatenate(packed), timing, trained)
