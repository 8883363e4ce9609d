"""The task, played by hand, and its tables against the Python class on every action sequence there is."""

import itertools
from copy import copy

import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxrl_mini.episodes.rollout import episodes_from_actions, grade
from jaxrl_mini.tasks.repair import (
    ACTIONS,
    MAX_STEPS,
    VARIANTS,
    Artifact,
    BinarySearchRepair,
    binary_search,
    public_test_passes,
)
from jaxrl_mini.tasks.tables import TABLES, compile_tables


def test_the_actions_stand_in_the_order_of_the_recordings():
    assert ACTIONS == ("read", "fix_low", "fix_high", "undo_low", "test", "finish")
    assert MAX_STEPS == 6


def test_both_lines_start_wrong_and_are_shown():
    assert BinarySearchRepair().reset() == "low = mid\nhigh = mid\nstep 0 of 6"


def test_a_repair_by_hand():
    task = BinarySearchRepair()
    assert task.step("read") == "low = mid\nhigh = mid\nstep 1 of 6"
    assert task.step("fix_low") == "low = mid + 1\nhigh = mid\nstep 2 of 6"
    assert task.step("fix_high") == "low = mid + 1\nhigh = mid - 1\nstep 3 of 6"
    passed = "public test: passed"
    assert task.step("test") == f"low = mid + 1\nhigh = mid - 1\nstep 4 of 6\n{passed}"
    assert not task.ended
    assert task.step("finish") == ""
    assert task.ended and task.submitted
    assert task.artifact == Artifact(low_fixed=True, high_fixed=True)


def test_undo_low_takes_back_the_low_line_only():
    task = BinarySearchRepair()
    for action in ("fix_low", "fix_high", "undo_low"):
        task.step(action)
    assert task.artifact == Artifact(low_fixed=False, high_fixed=True)
    assert task.step("undo_low") == "low = mid\nhigh = mid - 1\nstep 4 of 6"


def test_fixing_twice_is_fixing_once():
    task = BinarySearchRepair()
    for action in ("fix_low", "fix_low", "fix_high", "fix_high"):
        task.step(action)
    assert task.artifact == Artifact(low_fixed=True, high_fixed=True)


def test_six_steps_without_finish_end_the_episode_unsubmitted_even_with_correct_code():
    task = BinarySearchRepair()
    for action in ("fix_low", "fix_high", "read", "read", "test", "read"):
        assert not task.ended
        task.step(action)
    assert task.ended and not task.submitted
    assert task.artifact == Artifact(low_fixed=True, high_fixed=True)


def test_finish_as_the_sixth_action_still_submits():
    task = BinarySearchRepair()
    for action in ("read", "read", "read", "fix_low", "fix_high", "finish"):
        task.step(action)
    assert task.submitted


@pytest.mark.parametrize("ending", [("finish",), ("read",) * 6])
@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_moves_after_the_end(ending, action):
    task = BinarySearchRepair()
    for each in ending:
        task.step(each)
    before = (task.artifact, task.steps, task.submitted)
    with pytest.raises(ValueError, match=f"'{action}' after the episode ended: call reset"):
        task.step(action)
    assert (task.artifact, task.steps, task.submitted) == before


@pytest.mark.parametrize("action", ["", "fix", "FINISH", "undo_high", " read"])
def test_an_unknown_action_is_refused_by_name_and_costs_no_step(action):
    task = BinarySearchRepair()
    with pytest.raises(ValueError, match=f"unknown action '{action}': expected one of read, fix_low"):
        task.step(action)
    assert (task.artifact, task.steps, task.submitted) == (Artifact(), 0, False)


def test_reset_starts_afresh():
    task = BinarySearchRepair()
    task.step("fix_low")
    task.step("finish")
    assert task.reset() == BinarySearchRepair().reset()
    assert (task.artifact, task.steps, task.submitted, task.ended) == (Artifact(), 0, False, False)


@pytest.mark.parametrize("artifact", VARIANTS)
def test_the_public_test_passes_whatever_the_code(artifact):
    assert public_test_passes(artifact)
    task = BinarySearchRepair()
    task.artifact = artifact
    assert task.step("test").endswith("public test: passed")


def test_variants_count_the_fixed_lines_in_binary():
    assert [variant.variant for variant in VARIANTS] == [0, 1, 2, 3]
    assert VARIANTS[1] == Artifact(low_fixed=False, high_fixed=True)
    assert VARIANTS[2] == Artifact(low_fixed=True, high_fixed=False)


def test_binary_search_by_hand():
    wrong, low_only, high_only, right = VARIANTS[0], VARIANTS[2], VARIANTS[1], VARIANTS[3]
    assert [binary_search(right, [1, 3], target) for target in (0, 1, 2, 3, 4)] == [-1, 0, -1, 1, -1]
    assert binary_search(wrong, [], 5) == -1
    assert binary_search(wrong, [1, 3], 3) is None  # low stays at 0
    assert binary_search(high_only, [1, 3], 3) is None
    assert binary_search(low_only, [1, 3], 3) == 1
    assert binary_search(low_only, [1, 3], 0) is None  # high stays at 0
    assert binary_search(high_only, [1, 3], 0) == -1


def test_every_entry_of_the_tables_by_the_rules():
    for step, low_fixed, high_fixed, action in itertools.product(range(6), range(2), range(2), range(6)):
        entry = (step, 2 * low_fixed + high_fixed, action)
        after = {1: (1, high_fixed), 2: (low_fixed, 1), 3: (0, high_fixed)}.get(action, (low_fixed, high_fixed))
        assert TABLES.next_variant[entry] == 2 * after[0] + after[1]
        assert TABLES.submits[entry] == (action == 5)
        assert TABLES.ends[entry] == (action == 5 or step == 5)


def test_the_tables_cannot_be_written_to():
    for table in compile_tables():
        with pytest.raises(ValueError, match="read-only"):
            table[0, 0, 0] = 1


@pytest.fixture(scope="module")
def sequences() -> list[tuple[int, ...]]:
    """All 3,906 sequences that submit and all 15,625 that run out of steps."""
    every = oracle.all_action_sequences()
    assert len(every) == sum(5**k for k in range(6)) + 5**6 == 19_531
    return every


def through_tables(sequences, after_the_end: int):
    padded = [[*sequence, *[after_the_end] * (MAX_STEPS - len(sequence))] for sequence in sequences]
    return episodes_from_actions(jnp.asarray(np.array(padded).T[:, None, :]))


def walk(task, past=()):
    """Every way to go on: the actions so far, the tasks before each of them and after the last, the observation."""
    for action in range(6):
        after = copy(task)
        observation = after.step(ACTIONS[action])
        yield (*past, (action, task)), after, observation
        if not after.ended:
            yield from walk(after, (*past, (action, task)))


def test_every_action_sequence_goes_through_the_tables_as_through_the_python_task(sequences):
    episodes = through_tables(sequences, -1)
    states, actions = (np.asarray(x)[:, 0].T.tolist() for x in (episodes.states, episodes.actions))
    lengths = np.asarray(episodes.lengths)[0].tolist()
    submitted = np.stack(
        [grade(episodes, jnp.eye(4, dtype=bool)[variant][None])[0] for variant in range(4)], 1
    ).tolist()
    rows = dict(zip(sequences, zip(lengths, states, actions, submitted, strict=True), strict=True))
    for past, after, observation in walk(BinarySearchRepair()):
        action, before = past[-1]
        entry = (before.steps, before.artifact.variant, action)
        assert (TABLES.ends[entry], TABLES.submits[entry]) == (after.ended, after.submitted)
        assert observation == described(TABLES.next_variant[entry], after.steps, action)
        if after.ended:
            rest = MAX_STEPS - after.steps
            taken = [action for action, _ in past]
            visited = [before.steps * 4 + before.artifact.variant for _, before in past]
            handed_in = [after.submitted and variant == after.artifact for variant in VARIANTS]
            expected = (after.steps, visited + [0] * rest, taken + [-1] * rest, handed_in)
            assert rows.pop(tuple(taken)) == expected
    assert not rows


def described(variant: int, steps: int, action: int) -> str:
    """What the agent reads after an action, rebuilt from the tables' entry for it."""
    if ACTIONS[action] == "finish":
        return ""
    low_line = ("low = mid", "low = mid + 1")[variant // 2]
    high_line = ("high = mid", "high = mid - 1")[variant % 2]
    test = "\npublic test: passed" if ACTIONS[action] == "test" else ""
    return f"{low_line}\n{high_line}\nstep {steps} of 6{test}"


@pytest.mark.parametrize("poison", [0, 1, 2, 3, 5, 10_000, -10_000])
def test_what_stands_after_the_end_of_an_episode_changes_nothing(sequences, poison):
    for clean, poisoned in zip(through_tables(sequences, -1), through_tables(sequences, poison), strict=True):
        np.testing.assert_array_equal(clean, poisoned)


def test_what_an_action_leads_to_is_the_same_at_every_step_but_the_last():
    """Which lets rollouts play all steps by one rule."""
    assert (TABLES.next_variant == TABLES.next_variant[0]).all()
    assert (TABLES.ends[:-1] == TABLES.ends[0]).all() and TABLES.ends[-1].all()
