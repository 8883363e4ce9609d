"""The metrics of iterations, computed from what they left behind, in float64."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxrl_mini import objective
from jaxrl_mini.episodes import rollout, verifier
from jaxrl_mini.episodes.packed import Episodes
from jaxrl_mini.exact import situations, success
from jaxrl_mini.learning.training import CHUNK, Log, Sizes
from jaxrl_mini.policies import table
from jaxrl_mini.tasks.repair import NUM_VARIANTS
from jaxrl_mini.types import AnyArray, Settings

History = dict[str, np.ndarray]
"""A column per metric (see `columns`), [iteration, run] or [iteration]."""


def joined(tables: Sequence[History], axis: int = 0) -> History:
    """Tables as one, one after the other; none where there is none."""
    names = tables[0] if tables else ()
    return {name: np.concatenate([part[name] for part in tables], axis=axis) for name in names}


def columns(
    log: Log,
    reference: Float[AnyArray, "iteration context action run"],
    iterations: Int[np.ndarray, " iteration"],
    settings: Settings,
    sizes: Sizes,
) -> History:
    """The metrics of logged iterations, given their numbers, as columns [iteration, run], in float64.

    `iteration`, `objective.measure` of its last optimizer step, `gradient_norm` there before it is clipped,
    `optimizer_steps`, `train_success_rate` (by the verifier, whatever the reward), `mixed_groups` (groups with rewards
    of 0 and of 1), for rs-sft `retained_episodes`, and for a reward that is not the verifier's `mean_reward`.
    """
    runs = log.gradient_norm.shape[1]
    passed = _passed(log, iterations, sizes) if log.passed is None else log.passed
    rewards = passed if log.rewards is None else log.rewards
    successes = rewards.sum(axis=2).astype(np.int64)
    retained = successes.sum(axis=1)
    # From [iteration, ..., run] to [..., iteration, run].
    tables = (log.log_probs, log.behavior, reference, log.credit)
    log_probs, behavior, reference, credit = jax.tree.map(
        lambda leaf: np.moveaxis(leaf, 0, -2).astype(np.float64), tables
    )
    live = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64)[:runs], settings)
    history = {
        "iteration": np.repeat(iterations[:, None], runs, axis=1),
        **objective.measure(log_probs, behavior, reference, credit, live, sizes.method, sizes.variant),
        "gradient_norm": log.gradient_norm,
        "optimizer_steps": np.where(
            (retained > 0) | (sizes.method == "grpo") | sizes.variant.exact_gradient, sizes.epochs, 0
        ),
        "train_success_rate": passed.sum(axis=(1, 2)).astype(np.int64) / (sizes.groups * sizes.group_size),
        "mixed_groups": ((successes > 0) & (successes < sizes.group_size)).sum(axis=1),
        "retained_episodes": retained,
    }
    if sizes.method == "grpo":
        del history["retained_episodes"]
    if log.rewards is not None:
        history["mean_reward"] = retained / (sizes.groups * sizes.group_size)
    return history


def _passed(
    log: Log, iterations: Int[np.ndarray, " iteration"], sizes: Sizes
) -> Float[np.ndarray, "iteration group episode run"]:
    """The verifier's verdicts on logged episodes of the article's task."""
    runs = log.gradient_norm.shape[1]
    chunks = [divmod(int(iteration), CHUNK) for iteration in iterations]  # verdicts are computed and kept by chunk
    verdicts = np.stack([verifier.training_verdicts(CHUNK * chunk, CHUNK, sizes.groups)[i] for chunk, i in chunks])
    assert isinstance(log.episodes, Episodes)
    by_group = Episodes(log.episodes.packed.reshape(-1, sizes.group_size, runs))
    return np.asarray(rollout.grade(by_group, verdicts.reshape(-1, NUM_VARIANTS))).reshape(log.episodes.packed.shape)


def history_of(
    log: Log,
    logits: Float[np.ndarray, "iteration context action run"],
    iterations: Int[np.ndarray, " iteration"],
    settings: Settings,
    sizes: Sizes,
) -> History:
    """`columns` of logged iterations, and the `exact_success_rate` of the policies after them."""
    by_policy = np.moveaxis(logits, 0, -2)
    if sizes.task is None:
        accepted = verifier.training_verdicts(0, CHUNK, sizes.groups).mean(axis=(0, 1))
        exact = success.exact_of_logits(by_policy, accepted).success_rate
    else:
        exact = situations.exact_of_logits(sizes.task, by_policy, "train").success_rate
    reference = table.uniform_log_probs(shape=sizes.shape)[None, ..., None]
    reference = np.broadcast_to(reference, log.behavior.shape)
    return {**columns(log, reference, iterations, settings, sizes), "exact_success_rate": np.asarray(exact)}
