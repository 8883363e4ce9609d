"""Advantages, credit and losses: pure functions of arrays, each with its formula and source.

Losses and figures take JAX arrays inside a jitted program and NumPy arrays outside of one.

The ratio of new to behavior probability depends on (context, action) only, so the loss of a batch is a function
of a few sums over the batch (`Credit`). It is exact, its cost does not grow with the batch, and it is a sum over
contexts, so gradients can be accumulated over any partition of them.

In the first epoch after sampling every ratio is 1. With `episode-mean`, and advantages that sum to 0 in a group (all
but those of `reinforce` do), the surrogate is then 0 but for rounding (that of `cispo` is a sum of log p), while its
gradient is not: read the gradient norm and the mixed groups beside the loss. But for `reinforce`, a group whose rewards
are all equal has advantage 0; a batch of such groups has loss beta * KL, and moves by it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_mini.objective.credit import (
        Merged,
        advantages,
        group_advantages,
        history_credit,
        merge,
        play_credit,
        state_credit,
    )
    from jaxrl_mini.objective.kl import kl_terms
    from jaxrl_mini.objective.loss import loss_terms, measure
    from jaxrl_mini.objective.surrogates import surrogate

__all__ = [
    "Merged",
    "advantages",
    "group_advantages",
    "history_credit",
    "kl_terms",
    "loss_terms",
    "measure",
    "merge",
    "play_credit",
    "state_credit",
    "surrogate",
]

_HOMES = {"kl_terms": "kl", "loss_terms": "loss", "measure": "loss", "surrogate": "surrogates"}


def __getattr__(name: str) -> Any:
    # On first use: the names of the advantages are known to every process, also to one that has no use for jax.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'credit')}"), name)
