"""What the command lines share: flags from the `Config` fields, one-line errors, devices, the compilation cache."""

import argparse
import dataclasses
import gc
import os
import shlex
import signal
import sys
import typing
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from jaxrl_mini.config import Config, UserError, expected

if TYPE_CHECKING:
    from jaxrl_mini.grid import Grid

MAX_LINE = 1000
DEVICES = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 and the message."""
        self.exit(2, one_line(f"{self.prog}: error: {message}") + "\n")


def one_line(message: str) -> str:
    """The message with every run of white space as one space, and the middle of a very long one left out."""
    line = " ".join(message.split())
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 2 :]}"


def path(text: str) -> str:
    """The type of flags that name a file or a folder."""
    try:
        usable = "\0" not in text and len(os.fsencode(text)) > 0
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: expected that of a file or folder")
    return text


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
        flag = "--" + field.name.replace("_", "-")
        if kind is bool:
            chosen, default = ([True], [False]) if several else (True, False)
            group.add_argument(flag, action="store_const", const=chosen, default=default, help=field.metadata["help"])
            continue
        group.add_argument(
            flag,
            type=str if kind is str else number(kind, expected(field)),
            nargs="+" if several else None,
            default=[field.default] if several else field.default,
            choices=field.metadata.get("choices"),
            metavar=field.metadata.get("metavar", None if "choices" in field.metadata else kind.__name__.upper()),
            help=field.metadata["help"] + shown,
        )


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that `use_device` takes."""
    parser.add_argument("--device", choices=DEVICES, help="where to compute [what jax finds: tpu, gpu, then cpu]")


def config_from(arguments: argparse.Namespace) -> Config:
    """The `Config` in parsed flags."""
    return Config(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Config)})


def train_command(config: Config, *more: str) -> str:
    """The command that trains this run again, with further arguments at its end."""
    words = ["--seed", str(config.seed)]
    for field in dataclasses.fields(Config):
        value = getattr(config, field.name)
        if field.name != "seed" and value != field.default:
            words += ["--" + field.name.replace("_", "-"), str(value)]
    return shlex.join(["python", "-m", "jaxrl_mini.train", *words, *more])


def sweep_command(grid: "Grid", *more: str) -> str | None:
    """The command that computes this grid again; None where its settings are no product of values."""
    fields = [field for field in dataclasses.fields(Config) if field.name != "seed"]
    values = {field.name: list(dict.fromkeys(getattr(one, field.name) for one in grid.settings)) for field in fields}
    if type(grid).product(grid.seeds, grid.history_every, **values) != grid:
        return None
    seeds = grid.seeds
    words = ["--seeds", *([f"{seeds.start}:{seeds.stop}"] if isinstance(seeds, range) else map(str, seeds))]
    for field in fields:
        if values[field.name] != [field.default]:
            words += ["--" + field.name.replace("_", "-"), *map(str, values[field.name])]
    words += ["--history-every", str(grid.history_every)]
    return shlex.join(["python", "-m", "jaxrl_mini.sweep", *words, *more])


def use_device(name: str | None) -> None:
    """Makes jax compute on the named kind of device, and keep what it compiles in the user's cache folder.

    Raises:
      UserError: there is no such device; the message names those there are.
    """
    import jax

    from jaxrl_mini.compilation import use_compilation_cache

    if name is not None and DEVICES[name] == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif name is not None:
        try:
            jax.config.update("jax_default_device", jax.devices(DEVICES[name])[0])
        except RuntimeError as error:
            there = sorted({device.platform for device in jax.devices()})
            raise UserError(f"--device {name} is not there: this machine offers {', '.join(there)}") from error
    use_compilation_cache()


def run_command(command: Callable[[list[str]], int | None], arguments: list[str] | None = None) -> NoReturn:
    """Runs a command line and exits: 0 or what it returns, 2 with one line on bad input, 130 on Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    gc.set_threshold(100_000)  # imports make that many objects, all of which stay
    try:
        code = command(arguments)
        sys.stdout.flush()
    except UserError as error:
        code = _refuse(str(error))
    except KeyboardInterrupt as interruption:
        print(f"interrupted: {str(interruption) or 'nothing was written'}", file=sys.stderr)
        code = 128 + getattr(interruption, "number", signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        code = _refuse(f"the system refused: {error}")
    except MemoryError:
        code = _refuse("not enough memory: ask for less at once")
    sys.exit(code)


def _refuse(message: str) -> int:
    print(one_line(f"error: {message}"), file=sys.stderr)
    return 2
