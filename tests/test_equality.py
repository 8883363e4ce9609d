"""What holds arrays is equal to what holds the same, and different from what does not."""

import dataclasses

import numpy as np
import pytest

from jaxrl_mini.config import Config
from jaxrl_mini.learning import loop
from jaxrl_mini.learning.checkpoint import Snapshot
from jaxrl_mini.learning.evaluation import Evaluation, Evaluations
from jaxrl_mini.pages import figures
from jaxrl_mini.pages.sources import Source
from jaxrl_mini.policies.pretrained import load_checkpoint
from jaxrl_mini.runs import records
from jaxrl_mini.runs.recording import Recording
from jaxrl_mini.types import Exact

CONFIG = Config(iterations=2, eval_episodes=1)


def evaluations(successes):
    column = np.array([successes, 2])
    return Evaluations(3, column, column, column, Exact(column / 3, column / 2))


def snapshot(weight):
    before = Evaluation(3, 1, 9, 30, 0.06, 4.0)
    return Snapshot([np.ones(3), weight], {"iteration": np.arange(2)}, {"packed": np.ones(2)}, before, (1.0, 2.0))


def source(loss):
    record = records.build(loop.run(CONFIG))
    record["history"][0]["loss"] = loss
    return Source("r.json", [figures.curves_of_record(record, "r.json")], ("binary-search-repair",), CONFIG)


PAIRS = {
    "evaluations": (evaluations, 0, 1),
    "snapshot": (snapshot, np.zeros(2), np.ones(2)),
    "recording": (lambda reward: Recording(CONFIG, {"rewards": np.full(3, reward)}), 0.0, 1.0),
    "source": (source, 0.25, 0.5),
    "NaN": (lambda value: Recording(CONFIG, {"rewards": np.array([value, np.nan])}), 0.0, 1.0),
    "types": (lambda kind: Recording(CONFIG, {"rewards": np.zeros(3, kind)}), "f4", "f8"),
    "shapes": (lambda shape: Recording(CONFIG, {"rewards": np.zeros(shape)}), (3,), (1, 3)),
    "names": (lambda name: Recording(CONFIG, {name: np.zeros(3)}), "a", "b"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equality_is_that_of_content(name):
    make, one, other = PAIRS[name]
    assert (make(one) == make(one)) is True and (make(one) != make(one)) is False
    assert (make(one) == make(other)) is False and (make(one) != make(other)) is True
    assert (make(one) == 3) is False


def test_two_runs_of_a_config_are_equal_whatever_time_they_took():
    one, other = loop.run(CONFIG), loop.run(CONFIG)
    assert one.timing != other.timing and (one == other) is True
    assert (one == loop.run(dataclasses.replace(CONFIG, seed=8))) is False
    odd = one.logits + np.where(np.arange(6) == 3, np.float32(1e-7), np.float32(0))
    assert (one == dataclasses.replace(one, logits=odd)) is False
    assert (one == dataclasses.replace(one, logits=None)) is False
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_two_runs_of_a_language_model_are_equal_by_their_weights(tiny_folder):
    config = Config(backend="hf", model=str(tiny_folder), iterations=1, eval_episodes=1, lr=1e-3)
    one, other = loop.run(config), loop.run(config)
    assert (one == other) is True
    first = load_checkpoint(tiny_folder)
    assert (first == load_checkpoint(tiny_folder)) is True and (first == one.checkpoint) is False
    assert (one == dataclasses.replace(one, checkpoint=first)) is False
