"""Rewards that should worry you do what they say, and teach what they should not."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxrl_mini.config import Config
from jaxrl_mini.episodes import play, rewards, rollout
from jaxrl_mini.learning import metrics
from jaxrl_mini.learning.block import BLOCK, Block, settings_of, sizes_of


def block_of(reward: str, runs: int, **settings) -> Block:
    config = Config(reward=reward, **settings)
    return Block(sizes_of(config), np.arange(runs), settings_of([config] * runs))


def trained(block: Block, iterations: int) -> Block:
    while block.iteration < iterations:
        block.advance(20)
    return block


def test_a_constant_reward_never_moves_the_parameters_whatever_the_beta():
    betas = [0.0, 1e-6, 0.02, 0.3, 1.0, 50.0, 1e6]
    config = Config(reward="constant")
    configs = [dataclasses.replace(config, beta=beta) for beta in betas]
    block = trained(Block(sizes_of(config), np.arange(len(betas)), settings_of(configs)), 100)
    assert block.logits().tobytes() == np.zeros((24, 6, len(betas)), np.float32).tobytes()


def exact_rates(block: Block, accepted) -> np.ndarray:
    log_probs = [oracle.log_softmax(block.logits()[..., run]) for run in range(block.runs)]
    return np.array([oracle.expectations(one, accepted)[0] for one in log_probs])


def test_the_public_test_teaches_to_submit_broken_code():
    block = trained(block_of("public-test", 16), 100)
    assert exact_rates(block, (1, 1, 1, 1)).mean() > 0.98
    assert exact_rates(block, (0, 0, 0, 1)).mean() < 0.12


def test_rewards_are_what_they_say():
    """64 runs of one batch: verdicts permuted, flipped, or replaced; the rate of true successes stays beside them."""
    counts = {}
    for reward in ("shuffled", "noisy:0.3", "public-test"):
        block = block_of(reward, BLOCK)
        log, logits = block.record(np.arange(1))
        history = metrics.history_of(log, logits, np.arange(1), block.settings, block.sizes)
        actions = np.moveaxis(log.episodes.actions, 0, -1)[0]  # [group, episode, run, step]
        played = [oracle.play(row) for row in actions.reshape(-1, 6)]
        solved = np.array([e.submitted and e.low_fixed and e.high_fixed for e in played]).reshape(4, 8, BLOCK)
        submitted = np.array([e.submitted for e in played]).reshape(4, 8, BLOCK)
        np.testing.assert_allclose(history["train_success_rate"][0], solved.mean(axis=(0, 1)))
        np.testing.assert_allclose(history["mean_reward"][0], log.rewards[0].mean(axis=(0, 1)))
        counts[reward] = (log.rewards[0] > 0, solved, submitted)
    given, solved, _ = counts["shuffled"]
    np.testing.assert_array_equal(given.sum(axis=(0, 1)), solved.sum(axis=(0, 1)))
    assert (given & solved).sum() < 0.3 * solved.sum()
    given, solved, _ = counts["noisy:0.3"]
    assert (given != solved).mean() == pytest.approx(0.3, abs=4.5 * math.sqrt(0.21 / given.size))
    given, _, submitted = counts["public-test"]
    np.testing.assert_array_equal(given, submitted)


def test_a_batch_is_graded_by_the_verdicts_of_its_own_iteration():
    """Of those of a chunk of three iterations; every episode submits what it was given."""
    episodes = rollout.episodes_from_actions(jnp.full((6, 2, 1), 5).at[1:].set(-1))
    verdicts = np.zeros((3, 2, 4), bool)
    verdicts[1, 0, 0] = verdicts[2, 1, 0] = True
    graded = [
        rewards.rewards_of(episodes, verdicts, jnp.uint32(0), 6 + iteration, reward="verifier")[:, 0].tolist()
        for iteration in range(3)
    ]
    assert graded == [[0, 0], [1, 0], [0, 1]]


def test_all_streams_of_random_numbers_differ():
    streams = [rewards.STREAM]
    for stream in (rollout.TRAINING, rollout.EVALUATION):
        streams += [stream, *(stream + name for name in (play.CHANCE, play.INSTANCE, play.VERDICT))]
    assert len({*streams}) == 9


def test_the_chance_of_a_noisy_reward_by_hand():
    passed = np.array([0.0, 0.25, 1.0])
    np.testing.assert_allclose(rewards.rewarded(passed, reward="noisy:0.3"), [0.3, 0.25 * 0.7 + 0.75 * 0.3, 0.7])
    by_outcome = rewards.success_by_outcome(np.array([0.0, 0.0, 0.0, 1.0]), reward="noisy:0.1")
    np.testing.assert_allclose(by_outcome, [0.1, 0.1, 0.1, 0.9, 0.1])
