"""Expected credit: what the sums of a batch tend to with infinitely many groups, by dynamic programming."""

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float

from jaxrl_mini.config import Variant
from jaxrl_mini.episodes import rewards
from jaxrl_mini.episodes.rewards import OUTCOMES
from jaxrl_mini.machine.xla import stage
from jaxrl_mini.objective.advantage import INFINITE, credited, formula
from jaxrl_mini.objective.credit import SHARES
from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, NUM_STATES, NUM_VARIANTS
from jaxrl_mini.tasks.tables import TABLES
from jaxrl_mini.types import Advantages, AnyArray, Credit


def choices_by_outcome(
    probs: Float[AnyArray, "24 6 *run"], shares: Float[np.ndarray, "6 *#kind"]
) -> Float[AnyArray, "outcome 24 6 *run"]:
    """How much of each choice to expect in an episode that ends in each way.

    Entry [outcome, state, action] is the expectation of share(length) over the episodes that take the action there and
    end with the outcome, 0 for all others: (probability of reaching the state) * (probability of the action) *
    (expectation of share(length) and the outcome, from there on). The last factor is computed from the last step to
    the first, the first from the first to the last. Works on NumPy and on JAX arrays, in the precision of `probs`.

    Args:
      probs: of the actions in every state.
      shares: by the length of the episode.
    """
    xp = probs.__array_namespace__()
    run_axes = [1] * (probs.ndim - 2)
    by_step = probs.reshape(MAX_STEPS, NUM_VARIANTS, NUM_ACTIONS, *probs.shape[2:])
    ahead = xp.zeros((NUM_VARIANTS, OUTCOMES, *run_axes), dtype=probs.dtype)
    after = []
    for step in reversed(range(MAX_STEPS)):
        outcome = np.where(TABLES.submits[step], np.arange(NUM_VARIANTS)[:, None], NUM_VARIANTS)
        ending = shares[step] * (outcome[:, :, None] == np.arange(OUTCOMES))
        ends = TABLES.ends[step].reshape(NUM_VARIANTS, NUM_ACTIONS, 1, *run_axes)
        ending = xp.asarray(ending.reshape(*ending.shape, *run_axes), dtype=probs.dtype)
        after.append(xp.where(ends, ending, ahead[TABLES.next_variant[step]]))  # [variant, action, outcome, *run]
        ahead = (by_step[step][:, :, None] * after[-1]).sum(axis=1)
    reach = xp.asarray(np.eye(NUM_VARIANTS)[0].reshape(-1, *run_axes), dtype=probs.dtype)
    steps = []
    for step, follows in enumerate(reversed(after)):
        flow = reach[:, None] * by_step[step]
        steps.append(flow[:, :, None] * follows)
        goes_on = (TABLES.next_variant[step][None] == np.arange(NUM_VARIANTS)[:, None, None]) & ~TABLES.ends[step]
        reach = (goes_on.reshape(*goes_on.shape, *run_axes) * flow[None]).sum(axis=(1, 2))
    by_choice = xp.stack(steps).reshape(NUM_STATES, NUM_ACTIONS, OUTCOMES, *probs.shape[2:])
    return xp.moveaxis(by_choice, 2, 0)


@partial(stage, static_argnames=("group_size", "method", "variant"))
def expected_credit(
    probs: Float[Array, "24 6 *run"],
    verdicts: Bool[Array, "group variant"],
    *,
    group_size: int,
    method: str,
    variant: Variant,
) -> Credit:
    """`Credit` of the policy that samples, in the limit of infinitely many groups of a size with these verdicts.

    What is counted over a whole batch becomes its expectation: its successes, and the actions of `step-mean`. `counts`
    are those of a batch of so many groups.
    """
    plain, shared = (choices_by_outcome(probs, shares) for shares in (np.ones(MAX_STEPS), SHARES[variant.aggregation]))
    ends = plain[:, :NUM_VARIANTS].sum(axis=(1, 2))  # [outcome, *run]; every episode starts with one choice
    success = _success(ends, verdicts, variant.reward)  # [group, outcome, *run]
    rate = jnp.clip((success * ends).sum(axis=1), 0.0, 1.0)
    if variant.reward == "constant":
        rate = jnp.ones_like(rate)
    credited = _expected_advantages(rate, group_size, method, variant.advantage)
    weighted = [(chance[:, :, None, None] * shared).sum(axis=1) for chance in (success, 1.0 - success)]
    plus, minus = (
        (advantage[:, None, None] * weight).mean(axis=0)
        for advantage, weight in zip((credited.success, credited.failure), weighted, strict=True)
    )
    taken, counts = shared.sum(axis=0), plain.sum(axis=0)
    scale = 1.0 / counts.sum(axis=(0, 1)) if variant.aggregation == "step-mean" else 1.0
    plus, minus, taken = (scale * sums for sums in (plus, minus, taken))
    episodes = verdicts.shape[0] * group_size
    return Credit(plus, minus, episodes * counts, taken.sum(axis=1), taken if variant.kl != "exact" else None)


def _success(
    ends: Float[Array, "outcome *run"], verdicts: Bool[Array, "group variant"], reward: str
) -> Float[Array, "group outcome *run"]:
    """The probability of reward 1, by group and outcome; a shuffled verdict is that of any other episode."""
    kind = "verifier" if reward == "shuffled" else reward
    by_group = [rewards.success_by_outcome(one.astype(jnp.float32), reward=kind) for one in verdicts]
    success = jnp.stack([jnp.asarray(one, jnp.float32).reshape(-1, *[1] * (ends.ndim - 1)) for one in by_group])
    if reward == "shuffled":
        success = (success * ends).sum(axis=1).mean(axis=0)
    return jnp.broadcast_to(success, (len(verdicts), *ends.shape))


def _expected_advantages(rate: Float[Array, "group *run"], group_size: int, method: str, advantage: str) -> Advantages:
    """The expectation of a failure's and a success's advantage; the others' successes are Binomial(n - 1, rate)."""
    function = formula(advantage, method)

    def batch() -> tuple[Array, float]:
        return INFINITE * rate.mean(axis=0), INFINITE

    if method == "rs-sft":  # whatever the group's other episodes do
        weights = (credited(function, reward, rate, group_size, batch) for reward in (0.0, 1.0))
        return Advantages(*(jnp.broadcast_to(one, rate.shape) for one in weights))
    failure = success = jnp.zeros_like(rate)
    for others in range(group_size):
        chance = binomial(others, group_size - 1, rate)
        failure += chance * credited(function, 0.0, jnp.full_like(rate, others), group_size, batch)
        success += chance * credited(function, 1.0, jnp.full_like(rate, others + 1), group_size, batch)
    return Advantages(failure, success)


def binomial(k: int, n: int, rate: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The probability of k successes among n."""
    return jnp.exp(math.log(math.comb(n, k)) + xlogy(k, rate) + xlogy(n - k, 1.0 - rate))
