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
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxrl_mini import objective
from jaxrl_mini.config import MICRO_BATCH, Config, UserError
from jaxrl_mini.episodes import rollout, verifier
from jaxrl_mini.episodes.packed import Episodes
from jaxrl_mini.episodes.rewards import rewards_of
from jaxrl_mini.exact.expectations import expectations
from jaxrl_mini.learning import evaluation, training
from jaxrl_mini.learning.checkpoint import Checkpoints, Snapshot
from jaxrl_mini.learning.evaluation import Evaluation
from jaxrl_mini.learning.metrics import History, columns, joined
from jaxrl_mini.learning.result import Result
from jaxrl_mini.learning.training import Backward, Batch, Log, LossGradient, Sizes, State
from jaxrl_mini.machine import compilation
from jaxrl_mini.machine.placement import Placement
from jaxrl_mini.policies.language import LanguagePolicy, load_policy
from jaxrl_mini.policies.pretrained import Checkpoint
from jaxrl_mini.tasks.histories import enumerate_histories, numbers_of
from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS
from jaxrl_mini.types import AnyArray, Seeds, Settings

EVALUATED_AT_ONCE = 32
"""Episodes played at once in a sampled evaluation; a batch of the default size shares the compiled program."""


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


@partial(jax.jit, static_argnames="policy")
def play(
    policy: LanguagePolicy, params: PyTree, uniforms: Float[Array, "step episode"]
) -> tuple[Int[Array, "step episode"], Float[Array, "step episode action"]]:
    """`LanguagePolicy.sample`, for training and evaluation: compiled once where they play as many episodes at once."""
    return policy.placement.whole(policy.sample(params, uniforms))


def sample(
    policy: LanguagePolicy,
    params: PyTree,
    seed: Seeds,
    number: int,
    verdicts: Bool[AnyArray, "group variant"],
    *,
    sizes: Sizes,
) -> tuple[Episodes, Float[AnyArray, "group episode"], Float[Array, "step batch action"]]:
    """Episodes of one iteration, their rewards, and the log-probabilities they were drawn from, 0 after the end."""
    batch_shape = (sizes.groups, sizes.group_size)
    uniforms = np.stack(rollout.draw_uniforms(seed[None], rollout.TRAINING, number, *batch_shape))  # [..., 1]
    actions, behavior = play(policy, params, uniforms.reshape(MAX_STEPS, -1))
    episodes = rollout.episodes_from_actions(np.asarray(actions).reshape(MAX_STEPS, *batch_shape))
    return episodes, rewards_of(episodes, verdicts[None], seed, number, reward=sizes.variant.reward), behavior


@partial(jax.jit, static_argnames=("policy", "sizes", "micro_batch"), donate_argnames="state")
def learn(
    policy: LanguagePolicy,
    state: State,
    reference: Float[AnyArray, "history action"],
    episodes: Episodes,
    rewards: Float[AnyArray, "group episode"],
    behavior: Float[AnyArray, "step batch action"],
    settings: Settings,
    *,
    sizes: Sizes,
    micro_batch: int,
) -> tuple[State, Log, Float[Array, "context action"]]:
    """Learns from graded episodes.

    Episodes that took the same actions are scored once, as are the steps before the first action.

    Args:
      policy: the network, and the task in its tokens.
      state: the weights and Adam's moments; its buffers are used up.
      reference: log-probabilities of the frozen initial policy after every history.
      episodes: the batch.
      rewards: of each episode, 0 or 1.
      behavior: log-probabilities that the episodes, flattened, were drawn from; those of other actions do not matter.
      settings: the settings that are data.
      sizes: the settings that shape the program.
      micro_batch: rows of a gradient at once.

    Returns:
      The new state; what the iteration leaves behind; the reference policy's log-probabilities in the batch.
    """
    advantages = objective.advantages(rewards, method=sizes.method, advantage=sizes.variant.advantage)
    padded = -(-rewards.size // micro_batch) * micro_batch
    rows, credit = objective.history_credit(episodes, rewards, advantages, padded, sizes.variant)
    by_history = _by_context(reference[numbers_of(_actions(rows))])
    batch = Batch(_by_context(behavior[:, rows.first]), by_history, credit)
    logged = None if sizes.variant.reward == "verifier" else rewards
    state, log_probs, norm = training.update(state, accumulated(policy, rows, micro_batch), batch, settings, sizes)
    log = Log(episodes, credit, batch.behavior, log_probs, norm, logged)
    return policy.placement.weights(state), *policy.placement.whole((log, batch.reference))


@partial(jax.jit, static_argnames="policy")
def log_probs(
    policy: LanguagePolicy, params: PyTree, actions: Int[Array, "step episode"]
) -> Float[Array, "step episode action"]:
    """`LanguagePolicy.log_probs`, on every device."""
    return policy.placement.whole(policy.log_probs(params, actions))


@partial(jax.jit, static_argnames="policy")
def history_log_probs(
    policy: LanguagePolicy, params: PyTree, can_succeed: Bool[AnyArray, ""]
) -> Float[Array, "history action"]:
    """`LanguagePolicy.history_log_probs`, on every device."""
    return policy.placement.whole(policy.history_log_probs(params, can_succeed=can_succeed))


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
        self.micro_batch = config.micro_batch or MICRO_BATCH * placement.data
        for name, size in (("--micro-batch", self.micro_batch), ("batch of", config.groups * config.group_size)):
            if size % placement.data:
                raise UserError(f"{name} {size} cannot be split over data={placement.data}: expected a multiple of it")
        policy, read = loaded or load_policy(str(config.model), config.dtype or "float32")
        self.policy = policy if mesh is None else dataclasses.replace(policy, placement=placement)
        self.sizes = Sizes(config.method, config.groups, config.group_size, config.epochs, config.variant)
        self.settings = jax.tree.map(lambda value: np.array(value, np.float32), Settings.of(config))
        self.seed = np.array(config.seed, np.uint32)
        # The steps use up the weights' buffers; those that another run starts from, too, stay.
        params = read.params if loaded is None else jax.tree.map(jnp.copy, read.params)
        self.state = placement.put_weights(training.initial_state(params))
        self._read = dataclasses.replace(read, params=None)
        self.iteration = 0
        self.reference = self.history_log_probs()

    def go_on(self, state: State, iteration: int) -> None:
        """Takes over the state of a like run after so many iterations."""
        self.state = self.policy.placement.put_weights(jax.tree.map(jnp.asarray, state))
        self.iteration = iteration

    def advance(self) -> tuple[History, np.ndarray, np.ndarray, np.ndarray]:
        """Runs one iteration.

        Returns:
          Its metrics, [1] each; its packed episodes and their rewards, [group, episode]; log-probabilities of the
          policy that sampled them, [step, group * episode, action].
        """
        verdicts = verifier.training_verdicts(self.iteration, 1, self.sizes.groups)[0]
        episodes, rewards, behavior = sample(
            self.policy, self.state.params, self.seed, self.iteration, verdicts, sizes=self.sizes
        )
        metrics = self.learn(episodes, rewards, behavior)
        return metrics, np.asarray(episodes.packed), np.asarray(rewards), np.asarray(behavior)

    def learn(self, episodes: Episodes, rewards: AnyArray, behavior: AnyArray) -> History:
        """Learns from graded episodes, and returns the metrics of the iteration; see `learn` of this module."""
        self.state, *left = learn(
            self.policy,
            self.state,
            self.reference,
            episodes,
            rewards,
            behavior,
            self.settings,
            sizes=self.sizes,
            micro_batch=self.micro_batch,
        )
        log, reference = jax.tree.map(lambda leaf: np.asarray(leaf)[None, ..., None], left)
        settings = jax.tree.map(lambda leaf: leaf[None], self.settings)
        metrics = columns(log, reference, np.array([self.iteration]), settings, self.sizes)
        self.iteration += 1
        return {name: column[:, 0] for name, column in metrics.items()}

    def log_probs(self, episodes: Episodes) -> Float[np.ndarray, "step episode action"]:
        """Log-probabilities of the policy now in some episodes; they mean nothing after an episode's end."""
        actions = jnp.asarray(episodes.actions.reshape(MAX_STEPS, -1), jnp.int32)
        return np.asarray(log_probs(self.policy, self.state.params, actions))

    def checkpoint(self) -> Checkpoint:
        """The model now, its weights whole on every device."""
        return dataclasses.replace(self._read, params=jax.jit(self.policy.placement.whole)(self.state.params))

    def history_log_probs(self, can_succeed: bool = False) -> Float[np.ndarray, "history action"]:
        """Log-probabilities of the policy now after every history, or every one that can still succeed."""
        return np.asarray(history_log_probs(self.policy, self.state.params, np.array(can_succeed)))

    def exact_success_rate(self) -> float:
        """Success probability of the policy now, over the histories that can still succeed."""
        accepted = verifier.training_verdicts(0, 1, 1)[0, 0].astype(float)
        return expectations(enumerate_histories(), self.history_log_probs(can_succeed=True), accepted).success

    def evaluate(self) -> Evaluation:
        """Evaluates the policy over sampled episodes, and exactly over all histories."""
        verdicts = verifier.evaluation_verdicts(self.config.eval_episodes)
        sums = evaluation.sum_over_episodes(self._play_chunk, verdicts)
        successes, actions, squared_actions = sums.tolist()
        log_probs = self.history_log_probs() if self.iteration else self.reference
        exact = expectations(enumerate_histories(), log_probs, verdicts.mean(axis=0))
        wide = log_probs.astype(np.float64)
        kl = (np.exp(wide) * (wide - self.reference)).sum(axis=1)
        return Evaluation(
            episodes=len(verdicts),
            successes=successes,
            actions=actions,
            squared_actions=squared_actions,
            exact_success_rate=exact.success,
            exact_mean_actions=exact.mean_actions,
            exact_mean_kl=float((exact.reach * kl).sum()) / exact.mean_actions,
        )

    def _play_chunk(self, chunk: int) -> Episodes:
        """Evaluation episodes number 512 * chunk and on, as far as they are asked for, each a group of its own."""
        uniforms = np.stack(rollout.draw_uniforms(self.seed[None], rollout.EVALUATION, chunk, evaluation.CHUNK, 1))
        parts = np.split(uniforms.reshape(MAX_STEPS, -1), evaluation.CHUNK // EVALUATED_AT_ONCE, axis=1)
        needed = -(-(self.config.eval_episodes - chunk * evaluation.CHUNK) // EVALUATED_AT_ONCE)
        actions = [np.asarray(play(self.policy, self.state.params, part)[0]) for part in parts[:needed]]
        return rollout.episodes_from_actions(np.concatenate(actions, axis=1)[..., None])


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
        metrics, episodes, rewarded, behavior = one.advance()
        last, due = one.iteration == config.iterations, config.evaluates(one.iteration - 1)
        rows.append({**metrics, "exact_success_rate": np.array([one.exact_success_rate() if due else np.nan])})
        left = {"packed": episodes, "rewards": rewarded, "behavior": of_taken(behavior, Episodes(episodes))}
        lefts.append({name: array[None] for name, array in left.items()})
        if on_chunk and (last or one.iteration % training.CHUNK == 0):
            on_chunk(joined(rows[reported:]))
            reported = len(rows)
        if checkpoints:
            checkpoints.offer(one.iteration, snapshot)
    after = one.evaluate()
    elapsed, compiled = time.perf_counter() - started, compilation.seconds() - compiled
    timing = {"train_and_final_eval_seconds": elapsed, "compile_seconds": compiled, "run_seconds": elapsed - compiled}
    left = joined(lefts)
    trained = one.checkpoint()
    rewards = None if config.reward == "verifier" else left["rewards"]
    shape = None if mesh is None else dict(mesh.shape)
    left_behind = left["packed"], timing, trained, left["behavior"], rewards, shape
    return Result(config, before, after, joined(rows), None, *left_behind)


def of_taken(behavior: AnyArray, episodes: Episodes) -> Float[np.ndarray, "group episode step"]:
    """Of log-probabilities [step, group * episode, action] those of the actions that were taken, 0 after the end."""
    actions = episodes.actions.reshape(MAX_STEPS, -1)
    taken = np.take_along_axis(np.asarray(behavior), np.maximum(actions, 0)[..., None], axis=2)[..., 0]
    return np.where(actions >= 0, taken, 0.0).T.reshape(*episodes.packed.shape, MAX_STEPS)


def behavior_of_taken(taken: Float[np.ndarray, "group episode step"], episodes: Episodes) -> np.ndarray:
    """The reverse of `of_taken`; 0 for actions that were not taken."""
    actions = episodes.actions.reshape(MAX_STEPS, -1)
    chosen = actions[..., None] == np.arange(NUM_ACTIONS)  # [step, episode, action]
    return np.where(chosen, taken.reshape(-1, MAX_STEPS).T[..., None], 0.0).astype(np.float32)
