"""Where numbers come from: versions, platform, devices, what decides rounding, the commit of this checkout."""

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax

from jaxrl_mini import config
from jaxrl_mini.machine import hardware, jax_settings

PACKAGES = ("jaxrl_mini", "jax", "jaxlib", "flax", "optax", "numpy", "scipy")
VARIABLES = ("GLIBC_TUNABLES", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "OPENBLAS_CORETYPE")
"""Of the environment, those that decide rounding. What NumPy's own do is seen in `numpy_dispatch`."""
IMMATERIAL = ("python", "cores", "device_count", "git_commit", "git_dirty")
"""What of a runtime has no influence on a run's numbers."""
NAMES = ("vector_instructions", "numpy_dispatch")
"""What of a runtime is a list of names."""


def runtime() -> dict[str, Any]:
    """Where a run's numbers come from, but for the mesh of its devices, which it may say as `mesh`."""
    return {**without_commit(), **_git_state()}


def without_commit() -> dict[str, Any]:
    """`runtime` without the commit, for which git has to be asked."""
    device = hardware.default_device()
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "processor": hardware.processor(),
        "vector_instructions": hardware.vector_instructions(),
        "numpy_dispatch": hardware.numpy_dispatch(),
        "environment": _environment(),
        "cores": hardware.cores(),
        "threads": hardware.threads(),
        "device_kind": device.device_kind,
        "device_platform": device.platform,
        "device_version": device.client.platform_version,
        "device_count": len(hardware.devices()),
        "precision": {
            "enable_x64": jax_settings.OWN["jax_enable_x64"][0],
            "default_matmul_precision": jax_settings.current("jax_default_matmul_precision"),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        },
    }


def deciding(runtime: Mapping[str, Any], *, threads: bool) -> dict[str, Any]:
    """What of a runtime decides a run's numbers, to their last bits; what it does not state is missing.

    The one answer for whoever asks: whether a record must come out the same to the bit, whether a checkpoint or a sweep
    can go on here.

    Args:
      runtime: see `runtime`.
      threads: whether the run splits its sums over threads on a CPU, as a language model does.
    """
    immaterial = IMMATERIAL if threads and runtime.get("device_platform") == "cpu" else (*IMMATERIAL, "threads")
    kept = {name: value for name, value in runtime.items() if name not in immaterial and value is not None}
    if isinstance(kept.get("platform"), str):
        kept["platform"] = re.sub(r"^(Linux-).*-(?=[^-]+-with-)", r"\1", kept["platform"])  # any kernel
    return kept


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What two runtimes both state otherwise, by name; of lists of names, those that one has alone.

    What only one of them states is unknown (see `unknown`), but for a mesh: no mesh is not stated.
    """
    there, here = ({"mesh": None, **runtime} for runtime in (there, here))
    for name in NAMES:
        if isinstance(there.get(name), str) and isinstance(here.get(name), str):
            one, other = (list(dict.fromkeys(runtime[name].split())) for runtime in (there, here))
            there = {**there, name: " ".join(word for word in one if word not in other)}
            here = {**here, name: " ".join(word for word in other if word not in one)}
    both = {name for name in here if name in there}
    return config.differences(*({name: value for name, value in one.items() if name in both} for one in (there, here)))


def unknown(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What is known here, but not stated there: an earlier version of this package did not write it."""
    return [name for name in here if name not in there and name != "mesh"]


def _environment() -> dict[str, str]:
    """What else decides numbers, as far as it was set: variables, and jax's settings of a process that is not ours."""
    variables = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    values = {name: jax.config.values[name] for name in jax_settings.OF_PROCESSES}
    odd = {name: str(value) for name, value in values.items() if value != jax_settings.OF_PROCESSES[name]}
    return variables | odd


@cache
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
