"""Commands that are printed to be run again: their own parsers read the same settings out of them."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_mini import sweep, train
from jaxrl_mini.config import GRADIENT_ONLY, LANGUAGE_ONLY, Config, UserError
from jaxrl_mini.machine import commandline
from jaxrl_mini.sweeps.grid import Grid, sweep_command

FILES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
"""Names, and worse."""


def values_of(field: dataclasses.Field) -> st.SearchStrategy:
    """Values of a field, the default often among them."""
    limits = field.metadata
    if "choices" in limits:
        drawn = st.sampled_from([*limits["choices"]])
    elif field.name == "task":
        drawn = st.sampled_from(["guess:numbers=3", "repair:lines=1,steps=3,hidden=true"])
    elif "parse" in limits:
        drawn = st.sampled_from(["verifier", "shuffled"]) | st.floats(0, 1).map(lambda p: f"noisy:{p}")
    elif field.type is bool:
        drawn = st.booleans()
    elif "metavar" in limits:
        drawn = FILES
    elif field.type in (int, int | None):
        drawn = st.integers(limits["minimum"], min(limits.get("maximum", 1000), 1000))
    else:
        drawn = st.floats(limits["minimum"], limits.get("maximum", 3.4e38))
    return st.just(field.default) | drawn


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def allowed(settings: dict) -> Config | None:
    """The settings as a run; where some have no use with others, without them."""
    if settings["backend"] == "table":
        settings |= dict.fromkeys(LANGUAGE_ONLY)
    if settings["method"] == "rs-sft":
        settings |= {name: FIELDS[name].default for name in GRADIENT_ONLY}
    try:
        return Config(**settings)
    except UserError:
        return None


configs = st.fixed_dictionaries({name: values_of(field) for name, field in FIELDS.items()}).map(allowed)
configs = configs.filter(lambda config: config is not None)


@given(configs, FILES)
def test_the_command_of_a_run_gives_its_config(config, output):
    parser = commandline.Parser("train")
    commandline.add_config_flags(parser)
    parser.add_argument("--output", type=commandline.path)
    words = shlex.split(commandline.train_command(config, *commandline.file_flag("--output", output)))
    assert words[:3] == ["python", "-m", "jaxrl_mini.train"]
    flags = parser.parse_args(words[3:])
    assert commandline.config_from(flags) == config and flags.output == output


SEVERAL = st.one_of(
    [
        st.tuples(st.just(name), st.lists(values_of(field), min_size=1, max_size=3, unique=True))
        for name, field in FIELDS.items()
        if name != "seed"
    ]
)
SEEDS = st.builds(range, st.integers(0, 50), st.integers(51, 99), st.integers(1, 60))
SEEDS |= st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5, unique=True)


@given(configs, st.lists(SEVERAL, max_size=2), SEEDS, st.integers(0, 9))
def test_the_command_of_a_sweep_gives_its_grid(config, several, seeds, every):
    """A run's settings, where some fields may take several values."""
    values = {name: [getattr(config, name)] for name in FIELDS if name != "seed"} | dict(several)
    try:
        grid = Grid.product(seeds, every, **values)
    except UserError:
        return
    printed = sweep_command(grid, "--dry-run")
    if printed is None:
        assert len(grid.settings) > 1 or grid.seeds.step > 1
        return
    words = shlex.split(printed)
    assert words[:3] == ["python", "-m", "jaxrl_mini.sweep"]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "estimate", lambda grid, output: found.append(grid) or "")
        sweep.main(words[3:])
    assert found == [grid] and found[0].digest == grid.digest


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (Grid.product(range(3), exact_gradient=True), "--exact-gradient"),
        (Grid.product([4], clip_high=0.3), "--seeds 4:5"),
        (Grid.product(range(4, 5, 9)), "--seeds 4:5"),
        (Grid.product(range(0, 9, 2)), None),
        (Grid.product([1], clip_high=[None, 0.3]), None),
        (Grid.product([1], exact_gradient=[False, True]), None),
        (Grid.product([1], backend="hf", model="-m"), "--model=-m"),
        (Grid.product([1], backend="hf", model=["-m", "n"]), None),
    ],
)
def test_where_no_command_says_it_there_is_none(grid, words):
    printed = sweep_command(grid)
    assert printed is None if words is None else words in printed


def test_the_command_to_go_on_with_is_the_one_that_was_interrupted(command, tmp_path):
    """What an error line advises is done by the advice."""
    words = ("--iterations", 1, "--eval-episodes", 1, "--output", "r.json")
    assert command(train, *words, "--checkpoint", "kept").code == 0
    refused = command(train, *words, "--checkpoint", "kept")
    assert refused.code == 2 and "--resume" in refused.err[0]
    assert command(train, *words, "--checkpoint", "kept", "--resume").code == 0
    assert json.loads(Path("r.json").read_text())["config"]["iterations"] == 1
