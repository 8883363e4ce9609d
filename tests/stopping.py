"""Runs that stop after each of their iterations and go on, and the comparison of two results to the bit."""

import json
import signal

import jax
import numpy as np
import pytest

from jaxrl_mini.learning import loop
from jaxrl_mini.learning.checkpoint import Checkpoints
from jaxrl_mini.machine.signals import Interrupted
from jaxrl_mini.runs import records


def kept_run(folder, config, *, run=loop.run, **options):
    """The result of a run with checkpoints, and its last state."""
    with Checkpoints(folder, config, resume=True, say=lambda _: None, **options) as checkpoints:
        checkpoints.restore, states = remembering(checkpoints.restore)
        result = run(config, checkpoints=checkpoints)
    with Checkpoints(folder, config, resume=True, say=pytest.fail) as checkpoints:
        return result, checkpoints.restore(*states).state


def remembering(restore):
    """A `restore`, and a list of the initial states that it is given."""
    states = []

    def restored(state):
        states.append(jax.tree.map(np.array, state))
        return restore(state)

    return restored, states


def stop_after_each_iteration(folder, config, *, first=0, run=loop.run):
    """Has all iterations from `first` on done, each by a run of its own, which goes on from the one before."""
    for done in range(first, config.iterations):
        options = {"every": 1, "resume": done > 0, "say": pytest.fail}
        with Checkpoints(folder, config, **options) as checkpoints, pytest.raises(Interrupted):
            checkpoints.offer = stopping(checkpoints)
            run(config, checkpoints=checkpoints)
        assert checkpoints.newest == done + 1


def stopping(checkpoints):
    """An `offer` before which a signal has come."""
    offer = checkpoints.offer

    def offered(iteration, snapshot):
        checkpoints._asked = signal.SIGINT
        offer(iteration, snapshot)

    return offered


def assert_same(one, other):
    """Results and states, to the bit; the record, too, but for its times."""
    (one, one_state), (other, other_state) = one, other
    for a, b in zip(jax.tree.leaves(one_state), jax.tree.leaves(other_state), strict=True):
        np.testing.assert_array_equal(a, b)
    for name in ("logits", "packed_episodes", "rewards", "behavior", "history"):
        jax.tree.map(np.testing.assert_array_equal, getattr(one, name), getattr(other, name))
    assert list(one.history) == list(other.history)
    assert (one.before, one.after) == (other.before, other.after)
    records_of = [{**records.build(result), "timing": None} for result in (one, other)]
    assert json.dumps(records_of[0]) == json.dumps(records_of[1])
