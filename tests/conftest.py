"""What several test files share: the command lines in this process, and one finished run per method."""

import os
import signal
import tempfile
from pathlib import Path
from typing import NamedTuple

# Set before jax is imported: the commands keep what they compile; tests should not fill the user's cache folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="jaxrl_mini-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name

import jax
import jaxtyping
import numpy as np
import pytest

from jaxrl_mini import replay, tiny_model, train
from jaxrl_mini.config import Config
from jaxrl_mini.learning import block, loop, result
from jaxrl_mini.machine import commandline, files, jax_settings, signals
from jaxrl_mini.runs import recording

# What starts the tests in the background may have had these ignored, and so they would be by all that tests start.
for _number in {*signals.NUMBERS} - {*signals.not_ignored()}:
    signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # what one process compiled, the others read


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
    """The environment of a process to which the processor is so many devices."""

    def environment(count: int) -> dict[str, str]:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
        return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

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


@pytest.fixture(scope="module")
def quick_to_compile():
    """Compiles a file's programs in half the time, for tests that say nothing of the last digit.

    Nothing compiled so is left to other files, whose runs are compared to the bit.
    """
    compiled = block._compile.cache_info().misses
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_settings, "OF_PROCESSES", {})  # commands would undo it
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    assert block._compile.cache_info().misses == compiled, "a table policy's program is kept beyond this file"


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
