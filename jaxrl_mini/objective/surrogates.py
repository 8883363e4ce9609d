"""Surrogate objectives: what bounds the ratio of new to behavior probability.

While the ratio is 1, in the first step on a batch, all of them have the same gradient.
"""

import jax
import numpy as np
from jaxtyping import Float

from jaxrl_mini.types import AnyArray, Credit

DUAL_CLIP = 3.0
"""The largest ratio that a negative advantage is pushed back with, in `dual-clip`; as in the paper."""


def surrogate(
    log_probs: Float[AnyArray, "context action *batch"],
    behavior: Float[AnyArray, "context action *batch"],
    credit: Credit,
    clip: Float[AnyArray, "*run"],
    clip_high: Float[AnyArray, "*run"] | None = None,
) -> Float[AnyArray, "context action *batch"]:
    """The terms of the clipped surrogate objective: plus * min(ratio, 1 + clip) + minus * max(ratio, 1 - clip).

    Their sum is the mean over episodes of the mean over their actions of
    min(ratio * advantage, clamp(ratio, 1 - clip, 1 + clip) * advantage). Source: Schulman et al. 2017
    (arXiv 1707.06347), equation 7. With another upper bound, 1 + clip_high: DAPO, Yu et al. 2025 (arXiv 2503.14476).
    """
    xp = log_probs.__array_namespace__()
    high = clip if clip_high is None else clip_high
    ratio = xp.exp(log_probs - behavior)
    below = xp.where(ratio < 1.0 + high, ratio, 1.0 + high)
    above = xp.where(ratio > 1.0 - clip, ratio, 1.0 - clip)
    return credit.plus * below + credit.minus * above


def dual_clip(
    log_probs: Float[AnyArray, "context action *batch"],
    behavior: Float[AnyArray, "context action *batch"],
    credit: Credit,
    clip: Float[AnyArray, "*run"],
    clip_high: Float[AnyArray, "*run"] | None = None,
) -> Float[AnyArray, "context action *batch"]:
    """`surrogate`, where a ratio above c = 3 pushes a negative advantage back no further: its gradient is 0.

    For a negative advantage max(min(ratio * advantage, clamp(ratio) * advantage), c * advantage). Source: Ye et al.
    2020 (arXiv 1912.09729).
    """
    xp = log_probs.__array_namespace__()
    ratio = xp.exp(log_probs - behavior)
    excess = xp.where(ratio > DUAL_CLIP, ratio - DUAL_CLIP, 0.0)
    return surrogate(log_probs, behavior, credit, clip, clip_high) - credit.minus * excess


def clipped_weights(
    log_probs: Float[AnyArray, "context action *batch"],
    behavior: Float[AnyArray, "context action *batch"],
    credit: Credit,
    clip: Float[AnyArray, "*run"],
    clip_high: Float[AnyArray, "*run"] | None = None,
) -> Float[AnyArray, "context action *batch"]:
    """cispo: advantage * log p, weighted by the clamped ratio, through which no gradient flows.

    sg(clamp(ratio, 1 - clip, 1 + clip_high)) * advantage * log p: no action's gradient is cut off. Source: CISPO,
    MiniMax 2025 (arXiv 2506.13585), whose own runs had no lower bound. TRL has none either, and takes its epsilon_high
    as the bound itself, not as its distance from 1.
    """
    xp = log_probs.__array_namespace__()
    high = clip if clip_high is None else clip_high
    ratio = xp.clip(xp.exp(log_probs - behavior), 1.0 - clip, 1.0 + high)
    weight = ratio if isinstance(ratio, np.ndarray) else jax.lax.stop_gradient(ratio)
    return (credit.plus + credit.minus) * weight * log_probs


def importance(
    log_probs: Float[AnyArray, "context action *batch"],
    behavior: Float[AnyArray, "context action *batch"],
    credit: Credit,
    clip: Float[AnyArray, "*run"],
    clip_high: Float[AnyArray, "*run"] | None = None,
) -> Float[AnyArray, "context action *batch"]:
    """none: ratio * advantage, unbounded; the bounds are not used."""
    xp = log_probs.__array_namespace__()
    return (credit.plus + credit.minus) * xp.exp(log_probs - behavior)


BY_NAME = {"clip": surrogate, "dual-clip": dual_clip, "cispo": clipped_weights, "none": importance}
"""The functions of `config.SURROGATES`."""
