"""The private verifier: right for any array and artifact, and blind to everything but the artifact."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_mini.episodes import verifier
from jaxrl_mini.episodes.verifier import EVALUATION, TRAINING, Inputs, draw_inputs, search, training_verdicts, verify
from jaxrl_mini.tasks.repair import VARIANTS

ARTIFACTS = [(bool(low), bool(high)) for low, high in VARIANTS]


def arrays_of(inputs: Inputs) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(inputs.values, inputs.lengths, strict=True)]


def drawn(stream: int, first: int, second: int) -> Inputs:
    """One set."""
    return Inputs(*(part[0] for part in draw_inputs(stream, [(first, second)])))


def inputs_of(arrays) -> Inputs:
    """Sixteen arrays, the missing ones empty, so that everything here has one shape."""
    return verifier.inputs_of([*arrays, *[[]] * (16 - len(arrays))])


@jax.jit
def verdicts(inputs: Inputs) -> jax.Array:
    low, high = (jnp.array(column) for column in zip(*ARTIFACTS, strict=True))
    return jax.vmap(verify, in_axes=(0, 0, None))(low, high, inputs)


def test_exactly_the_correct_artifact_is_accepted_by_each_of_10_000_input_sets():
    np.testing.assert_array_equal(verifier.evaluation_verdicts(10_000), [[False, False, False, True]] * 10_000)


def test_exactly_the_correct_artifact_is_accepted_in_training():
    np.testing.assert_array_equal(training_verdicts(0, 20, 4), [[[False, False, False, True]] * 4] * 20)


def test_an_input_set_is_four_fixed_arrays_and_twelve_random_sorted_ones():
    lengths, values = set(), set()
    for episode in range(2_000):
        arrays = arrays_of(drawn(EVALUATION, episode, 0))
        assert arrays[:4] == [[], [1], [1, 3], [-2, 0, 4]]
        assert len(arrays) == 16
        for array in arrays[4:]:
            assert array == sorted(set(array))
            lengths.add(len(array))
            values.update(array)
    assert lengths == set(range(1, 14))
    assert values == set(range(-40, 41))


def test_lengths_and_values_of_random_arrays_are_evenly_spread():
    arrays = [array for episode in range(2_000) for array in arrays_of(drawn(EVALUATION, episode, 0))[4:]]
    lengths = np.bincount([len(array) for array in arrays], minlength=14)[1:]
    values = np.bincount(np.concatenate(arrays) + 40, minlength=81)
    assert abs(lengths / 24_000 - 1 / 13).max() < 5 * (1 / 13 / 24_000) ** 0.5
    assert abs(values / values.sum() - 1 / 81).max() < 5 * (1 / 81 / values.sum()) ** 0.5


def test_sets_drawn_together_are_those_drawn_alone():
    index = [(first, second) for first in (0, 5, 2**40) for second in range(3)]
    for where, *together in zip(index, *draw_inputs(TRAINING, index), strict=True):
        assert all(map(np.array_equal, together, drawn(TRAINING, *where)))


def test_inputs_are_a_pure_function_of_stream_and_numbers():
    again, first = drawn(TRAINING, 5, 3), drawn(TRAINING, 5, 3)
    np.testing.assert_array_equal(first.values, again.values)
    np.testing.assert_array_equal(first.lengths, again.lengths)


def test_training_and_evaluation_inputs_never_meet():
    def as_bytes(*where) -> bytes:
        inputs = drawn(*where)
        return inputs.values.tobytes() + inputs.lengths.tobytes()

    training = [as_bytes(TRAINING, iteration, group) for iteration in range(500) for group in range(8)]
    evaluation = [as_bytes(EVALUATION, episode, 0) for episode in range(4_000)]
    assert len({*training, *evaluation}) == 8_000


def test_which_inputs_grade_what(monkeypatch):
    """Training draws by (iteration, group), evaluation by episode, each once and in its own stream."""
    asked = []

    def spy(stream, index):
        asked.extend((stream, *where) for where in index)
        return draw_inputs(stream, index)

    monkeypatch.setattr(verifier, "draw_inputs", spy)
    training_verdicts.__wrapped__(7, 3, 2)
    in_training = {(TRAINING, iteration, group) for iteration in (7, 8, 9) for group in (0, 1)}
    assert asked == sorted(in_training)
    asked.clear()
    verifier.evaluation_verdicts.__wrapped__(5)
    assert asked == [(EVALUATION, episode, 0) for episode in range(5)]


def test_verdicts_stand_where_their_inputs_belong(monkeypatch):
    """With an array that is not sorted, which none passes, for iteration 8 and group 1 alone, one row says so."""
    unsorted = inputs_of([(3, 1)])

    def draw(stream, index):
        sets = [unsorted if where == (8, 1) else drawn(stream, *where) for where in index]
        return Inputs(*map(np.stack, zip(*sets, strict=True)))

    monkeypatch.setattr(verifier, "draw_inputs", draw)
    everywhere = np.full((3, 2, 4), [False, False, False, True])
    everywhere[1, 1] = False
    np.testing.assert_array_equal(training_verdicts.__wrapped__(7, 3, 2), everywhere)
    episodes = verifier.evaluation_verdicts.__wrapped__(3)
    np.testing.assert_array_equal(episodes, [[False, False, False, True]] * 3)


sorted_arrays = st.lists(st.integers(-40, 40), unique=True, max_size=13).map(sorted)


@settings(max_examples=300, deadline=None)
@given(st.lists(sorted_arrays, min_size=1, max_size=16))
def test_verdicts_are_those_of_a_plain_search_for_any_arrays_and_artifact(arrays):
    expected = [oracle.passes(low, high, arrays) for low, high in ARTIFACTS]
    assert verdicts(inputs_of(arrays)).tolist() == expected


search_compiled = jax.jit(search)


@settings(max_examples=200, deadline=None)
@given(st.booleans(), st.booleans(), sorted_arrays)
def test_a_search_returns_what_a_plain_search_returns_for_any_target(low_fixed, high_fixed, values):
    """In NumPy and compiled."""
    inputs, targets = verifier.inputs_of([values]), np.arange(-41, 42, dtype=np.int8)[None]
    plain = [oracle.search(low_fixed, high_fixed, values, target) for target in range(-41, 42)]
    expected = [-2 if result is None else result for result in plain]
    assert search(low_fixed, high_fixed, inputs, targets)[0].tolist() == expected
    assert search_compiled(low_fixed, high_fixed, inputs, targets)[0].tolist() == expected


@pytest.mark.parametrize(
    ("artifact", "values", "target"),
    [((False, False), [1, 3], 3), ((False, True), [1, 3], 3), ((True, False), [1, 3], 0), ((False, False), [1], 2)],
)
def test_an_endless_loop_ends_in_failure(artifact, values, target):
    assert search(*artifact, verifier.inputs_of([values]), np.array([[target]])) == -2
    assert not verdicts(inputs_of([values]))[ARTIFACTS.index(artifact)]


def test_verdicts_come_from_running_the_search_not_from_the_flags():
    """Where an array is empty, every artifact searches it rightly, and is accepted."""
    assert verdicts(inputs_of([])).tolist() == [True] * 4


def test_targets_and_right_answers_by_hand():
    """The elements, then -41, 41 and 0; what pads the targets is missing everywhere, as -1 says."""
    inputs = verifier.inputs_of([[-2, 0, 4], []])
    targets, expected = verifier.questions(inputs)
    assert targets[0, [0, 1, 2, 13, 14, 15]].tolist() == [-2, 0, 4, -41, 41, 0]
    assert expected[0, [0, 1, 2, 13, 14, 15]].tolist() == [0, 1, 2, -1, -1, 1]
    assert (expected[0, 3:13] == -1).all() and not np.isin(targets[0, 3:13], inputs.values[0, :3]).any()
    assert (expected[1] == -1).all()


@pytest.mark.parametrize("padding", [0, -100, 41, -41, 100])
def test_padding_of_arrays_is_never_read(padding):
    for arrays in (arrays_of(drawn(TRAINING, 0, 0)), [[]], [[1, 3]]):
        inputs = inputs_of(arrays)
        beyond = np.arange(13) >= np.asarray(inputs.lengths)[:, None]
        poisoned = inputs._replace(values=np.where(beyond, padding, inputs.values).astype(np.int8))
        assert verdicts(poisoned).tolist() == verdicts(inputs).tolist()


def test_the_verifier_is_the_same_without_jit():
    inputs = inputs_of([[1, 3], [-2, 0, 4], [7]])
    for where in (inputs, Inputs(*map(jnp.asarray, inputs))):
        assert [bool(verify(*artifact, where)) for artifact in ARTIFACTS] == [False, False, False, True]
