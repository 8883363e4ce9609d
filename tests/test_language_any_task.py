"""A language model on any task: its scores, episodes, expectations and updates the plain way, and all its commands."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import walk
from generated import Generated
from plain_language import plain_log_probs
from stopping import assert_same, kept_run, stop_after_each_iteration

from jaxrl_mini import load_player, play, replay, report, reproduce, sweep, tiny_model, train
from jaxrl_mini.config import Config
from jaxrl_mini.exact import beliefs
from jaxrl_mini.learning import language_episodes, language_training
from jaxrl_mini.learning.language_training import Run
from jaxrl_mini.policies.language import check_limits, load_policy
from jaxrl_mini.policies.prompts import PromptError, candidate_texts, opening_texts, segment_texts
from jaxrl_mini.runs import recording, replaying
from jaxrl_mini.tasks import histories as of_histories
from jaxrl_mini.tasks.histories import histories
from jaxrl_mini.tasks.specification import load_task, register

pytestmark = pytest.mark.usefixtures("quick_to_compile")

TASK = "generated-for-language"
"""Three instances, draws of chance and hidden states; instances begin with one of two observations."""
make = functools.partial(Generated, seed=4, actions=3, steps=3, places=4, instances=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    register(TASK, make)
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.make_tiny_model(path, layers=1, width=16, task=TASK)
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    return load_policy(folder, task=load_task(TASK))


def prompt_of(task, texts):
    """What a model is shown that has seen and done this."""
    first, *rest = texts
    steps = (f" {task.actions[number]}\n{seen}\nAction:" for number, seen in rest)
    return f"{make().header}\n{first}\nAction:" + "".join(steps)


@pytest.fixture(scope="module")
def scored(loaded):
    """(observation, (action, observation), ...) -> log-probabilities, every prompt in a row of its own."""
    policy, checkpoint = loaded
    task = policy.task.task
    texts = sorted({texts for instance in make().splits["train"] for texts in _open(make(), instance)}, key=str)
    prompts = [prompt_of(task, one) for one in texts]
    log_probs = plain_log_probs(checkpoint, checkpoint.params, prompts, candidate_texts(task))
    return dict(zip(texts, np.asarray(log_probs), strict=True))


def _open(task, instance):
    """Every text after which an episode of an instance is open."""

    def go_on(task, texts):
        yield texts
        for number, action in enumerate(task.actions):
            for _, after, text in walk.alternatives(task, "step", action):
                if not after.ended:
                    yield from go_on(after, (*texts, (number, text)))

    for _, after, text in walk.alternatives(task, "reset", instance):
        yield from go_on(after, (text,))


def test_histories_score_like_texts(loaded, scored):
    policy, checkpoint = loaded
    task, found = policy.task.task, histories(policy.task.task)
    log_probs = language_training.history_log_probs(policy, checkpoint.params)
    assert found.size == len(scored) > 30 and len(policy.task.openings) == 2
    openings, appended, by_prompt = opening_texts(task), segment_texts(task), {}
    for history in range(found.size):
        path = [*found.ancestors[history][: found.step[history] - 1], history][: found.step[history]]
        text = openings[found.opening[history]] + "".join(appended[found.segment[one]] for one in path)
        by_prompt[text] = log_probs[history]
    for texts, wanted in scored.items():
        np.testing.assert_allclose(by_prompt[prompt_of(task, texts)], wanted, atol=1e-5)
    longest, candidates = (checkpoint.encode(texts) for texts in (list(by_prompt), candidate_texts(task)))
    assert policy.task.longest == max(map(len, longest)) + max(map(len, candidates))


def test_a_network_needs_positions_for_the_longest_prompt_and_no_more(loaded):
    policy, checkpoint = loaded
    longest = policy.task.longest
    check_limits(0, longest, dataclasses.replace(checkpoint.config, n_positions=longest))
    with pytest.raises(PromptError, match=f"has {longest} tokens, but the model's n_positions is {longest - 1}"):
        check_limits(0, longest, dataclasses.replace(checkpoint.config, n_positions=longest - 1))


def test_exact_figures_are_those_of_a_walk_and_sampled_ones_lie_about_them(loaded, folder, scored):
    config = Config(backend="hf", model=str(folder), task=TASK, eval_episodes=2048)
    evaluated = Run(config, loaded=loaded).evaluate()
    policy_of_texts = {texts: np.exp(log_probs) for texts, log_probs in scored.items()}.__getitem__
    for split, members in make().splits.items():
        figures = evaluated if split == "train" else evaluated.splits[split]
        walked = np.array([walk.success_and_actions_of_texts(make, one, policy_of_texts) for one in members])
        assert figures.exact_success_rate == pytest.approx(walked[:, 0].mean(), abs=1e-5)
        assert figures.exact_mean_actions == pytest.approx(walked[:, 1].mean(), abs=1e-5)
        rate = figures.exact_success_rate
        assert abs(figures.successes / 2048 - rate) < 4 * (rate * (1 - rate) / 2048) ** 0.5
    assert evaluated.exact_mean_kl == 0.0 and len(evaluated.by_instance) == 3


def test_one_step_is_that_of_a_plain_loop_over_texts(loaded, folder):
    """Loss, mean KL and gradient norm, from the prompts of a batch as whole texts."""
    policy, checkpoint = loaded
    config = Config(backend="hf", model=str(folder), task=TASK, groups=4, group_size=8, epochs=1, lr=1e-3)
    run, task = Run(config, loaded=loaded), policy.task.task
    noise = np.random.default_rng(0)
    moved = jax.tree.map(lambda leaf: leaf + 0.02 * noise.normal(size=leaf.shape).astype(np.float32), checkpoint.params)
    run.state = run.state._replace(params=jax.tree.map(jnp.copy, moved))
    episodes, behavior = language_episodes.sample(policy, moved, run.seed, 0, groups=4, group_size=8)
    rewards = run.grade(episodes)
    assert len({*rewards.sum(axis=1)}) > 1
    metrics = run.learn(episodes, rewards, behavior)

    actions, shown = language_episodes.taken(episodes, 3), episodes.shown.reshape(32, -1)
    openings, segments = opening_texts(task), segment_texts(task)
    places = [(e, t) for e, t in itertools.product(range(32), range(3)) if actions[t, e] >= 0]
    prompts = [openings[shown[e, 0]] + "".join(segments[one] for one in shown[e, 1 : t + 1]) for e, t in places]
    spread = rewards.std(axis=1, keepdims=True)
    advantages = np.where(
        spread > 0, (rewards - rewards.mean(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1), 0
    )
    of_place = [(actions[t, e], advantages.ravel()[e], (actions[:, e] >= 0).sum()) for e, t in places]
    chosen, advantage, length = (np.array(column) for column in zip(*of_place, strict=True))
    score = functools.partial(plain_log_probs, checkpoint, prompts=prompts, candidates=candidate_texts(task))
    before, reference = score(moved), score(checkpoint.params)
    np.testing.assert_allclose([np.asarray(behavior)[t, e] for e, t in places], before, atol=1e-5)

    def loss(params):
        log_probs, rows = score(params), np.arange(len(places))
        ratio = jnp.exp(log_probs[rows, chosen] - before[rows, chosen])
        kl = (jnp.exp(log_probs) * (log_probs - reference)).sum(axis=1)
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - config.clip, 1 + config.clip) * advantage)
        return ((config.beta * kl - surrogate) / length / 32).sum(), kl.mean()

    (value, kl), gradient = jax.value_and_grad(loss, has_aux=True)(moved)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
    assert metrics["loss"][0] == pytest.approx(float(value), abs=1e-5)
    assert metrics["mean_kl"][0] == pytest.approx(float(kl), rel=1e-3)
    assert metrics["gradient_norm"][0] == pytest.approx(norm, rel=1e-3)
    # Adam's first step keeps a tenth of the gradient, which is clipped to norm 1.
    kept = jax.tree.map(lambda leaf: leaf * min(1.0, 1 / norm) / 10, gradient)
    for ours, plain in zip(jax.tree.leaves(run.state.moments.first), jax.tree.leaves(kept), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-6)


def test_where_histories_are_too_many_nothing_is_exact_and_training_is_the_same(loaded, folder, monkeypatch):
    config = Config(backend="hf", model=str(folder), task=TASK, groups=2, group_size=4, eval_episodes=8, lr=1e-3)
    config = dataclasses.replace(config, iterations=2)
    exact = language_training.run(config, loaded=loaded)
    monkeypatch.setattr(language_training, "histories", lambda task: None)
    sampled = language_training.run(config, loaded=loaded)
    assert sampled.after.exact_success_rate is None and sampled.after.successes == exact.after.successes
    for name in ("loss", "mean_kl", "gradient_norm"):
        np.testing.assert_allclose(sampled.history[name], exact.history[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "too-many-histories"])
def test_a_run_that_stops_and_goes_on_is_one_that_never_stops(tmp_path, loaded, folder, monkeypatch, exact):
    if not exact:
        monkeypatch.setattr(language_training, "histories", lambda task: None)
    config = Config(backend="hf", model=str(folder), task=TASK, groups=2, group_size=4, eval_episodes=8, lr=1e-3)
    short, config = (dataclasses.replace(config, iterations=n) for n in (1, 2))
    run = functools.partial(language_training.run, loaded=loaded)
    stop_after_each_iteration(tmp_path / "stopping", short, run=run)
    stop_after_each_iteration(tmp_path / "stopping", config, first=1, run=run)
    stopping, never = (kept_run(tmp_path / name, config, run=run) for name in ("stopping", "never"))
    assert_same(stopping, never)
    assert (stopping[0].before.exact_success_rate is not None) == exact
    assert not exact or len(stopping[0].before.by_instance) == 3


def test_too_many_histories_are_said_first_and_the_exact_figures_are_null(command, tmp_path, monkeypatch):
    for module in (of_histories, beliefs):
        monkeypatch.setattr(module, "MAX_HISTORIES", 20)
    task = "generated-with-many-histories"
    register(task, functools.partial(make, seed=5))
    line = f"task {task} has 37 histories: expected at most 20"
    assert command(tiny_model, "m", "--layers", 1, "--width", 16, "--task", task).code == 0
    model = ("--task", task, "--backend", "hf", "--model", "m", "--iterations", 1, "--eval-episodes", 4)
    model = (*model, "--groups", 2, "--group-size", 2)
    outcome = command(train, *model, "--output", "r.json", "--save-policy", "p")
    assert outcome.code == 0 and f"{line}, so the exact figures are null" in outcome.err
    record = json.loads((tmp_path / "r.json").read_text())
    figures = ("exact_success_rate", "exact_mean_actions", "exact_mean_kl")
    for each in (record["before"], record["after"], record["after"]["splits"]["held-out"]):
        assert [each[name] for name in figures] == [None] * 3 and "exact_pass_at" not in each
    assert command(reproduce, "r.json", "--static").code == 0
    outcome = command(play, "p", "--episodes", 4)
    assert outcome.code == 0 and f"{line}, so the exact figures are null" in outcome.err
    assert command(report, "r.json", "--output", "r.html").code == 0
    outcome = command(sweep, *model, "--seeds", "7:9", "--output", "s")
    assert outcome == (2, [], [f"error: {line} for the exact figures that a sweep compares"])
    assert not (tmp_path / "s").exists()


def test_every_command_works_with_a_language_model_on_another_task(command, tmp_path):
    task = ("--task", "repair:lines=2,steps=3")
    outcome = command(tiny_model, "m", "--layers", 1, "--width", 16, *task)
    assert outcome.code == 0, outcome.err
    model = (*task, "--backend", "hf", "--model", "m", "--lr", "1e-3", "--iterations", 2, "--eval-episodes", 8)
    model = (*model, "--groups", 2, "--group-size", 4)
    words = ("--output", "r.json", "--trajectories", "r.npz", "--save-policy", "p", "--checkpoint", "c")
    assert command(train, *model, *words).code == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["task"]["digest"] == load_task(task[1]).digest and "held-out" in record["after"]["splits"]
    for module, flags in (
        (replay, ("r.npz",)),
        (reproduce, ("r.json", "--static")),
        (play, ("p", "--episodes", 8)),
        (report, ("r.json", "r.npz", "--output", "r.html")),
        (sweep, (*model, "--task", task[1], "repair:lines=2,steps=2", "--seeds", "7:8", "--output", "s")),
    ):
        outcome = command(module, *flags)
        assert outcome.code == 0, (module, outcome.err)
    again = load_player("p").evaluate(8, seed=7)
    assert again.exact_success_rate == pytest.approx(record["after"]["exact_success_rate"], abs=1e-6)


def test_a_recording_of_a_language_model_says_what_it_saw(command, folder, tmp_path):
    words = ("--task", TASK, "--backend", "hf", "--model", folder, "--lr", "1e-3", "--iterations", 2, "--groups", 2)
    words = (*words, "--group-size", 4, "--eval-episodes", 8, "--output", "r.json", "--trajectories", "r.npz")
    assert command(train, *words).code == 0
    recorded = recording.read("r.npz")
    assert all(error < 1e-6 for error in replaying.replay_errors(recorded).values())
    with np.load("r.npz", allow_pickle=False) as file:
        arrays = dict(file)
    nothing = arrays["shown"].max()
    for place, text in (((0, 0, 0, 0), nothing), ((1, 1, 3, 1), (arrays["shown"][1, 1, 3, 1] + 1) % (nothing + 1))):
        changed = {**arrays, "shown": arrays["shown"].copy()}
        changed["shown"][place] = text
        np.savez(tmp_path / "changed.npz", allow_pickle=False, **changed)
        outcome = command(replay, "changed.npz")
        assert outcome.code == 2 and f"does not go so at {[*place]}" in outcome.err[0]
