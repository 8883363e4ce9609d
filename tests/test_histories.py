"""Exact expectations over histories agree with what is known about the task."""

import numpy as np
import pytest

from jaxrl_mini.histories import enumerate_histories, expectations
from jaxrl_mini.task import ACTIONS, BinarySearchRepair

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


def test_leaving_out_hopeless_histories_does_not_change_success():
    pruned = enumerate_histories(can_succeed=True)
    assert len(pruned.step) == 1590
    assert expectations(pruned, uniform(pruned), ACCEPTED).success == pytest.approx(UNIFORM_SUCCESS, abs=1e-12)


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
