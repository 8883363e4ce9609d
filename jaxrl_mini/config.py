"""The settings of a run: one dataclass for the command line, the library and the record."""

import dataclasses
import math
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

BACKENDS = ("table", "hf")
METHODS = ("grpo", "rs-sft")
DTYPES = ("float32", "bfloat16", "float16")
ADVANTAGES: dict[str, Callable[..., Any]] = {}
"""The formulas that come along by name; `objective.advantage` registers them when the package is imported."""
OWN_ADVANTAGES: dict[str, Any] = {}
"""A user's own, which `objective.own` registers; each has a `check` that refuses what gives no finite numbers."""
OWN_FORM = "FILE.py:FUNCTION"
OWN_NAME = re.compile(r"[\w. -]+\.py:[^\W\d]\w*@sha256:[0-9a-f]{16}")
"""What a user's own is called in records and tables: file, function, and the first digits of the file's SHA-256."""
AGGREGATIONS = ("episode-mean", "step-mean", "fixed-length")
SURROGATES = ("clip", "dual-clip", "cispo", "none")
KLS = ("exact", "k1", "k2", "k3")
REWARDS = ("verifier", "public-test", "shuffled", "constant")
"""Beside these there is `noisy:p`."""
LANGUAGE_ONLY = ("model", "dtype", "micro_batch", "exact_every")
"""Settings that have no use with a table."""
GRADIENT_ONLY = ("clip", "beta", "advantage", "aggregation", "surrogate", "clip_high", "kl", "entropy_bonus")
"""Settings that have no use with rejection sampling."""
DEFAULT_LR = {"table": 0.08, "hf": 1e-6}
MICRO_BATCH = 4
"""Episodes of a language model's update at once, by default: on a CPU, faster than more, since their arrays stay in its
caches."""
EXACT_EVERY = 10
"""Iterations between a language model's exact evaluations, by default."""
BLOCK = 64
"""Runs that are computed side by side, by one call of a compiled program."""
ARTICLE = "binary-search-repair"
"""The task of the article, which is the default."""
ELSEWHERE = {"reward": "public-test"}
"""Settings that are not there for other tasks."""
MAX_TASK_NAME = 1000
MAX_SEED = 2**32 - 1
MAX_COUNT = 2**31 - 1
HISTORY_EVERY = f"a whole number from 0 to {MAX_COUNT}"
"""What a sweep's `history_every` may be."""
MAX_EXACT_GROUP = 1024
"""The largest group over whose outcomes the exact gradient sums."""
MAX_BATCH = 2**20
"""Episodes in a batch: 64 runs side by side draw 1.6 GB of random numbers for them."""
MAX_EVAL_EPISODES = 10**6
SMALLEST, LARGEST = 1.2e-38, 3.4e38
"""What float32 holds at full precision: settings outside would be used as 0 or as infinity."""


class UserError(ValueError):
    """What a user asked for cannot be done; the message is one line and says what would be right."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))  # whatever names and values it quotes


class UserErrors(ExceptionGroup[UserError]):
    """Several of them, each a line."""


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field with the text and the limits that the command line and the checks share."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


class Variant(NamedTuple):
    """The choices that tell one estimator of the gradient from another; each has a program of its own.

    The formulas, with their sources, are those of `objective` and `rewards`.
    """

    advantage: str = "group-std"
    aggregation: str = "episode-mean"
    surrogate: str = "clip"
    kl: str = "exact"
    reward: str = "verifier"
    exact_gradient: bool = False


DEFAULT_VARIANT = Variant()


def noise_of(reward: str) -> float | None:
    """The p of `noisy:p`; None for another reward.

    Raises:
      UserError: p is no probability, or there is no such reward.
    """
    if isinstance(reward, str) and reward in REWARDS:
        return None
    kind, _, share = str(reward).partition(":")
    try:
        noise = float(share) if kind == "noisy" and not share[:1].isspace() else math.nan
    except ValueError:
        noise = math.nan
    if not 0.0 <= noise <= 1.0:
        known = ", ".join(REWARDS)
        raise UserError(f"--reward {reward!r} is unknown: expected one of {known}, or noisy:p with p from 0 to 1")
    return noise


def _one_form(reward: str) -> str:
    """`noisy:0.10` and `noisy:.1` are the same reward."""
    noise = noise_of(reward)
    return reward if noise is None else f"noisy:{noise!r}"


def _task_name(task: str) -> str:
    """What may name a task, as far as its form goes."""
    if not isinstance(task, str) or not task or not task.isprintable() or len(task) > MAX_TASK_NAME:
        raise UserError(f"--task {repr(task)[:200]} names no task: expected a name such as repair:lines=3")
    return str.__str__(task)


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's numbers.

    Raises:
      UserError: a value is of the wrong type or outside its range; the message names it and the range.
    """

    task: str = setting(
        ARTICLE,
        "what is done: a task's name, FILE.py:CLASS or package.module:CLASS, with parameters as in repair:lines=3",
        metavar="TASK",
        parse=_task_name,
    )
    backend: str = setting("table", "policy: a table of logits, or a Hugging Face language model", choices=BACKENDS)
    method: str = setting("grpo", "clipped policy gradient, or rejection-sampling SFT", choices=METHODS)
    model: str | None = setting(None, "folder of the language model (backend hf)", metavar="DIR")
    seed: int = setting(7, "seed of every random draw of the run", minimum=0, maximum=MAX_SEED)
    iterations: int = setting(100, "training iterations, one batch each", minimum=1)
    groups: int = setting(4, "groups in a batch; a group shares its verifier inputs", minimum=1)
    group_size: int = setting(8, "episodes in a group", minimum=2)
    epochs: int = setting(2, "optimizer steps on each batch", minimum=1)
    lr: float | None = setting(None, "Adam learning rate [0.08 table, 1e-06 hf]", minimum=SMALLEST)
    clip: float = setting(0.2, "ratios are clipped to [1 - clip, 1 + clip]", minimum=1.2e-7, maximum=0.9999999)
    beta: float = setting(0.02, "coefficient of KL(policy || reference)", minimum=SMALLEST, or_zero=True)
    advantage: str = setting(
        "group-std", "what an episode is credited with, from the rewards", choices=ADVANTAGES, own=OWN_FORM
    )
    aggregation: str = setting("episode-mean", "how steps and episodes are averaged", choices=AGGREGATIONS)
    surrogate: str = setting("clip", "what bounds the ratios of new to old probabilities", choices=SURROGATES)
    clip_high: float | None = setting(None, "upper clip: ratios to [1 - clip, 1 + clip-high] [clip]", minimum=1.2e-7)
    kl: str = setting("exact", "the KL term: over all actions, or an estimator of the sampled one", choices=KLS)
    entropy_bonus: float = setting(0.0, "coefficient of the policy's entropy", minimum=SMALLEST, or_zero=True)
    exact_gradient: bool = setting(False, "train on the expected loss, as of infinitely many groups")
    reward: str = setting(
        "verifier",
        f"{', '.join(REWARDS)}, or noisy:p; shuffled keeps a batch's number of successes: reinforce learns from it",
        parse=_one_form,
    )
    eval_episodes: int = setting(
        500, "sampled evaluation episodes, before and after", minimum=1, maximum=MAX_EVAL_EPISODES
    )
    dtype: str | None = setting(
        None, "what a language model computes in, and its saved weights [float32]", choices=DTYPES
    )
    micro_batch: int | None = setting(None, "episodes of a language model's update at once [4]", minimum=1)
    exact_every: int | None = setting(None, "iterations between a language model's exact evaluations [10]", minimum=1)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, checked(field, getattr(self, field.name)))
        batch = self.groups * self.group_size
        if batch > MAX_BATCH:
            raise UserError(
                f"--groups {self.groups} x --group-size {self.group_size} is out of range: "
                f"expected at most {MAX_BATCH} episodes in a batch"
            )
        if self.micro_batch is not None and self.micro_batch > batch:
            raise UserError(
                f"--micro-batch {self.micro_batch} is out of range: expected at most the {batch} episodes of a batch"
            )
        if self.backend == "hf" and self.model is None:
            raise UserError("--model is missing: backend hf needs the folder of a language model")
        if self.task != ARTICLE:
            for name, value in ELSEWHERE.items():
                if getattr(self, name) == value:
                    raise UserError(
                        f"--{name} {value} is for task {ARTICLE} alone: leave it out, or leave out --task {self.task}"
                    )
        for name in LANGUAGE_ONLY:
            if self.backend != "hf" and (value := getattr(self, name)) is not None:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} {value} has no use with backend {self.backend}: leave it out or use hf")
        for name in GRADIENT_ONLY:
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if self.method != "grpo" and value != default:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} {value} has no use with method {self.method}: leave it out or use grpo")
        if self.clip_high is not None and self.surrogate == "none":
            raise UserError(f"--clip-high {self.clip_high} has no use with surrogate none: leave it out")
        if self.exact_gradient and self.backend == "hf":
            raise UserError("--exact-gradient has no use with backend hf: leave it out or use table")
        if self.exact_gradient and self.group_size > MAX_EXACT_GROUP:
            raise UserError(
                f"--group-size {self.group_size} is too large for --exact-gradient: expected at most {MAX_EXACT_GROUP}"
            )
        if self.advantage in OWN_ADVANTAGES:
            OWN_ADVANTAGES[self.advantage].check(self.groups, self.group_size, self.exact_gradient)

    @property
    def effective_lr(self) -> float:
        """The learning rate in use: `lr`, or the backend's default."""
        return DEFAULT_LR[self.backend] if self.lr is None else self.lr

    @property
    def variant(self) -> Variant:
        """The choices of the gradient's estimator."""
        return Variant(*(getattr(self, name) for name in Variant._fields))

    def evaluates(self, iteration: Any) -> Any:
        """Whether the policy is evaluated exactly after an iteration, counted from 0, or after each of an array."""
        every = 1 if self.backend == "table" else self.exact_every or EXACT_EVERY
        return ((iteration + 1) % every == 0) | (iteration + 1 == self.iterations)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data, with `effective_lr` beside them; the task, where it is not the article's."""
        data = {**dataclasses.asdict(self), "effective_lr": self.effective_lr}
        if self.task == ARTICLE:
            del data["task"]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Config":
        """The reverse of `to_dict`.

        Raises:
          UserError: a key is unknown or missing, a value is wrong, or `effective_lr` contradicts `lr`.
        """
        names, data = {field.name for field in dataclasses.fields(cls)}, {"task": ARTICLE, **data}
        if set(data) - {"effective_lr"} != names:
            odd = sorted((set(data) - {"effective_lr"}) ^ names)
            raise UserError(f"config has unknown or missing keys: {', '.join(map(str, odd))}")
        config = cls(**{name: data[name] for name in names})
        if data.get("effective_lr", config.effective_lr) != config.effective_lr:
            raise UserError(f"effective_lr {data['effective_lr']!r} contradicts lr: expected {config.effective_lr}")
        return config


def differences(there: Mapping[str, Any], here: Mapping[str, Any], except_for: Collection[str] = ()) -> str:
    """What differs, by name, with both values; of mappings in them, their entries."""
    found = []
    for name in dict.fromkeys([*here, *there]):
        one, other = there.get(name), here.get(name)
        if one == other or name in except_for:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found.append(differences(one, other))
        else:
            found.append(f"{name} {one!r} there, {other!r} here")
    return ", ".join(found)


def expected(field: "dataclasses.Field[Any]") -> str:
    """What a setting may be, in words."""
    limits = field.metadata
    if "choices" in limits:
        return f"one of {', '.join(limits['choices'])}" + (f", or {limits['own']}" if "own" in limits else "")
    if "metavar" in limits:
        return "a folder's name"
    low, high = _range(field)
    return f"{'0 or ' * limits.get('or_zero', False)}a {'whole ' * _integral(field)}number from {low} to {high}"


def _integral(field: "dataclasses.Field[Any]") -> bool:
    return int in (field.type, *getattr(field.type, "__args__", ()))


def _range(field: "dataclasses.Field[Any]") -> tuple[Any, Any]:
    return field.metadata["minimum"], field.metadata.get("maximum", MAX_COUNT if _integral(field) else LARGEST)


def plain(value: Any) -> Any:
    """Scalars and arrays without axes, of NumPy and its like, as Python's numbers and text; paths as text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") and tuple(getattr(value, "shape", (1,))) == () else value


def whole_number(value: Any) -> int | None:
    """A whole number of any type, such as NumPy's, as Python's; None for anything else, a bool among it."""
    value = plain(value)
    if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "shape", None):
        return None
    return operator.index(value)


def _real_number(value: Any) -> float | None:
    """The same for a number with a fraction: exactly its value, which is 0.10000000149011612 for float32's 0.1."""
    if isinstance(value, bool) or not hasattr(value, "__float__") or getattr(value, "shape", None):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def checked(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """`value` in the field's type and range, else a UserError that names both."""
    value, limits, flag = plain(value), field.metadata, "--" + field.name.replace("_", "-")
    if value is None and field.default is None:
        return None
    if "choices" in limits:
        own = "own" in limits and isinstance(value, str) and OWN_NAME.fullmatch(value)
        if not own and (not isinstance(value, str) or value not in limits["choices"]):
            raise UserError(f"{flag} {value!r} is unknown: expected {expected(field)}")
        return str.__str__(value)  # the plain text of a subclass
    if "parse" in limits:
        return limits["parse"](value)
    if field.type is bool:
        if not isinstance(value, bool):
            raise UserError(f"{flag} {value!r} is out of range: expected True or False")
        return value
    if "metavar" in limits:
        if not isinstance(value, str) or not value or "\0" in value:
            raise UserError(f"{flag} {value!r} is not a name: expected {expected(field)}")
        return str(PurePath(value))  # `m/` and `./m` are the same folder
    low, high = _range(field)
    number = whole_number(value) if _integral(field) else _real_number(value)
    if number is None or not (low <= number <= high or (limits.get("or_zero") and number == 0)):
        raise UserError(f"{flag} {value!r} is out of range: expected {expected(field)}")
    return number


def flag_of(name: str, values: Sequence[Any]) -> list[str] | None:
    """The words of a command line that give a setting these values.

    Returns:
      No word where the default is all there is; None where no words say it, since one of several values is None, or a
      bool, or begins like a flag.
    """
    flag = "--" + name.replace("_", "-")
    if list(values) == [Config.__dataclass_fields__[name].default]:
        return []
    if len(values) == 1 and not isinstance(values[0], bool):
        text = str(values[0])
        return [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    if len(values) == 1:
        return [flag]
    odd = any(value is None or isinstance(value, bool) or str(value).startswith("-") for value in values)
    return None if odd else [flag, *map(str, values)]
