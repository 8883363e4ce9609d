"""Gradients and expected credit on any task: against finite differences, walks, and the means of batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import walk
from generated import Doors, Generated, Wide, given_any
from hypothesis import settings

from jaxrl_mini import estimators, sweep, train
from jaxrl_mini.config import UserError, Variant
from jaxrl_mini.episodes.grounds import grounds
from jaxrl_mini.exact import expected, laws, moments, situations
from jaxrl_mini.policies.table import log_probs_of_logits
from jaxrl_mini.tasks.compiled import compile_task
from jaxrl_mini.tasks.situations import stacked
from jaxrl_mini.tasks.specification import load_task, make_task, register

pytestmark = pytest.mark.usefixtures("quick_to_compile")

TASKS = [
    "binary-search-repair", "repair:lines=2,steps=4,hidden=true", "repair:lines=2,steps=4", "repair:lines=3,steps=4",
    "bandit:success=0.2/0.5/0.8", "deep-sea:size=4", "deep-sea:size=6", "guess:numbers=2", "guess:numbers=3",
    "guess:numbers=4,price=0.3",
]  # fmt: skip


def logits_of(task, seed=0):
    return np.random.default_rng(seed).normal(size=task.shape)


# Gradients


def check_gradients(task):
    """Of success on each instance, and of the divergence from another policy: each by differences, entry by entry."""
    logits, reference = logits_of(task), log_probs_of_logits(logits_of(task, seed=1))
    log_probs, size, step = log_probs_of_logits(logits), logits.size, 1e-5
    moved = logits[..., None] + step * np.concatenate([np.eye(size), -np.eye(size)], axis=1).reshape(*task.shape, -1)

    def slope(values):
        return ((values[..., :size] - values[..., size:]) / (2 * step)).reshape(-1, *task.shape)

    found = laws.laws_of(task, log_probs)
    success, actions = situations.by_instance(task, log_probs_of_logits(moved), "train")
    for law, by_entry in zip(found, slope(success), strict=True):
        np.testing.assert_allclose(law.gradient, by_entry, atol=1e-9)
    success, actions = situations.by_instance(task, log_probs, "train")
    np.testing.assert_allclose([law.success for law in found], success, atol=1e-12)
    lengths = np.arange(task.max_steps + 1)
    np.testing.assert_allclose([(law.ends * lengths).sum() for law in found], actions, atol=1e-12)
    np.testing.assert_allclose([law.choices.sum() for law in found], actions, atol=1e-12)
    np.testing.assert_allclose([law.ends.sum() for law in found], 1.0, atol=1e-12)
    divergences = []
    for run in range(2 * size):
        moved_log = log_probs_of_logits(moved[..., run])
        visits = situations_visits(task, moved_log)
        divergences.append((visits[:, None] * np.exp(moved_log) * (moved_log - reference)).sum())
    exact = moments.episode_kl_gradient(task, np.exp(log_probs), reference)
    np.testing.assert_allclose(exact, slope(np.array(divergences))[0], atol=1e-8)


def situations_visits(task, log_probs):
    """Expected visits of every context, in an episode of the split."""
    visits, found = np.zeros(task.shape[0]), situations.situations(task, "train")
    for level, mass, _ in situations.taken(found, np.exp(log_probs)[..., None]):
        np.add.at(visits, level.context, mass[:, 0] / len(task.splits["train"]))
    return visits


@pytest.mark.parametrize("specification", TASKS)
def test_gradients_are_finite_differences(specification):
    check_gradients(load_task(specification))


@settings(max_examples=20, deadline=None)
@given_any
def test_gradients_on_any_small_task_are_finite_differences(**parameters):
    check_gradients(compile_task(Generated(**parameters), "generated"))


class Short(Doors):
    """Has a step that no episode reaches."""

    max_steps = 3


def test_a_step_that_no_episode_reaches_changes_no_gradient():
    short, plain = (compile_task(make(3), "doors") for make in (Short, Doors))
    check_gradients(short)
    check_laws(lambda: Short(3), short)
    log_probs = log_probs_of_logits(logits_of(short))
    for one, other in zip(laws.laws_of(short, log_probs), laws.laws_of(plain, log_probs[:2]), strict=True):
        np.testing.assert_allclose(one.gradient[:2], other.gradient, atol=1e-15)


def check_laws(make, task):
    log_probs = log_probs_of_logits(logits_of(task))
    for instance, law in zip(make().splits["train"], laws.laws_of(task, log_probs), strict=True):
        choices, ends = np.zeros_like(law.choices), np.zeros_like(law.ends)
        for chance, taken, reward in walk.merged(make, task, instance, log_probs):
            ends[reward, len(taken)] += chance
            for choice in taken:
                choices[reward, len(taken), *choice] += chance
        np.testing.assert_allclose(law.choices, choices, atol=1e-12)
        np.testing.assert_allclose(law.ends, ends, atol=1e-12)


@pytest.mark.parametrize("specification", ["repair:lines=2,steps=3,hidden=true", "guess:numbers=3", "deep-sea:size=3"])
def test_what_an_episode_does_on_each_instance_is_what_a_walk_finds(specification):
    check_laws(lambda: make_task(specification), load_task(specification))


@settings(max_examples=10, deadline=None)
@given_any
def test_what_an_episode_of_any_small_task_does_is_what_a_walk_finds(**parameters):
    check_laws(lambda: Generated(**parameters), compile_task(Generated(**parameters), "generated"))


# Expected credit


VARIANTS = [
    Variant(), Variant("rloo", "fixed-length", kl="k3"), Variant("maxrl", reward="noisy:0.2"),
    Variant("batch-std", "step-mean"), Variant("group-mean", reward="shuffled"),
    Variant("reinforce", reward="constant"),
]  # fmt: skip


SIZES = {"group_size": 4, "method": "grpo"}


@functools.partial(jax.jit, static_argnames=("variant", "instances"))
def play_credit_of(logits, found, variant, instances):
    probs = jax.nn.softmax(logits, axis=1)
    return expected.expected_play_credit(probs, found, instances=instances, groups=4, variant=variant, **SIZES)


def play_credit(task, logits, variant):
    here = grounds(task, expected=True)
    return play_credit_of(np.asarray(logits, np.float32), here.situations, variant, len(here.members))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_articles_task_has_by_the_general_program_what_its_own_expects(variant):
    task, verdicts = load_task("binary-search-repair"), jnp.zeros((4, 4), bool).at[:, 3].set(True)
    logits = np.random.default_rng(0).normal(size=(24, 6, 2)).astype(np.float32)
    own_credit = jax.jit(functools.partial(expected.expected_credit, verdicts=verdicts, variant=variant, **SIZES))
    here, there = own_credit(jax.nn.softmax(logits, axis=1)), play_credit(task, logits, variant)
    assert (here.taken is None) == (there.taken is None)
    for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    "specification, variant",
    [("repair:lines=2,steps=4,hidden=true", VARIANTS[0]), ("generated", VARIANTS[1]), ("generated", VARIANTS[2]),
     ("guess:numbers=3", VARIANTS[3])],
)  # fmt: skip
def test_expected_credit_is_the_mean_of_any_batch_or_what_larger_ones_tend_to(specification, variant):
    any_task = compile_task(Generated(5, instances=3), "generated")
    task = any_task if specification == "generated" else load_task(specification)
    logits = logits_of(task)
    log_probs = log_probs_of_logits(logits)
    credit = play_credit(task, logits, variant)
    by_choice = np.asarray(credit.plus + credit.minus, np.float64)
    ours = by_choice - np.exp(log_probs) * by_choice.sum(axis=1, keepdims=True)
    found, of_batch = laws.laws_of(task, log_probs, variant.reward), variant == VARIANTS[3]
    mean = moments.batch_moments(found, 12 if of_batch else 4, 4, variant).mean
    assert np.linalg.norm(ours - mean) < (0.05 if of_batch else 2e-6) * np.linalg.norm(mean)
    choices = np.mean([law.choices.sum(axis=(0, 1)) for law in found], axis=0)
    np.testing.assert_allclose(credit.counts, 16 * choices, rtol=1e-5, atol=1e-6)


def test_shuffled_and_constant_rewards_teach_nothing_in_expectation():
    """And a shuffled verdict is that of an episode of any instance."""
    task = load_task("guess:numbers=3")
    for reward in ("shuffled", "constant"):
        credit = play_credit(task, logits_of(task), Variant("rloo", "fixed-length", reward=reward))
        by_choice = np.asarray(credit.plus + credit.minus, np.float64)
        assert abs(by_choice).max() < 1e-6
    credit = play_credit(task, logits_of(task), Variant("reinforce", "fixed-length", kl="k1", reward="shuffled"))
    success = situations.exact_of_logits(task, logits_of(task), "train").success_rate
    np.testing.assert_allclose(credit.plus, success * np.asarray(credit.taken), rtol=1e-5, atol=1e-8)


# Limits


def test_what_is_too_large_is_refused_with_its_size(command, tmp_path):
    register("wide", Wide)
    for module, *more in (train,), (sweep, "--seeds", 1), (estimators,):
        flags = ["--exact-gradient"] * (module is not estimators)
        outcome = command(module, "--task", "wide:instances=1500,actions=200,steps=1", *flags, *more)
        assert outcome.code == 2 and len(outcome.err) == 1 and "expected at most 250000 in all" in outcome.err[0]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"1 steps with up to 300000 ways out of .* expected at most 250000 in all"):
        stacked(compile_task(Wide(1500, 200, 1), "wide"), "train")
    with pytest.raises(
        UserError, match=r"300 instances x 60 contexts x 5 actions x 60 .* 10980000 numbers: .* 10000000"
    ):
        laws.check_task(compile_task(Wide(300, 5, 60), "wide"))
    pair = Variant("batch-std", "step-mean")
    moments.check_size(4, 8, pair, steps=7, instances=5)
    with pytest.raises(
        UserError, match=r"are too many for batch-std and step-mean on 20 instances: .* 50000000 and 5000"
    ):
        moments.check_size(4, 8, pair, steps=7, instances=20)
