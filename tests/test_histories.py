"""Exact expectations over histories agree with what is known about the task."""

import numpy as np
import pytest

from jaxrl_mini.exact.expectations import expectations
from jaxrl_mini.tasks.histories import enumerate_histories, in_chunks, numbers_of
from jaxrl_mini.tasks.repair import ACTIONS, BinarySearchRepair

FINISH = ACTIONS.index("finish")
ACCEPTED = np.array([0.0, 0.0, 0.0, 1.0])
UNIFORM_SUCCESS, UNIFORM_ACTIONS = 0.06526491769547325, 3.9906121399176955


def uniform(histories):
    return np.full((len(histories.step), 6), -np.log(6.0))


def test_uniform_play_has_its_known_expectations():
    histories = enumerate_histories()
    exact = expectations(histories, uniform(histories), ACCEPTED)
    assert len(histories.step) == 3906
    assert exact.success == pytest.approx(UNIFORM_SUCCESS, abs=1e-12)
    assert exact.mean_actions == pytest.approx(UNIFORM_ACTIONS, abs=1e-12)
    assert exact.visits.sum() == pytest.approx(1.0, abs=1e-12)


def test_hopeless_histories_do_not_change_success():
    """Whatever the policy does there."""
    histories = enumerate_histories()
    assert histories.can_succeed.sum() == 1590
    log_probs = uniform(histories)
    log_probs[~histories.can_succeed] = np.random.default_rng(0).normal(size=6)
    exact = expectations(histories, log_probs, ACCEPTED)
    assert exact.success == pytest.approx(UNIFORM_SUCCESS, abs=1e-12)
    assert exact.mean_actions != pytest.approx(UNIFORM_ACTIONS, abs=1e-3)


def test_chunks_hold_every_wanted_history_and_none_before_its_parent():
    histories = enumerate_histories()
    for wanted in (np.ones(3906, bool), histories.can_succeed):
        chunks = in_chunks(wanted, 32)
        assert set(chunks.ravel()) == set(np.nonzero(wanted)[0]) - {0}
        assert (np.diff(histories.step[chunks], axis=1) == 0).all() and (
            np.diff(histories.step[chunks[:, 0]]) >= 0
        ).all()


def test_histories_of_episodes_are_found_by_their_number():
    histories, rng = enumerate_histories(), np.random.default_rng(0)
    actions = rng.integers(0, 6, (6, 50))
    ended = np.cumsum(actions == FINISH, axis=0) - (actions == FINISH) > 0
    numbers = numbers_of(np.where(ended, -1, actions))
    for step, episode in np.argwhere(~ended):
        number = numbers[step, episode]
        path = [h for h in (*histories.ancestors[number], number) if h]
        assert [histories.action[h] for h in path] == actions[:step, episode].tolist()
    assert numbers.max() < 3906


def test_every_history_is_what_playing_its_actions_gives():
    histories = enumerate_histories()
    for history in range(1, len(histories.step), 7):
        task = BinarySearchRepair()
        for h in [*(a for a in histories.ancestors[history] if a), history]:
            task.step(ACTIONS[histories.action[h]])
        assert not task.ended
        assert task.steps == histories.step[history]
        assert task.artifact.variant == histories.variant[history]


def test_expectations_are_those_of_all_episodes_played_out():
    """A random policy over histories, against a sum over every complete episode."""
    histories = enumerate_histories()
    scores = np.random.default_rng(0).normal(size=(len(histories.step), 6))
    log_probs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    exact = expectations(histories, log_probs, ACCEPTED)
    quantity = np.random.default_rng(1).normal(size=len(histories.step))  # some figure of each history
    children = {(p, a): h for h, (p, a) in enumerate(zip(histories.parent, histories.action, strict=True)) if h}
    success = actions = mean_quantity = total = 0.0
    open_episodes = [([0], 1.0)]
    while open_episodes:
        path, probability = open_episodes.pop()
        for action in range(6):
            p = probability * np.exp(log_probs[path[-1], action])
            if action == FINISH or len(path) == 6:
                total += p
                success += p * (action == FINISH and histories.variant[path[-1]] == 3)
                actions += p * len(path)
                mean_quantity += p * quantity[path].mean()
            else:
                open_episodes.append(([*path, children[path[-1], action]], p))
    assert total == pytest.approx(1.0)
    assert exact.success == pytest.approx(success, rel=1e-12)
    assert exact.mean_actions == pytest.approx(actions, rel=1e-12)
    assert (exact.visits * quantity).sum() == pytest.approx(mean_quantity, rel=1e-9)
