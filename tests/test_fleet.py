"""A run's numbers never depend on its neighbours."""

import os
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_mini.config import BLOCK, Config
from jaxrl_mini.learning import loop, result
from jaxrl_mini.learning.block import Block, sizes_of
from jaxrl_mini.machine import compilation
from jaxrl_mini.sweeps import table_part
from jaxrl_mini.sweeps.grid import Grid

SEEDS = (0, 7, 12345)
SETTINGS = {"iterations": 25, "eval_episodes": 40}


@pytest.fixture(scope="module")
def alone():
    return {
        (method, seed): loop.run(Config(seed=seed, method=method, **SETTINGS))
        for method in ("grpo", "rs-sft")
        for seed in SEEDS
    }


def rows_of(grid: Grid) -> tuple[dict, dict]:
    """All rows of both tables."""
    parts = [table_part.train_part(grid, number) for number in range(grid.parts)]
    return tuple({name: np.concatenate([part[i][name] for part in parts]) for name in parts[0][i]} for i in (0, 1))


def check_same(runs: dict, history: dict, seed: int, result: result.Result) -> None:
    (place,) = np.flatnonzero(runs["seed"] == seed)
    assert runs["logits_crc32"][place] == result.logits_crc32
    for when, evaluation in (("before", result.before), ("after", result.after)):
        assert runs[f"{when}_successes"][place] == evaluation.successes
        assert runs[f"{when}_mean_actions"][place] == evaluation.mean_actions
        assert runs[f"{when}_exact_success_rate"][place] == evaluation.exact_success_rate
        assert runs[f"{when}_exact_mean_actions"][place] == evaluation.exact_mean_actions
    for name, column in result.history.items():
        np.testing.assert_array_equal(history[name][history["seed"] == seed], column, err_msg=name)
        if name not in ("iteration", "exact_success_rate"):
            assert runs[f"last_{name}"][place] == column[-1], name


@pytest.mark.parametrize("method", ["grpo", "rs-sft"])
@pytest.mark.parametrize(
    "seeds",
    [[0], [12345, 7], [7, 0, 12345], [12345, *range(63)], [*range(999, -1, -1), 12345]],
    ids=["1", "2", "3", "64", "1001 in reverse"],
)
def test_a_run_in_a_fleet_is_the_run_alone_to_the_bit(method, seeds, alone):
    grid = Grid.product(seeds, method=method, **SETTINGS)
    runs, history = rows_of(grid)
    assert len(runs["seed"]) == len(seeds)
    for seed in set(SEEDS) & set(seeds):
        check_same(runs, history, seed, alone[method, seed])


def test_a_run_among_other_settings_is_the_run_alone_to_the_bit(alone):
    grid = Grid.product(SEEDS, lr=[0.02, 0.08, 0.5], clip=[0.05, 0.2], beta=[0.0, 0.02], **SETTINGS)
    runs, history = rows_of(grid)
    (setting,) = [i for i, one in enumerate(grid.settings) if (one.lr, one.clip, one.beta) == (0.08, 0.2, 0.02)]
    mine = {name: column[runs["setting"] == setting] for name, column in runs.items()}
    its_history = {name: column[history["setting"] == setting] for name, column in history.items()}
    for seed in SEEDS:
        check_same(mine, its_history, seed, alone["grpo", seed])
    assert len(set(runs["logits_crc32"])) > len(runs["run"]) // 2  # a clip that is never reached changes nothing


def test_episodes_in_a_block_are_those_alone(alone):
    settings = {"lr": np.full(64, 0.08), "clip": np.full(64, 0.2), "beta": np.full(64, 0.02)}
    block = Block(sizes_of(Config()), np.arange(64), settings)
    for first, count in ((0, 20), (20, 5)):
        log, logits = block.record(np.arange(first, first + count))
        for seed in (0, 7):
            expected = alone["grpo", seed]
            rows = slice(first, first + count)
            np.testing.assert_array_equal(log.episodes.packed[..., seed], expected.packed_episodes[rows])
            np.testing.assert_array_equal(logits[..., seed], expected.logits[1:][rows])


def test_the_kept_history_is_every_kth_row_of_all():
    values = {"seeds": [3, 4], **SETTINGS}
    _, every = rows_of(Grid.product(**values))
    runs, some = rows_of(Grid.product(**values, history_every=10))
    none, nothing = rows_of(Grid.product(**values, history_every=0))
    assert some["iteration"].tolist() == [9, 19, 24] * 2 and nothing == {}
    for name, column in some.items():
        np.testing.assert_array_equal(column, every[name][np.isin(every["iteration"], [9, 19, 24])], err_msg=name)
    for name in set(runs) - {"iterations_to_90"}:
        np.testing.assert_array_equal(runs[name], none[name], err_msg=name)


def test_iterations_to_90_is_the_first_kept_iteration_at_90_percent():
    runs, history = rows_of(Grid.product(range(8), iterations=60, eval_episodes=1))
    for seed, found in zip(runs["seed"], runs["iterations_to_90"], strict=True):
        success = history["exact_success_rate"][history["seed"] == seed]
        reached = np.flatnonzero(success >= 0.9)
        assert found == (reached[0] + 1 if len(reached) else -1)
    assert 10 < np.min(runs["iterations_to_90"]) < 60
    short, _ = rows_of(Grid.product([0], iterations=2, eval_episodes=1))
    assert short["iterations_to_90"].tolist() == [-1]


def test_a_run_that_leaves_the_numbers_is_marked_and_alone_in_it():
    runs, _ = rows_of(Grid.product([0, 1], lr=[0.08, 3e38], iterations=5, eval_episodes=1))
    assert runs["finite"].tolist() == [True, True, False, False]


def test_a_grid_of_settings_compiles_once():
    def sweep(lr, beta):
        return rows_of(Grid.product(range(70), group_size=3, lr=lr, beta=beta, iterations=21, eval_episodes=1))

    sweep(lr=[0.1], beta=[0.0])
    compiled = compilation.seconds()
    sweep(lr=[0.1, 0.2], beta=[0.0, 0.1])
    assert compilation.seconds() == compiled


def test_padding_repeats_the_last_run():
    block = Block.of_config(Config(seed=9))
    assert block.runs == 1 and block.seeds.tolist() == [9] * BLOCK
    with pytest.raises(ValueError, match="1 to 64"):
        Block(block.sizes, np.arange(65), {name: np.ones(65) for name in ("lr", "clip", "beta")})


def test_a_part_stops_between_chunks():
    with pytest.raises(table_part.Stopped):
        table_part.train_part(Grid.product([0], **SETTINGS), 0, stopped=lambda: True)


TWO_DEVICES = """
import jax, sys
from jaxrl_mini.sweeps import table_part
from jaxrl_mini.sweeps.grid import Grid
assert len(jax.devices()) == 2
grid = Grid.product([0, 7, 12345], iterations=25, eval_episodes=40)
for device in jax.devices():
    print(*table_part.train_part(grid, 0, device=device)[0]["logits_crc32"])
"""


def test_the_second_device_gives_the_same_bits(alone, devices):
    output = run_python(TWO_DEVICES, devices(2))
    expected = [str(alone["grpo", seed].logits_crc32) for seed in SEEDS]
    assert [line.split() for line in output.splitlines()] == [expected, expected]


def run_python(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
