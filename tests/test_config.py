"""The settings: the article's defaults, and one clear line for everything that cannot be."""

import dataclasses
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxrl_mini
from jaxrl_mini.config import ADVANTAGES, Config, UserError


def test_the_defaults_are_the_articles():
    assert dataclasses.asdict(Config()) == {
        "task": "binary-search-repair",
        "backend": "table",
        "method": "grpo",
        "model": None,
        "seed": 7,
        "iterations": 100,
        "groups": 4,
        "group_size": 8,
        "epochs": 2,
        "lr": None,
        "clip": 0.2,
        "beta": 0.02,
        "advantage": "group-std",
        "aggregation": "episode-mean",
        "surrogate": "clip",
        "clip_high": None,
        "kl": "exact",
        "entropy_bonus": 0.0,
        "exact_gradient": False,
        "reward": "verifier",
        "eval_episodes": 500,
        "dtype": None,
        "micro_batch": None,
        "exact_every": None,
    }


def test_the_learning_rate_defaults_by_backend():
    assert Config().effective_lr == 0.08
    assert Config(backend="hf", model="folder").effective_lr == 1e-6
    assert Config(lr=0.5).effective_lr == 0.5


COUNT = "a whole number from 1 to 2147483647"
LR, CLIP = "a number from 1.2e-38 to 3.4e+38", "a number from 1.2e-07 to 0.9999999"
BAD = [
    ("backend", "torch", "one of table, hf"),
    ("method", "ppo", "one of grpo, rs-sft"),
    ("method", None, "one of grpo, rs-sft"),
    *[
        ("seed", value, "a whole number from 0 to 4294967295")
        for value in (-1, 2**32, 10**20, 1.5, "7", True, math.nan)
    ],
    *[(name, value, COUNT) for name in ("iterations", "groups", "epochs") for value in (0, -3, 2**31)],
    *[("eval_episodes", value, "a whole number from 1 to 1000000") for value in (0, -3, 10**6 + 1)],
    *[("group_size", value, "a whole number from 2 to 2147483647") for value in (1, 0, -1, 2.0)],
    *[("lr", value, LR) for value in (0, -0.1, math.nan, math.inf, -math.inf, "1", 1e39, 1e-60, 10**40)],
    *[("clip", value, CLIP) for value in (0, 1, 1.5, -0.2, math.nan, math.inf, 1e-12, 0.99999999999)],
    *[("beta", value, f"0 or {LR}") for value in (-1, -1e-9, math.nan, math.inf, 1e39, 1e-60)],
    ("model", "", "a folder's name"),
    ("model", "a\0b", "a folder's name"),
    ("iterations", None, COUNT),
    ("advantage", "gae", f"one of {', '.join(ADVANTAGES)}, or FILE.py:FUNCTION"),
    ("aggregation", "sum", "one of episode-mean, step-mean, fixed-length"),
    ("surrogate", "ppo", "one of clip, dual-clip, cispo, none"),
    ("kl", "k4", "one of exact, k1, k2, k3"),
    *[("clip_high", value, "a number from 1.2e-07 to 3.4e+38") for value in (0, -0.1, math.nan, math.inf)],
    *[("entropy_bonus", value, "0 or a number from 1.2e-38 to 3.4e+38") for value in (-1e-9, math.nan, math.inf)],
    *[("exact_gradient", value, "True or False") for value in (None, 1, "yes")],
    *[
        ("reward", value, "one of verifier, public-test, shuffled, constant, or noisy:p with p from 0 to 1")
        for value in ("test", "noisy", "noisy:", "noisy:1.1", "noisy:-0.1", "noisy:nan", "noisy: 0.1", "loud:0.1", None)
    ],
]


@pytest.mark.parametrize(("name", "value", "right"), BAD)
def test_a_bad_value_is_named_with_what_would_be_right(no_type_checks, name, value, right):
    with pytest.raises(UserError) as error:
        Config(**{name: value})
    message = str(error.value)
    assert message.startswith(f"--{name.replace('_', '-')} {value!r} ")
    assert message.endswith(f"expected {right}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 0),
        ("seed", 2**31),
        ("seed", 2**32 - 1),
        ("group_size", 2),
        ("iterations", 1),
        ("beta", 0),
        ("lr", 1.2e-38),
        ("lr", 3.4e38),
        ("beta", 1.2e-38),
        ("clip", 1.2e-7),
        ("clip", 0.9999999),
        ("seed", np.uint32(7)),
        ("clip", np.float32(0.5)),
        ("groups", np.int64(3)),
        ("groups", np.array(3)),
        ("groups", jnp.int32(3)),
        ("lr", np.float32(0.1)),
        ("lr", np.float16(0.1)),
        ("lr", jnp.bfloat16(0.1)),
        ("lr", np.longdouble(0.1)),
        ("lr", np.array(0.1, np.float32)),
        ("lr", np.int64(2)),
        ("lr", Fraction(1, 4)),
        ("lr", Decimal("0.25")),
    ],
)
def test_numbers_at_the_limits_and_of_any_library_become_python_numbers(no_type_checks, name, value):
    taken = getattr(Config(**{name: value}), name)
    assert taken == float(value)
    assert type(taken) is (int if name in ("seed", "group_size", "iterations", "groups") else float)


def test_the_value_of_a_number_is_taken_exactly(no_type_checks):
    assert Config(lr=np.float32(0.1)).lr == 0.10000000149011612


@pytest.mark.parametrize("value", [np.True_, np.array(True), jnp.bool_(True)])
def test_a_bool_of_any_library_is_one(no_type_checks, value):
    assert Config(exact_gradient=value).exact_gradient is True


def test_a_path_names_a_folder_and_text_of_any_library_is_text(no_type_checks):
    config = Config(backend=np.str_("hf"), model=Path("a/b"), reward=np.str_("noisy:0.10"))
    assert config == Config(backend="hf", model="a/b", reward="noisy:0.1")
    assert {type(value) for value in (config.backend, config.model, config.reward)} == {str}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", np.array([0.1])), ("lr", np.complex64(1)), ("lr", 1j), ("lr", [0.1]), ("lr", np.float32("nan")),
        ("lr", Decimal("nan")), ("lr", np.True_), ("groups", np.float64(4)), ("groups", np.array([4])),
        ("groups", np.True_), ("groups", Decimal(4)), ("exact_gradient", np.int64(1)), ("model", b"m"), ("model", {}),
        ("reward", np.array(["verifier"])), ("method", ["grpo"]), ("method", np.array(["grpo", "rs-sft"])),
    ],
)  # fmt: skip
def test_what_is_no_such_value_is_refused_in_one_line(no_type_checks, name, value):
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} .* expected") as error:
        Config(**{name: value} | ({"backend": "hf"} if name == "model" else {}))
    assert "\n" not in str(error.value)


def test_settings_at_their_limits_do_not_vanish_in_float32(no_type_checks):
    tiny = np.finfo(np.float32).tiny
    for value in (1.2e-38, 3.4e38):
        settings = Config(lr=value, beta=value)
        for live in (np.float32(settings.lr), np.float32(settings.beta)):
            assert tiny <= live < np.inf
    for clip in map(np.float32, (1.2e-7, 0.9999999)):
        assert 0 < 1 - clip < 1 < 1 + clip < 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"groups": 2**20, "group_size": 2},
            "--groups 1048576 x --group-size 2 .* at most 1048576 episodes in a batch",
        ),
        ({"groups": 2**31 - 1, "group_size": 2**31 - 1}, "at most 1048576 episodes"),
        ({"backend": "hf", "model": "x", "micro_batch": 33}, "--micro-batch 33 .* at most the 32 episodes of a batch"),
    ],
)
def test_a_batch_that_no_memory_holds_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Config(**settings)


def test_a_language_model_needs_its_folder_and_a_table_has_no_use_for_one():
    with pytest.raises(UserError, match="--model is missing: backend hf needs the folder"):
        Config(backend="hf")
    with pytest.raises(UserError, match="--model folder has no use with backend table"):
        Config(model="folder")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 0.1}, "--clip 0.1 has no use with method rs-sft"),
        ({"beta": 0.0}, "--beta 0.0 has no use with method rs-sft"),
        ({"advantage": "rloo"}, "--advantage rloo has no use with method rs-sft"),
        ({"aggregation": "step-mean"}, "--aggregation step-mean has no use with method rs-sft"),
        ({"surrogate": "none"}, "--surrogate none has no use with method rs-sft"),
        ({"clip_high": 0.3}, "--clip-high 0.3 has no use with method rs-sft"),
        ({"kl": "k1"}, "--kl k1 has no use with method rs-sft"),
        ({"entropy_bonus": 0.1}, "--entropy-bonus 0.1 has no use with method rs-sft"),
        ({"method": "grpo", "surrogate": "none", "clip_high": 0.3}, "--clip-high 0.3 has no use with surrogate none"),
        ({"backend": "hf", "model": "x", "exact_gradient": True}, "--exact-gradient has no use with backend hf"),
        ({"exact_gradient": True, "group_size": 1025}, "--group-size 1025 is too large for --exact-gradient"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Config(**{"method": "rs-sft"} | settings)


def test_a_noisy_reward_has_one_form():
    assert Config(reward="noisy:0.10") == Config(reward="noisy:.1") and Config(reward="noisy:.1").reward == "noisy:0.1"


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 8


configs = st.builds(
    Config,
    seed=st.integers(0, 2**32 - 1),
    iterations=st.integers(1, 2**31 - 1),
    group_size=st.integers(2, 2**18),
    lr=st.none() | st.floats(1e-30, 1e30),
    clip=st.floats(0.001, 0.999),
    beta=st.just(0.0) | st.floats(1.2e-38, 3.4e38),
)


@given(configs)
def test_a_config_survives_its_record(config):
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown or missing keys: extra"),
        ({"effective_lr": 0.5}, "effective_lr 0.5 contradicts lr: expected 0.08"),
        ({"clip": 2.0}, "--clip 2.0 is out of range"),
    ],
)
def test_a_recorded_config_is_checked(change, message):
    with pytest.raises(UserError, match=message):
        Config.from_dict({**Config().to_dict(), **change})


def test_a_recorded_config_must_be_complete():
    data = Config().to_dict()
    del data["beta"]
    with pytest.raises(UserError, match="unknown or missing keys: beta"):
        Config.from_dict(data)


def test_the_public_names_are_all_there():
    for name in jaxrl_mini.__all__:
        assert getattr(jaxrl_mini, name).__name__ if name != "ACTIONS" else jaxrl_mini.ACTIONS
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        jaxrl_mini.nothing  # noqa: B018
