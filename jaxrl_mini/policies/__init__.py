"""Policies: functions from what the agent has seen to log-probabilities of the six actions."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_mini.policies.language import score_candidates

__all__ = ["score_candidates"]


def __getattr__(name: str) -> Any:
    # On first use, so that a table policy does not wait for flax.
    if name in __all__:
        from jaxrl_mini.policies import language

        return getattr(language, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
