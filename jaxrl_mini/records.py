"""Run records: what is in them, how they are written whole or not at all, and how they are read back."""

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import jax

from jaxrl_mini import files, hardware
from jaxrl_mini.config import Config, UserError, differences
from jaxrl_mini.evaluation import Evaluation
from jaxrl_mini.result import Result

SCHEMA_VERSION = 1
SCOPE = (
    "One run on one small, fully observable task with a private verifier. It shows how a training loop behaves "
    "here, exactly; it says nothing about agents in open environments."
)
PACKAGES = ("jaxrl_mini", "jax", "jaxlib", "flax", "optax", "numpy", "scipy")


def runtime() -> dict[str, Any]:
    """Where a run's numbers came from: versions, platform, devices, precision flags, commit."""
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "processor": hardware.processor(),
        "cores": hardware.cores(),
        "device_kind": devices[0].device_kind,
        "device_platform": devices[0].platform,
        "device_count": len(devices),
        "precision": {
            "enable_x64": bool(jax.config.values["jax_enable_x64"]),
            "default_matmul_precision": jax.config.values["jax_default_matmul_precision"],
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        },
        **_git_state(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any]:
    """The commit of the checkout this package lies in, and whether it differs from it; None outside one."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    tracked = git("ls-files", "--error-unmatch", __file__) is not None
    commit = git("rev-parse", "HEAD") if tracked else None
    return {
        "git_commit": commit,
        "git_dirty": None if commit is None else bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def build(result: Result) -> dict[str, Any]:
    """The record of a run, as plain data (see `record.schema.json` beside this file)."""
    columns = {name: column.tolist() for name, column in result.history.items()}
    history = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return finite(
        {
            "schema_version": SCHEMA_VERSION,
            "scope": SCOPE,
            "config": result.config.to_dict(),
            "runtime": runtime(),
            "before": summary(result.before),
            "after": summary(result.after),
            "history": history,
            "timing": dict(result.timing),
        }
    )


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation's figures, each with its 95 % interval and its exact twin."""
    return {
        "episodes": evaluation.episodes,
        "successes": evaluation.successes,
        "success_rate": evaluation.success_rate,
        "success_rate_interval": evaluation.success_rate_interval,
        "exact_success_rate": evaluation.exact_success_rate,
        "mean_actions": evaluation.mean_actions,
        "mean_actions_interval": evaluation.mean_actions_interval,
        "exact_mean_actions": evaluation.exact_mean_actions,
        **({} if evaluation.exact_mean_kl is None else {"exact_mean_kl": evaluation.exact_mean_kl}),
    }


def finite(value: Any) -> Any:
    """`value` with tuples as lists, and None in place of what JSON cannot say (NaN and the infinities)."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Output:
    """A file that appears under its name whole, at `commit`, or not at all.

    Opening it creates the temporary file beside the target, so that a folder that cannot be written to is found
    before anything is computed. Folders that were made for it go again, where nothing was committed.

    Raises:
      UserError: the target is a folder or not a regular file, or its folder cannot be created or written.
    """

    def __init__(self, path: str | Path):
        self.path, self._part = Path(path), None
        self._made: list[Path] = []
        try:
            if self.path.is_dir():
                raise UserError(f"output {path} is a folder: name a file in it")
            if self.path.exists() and not self.path.is_file():
                raise UserError(f"output {path} is not a regular file: name another")
            for folder in (*reversed(self.path.parent.parents), self.path.parent):
                if not folder.is_dir():
                    folder.mkdir(exist_ok=True)
                    self._made.append(folder)
            descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".part", dir=self.path.parent)
            self._part = Path(name)
            os.close(descriptor)
        except OSError as error:
            self._clear()
            raise UserError(f"output {path} cannot be written ({error.strerror}): choose another place") from error

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def _clear(self) -> None:
        """Takes away what was made, as far as the disk lets us and nothing was put there."""
        with suppress(OSError):
            if self._part is not None:
                self._part.unlink(missing_ok=True)
            for folder in reversed(self._made):
                folder.rmdir()

    def commit(self, write: Callable[[IO[bytes]], object]) -> None:
        """Writes beside the target, flushes to disk, and renames over it.

        Raises:
          UserError: the disk refused; the target is as it was before.
        """
        assert self._part is not None
        try:
            with self._part.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            self._part.chmod(0o666 & ~umask)
            self._part.replace(self.path)
        except OSError as error:
            raise UserError(f"output {self.path} could not be written ({error.strerror}): it is as before") from error


@contextmanager
def optional_output(path: str | None) -> Iterator[Output | None]:
    """An `Output`, or None where no file is asked for."""
    if path is None:
        yield None
    else:
        with Output(path) as output:
            yield output


def check_replaceable(path: str | Path, config: Config) -> None:
    """Refuses to replace a file that is not a record of the same config.

    Raises:
      UserError: the file is something else, or a record of another config.
    """
    try:
        if not Path(path).is_file():
            return
        there = read(path)["config"]
    except OSError as error:
        raise UserError(f"output {path} cannot be written ({error.strerror}): choose another place") from error
    except UserError as error:
        raise UserError(f"output {path} exists and is no record: name another file or use --overwrite") from error
    if odd := differences(there, config.to_dict()):
        raise UserError(f"output {path} holds another run ({odd}): name another file or use --overwrite")


def write(record: Mapping[str, Any], output: Output) -> None:
    """Writes a record as JSON."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    output.commit(lambda file: file.write(text.encode()))


def read(path: str | Path) -> dict[str, Any]:
    """Reads a record back.

    Raises:
      UserError: the file cannot be read, or is not a record of a schema this version knows.
    """
    try:
        data = json.loads(files.read(path), parse_constant=_finite, parse_int=_finite, parse_float=_finite)
    except OSError as error:
        raise UserError(f"record {path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"record {path} is not JSON with finite numbers") from error
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"record {path} is not of schema version {SCHEMA_VERSION}")
    if not isinstance(data.get("config"), dict) or not isinstance(data.get("history"), list):
        raise UserError(f"record {path} lacks its config or history")
    return data


def _finite(text: str) -> int | float:
    """Reads a number that float64 holds."""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is not finite")
    return int(text) if text.lstrip("-").isdigit() else float(text)
