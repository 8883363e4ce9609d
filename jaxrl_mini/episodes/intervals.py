"""Intervals of what was sampled: of a success rate, and of a mean."""

CONFIDENCE = 0.95


NORMAL_QUANTILE = 1.959963984540054
"""What a standard normal number stays below with a probability of (1 + 0.95) / 2."""


def success_interval(successes: int, episodes: int) -> tuple[float, float]:
    """The 95 % score interval of a success rate; it has a width even where all episodes succeed.

    (p + z^2 / 2n -+ z * sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n). Source: Wilson 1927, JASA 22(158). The
    formula stands here since importing scipy.stats would take as long as a training run.
    """
    z, rate = NORMAL_QUANTILE, successes / episodes
    center = rate + z**2 / (2 * episodes)
    half = z * (rate * (1 - rate) / episodes + z**2 / (4 * episodes**2)) ** 0.5
    scale = 1 + z**2 / episodes
    low = 0.0 if successes == 0 else (center - half) / scale
    return low, 1.0 if successes == episodes else (center + half) / scale


def mean_interval(total: int, squared_total: int, count: int) -> tuple[float, float] | None:
    """Student's 95 % interval of a mean, from its sums; None where one observation gives no spread."""
    if count < 2:
        return None
    from scipy.special import stdtrit  # imported where a run is over: it takes longer than a short one

    mean = total / count
    variance = (squared_total - total * mean) / (count - 1)
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * (max(variance, 0.0) / count) ** 0.5
    return mean - half, mean + half
