"""Every compiled program of a run can be lowered for GPUs and TPUs, and stays on the device from start to end."""

import re
from functools import partial
from unittest import mock

import jax
import numpy as np
import pytest
from generated import Generated
from jax.experimental import io_callback

from jaxrl_mini import objective, tiny_model
from jaxrl_mini.config import BLOCK, Config
from jaxrl_mini.episodes.packed import Episodes
from jaxrl_mini.learning import block, language_episodes, language_training, training
from jaxrl_mini.policies import language, table
from jaxrl_mini.policies.scenes import in_chunks, reading, scene
from jaxrl_mini.runs import replaying
from jaxrl_mini.tasks.histories import histories
from jaxrl_mini.tasks.repair import NUM_ACTIONS, NUM_STATES, NUM_VARIANTS
from jaxrl_mini.tasks.specification import load_task, register
from jaxrl_mini.types import Distribution, Settings

PLATFORMS = ("cuda", "tpu")
LEAVES = {"custom_call", "send", "recv", "infeed", "outfeed"}
"""Operations of StableHLO that can leave the device, or whose kernel only some platforms have."""


def assert_stays(traced) -> None:
    """A traced program can be lowered for each platform, and no operation of it leaves the device."""
    for platform in PLATFORMS:
        operations = set(re.findall(r"stablehlo\.(\w+)", traced.lower(lowering_platforms=(platform,)).as_text()))
        assert "return" in operations  # the text is of the form that is searched
        assert not operations & LEAVES


@pytest.mark.parametrize(
    ("leave", "error"),
    [
        (lambda x: jax.pure_callback(np.sin, x, x), ValueError),  # jax lowers calls of Python for this machine alone
        (lambda x: io_callback(np.sin, x, x), ValueError),
        (lambda x: (jax.debug.print("{}", x), x)[1], ValueError),
        (lambda x: jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device), AssertionError),
    ],
    ids=["function", "effect", "print", "memory"],
)
def test_what_leaves_the_device_is_seen(leave, error):
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: leave(x), x))
    with pytest.raises(error):
        assert_stays(loop.trace(np.float32(0)))


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "rs-sft", "reward": "shuffled"},
        {"exact_gradient": True},
        {"advantage": "maxrl", "aggregation": "step-mean", "surrogate": "dual-clip", "kl": "k3", "reward": "noisy:0.2"},
    ],
    ids=["grpo", "rs-sft", "exact", "variant"],
)
def test_the_program_of_a_fleet_stays_on_the_device(changes):
    """The one that an accelerator is given, with all iterations of a chunk in it."""
    config = Config(**changes)
    sizes, columns = block.sizes_of(config), block.settings_of([config])
    accelerator = mock.Mock(spec=jax.Device, platform="gpu")
    program = block.program(sizes, tuple(columns), accelerator)
    settings = Settings(**{name: zeros(BLOCK) for name in columns})
    start, verdicts = block._start(sizes), np.zeros((training.CHUNK, sizes.groups, NUM_VARIANTS), bool)
    data = np.zeros(BLOCK, np.uint32), table.initial_logits((BLOCK,)), settings, verdicts, np.int32(0), np.int32(20)
    assert_stays(program.trace(*start, *data))


def test_a_replayed_iteration_stays_on_the_device():
    config = Config()
    logits = table.initial_logits(())
    state = training.initial_state(logits, Distribution(logits, logits))
    settings = jax.tree.map(np.float32, Settings.of(config))
    episodes = Episodes(np.zeros((config.groups, config.group_size), np.int32))
    data = state, episodes, zeros(config.groups, config.group_size), zeros(NUM_STATES, NUM_ACTIONS), settings
    assert_stays(replaying._iteration.trace(*data, block.sizes_of(config)))


# Language models


@pytest.fixture(scope="module", params=["article", "another task"])
def model(request, tiny_folder, tmp_path_factory):
    """Another task has instances that begin in one of two ways, draws of chance, and states behind one observation."""
    if request.param == "article":
        return language.load_policy(tiny_folder)
    specification, folder = "generated-for-lowering", tmp_path_factory.mktemp("models") / "tiny"
    register(specification, partial(Generated, seed=4, instances=3))
    tiny_model.make_tiny_model(folder, layers=1, width=16, task=specification)
    return language.load_policy(folder, task=load_task(specification))


def finished(policy, groups, group_size):
    """Some batch."""
    batch = policy.task.task.max_steps, groups, group_size
    choices, shown = np.zeros(batch, np.int32), np.zeros((*batch[1:], batch[0]), np.int32)
    return language_episodes.recorded(choices, choices[0], choices[0, :, 0], shown)


def test_a_language_models_rollout_stays_on_the_device(model):
    policy, checkpoint = model
    task, seed = policy.task.task, np.array(7, np.uint32)
    _, start = language_episodes.begin(task, "train", seed, 0, stream=0, groups=32, group_size=1)
    assert_stays(language_episodes.play.trace(policy, checkpoint.params, scene(task), start))


@pytest.mark.parametrize("method", ["grpo", "rs-sft"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "too-many-histories"])
def test_a_language_models_update_stays_on_the_device(model, method, exact):
    policy, checkpoint = model
    config, task = Config(backend="hf", model="x", method=method), policy.task.task
    batch, actions = config.groups * config.group_size, len(task.actions)
    episodes = finished(policy, config.groups, config.group_size)
    merged = objective.merge([episodes.played.choices], batch)
    by_history = zeros(histories(task).size, actions) if exact else None
    traced = language_training.learn.trace(
        policy,
        training.initial_state(checkpoint.params),
        language_training.Reference(by_history, None if exact else checkpoint.params),
        np.zeros((task.max_steps, batch), np.int32) if exact else None,
        merged,
        episodes,
        zeros(config.groups, config.group_size),
        zeros(task.max_steps, batch, actions),
        jax.tree.map(np.float32, Settings.of(config)),
        sizes=training.Sizes(method, config.groups, config.group_size, config.epochs),
        micro_batch=4,
    )
    assert_stays(traced)


def test_a_language_models_exact_evaluation_stays_on_the_device(model):
    policy, checkpoint = model
    found = histories(policy.task.task)
    laid = reading(found)
    order = in_chunks(found, np.ones(found.size, bool), laid.waves, 32)
    read = language_training.read_histories
    assert_stays(read.trace(policy, checkpoint.params, laid.pages, order, np.int32(1), room=laid.room))


def test_a_language_models_scores_of_episodes_stay_on_the_device(model):
    policy, checkpoint = model
    prompts = finished(policy, 32, 1).played.prompts
    assert_stays(language_training.log_probs.trace(policy, checkpoint.params, prompts))


class Reached(Exception):
    """A compiled function was called; holds it, traced."""


@pytest.mark.parametrize("call", ["warm start", "score"])
def test_what_is_compiled_where_it_is_used_stays_on_the_device(call, tmp_path, tiny_folder, monkeypatch):
    compile = jax.jit

    def jit(function, **options):
        def called(*arguments):
            raise Reached(compile(function, **options).trace(*arguments))

        return called

    monkeypatch.setattr(jax, "jit", jit)
    with pytest.raises(Reached) as reached:
        if call == "score":
            language.score_candidates(tiny_folder, ["a prompt"], [" read", " test"])
        else:
            tiny_model.make_tiny_model(tmp_path / "model", layers=1, width=16, warm_start=True)
    monkeypatch.undo()
    assert_stays(reached.value.args[0])
