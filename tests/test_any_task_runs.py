"""Runs of any task: the same bits alone, in a sweep and resumed; what is recorded, reproduced and refused."""

import io
import json

import pyarrow.parquet as pq
import pytest

from jaxrl_mini import play as play_door
from jaxrl_mini import reproduce, sweep, train
from jaxrl_mini.config import Config, UserError
from jaxrl_mini.learning import loop
from jaxrl_mini.learning.checkpoint import Checkpoints
from jaxrl_mini.tasks.specification import load_task

HIDDEN = "repair:lines=2,steps=4,hidden=true"


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
