"""Training on any task: the article's again by the general programs, exact figures against a walk, bits, refusals."""

import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
import walk
from generated import Generated, given_any
from hypothesis import settings

from jaxrl_mini import objective, reproduce, sweep, train
from jaxrl_mini import play as play_door
from jaxrl_mini.config import Config, UserError, Variant
from jaxrl_mini.episodes import play, rollout
from jaxrl_mini.episodes.grounds import grounds
from jaxrl_mini.exact import situations
from jaxrl_mini.learning import evaluation, loop
from jaxrl_mini.learning.checkpoint import Checkpoints
from jaxrl_mini.policies.table import log_probs_of_logits
from jaxrl_mini.tasks.compiled import compile_task
from jaxrl_mini.tasks.repair import BinarySearchRepair
from jaxrl_mini.tasks.specification import load_task, make_task, register

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


# Bits, folders, commands


@pytest.mark.parametrize("task", [HIDDEN, "bandit:success=0.2/0.5/0.8"])
def test_a_run_alone_in_a_sweep_and_resumed_is_one_run(task, tmp_path, command):
    config = Config(task=task, iterations=25, seed=8, eval_episodes=30)
    alone = loop.run(config)
    with Checkpoints(tmp_path / "kept", Config(task=task, iterations=7, seed=8, eval_episodes=30), every=5) as kept:
        loop.run(Config(task=task, iterations=7, seed=8, eval_episodes=30), checkpoints=kept)
    with Checkpoints(tmp_path / "kept", config, every=5, resume=True) as kept:
        resumed = loop.run(config, checkpoints=kept)
    assert resumed == alone
    flags = ["--task", task, "--iterations", 25, "--eval-episodes", 30, "--seeds", 70, "--output", "s"]
    assert command(sweep, *flags).code == 0
    row = pq.read_table(tmp_path / "s" / "runs").to_pylist()[8]
    assert (row["seed"], row["task"], row["logits_crc32"]) == (8, task, alone.logits_crc32)
    assert row["after_successes"] == alone.after.successes
    held_out = alone.after.splits.get("held-out")
    assert row["after_held_out_exact_success_rate"] == (held_out and held_out.exact_success_rate)


LAMP = """
import jaxrl_mini


class Lamp(jaxrl_mini.Task):
    actions, max_steps, header = ("on", "done"), 2, "Switch the lamp on."

    def reset(self, instance):
        self.lit, self.steps, self.done = False, 0, False
        return "dark"

    def step(self, action):
        self.steps += 1
        self.done = action == "done"
        self.lit |= action == "on" and self.chance((1, 3)) == 1
        return str(self.lit)

    ended = property(lambda self: self.done or self.steps == 2)
    state = view = property(lambda self: (self.lit, self.steps))
    submission = property(lambda self: self.lit if self.done else None)

    @staticmethod
    def verify(submission, instance):
        return float(submission)
"""


@pytest.fixture
def lamps(tmp_path):
    (tmp_path / "lamp.py").write_text(LAMP)
    return "lamp.py:Lamp"


def test_a_task_of_ones_own_is_recorded_with_its_digest_and_reproduced_by_who_names_it(lamps, command, tmp_path):
    flags = ["--task", lamps, "--iterations", 3, "--eval-episodes", 20, "--output", "r.json"]
    assert command(train, *flags).code == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["config"]["task"] == lamps and record["task"]["digest"] == load_task(lamps).digest
    assert record["before"]["exact_success_rate"] == pytest.approx(0.5 * 0.75 * 0.5, abs=1e-15)
    for more, code in ([], 2), (["--static"], 0), (["--task", lamps], 0):
        outcome = command(reproduce, "r.json", *more)
        assert outcome.code == code, outcome.err
    record["task"]["digest"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(record))
    outcome = command(reproduce, "other.json", "--task", lamps)
    assert outcome.code == 2 and len(outcome.err) == 1 and "with digest 000" in outcome.err[0]


def test_a_file_that_changed_is_another_task(lamps, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = load_task(lamps)
    assert load_task(lamps) is before
    (tmp_path / "lamp.py").write_text(LAMP.replace("(1, 3)", "(1, 1)"))
    assert load_task(lamps) != before and 0.25 not in load_task(lamps).chance and 0.5 in load_task(lamps).chance


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--task", "no-such"], "task 'no-such' is unknown"),
        (["--task", "guess:numbers=x"], "numbers=x"),
        (["--task", "a\nb"], "names no task"),
        (["--task", HIDDEN, "--reward", "public-test"], "--reward public-test is for task binary-search-repair alone"),
        (["--task", HIDDEN, "--backend", "hf", "--model", "m"], "--backend hf is for task"),
    ],
)
def test_what_is_not_there_for_a_task_is_refused(command, tmp_path, flags, message):
    outcome = command(train, *flags)
    assert outcome.code == 2 and len(outcome.err) == 1 and message in outcome.err[0]
    assert list(tmp_path.iterdir()) == []


def test_a_config_names_its_task_only_where_it_is_another():
    assert "task" not in Config().to_dict() and Config.from_dict(Config().to_dict()) == Config()
    other = Config(task=HIDDEN)
    assert other.to_dict()["task"] == HIDDEN and Config.from_dict(other.to_dict()) == other
    with pytest.raises(UserError, match="names no task"):
        Config(task="")


def test_a_person_plays_a_task(command, monkeypatch):
    for number, verdict in ((0, "success"), (1, "failure"), (2, "failure")):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"above_1\nnonsense\nsay_{1 + number}\n"))
        outcome = command(play_door, "--task", "guess:numbers=3", "--human", "--seed", 3)
        assert outcome.code == 0 and any("no action is called 'nonsense'" in line for line in outcome.out)
        assert outcome.out[-1].endswith(verdict)


@pytest.mark.parametrize("flags", [[], ["--human"], ["--task", HIDDEN], ["--task", HIDDEN, "--episodes", 3]], ids=str)
def test_without_a_policy_a_person_plays_a_task_that_is_named(command, flags):
    outcome = command(play_door, *flags)
    assert outcome.code == 2 and len(outcome.err) == 1
    assert outcome.err[0] == "error: the folder of a policy is missing: give it, or --task TASK --human"
