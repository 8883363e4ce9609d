"""Whether a record's figures hold: against each other, and against those of another run of its settings."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import jsonschema

from jaxrl_mini.config import Config, UserError
from jaxrl_mini.episodes.intervals import mean_interval, success_interval
from jaxrl_mini.machine.runtime import deciding
from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS

TOLERANCE = 5e-4
"""Between platforms, times the figure where that is above 1; counts have none. With vector instructions no newer than
SSE4.2, 24 runs with the default settings differed by at most 1e-5; compiled from another program for the same formulas,
six by at most 7.5e-5; in no count."""
ROUNDING = 1e-9
"""Between a figure and what follows for it from others in float64; `FLOAT32_ROUNDING` where those are in float32."""
FLOAT32_ROUNDING = 1e-6
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
"""Breaking one of these rules of the schema makes a figure wrong; breaking another, the file no record."""
CHECKSUM = "logits_crc32"
TIMES = ("train_and_final_eval_seconds", "compile_seconds", "run_seconds")


class Finding(NamedTuple):
    """A figure that does not hold."""

    figure: str
    """Its place, such as `history[7].loss`."""
    record: Any
    expected: Any
    """What it must be; where several values are possible, the nearest."""

    @property
    def difference(self) -> int | float | None:
        """How far it is off; None where one of the two is no number."""
        if isinstance(self.record, (int, float)) and isinstance(self.expected, (int, float)):
            return abs(self.record - self.expected)
        return None

    def beyond(self, tolerance: float) -> bool:
        """Whether it is off by more than the tolerance, times the expected value where that is above 1."""
        if self.difference is None:
            return bool(self.record != self.expected)
        return not self.difference <= tolerance * max(1.0, abs(self.expected))


def check_form(path: str, record: Mapping[str, Any]) -> tuple[Config, list[Finding]]:
    """Holds a record against the published schema.

    Returns:
      Its settings, and the figures outside of their limits.

    Raises:
      UserError: the file is no record, since something is missing, added or of another type, or its settings are
        none that a run can have.
    """
    schema = json.loads(files("jaxrl_mini.runs").joinpath("record.schema.json").read_text())
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(record))
    for error in errors:
        if error.validator not in LIMITS:
            raise UserError(f"record {path} is not as the schema says: {error.json_path[2:]}: {error.message[:200]}")
    settings = {name: value for name, value in record["config"].items() if name != "effective_lr"}
    try:
        config = Config.from_dict(settings)
    except UserError as error:
        raise UserError(f"record {path}: {error}") from error
    return config, [Finding(error.json_path[2:], error.instance, error.validator_value) for error in errors]


def inconsistencies(record: Mapping[str, Any], config: Config) -> list[Finding]:
    """The figures of a record that contradict its other figures or its settings, without running anything."""
    steps, actions = MAX_STEPS, NUM_ACTIONS
    if "task" in record:
        steps, actions = record["task"]["max_steps"], len(record["task"]["actions"])
    claims = [("config.effective_lr", record["config"]["effective_lr"], config.effective_lr, 0.0)]
    for when in ("before", "after"):
        claims += _evaluation_claims(when, record[when], config, steps)
        for split, figures in record[when].get("splits", {}).items():
            claims += _evaluation_claims(f"{when}.splits.{split}", figures, config, steps)
    claims.append(("length of history", len(record["history"]), config.iterations, 0.0))
    for place, row in enumerate(record["history"]):
        claims += _iteration_claims(f"history[{place}]", place, row, config, actions)
    final, last = record["after"]["exact_success_rate"], record["history"][-1]["exact_success_rate"]
    claims.append(("after.exact_success_rate", final, last, FLOAT32_ROUNDING))
    elapsed, compiling, running = (record["timing"][name] for name in TIMES)
    claims.append(("timing.run_seconds", running, elapsed - compiling, ROUNDING))
    findings = ((Finding(*claim[:3]), claim[3]) for claim in claims)
    return [finding for finding, tolerance in findings if finding.beyond(tolerance)]


Claims = Iterator[tuple[str, Any, Any, float]]
"""A figure, its value, what it must be according to others, or the nearest possible value, and the tolerance."""


def _evaluation_claims(when: str, figures: Mapping[str, Any], config: Config, steps: int) -> Claims:
    """Rates follow from counts, and so do the intervals, Student's from the actions and the sum of their squares.

    The record lacks that sum; it is the possible whole number that comes nearest to the interval's width.
    """
    episodes = config.eval_episodes
    yield f"{when}.episodes", figures["episodes"], episodes, 0.0
    successes = _clipped(figures["successes"], 0, episodes)
    yield f"{when}.successes", figures["successes"], successes, 0.0
    yield f"{when}.success_rate", figures["success_rate"], successes / episodes, ROUNDING
    actions = round(_clipped(figures["mean_actions"], 1, steps) * episodes)
    yield f"{when}.mean_actions", figures["mean_actions"], actions / episodes, ROUNDING
    intervals = {
        "success_rate_interval": success_interval(successes, episodes),
        "mean_actions_interval": _nearest_mean_interval(figures["mean_actions_interval"], actions, episodes, steps),
    }
    for name, interval in intervals.items():
        ours, theirs = interval or (None,), figures[name] or (None,)
        yield f"length of {when}.{name}", len(theirs), len(ours), 0.0
        for i, (value, expected) in enumerate(zip(theirs, ours, strict=False)):
            yield f"{when}.{name}[{i}]", value, expected, ROUNDING
    limits = {"exact_success_rate": (0, 1), "exact_mean_actions": (1, steps)}
    for name, (low, high) in limits.items():
        yield f"{when}.{name}", figures[name], _clipped(figures[name], low, high), ROUNDING
    kl = figures.get("exact_mean_kl")
    yield f"presence of {when}.exact_mean_kl", "exact_mean_kl" in figures, config.backend == "hf", 0.0
    yield f"{when}.exact_mean_kl", kl, 0.0 if kl and when == "before" else _clipped(kl, 0, math.inf), FLOAT32_ROUNDING


def _nearest_mean_interval(
    interval: Sequence[float] | None, actions: int, episodes: int, steps: int
) -> tuple[float, float] | None:
    """The Student interval of episodes with so many actions in all whose width comes nearest to that of another."""
    unit = mean_interval(0, episodes - 1, episodes)  # of variance 1
    if unit is None:
        return None
    low, high = interval or (0.0, 0.0)
    spread = min(abs(high / 2 - low / 2) / unit[1], steps**2)
    squares = spread**2 * (episodes - 1) + actions**2 / episodes
    # An episode of n = 1 to 6 actions has (n - 1) (n - 6) <= 0, and n^2 is odd where n is.
    squares = _clipped(squares, actions**2 / episodes, (steps + 1) * actions - steps * episodes)
    return mean_interval(actions, actions + 2 * round((squares - actions) / 2), episodes)


def _iteration_claims(place: str, number: int, row: Mapping[str, Any], config: Config, actions: int) -> Claims:
    batch = config.groups * config.group_size
    yield f"{place}.iteration", row["iteration"], number, 0.0
    successes = round(row["train_success_rate"] * batch)
    yield f"{place}.train_success_rate", row["train_success_rate"], successes / batch, ROUNDING
    by_verifier = config.reward == "verifier"
    yield f"presence of {place}.mean_reward", "mean_reward" in row, not by_verifier, 0.0
    rewarded = successes if by_verifier else round(row.get("mean_reward", 0.0) * batch)
    yield f"{place}.mean_reward", row.get("mean_reward"), None if by_verifier else rewarded / batch, ROUNDING
    mixed = _nearest_mixed(row["mixed_groups"], rewarded, config.groups, config.group_size)
    yield f"{place}.mixed_groups", row["mixed_groups"], mixed, 0.0
    sft = config.method == "rs-sft"
    yield f"{place}.retained_episodes", row.get("retained_episodes"), rewarded if sft else None, 0.0
    learns = rewarded > 0 or not sft or config.exact_gradient
    yield f"{place}.optimizer_steps", row["optimizer_steps"], config.epochs if learns else 0, 0.0
    if not learns and row["entropy"] is not None:  # else the policy is no longer made of numbers
        yield f"{place}.loss", row["loss"], 0.0, 0.0
        yield f"{place}.gradient_norm", row["gradient_norm"], 0.0, 0.0
    highest = math.log(actions)
    rounding = 0.0
    if config.backend == "table":
        # A log-probability is rounded where its logit is, and that has moved by about the learning rate a step: so
        # far the probabilities of a state, at most one each, may add up to another number than 1.
        rounded = config.effective_lr * config.epochs * (number + 1) * 2.0**-23
        rounding = highest * min(math.expm1(min(rounded, 2.0)), actions - 1)
    limits = {
        "gradient_norm": (math.inf, 0.0), "mean_kl": (math.inf, rounding), "entropy": (highest, rounding),
        "exact_success_rate": (1, 0.0),
    }  # fmt: skip
    for name, (high, more) in limits.items():
        yield f"{place}.{name}", row[name], _clipped(row[name], 0, high), FLOAT32_ROUNDING + more
    if config.backend == "table" and row["entropy"] is not None:  # the reference policy is uniform
        yield f"{place}.mean_kl", row["mean_kl"], highest - row["entropy"], FLOAT32_ROUNDING + rounding
    if not config.evaluates(number):
        yield f"{place}.exact_success_rate", row["exact_success_rate"], None, 0.0


def _nearest_mixed(value: int, successes: int, groups: int, group_size: int) -> int:
    """The possible number of groups with successes and failures that is nearest to a value.

    m mixed groups hold m to m * (group_size - 1) successes; the rest must be whole groups, of the others.
    """

    def possible(mixed: int) -> bool:
        whole_at_least = -(-(successes - mixed * (group_size - 1)) // group_size)
        return max(whole_at_least, 0) <= min((successes - mixed) // group_size, groups - mixed)

    most = min(groups, successes, groups * group_size - successes)
    around = (_clipped(value + step, 0, most) for step in (0, -1, 1, -2, 2))
    return next(mixed for mixed in around if possible(mixed))  # never more than two apart


def _clipped(value: Any, low: Any, high: Any) -> Any:
    """The nearest value from `low` to `high`; None for None."""
    return None if value is None else min(max(value, low), high)


def differences(record: Mapping[str, Any], again: Mapping[str, Any], tolerance: float) -> list[Finding]:
    """The figures of a record that differ from those of another run of its settings; counts have no tolerance.

    Without a tolerance the final policies are compared, too, by their checksums, where the record has one.
    """
    theirs, ours = figures(record), figures(again)
    if not tolerance and CHECKSUM in record:
        theirs[CHECKSUM], ours[CHECKSUM] = record[CHECKSUM], again[CHECKSUM]
    findings = [Finding(name, theirs.get(name), ours.get(name)) for name in {**theirs, **ours}]
    return [one for one in findings if one.beyond(0.0 if isinstance(one.expected, int) else tolerance)]


def figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """Every figure of a record but its times, by its place."""
    return {name: value for part in ("before", "after", "history") for name, value in _leaves(part, record[part])}


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{place}.{name}", item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _leaves(f"{place}[{i}]", item)
    else:
        yield place, value


def elsewhere(record: Mapping[str, Any], here: Mapping[str, Any], config: Config) -> dict[str, list[Any]]:
    """In what two runtimes differ that decides figures, there and here; nothing: the figures agree to the bit.

    What the record does not state, as one of an earlier version, may differ.
    """
    there, ours = (deciding(one, threads=config.backend == "hf") for one in (record["runtime"], here))
    return {name: [there.get(name), ours.get(name)] for name in {**ours, **there} if there.get(name) != ours.get(name)}
