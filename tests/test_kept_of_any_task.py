"""Kept policies and recordings of any task: what is written is what was trained, and what is read is possible."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxrl_mini import play, replay
from jaxrl_mini.config import Config, UserError
from jaxrl_mini.learning import loop
from jaxrl_mini.machine import files
from jaxrl_mini.policies.saved import save_table
from jaxrl_mini.runs import recording, replaying
from jaxrl_mini.runs.player import load_player
from jaxrl_mini.tasks.specification import load_task

DOORS = Path(__file__).parent / "doors.py"
HIDDEN = "repair:lines=2,steps=4,hidden=true"


@pytest.mark.parametrize("task", ["doors.py:Doors", "guess:numbers=3", HIDDEN])
def test_a_kept_policy_of_any_task_plays_the_evaluation_of_its_record(train_command, command, tmp_path, task):
    shutil.copy(DOORS, ".")
    flags = ("--task", task, "--iterations", 2, "--eval-episodes", 30)
    assert train_command(*flags, "--output", "r.json", "--save-policy", "p").code == 0
    again = command(play, "p", "--task", task, "--episodes", 30)
    record = json.loads((tmp_path / "r.json").read_text())
    assert json.loads(again.out[0]) == record["after"]
    assert json.loads(command(play, "p", "--task", task, "--episodes", 30, "--seed", 8).out[0]) != record["after"]


def test_an_episode_of_a_kept_policy_of_any_task_is_shown_as_it_was_drawn(command, tmp_path):
    """Over many seeds, as often as the policy has it: it listens first, and then does what it heard."""
    shutil.copy(DOORS, ".")
    name = str(tmp_path / "doors.py:Doors")
    task = load_task(name)
    logits = np.zeros(task.shape, np.float32)
    for context, view in task.views.items():
        logits[context, ["", "left", "right"].index(view)] = 30
    save_table("p", logits, Config(task=name))
    ends = []
    for seed in range(60):
        outcome = command(play, "p", "--task", name, "--seed", seed)
        assert outcome.code == 0 and outcome.out[:2] == ["two doors", f"  listen  1.0000  {'#' * 40}"]
        assert outcome.out[4:6] == ["> listen", ""]
        opened = outcome.out[6].removeprefix("you heard ")
        assert outcome.out[10] == f"> {opened}" and f"submitted: {opened}" in outcome.out
        assert ("accepts it with probability 0.75" in outcome.out[-2]) or outcome.out[-1].endswith("failure")
        ends.append(outcome.out[-1].endswith("success"))
    assert abs(np.mean(ends) - 0.9 * 0.75) < 3 * (0.675 * 0.325 / 60) ** 0.5


def test_a_policy_says_which_task_it_plays_and_another_is_refused(command, tmp_path):
    shutil.copy(DOORS, ".")
    name = str(tmp_path / "doors.py:Doors")
    save_table("p", np.zeros(load_task(name).shape, np.float32), Config(task=name))
    for flags, message in (
        ([], f"is about a task of its user's own: name it, --task {name}"),
        (["--task", HIDDEN], "is about a task of its user's own"),
    ):
        outcome = command(play, "p", *flags)
        assert outcome.code == 2 and len(outcome.err) == 1 and message in outcome.err[0]
    with pytest.raises(UserError, match="not sure"):
        load_player("p", [name]).probabilities([0])
    (tmp_path / "doors.py").write_text(DOORS.read_text().replace("[9, 1]", "[8, 2]"))
    outcome = command(play, "p", "--task", name)
    assert outcome.code == 2 and len(outcome.err) == 1 and "with digest" in outcome.err[0]
    save_table("q", np.zeros((24, 6), np.float32), Config())
    assert "expected binary-search-repair" in command(play, "q", "--task", HIDDEN).err[0]


# Recordings


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Of a task with chance, two instances and a submission that not every episode makes."""
    folder = tmp_path_factory.mktemp("recorded")
    shutil.copy(DOORS, folder)
    config = Config(task=f"{folder}/doors.py:Doors", iterations=3, groups=2, group_size=4, eval_episodes=10, lr=0.3)
    result = loop.run(config)
    with files.Output(folder / "run.npz", recording.not_of(config)) as output:
        recording.write(result, output)
    return folder / "run.npz", config.task


def test_a_recording_of_any_task_replays(recorded):
    path, name = recorded
    one = recording.read(path, [name])
    errors = replaying.replay_errors(one)
    assert max(errors.values()) < 1e-6 and errors.keys() == {
        *recording.HISTORY,
        "advantages",
        "logits",
        "behavior_log_probs",
    }
    assert one.arrays["actions"].shape == (3, 2, 4, 2) and (one.arrays["submissions"] == 0).any()


def test_a_policys_log_probabilities_stand_beside_what_was_done(recorded):
    path, name = recorded
    one, task = recording.read(path, [name]), load_task(name)
    for place in np.argwhere(one.arrays["actions"] >= 0):
        iteration, step = place[0], place[-1]
        context = step * task.width + one.arrays["views"][*place]
        assert context in task.views
        right = log_softmax(one.arrays["logits"][iteration, context])[one.arrays["actions"][*place]]
        assert one.arrays["old_log_probs"][*place] == pytest.approx(right, abs=1e-6)


def test_another_reward_or_view_leads_to_another_policy(recorded):
    path, name = recorded
    one = recording.read(path, [name])
    won = np.argwhere(one.arrays["rewards"] == 0)[0]
    one.arrays["rewards"][*won] = 1
    errors = replaying.replay_errors(one)
    assert errors["logits"] > 1e-4 and errors["advantages"] > 1e-4


def jumps(arrays):
    """Sees on its second step what nobody can see there."""
    place = np.argwhere(arrays["actions"][..., 1] >= 0)[0]
    arrays["views"][*place, 1] = 2


def opens_and_goes_on(arrays):
    place = np.argwhere(arrays["actions"][..., 1] >= 0)[0]
    arrays["actions"][*place, 0] = 1


def ends_early(arrays):
    place = np.argwhere(arrays["actions"][..., 1] >= 0)[0]
    arrays["actions"][*place, 1] = -1


def goes_on(arrays):
    place = np.argwhere(arrays["actions"][..., 1] < 0)[0]
    arrays["actions"][*place, 1] = 1


def hands_in(arrays):
    arrays["submissions"][...] = 1


def far_away(arrays):
    arrays["instances"][0, 0] = 7


def half(arrays):
    arrays["views"] = arrays["views"] + 0.5


@pytest.mark.parametrize("damage", [jumps, opens_and_goes_on, ends_early, goes_on, hands_in, far_away, half])
def test_an_episode_that_the_task_does_not_have_is_refused(recorded, tmp_path, damage):
    path, name = recorded
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    damage(arrays)
    np.savez(tmp_path / "odd.npz", **arrays)
    with pytest.raises(UserError, match=r"does not go so at|must be whole numbers") as refusal:
        recording.read(tmp_path / "odd.npz", [name])
    assert "\n" not in str(refusal.value)


def test_a_recording_names_its_task_and_none_is_imported_unasked(command, train_command, tmp_path):
    shutil.copy(DOORS, ".")
    flags = "--task", "doors.py:Doors", "--iterations", 2, "--eval-episodes", 5
    assert train_command(*flags, "--output", "r.json", "--trajectories", "r.npz").code == 0
    outcome = command(replay, "r.npz", "--task", "doors.py:Doors")
    assert outcome.code == 0 and json.loads(outcome.out[0])["ok"]
    outcome = command(replay, "r.npz")
    assert outcome.code == 2 and "a task of its user's own: name it, --task doors.py:Doors" in outcome.err[0]
    (tmp_path / "doors.py").write_text(DOORS.read_text().replace("0.75", "0.5"))
    outcome = command(replay, "r.npz", "--task", "doors.py:Doors")
    assert outcome.code == 2 and len(outcome.err) == 1 and "with digest" in outcome.err[0]
