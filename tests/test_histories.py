"""Exact expectations over histories agree with what is known about tasks."""

import functools

import numpy as np
import pytest
import walk
from generated import Generated, given_any
from hypothesis import settings

from jaxrl_mini.exact.beliefs import count_histories
from jaxrl_mini.exact.expectations import expectations
from jaxrl_mini.policies.scenes import in_chunks, reading
from jaxrl_mini.tasks import histories as module
from jaxrl_mini.tasks.compiled import compile_task
from jaxrl_mini.tasks.histories import histories
from jaxrl_mini.tasks.repair import ACTIONS, BinarySearchRepair
from jaxrl_mini.tasks.segments import segments
from jaxrl_mini.tasks.specification import load_task, make_task

FINISH = ACTIONS.index("finish")
UNIFORM_SUCCESS, UNIFORM_ACTIONS = 0.06526491769547325, 3.9906121399176955
TASKS = ["repair:lines=2,steps=4,hidden=true", "repair:lines=2,steps=4", "guess:numbers=3", "deep-sea:size=4",
         "bandit:success=0.2/0.5/0.8"]  # fmt: skip


@pytest.fixture(scope="module")
def article():
    return histories(load_task("binary-search-repair"))


def uniform(found):
    return np.full((found.size, 6), -np.log(6.0))


def random_policy(found, actions, seed=0):
    scores = np.random.default_rng(seed).normal(size=(found.size, actions))
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def test_uniform_play_has_its_known_expectations(article):
    exact = expectations(article, uniform(article))
    assert article.size == 3906
    assert exact.success == pytest.approx(UNIFORM_SUCCESS, abs=1e-12)
    assert exact.mean_actions == pytest.approx(UNIFORM_ACTIONS, abs=1e-12)


def test_hopeless_histories_do_not_change_success(article):
    """Whatever the policy does there."""
    can_succeed = article.can_succeed([0])
    assert can_succeed.sum() == 1590
    log_probs = uniform(article)
    log_probs[~can_succeed] = np.random.default_rng(0).normal(size=6)
    exact = expectations(article, log_probs)
    assert exact.success == pytest.approx(UNIFORM_SUCCESS, abs=1e-12)
    assert exact.mean_actions != pytest.approx(UNIFORM_ACTIONS, abs=1e-3)


@pytest.mark.parametrize("task", ["binary-search-repair", "repair:lines=2,steps=4", "guess:numbers=3"])
def test_chunks_hold_every_wanted_history_and_none_before_its_parent(task):
    """And no page is written anew before what is kept there was read for the last time."""
    found = histories(load_task(task))
    laid = reading(found)
    for wanted in (np.ones(found.size, bool), found.can_succeed([0])):
        chunks = in_chunks(found, wanted, laid.waves, 32)
        assert set(chunks.ravel()) == set(np.nonzero(wanted & (found.step > 0))[0])
        assert (np.diff(found.step[chunks], axis=1) == 0).all()
        kept = {}
        for chunk in chunks.tolist():
            for one in set(chunk):
                for ancestor in found.ancestors[one][: found.step[one] - 1].tolist():
                    assert kept[laid.pages.page[ancestor]] == ancestor
            kept |= {laid.pages.page[one]: one for one in chunk if laid.pages.page[one] < laid.room}


def test_histories_of_episodes_are_found_by_their_number(article):
    pieces, rng = segments(load_task("binary-search-repair")), np.random.default_rng(0)
    for _ in range(20):
        task, shown, path = BinarySearchRepair(), np.full((5, 1), pieces.nothing), []
        for step in range(5):
            path.append(int(rng.integers(0, 5)))
            text = task.step(ACTIONS[path[-1]])
            (shown[step, 0],) = np.flatnonzero((pieces.actions == path[-1]) & (np.array(pieces.texts) == text))
        numbers = article.numbers(np.zeros(1, int), shown)[:, 0]
        assert article.step[numbers].tolist() == [0, 1, 2, 3, 4, 5]
        assert article.action[numbers[1:]].tolist() == path
        assert article.parent[numbers[1:]].tolist() == numbers[:-1].tolist()
        assert article.ancestors[numbers[5]].tolist() == numbers[1:5].tolist()


def test_expectations_are_those_of_all_episodes_played_out(article):
    """A random policy over histories, against a sum over every complete episode."""
    log_probs, reference = random_policy(article, 6), random_policy(article, 6, seed=1)
    exact = expectations(article, log_probs, reference=reference)
    kl = (np.exp(log_probs) * (log_probs - reference)).sum(axis=1)
    children = {(p, a): h for h, (p, a) in enumerate(zip(article.parent, article.action, strict=True)) if h}
    success = actions = divergence = total = 0.0
    open_episodes = [([0], BinarySearchRepair().artifact, 1.0)]
    while open_episodes:
        path, artifact, probability = open_episodes.pop()
        for action in range(6):
            p = probability * np.exp(log_probs[path[-1], action])
            task = BinarySearchRepair()
            task.artifact = artifact
            task.step(ACTIONS[action])
            if action == FINISH or len(path) == 6:
                total += p
                success += p * (action == FINISH and task.artifact.variant == 3)
                actions += p * len(path)
                divergence += p * kl[path].sum()
            else:
                open_episodes.append(([*path, children[path[-1], action]], task.artifact, p))
    assert total == pytest.approx(1.0)
    assert exact.success == pytest.approx(success, rel=1e-12)
    assert exact.mean_actions == pytest.approx(actions, rel=1e-12)
    assert exact.mean_kl == pytest.approx(divergence / actions, rel=1e-9)


# Any task, against a walk over the Python class


def policy_of_texts(task, found, log_probs):
    """(observations, actions) -> probabilities, by way of the texts alone."""
    pieces, numbers = segments(task), {}
    for history in range(found.size):
        if found.step[history]:
            seen = int(found.action[history]), pieces.texts[found.segment[history]]
            numbers[history] = (*numbers[int(found.parent[history])], seen)
        else:
            numbers[history] = (pieces.openings[found.opening[history]],)
    by_text = {texts: history for history, texts in numbers.items()}
    assert len(by_text) == found.size
    return lambda texts: np.exp(log_probs[by_text[texts]])


def check(make, task):
    found = histories(task)
    assert found.size == count_histories(task)
    log_probs = random_policy(found, len(task.actions))
    policy = policy_of_texts(task, found, log_probs)
    for split, members in make().splits.items():
        exact = expectations(found, log_probs, task.splits[split])
        walked = np.array([walk.success_and_actions_of_texts(make, instance, policy) for instance in members])
        np.testing.assert_allclose(exact.by_instance, walked[:, 0], atol=1e-12)
        assert exact.success == pytest.approx(walked[:, 0].mean(), abs=1e-12)
        assert exact.mean_actions == pytest.approx(walked[:, 1].mean(), abs=1e-12)
        changed = log_probs.copy()
        changed[~found.can_succeed(task.splits[split])] = 0.5
        assert expectations(found, changed, task.splits[split]).success == pytest.approx(exact.success, abs=1e-12)


@pytest.mark.parametrize("specification", TASKS)
def test_expectations_of_a_policy_over_texts_are_those_of_a_walk(specification):
    check(functools.partial(make_task, specification), load_task(specification))


@settings(max_examples=20, deadline=None)
@given_any
def test_expectations_on_any_small_task_are_those_of_a_walk(**parameters):
    check(functools.partial(Generated, **parameters), compile_task(Generated(**parameters), "generated"))


def test_too_many_histories_are_none(monkeypatch):
    task = load_task("guess:numbers=3")
    for name, limit in (("MAX_HISTORIES", 14), ("MAX_WAYS", 10)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, limit)
            assert histories.__wrapped__(task) is None
    assert histories.__wrapped__(task).size == 15
