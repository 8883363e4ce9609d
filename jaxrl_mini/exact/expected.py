"""Expected credit: what the sums of a batch tend to with infinitely many groups, by dynamic programming.

`expected_credit` is the article's task's, whose records hold the bits of its order of sums; `expected_play_credit` that
of any task.
"""

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float

from jaxrl_mini.config import Variant
from jaxrl_mini.episodes import rewards
from jaxrl_mini.episodes.rewards import OUTCOMES, rewarded
from jaxrl_mini.exact.situations import added, ahead, reach
from jaxrl_mini.machine.xla import stage
from jaxrl_mini.objective.advantage import INFINITE, credited, formula
from jaxrl_mini.objective.credit import shares
from jaxrl_mini.tasks.compiled import ENDED
from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, NUM_STATES, NUM_VARIANTS
from jaxrl_mini.tasks.situations import Level, Stacked
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
    share = shares(variant.aggregation, MAX_STEPS)
    plain, shared = (choices_by_outcome(probs, one) for one in (np.ones(MAX_STEPS), share))
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
    return _credit(plus, minus, taken, counts, verdicts.shape[0] * group_size, variant)


@partial(stage, static_argnames=("instances", "groups", "group_size", "method", "variant"))
def expected_play_credit(
    probs: Float[Array, "context action *run"],
    found: Stacked,
    *,
    instances: int,
    groups: int,
    group_size: int,
    method: str,
    variant: Variant,
) -> Credit:
    """`expected_credit` of any task: in the limit of infinitely many groups, each of which plays one of its instances.

    What is expected of a group is expected given its instance, and the mean is taken over these; a shuffled verdict is
    that of an episode of any of them.
    """
    steps, run = len(found.levels.context), probs.shape[2:]
    kind = "verifier" if variant.reward == "shuffled" else variant.reward
    share = jnp.asarray(shares(variant.aggregation, steps), probs.dtype)
    mass = reach(found, probs)

    def ends(level: Level) -> Array:
        return (level.target == ENDED)[:, None]

    def succeeds(level: Level, step: Array) -> Array:
        chance = jnp.where(ends(level), rewarded(level.accepted, reward=kind)[:, None], 0.0)
        return jnp.broadcast_to(chance.reshape(-1, 1, *[1] * len(run)), (len(chance), 1, *run))

    success = ahead(found, probs, mass, succeeds, kinds=1)[0][:, 0] * mass[0]
    rate = jnp.clip(added(success, found.levels.instance[0], instances), 0.0, 1.0)
    if variant.reward == "shuffled":
        rate = jnp.broadcast_to(rate.mean(axis=0), rate.shape)
    if variant.reward == "constant":
        rate = jnp.ones_like(rate)
    credited = _expected_advantages(rate, group_size, method, variant.advantage)

    def gain(level: Level, step: Array) -> Array:
        instance = level.instance[level.source]
        chance = rate[instance] if variant.reward == "shuffled" else succeeds(level, step)[:, 0]
        plus, minus = chance * credited.success[instance], (1.0 - chance) * credited.failure[instance]
        one = jnp.ones_like(chance)
        kinds = jnp.stack([plus * share[step], minus * share[step], one * share[step], one], axis=1)
        return jnp.where(ends(level).reshape(-1, *[1] * (1 + len(run))), kinds, 0.0)

    by_choice = ahead(found, probs, mass, gain, kinds=4)[1][0] / instances
    plus, minus, taken, counts = (by_choice[:, :, kind] for kind in range(4))
    return _credit(plus, minus, taken, counts, groups * group_size, variant)


def _credit(
    plus: Float[Array, "context action *run"],
    minus: Float[Array, "context action *run"],
    taken: Float[Array, "context action *run"],
    counts: Float[Array, "context action *run"],
    episodes: int,
    variant: Variant,
) -> Credit:
    """What is expected of one episode, as that of a batch of so many."""
    scale = 1.0 / counts.sum(axis=(0, 1)) if variant.aggregation == "step-mean" else 1.0
    plus, minus, taken = (scale * sums for sums in (plus, minus, taken))
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
