"""Programs that are traced in one process and only read in the next."""

import jax
import numpy as np
import pytest

from jaxrl_mini import compilation
from jaxrl_mini.compilation import traced_once

STATE = {"a": np.arange(3.0, dtype=np.float32), "b": np.int32(1)}


@pytest.fixture
def cache(tmp_path):
    """An empty cache folder."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


class Step:
    """state -> state * x + k, which counts how often it is traced."""

    traces = 0

    def __call__(self, state, x, k):
        self.traces += 1
        return (jax.tree.map(lambda leaf: leaf * x.astype(leaf.dtype) + k, state),)


def results(step: Step, k: int = 5) -> list:
    """Of two calls, the second on the result of the first."""
    program = traced_once(step, (STATE,), np.float32(2), static=(k,))
    (once,) = program(STATE, np.float32(2))
    (twice,) = program(once, np.float32(3))
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(twice)]


def traces(folder) -> list:
    return sorted(folder.glob("trace-*"))


def test_a_trace_is_made_once_and_read_from_then_on(cache):
    first, second = Step(), Step()
    assert results(first) == results(second) == [[20.0, 26.0, 32.0], 26]
    assert (first.traces, second.traces) == (1, 0)
    assert len(traces(cache)) == 1


def test_other_static_arguments_or_source_are_another_trace(cache, monkeypatch):
    assert results(Step(), k=5) != results(Step(), k=6)
    assert len(traces(cache)) == 2
    monkeypatch.setattr(compilation, "_source", lambda: "changed")
    step = Step()
    results(step)
    assert step.traces == 1 and len(traces(cache)) == 3


@pytest.mark.parametrize("content", [b"", b"not a trace", b"\0" * 100_000])
def test_a_damaged_trace_is_made_again(cache, content):
    expected = results(Step())
    traces(cache)[0].write_bytes(content)
    step = Step()
    assert results(step) == expected and step.traces == 1
    assert traces(cache)[0].read_bytes() != content


def test_a_folder_that_cannot_be_written_changes_nothing(cache):
    expected = results(Step())
    blocked = cache / "file"
    blocked.write_text("")
    jax.config.update("jax_compilation_cache_dir", str(blocked / "below"))
    assert results(Step()) == expected
    jax.config.update("jax_compilation_cache_dir", None)
    assert results(Step()) == expected


def test_the_program_of_a_block_is_the_traced_function_to_the_bit(cache):
    """Read from a file or not."""
    from jaxrl_mini import fleet
    from jaxrl_mini.config import Config

    logits = []
    for _ in range(2):
        fleet.program.cache_clear()
        block = fleet.Block.of_config(Config(seed=3))
        block.advance(20)
        logits.append(block.logits().tobytes())
    assert logits[0] == logits[1] and len(traces(cache)) == 1
