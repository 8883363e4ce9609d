"""Random numbers that depend on (seed, stream, iteration, place) alone, and episodes sampled with them."""

from functools import partial

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from scipy import stats

from jaxrl_mini.episodes import rollout
from jaxrl_mini.episodes.rollout import EVALUATION, TRAINING, episodes_from_actions, grade, threefry2x32
from jaxrl_mini.policies import table
from jaxrl_mini.types import Distribution

MAX_SEED = 2**32 - 1


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((MAX_SEED, MAX_SEED), (MAX_SEED, MAX_SEED), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers_published_with_random123(key, counter, expected):
    words = threefry2x32(tuple(map(jnp.uint32, key)), tuple(map(jnp.uint32, counter)))
    assert tuple(map(int, words)) == expected


def test_threefry_is_the_generator_of_jax():
    words = np.random.default_rng(0).integers(0, 2**32, (4, 1_000), np.uint64).astype(np.uint32)
    for k0, k1 in [(0, 0), (7, MAX_SEED), (2**31, 123)]:
        key = jnp.full(1_000, k0, jnp.uint32), jnp.full(1_000, k1, jnp.uint32)
        ours = jnp.concatenate(threefry2x32(key, (jnp.asarray(words[0]), jnp.asarray(words[1]))))
        theirs = jax.extend.random.threefry_2x32((jnp.uint32(k0), jnp.uint32(k1)), words[:2].ravel())
        np.testing.assert_array_equal(ours, theirs)


compiled_draws = jax.jit(rollout.draw_uniforms, static_argnums=(1, 3, 4))


def draws(seeds, stream: int = TRAINING, iteration: int = 0, groups: int = 4, group_size: int = 8) -> np.ndarray:
    """The uniform numbers of a batch, float32 [step, group, episode, *run]."""
    return np.stack(compiled_draws(jnp.array(seeds, jnp.uint32), stream, jnp.int32(iteration), groups, group_size))


@pytest.mark.parametrize(("seed", "stream", "iteration"), [(7, TRAINING, 0), (MAX_SEED, EVALUATION, 19)])
def test_a_batchs_numbers_are_those_of_jaxs_generator_with_their_counters(seed, stream, iteration):
    """A key of (0, seed) and (stream, iteration); with it, of (episode, step // 2), the word of step % 2."""

    def words(key, counter):
        drawn = jax.extend.random.threefry_2x32(tuple(map(jnp.uint32, key)), jnp.array(counter, jnp.uint32))
        return [int(word) for word in drawn]

    key = words((0, seed), (stream, iteration))
    numbers = draws(seed, stream, iteration, groups=2, group_size=3).reshape(6, 6)
    for step, episode in np.ndindex(6, 6):
        assert numbers[step, episode] == (words(key, (episode, step // 2))[step % 2] >> 8) / 2**24


def test_uniforms_are_multiples_of_two_to_the_minus_24_below_one():
    numbers = draws([0, 1, MAX_SEED], groups=100, group_size=100)
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0 and numbers.max() < 1
    assert (numbers * 2**24 == np.round(numbers * 2**24)).all()


def test_uniforms_are_uniform_and_neighbours_independent():
    numbers = draws(7, groups=100, group_size=300)
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-3
    for axis in range(3):
        ahead, behind = np.moveaxis(numbers, axis, 0)[1:].ravel(), np.moveaxis(numbers, axis, 0)[:-1].ravel()
        assert abs(np.corrcoef(ahead, behind)[0, 1]) < 4 / len(ahead) ** 0.5


def test_a_seeds_uniforms_do_not_depend_on_its_neighbours():
    seeds = [7, 0, MAX_SEED, 2**31]
    together = draws(seeds)
    for run, seed in enumerate(seeds):
        np.testing.assert_array_equal(together[..., run], draws(seed))
    np.testing.assert_array_equal(together[..., ::-1], draws(seeds[::-1]))


def test_an_episodes_uniforms_do_not_depend_on_the_size_of_the_batch():
    small, large = draws(7, groups=2, group_size=3), draws(7, groups=4, group_size=8)
    np.testing.assert_array_equal(small.reshape(6, 6), large.reshape(6, 32)[:, :6])


def test_no_two_of_seed_stream_and_iteration_share_their_uniforms():
    """Neither by equality nor by swapping roles: (seed 1, iteration 0) is not (seed 0, iteration 1)."""
    seeds, iterations = [0, 1, 2, 7, 2**31, MAX_SEED], [0, 1, 2, 7, 99, 2**31 - 1]
    batches = [draws(seeds, stream, i)[..., run] for stream in (0, 1) for i in iterations for run in range(6)]
    rows = np.array([batch.ravel() for batch in batches])
    assert len({row.tobytes() for row in rows}) == 2 * 6 * 6
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert abs(correlation).max() < 5 / rows.shape[1] ** 0.5


def test_training_and_evaluation_are_different_streams():
    assert TRAINING != EVALUATION
    assert not np.intersect1d(draws(7, TRAINING)[0], draws(7, EVALUATION)[0]).size > 2


@partial(jax.jit, static_argnames=("stream", "groups", "group_size"))
def sample(policy, seeds, iteration, stream, groups, group_size):
    return rollout.rollout(policy.probs, seeds, iteration, stream=stream, groups=groups, group_size=group_size)


def random_policy(seed: int, scale: float = 1.0) -> Distribution:
    logits = np.random.default_rng(seed).normal(size=(24, 6)) * scale
    return table.distribution(jnp.asarray(logits, jnp.float32))


@pytest.fixture(scope="module")
def many():
    """100,000 episodes of a random policy."""
    policy = random_policy(1)
    return policy, sample(policy, jnp.uint32(7), jnp.int32(3), TRAINING, 100, 1000)


def test_sampled_actions_follow_the_policy_in_every_state(many):
    policy, episodes = many
    states, actions = np.asarray(episodes.states), np.asarray(episodes.actions)
    taken = actions >= 0
    counts = np.zeros((24, 6))
    np.add.at(counts, (states[taken], actions[taken]), 1)
    expected = counts.sum(axis=1, keepdims=True) * np.exp(np.asarray(policy.log_probs, np.float64))
    visited = expected.min(axis=1) > 5
    assert visited.sum() >= 19
    chi_square = ((counts - expected)[visited] ** 2 / expected[visited]).sum()
    assert 1e-3 < stats.chi2.sf(chi_square, 5 * visited.sum()) < 1 - 1e-3


def test_what_is_drawn_at_one_step_says_nothing_about_the_next():
    """Under the uniform policy the pairs of actions at steps 1 and 2, neither of them `finish`, are equally likely."""
    uniform = table.distribution(table.initial_logits())
    actions = np.asarray(sample(uniform, jnp.uint32(11), jnp.int32(0), EVALUATION, 100, 1000).actions)
    both = (actions[0] < 5) & (actions[1] >= 0) & (actions[1] < 5)
    pairs = np.bincount((actions[0] * 5 + actions[1])[both], minlength=25)
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_sampled_episodes_are_what_the_plain_task_makes_of_their_actions(many):
    """In particular nothing is sampled after an end, and the artifact that is graded was handed in."""
    episodes = many[1]
    actions, states = (np.asarray(x)[:, :10].reshape(6, -1).T for x in (episodes.actions, episodes.states))
    lengths = np.asarray(episodes.lengths)[:10].ravel()
    rewards = np.asarray(grade(episodes, jnp.tile(jnp.array([False, True, False, True]), (100, 1))))[:10].ravel()
    for i, row in enumerate(actions):
        played, rest = oracle.play(row), [-1] * (6 - lengths[i])
        assert row.tolist() == played.actions + rest
        assert states[i].tolist() == played.states + [0] * len(rest)
        assert rewards[i] == (played.submitted and played.high_fixed)


def test_the_action_is_the_inverse_of_the_cumulative_policy_at_the_drawn_number():
    policy = random_policy(2)
    cumulative = np.cumsum(np.exp(np.asarray(policy.log_probs, np.float64)), axis=1)[:, :5]
    numbers = draws(5, EVALUATION, 9, 16, 16).reshape(6, -1)
    episodes = sample(policy, jnp.uint32(5), jnp.int32(9), EVALUATION, 16, 16)
    states, actions = (np.asarray(x).reshape(6, -1) for x in (episodes.states, episodes.actions))
    for step, episode in np.argwhere(actions >= 0):
        below = cumulative[states[step, episode]] <= numbers[step, episode]
        assert actions[step, episode] == below.sum()


def test_a_number_at_the_very_end_of_an_actions_share_takes_the_next():
    """Shares are half open: p = 0.25 is drawn by the numbers 0 to 2**22 - 1, of 2**24."""
    numbers = draws(3, groups=1, group_size=4)
    for episode in range(4):
        first = numbers[0, 0, episode]
        for share, taken in ((first, 1), (np.nextafter(first, 1, dtype=np.float32), 0)):
            probs = np.zeros((24, 6), np.float32)
            probs[:, 0], probs[:, 1] = share, 1 - share
            played = rollout.rollout(
                jnp.array(probs), jnp.uint32(3), jnp.int32(0), stream=TRAINING, groups=1, group_size=4
            )
            assert played.actions[0, 0, episode] == taken


def test_an_action_without_probability_is_never_taken():
    logits = np.zeros((24, 6), np.float32)
    logits[:, [0, 3]] = -1e4
    episodes = sample(table.distribution(jnp.array(logits)), jnp.uint32(0), jnp.int32(0), TRAINING, 100, 1000)
    assert set(np.unique(episodes.actions)) == {-1, 1, 2, 4, 5}


def test_a_policy_that_knows_the_repair_does_it_every_time():
    logits = np.zeros((6, 4, 6), np.float32)
    for step, variant, action in [(0, 0, 2), (1, 1, 1), (2, 3, 5)]:
        logits[step, variant, action] = 200.0
    policy = table.distribution(jnp.array(logits.reshape(24, 6)))
    episodes = sample(policy, jnp.uint32(42), jnp.int32(0), TRAINING, 4, 8)
    assert (np.asarray(episodes.actions).reshape(6, -1).T == [2, 1, 5, -1, -1, -1]).all()
    assert (np.asarray(episodes.lengths) == 3).all()
    assert (np.asarray(grade(episodes, jnp.array([[False, False, False, True]] * 4))) == 1).all()


def test_runs_side_by_side_sample_what_each_samples_alone():
    policies, seeds = [random_policy(seed) for seed in range(3)], [7, 7, 19]
    side_by_side = jax.tree.map(lambda *arrays: jnp.stack(arrays, axis=-1), *policies)
    together = sample(side_by_side, jnp.array(seeds, jnp.uint32), jnp.int32(0), TRAINING, 4, 8)
    for run, (policy, seed) in enumerate(zip(policies, seeds, strict=True)):
        alone = sample(policy, jnp.uint32(seed), jnp.int32(0), TRAINING, 4, 8)
        np.testing.assert_array_equal(together.choices[..., run], alone.choices)
        np.testing.assert_array_equal(together.lengths[..., run], alone.lengths)


def played(*episodes) -> jax.Array:
    """Episodes of one group, as they stand in the arrays."""
    padded = [[*actions, *[-1] * (6 - len(actions))] for actions in episodes]
    return episodes_from_actions(jnp.array(padded).T[:, None, :])


ACCEPT_CORRECT = jnp.array([[False, False, False, True]])


def test_only_a_submitted_correct_artifact_earns_a_reward():
    episodes = played(
        [1, 2, 5],  # repaired and submitted
        [5],  # submitted at once
        [1, 5],  # half a repair
        [2, 5],  # the other half
        [1, 2, 3, 5],  # repaired, undone, submitted
        [1, 2, 0, 0, 0, 0],  # repaired, never submitted
        [0, 0, 4, 1, 2, 5],  # just in time
        [0, 0, 0, 4, 1, 2],  # too late
    )
    assert grade(episodes, ACCEPT_CORRECT).tolist() == [[1, 0, 0, 0, 0, 0, 1, 0]]


def test_an_episode_that_never_submits_earns_nothing_even_where_everything_is_accepted():
    episodes = played([1, 2, 0, 0, 0, 0], [0] * 6, [5])
    assert grade(episodes, jnp.ones((1, 4), bool)).tolist() == [[0, 0, 1]]


def test_each_group_is_graded_by_its_own_verdicts():
    actions = jnp.array([[5, -1, -1, -1, -1, -1], [1, 2, 5, -1, -1, -1]]).T[:, None, :].repeat(3, axis=1)
    verdicts = jnp.array([[True, False, False, False], [False, False, False, True], [False, True, True, False]])
    rewards = grade(episodes_from_actions(actions), verdicts)
    assert rewards.dtype == jnp.float32
    assert rewards.tolist() == [[1, 0], [0, 1], [0, 0]]
