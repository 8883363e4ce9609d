"""What the command lines share: flags from the `Config` fields, one-line errors, devices, the compilation cache."""

import argparse
import atexit
import contextlib
import dataclasses
import gc
import logging
import os
import shlex
import signal
import sys
import typing
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

from jaxrl_mini.config import OWN_FORM, Config, UserError, UserErrors, expected, flag_of
from jaxrl_mini.machine import effort, hardware

MAX_LINE = 1000
MODULES = "python -m jaxrl_mini."
_caller = ContextVar("_caller", default=MODULES)
DEVICES = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}


@contextlib.contextmanager
def called_as(caller: str) -> Iterator[None]:
    """What stands before the name of a command in its help and errors, in place of `MODULES`."""
    before = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(before)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and whose help names the command as it was called.

    Args:
      command: `train`, say.
      epilog: its examples, as `python -m jaxrl_mini.train ...`.
      options: as of `argparse.ArgumentParser`.
    """

    def __init__(self, command: str, epilog: str = "", **options: Any):
        super().__init__(
            (_caller.get() + command).strip(),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=epilog.replace(MODULES, _caller.get()),
            **options,
        )

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 and the message."""
        self.exit(2, one_line(f"{self.prog}: error: {message}") + "\n")


def one_line(message: str) -> str:
    """The message with every run of white space as one space, and the middle of a very long one left out."""
    line = " ".join(message.split())
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 2 :]}"


def counted(number: int, noun: str) -> str:
    """`1 run`, `1,000 runs`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def path(text: str) -> str:
    """The type of flags that name a file or a folder."""
    try:
        usable = "\0" not in text and len(os.fsencode(text)) > 0
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: expected that of a file or folder")
    return text


def output(text: str) -> str:
    """The type of flags that name a file or a folder to be written."""
    if text == "-":
        raise argparse.ArgumentTypeError("'-' is no file or folder: expected the name of one (./- is one)")
    return path(text)


def number(kind: type, right: str) -> Callable[[str], Any]:
    """The type of flags that take a number; `right` says in words which."""
    return partial(_number, kind, right)


def _number(kind: type, right: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range: expected {right}") from None


def add_config_flags(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """One flag per field of `Config`, with its text and default; if asked, each but the seed takes several values."""
    group = parser.add_argument_group("settings of the run")
    for field in dataclasses.fields(Config):
        if several and field.name == "seed":
            continue
        union = typing.get_args(field.type) or (field.type,)
        kind = next(kind for kind in union if kind is not type(None))
        shown = "" if field.default is None else f" [{field.default}]"
        flag, own = "--" + field.name.replace("_", "-"), field.metadata.get("own")
        if kind is bool:
            chosen, default = ([True], [False]) if several else (True, False)
            group.add_argument(flag, action="store_const", const=chosen, default=default, help=field.metadata["help"])
            continue
        group.add_argument(
            flag,
            type=str if kind is str else number(kind, expected(field)),
            nargs="+" if several else None,
            default=[field.default] if several else field.default,
            choices=None if own else field.metadata.get("choices"),
            metavar=field.metadata.get("metavar", None if "choices" in field.metadata else kind.__name__.upper()),
            help=field.metadata["help"] + (f": {expected(field)}" if own else "") + shown,
        )


def add_advantage_flag(parser: argparse.ArgumentParser, what: str) -> None:
    """The flag with a user's own advantages for those that read what was written with them; may be given again."""
    parser.add_argument(
        "--advantage", action="append", default=[], help=f"a {what}'s own advantage: {OWN_FORM}, as it was then"
    )


def add_task_flag(parser: argparse.ArgumentParser, what: str) -> None:
    """The same for tasks."""
    parser.add_argument(
        "--task", action="append", default=[], help=f"a {what}'s task in a file or module of your own, as it was then"
    )


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that `use_device` takes."""
    parser.add_argument("--device", choices=DEVICES, help="where to compute [what jax finds: tpu, gpu, then cpu]")


def add_mesh_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `use_processes` and `mesh_from` take."""
    group = parser.add_argument_group("several devices, for a language model")
    group.add_argument("--mesh", metavar="data=N,model=M", help="split rows over N devices and weights over M")
    for name, kind, text in PROCESS_FLAGS:
        group.add_argument(
            f"--{name}", type=kind, metavar="HOST:PORT" if kind is str else "N", help=f"{text} [${_variable(name)}]"
        )


PROCESS_FLAGS = (
    ("coordinator-address", str, "where the first of several processes listens"),
    ("num-processes", int, "how many there are"),
    ("process-id", int, "which of them this is, from 0"),
)


def _variable(flag: str) -> str:
    return "JAX_" + flag.upper().replace("-", "_")


def use_processes(arguments: argparse.Namespace) -> None:
    """Joins the processes that the flags name, which then compute one run together.

    Where there is a mesh, the environment may name them, too. Without one it does not count: a cluster sets these
    variables for all that runs there.

    Raises:
      UserError: only some of the three are given, a number is out of range, or the processes do not meet.
    """
    values: dict[str, Any] = {}
    for flag, kind, _ in PROCESS_FLAGS:
        name, variable = flag.replace("-", "_"), _variable(flag)
        value = getattr(arguments, name)
        text = None if arguments.mesh is None else os.environ.get(variable)
        if value is None and text is not None:
            if kind is int and not (text.isascii() and text.isdigit()):
                raise UserError(f"{variable} {text!r} is out of range: expected a whole number from 0")
            value = kind(text)
        values[name] = value
    if all(value is None for value in values.values()):
        return
    if arguments.backend != "hf":
        given = next(flag for flag, _, _ in PROCESS_FLAGS if values[flag.replace("-", "_")] is not None)
        raise UserError(f"--{given} has no use with backend {arguments.backend}: leave it out")
    missing = [flag for flag, _, _ in PROCESS_FLAGS if values[flag.replace("-", "_")] is None]
    if missing:
        set_here = [_variable(flag) for flag, _, _ in PROCESS_FLAGS if _variable(flag) in os.environ]
        found = f"{' and '.join(set_here)} in the environment: " if set_here else ""
        needed = ", ".join(flag for flag, _, _ in PROCESS_FLAGS)
        raise UserError(f"{found}--{missing[0]} is missing: several processes need {needed}")
    if arguments.mesh is None:
        raise UserError("--mesh is missing: several processes need one over all of their devices")
    if not 0 <= values["process_id"] < values["num_processes"]:
        raise UserError(
            f"--process-id {values['process_id']} is out of range: expected 0 to {values['num_processes'] - 1}"
        )
    hardware.import_jax()
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, and the run go on
    try:
        jax.distributed.initialize(**values)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--coordinator-address {values['coordinator_address']}: {error}") from error


def mesh_from(arguments: argparse.Namespace) -> Any:
    """The `jax.sharding.Mesh` of `--mesh`, or None."""
    if arguments.mesh is None:
        return None
    from jaxrl_mini.machine.placement import make_mesh

    return make_mesh(arguments.mesh)


def config_from(arguments: argparse.Namespace) -> Config:
    """The `Config` in parsed flags."""
    return Config(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Config)})


def train_command(config: Config, *more: str) -> str:
    """The command that trains this run again, with further arguments at its end."""
    words = ["--seed", str(config.seed)]
    for field in dataclasses.fields(Config):
        if field.name != "seed":
            words += flag_of(field.name, [getattr(config, field.name)]) or []
    return shlex.join(["python", "-m", "jaxrl_mini.train", *words, *more])


def file_flag(flag: str, name: str) -> list[str]:
    """The words of a command line that give a flag the name of a file or folder, which may begin like a flag."""
    return [f"{flag}={name}"] if name.startswith("-") else [flag, name]


def use_device(name: str | None, one_thread_per_call: bool = False) -> None:
    """Makes jax compute on the named kind of device, and keep what it compiles in the user's cache folder.

    It starts jax, with settings of its own: those in the user's environment would change numbers (see `jax_settings`).

    Args:
      name: a key of `DEVICES`; None is what jax finds, or `JAX_DEFAULT_DEVICE`.
      one_thread_per_call: see `hardware.use_one_thread_per_call`.

    Raises:
      UserError: there is no such device, and the message names those there are; or an environment variable asks jax
        for what it cannot do.
    """
    hardware.import_jax()
    import jax

    from jaxrl_mini.machine import jax_settings
    from jaxrl_mini.machine.compilation import use_compilation_cache

    jax_settings.use_own()
    if name is not None:
        jax.config.update("jax_default_device", None)
    if name is not None and DEVICES[name] == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if one_thread_per_call:
        hardware.use_one_thread_per_call()
    there = hardware.devices()
    if name is not None and DEVICES[name] != "cpu":
        try:
            jax.config.update("jax_default_device", jax.devices(DEVICES[name])[0])
        except RuntimeError as error:
            offered = ", ".join(sorted({device.platform for device in there}))
            raise UserError(f"--device {name} is not there: this machine offers {offered}") from error
    if trouble := use_compilation_cache():
        note(trouble)


def say(line: str) -> None:
    """Prints a line on standard output. Where it does not arrive the command goes on, and `run_command` says so."""
    if not _unheard:
        try:
            print(line, flush=True)
        except OSError as error:
            _unheard.append(error)
            _give_up_stdout()


_unheard: list[OSError] = []
"""Why standard output is of no use any more."""


def note(message: str) -> None:
    """Prints a line on standard error, which may be of no use either."""
    with contextlib.suppress(OSError):
        print(one_line(message), file=sys.stderr, flush=True)


def quieten(library: str) -> None:
    """Has a library say nothing but errors: that it has no folder to cache things in is none."""
    logging.getLogger(library).setLevel(logging.ERROR)


def _give_up_stdout() -> None:
    """Has what is still to be written to standard output go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Opens those of the three standard streams that were closed, on nothing: what a file would take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            with contextlib.suppress(OSError):
                os.set_inheritable(opened, opened == number)
            setattr(sys, name, open(opened, "w" if number else "r", closefd=False))  # noqa: SIM115, it stays open


def say_how_long(seconds: float, size: int = 0) -> None:
    """A line on stderr about what takes more than a minute, and the memory it fills where that is more than a GB."""
    if seconds > effort.PATIENCE:
        memory = f", and fills {effort.in_bytes(size)} of memory" if size > 1e9 else ""
        note(f"this takes about {effort.in_words(seconds)}{memory}")


def run_command(command: Callable[[list[str]], int | None], arguments: list[str] | None = None) -> NoReturn:
    """Runs a command line and exits: 0 or what it returns, 2 with a line per error on bad input, 130 on Ctrl-C.

    It is 1 where all was done but what was printed did not arrive.

    Without arguments it takes those of the process, which then is its own.
    """
    code: Any = 1
    _open_streams()
    _unheard.clear()
    if arguments is None:
        arguments = sys.argv[1:]
        atexit.register(lambda: end(code))  # what is registered first is called last
    gc.set_threshold(1_000_000)  # imports make hundreds of thousands of objects, all of which stay
    try:
        code = command(arguments)
        sys.stdout.flush()
    except SystemExit as ending:
        code = ending.code
    except UserError as error:
        code = _refuse(str(error))
    except UserErrors as several:
        code = [_refuse(str(error)) for error in several.exceptions][-1]
    except KeyboardInterrupt as interruption:
        note(f"interrupted: {str(interruption) or 'nothing was written'}")
        code = 128 + getattr(interruption, "number", signal.SIGINT)
    except BrokenPipeError as error:
        _give_up_stdout()
        note(f"error: a reader left before the end ({error.strerror})")
        code = 1
    except OSError as error:
        code = _refuse(f"the system refused: {error}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("jaxrl_mini"):
            raise
        advice = f"in an environment that has it, or pip install {error.name} in this one"
        code = _refuse(f"{sys.executable} has no {error.name}: run the command {advice}")
    except MemoryError:
        code = _refuse("not enough memory: ask for less at once")
    if _unheard:
        note(f"error: standard output could not be written ({_unheard[0].strerror}): all else was done")
        code = code or 1
    sys.exit(code)


def end(code: int | None) -> NoReturn:
    """Ends the process, where Python would first take apart whatever was imported: half a second."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code or 0)


def _refuse(message: str) -> int:
    note(f"error: {message}")
    return 2
