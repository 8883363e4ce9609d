"""Recordings replay: those of an independent implementation in eager PyTorch, and our own; damaged ones do not."""

import dataclasses
import io
import json
import os
import zipfile

import numpy as np
import oracle
import pytest

from jaxrl_mini.config import UserError
from jaxrl_mini.runs import recording, replaying

NAMES = (
    "grpo-seed-7", "grpo-seed-19", "grpo-aggressive-seed-3", "rs-sft-seed-7", "rs-sft-seed-42", "rs-sft-sparse-seed-5"
)  # fmt: skip
LIMITS = {
    "loss": 1e-5,
    "mean_kl": 1e-5,
    "ratio_outside_clip_fraction": 0.0,
    "advantages": 1e-6,
    "logits": 2e-4,
    "behavior_log_probs": 1e-5,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_recordings_of_the_independent_implementation_replay(golden, name):
    """With large steps, many epochs and clipping, and with batches that have no success, too."""
    errors = replaying.replay_errors(recording.read(golden / f"{name}.npz"))
    for figure, limit in LIMITS.items():
        if name.startswith("rs-sft") and figure in ("mean_kl", "ratio_outside_clip_fraction"):
            assert errors[figure] is None  # not recorded for this method
        else:
            assert errors[figure] <= limit, figure


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_of_these_tests_replays_the_recordings_too(golden, name):
    """Each iteration from the recorded policy on, with moments of its own; policies, not logits, are compared."""
    with np.load(golden / f"{name}.npz", allow_pickle=False) as file:
        recorded = dict(file)
    config, adam = json.loads(str(recorded["config"])), oracle.Adam()
    reference = oracle.log_softmax(recorded["logits"][0])
    for i in range(config["iterations"]):
        batch = recorded["actions"][i], recorded["rewards"][i]
        logits, step = oracle.update(recorded["logits"][i], adam, reference, *batch, config)
        policies = oracle.log_softmax(logits), oracle.log_softmax(recorded["logits"][i + 1])
        np.testing.assert_allclose(*policies, atol=2e-5)
        assert step.loss == pytest.approx(recorded["history_loss"][i], abs=1e-6)
        if config["method"] == "grpo":
            assert step.mean_kl == pytest.approx(recorded["history_mean_kl"][i], abs=1e-6)
            assert step.outside == pytest.approx(recorded["history_ratio_outside_clip_fraction"][i], abs=1e-12)


def test_the_aggressive_recording_does_clip(golden):
    arrays = recording.read(golden / "grpo-aggressive-seed-3.npz").arrays
    assert (arrays["history_ratio_outside_clip_fraction"] > 0.1).sum() > 10


@pytest.fixture(scope="module")
def intact(golden) -> recording.Recording:
    return recording.read(golden / "grpo-seed-7.npz")


def actions_swapped(actions):
    """Another action, `test` for `read` or the other way round, that leads to the same states."""
    either = np.argwhere((actions == 0) | (actions == 4))
    where = tuple(either[len(either) // 2])
    actions[where] = 4 - actions[where]


def reward_flipped(rewards):
    where = tuple(np.argwhere(rewards == 0)[10])
    rewards[where] = 1.0


def element_raised(array):
    array[tuple(size // 2 for size in array.shape)] += 1e-3


@pytest.mark.parametrize(
    ("array", "damage", "figures"),
    [
        ("actions", actions_swapped, {"logits", "behavior_log_probs"}),
        ("rewards", reward_flipped, {"logits", "advantages"}),
        ("advantages", element_raised, {"advantages"}),
        ("old_log_probs", element_raised, {"behavior_log_probs"}),
        ("logits", element_raised, {"logits"}),
        ("history_loss", element_raised, {"loss"}),
        ("history_mean_kl", element_raised, {"mean_kl"}),
        ("history_ratio_outside_clip_fraction", element_raised, {"ratio_outside_clip_fraction"}),
    ],
)
def test_a_change_of_any_array_shows_in_the_figures_that_follow_from_it(intact, array, damage, figures):
    arrays = {name: values.copy() for name, values in intact.arrays.items()}
    damage(arrays[array])
    errors = replaying.replay_errors(dataclasses.replace(intact, arrays=arrays))
    beyond = {figure for figure, error in errors.items() if error > max(LIMITS[figure], 1e-6)}
    assert beyond >= figures
    if len(figures) == 1 and array != "logits":
        assert beyond == figures


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.081), ("clip", 0.1), ("beta", 0.03), ("epochs", 1), ("method", "rs-sft")]
)
def test_a_recording_under_other_settings_does_not_replay(intact, name, value):
    other = dataclasses.replace(intact, config=dataclasses.replace(intact.config, **{name: value}))
    assert max(error for error in replaying.replay_errors(other).values()) > 1e-3


# The command


@pytest.fixture
def file_of(golden, tmp_path):
    """A recording with some arrays changed or, where None, left out."""

    def write(**changes):
        with np.load(golden / "rs-sft-sparse-seed-5.npz", allow_pickle=False) as file:
            arrays = {**dict(file), **changes}
        path = tmp_path / "changed.npz"
        np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
        return path

    return write


def test_one_line_per_file_and_exit_0_where_all_agree(replay_command, golden):
    files = [golden / "grpo-seed-7.npz", golden / "rs-sft-sparse-seed-5.npz"]
    outcome = replay_command(*files)
    assert (outcome.code, outcome.err) == (0, [])
    for line, file, iterations in zip(map(json.loads, outcome.out), files, (100, 60), strict=True):
        assert line.keys() == {"file", "iterations", "max_abs_error", "ok"}
        assert (line["file"], line["iterations"], line["ok"]) == (str(file), iterations, True)
        assert line["max_abs_error"].keys() == LIMITS.keys()


def test_exit_1_where_one_is_beyond_tolerance(replay_command, golden, file_of):
    changed = np.load(golden / "rs-sft-sparse-seed-5.npz")["history_loss"].copy()
    changed[3] += 0.01
    path = file_of(history_loss=changed)
    outcome = replay_command(path, golden / "rs-sft-sparse-seed-5.npz")
    first, second = map(json.loads, outcome.out)
    assert outcome.code == 1
    assert (first["ok"], second["ok"]) == (False, True)
    assert first["max_abs_error"]["loss"] == pytest.approx(0.01, abs=1e-5)
    assert replay_command(path, "--tolerance", 0.02).code == 0
    assert replay_command(golden / "rs-sft-sparse-seed-5.npz", "--tolerance", 1e-12).code == 1


@pytest.mark.parametrize("method", ["grpo", "rs-sft"])
def test_what_train_records_replays(train_command, replay_command, method):
    written = train_command(
        "--method", method, "--seed", 42, "--iterations", 23, "--eval-episodes", 5, "--lr", 0.3,
        "--output", "r.json", "--trajectories", "t.npz",
    )  # fmt: skip
    assert written.code == 0
    outcome = replay_command("t.npz", "--tolerance", 1e-5)
    assert outcome.code == 0
    errors = json.loads(outcome.out[0])["max_abs_error"]
    assert all(error is not None for error in errors.values())


def test_recorded_trajectories_have_the_arrays_and_types_of_the_format(grpo_arrays, golden):
    with np.load(golden / "grpo-seed-7.npz", allow_pickle=False) as file:
        for name, theirs in dict(file).items():
            ours = grpo_arrays[name]
            assert ours.shape == theirs.shape, name
            assert ours.dtype.kind == theirs.dtype.kind, name
        assert json.loads(str(grpo_arrays["config"])) == json.loads(str(file["config"]))


def test_recorded_trajectories_are_not_overwritten_unless_asked(train_command, tmp_path):
    (tmp_path / "t.npz").write_bytes(b"precious")
    outcome = train_command("--iterations", 1, "--output", "r.json", "--trajectories", "t.npz")
    assert outcome.code == 2 and "t.npz" in outcome.err[0] and "--overwrite" in outcome.err[0]
    assert (tmp_path / "t.npz").read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [tmp_path / "t.npz"]


# Files that are no recordings


def refused(replay_command, path, *parts):
    outcome = replay_command(path)
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 1), outcome
    for part in (str(path), *parts):
        assert part in outcome.err[0]


@pytest.mark.parametrize(
    "name", ["config", "actions", "rewards", "advantages", "old_log_probs", "logits", "history_loss"]
)
def test_a_missing_array_is_named(replay_command, file_of, name):
    refused(replay_command, file_of(**{name: None}), name)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("actions", np.zeros((60, 1, 2, 5), np.int8)),
        ("rewards", np.zeros((60, 2, 1), np.float32)),
        ("logits", np.zeros((60, 24, 6), np.float32)),
        ("history_loss", np.zeros(())),
        ("history_mean_kl", np.zeros(59)),
        ("advantages", np.array([[["a", "b"]]] * 60)),
    ],
)
def test_a_wrong_shape_or_kind_is_named_with_the_right_one(replay_command, file_of, name, array):
    refused(replay_command, file_of(**{name: array}), name, "expected numbers")


@pytest.mark.parametrize(
    ("name", "where", "value"),
    [
        ("rewards", (0, 0, 0), 0.5),
        ("rewards", (0, 0, 0), np.nan),
        ("actions", (0, 0, 0, 0), -1),
        ("actions", (0, 0, 0, 0), 6),
        ("actions", (0, 0, 0, 0), -2),
    ],
)
def test_impossible_values_are_refused(replay_command, golden, file_of, name, where, value):
    array = np.load(golden / "rs-sft-sparse-seed-5.npz")[name].copy()
    array[where] = value
    refused(replay_command, file_of(**{name: array}), name)


def test_an_action_after_the_end_of_an_episode_is_refused(replay_command, golden, file_of):
    actions = np.load(golden / "rs-sft-sparse-seed-5.npz")["actions"].copy()
    ended = tuple(np.argwhere(actions == -1)[0])
    actions[ended] = 0
    refused(replay_command, file_of(actions=actions), "actions")


@pytest.mark.parametrize("name", ["logits", "old_log_probs", "advantages", "history_loss"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
def test_a_figure_that_is_not_finite_is_refused_with_its_place(replay_command, golden, file_of, name, value):
    array = np.load(golden / "rs-sft-sparse-seed-5.npz")[name].astype(np.float64)
    array.flat[5] = value
    place = [int(i) for i in np.unravel_index(5, array.shape)]
    refused(replay_command, file_of(**{name: array}), f"{name} is {array.flat[5]} at {place}, expected finite numbers")


def test_a_recording_that_would_fill_the_memory_is_refused_by_its_size(file_of, monkeypatch):
    path = file_of()
    with np.load(path) as file:
        np.savez_compressed(path, **dict(file), more=np.zeros(10**6))
    monkeypatch.setattr(recording, "MAX_BYTES", path.stat().st_size)
    with pytest.raises(UserError, match=f"holds [0-9]+ bytes: expected at most {path.stat().st_size}"):
        recording.read(path)
    monkeypatch.setattr(recording, "MAX_BYTES", 100)
    with pytest.raises(UserError, match="larger than 100 bytes"):
        recording.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"method": "grpo"}', '{"iterations": 1e3}', "[" * 100_000])
def test_a_config_that_is_none_is_refused(replay_command, file_of, text):
    refused(replay_command, file_of(config=np.array(text)), "config")


def test_a_config_out_of_range_is_refused_with_the_range(replay_command, golden, file_of):
    config = json.loads(str(np.load(golden / "rs-sft-sparse-seed-5.npz")["config"]))
    path = file_of(config=np.array(json.dumps({**config, "clip": 2.0})))
    refused(replay_command, path, "--clip", "from 1.2e-07 to 0.9999999")


def test_pickled_objects_are_never_loaded(replay_command, file_of, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    refused(replay_command, file_of(advantages=np.array([[[Bomb(), None]]] * 60, object)))
    assert not (tmp_path / "exploded").exists()


def damaged(golden, path, how: str):
    intact = (golden / "rs-sft-sparse-seed-5.npz").read_bytes()
    if how == "truncated":
        path.write_bytes(intact[: len(intact) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("not a recording\n")
    elif how == "npy":
        buffer = io.BytesIO()
        np.save(buffer, np.zeros(3))
        path.write_bytes(buffer.getvalue())
    elif how == "folder":
        path.mkdir()
    elif how == "a zip of text":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("actions.npy", "no array")
    elif how == "a gigantic header":
        with np.load(golden / "rs-sft-sparse-seed-5.npz", allow_pickle=False) as file:
            np.savez(path, **{name: array for name, array in file.items() if name != "logits"})
        header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999,), }"
        with zipfile.ZipFile(path, "a") as file:
            file.writestr("logits.npy", header.ljust(127) + b"\n")
    else:  # a byte flipped in the middle of the compressed data of an array
        path.write_bytes(intact[:1500] + bytes([intact[1500] ^ 0xFF]) + intact[1501:])


@pytest.mark.parametrize(
    "how", ["truncated", "empty", "text", "npy", "folder", "a zip of text", "a gigantic header", "a flipped byte"]
)
def test_a_damaged_file_is_one_line_and_exit_2(replay_command, golden, tmp_path, how):
    path = tmp_path / "damaged.npz"
    damaged(golden, path, how)
    refused(replay_command, path)


def test_a_missing_file_is_refused_before_any_other_is_replayed(replay_command, golden):
    outcome = replay_command(golden / "grpo-seed-7.npz", "nowhere.npz")
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 1)
    assert "nowhere.npz" in outcome.err[0]


@pytest.mark.parametrize("tolerance", ["-1", "nan", "inf", "small"])
def test_a_tolerance_that_is_none_is_refused(replay_command, golden, tolerance):
    outcome = replay_command(golden / "grpo-seed-7.npz", "--tolerance", tolerance)
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 1)
    assert "--tolerance" in outcome.err[0] and tolerance in outcome.err[0]


def test_reading_from_python_raises_the_same_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        recording.read(tmp_path / "nowhere.npz")
