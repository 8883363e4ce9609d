"""How long runs take, about, on a core of a current CPU: said before what takes more than a minute starts."""

from pathlib import Path

from jaxrl_mini.config import BLOCK, Config

PATIENCE = 60.0
"""Seconds that nobody minds waiting without a word."""

SECONDS_PER_EPISODE = {"table": 1e-7, "hf": 1e-2}
"""Of an episode with two optimizer steps on its batch: its share in a full block of runs, or with the smallest language
model, whose weights take a megabyte."""

SECONDS_PER_STEP = 3.5e-7
"""Of a further optimizer step on a batch of the table policy, whose size does not matter."""

SECONDS_PER_ITERATION, SECONDS_PER_EXACT_ITERATION = 1e-3, 1e-2
"""What a table policy's run alone takes beside, with sampled credit and with expected credit."""

KEPT_BYTES = 700
"""What a table policy's run alone keeps of an iteration, beside its episodes of four bytes."""


def shared(config: Config) -> float:
    """Seconds of a run: as one of a full block, or of a language model."""
    training = config.iterations * config.groups * config.group_size
    if config.backend == "hf":
        episodes = training * config.epochs / 2 + 2 * config.eval_episodes
        return episodes * SECONDS_PER_EPISODE["hf"] * _megabytes(config)
    episodes = (training + 2 * config.eval_episodes) * SECONDS_PER_EPISODE["table"]
    return episodes + config.iterations * max(0, config.epochs - 2) * SECONDS_PER_STEP


def alone(config: Config) -> float:
    """Seconds of a run by itself, for which a table policy fills a block with copies."""
    if config.backend == "hf":
        return shared(config)
    each = SECONDS_PER_EXACT_ITERATION if config.exact_gradient else SECONDS_PER_ITERATION
    return BLOCK * shared(config) + config.iterations * each


def kept(config: Config) -> int:
    """Bytes of memory that a run by itself fills with what its iterations leave behind."""
    return config.iterations * (KEPT_BYTES + 4 * config.groups * config.group_size)


def _megabytes(config: Config) -> float:
    """Of a language model's weights, at least 1."""
    return max(1.0, sum(file.stat().st_size for file in Path(str(config.model)).glob("*.safetensors")) / 1e6)


def in_words(seconds: float) -> str:
    """A duration."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


def in_bytes(size: int) -> str:
    """A size."""
    unit = "GB" if size >= 1e9 else "MB" if size >= 1e6 else "kB"
    return f"{size / {'GB': 1e9, 'MB': 1e6, 'kB': 1e3}[unit]:.3g} {unit}"
