"""Kept policies: what is saved plays as it was trained, and what is no policy is refused."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxrl_mini
from jaxrl_mini import play
from jaxrl_mini.config import Config, UserError
from jaxrl_mini.policies.saved import load_table, save_table
from jaxrl_mini.tasks.repair import ACTIONS

READ, FIX_LOW, FIX_HIGH, FINISH = (ACTIONS.index(name) for name in ("read", "fix_low", "fix_high", "finish"))


def always(*actions: int) -> np.ndarray:
    """Logits that take these actions, one after the other, with a probability of 1 - 5e-13."""
    logits = np.zeros((6, 4, 6), np.float32)
    for step, action in enumerate(actions):
        logits[step, :, action] = 30
    return logits.reshape(24, 6)


@pytest.fixture
def folder(tmp_path):
    """A saved policy: two repairs, then the submission."""
    save_table(tmp_path / "policy", always(FIX_LOW, FIX_HIGH, FINISH), Config(seed=3))
    return tmp_path / "policy"


def test_a_saved_policy_plays_the_evaluation_of_its_record(train_command, command, tmp_path):
    flags = ("--seed", 11, "--iterations", 3, "--eval-episodes", 20)
    assert train_command(*flags, "--output", "r.json", "--save-policy", "policy").code == 0
    outcome = command(play, "policy", "--episodes", 20, "--seed", 11)
    record = json.loads((tmp_path / "r.json").read_text())
    assert json.loads(outcome.out[0]) == record["after"]
    assert json.loads(command(play, "policy", "--episodes", 20, "--seed", 12).out[0]) != record["after"]
    logits, config = load_table("policy")
    assert config == Config(seed=11, iterations=3, eval_episodes=20)
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == ["policy.json", "policy.safetensors"]
    assert logits.any()


def test_an_episode_is_shown_step_by_step_with_the_verdict(folder, command):
    outcome = command(play, folder)
    assert (outcome.code, outcome.err) == (0, [])
    assert outcome.out[:10] == [
        "low = mid",
        "high = mid",
        "step 0 of 6",
        "  read      0.0000",
        f"  fix_low   1.0000  {'#' * 40}",
        "  fix_high  0.0000",
        "  undo_low  0.0000",
        "  test      0.0000",
        "  finish    0.0000",
        "> fix_low",
    ]
    assert [line for line in outcome.out if line.startswith(">")] == ["> fix_low", "> fix_high", "> finish"]
    assert outcome.out[-2:] == [
        "submitted: low = mid + 1; high = mid - 1",
        "the private verifier accepts it: success",
    ]


@pytest.mark.parametrize(
    ("actions", "last"),
    [
        ((FINISH,), "the private verifier rejects it: failure"),
        ((FIX_HIGH, FINISH), "the private verifier rejects it: failure"),
        ((READ,) * 6, "out of steps, nothing submitted: failure"),
    ],
)
def test_what_is_not_repaired_and_submitted_fails(tmp_path, command, actions, last):
    save_table(tmp_path / "policy", always(*actions), Config())
    assert command(play, "policy").out[-1] == last


def random_player(tmp_path):
    save_table(tmp_path / "random", np.random.default_rng(0).normal(size=(24, 6)), Config())
    return jaxrl_mini.load_player(tmp_path / "random")


def test_the_episode_shown_is_the_first_of_the_statistics(tmp_path):
    player = random_player(tmp_path)
    for seed in range(30):
        actions, figures = player.episode(seed), player.evaluate(1, seed)
        assert figures.actions == len(actions)
        task = jaxrl_mini.BinarySearchRepair()
        for action in actions:
            task.step(ACTIONS[action])
        assert task.ended and figures.successes == (task.submitted and all(task.artifact))


def test_probabilities_are_those_of_the_state_that_the_actions_lead_to(tmp_path):
    player = random_player(tmp_path)
    logits = load_table(tmp_path / "random")[0].astype(float)
    state = 3 * 4 + 2  # three steps on, only the low line repaired
    expected = np.exp(logits[state]) / np.exp(logits[state]).sum()
    np.testing.assert_allclose(player.probabilities([FIX_LOW, READ, READ]), expected, rtol=1e-12)


def test_a_person_chooses_by_name_or_number_and_is_asked_again(folder, command, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("jump\n2\n7\n fix_high \nfinish\n"))
    outcome = command(play, folder, "--human")
    assert outcome.code == 0
    assert [line.split("? ")[-1] for line in outcome.out if "> " in line] == ["> fix_low", "> fix_high", "> finish"]
    assert "\n".join(outcome.out).count("1 read, 2 fix_low") == 5
    assert sum(line.endswith("? no action is called 'jump'") for line in outcome.out) == 1
    assert outcome.out[-1] == "the private verifier accepts it: success"
    monkeypatch.setattr("sys.stdin", io.StringIO("fix_low\n"))
    outcome = command(play, folder, "--human")
    assert outcome.code == 2 and len(outcome.err) == 1 and "input ended" in outcome.err[0]


# What is refused


def describe(folder, **changes):
    path = folder / "policy.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weights(folder, **tensors):
    save_file(tensors, folder / "policy.safetensors")


def truncated(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:50])


REFUSED = {
    "has task 'chess': expected 'binary-search-repair'": lambda f: describe(f, task="chess"),
    "has actions": lambda f: describe(f, actions=list(ACTIONS[::-1])),
    "has policy None": lambda f: describe(f, policy=None),
    "config is missing": lambda f: describe(f, config=None),
    "--seed -1 is out of range": lambda f: describe(f, config={**Config().to_dict(), "seed": -1}),
    "unknown or missing keys: lr2": lambda f: describe(f, config={**Config().to_dict(), "lr2": 1}),
    "is not JSON": lambda f: truncated(f, "policy.json"),
    "describes no policy": lambda f: (f / "policy.json").write_text("[]"),
    "has no policy.safetensors": lambda f: (f / "policy.safetensors").unlink(),
    "policy.safetensors' cannot be read": lambda f: truncated(f, "policy.safetensors"),
    r"expected {'logits': \('F32', \[24, 6\]\)}": lambda f: weights(f, logits=np.zeros((6, 24), np.float32)),
    "holds {'logits': .'F64'": lambda f: weights(f, logits=np.zeros((24, 6))),
    "'other'": lambda f: weights(f, logits=np.zeros((24, 6), np.float32), other=np.zeros(1)),
    "not finite": lambda f: weights(f, logits=np.full((24, 6), np.nan, np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_table_policy_is_refused_in_one_line(folder, message):
    REFUSED[message](folder)
    with pytest.raises(UserError, match=message) as refusal:
        jaxrl_mini.load_player(folder)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["nothing"], "'nothing' is not a folder"),
        (["policy", "--seed", -1], "--seed -1"),
        (["policy", "--episodes", 0], "--episodes 0 is out of range"),
        (["policy", "--episodes", "many"], "'many'"),
        (["policy", "--episodes", 3, "--human"], "not allowed with"),
        (["."], "config.json"),
    ],
)
def test_bad_flags_are_one_line(folder, command, flags, part):
    outcome = command(play, *flags)
    assert outcome.code == 2 and outcome.out == [] and len(outcome.err) == 1 and part in outcome.err[0]


# Whole or not at all


def test_a_policy_is_replaced_only_if_asked_and_nothing_else_ever(folder, tmp_path):
    with pytest.raises(UserError, match="not empty"):
        save_table(folder, always(READ), Config())
    save_table(folder, always(READ), Config(), overwrite=True)
    np.testing.assert_array_equal(load_file(folder / "policy.safetensors")["logits"], always(READ))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    with pytest.raises(UserError, match="holds no policy"):
        save_table(tmp_path / "mine", always(READ), Config(), overwrite=True)
    assert (tmp_path / "mine/thesis.txt").exists()


@pytest.mark.parametrize("failing", ["fsync", "first rename", "second rename"])
def test_a_disk_that_refuses_leaves_what_was_there(folder, tmp_path, monkeypatch, failing):
    rename, calls = type(tmp_path).rename, []

    def refuse(*_):
        raise OSError(28, "No space left on device")

    def rename_or_refuse(path, target):
        calls.append(path)
        if len(calls) == 1 + (failing == "second rename"):
            refuse()
        return rename(path, target)

    before = load_file(folder / "policy.safetensors")["logits"]
    if failing == "fsync":
        monkeypatch.setattr(os, "fsync", refuse)
    else:
        monkeypatch.setattr(type(tmp_path), "rename", rename_or_refuse)
    with pytest.raises(UserError, match="No space left on device"):
        save_table(folder, always(READ), Config(), overwrite=True)
    np.testing.assert_array_equal(load_file(folder / "policy.safetensors")["logits"], before)
    assert list(tmp_path.iterdir()) == [folder]


def test_train_refuses_a_place_for_the_policy_before_it_trains(train_command, folder, monkeypatch):
    monkeypatch.setattr("jaxrl_mini.learning.loop.run", None)
    outcome = train_command("--save-policy", folder)
    assert outcome.code == 2 and "not empty" in outcome.err[0] and not Path("runs").exists()
