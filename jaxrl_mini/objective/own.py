"""An advantage of a user's own: one function, in a file that is named or as a program registers it.

It is known as FILE.py:FUNCTION@sha256:DIGEST, with the first digits of the file's SHA-256. That is what records,
checkpoints, kept policies, sweeps and recordings hold; nothing in them is ever imported: whoever wants to run such
settings again names the file, and the digest has to fit. The file stands alone: what it imports is not in the digest.
"""

import hashlib
import inspect
import itertools
import traceback
import types
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn

from jaxrl_mini.config import ADVANTAGES, OWN_ADVANTAGES, OWN_FORM, OWN_NAME, UserError
from jaxrl_mini.machine import files, hardware
from jaxrl_mini.objective.advantage import BATCH, INFINITE, Formula, Numbers, ask, asks_for_batch

DIGITS = 16
MAX_BYTES = 2**20
PARAMETERS = "(reward, successes, size), and batch_successes or batch_size if it needs them"
NAMESPACE = "take xp = successes.__array_namespace__(), and xp.where for where"


class Own:
    """A user's function as a formula; `inspect.signature` sees that of the function."""

    def __init__(self, function: Formula, name: str, file: str):
        self.__wrapped__, self.file = function, file
        self.shown = f"--advantage {name.partition('@')[0]}"

    def __call__(self, **counts: Any) -> Any:
        """The function's value; what NumPy says of numbers that a function then leaves out is not said."""
        import numpy as np

        with np.errstate(all="ignore"):
            return self.__wrapped__(**counts)

    def check(self, groups: int, group_size: int, of_expectations: bool) -> None:
        """Tries it at every count of a group, within batches of so many; if asked, within an infinite one, too.

        Raises:
          UserError: it raises, does not give the same numbers twice, or gives something else than finite numbers; or
            an environment variable asks jax for what it cannot do.
        """
        _check(self, groups, group_size, of_expectations)


def load_advantage(text: str) -> str:
    """The name under which `Config` knows what a user typed: FILE.py:FUNCTION is loaded, anything else stays.

    Args:
      text: the name of an advantage, or FILE.py:FUNCTION, which may have its digest behind it.

    Raises:
      UserError: there is no such file or function, the file raises, or it has another digest.
    """
    typed, at, digest = text.partition("@sha256:")
    file, _, function = typed.rpartition(":")
    if text in OWN_ADVANTAGES or not file.endswith(".py"):
        return text
    try:
        source = files.read(file, MAX_BYTES)
    except OSError as error:
        raise UserError(f"--advantage {text}: {file} cannot be read ({error.strerror})") from error
    name = _name(file, function, source)
    if at and name != f"{Path(file).name}:{function}@sha256:{digest}":
        raise UserError(f"--advantage {text}: {file} was changed, it is {name.rpartition('@')[2]} now")
    module = types.ModuleType(Path(file).stem)
    module.__file__ = file
    try:
        exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        _blame(f"--advantage {text}", file, error)
    found = vars(module).get(function)
    if not callable(found):
        there = [name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"]
        right = f"expected one of {', '.join(there)}" if there else "expected one that the file defines"
        raise UserError(f"--advantage {text}: {file} has no function {function!r}: {right}")
    return _register(found, name, file)


def register_advantage(function: Formula) -> str:
    """Registers a function that stands in a file, at its top level; returns the name under which `Config` knows it.

    Raises:
      UserError: it stands elsewhere, the file is no longer the one that was imported, or its parameters are others than
        those of an advantage.
    """
    shown = getattr(function, "__qualname__", repr(function))
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    try:
        source = files.read(file or "", MAX_BYTES)
    except OSError:
        source = b""
    if not source or not shown.isidentifier():
        raise UserError(f"the advantage {shown} has no digest: define it with def, at the top level of a file")
    try:
        there = compile(source, str(file), "exec", dont_inherit=True).co_consts
    except (SyntaxError, ValueError):
        there = ()
    if function.__code__ not in there:  # the file was changed, or it is that of a decorator
        raise UserError(f"the advantage {shown} is not as {file} has it: import it again, without a decorator")
    return _register(function, _name(str(file), shown, source), str(file))


def check_given(given: Sequence[str], having: Sequence[tuple[str, str]], instead: str = "") -> None:
    """Compares the advantages whose files a user named with those that files to be checked have.

    Args:
      given: the user's.
      having: what has an advantage, in words, and the name of that.
      instead: what else the user may do.

    Raises:
      UserError: one of a user's own is not here, and the message names it and what was given; or none has a given one.
    """
    for what, advantage in having:
        if advantage not in ADVANTAGES and advantage not in OWN_ADVANTAGES:
            others = f", and {', '.join(given)} is another" if given else ""
            raise UserError(f"{what} needs {advantage}{others}: name its file, --advantage {OWN_FORM}{instead}")
    for one in given:
        if one not in [advantage for _, advantage in having]:
            raise UserError(f"--advantage {one} has no use with {having[0][0]}, of {having[0][1]}: leave it out")


def _name(file: str, function: str, source: bytes) -> str:
    name = f"{Path(file).name}:{function}@sha256:{hashlib.sha256(source).hexdigest()[:DIGITS]}"
    if not OWN_NAME.fullmatch(name):
        typed, right = f"{file}:{function}", f"expected {OWN_FORM} in letters, digits, spaces, _, - and ."
        raise UserError(f"--advantage {typed!r} is no name for a record: {right}")
    return name


def _register(function: Formula, name: str, file: str) -> str:
    own = Own(function, name, file)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        _refuse(own, f"shows no parameters: expected {PARAMETERS}")
    wide = [one for one in BATCH if one in signature.parameters]
    try:
        signature.bind(**dict.fromkeys(["reward", "successes", "size", *wide]))
    except TypeError:
        _refuse(own, f"takes {signature}: expected {PARAMETERS}")
    if inspect.iscoroutinefunction(function):
        _refuse(own, "is async: expected a plain function")
    OWN_ADVANTAGES.setdefault(name, own)
    return name


@lru_cache(maxsize=1024)
def _check(own: Own, groups: int, group_size: int, of_expectations: bool) -> None:
    """See `Own.check`."""
    hardware.import_jax()
    import numpy as np

    from jaxrl_mini.machine import jax_settings

    every, episodes = np.arange(group_size + 1.0), groups * group_size
    others = (0, (episodes - group_size) // 2, episodes - group_size) if asks_for_batch(own) else (0,)
    batches: list[tuple[Any, Numbers]] = [(every + rest, episodes) for rest in sorted(set(others))]
    if of_expectations and asks_for_batch(own):
        batches.append((INFINITE * every / group_size, INFINITE))
    with jax_settings.own():
        for reward, batch in itertools.product((0.0, 1.0), batches):
            _check_numbers(own, reward, every, group_size, batch)
        _trace(own, episodes, group_size)


def _check_numbers(own: Own, reward: float, every: Any, group_size: int, batch: tuple[Any, Numbers]) -> None:
    """Tries it in float64 and float32: groups with some successes each, in batches with some of so many episodes."""
    import numpy as np

    tried = partial(_tried, own, reward, group_size)
    values = tried(every, *batch)
    if not np.array_equal(values, tried(every, *batch), equal_nan=True):
        _refuse(own, "gives other numbers when it is asked again: expected a function of the counts")
    with np.errstate(over="ignore"):
        single = values.astype(np.float32), tried(every.astype(np.float32), batch[0].astype(np.float32), batch[1])
    for kind, found in zip(("", " in float32"), single, strict=True):
        if len(odd := np.flatnonzero(~np.isfinite(found))):
            where = f"reward {int(reward)} with {odd[0]} successes among {group_size}"
            if asks_for_batch(own):
                where += f", {batch[0][odd[0]]:.0f} among the {batch[1]:.0f} of the batch"
            shown = found[odd[0]] if kind else values[odd[0]]
            _refuse(own, f"gives {shown} for {where}{kind}: expected a finite number for every count")
    if not np.allclose(values[:2], tried(every[:2], batch[0][:2], batch[1]), rtol=1e-9, atol=0.0):
        _refuse(own, "gives a group other numbers beside other groups: expected a function of its own counts")


def _tried(own: Own, reward: float, group_size: int, groups: Any, batch: Any, episodes: Numbers) -> Any:
    """Its values in groups with so many successes each, while their batch has so many."""
    import jax
    import numpy as np

    successes, batch = groups.copy(), batch.copy()
    for counts in (successes, batch):
        counts.setflags(write=False)  # a function that changes them is refused
    try:
        value = ask(own, reward, successes, group_size, lambda: (batch, episodes))
    except (Exception, SystemExit) as error:
        _blame(own.shown, own.file, error)
    if isinstance(value, jax.Array):
        _refuse(own, f"gives a JAX array for NumPy arrays: {NAMESPACE}")
    try:
        found = np.asarray(value)
    except Exception:
        found = np.asarray(None)
    if found.dtype.kind not in "biuf" or found.shape not in ((), successes.shape):
        _refuse(own, f"gives {_described(value)} for {len(groups)} groups: expected a number for each, or one for all")
    return np.broadcast_to(found.astype(successes.dtype), successes.shape)


def _trace(own: Own, episodes: int, group_size: int) -> None:
    """Tries it on JAX arrays, as training has them: counts by [group, run], and by [run]."""
    import jax

    def both(successes: jax.Array, batch: jax.Array) -> list[Any]:
        return [ask(own, reward, successes, group_size, lambda: (batch, episodes)) for reward in (0.0, 1.0)]

    try:
        found = jax.eval_shape(both, *(jax.ShapeDtypeStruct(shape, "float32") for shape in ((3, 2), (2,))))
    except (Exception, SystemExit) as error:
        _blame(own.shown, own.file, error, f" on JAX arrays: {NAMESPACE}")
    for one in found:
        if getattr(one, "shape", None) not in ((), (2,), (3, 2)):
            _refuse(own, f"gives {_described(one)} for JAX arrays [3, 2]: expected a number for each, or one for all")


def _refuse(own: Own, what: str) -> NoReturn:
    raise UserError(f"{own.shown} {what}")


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype} {list(shape)}"


def _blame(what: str, file: str, error: BaseException, more: str = "") -> NoReturn:
    """Says in one line what a user's file raises, and in which of its lines."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    said = (str(error).strip().splitlines() or [""])[0][:200]
    if isinstance(error, SyntaxError) and error.filename == file and error.lineno:
        lines, said = [error.lineno], error.msg
    place = f" in line {lines[-1]} of {file}" if lines else ""
    raise UserError(f"{what} raises {type(error).__name__} ({said}){place}{more}") from error
