"""Training on any task: the article's again by the general programs, and exact figures against a walk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import walk
from generated import Generated, given_any
from hypothesis import settings

from jaxrl_mini import objective
from jaxrl_mini.config import Config, Variant
from jaxrl_mini.episodes import play, rollout
from jaxrl_mini.episodes.grounds import grounds
from jaxrl_mini.exact import situations
from jaxrl_mini.learning import evaluation, loop
from jaxrl_mini.policies.table import log_probs_of_logits
from jaxrl_mini.tasks.compiled import compile_task
from jaxrl_mini.tasks.repair import BinarySearchRepair
from jaxrl_mini.tasks.specification import load_task, make_task, register
from jaxrl_mini.tasks.task import Task

pytestmark = pytest.mark.usefixtures("quick_to_compile")

HIDDEN = "repair:lines=2,steps=4,hidden=true"
TASKS = [HIDDEN, "repair:lines=2,steps=4", "bandit:success=0.2/0.5/0.8", "deep-sea:size=4", "guess:numbers=3"]


def logits_of(task, *runs, seed=0):
    return np.random.default_rng(seed).normal(size=(*task.shape, *runs)).astype(np.float32)


def policy_of(task, logits):
    """(view, step) -> probabilities, for the walk."""
    probs = np.exp(log_probs_of_logits(logits))
    places = {(context // task.width, view): context for context, view in task.views.items()}
    return lambda view, step: probs[places[step, view]]


# The article's task, by the general programs


@pytest.fixture(scope="module")
def again():
    """Another name for the article's task, which has no programs of its own."""
    register("binary-search-repair-again", BinarySearchRepair)
    return "binary-search-repair-again"


@pytest.mark.parametrize(
    "options",
    [{}, {"method": "rs-sft"}, {"aggregation": "step-mean", "advantage": "rloo"}, {"reward": "shuffled"},
     {"aggregation": "fixed-length", "kl": "k3", "reward": "noisy:0.1"}],
    ids=str,
)  # fmt: skip
def test_the_general_programs_train_the_articles_task_as_its_own_do(again, options):
    config = {"iterations": 6, "group_size": 5, "eval_episodes": 40, **options}
    here, there = (loop.run(Config(task=task, **config)) for task in ("binary-search-repair", again))
    for name in ("train_success_rate", "mixed_groups", "optimizer_steps"):
        np.testing.assert_array_equal(here.history[name], there.history[name])
    np.testing.assert_allclose(there.logits, here.logits, atol=2e-6)
    assert (there.after.successes, there.after.actions) == (here.after.successes, here.after.actions)
    assert there.after.exact_success_rate == pytest.approx(here.after.exact_success_rate, abs=1e-6)
    assert there.before.exact_success_rate == pytest.approx(here.before.exact_success_rate, abs=1e-15)


def test_the_general_programs_draw_the_episodes_that_the_articles_own_draw(again):
    task = load_task(again)
    probs = jax.nn.softmax(jnp.asarray(logits_of(task, 64)), axis=1)
    drawn = {"stream": rollout.TRAINING, "groups": 3, "group_size": 4}
    seeds, here = jnp.arange(64, dtype=jnp.uint32), grounds(task)
    one = play.play(probs, seeds, 5, here.tables, here.members, **drawn)
    other = rollout.rollout(probs, seeds, jnp.int32(5), **drawn)
    np.testing.assert_array_equal(one.choices, other.choices)


# Exact figures


def check_exact(make, task):
    logits = logits_of(task)
    found = {split: situations.by_instance(task, log_probs_of_logits(logits), split) for split in task.splits}
    for split, members in make().splits.items():
        walked = [walk.success_and_actions(make, instance, policy_of(task, logits)) for instance in members]
        np.testing.assert_allclose(np.transpose(found[split]), walked, atol=1e-12)


@pytest.mark.parametrize("specification", TASKS)
def test_exact_success_on_every_instance_is_what_a_walk_finds(specification):
    check_exact(lambda: make_task(specification), load_task(specification))


@settings(max_examples=20, deadline=None)
@given_any
def test_exact_success_on_any_small_task_is_what_a_walk_finds(**parameters):
    check_exact(lambda: Generated(**parameters), compile_task(Generated(**parameters), "generated"))


@pytest.mark.parametrize("parameters", [{"seed": 1, "instances": 3}, {"seed": 5, "instances": 2, "hidden": False}])
def test_sampled_episodes_of_a_random_task_agree_with_its_exact_figures(parameters):
    make = functools.partial(Generated, actions=3, steps=3, places=4, **parameters)
    task = compile_task(make(), "generated")
    logits, runs, episodes = logits_of(task, 1), 16, 6_000
    same = np.repeat(logits, runs, axis=-1)
    sums = evaluation.play_task(task, "train", same, np.arange(runs, dtype=np.uint32), episodes)
    exact = situations.exact_of_logits(task, logits[..., 0], "train")
    rate, mean, square = sums.sum(axis=1) / (runs * episodes)
    assert abs(rate - exact.success_rate) < 4 * (rate * (1 - rate) / (runs * episodes)) ** 0.5
    assert abs(mean - exact.mean_actions) < 4 * ((square - mean**2) / (runs * episodes)) ** 0.5 + 1e-12


def test_a_group_plays_one_instance_and_all_are_as_likely():
    task = load_task("guess:numbers=3")
    here, probs = grounds(task), jnp.full((*task.shape, 64), 1 / task.shape[1])
    drawn = {"stream": rollout.TRAINING, "groups": 90, "group_size": 2}
    instance = play.play(probs, jnp.arange(64, dtype=jnp.uint32), 0, here.tables, here.members, **drawn).instance
    counts = np.bincount(np.asarray(instance).ravel(), minlength=3)
    assert instance.shape == (90, 64) and abs(counts - 1920).max() < 4 * (5760 * 2 / 9) ** 0.5


class Coin(Task):
    """Any action tosses a coin and hands it in; the verifier tosses another."""

    actions, max_steps, header, state = ("toss", "throw"), 1, "Heads or tails?", None

    def reset(self, instance):
        self.view, self.ended, self.submission = 0, False, None
        return ""

    def step(self, action):
        self.submission, self.ended = self.chance([1, 1]), True
        return ""

    @staticmethod
    def verify(submission, instance):
        return 0.5


def test_the_verdict_does_not_hang_on_what_else_was_drawn():
    task = compile_task(Coin(), "coin")
    here, seeds = grounds(task), jnp.arange(1, dtype=jnp.uint32)
    drawn = {"stream": rollout.TRAINING, "groups": 64, "group_size": 64}
    played = play.play(jnp.full((*task.shape, 1), 0.5), seeds, 0, here.tables, here.members, **drawn)
    accepted = np.asarray(play.grade(played, here.accepted, seeds, 0, stream=rollout.TRAINING)).ravel()
    side, action = np.asarray(played.submission).ravel(), np.asarray(played.choices).ravel()
    assert len(np.unique(side)) == len(np.unique(action)) == 2
    for one, other in ((accepted, side), (accepted, action), (side, action)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / 64


# Credit


def plain_credit(choices, rewards, advantages, variant, contexts, actions):
    """By a loop over episodes and steps, in float64."""
    steps, groups, size = choices.shape
    lengths = (choices >= 0).sum(axis=0)
    plus, minus, counts, taken = np.zeros((4, contexts, actions))
    for step, group, episode in np.argwhere(choices >= 0):
        place = divmod(step * (contexts * actions // steps) + choices[step, group, episode], actions)
        share = {
            "episode-mean": 1 / (lengths[group, episode] * groups * size),
            "step-mean": 1 / lengths.sum(),
            "fixed-length": 1 / (steps * groups * size),
        }[variant.aggregation]
        won = rewards[group, episode] > 0
        (plus if won else minus)[place] += share * (advantages.success if won else advantages.failure)[group]
        counts[place] += 1
        taken[place] += share
    return plus, minus, counts, taken


@pytest.mark.parametrize("aggregation", ["episode-mean", "step-mean", "fixed-length"])
@pytest.mark.parametrize("steps, views", [(3, 2), (7, 4), (12, 2), (4, 400)])
def test_a_batchs_credit_is_that_of_a_loop_over_its_actions(aggregation, steps, views):
    actions, groups, size, runs, variant = 3, 3, 7, 2, Variant("rloo", aggregation, kl="k2")
    draw = np.random.default_rng(steps)
    choices = draw.integers(0, views * actions, (steps, groups, size, runs))
    choices[np.arange(steps)[:, None, None, None] >= draw.integers(1, steps + 1, choices.shape[1:])] = -1
    rewards = draw.integers(0, 2, choices.shape[1:]).astype(np.float32)
    advantages = objective.advantages(jnp.asarray(rewards), method="grpo", advantage="rloo")
    played = play.Play(jnp.asarray(choices, jnp.int32), jnp.zeros((groups, size, runs), jnp.int32), None)
    found = objective.play_credit(played, jnp.asarray(rewards), advantages, variant, views=views, actions=actions)
    for run in range(runs):
        mine = jax.tree.map(lambda leaf, run=run: np.asarray(leaf, np.float64)[..., run], advantages)
        whole = (choices[..., run], rewards[..., run], mine, variant, steps * views, actions)
        plus, minus, counts, taken = plain_credit(*whole)
        np.testing.assert_allclose(found.plus[..., run], plus, atol=1e-6)
        np.testing.assert_allclose(found.minus[..., run], minus, atol=1e-6)
        np.testing.assert_array_equal(found.counts[..., run], counts)
        np.testing.assert_allclose(found.taken[..., run], taken, atol=1e-6)
        np.testing.assert_allclose(found.visits[..., run], taken.sum(axis=1), atol=1e-6)


def test_advantages_train_on_a_task_with_instances():
    for advantage in ("group-std", "rloo", "maxrl"):
        result = loop.run(Config(task="guess:numbers=3", advantage=advantage, iterations=30, eval_episodes=1))
        assert result.after.exact_success_rate > result.before.exact_success_rate + 0.1


def test_training_on_the_expected_loss_gives_every_seed_one_policy_that_is_good():
    task = "repair:lines=2,steps=4,hidden=true"
    one, other = (
        loop.run(Config(task=task, exact_gradient=True, seed=seed, iterations=60, eval_episodes=1)) for seed in (1, 2)
    )
    np.testing.assert_array_equal(one.logits, other.logits)
    assert one.after.exact_success_rate > 0.98
    assert one.before.exact_success_rate == pytest.approx(0.5 * sum(one.before.by_instance), abs=1e-15)
