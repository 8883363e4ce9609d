"""Training a language model: the batch's sums against a plain loop over its actions, and what a run leaves behind."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from plain_language import plain_log_probs, prompt_after
from stopping import assert_same, kept_run, stop_after_each_iteration

from jaxrl_mini import load_player, objective, sweep
from jaxrl_mini.config import Config, UserError
from jaxrl_mini.episodes import rollout
from jaxrl_mini.learning import language_episodes, language_training, training
from jaxrl_mini.learning.checkpoint import Checkpoints
from jaxrl_mini.learning.language_training import MICRO_BATCH, Run
from jaxrl_mini.learning.training import Sizes
from jaxrl_mini.policies.language import load_policy
from jaxrl_mini.runs import records
from jaxrl_mini.tasks.histories import histories
from jaxrl_mini.tasks.repair import NUM_ACTIONS
from jaxrl_mini.types import Settings

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SIZES = Sizes("grpo", groups=2, group_size=4, epochs=1)  # those of `tiny`: a program is compiled once
SETTINGS = Settings(*(jnp.float32(value) for value in (1e-3, 0.2, 0.02)))


@pytest.fixture(scope="module")
def word(tiny_folder):
    return load_policy(tiny_folder)


def iterate(word, params, verdicts, *, sizes=SIZES, settings=SETTINGS, micro_batch=MICRO_BATCH, number=0):
    policy, checkpoint = word
    drawn = {"groups": sizes.groups, "group_size": sizes.group_size}
    episodes, behavior = language_episodes.sample(policy, params, np.array(7, np.uint32), number, **drawn)
    actions = language_episodes.taken(episodes, NUM_ACTIONS)
    packed = rollout.episodes_from_actions(actions.reshape(6, *episodes.shape))
    rewards = np.asarray(rollout.grade(packed, verdicts))
    merged = objective.merge([actions], -(-rewards.size // micro_batch) * micro_batch)
    prompts = episodes.played.prompts
    return language_training.learn(
        policy,
        training.initial_state(jax.tree.map(jnp.copy, params)),
        language_training.Reference(language_training.history_log_probs(policy, checkpoint.params), None),
        histories(policy.task.task).numbers(prompts.openings, prompts.segments)[:, merged.first],
        merged,
        episodes,
        rewards,
        behavior,
        settings,
        sizes=sizes,
        micro_batch=micro_batch,
    )


def plain_step(checkpoint, params, episodes, rewards, settings, behavior_params):
    """Loss, mean KL and gradient norm by a loop over actions: mean over an episode's actions, then over episodes."""
    actions = np.asarray(episodes.actions).reshape(6, -1)
    spread = rewards.std(axis=1, keepdims=True)
    safe = np.where(spread > 0, spread, 1)
    advantages = np.where(spread > 0, (rewards - rewards.mean(axis=1, keepdims=True)) / safe, 0).ravel()
    places = [tuple(place) for place in np.argwhere(actions.T >= 0)]  # (episode, step)
    prompts = [prompt_after(actions[:step, episode]) for episode, step in places]
    lengths = (actions >= 0).sum(axis=0)
    behavior, reference = (plain_log_probs(checkpoint, p, prompts) for p in (behavior_params, checkpoint.params))

    def term(action, advantage, length, log_probs, behavior, reference):
        ratio = jnp.exp(log_probs[action] - behavior[action])
        clipped = jnp.clip(ratio, 1 - settings.clip, 1 + settings.clip)
        kl = jnp.sum(jnp.exp(log_probs) * (log_probs - reference))
        surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
        return (settings.beta * kl - surrogate) / length / actions.shape[1], kl

    taken = tuple(np.array([(actions[t, e], advantages[e], lengths[e]) for e, t in places], np.float32).T)

    def terms(params):
        log_probs = plain_log_probs(checkpoint, params, prompts)
        each = taken[0].astype(int), *taken[1:], log_probs, behavior, reference
        losses, kls = jax.lax.map(lambda row: term(*row), each)
        return losses.sum(), kls.mean()

    (loss, kl), gradient = jax.jit(jax.value_and_grad(terms, has_aux=True))(params)
    return loss, kl, jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))


def submitted(variants):
    """Verdicts under which some easy artifacts are accepted, so that a random policy has mixed groups."""
    return np.isin(np.arange(4), variants) & np.ones((2, 1), bool)


def test_one_step_is_that_of_a_plain_loop_over_actions(word):
    _, checkpoint = word
    noise = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: leaf + 0.02 * noise.normal(size=leaf.shape).astype(np.float32), checkpoint.params
    )
    verdicts = submitted([0, 1])
    _, log, reference = iterate(word, params, verdicts)
    choices = np.asarray(log.episodes.choices)
    episodes = rollout.episodes_from_actions(np.where(choices >= 0, choices % NUM_ACTIONS, -1))
    rewards = np.asarray(rollout.grade(episodes, verdicts))
    assert 0 < rewards[0].sum() < 4
    loss, kl, norm = plain_step(checkpoint, params, episodes, rewards, SETTINGS, params)
    measured = objective.measure(log.log_probs, log.behavior, reference, log.credit, SETTINGS, "grpo")
    np.testing.assert_allclose(measured["loss"], loss, atol=1e-5)
    np.testing.assert_allclose(measured["mean_kl"], kl, rtol=1e-3)
    np.testing.assert_allclose(log.gradient_norm, norm, rtol=1e-3)
    assert measured["ratio_outside_clip_fraction"] == 0


def test_the_micro_batch_changes_memory_not_the_update(word):
    _, checkpoint = word
    verdicts = submitted([0, 1])
    (four, first, _), (three, second, _) = (
        iterate(word, checkpoint.params, verdicts, micro_batch=size) for size in (MICRO_BATCH, 3)
    )
    np.testing.assert_allclose(first.gradient_norm, second.gradient_norm, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(four.moments.first), jax.tree.leaves(three.moments.first), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_repeated_episodes_are_scored_once_and_count_as_often_as_they_were_played():
    actions = np.array([[5, 0, 5, 5], [-1, 5, -1, -1]] + [[-1] * 4] * 4)  # three finish at once, one reads first
    rewards = jnp.array([[1.0, 0.0, 0.0, 1.0]])
    advantages = objective.advantages(rewards, method="grpo")
    rows = objective.merge([actions], 6)
    _, credit = objective.history_credit(rows, jnp.asarray(actions), rewards, advantages, actions=6)
    assert rows.filled == 2
    counts = credit.counts.reshape(6, 6, NUM_ACTIONS)
    assert counts.sum() == 5
    finishing = int(np.argmax(np.asarray(counts[:, 0, 5])))
    assert counts[finishing, 0, 5] == 3
    np.testing.assert_allclose(credit.plus.reshape(6, 6, 6)[finishing, 0, 5], 2 * 1.0 / 4)
    np.testing.assert_allclose(credit.minus.reshape(6, 6, 6)[finishing, 0, 5], -1.0 / 4)
    np.testing.assert_allclose(credit.visits.sum(), 1.0, rtol=1e-6)
    assert float(jnp.abs(credit.plus[rows.filled * 6 :]).sum()) == 0


def test_a_batch_without_success_leaves_rs_sft_as_it_was_to_the_bit(word):
    _, checkpoint = word
    sizes = SIZES._replace(method="rs-sft")
    state, log, _ = iterate(word, checkpoint.params, submitted([]), sizes=sizes)
    assert not log.credit.plus.any() and log.gradient_norm == 0
    for before, after in zip(jax.tree.leaves(checkpoint.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(before, after)
    assert all(not leaf.any() for leaf in jax.tree.leaves(state.moments))
    moved, log, _ = iterate(word, checkpoint.params, submitted([0, 1, 2, 3]), sizes=sizes)
    assert log.credit.plus.any() and log.gradient_norm > 0
    assert any(
        (a != b).any() for a, b in zip(jax.tree.leaves(moved.params), jax.tree.leaves(state.params), strict=True)
    )


def tiny(folder, **changes):
    settings = {"backend": "hf", "model": str(folder), "lr": 3e-3, "groups": 2, "group_size": 4, "epochs": 1}
    return Config(**settings | {"iterations": 3, "eval_episodes": 40} | changes)


@pytest.fixture(scope="module")
def finished(word, tiny_folder):
    return language_training.run(tiny(tiny_folder, exact_every=1), loaded=word)


def test_exact_evaluation_on_the_way_does_not_change_training(word, tiny_folder, finished):
    other = language_training.run(tiny(tiny_folder, exact_every=2), loaded=word)
    for name in ("loss", "mean_kl", "entropy", "gradient_norm", "train_success_rate"):
        np.testing.assert_array_equal(other.history[name], finished.history[name])
    np.testing.assert_array_equal(other.packed_episodes, finished.packed_episodes)
    assert np.isnan(other.history["exact_success_rate"]).tolist() == [True, False, False]
    assert not np.isnan(finished.history["exact_success_rate"]).any()
    assert other.after == finished.after


def test_a_sweep_holds_the_runs_of_its_seeds(tiny_folder, finished, command, tmp_path):
    flags = ["--backend", "hf", "--model", tiny_folder, "--groups", 2, "--group-size", 4, "--epochs", 1, "--lr", 3e-3]
    flags += ["--iterations", 3, "--eval-episodes", 40, "--exact-every", 1, "--history-every", 1]
    outcome = command(sweep, *flags, "--seeds", 7, 8, "--output", "both")
    assert outcome.code == 0, outcome.err
    runs, history = (pq.read_table(tmp_path / "both" / table).to_pylist() for table in ("runs", "history"))
    seven, eight = sorted(runs, key=lambda row: row["seed"])
    assert seven["after_exact_success_rate"] == finished.after.exact_success_rate
    assert seven["last_loss"] == finished.history["loss"][-1] and seven["finite"]
    assert eight["logits_crc32"] != seven["logits_crc32"] == finished.logits_crc32
    mine = [row["exact_success_rate"] for row in history if row["seed"] == 7]
    assert mine == finished.history["exact_success_rate"].tolist()


def test_exact_figures_agree_with_each_other(finished):
    """The last iteration's, over the histories that can succeed, and the final ones, over all."""
    assert finished.history["exact_success_rate"][-1] == pytest.approx(finished.after.exact_success_rate, abs=1e-6)
    assert finished.before.exact_mean_kl == 0.0
    assert finished.after.exact_mean_kl > 0.0


def test_the_reference_policy_stays_what_it_was(word, tiny_folder, finished):
    _, checkpoint = word
    pairs = list(zip(jax.tree.leaves(finished.checkpoint.params), jax.tree.leaves(checkpoint.params), strict=True))
    assert any((a != b).any() for a, b in pairs)
    Run(tiny(tiny_folder), loaded=word).advance()
    for a, b in zip(
        jax.tree.leaves(checkpoint.params), jax.tree.leaves(load_policy(tiny_folder)[1].params), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_command_trains_records_and_saves_a_model_that_loads(word, tiny_folder, train_command, tmp_path):
    flags = ["--backend", "hf", "--model", tiny_folder, "--groups", 2, "--group-size", 4, "--epochs", 1, "--lr", 3e-3]
    flags += ["--iterations", 3, "--eval-episodes", 40, "--output", "run.json", "--save-policy", "policy"]
    outcome = train_command(*flags)
    assert outcome.code == 0, outcome.err
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["config"]["model"].endswith("tiny")
    assert record["after"]["exact_success_rate"] != record["before"]["exact_success_rate"]
    run = Run(tiny(tmp_path / "policy"))
    assert run.exact_success_rate() == pytest.approx(record["after"]["exact_success_rate"], abs=1e-5)
    assert run.checkpoint().config == word[1].config
    played = records.finite(records.summary(load_player("policy").evaluate(40, seed=7)))
    assert played | {"exact_mean_kl": record["after"]["exact_mean_kl"]} == record["after"]
    again = train_command(*flags, "--seed", 8, "--output", "another.json")
    assert again.code == 2 and "not empty" in again.err[-1]


@pytest.mark.parametrize("method", ["grpo", pytest.param("rs-sft", marks=pytest.mark.full)])
def test_a_run_that_stops_at_each_of_its_iterations_is_one_that_never_stops(tmp_path, word, tiny_folder, method):
    """To the bit, also where a last iteration, which is evaluated exactly, is the last no longer."""
    short, config = (tiny(tiny_folder, method=method, iterations=n, eval_episodes=20, exact_every=2) for n in (1, 4))
    run = partial(language_training.run, loaded=word)
    stop_after_each_iteration(tmp_path / "stopping", short, run=run)
    stop_after_each_iteration(tmp_path / "stopping", config, first=1, run=run)
    stopping, never = (kept_run(tmp_path / name, config, run=run) for name in ("stopping", "never"))
    assert_same(stopping, never)
    for one, other in zip(*(jax.tree.leaves(result.checkpoint.params) for result, _ in (stopping, never)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isnan(stopping[0].history["exact_success_rate"]).tolist() == [True, False] * 2
    other = jax.tree.map(lambda leaf: leaf + 1, never[1])
    with (
        Checkpoints(tmp_path / "never", config, resume=True) as checkpoints,
        pytest.raises(UserError, match=r"began with other parameters than .*tiny"),
    ):
        checkpoints.restore(other)


def test_settings_of_a_language_model_have_no_use_with_a_table():
    for name, value in {"model": "x", "dtype": "bfloat16", "micro_batch": 2, "exact_every": 3}.items():
        with pytest.raises(UserError, match="no use with backend table"):
            Config(**{name: value})


def test_what_cannot_be_loaded_is_refused_in_one_line(train_command, tmp_path):
    outcome = train_command("--backend", "hf", "--model", tmp_path / "nothing")
    assert outcome.code == 2 and len(outcome.err) == 1 and "is not a folder" in outcome.err[0]
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
