import itertools
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_mini.config import BLOCK, MAX_SEED, Config, UserError
from jaxrl_mini.sweeps.grid import Grid, history_iterations, parse_seeds


def every_run(grid: Grid) -> list[tuple[int, int, int]]:
    parts = [grid.part(number) for number in range(grid.parts)]
    return [row for part in parts for row in zip(part.numbers, part.setting_numbers, part.seeds, strict=True)]


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (["3"], range(3)),
        (["7", "19", "42"], (7, 19, 42)),
        (["5:9"], range(5, 9)),
        (["7:8"], range(7, 8)),
        (["0:2", "9"], (0, 1, 9)),
        ([f"{MAX_SEED}:{MAX_SEED + 1}"], range(MAX_SEED, MAX_SEED + 1)),
    ],
)
def test_seeds_are_a_count_or_a_list_or_a_range(words, seeds):
    assert parse_seeds(words) == seeds


@pytest.mark.parametrize(
    "words",
    [
        ["9" * 5000],
        ["0:4000000000", "7"],
        ["0"],
        ["x"],
        ["-1"],
        ["5:5"],
        ["9:2"],
        ["1:"],
        [":3"],
        ["1.5"],
        ["0:4294967297"],
        [""],
    ],
)
def test_what_is_no_seed_is_refused(words):
    with pytest.raises(UserError, match="--seeds"):
        parse_seeds(words)


def test_every_setting_runs_once_with_every_seed():
    grid = Grid.product(range(100), lr=[0.04, 0.08], method=["grpo", "rs-sft"], epochs=[1, 2, 3])
    rows = every_run(grid)
    assert [number for number, _, _ in rows] == list(range(1200)) and grid.runs == 1200
    assert {(setting, seed) for _, setting, seed in rows} == {(i, seed) for i in range(12) for seed in range(100)}


def test_settings_that_share_a_program_fill_blocks_together():
    grid = Grid.product(range(10), lr=[0.04, 0.08, 0.16], beta=[0.0, 0.02, 0.1])
    blocks = [min(BLOCK, grid.part_runs(number)) for number in range(grid.parts)]
    assert blocks == [64, 26] and grid.programs == 1
    assert len(set(grid.part(0).setting_numbers)) == 7


def test_other_methods_and_sizes_are_other_programs():
    grid = Grid.product([1, 2], method=["grpo", "rs-sft"], group_size=[4, 8], lr=[0.1, 0.2])
    assert grid.programs == 4 and grid.parts == 4
    for number in range(4):
        part = grid.part(number)
        kinds = {(grid.settings[place].method, grid.settings[place].group_size) for place in part.setting_numbers}
        assert kinds == {(part.shared.method, part.shared.group_size)}


def test_options_are_other_programs_and_their_numbers_are_not():
    options = {"advantage": ["group-std", "rloo"], "clip_high": [None, 0.3, 0.4], "entropy_bonus": [0.0, 0.1, 0.2]}
    assert Grid.product([1], **options).programs == 8


def test_more_iterations_share_a_program_but_no_block():
    grid = Grid.product([1], iterations=[20, 40])
    assert grid.programs == 1 and [grid.part(i).shared.iterations for i in (0, 1)] == [20, 40]


@pytest.mark.parametrize(("runs", "parts", "blocks"), [(64, 1, 1), (65, 2, 1), (4096, 64, 1), (34816, 68, 8)])
def test_parts_are_whole_blocks(runs, parts, blocks):
    grid = Grid.product(range(runs))
    assert grid.parts == parts and sum(map(grid.part_runs, range(parts))) == runs
    assert parts == 1 or grid.part_runs(0) == BLOCK * blocks


def test_a_million_seeds_take_no_memory_and_long_runs_make_small_parts():
    assert Grid.product(range(10**6)).part_runs(0) == BLOCK * 16
    assert Grid.product(range(10**6), iterations=1600).part_runs(0) == BLOCK


def test_all_seeds_and_the_longest_run_take_no_memory():
    grid = Grid.product(range(2**32), iterations=2**31 - 1, history_every=7)
    assert len(grid.digest) == 64 and Grid.from_dict(grid.to_dict()) == grid
    assert grid.history_rows(grid.settings[0]) == -(-(2**31 - 1) // 7)


@pytest.mark.parametrize(("iterations", "every"), [(5, 1), (5, 2), (4, 2), (5, 9), (5, 0), (1, 1)])
def test_rows_of_history_are_the_iterations_kept(iterations, every):
    grid = Grid.product([1], iterations=iterations, history_every=every)
    assert grid.history_rows(grid.settings[0]) == len(history_iterations(iterations, every))


def test_a_grid_has_one_form():
    grid = Grid.product(range(3), lr=0.08)
    assert grid == Grid.product([0, 1, 2]) and grid.digest == Grid.product(np.arange(3), lr=None).digest
    assert Grid.from_dict(grid.to_dict()) == grid
    assert grid.digest != Grid.product(range(3), history_every=2).digest


@pytest.mark.parametrize(
    ("values", "same"),
    [
        ({"lr": np.float32(0.5)}, {"lr": 0.5}),
        ({"lr": np.array([0.25, 0.5], np.float32)}, {"lr": [0.25, 0.5]}),
        ({"lr": (x / 4 for x in (1, 2))}, {"lr": [0.25, 0.5]}),
        ({"lr": np.array(0.5)}, {"lr": 0.5}),
        ({"lr": jnp.array([0.25, 0.5])}, {"lr": [0.25, 0.5]}),
        ({"groups": np.int64(3)}, {"groups": 3}),
        ({"groups": range(1, 4)}, {"groups": [1, 2, 3]}),
        ({"groups": np.arange(1, 4)}, {"groups": [1, 2, 3]}),
        ({"exact_gradient": np.True_}, {"exact_gradient": True}),
        ({"exact_gradient": True}, {"exact_gradient": [True]}),
        ({"exact_gradient": np.array([True, False])}, {"exact_gradient": [True, False]}),
        ({"method": np.array(["grpo", "rs-sft"])}, {"method": ["grpo", "rs-sft"]}),
        ({"backend": "hf", "model": Path("m")}, {"backend": "hf", "model": "m"}),
        ({"backend": "hf", "model": [Path("m"), Path("n")]}, {"backend": "hf", "model": ["m", "n"]}),
        ({"history_every": np.int16(2)}, {"history_every": 2}),
    ],
)
def test_values_of_any_library_are_pythons(no_type_checks, values, same):
    grid = Grid.product(range(2), **values)
    assert grid == Grid.product(range(2), **same) and grid.digest == Grid.product(range(2), **same).digest


@pytest.mark.parametrize("seeds", [np.array([3, 1]), jnp.array([3, 1]), [np.uint32(3), np.array(1)], iter((3, 1))])
def test_seeds_of_any_library_are_pythons(no_type_checks, seeds):
    grid = Grid.product(seeds)
    assert grid == Grid.product([3, 1]) and all(type(seed) is int for seed in grid.seeds)


def test_a_grid_is_made_of_configs(no_type_checks):
    assert Grid(Config(), range(2)) == Grid((Config(),), range(2)) == Grid(iter([Config()]), range(2))
    with pytest.raises(UserError, match="settings 3 is no Config: expected a list of them"):
        Grid([3], range(2))


def test_differences_between_grids_are_named():
    there, here = Grid.product(range(3), lr=[0.1, 0.2]), Grid.product(range(4), lr=[0.1], history_every=5)
    words = "; ".join(there.differences(here))
    assert words == "lr 0.1 0.2 there, 0.1 here; seeds 0:3 there, 0:4 here; history_every 1 there, 5 here"
    assert there.differences(there) == []
    turned = Grid.product(range(3), lr=[0.2, 0.1])
    assert there.differences(turned)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"seeds": []}, "empty"),
        ({"seeds": [1, 1]}, "twice"),
        ({"seeds": [-1]}, "--seeds"),
        ({"seeds": [2**32]}, "--seeds"),
        ({"seeds": [1.5]}, "--seeds"),
        ({"seeds": [True]}, "--seeds"),
        ({"seeds": [1], "lr": [0.1, 0.1]}, "twice"),
        ({"seeds": [1], "lr": [None, 0.08]}, "twice"),
        ({"seeds": [1], "lr": []}, "empty"),
        ({"seeds": [1], "history_every": -1}, "--history-every"),
        ({"seeds": [1], "history_every": 2**31}, "--history-every .* to 2147483647"),
        ({"seeds": [1], **{name: range(1, 200) for name in ("iterations", "epochs", "groups")}}, "at most 100000"),
        ({"seeds": [1], "seed": [3]}, "seed"),
        ({"seeds": [1], "learning_rate": [3]}, "learning_rate"),
        ({"seeds": [1], "backend": "hf"}, "--model"),
        ({"seeds": [1], "clip": 2.0}, "--clip"),
        ({"seeds": 5}, "seeds 5 is no list of seeds"),
        ({"seeds": "5"}, "seeds '5' is no list of seeds"),
        ({"seeds": np.array(5)}, r"seeds array\(5\) is no list of seeds"),
        ({"seeds": np.zeros((2, 2), int)}, "--seeds"),
        ({"seeds": itertools.count()}, "--seeds lists more than 1000000"),
        ({"seeds": [1], "groups": itertools.count(1)}, "more than|at most 100000"),
        ({"seeds": [1], "lr": [[0.1]]}, r"--lr \[0.1\] is out of range"),
        ({"seeds": [1], "lr": np.full((2, 2), 0.1)}, "--lr .* is out of range"),
        ({"seeds": [1], "lr": [0.5, np.float64(0.5)]}, "--lr 0.5 is listed twice"),
        ({"seeds": [1], "method": ["grpo", "rs-sft"], "clip": [0.1, 0.2]}, "--clip 0.1 has no use with method rs-sft"),
    ],
)
def test_a_grid_that_cannot_run_is_refused(no_type_checks, values, word):
    with pytest.raises(UserError, match=word):
        Grid.product(**values)


@pytest.mark.parametrize(
    ("iterations", "every", "kept"),
    [(5, 1, [0, 1, 2, 3, 4]), (5, 2, [1, 3, 4]), (4, 2, [1, 3]), (5, 9, [4]), (5, 0, [])],
)
def test_history_keeps_every_kth_iteration_and_the_last(iterations, every, kept):
    assert history_iterations(iterations, every).tolist() == kept


def test_a_grid_needs_no_jax():
    code = "import jaxrl_mini.sweeps.grid, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
