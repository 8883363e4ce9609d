"""The losses, and the figures of an optimizer step."""

from jaxtyping import Float

from jaxrl_mini.config import DEFAULT_VARIANT, Variant
from jaxrl_mini.objective import kl, surrogates
from jaxrl_mini.types import AnyArray, Credit, Settings


def loss_terms(
    log_probs: Float[AnyArray, "context action *batch"],
    behavior: Float[AnyArray, "context action *batch"],
    reference: Float[AnyArray, "context action *batch"],
    credit: Credit,
    settings: Settings,
    method: str,
    variant: Variant = DEFAULT_VARIANT,
) -> Float[AnyArray, "context action *batch"]:
    """What is minimized is the sum of these.

    grpo: -surrogate + beta * KL - bonus * entropy, the latter two weighted by visits. rs-sft: -log p of the retained
    actions, their mean over an episode's actions, then over the retained episodes; 0 where none is retained.
    """
    if method == "rs-sft":
        return -credit.plus * log_probs
    penalty = kl.penalty(log_probs, reference, credit, variant.kl, resting=variant.reward == "constant")
    surrogate = surrogates.BY_NAME[variant.surrogate]
    terms = settings.beta * penalty - surrogate(log_probs, behavior, credit, settings.clip, settings.clip_high)
    if settings.entropy_bonus is None:
        return terms
    negative_entropy = log_probs.__array_namespace__().exp(log_probs) * log_probs
    return terms + settings.entropy_bonus * (credit.visits[:, None] * negative_entropy)


def measure(
    log_probs: Float[AnyArray, "context action *batch"],
    behavior: Float[AnyArray, "context action *batch"],
    reference: Float[AnyArray, "context action *batch"],
    credit: Credit,
    settings: Settings,
    method: str,
    variant: Variant = DEFAULT_VARIANT,
) -> dict[str, Float[AnyArray, "*batch"]]:
    """The figures of one optimizer step, before it is taken.

    Returns:
      loss: the loss.
      mean_kl: KL(policy || reference), averaged over the sampled actions.
      ratio_outside_clip_fraction: the share of the sampled actions whose ratio lies outside [1 - clip, 1 + clip], or
        its upper bound 1 + clip_high, whatever their advantage.
      entropy: the policy's entropy in nats, averaged over the sampled actions.
    """
    xp = log_probs.__array_namespace__()
    ratio, high = xp.exp(log_probs - behavior), settings.clip if settings.clip_high is None else settings.clip_high
    outside = (ratio < 1.0 - settings.clip) | (ratio > 1.0 + high)
    counts = credit.counts.sum(axis=1)
    share = counts / _over_contexts(counts)
    terms = loss_terms(log_probs, behavior, reference, credit, settings, method, variant).sum(axis=1)
    return {
        "loss": _over_contexts(terms),
        "mean_kl": _over_contexts(share * kl.kl_terms(log_probs, reference).sum(axis=1)),
        "ratio_outside_clip_fraction": _over_contexts((credit.counts * outside).sum(axis=1)) / _over_contexts(counts),
        "entropy": -_over_contexts(share * (xp.exp(log_probs) * log_probs).sum(axis=1)),
    }


def _over_contexts(array: Float[AnyArray, "context *batch"]) -> Float[AnyArray, "*batch"]:
    """The sum over the contexts, by adding halves: NumPy's own sum rounds otherwise for other batch shapes."""
    xp = array.__array_namespace__()
    while len(array) > 1:
        half = len(array) // 2
        paired = array[:half] + array[half : 2 * half]
        array = xp.concatenate([paired, array[2 * half :]]) if len(array) % 2 else paired
    return array[0]
