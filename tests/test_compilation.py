"""Programs that are compiled in one process and only read in the next."""

import contextlib
import os
import threading

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxrl_mini.machine import compilation
from jaxrl_mini.machine.compilation import compiled_once

STATE = {"a": np.arange(3.0, dtype=np.float32), "b": np.int32(1)}


@pytest.fixture
def cache(tmp_path):
    """An empty cache folder."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()  # jax looks at the setting once
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture
def keep_all():
    """Has jax keep what took it no time."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 0.0)
    yield
    jax.config.update(name, before)


class Step:
    """state -> state * x + k, which counts how often it is traced."""

    traces = 0

    def __call__(self, state, x, k):
        self.traces += 1
        return (jax.tree.map(lambda leaf: leaf * x.astype(leaf.dtype) + k, state),)


def results(step: Step, k: int = 5) -> list:
    """Of two calls, the second on the result of the first; the program's file is written when they are returned."""
    program = compiled_once(step, (STATE,), np.float32(2), static=(k,), device=jax.devices()[0])
    (once,) = program(STATE, np.float32(2))
    (twice,) = program(once, np.float32(3))
    wait_until_written()
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(twice)]


def wait_until_written() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join()


def programs(folder) -> list:
    return sorted(folder.glob("program-*"))


def test_a_program_is_made_once_and_read_from_then_on(cache):
    first, second = Step(), Step()
    assert results(first) == results(second) == [[20.0, 26.0, 32.0], 26]
    assert (first.traces, second.traces) == (1, 0)
    assert len(programs(cache)) == 1


def test_other_static_arguments_or_source_are_another_program(cache, monkeypatch):
    assert results(Step(), k=5) != results(Step(), k=6)
    assert len(programs(cache)) == 2
    monkeypatch.setattr(compilation, "_source", lambda: "changed")
    step = Step()
    results(step)
    assert step.traces == 1 and len(programs(cache)) == 3


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:-1], lambda data: data[:-9] + b"\0" + data[-8:], lambda data: b"x" * 99],
)
def test_a_damaged_program_is_made_again(cache, damage):
    expected, (file,) = results(Step()), programs(cache)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    step = Step()
    assert results(step) == expected and step.traces == 1
    again = Step()
    assert results(again) == expected and again.traces == 0


def test_what_jax_has_read_from_its_own_cache_is_not_written(cache, monkeypatch, keep_all):
    """It would lack the machine code."""
    expected, (file,) = results(Step()), programs(cache)
    assert list(cache.iterdir()) == [file]
    file.unlink()
    monkeypatch.setattr(compilation, "_past_the_cache_of_jax", contextlib.nullcontext)
    assert results(Step()) == expected
    assert len(list(cache.iterdir())) > 1
    programs(cache)[0].unlink()
    for _ in range(2):
        step = Step()
        assert results(step) == expected and step.traces == 1
    assert not programs(cache)


def test_where_jax_keeps_nothing_nothing_is_kept(cache):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert results(Step()) == results(Step())
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not programs(cache)


def test_a_folder_that_cannot_be_written_changes_nothing(cache):
    expected = results(Step())
    blocked = cache / "file"
    blocked.write_text("")
    jax.config.update("jax_compilation_cache_dir", str(blocked / "below"))
    assert results(Step()) == expected
    jax.config.update("jax_compilation_cache_dir", None)
    assert results(Step()) == expected


def test_the_program_of_a_block_gives_the_same_to_the_bit(cache):
    """Read from a file or not."""
    from jaxrl_mini.config import Config
    from jaxrl_mini.learning.block import Block, _compile

    logits = []
    for _ in range(2):
        _compile.cache_clear()
        block = Block.of_config(Config(seed=3))
        block.advance(20)
        logits.append(block.logits().tobytes())
        wait_until_written()
    assert logits[0] == logits[1] and len(programs(cache)) == 1


@pytest.mark.parametrize("bound", ["MAX_FILES", "MAX_BYTES"])
def test_what_was_not_used_for_long_goes_where_too_much_is_kept(tmp_path, monkeypatch, bound):
    monkeypatch.setattr(compilation, bound, {"MAX_FILES": 3, "MAX_BYTES": 30}[bound])
    for number in range(6):
        (tmp_path / f"program-{number}").write_bytes(b"0123456789")
        os.utime(tmp_path / f"program-{number}", (number, number))
    (tmp_path / "mine").touch()
    (tmp_path / "program-folder").mkdir()  # whatever it is, no command fails
    os.utime(tmp_path / "program-folder", (0, 0))
    os.utime(tmp_path / "program-0", (7, 7))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    assert compilation.use_compilation_cache() is None
    jax.config.update("jax_compilation_cache_dir", before)
    assert {path.name for path in tmp_path.iterdir()} == {
        "program-0", "program-5", "program-4", "mine", "program-folder"
    }  # fmt: skip


def test_a_program_that_is_read_counts_as_used(cache):
    results(Step())
    (file,) = programs(cache)
    os.utime(file, (0, 0))
    results(Step())
    assert file.stat().st_mtime > 0


def test_a_cache_that_cannot_be_written_is_named_and_not_used(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    before = jax.config.values["jax_compilation_cache_dir"]
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file/below"))
    try:
        assert "file/below cannot be used (Not a directory)" in str(compilation.use_compilation_cache())
        assert jax.config.values["jax_compilation_cache_dir"] is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
