"""Where numbers come from: versions, platform, devices, precision flags, the commit of this package's checkout."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

from jaxrl_mini.machine import hardware, jax_settings

PACKAGES = ("jaxrl_mini", "jax", "jaxlib", "flax", "optax", "numpy", "scipy")


def runtime() -> dict[str, Any]:
    """Where a run's numbers came from: versions, platform, devices, precision flags, commit."""
    device = hardware.default_device()
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "processor": hardware.processor(),
        "vector_instructions": hardware.vector_instructions(),
        "numpy_dispatch": hardware.numpy_dispatch(),
        "cores": hardware.cores(),
        "device_kind": device.device_kind,
        "device_platform": device.platform,
        "device_count": len(hardware.devices()),
        "precision": {
            "enable_x64": jax_settings.OWN["jax_enable_x64"][0],
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
