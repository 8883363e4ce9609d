"""Which task is meant: a name, a class in a file, a class in a module, each with parameters behind it."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxrl_mini.config import UserError
from jaxrl_mini.tasks.bandit import Bandit
from jaxrl_mini.tasks.compiled import CompiledTask, compile_task
from jaxrl_mini.tasks.deep_sea import DeepSea
from jaxrl_mini.tasks.enumeration import raised
from jaxrl_mini.tasks.guess import Guess
from jaxrl_mini.tasks.lines import Repair
from jaxrl_mini.tasks.repair import NAME, BinarySearchRepair
from jaxrl_mini.tasks.task import Task
from jaxrl_mini.tasks.toy_text import ToyText

FORMS = "NAME, FILE.py:CLASS or package.module:CLASS, with parameters behind it as in repair:lines=3,hidden=true"
_registered: dict[str, Callable[..., Task]] = {
    NAME: BinarySearchRepair,
    "repair": Repair,
    "bandit": Bandit,
    "deep-sea": DeepSea,
    "guess": Guess,
    "gymnasium": ToyText,
}


def register(name: str, make: Callable[..., Task]) -> None:
    """Lets `--task NAME` mean a task; `make` is its class, or a function of its parameters.

    Raises:
      UserError: the name is taken, or has a character that a specification uses otherwise.
    """
    if not name or not all(character.isalnum() or character in "-_" for character in name):
        raise UserError(f"task name {name!r} cannot be used: expected letters, digits, - and _")
    if _registered.get(name, make) is not make:
        raise UserError(f"task name {name!r} is taken: choose another")
    _registered[name] = make


def is_registered(specification: str) -> bool:
    """Whether a specification names a task that comes along, or was registered: no file or module."""
    return specification.partition(":")[0] in _registered


def load_again(
    what: str, specification: str, digest: object, given: Collection[str], instead: str = ""
) -> CompiledTask:
    """The task that a file names; imports none that the user did not name, too.

    Args:
      what: the file, in words.
      specification: the task, as the file has it.
      digest: that of its tables, as the file has it.
      given: the tasks that the user named.
      instead: what else the user may do.

    Raises:
      UserError: the user did not name it, it is not here, or not what it was.
    """
    if not is_registered(specification) and specification not in given:
        raise UserError(f"{what} is about a task of its user's own: name it, --task {specification}{instead}")
    task = load_task(specification)
    if task.digest != digest:
        raise UserError(f"{what} is about task {specification} with digest {digest}: here it has {task.digest}")
    return task


def load_task(specification: str) -> CompiledTask:
    """The task that a specification names, as tables; made once, for a file once for what is in it.

    Raises:
      UserError: there is no such task, or it is none that can be compiled.
    """
    name = specification.partition(":")[0]
    return _compiled(specification, _content(Path(name)) if name.endswith(".py") else None)


@lru_cache(maxsize=64)
def _compiled(specification: str, content: str | None) -> CompiledTask:
    return compile_task(make_task(specification), specification)


def _content(path: Path) -> str | None:
    """What tells a file from others, and from what was in it before; None where it cannot be read."""
    try:
        return hashlib.sha256(bytes(path.resolve()) + b"\0" + path.read_bytes()).hexdigest()
    except OSError:
        return None


def make_task(specification: str) -> Task:
    """The task that a specification names, to be played.

    Raises:
      UserError: there is no such task, or its parameters are wrong.
    """
    make, parameters = _resolve(specification)
    try:
        task = make(**_parameters(specification, make, parameters))
    except UserError:
        raise
    except Exception as error:
        ours = isinstance(error, ValueError) and make in _registered.values()
        raise (
            UserError(f"task {specification}: {error}") if ours else raised(specification, "making it", error)
        ) from error
    if not isinstance(task, Task):
        raise UserError(f"task {specification} is a {type(task).__name__}: expected a subclass of jaxrl_mini.Task")
    return task


def _resolve(specification: str) -> tuple[Callable[..., Task], str]:
    """What makes the task, and the text of its parameters."""
    name, _, rest = specification.partition(":")
    if name in _registered:
        return _registered[name], rest
    head, _, parameters = rest.partition(":")
    if name.endswith(".py"):
        module = _module_of_file(specification, Path(name))
    elif head and all(part.isidentifier() for part in name.split(".")):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and name.startswith(error.name):
                raise UserError(f"task {specification}: there is no module {name}") from error
            raise raised(specification, "importing it", error) from error
        except Exception as error:
            raise raised(specification, "importing it", error) from error
    else:
        raise UserError(f"task {specification!r} is unknown: expected {', '.join(_registered)}, or {FORMS}")
    found = getattr(module, head, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        there = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Task)]
        own = ", ".join(key for key in there if key != "Task") or "none"
        raise UserError(f"task {specification}: {name} has no task {head!r}: expected one of its classes ({own})")
    return found, parameters


def _module_of_file(specification: str, path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"task {specification}: there is no file {str(path)!r}")
    path = path.resolve()
    name = f"{path.stem}_{_content(path)}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        # Not by the loader: it takes compiled files, which it tells from others by time in seconds and by size.
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt | UserError):
            raise
        raise raised(specification, "importing it", error) from error
    return module


def _parameters(specification: str, make: Callable[..., Task], text: str) -> dict[str, Any]:
    """The parameters in a text such as `lines=3,hidden=true`, as the types that the annotations name."""
    signature = inspect.signature(make).parameters
    known = [name for name, one in signature.items() if one.kind is not one.VAR_KEYWORD]
    open_ended = len(known) < len(signature)
    given: dict[str, Any] = {}
    for place, part in enumerate(text.split(",") if text else ()):
        name, equals, value = part.partition("=")
        if not equals and place == 0 and known:
            name, value = known[0], part
        if not value or name in given or not (name in known or open_ended):
            right = ", ".join(f"{one}=..." for one in known) or "none"
            raise UserError(f"task {specification}: {part!r} is no parameter of it: expected {right}")
        kind = str(signature[name].annotation) if name in known else "str"
        given[name] = _typed(specification, name, value, kind)
    return given


def _typed(specification: str, name: str, text: str, kind: str) -> Any:
    try:
        if "bool" in kind:
            return {"true": True, "false": False}[text.lower()]
        if "int" in kind:
            return int(text)
        return float(text) if "float" in kind else text
    except (KeyError, ValueError):
        right = next(word for key, word in KINDS.items() if key in kind)
        raise UserError(f"task {specification}: {name}={text} is out of range: expected {right}") from None


KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number"}
