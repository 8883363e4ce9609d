"""Success and actions per episode: exact, against full enumeration; sampled, against exact; and their intervals."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from scipy import stats

from jaxrl_mini.episodes import intervals
from jaxrl_mini.episodes.intervals import mean_interval, success_interval
from jaxrl_mini.exact import success
from jaxrl_mini.learning import evaluation
from jaxrl_mini.learning.block import BLOCK
from jaxrl_mini.learning.evaluation import CHUNK, Evaluation
from jaxrl_mini.policies import table

UNIFORM_SUCCESS = 0.06526491769547325
UNIFORM_ACTIONS = 3.9906121399176955
ONLY_CORRECT = np.array([False, False, False, True])


@jax.jit
def compiled_exact(logits, accepted):
    return success.exact(table.distribution(logits).log_probs, accepted)


def exact(logits, accepted=(0.0, 0.0, 0.0, 1.0)) -> tuple[float, float]:
    return tuple(map(float, compiled_exact(jnp.asarray(logits), jnp.asarray(accepted, logits.dtype))))


def test_uniform_play_in_float64():
    with jax.enable_x64(True):
        assert exact(np.zeros((24, 6))) == pytest.approx((UNIFORM_SUCCESS, UNIFORM_ACTIONS), abs=1e-12)


def test_uniform_play_in_float32():
    success, actions = exact(np.zeros((24, 6), np.float32))
    assert success == pytest.approx(UNIFORM_SUCCESS, abs=1e-6)
    assert actions == pytest.approx(UNIFORM_ACTIONS, abs=1e-6)


def test_the_oracle_knows_uniform_play_too():
    assert oracle.expectations(np.full((24, 6), -np.log(6))) == pytest.approx(
        (UNIFORM_SUCCESS, UNIFORM_ACTIONS), abs=1e-12
    )


@pytest.mark.parametrize("seed", range(5))
def test_random_policies_against_the_sum_over_all_19_531_action_sequences(seed):
    logits = np.random.default_rng(seed).normal(size=(24, 6)) * (seed + 0.5)
    with jax.enable_x64(True):
        assert exact(logits) == pytest.approx(oracle.expectations(oracle.log_softmax(logits)), abs=1e-12)


def test_success_counts_an_artifact_by_the_share_of_inputs_that_accept_it():
    logits, accepted = np.random.default_rng(9).normal(size=(24, 6)), (0.125, 0.5, 0.25, 0.75)
    with jax.enable_x64(True):
        expected = oracle.expectations(oracle.log_softmax(logits), accepted)
        assert exact(logits, accepted) == pytest.approx(expected, abs=1e-12)


def test_policies_worked_out_by_hand():
    """One that repairs and submits takes 3 actions; one that never submits 6; one that submits at once 1."""
    repair, never, at_once = (np.zeros((6, 4, 6), np.float32) for _ in range(3))
    for step, variant, action in [(0, 0, 1), (1, 2, 2), (2, 3, 5)]:
        repair[step, variant, action] = 1e3
    never[:, :, 0] = at_once[:, :, 5] = 1e3
    for logits, expected in [(repair, (1, 3)), (never, (0, 6)), (at_once, (0, 1))]:
        assert exact(logits.reshape(24, 6)) == expected


def test_runs_side_by_side_have_the_expectations_of_each_alone():
    logits = np.random.default_rng(3).normal(size=(24, 6, 4)).astype(np.float32)
    together = compiled_exact(jnp.asarray(logits), jnp.array([0.0, 0.0, 0.0, 1.0]))
    for run in range(4):
        alone = exact(logits[..., run])
        assert (together.success_rate[run], together.mean_actions[run]) == pytest.approx(alone, rel=1e-6)


# Sampled


@pytest.fixture(scope="module")
def sampled(grpo_run, sft_run) -> list[Evaluation]:
    """100,000 episodes of each of 64 policies: the uniform one, two trained ones, and random ones."""
    rng = np.random.default_rng(0)
    trained = [np.asarray(run.logits).reshape(-1, 24, 6)[-1] for run in (grpo_run, sft_run)]
    policies = [np.zeros((24, 6)), *trained, *(rng.normal(size=(24, 6)) * rng.uniform(0, 2) for _ in range(BLOCK - 3))]
    logits = jnp.asarray(np.stack(policies, axis=-1), jnp.float32)
    return evaluation.evaluate(logits, jnp.arange(BLOCK, dtype=jnp.uint32), np.tile(ONLY_CORRECT, (100_000, 1)))


def test_100_000_sampled_episodes_agree_with_the_exact_figures(sampled):
    """For the uniform policy, a trained one of each method, and 61 random ones: all within four standard errors."""
    for one in sampled:
        assert one.episodes == 100_000
        error = (one.exact_success_rate * (1 - one.exact_success_rate) / one.episodes) ** 0.5
        assert abs(one.success_rate - one.exact_success_rate) < 4 * error + 1e-9
        low, high = one.mean_actions_interval
        assert abs(one.mean_actions - one.exact_mean_actions) < 4 * (high - low) / (2 * 1.96)


@pytest.mark.parametrize("policy", [0, 1, 2])
def test_the_exact_figures_of_uniform_and_trained_policies_lie_in_the_sampled_intervals(sampled, policy):
    one = sampled[policy]
    low, high = one.success_rate_interval
    assert low < one.exact_success_rate < high
    low, high = one.mean_actions_interval
    assert low < one.exact_mean_actions < high


def test_intervals_cover_their_exact_twins_about_95_times_in_100(sampled):
    def covered(interval, value) -> bool:
        return interval[0] <= value <= interval[1]

    successes = sum(covered(one.success_rate_interval, one.exact_success_rate) for one in sampled)
    actions = sum(covered(one.mean_actions_interval, one.exact_mean_actions) for one in sampled)
    assert stats.binom.cdf(successes, BLOCK, 0.95) > 1e-3
    assert stats.binom.cdf(actions, BLOCK, 0.95) > 1e-3
    assert min(successes, actions) < BLOCK  # and they are not simply wide


def evaluate_uniform(episodes: int, seed: int = 7) -> Evaluation:
    seeds = jnp.full(BLOCK, seed, jnp.uint32)
    return evaluation.evaluate(table.initial_logits((BLOCK,)), seeds, np.tile(ONLY_CORRECT, (episodes, 1)))[0]


def test_episodes_beyond_the_last_asked_for_are_not_counted():
    """Also across the border of a chunk: one episode more adds one episode's actions."""
    totals = {n: evaluate_uniform(n) for n in (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2)}
    for n, one in totals.items():
        assert one.episodes == n
        assert n <= one.actions <= 6 * n
        assert one.actions**2 / n <= one.squared_actions + 1e-9 <= 36 * n + 1e-9
    for n in (2, CHUNK, CHUNK + 1, CHUNK + 2):
        added = totals[n].actions - totals[n - 1].actions
        assert 1 <= added <= 6
        assert totals[n].squared_actions - totals[n - 1].squared_actions == added**2
        assert totals[n].successes - totals[n - 1].successes in (0, 1)


def test_chunks_of_evaluation_episodes_are_different_episodes():
    first, both = evaluate_uniform(CHUNK), evaluate_uniform(2 * CHUNK)
    assert both.actions != 2 * first.actions and both.squared_actions != 2 * first.squared_actions


def test_the_evaluation_stream_is_fixed_and_the_seeds_own():
    assert evaluate_uniform(500) == evaluate_uniform(500)
    assert len({evaluate_uniform(500, seed).actions for seed in range(5)}) > 1


def test_before_training_the_record_shows_the_uniform_policy(grpo_run):
    assert grpo_run.before.exact_success_rate == pytest.approx(UNIFORM_SUCCESS, abs=1e-6)
    assert grpo_run.before.exact_mean_actions == pytest.approx(UNIFORM_ACTIONS, abs=1e-6)
    assert grpo_run.before == evaluate_uniform(500)


def test_each_evaluation_episode_is_graded_by_its_own_inputs():
    """Where only every other episode accepts anything, about half of the submissions succeed."""
    everything, nothing = np.ones((1_000, 4), bool), np.zeros((1_000, 4), bool)
    every_other = np.where(np.arange(1_000)[:, None] % 2, everything, nothing)
    seeds, logits = jnp.full(BLOCK, 7, jnp.uint32), table.initial_logits((BLOCK,))
    all_of, half, none = (
        evaluation.evaluate(logits, seeds, verdicts)[0] for verdicts in (everything, every_other, nothing)
    )
    assert none.successes == 0 and none.exact_success_rate == 0
    assert all_of.exact_success_rate == pytest.approx(2 * half.exact_success_rate, abs=1e-6)
    assert abs(half.successes - all_of.successes / 2) < 4 * (all_of.successes / 4) ** 0.5


# Intervals


@pytest.mark.parametrize(
    ("successes", "episodes"), [(0, 1), (1, 1), (0, 500), (500, 500), (1, 500), (33, 500), (498, 500), (7, 13)]
)
def test_the_success_interval_is_wilsons(successes, episodes):
    expected = stats.binomtest(successes, episodes).proportion_ci(0.95, method="wilson")
    assert success_interval(successes, episodes) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_quantile_is_that_of_the_confidence():
    assert stats.norm.ppf((1 + intervals.CONFIDENCE) / 2) == intervals.NORMAL_QUANTILE


def test_the_success_interval_has_a_width_even_where_everything_succeeds():
    low, high = success_interval(500, 500)
    assert (round(low, 5), high) == (0.99238, 1.0)


@pytest.mark.parametrize("episodes", [1, 3, 6, 7, 500, 2999])
def test_the_success_interval_ends_at_0_and_1_exactly(episodes):
    """And nowhere beyond, whatever is rounded."""
    bounds = [success_interval(successes, episodes) for successes in range(episodes + 1)]
    assert (bounds[0][0], bounds[-1][1]) == (0.0, 1.0)
    assert all(0 < low < high for low, high in bounds[1:]) and all(low < high < 1 for low, high in bounds[:-1])


@pytest.mark.parametrize("count", [2, 3, 10, 500])
def test_the_interval_of_the_mean_is_students(count):
    lengths = np.random.default_rng(count).integers(1, 7, count)
    error = lengths.std(ddof=1) / count**0.5
    expected = stats.t.interval(0.95, count - 1, loc=lengths.mean(), scale=error)
    ours = mean_interval(int(lengths.sum()), int((lengths**2).sum()), count)
    assert ours == pytest.approx(expected, abs=1e-9)


def test_one_observation_has_no_interval_and_equal_ones_none_wide():
    assert mean_interval(3, 9, 1) is None
    assert mean_interval(30, 90, 10) == (3.0, 3.0)
