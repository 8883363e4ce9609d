"""What a sweep runs: every setting with every seed, cut into parts whose content depends on the grid alone."""

import dataclasses
import hashlib
import itertools
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxrl_mini.config import (
    BLOCK,
    HISTORY_EVERY,
    MAX_COUNT,
    MAX_SEED,
    Config,
    UserError,
    Variant,
    checked,
    flag_of,
    plain,
    whole_number,
)

MAX_BLOCKS = 16
"""Blocks in a part, at most: what a killed process may lose, and what stays in memory."""

PARTS = 64
"""A grid is cut into at least so many parts, as long as each holds a block, so that many workers share it evenly."""

BLOCK_EPISODES = 100 * 32
"""Training episodes of a run at default settings; longer runs make smaller parts."""

PROGRAM_FIELDS = ("method", "groups", "group_size", "epochs", *Variant._fields)
"""The settings that shape a compiled program (see `_program`)."""

MAX_SETTINGS, MAX_LISTED_SEEDS = 100_000, 1_000_000
"""Of a grid. A range of seeds may be longer: it takes no memory."""

SHARED_FIELDS = (*PROGRAM_FIELDS, "iterations", "eval_episodes")
"""Runs of settings that agree in these fill blocks together: the others are data."""


MODEL_FIELDS = ("backend", "model", "dtype", "micro_batch", "exact_every")
"""The same for settings that are those of a language model; its runs are computed one by one."""


class Part(NamedTuple):
    """Consecutive runs of a grid that are computed and stored together."""

    number: int
    shared: Config
    """What `SHARED_FIELDS` are for all of its runs."""
    settings: tuple[Config, ...]
    """The settings of the grid that share these; the part's runs have some of them."""
    numbers: np.ndarray
    """int64 [run]: numbers of the runs in the grid."""
    setting_numbers: np.ndarray
    """int32 [run]: each run's setting, as its place in `Grid.settings`."""
    local_settings: np.ndarray
    """int32 [run]: the same as its place in `settings`."""
    seeds: np.ndarray
    """uint32 [run]."""


class _Family(NamedTuple):
    """The settings that share a program and `SHARED_FIELDS`, with where their runs and parts start."""

    places: tuple[int, ...]
    first_run: int
    runs: int
    first_part: int
    parts: int
    part_runs: int


@dataclass(frozen=True)
class Grid:
    """Settings x seeds.

    Raises:
      UserError: no seed or no setting, a seed out of range, or anything listed twice.
    """

    settings: tuple[Config, ...]
    """Each with seed 0 in place of the run's, and its learning rate in place of None."""
    seeds: range | tuple[Any, ...]
    history_every: int = 1
    """Every so many iterations the metrics are kept, and after the last; 0 keeps none."""

    def __post_init__(self) -> None:
        given = _as_list(self.settings)
        if odd := [one for one in given if not isinstance(one, Config)]:
            raise UserError(f"settings {odd[0]!r} is no Config: expected a list of them")
        if len(given) > MAX_SETTINGS:
            raise UserError(f"the sweep has more than {MAX_SETTINGS} settings: expected at most so many")
        settings = tuple(dataclasses.replace(config, seed=0, lr=config.effective_lr) for config in given)
        object.__setattr__(self, "settings", settings)
        object.__setattr__(self, "seeds", _as_range(self.seeds))
        if not self.settings or not self.seeds:
            raise UserError("the sweep is empty: give at least one seed and one value of each setting")
        ends = (self.seeds[0], self.seeds[-1]) if isinstance(self.seeds, range) else self.seeds
        for seed in ends:
            if type(seed) is not int or not 0 <= seed <= MAX_SEED:
                raise UserError(f"--seeds {seed!r} is out of range: expected whole numbers from 0 to {MAX_SEED}")
        _refuse_repeated("--seeds", () if isinstance(self.seeds, range) else self.seeds)
        _refuse_repeated("setting", [_label(config) for config in self.settings])
        every = whole_number(self.history_every)
        if every is None or not 0 <= every <= MAX_COUNT:
            raise UserError(f"--history-every {self.history_every!r} is out of range: expected {HISTORY_EVERY}")
        object.__setattr__(self, "history_every", every)

    @classmethod
    def product(cls, seeds: Iterable[Any], history_every: int = 1, **values: Any) -> "Grid":
        """All combinations of the values given for each field of `Config`; one value may stand for a list of one."""
        fields = {field.name: field for field in dataclasses.fields(Config) if field.name != "seed"}
        unknown = sorted(set(values) - set(fields))
        if unknown:
            raise UserError(
                f"a sweep has no setting {', '.join(unknown)}: name fields of Config, and seeds for the seed"
            )
        lists = {
            name: tuple(checked(fields[name], value) for value in _as_list(given)) for name, given in values.items()
        }
        for name, given in lists.items():
            _refuse_repeated("--" + name.replace("_", "-"), given)
        count = math.prod(map(len, lists.values()))
        if count > MAX_SETTINGS:
            raise UserError(f"the sweep has {count} settings: expected at most {MAX_SETTINGS}")
        combinations = itertools.product(*lists.values())
        settings = tuple(Config(seed=0, **dict(zip(lists, one, strict=True))) for one in combinations)
        return cls(settings, _as_range(seeds), history_every)

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return len(self.settings) * len(self.seeds)

    @property
    def programs(self) -> int:
        """How many training programs are compiled."""
        return len({_program(config) for config in self.settings})

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return sum(family.parts for family in self._families)

    @cached_property
    def _families(self) -> tuple[_Family, ...]:
        places: dict[tuple[Any, ...], list[int]] = {}
        for place, config in enumerate(self.settings):
            places.setdefault((_program(config), _values(config, SHARED_FIELDS)), []).append(place)
        families, run, part = [], 0, 0
        even = max(1, -(-self.runs // BLOCK) // PARTS)
        for members in places.values():
            config = self.settings[members[0]]
            length = max(1.0, config.iterations * config.groups * config.group_size / BLOCK_EPISODES)
            part_runs = 1 if config.backend == "hf" else BLOCK * max(1, int(min(MAX_BLOCKS / length, even)))
            runs = len(members) * len(self.seeds)
            families.append(_Family(tuple(members), run, runs, part, -(-runs // part_runs), part_runs))
            run, part = run + runs, part + families[-1].parts
        return tuple(families)

    def part(self, number: int) -> Part:
        """One part; the runs of a setting follow each other, in the order of the seeds."""
        family = next(one for one in self._families if number < one.first_part + one.parts)
        first = (number - family.first_part) * family.part_runs
        local = np.arange(first, min(first + family.part_runs, family.runs))
        local_settings, seed_places = np.divmod(local, len(self.seeds))
        if isinstance(self.seeds, range):
            seeds = self.seeds.start + self.seeds.step * seed_places
        else:
            seeds = self._seed_array[seed_places]
        return Part(
            number,
            self.settings[family.places[0]],
            tuple(self.settings[place] for place in family.places),
            family.first_run + local,
            np.array(family.places, np.int32)[local_settings],
            local_settings.astype(np.int32),
            seeds.astype(np.uint32),
        )

    def config_of(self, part: Part) -> Config:
        """The settings of a part's first run, with its seed."""
        return dataclasses.replace(part.settings[part.local_settings[0]], seed=int(part.seeds[0]))

    def part_runs(self, number: int) -> int:
        """How many runs a part has."""
        family = next(one for one in self._families if number < one.first_part + one.parts)
        return min(family.part_runs, family.runs - (number - family.first_part) * family.part_runs)

    @cached_property
    def _seed_array(self) -> np.ndarray:
        return np.array(self.seeds, np.int64)

    def history_rows(self, config: Config) -> int:
        """Rows of history that a run of this setting leaves."""
        return -(-config.iterations // self.history_every) if self.history_every else 0

    def to_dict(self) -> dict[str, Any]:
        """The grid as plain data."""
        settings = [config.to_dict() for config in self.settings]
        for setting in settings:
            del setting["seed"]
        seeds: Any = self.seeds
        if isinstance(seeds, range):
            seeds = {"start": seeds.start, "stop": seeds.stop, "step": seeds.step}
        else:
            seeds = list(seeds)
        return {"settings": settings, "seeds": seeds, "history_every": self.history_every}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Grid":
        """The reverse of `to_dict`.

        Raises:
          UserError: something is missing, unknown or out of range.
        """
        try:
            seeds, settings = data["seeds"], [Config.from_dict({**one, "seed": 0}) for one in data["settings"]]
            as_range = range(seeds["start"], seeds["stop"], seeds["step"]) if isinstance(seeds, dict) else tuple(seeds)
            return cls(tuple(settings), as_range, data["history_every"])
        except UserError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the grid is not readable ({error!r})") from error

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `to_dict`, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def differences(self, other: "Grid") -> list[str]:
        """What differs between two grids, in words: the name, and both values."""
        pairs = [
            (field.name, _distinct(self.settings, field.name), _distinct(other.settings, field.name))
            for field in dataclasses.fields(Config)
        ]
        pairs += [("seeds", _shown(self.seeds), _shown(other.seeds))]
        pairs += [("history_every", str(self.history_every), str(other.history_every))]
        found = [f"{name} {mine} there, {theirs} here" for name, mine, theirs in pairs if mine != theirs]
        return found or ([] if self == other else ["the combinations or the order of the settings"])


def history_iterations(iterations: int, every: int) -> np.ndarray:
    """The numbers of the iterations whose metrics are kept: every `every`-th and the last; none for 0."""
    if every == 0:
        return np.arange(0)
    kept = np.arange(every - 1, iterations, every)
    return kept if len(kept) and kept[-1] == iterations - 1 else np.append(kept, iterations - 1)


def parse_seeds(words: Sequence[str]) -> range | tuple[int, ...]:
    """Seeds as a command line gives them: `N` alone is 0 to N-1, `a:b` is a to b-1, several numbers are themselves.

    Raises:
      UserError: a word is neither a number nor a range, or a range is empty.
    """
    if len(words) == 1 and ":" not in words[0]:
        return _range(words[0], 0, _seed(words[0]))
    ranges = []
    for word in words:
        first, colon, last = word.partition(":")
        ranges.append(_range(word, _seed(first), _seed(last) if colon else _seed(first) + 1))
    if len(ranges) > 1 and sum(map(len, ranges)) > MAX_LISTED_SEEDS:
        raise UserError(f"--seeds lists more than {MAX_LISTED_SEEDS} seeds: give one range a:b")
    return ranges[0] if len(ranges) == 1 else tuple(itertools.chain(*ranges))


def _range(word: str, first: int, last: int) -> range:
    if last <= first or last > MAX_SEED + 1:
        raise UserError(f"--seeds {word} is out of range: expected at least one seed, from 0 to {MAX_SEED}")
    return range(first, last)


def _seed(word: str) -> int:
    number = parse_number(word)
    if number is None:
        raise UserError(f"--seeds {word!r} is no seed: expected N, several numbers, or a:b")
    return number


def parse_number(word: str) -> int | None:
    """A whole number from 0 in decimal digits, at most 20; None for anything else."""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 20 else None


def _as_range(seeds: Iterable[Any]) -> range | tuple[Any, ...]:
    """Consecutive seeds as a range, so that one grid has one form."""
    if isinstance(seeds, range):
        return range(seeds.start, seeds.start + 1) if seeds and seeds[0] == seeds[-1] else seeds  # len has a limit
    if isinstance(plain(seeds), str) or not isinstance(plain(seeds), Iterable):
        raise UserError(f"seeds {seeds!r} is no list of seeds: expected range(10), say, or [7, 19, 42]")
    given = seeds if isinstance(seeds, Sized) else tuple(itertools.islice(seeds, MAX_LISTED_SEEDS + 1))
    if given is not seeds and len(given) > MAX_LISTED_SEEDS:
        raise UserError(f"--seeds lists more than {MAX_LISTED_SEEDS} seeds: give one range")
    listed = tuple(seed if (number := whole_number(seed)) is None else number for seed in given)
    whole = listed and all(type(seed) is int for seed in listed)
    consecutive = whole and listed == tuple(range(listed[0], listed[0] + len(listed)))
    return range(listed[0], listed[0] + len(listed)) if consecutive else listed


def _as_list(given: Any) -> tuple[Any, ...]:
    """One value as a list of one; of an endless list, more than there may be."""
    given = plain(given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        return (given,)
    return tuple(itertools.islice(given, MAX_SETTINGS + 1))


def _values(config: Config, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(config, name) for name in names)


def _program(config: Config) -> tuple[Any, ...]:
    """What shapes a setting's compiled program: some numbers are data, but their absence is not."""
    return (
        *_values(config, ("task", *PROGRAM_FIELDS, *MODEL_FIELDS)),
        config.clip_high is None,
        config.entropy_bonus == 0,
    )


def _label(config: Config) -> str:
    return ", ".join(f"{name} {value}" for name, value in config.to_dict().items() if name not in ("seed", "lr"))


def _refuse_repeated(what: str, values: Iterable[Any]) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise UserError(f"{what} {value} is listed twice: name everything once")
        seen.add(value)


def _distinct(settings: Iterable[Config], name: str) -> str:
    return " ".join(map(str, dict.fromkeys(getattr(config, name) for config in settings)))


def _shown(seeds: range | tuple[int, ...]) -> str:
    if isinstance(seeds, range):
        return f"{seeds.start}:{seeds.stop}"
    shown: Iterator[str] = map(str, seeds[:8])
    return " ".join(shown) + (f" ... ({len(seeds)})" if len(seeds) > 8 else "")


def sweep_command(grid: "Grid", *more: str) -> str | None:
    """The command that computes this grid again; None where no command says it.

    That is where its settings are no product of values, where a setting takes several values and one of them is what
    leaving its flag out means, or where seeds follow each other in steps.
    """
    fields = [field for field in dataclasses.fields(Config) if field.name != "seed"]
    values = {field.name: list(dict.fromkeys(getattr(one, field.name) for one in grid.settings)) for field in fields}
    if type(grid).product(grid.seeds, grid.history_every, **values) != grid:
        return None
    seeds = grid.seeds
    if isinstance(seeds, range):
        if seeds.step != 1:
            return None
        words = ["--seeds", f"{seeds.start}:{seeds.stop}"]
    else:
        words = ["--seeds", *map(str, seeds)]
    for field in fields:
        flag = flag_of(field.name, values[field.name])
        if flag is None:
            return None
        words += flag
    words += ["--history-every", str(grid.history_every)]
    return shlex.join(["python", "-m", "jaxrl_mini.sweep", *words, *more])
