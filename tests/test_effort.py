"""What would take long says so before it starts."""

import time

import numpy as np
import pytest

from jaxrl_mini import estimators, play, replay, reproduce, tiny_model, train
from jaxrl_mini.config import Config
from jaxrl_mini.exact import bias
from jaxrl_mini.learning import loop
from jaxrl_mini.machine import effort
from jaxrl_mini.policies import saved
from jaxrl_mini.runs import player, replaying


class Started(KeyboardInterrupt):
    """What takes long has begun."""


def started(*_, **__):
    raise Started


@pytest.fixture
def long(command, monkeypatch):
    """Runs a command up to where it would take long, and returns what it had said on stderr by then."""
    for module, name in [
        (loop, "run"), (bias, "judge"), (tiny_model, "make_tiny_model"), (replaying, "replay_errors"),
        (player.TablePlayer, "evaluate"), (player.LanguagePlayer, "evaluate"), (reproduce, "run_again"),
    ]:  # fmt: skip
        monkeypatch.setattr(module, name, started)

    def run(*words):
        outcome = command(*words)
        assert outcome.code == 130 and outcome.err[-1] == "interrupted: nothing was written", outcome
        return outcome.err[:-1]

    return run


@pytest.mark.parametrize(
    ("module", "words", "line"),
    [
        (train, ["--iterations", 2 * 10**8], "this takes about 66.9 h, and fills 166 GB of memory"),
        (train, ["--epochs", 10**6], "this takes about 37 min"),
        (train, ["--groups", 1000, "--group-size", 1000], "this takes about 11 min"),
        (train, ["--iterations", 10**5, "--exact-gradient"], "this takes about 17 min"),
        (train, ["--iterations", 1000], None),
        (train, [], None),
        (estimators, ["--at", 10**6], "this takes about 20 min"),
        (estimators, ["--at", 0, "--groups", 1, "--group-size", 1024], "this takes about 63 min"),
        (estimators, ["--at", 0, 1, "--groups", 2**16, "--group-size", 4, "--advantage", "rloo", "--aggregation",
                      "episode-mean"], "this takes about 7 min"),
        (estimators, ["--at", *range(6), "--groups", 8, "--task", "repair:lines=3", "--advantage", "batch-std"],
         "this takes about 74 s"),
        (estimators, [], None),
        (tiny_model, ["m", "--warm-start", "--layers", 24, "--width", 1024], "this takes about 17.1 h"),
        (tiny_model, ["m", "--warm-start"], None),
        (tiny_model, ["m", "--layers", 24, "--width", 1024], None),
    ],
)  # fmt: skip
def test_what_takes_long_says_so_first(long, module, words, line):
    assert long(module, *words) == ([] if line is None else [line])


def test_playing_says_so_first(long, tiny_folder, tmp_path):
    saved.save_table(tmp_path / "p", np.zeros((24, 6), np.float32), Config())
    assert long(play, "p", "--episodes", 1000) == []
    assert long(play, tiny_folder, "--episodes", 10**6) == ["this takes about 2.8 h"]


def test_checking_says_so_first(long, command, golden, tmp_path, monkeypatch):
    again = loop.run
    monkeypatch.undo()
    assert again is started
    monkeypatch.chdir(tmp_path)
    assert command(train, "--iterations", 1, "--eval-episodes", 1, "--output", "r.json").code == 0
    monkeypatch.setattr(effort, "PATIENCE", 1e-4)
    monkeypatch.setattr(reproduce, "run_again", started)
    monkeypatch.setattr(replaying, "replay_errors", started)
    assert command(reproduce, "r.json").err[0] == "this takes about 1 s"
    assert command(replay, golden / "grpo-seed-7.npz").err[0] == "this takes about 1 s"
    assert command(reproduce, "--static", "r.json").err == []


def test_an_estimate_is_of_the_right_size():
    """Within a factor of thirty, on any machine at any load that tests run on."""
    config = Config(iterations=300, eval_episodes=1)
    loop.run(config)
    begun = time.perf_counter()
    loop.run(config)
    assert effort.alone(config) / 30 < time.perf_counter() - begun < effort.alone(config) * 30


def test_a_larger_language_model_takes_longer(tiny_folder, tmp_path):
    small, large = (Config(backend="hf", model=str(folder)) for folder in (tiny_folder, tmp_path))
    assert effort.alone(small) == effort.shared(small) == pytest.approx(42.0)
    (tmp_path / "model.safetensors").write_bytes(bytes(5_000_000))
    assert effort.alone(large) == pytest.approx(5 * 42.0)
    assert effort.in_words(1e7) == "2,777.8 h"
