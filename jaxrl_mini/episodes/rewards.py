"""What an episode is rewarded with: the verifier's verdict, or one of the rewards that should worry you.

Those are controls. A policy that learns from `shuffled` or `constant` learns from something else than the outcome, and
one that learns from `public-test` shows what a check that broken code passes teaches.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_mini.config import noise_of
from jaxrl_mini.episodes import rollout
from jaxrl_mini.episodes.packed import Episodes
from jaxrl_mini.machine.xla import stage
from jaxrl_mini.tasks.repair import NUM_VARIANTS, VARIANTS, public_test_passes
from jaxrl_mini.types import AnyArray, Seeds

STREAM = 2
"""Of random numbers, beside `rollout.TRAINING` and `rollout.EVALUATION`."""

PUBLIC_TEST = np.array([public_test_passes(artifact) for artifact in VARIANTS])
"""bool [variant]: what the public smoke test says of each artifact."""

OUTCOMES = NUM_VARIANTS + 1
"""How an episode can end: with each of the artifacts submitted, or out of steps."""


def rewards_of(
    episodes: Episodes,
    verdicts: Bool[AnyArray, "iteration group variant"],
    seeds: Seeds,
    iteration: int | Int[Array, ""],
    *,
    reward: str,
) -> Float[Array, "group episode *run"]:
    """The rewards of a batch, 0 or 1.

    verifier: a submission that the private verifier accepts. public-test: a submission after which the public test
    passes. shuffled: the verifier's verdicts, permuted within the batch. constant: 1 for every episode. noisy:p: each
    of the verifier's verdicts is flipped with probability p.

    Under `shuffled` each of a batch's n episodes gets, in expectation, 1 / n of the batch's successes, whatever it did
    itself. Where the advantages of a group sum to 0, the expected gradient of the first step on a batch is then 0. With
    `reinforce` it is not: its own success is among those, so with `fixed-length` the expected gradient is the true one,
    1 / n of its size.

    With `constant`, an advantage that is 0 in a group without differences and `--kl exact`, k2 or k3, the table policy
    stays at its reference to the bit, whatever beta is. A language model does with beta 0; its reference is computed by
    another program, and Adam makes steps of the rounding between them.

    Args:
      episodes: the batch, after its end.
      verdicts: the verifier's, on every artifact, for a chunk of iterations that starts at a multiple of its length.
      seeds: a seed per run; with `iteration` and the number of the episode it decides what is drawn.
      iteration: the number of the batch.
      reward: the kind.
    """
    if reward == "verifier":
        return _graded(episodes, verdicts, iteration)
    if reward == "public-test":
        return _graded(episodes, jnp.broadcast_to(PUBLIC_TEST, verdicts.shape), iteration)
    return worrying(_graded(episodes, verdicts, iteration), seeds, iteration, reward=reward)


@stage
def _graded(
    episodes: Episodes, verdicts: Bool[AnyArray, "iteration group variant"], iteration: int | Int[Array, ""]
) -> Float[Array, "group episode *run"]:
    return jnp.asarray(rollout.grade(episodes, verdicts[iteration % len(verdicts)]))


@partial(stage, static_argnames="reward")
def worrying(
    passed: Float[Array, "group episode *run"], seeds: Seeds, iteration: int | Int[Array, ""], *, reward: str
) -> Float[Array, "group episode *run"]:
    """What `rewards_of` makes of the verifier's verdicts: shuffled, constant or noisy."""
    if reward == "constant":
        return jnp.ones_like(passed)
    groups, group_size, *run_shape = passed.shape
    uniforms = rollout.draw_uniforms(seeds, STREAM, iteration, groups, group_size)[0]
    if reward == "shuffled":
        order = jnp.argsort(uniforms.reshape(-1, *run_shape), axis=0)
        return jnp.take_along_axis(passed.reshape(-1, *run_shape), order, axis=0).reshape(passed.shape)
    return jnp.where(uniforms < (noise_of(reward) or 0.0), 1.0 - passed, passed)


def success_by_outcome(accepted: Float[AnyArray, "variant"], *, reward: str) -> Float[AnyArray, "outcome"]:
    """The probability of reward 1 for each way an episode can end, where that does not depend on other episodes.

    Args:
      accepted: the share of the verifier's inputs that accept each artifact.
      reward: the kind, but `shuffled`.
    """
    submitted = PUBLIC_TEST if reward == "public-test" else accepted
    xp = submitted.__array_namespace__()
    return rewarded(xp.concatenate([submitted, xp.zeros(1, submitted.dtype)]).astype(float), reward=reward)


def rewarded(passed: Float[AnyArray, "*shape"], *, reward: str) -> Float[AnyArray, "*shape"]:
    """The probability of reward 1, given that of passing what the reward checks; `shuffled` is none of the kinds."""
    noise = noise_of(reward)
    if noise is not None:
        return passed + noise * (1.0 - 2.0 * passed)
    return passed.__array_namespace__().ones_like(passed) if reward == "constant" else passed
