"""A language model learns uniformly random play as text, before it is trained on a task."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Bool, Float, Int

from jaxrl_mini.policies.language import LanguagePolicy
from jaxrl_mini.policies.prompts import TaskTokens
from jaxrl_mini.policies.scenes import Prompts
from jaxrl_mini.tasks.compiled import ENDED, CompiledTask
from jaxrl_mini.tasks.segments import segments

STEPS, EPISODES, LR = 400, 4, 3e-3
TRANSCRIPTS = 512


def fit_random_play(policy: LanguagePolicy, params: Any, seed: int) -> tuple[Any, dict[str, float]]:
    """Learns random play as text, by maximum likelihood.

    The loss is a sum of two means of -log p. That of the candidates' raw scores, over the steps of random
    episodes, is at least the logarithm of their number: there the network puts all its probability on them, equally.
    That of the tokens of the observations has hardly a limit below where chance is rare: an observation follows from
    the last one and the action.

    Without the observations the network drowns what it reads in a constant (on the article's task, with 2 blocks of
    width 64, histories with another line fixed then differed by 0.4 % of the final hidden state, and by 20 % at random
    weights), and training stays long at a success of 0.93, that of fixing lines at random until both are fixed.

    Returns:
      The fitted parameters, and both parts of the loss of the last batch.
    """
    random_key, key = jax.random.split(jax.random.key(seed))
    shown = transcripts(policy.task, random_key, seed)
    causal, live = np.tri(shown.tokens.shape[1], dtype=bool), shown.live
    rate = optax.warmup_cosine_decay_schedule(0.0, LR, STEPS // 20, STEPS)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    def loss(params: Any, rows: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        ids, weights = jnp.asarray(shown.tokens)[rows], jnp.asarray(shown.observed)[rows, 1:]
        network = nnx.merge(policy.network, params)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        hidden, _ = network(ids, positions, jnp.broadcast_to(causal, (len(rows), *causal.shape)))
        log_probs = jax.nn.log_softmax(network.logits(hidden[:, :-1]))
        each = jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=2)[..., 0]  # [row, token - 1]
        scores = policy.scores(params, jax.tree.map(lambda x: jnp.asarray(x)[..., rows], shown.prompts))
        parts = {
            "candidates": -scores.mean(where=None if live.all() else jnp.asarray(live)[:, rows, None]),
            "observations": -(each * weights).sum() / jnp.maximum(weights.sum(), 1.0),
        }
        return parts["candidates"] + parts["observations"], parts

    @jax.jit
    def fit(params: Any, key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        def step(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], dict[str, jax.Array]]:
            params, state = carry
            rows = jax.random.randint(key, (EPISODES,), 0, TRANSCRIPTS)
            gradient, parts = jax.grad(loss, has_aux=True)(params, rows)
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(params, updates), state), parts

        (params, _), parts = jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(key, STEPS))
        return params, jax.tree.map(lambda losses: losses[-1], parts)

    params, parts = fit(params, key)
    return params, {name: float(part) for name, part in parts.items()}


class Transcripts(NamedTuple):
    """Whole episodes of random play."""

    prompts: Prompts
    live: Bool[np.ndarray, "step episode"]
    """Whether an action is taken."""
    tokens: Int[np.ndarray, "episode token"]
    """Padded at its end."""
    observed: Float[np.ndarray, "episode token"]
    """1 where a token is part of an observation, else 0."""


def transcripts(tokens: TaskTokens, key: jax.Array, seed: int) -> Transcripts:
    """Plays instances of the split `train`, always one of the actions after which the episode goes on for sure.

    Args:
      tokens: the task's.
      key: decides the actions.
      seed: decides the instances, and what chance does.
    """
    task, pieces, random = tokens.task, segments(tokens.task), np.random.default_rng(seed)
    going = _going(task)
    counts = {int(count) for count in going.sum(axis=1)} - {0}
    of_any = min(math.lcm(*counts), 2**31 - 1)  # a multiple of each, so that every remainder is as likely
    drawn = np.array(jax.random.randint(key, (TRANSCRIPTS, task.max_steps), 0, of_any))
    place = task.node.astype(np.int64) * len(task.actions) + task.action
    ways = np.searchsorted(place, np.arange(going.size + 1))
    openings, live = np.zeros(TRANSCRIPTS, np.int32), np.zeros((task.max_steps, TRANSCRIPTS), bool)
    shown = np.full((task.max_steps - 1, TRANSCRIPTS), pieces.nothing, np.int32)
    for episode, numbers in enumerate(drawn):
        instance = random.choice(task.splits["train"])
        start = _one_of(random, np.flatnonzero(task.start_instance == instance), task.start_chance)
        openings[episode], node = pieces.of_start[start], task.start_node[start]
        live[0, episode] = True
        for step, number in enumerate(numbers[:-1]):
            (actions,) = np.nonzero(going[node])
            if not len(actions):
                break
            choice = node * len(task.actions) + actions[number % len(actions)]
            outcome = _one_of(random, np.arange(*ways[choice : choice + 2]), task.chance)
            shown[step, episode], node = pieces.of_outcome[outcome], task.next_node[outcome]
            live[step + 1, episode] = True
    prompts = Prompts(openings, shown)
    return Transcripts(prompts, live, *_joined(tokens, prompts))


def _going(task: CompiledTask) -> Bool[np.ndarray, "node action"]:
    """Whether an episode goes on after an action for sure."""
    going, ended = np.ones((len(task.steps), len(task.actions)), bool), task.next_node == ENDED
    going[task.node[ended], task.action[ended]] = False
    return going


def _one_of(random: np.random.Generator, numbers: np.ndarray, chances: np.ndarray) -> int:
    return int(numbers[0]) if len(numbers) == 1 else int(random.choice(numbers, p=chances[numbers]))


def _joined(
    tokens: TaskTokens, prompts: Prompts
) -> tuple[Int[np.ndarray, "episode token"], Float[np.ndarray, "episode token"]]:
    """Prompts as rows of tokens, and which of these are part of an observation."""
    action_tokens = tokens.tree.paths.sum(axis=1).astype(int) - 1  # without the end-of-text token
    of_segments = action_tokens[segments(tokens.task).actions]
    rows = []
    for opening, shown in zip(prompts.openings, prompts.segments.T, strict=True):
        first = tokens.openings[opening][tokens.openings.shape[1] - tokens.opening_lengths[opening] :]
        ids, observed = [first], [np.zeros(len(first))]
        for segment in shown[shown < len(of_segments)]:
            ids.append(tokens.segments[segment][tokens.segments.shape[1] - tokens.lengths[segment] :])
            observed.append(np.arange(tokens.lengths[segment]) >= of_segments[segment])
        rows.append((np.concatenate(ids), np.concatenate(observed)))
    width = max(len(ids) for ids, _ in rows)
    padded = [[np.pad(part, (0, width - len(part))) for part in row] for row in rows]
    joined, masks = (np.stack(column) for column in zip(*padded, strict=True))
    return joined.astype(np.int32), masks.astype(np.float32)
