"""What several test files share: the command lines in this process, and one finished run per method."""

import os
import shutil
import signal
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

# What one process compiled, the others read, those of the next time too; the user's cache folder is left alone. Set
# before jax is imported.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = Path(__file__).parents[1] / ".pytest_cache/d/compiled"
    if _cache.is_dir() and sum(path.lstat().st_size for path in _cache.iterdir()) > 2**30:
        shutil.rmtree(_cache)
    _cache.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_cache)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import jax
import jaxtyping
import numpy as np
import pytest
from jax._src import compiler

from jaxrl_mini import replay, tiny_model, train
from jaxrl_mini.config import Config
from jaxrl_mini.learning import block, loop, result
from jaxrl_mini.machine import commandline, files, jax_settings, runtime, signals
from jaxrl_mini.runs import recording

# What starts the tests in the background may have had these ignored, and so they would be by all that tests start.
for _number in {*signals.NUMBERS} - {*signals.not_ignored()}:
    signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

jax.config.update("jax_debug_key_reuse", True)
hypothesis.settings.register_profile("untimed", deadline=None)  # how long a case takes says nothing
hypothesis.settings.load_profile("untimed")

runtime._git_state = lru_cache(runtime._git_state)  # a process that is this large takes long to start another


SLOWEST = (
    "hostile",
    "language_training",
    "environment",
    "language",
    "sweep_command",
    "docs_programs",
    "any_task",
    "report",
)
"""Files that should not be begun last, while other processes have nothing left to do."""


def pytest_collection_modifyitems(items):
    first = {f"test_{name}": number for number, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: first.get(item.path.stem, len(first)))


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="what is skipped fails, and says why it was")


def unskipped(report, config):
    """The report of a test or of a file, with a skip as a failure where skips are not allowed."""
    if report.skipped and config.getoption("no_skips") and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"--no-skips: {report.longrepr[2]}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return unskipped((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return unskipped((yield), collector.config)


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    out: list[str]
    err: list[str]


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """Runs `train` or `replay` with arguments in an empty working folder, and returns the `Outcome`."""
    monkeypatch.chdir(tmp_path)

    def run(module, *arguments) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            commandline.run_command(module.main, [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(ending.value.code or 0, captured.out.splitlines(), captured.err.splitlines())

    return run


@pytest.fixture
def no_type_checks(monkeypatch):
    """Tests check annotations; a user's process does not, and there the package's own checks must do."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def train_command(command):
    return lambda *arguments: command(train, *arguments)


@pytest.fixture
def replay_command(command):
    return lambda *arguments: command(replay, *arguments)


@pytest.fixture(scope="session")
def devices():
    """The environment of a process to which the processor is so many devices, made of another."""

    def environment(count: int, other: Mapping[str, str] = os.environ) -> dict[str, str]:
        flags = f"{other.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
        return {**other, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

    return environment


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of recordings that an independent implementation in eager PyTorch made."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A random language model of one block, with a token per action: quick to compile."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.make_tiny_model(folder, layers=1, width=16)
    return folder


@pytest.fixture(scope="session")
def quick_process() -> dict[str, str]:
    """The environment of a process that compiles in less than half the time, where the last digit does not matter."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # the latter for the library alone


def _quick_options(options, *arguments, env_options_overrides=None, **named):
    overrides = {**(env_options_overrides or {}), "xla_cpu_use_fusion_emitters": False}
    return options(*arguments, env_options_overrides=overrides, **named)


@pytest.fixture(scope="module")
def quick_to_compile():
    """Compiles a file's programs in a quarter of the time, for tests that say nothing of the last digit.

    Nothing compiled so is left to other files, whose runs are compared to the bit.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_settings, "OF_PROCESSES", {})  # commands would undo it
        patch.setattr(compiler, "get_compile_options", partial(_quick_options, compiler.get_compile_options))
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    block._compile.cache_clear()


@pytest.fixture(scope="session")
def grpo_run() -> result.Result:
    """The article's run of grpo with seed 7."""
    return loop.run(Config(seed=7))


@pytest.fixture(scope="session")
def sft_run() -> result.Result:
    """The article's run of rs-sft with seed 7."""
    return loop.run(Config(seed=7, method="rs-sft"))


def recorded(result: result.Result, path: Path) -> dict[str, np.ndarray]:
    with files.Output(path) as output:
        recording.write(result, output)
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


@pytest.fixture(scope="session")
def grpo_arrays(grpo_run, tmp_path_factory) -> dict[str, np.ndarray]:
    """That run as `train --trajectories` writes it."""
    return recorded(grpo_run, tmp_path_factory.mktemp("grpo") / "run.npz")


@pytest.fixture(scope="session")
def sft_arrays(sft_run, tmp_path_factory) -> dict[str, np.ndarray]:
    """That run as `train --trajectories` writes it."""
    return recorded(sft_run, tmp_path_factory.mktemp("sft") / "run.npz")
