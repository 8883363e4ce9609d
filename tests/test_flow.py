"""How probability flows: against playing every episode by hand, and against the exact evaluation."""

from copy import copy
from itertools import pairwise

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxrl_mini.exact import flow, success
from jaxrl_mini.tasks.repair import ACTIONS, MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS, BinarySearchRepair

REPAIRED = np.array([0.0, 0.0, 0.0, 1.0])


def random_logits(*batch: int) -> np.ndarray:
    return np.random.default_rng(3).normal(scale=2.0, size=(*batch, MAX_STEPS * NUM_VARIANTS, NUM_ACTIONS))


def every_episode(probs, task=None, actions=(), variants=(), weight=1.0):
    """All episodes of the task as a person plays it: actions, the artifacts between them, probability, submission."""
    task = task or BinarySearchRepair()
    variants = *variants, task.artifact.variant
    for action, name in enumerate(ACTIONS):
        after = copy(task)
        after.step(name)
        more = weight * probs[4 * task.steps + task.artifact.variant, action]
        if after.ended:
            yield (*actions, action), (*variants, after.artifact.variant), more, after.submitted
        else:
            yield from every_episode(probs, after, (*actions, action), variants, more)


@pytest.fixture(scope="module")
def probs():
    return flow.softmax(random_logits())


@pytest.fixture(scope="module")
def episodes(probs):
    return list(every_episode(probs))


def test_the_flow_is_what_playing_every_episode_gives(probs, episodes):
    visits, moves, submissions = (np.zeros((MAX_STEPS, NUM_VARIANTS, *more)) for more in ((), (NUM_VARIANTS,), ()))
    for actions, variants, weight, submitted in episodes:
        for step, (before, after) in enumerate(pairwise(variants)):
            visits[step, before] += weight
            if submitted and step == len(actions) - 1:
                submissions[step, before] += weight
            else:
                moves[step, before, after] += weight
    found = flow.flow(probs)
    np.testing.assert_allclose(found.visits, visits, atol=1e-12)
    np.testing.assert_allclose(found.moves, moves, atol=1e-12)
    np.testing.assert_allclose(found.submissions, submissions, atol=1e-12)
    seen = {tuple(move) for move in np.argwhere(moves > 0)}
    assert seen == {(step, *move) for step, *move in flow.MOVES if step > 1 or visits[step, move[0]] > 0}


def test_the_likeliest_episode_is_the_maximum_over_all(probs, episodes):
    actions, _, weight, _ = max(episodes, key=lambda episode: episode[2])
    found = flow.likeliest(probs)
    assert found.actions == actions and found.probability == pytest.approx(weight, rel=1e-12)


def test_a_policy_that_reads_fixes_and_finishes_is_its_own_likeliest_episode():
    logits = np.zeros((24, 6))
    for step, (variant, action) in enumerate(((0, 0), (0, 1), (2, 2), (3, 5))):
        logits[4 * step + variant, action] = 100.0
    assert flow.likeliest(flow.softmax(logits)) == (pytest.approx(1.0), (0, 1, 2, 5))


def test_the_flow_adds_up_to_the_exact_evaluation():
    logits = random_logits(5)
    found = flow.flow(flow.softmax(logits))
    exact = success.exact(log_softmax(np.moveaxis(logits, 0, -1), axis=1), REPAIRED)
    np.testing.assert_allclose(found.visits.sum(axis=(1, 2)), exact.mean_actions, atol=1e-12)
    np.testing.assert_allclose((found.submissions * REPAIRED).sum(axis=(1, 2)), exact.success_rate, atol=1e-12)
    ends = found.submissions.sum(axis=(1, 2)) + found.moves[:, -1].sum(axis=(1, 2))
    np.testing.assert_allclose(ends, 1.0, atol=1e-12)


def test_uniform_play_has_the_known_figures():
    found = flow.flow(np.full((24, 6), 1 / 6))
    assert found.visits.sum() == pytest.approx(3.9906121399176955, abs=1e-14)
    assert found.submissions[:, 3].sum() == pytest.approx(0.06526491769547325, abs=1e-15)


def test_frames_hold_thousandths_in_the_order_of_the_layout():
    logits = random_logits(3)
    frames = flow.frames(logits, REPAIRED, 10)
    assert frames.iterations.tolist() == [0, 1, 2] and frames.values.shape == (3, sum(flow.LAYOUT.values()))
    pieces = dict(zip(flow.LAYOUT, np.split(frames.values[2], np.cumsum(list(flow.LAYOUT.values()))[:-1]), strict=True))
    probs = flow.softmax(logits[2])
    through = flow.flow(probs)
    expected = {
        "visits": through.visits,
        "policy": probs,
        "moves": [through.moves[move] for move in flow.MOVES],
        "submissions": through.submissions,
        "out_of_steps": through.moves[5].sum(axis=0),
        "submitted": through.submissions.sum(),
        "success": through.submissions[:, 3].sum(),
    }
    for name, values in expected.items():
        assert np.abs(pieces[name] / 1000 - np.ravel(values)).max() <= 0.0005 + 1e-12, name
    assert frames.likeliest[2] == flow.likeliest(probs)


@pytest.mark.parametrize("count", [1, 2, 5, 99, 100, 101, 1000])
def test_thinning_keeps_the_first_and_the_last(count):
    kept = flow.evenly(count, 100)
    assert kept[0] == 0 and kept[-1] == count - 1 and len(kept) == min(count, 100)
    assert np.ptp(np.diff(kept)) <= 1 if len(kept) > 1 else True
