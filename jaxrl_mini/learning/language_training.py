"""Training of a language model in the loop of the table policy: the same episodes, credit, loss and optimizer.

Apart from `training`, so that a table policy does not wait for the neural network library.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from jaxrl_mini import objective
from jaxrl_mini.config import ARTICLE, MICRO_BATCH, Config, UserError
from jaxrl_mini.episodes import rewards as rewarding
from jaxrl_mini.episodes import rollout
from jaxrl_mini.episodes.packed import Episodes
from jaxrl_mini.episodes.play import Play
from jaxrl_mini.exact.expectations import expectations
from jaxrl_mini.learning import language_episodes, training
from jaxrl_mini.learning.checkpoint import Checkpoints, Snapshot
from jaxrl_mini.learning.evaluation import Evaluation
from jaxrl_mini.learning.metrics import History, columns, joined
from jaxrl_mini.learning.result import Result
from jaxrl_mini.learning.training import Backward, Batch, Log, LossGradient, Sizes, State
from jaxrl_mini.machine import compilation
from jaxrl_mini.machine.placement import Placement
from jaxrl_mini.policies.language import LanguagePolicy, load_policy
from jaxrl_mini.policies.pretrained import Checkpoint
from jaxrl_mini.policies.scenes import HISTORIES_AT_ONCE, Pages, Prompts, in_chunks, reading
from jaxrl_mini.tasks.histories import histories
from jaxrl_mini.tasks.specification import load_task
from jaxrl_mini.types import AnyArray, Settings


def accumulated(policy: LanguagePolicy, prompts: Prompts, filled: Int[Array, ""], size: int) -> Backward:
    """The language model's `Backward`: gradients add up over micro-batches of `size` rows, padding takes none."""
    steps = len(prompts.segments) + 1

    def backward(state: State, batch: Batch, loss_gradient: LossGradient) -> tuple[Array, PyTree]:
        def add(i: Array, carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            log_probs, gradient = carry
            these = jax.tree.map(lambda x: _cut(x, i, size, axis=x.ndim - 1), prompts)
            part, pullback = jax.vjp(lambda p: _by_context(policy.log_probs(p, these)), state.params)
            in_part = jax.tree.map(lambda x: _cut(x, i, size * steps, axis=0), batch)
            (more,) = pullback(loss_gradient(part, in_part))
            return _put(log_probs, part, i), jax.tree.map(jnp.add, gradient, more)

        start = jnp.zeros_like(batch.behavior), jax.tree.map(jnp.zeros_like, state.params)
        return lax.fori_loop(0, (filled + size - 1) // size, add, start)

    return backward


def _cut(array: Array, part: Array, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(array, part * size, size, axis)


def _put(array: Array, part: Array, i: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(array, part, i * part.shape[0], axis=0)


def _by_context(log_probs: Float[Array, "step row action"]) -> Float[Array, "context action"]:
    return log_probs.swapaxes(0, 1).reshape(-1, log_probs.shape[2])


class Reference(NamedTuple):
    """The frozen initial policy: its log-probabilities after every history; where those are too many, its weights."""

    log_probs: Float[AnyArray, "history action"] | None
    params: PyTree
    """None where there are log-probabilities."""


@partial(jax.jit, static_argnames=("policy", "sizes", "micro_batch"), donate_argnames="state")
def learn(
    policy: LanguagePolicy,
    state: State,
    reference: Reference,
    numbers: Int[AnyArray, "step row"] | None,
    merged: objective.Merged,
    episodes: language_episodes.Batch,
    rewards: Float[AnyArray, "group episode"],
    behavior: Float[AnyArray, "step batch action"],
    settings: Settings,
    *,
    sizes: Sizes,
    micro_batch: int,
) -> tuple[State, Log, Float[Array, "context action"]]:
    """Learns from graded episodes.

    Episodes in which the same was done and seen are scored once, as are the steps before the first action.

    Args:
      policy: the network, and the task in its tokens.
      state: the weights and Adam's moments; its buffers are used up.
      reference: the frozen initial policy.
      numbers: the history before each action of the rows, where the reference has log-probabilities.
      merged: the rows; as many as whole micro-batches have.
      episodes: the batch.
      rewards: of each episode, 0 or 1.
      behavior: log-probabilities that the episodes, flattened, were drawn from; those of other actions do not matter.
      settings: the settings that are data.
      sizes: the settings that shape the program.
      micro_batch: rows of a gradient at once.

    Returns:
      The new state; what the iteration leaves behind; the reference policy's log-probabilities in the batch.
    """
    actions, choices = len(policy.task.task.actions), episodes.played.choices
    advantages = objective.advantages(rewards, method=sizes.method, advantage=sizes.variant.advantage)
    taken = jnp.where(choices >= 0, choices % actions, -1)
    _, credit = objective.history_credit(merged, taken, rewards, advantages, sizes.variant, actions=actions)
    prompts = _rows(episodes.played.prompts, merged, len(policy.task.lengths) - 1)
    if reference.log_probs is None:
        parts = jax.tree.map(lambda x: _in_parts(x, micro_batch), prompts)
        scored = lax.map(lambda part: policy.log_probs(reference.params, part), parts)  # [part, step, row, action]
        by_history = jnp.concatenate([*scored], axis=1)
    else:
        by_history = reference.log_probs[numbers]
    batch = Batch(_by_context(behavior[:, merged.first]), _by_context(by_history), credit)
    logged = None if sizes.variant.reward == "verifier" else rewards
    backward = accumulated(policy, prompts, merged.filled, micro_batch)
    state, log_probs, norm = training.update(state, backward, batch, settings, sizes)
    log = Log(episodes.by_group, credit, batch.behavior, log_probs, norm, logged)
    return policy.placement.weights(state), *policy.placement.whole((log, batch.reference))


def _rows(prompts: Prompts, merged: objective.Merged, nothing: int) -> Prompts:
    """What the rows were shown; the openings alone, in those that are padding."""
    filled = jnp.arange(len(merged.first)) < merged.filled
    shown = jnp.where(filled, jnp.asarray(prompts.segments)[:, merged.first], nothing)
    return Prompts(jnp.asarray(prompts.openings)[merged.first], shown)


def _in_parts(array: Array, size: int) -> Array:
    """The last axis in parts of some size, which come first."""
    return jnp.moveaxis(array.reshape(*array.shape[:-1], -1, size), -2, 0)


@partial(jax.jit, static_argnames="policy")
def log_probs(policy: LanguagePolicy, params: PyTree, prompts: Prompts) -> Float[Array, "step episode action"]:
    """`LanguagePolicy.log_probs`, on every device."""
    return policy.placement.whole(policy.log_probs(params, prompts))


@partial(jax.jit, static_argnames=("policy", "room"))
def read_histories(
    policy: LanguagePolicy,
    params: PyTree,
    pages: Pages,
    order: Int[AnyArray, "chunk row"],
    count: Int[AnyArray, ""],
    *,
    room: int,
) -> Float[Array, "history action"]:
    """`LanguagePolicy.history_log_probs`, on every device."""
    return policy.placement.whole(policy.history_log_probs(params, pages, order, count, room=room))


def history_log_probs(
    policy: LanguagePolicy, params: PyTree, can_succeed: str | None = None
) -> Float[np.ndarray, "history action"]:
    """Log-probabilities after every history of a task that has not too many.

    Args:
      policy: the network, and the task in its tokens.
      params: the network's parameters.
      can_succeed: a split; then uniform after those in which none of its episodes can succeed any more.
    """
    found = histories(policy.task.task)
    assert found is not None
    laid = reading(found)
    every = in_chunks(found, np.ones(found.size, bool), laid.waves, HISTORIES_AT_ONCE)
    order, count = every, len(every)
    if can_succeed is not None:
        wanted = found.can_succeed(policy.task.task.splits[can_succeed])
        fewer = in_chunks(found, wanted, laid.waves, HISTORIES_AT_ONCE)
        order, count = np.resize(fewer, every.shape) if len(fewer) else every, len(fewer)
    return np.asarray(read_histories(policy, params, laid.pages, order, np.int32(count), room=laid.room))


Loaded = tuple[LanguagePolicy, Checkpoint]


class Run:
    """One run between two iterations.

    Args:
      config: the settings.
      mesh: the devices, with the axes `placement.AXES`; None is jax's default device.
      loaded: the model, if it has been read already.

    Raises:
      UserError: the model cannot be read, or the mesh does not divide the batch.
    """

    def __init__(self, config: Config, mesh: Mesh | None = None, loaded: Loaded | None = None):
        self.config, placement = config, Placement(mesh)
        self.task = load_task(config.task)
        self.micro_batch = config.micro_batch or MICRO_BATCH * placement.data
        for name, size in (("--micro-batch", self.micro_batch), ("batch of", config.groups * config.group_size)):
            if size % placement.data:
                raise UserError(f"{name} {size} cannot be split over data={placement.data}: expected a multiple of it")
        policy, read = loaded or load_policy(str(config.model), config.dtype or "float32", self.task)
        self.policy = policy if mesh is None else dataclasses.replace(policy, placement=placement)
        self.sizes = Sizes(config.method, config.groups, config.group_size, config.epochs, config.variant)
        self.settings = jax.tree.map(lambda value: np.array(value, np.float32), Settings.of(config))
        self.seed = np.array(config.seed, np.uint32)
        # The steps use up the weights' buffers; those that another run starts from, too, stay.
        params = read.params if loaded is None else jax.tree.map(jnp.copy, read.params)
        self.state = placement.put_weights(training.initial_state(params))
        self._read = dataclasses.replace(read, params=None)
        self.iteration = 0
        self.histories = histories(self.task)
        """None where there are too many, and nothing is exact."""
        if self.histories is None:
            self.reference = Reference(None, jax.tree.map(jnp.copy, self.state.params))
        else:
            self.reference = Reference(self.history_log_probs(), None)

    def go_on(self, state: State, iteration: int) -> None:
        """Takes over the state of a like run after so many iterations."""
        self.state = self.policy.placement.put_weights(jax.tree.map(jnp.asarray, state))
        self.iteration = iteration

    def advance(self) -> tuple[History, dict[str, np.ndarray]]:
        """Runs one iteration; returns its metrics, [1] each, and what else it leaves behind."""
        shape = {"groups": self.sizes.groups, "group_size": self.sizes.group_size}
        episodes, behavior = language_episodes.sample(
            self.policy, self.state.params, self.seed, self.iteration, **shape
        )
        passed = self.grade(episodes)
        rewards = self._rewards(episodes, passed)
        metrics = self.learn(episodes, rewards, behavior)
        left = {"rewards": rewards, "behavior": language_episodes.of_taken(behavior, episodes)}
        if self.config.task == ARTICLE:
            return metrics, {"packed": self._packed(episodes).packed, **left}
        return metrics, {**episodes.by_group._asdict(), "passed": passed, "shown": episodes.shown, **left}

    def grade(self, episodes: language_episodes.Batch) -> Float[np.ndarray, "group episode"]:
        """The verifier's verdicts on episodes of the next iteration."""
        return language_episodes.grade(self.task, episodes, self.seed, self.iteration)

    def _rewards(self, episodes: language_episodes.Batch, passed: Float[np.ndarray, "group episode"]) -> np.ndarray:
        kind = self.config.reward
        if kind == "verifier":
            return passed
        if kind == "public-test":
            verdicts = np.broadcast_to(rewarding.PUBLIC_TEST, (self.sizes.groups, len(rewarding.PUBLIC_TEST)))
            return np.asarray(rollout.grade(self._packed(episodes), verdicts))
        return np.asarray(rewarding.worrying(jnp.asarray(passed), self.seed, self.iteration, reward=kind))

    def _packed(self, episodes: language_episodes.Batch) -> Episodes:
        """Episodes of the article's task."""
        actions = language_episodes.taken(episodes, len(self.task.actions))
        return rollout.episodes_from_actions(actions.reshape(len(actions), *episodes.shape))

    def learn(self, episodes: language_episodes.Batch, rewards: AnyArray, behavior: AnyArray) -> History:
        """Learns from graded episodes, and returns the metrics of the iteration; see `learn` of this module."""
        rows = -(-rewards.size // self.micro_batch) * self.micro_batch
        choices, _, prompts = episodes.played
        merged = objective.merge([choices, prompts.segments, prompts.openings[None]], rows)
        numbers, passed = None, self.grade(episodes)
        if self.histories is not None:
            numbers = self.histories.numbers(prompts.openings, prompts.segments)[:, merged.first]
        self.state, *left = learn(
            self.policy,
            self.state,
            self.reference,
            numbers,
            merged,
            episodes,
            rewards,
            behavior,
            self.settings,
            sizes=self.sizes,
            micro_batch=self.micro_batch,
        )
        log, reference = jax.tree.map(lambda leaf: np.asarray(leaf)[None, ..., None], left)
        log = log._replace(passed=passed[None, ..., None])
        settings = jax.tree.map(lambda leaf: leaf[None], self.settings)
        metrics = columns(log, reference, np.array([self.iteration]), settings, self.sizes)
        self.iteration += 1
        return {name: column[:, 0] for name, column in metrics.items()}

    def log_probs(self, episodes: language_episodes.Batch) -> Float[np.ndarray, "step episode action"]:
        """Log-probabilities of the policy now in some episodes; they mean nothing after an episode's end."""
        return np.asarray(log_probs(self.policy, self.state.params, episodes.played.prompts))

    def checkpoint(self) -> Checkpoint:
        """The model now, its weights whole on every device."""
        return dataclasses.replace(self._read, params=jax.jit(self.policy.placement.whole)(self.state.params))

    def history_log_probs(self, can_succeed: str | None = None) -> Float[np.ndarray, "history action"]:
        """`history_log_probs` of the policy now."""
        return history_log_probs(self.policy, self.state.params, can_succeed)

    def exact_success_rate(self, split: str = "train") -> float:
        """Success probability of the policy now on a split, over what can succeed; NaN with too many histories."""
        if self.histories is None:
            return np.nan
        return expectations(self.histories, self.history_log_probs(split), self.task.splits[split]).success

    def evaluate(self) -> Evaluation:
        """Evaluates the policy on every split: over sampled episodes and, where it can be, exactly."""
        log_probs = None
        if self.histories is not None:
            log_probs = self.history_log_probs() if self.iteration else self.reference.log_probs
        by_split = {split: self._evaluate(split, log_probs) for split in self.task.splits}
        train = by_split.pop("train")
        return dataclasses.replace(train, splits=by_split)

    def _evaluate(self, split: str, log_probs: Float[np.ndarray, "history action"] | None) -> Evaluation:
        episodes, exact = self.config.eval_episodes, dict[str, Any]()
        sums = language_episodes.evaluate(self.policy, self.state.params, split, self.seed, episodes)
        successes, actions, squared_actions = sums.tolist()
        if self.histories is not None and log_probs is not None:
            members = self.task.splits[split]
            found = expectations(self.histories, log_probs, members, self.reference.log_probs)
            exact = {
                "exact_success_rate": found.success,
                "exact_mean_actions": found.mean_actions,
                "exact_mean_kl": found.mean_kl,
                "by_instance": tuple(found.by_instance.tolist()) if len(members) > 1 else None,
            }
        return Evaluation(episodes, successes, actions, squared_actions, **exact)


def run(
    config: Config,
    *,
    on_chunk: Callable[[History], None] | None = None,
    checkpoints: Checkpoints | None = None,
    mesh: Mesh | None = None,
    loaded: Loaded | None = None,
) -> Result:
    """Trains one language model; see `loop.run`, and for the other arguments `Run`."""
    one = Run(config, mesh, loaded)
    past = checkpoints.restore(one.state) if checkpoints else None
    before = past.before if past else one.evaluate()
    rows, lefts, reported = list[History](), list[History](), 0
    started, compiled = time.perf_counter(), compilation.seconds()
    if past:
        one.go_on(past.state, past.iteration)
        if not config.evaluates(one.iteration - 1):
            past.history["exact_success_rate"][-1] = np.nan  # it was the last iteration, and is no longer
        rows, lefts, reported = past.history_by(training.CHUNK), [past.left], 1
        started, compiled = started - sum(past.seconds), compiled - past.seconds[0]

    def snapshot() -> Snapshot:
        compiling = compilation.seconds() - compiled
        seconds = compiling, time.perf_counter() - started - compiling
        return Snapshot(one.state, joined(rows), joined(lefts), before, seconds)

    while one.iteration < config.iterations:
        metrics, left = one.advance()
        last, due = one.iteration == config.iterations, config.evaluates(one.iteration - 1)
        rows.append({**metrics, "exact_success_rate": np.array([one.exact_success_rate() if due else np.nan])})
        lefts.append({name: array[None] for name, array in left.items()})
        if on_chunk and (last or one.iteration % training.CHUNK == 0):
            on_chunk(joined(rows[reported:]))
            reported = len(rows)
        if checkpoints:
            checkpoints.offer(one.iteration, snapshot)
    after = one.evaluate()
    elapsed, compiled = time.perf_counter() - started, compilation.seconds() - compiled
    timing = {"train_and_final_eval_seconds": elapsed, "compile_seconds": compiled, "run_seconds": elapsed - compiled}
    left, trained = joined(lefts), one.checkpoint()
    played = Play(*(left[name] for name in Play._fields)) if "choices" in left else None
    return Result(
        config,
        before,
        after,
        joined(rows),
        None,
        left.get("packed"),
        timing,
        checkpoint=trained,
        behavior=left["behavior"],
        rewards=None if config.reward == "verifier" else left["rewards"],
        mesh=None if mesh is None else dict(mesh.shape),
        played=played,
        passed=left.get("passed"),
        shown=left.get("shown"),
    )
