"""Means and variances of gradients where groups play different instances: against every batch, and samples."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import walk
from generated import Doors, Generated

from jaxrl_mini import objective
from jaxrl_mini.config import ADVANTAGES, AGGREGATIONS, KLS, Variant
from jaxrl_mini.episodes import play, rollout
from jaxrl_mini.episodes.grounds import grounds
from jaxrl_mini.exact import bias, laws, moments, situations
from jaxrl_mini.objective import own
from jaxrl_mini.objective.advantage import formula
from jaxrl_mini.policies.table import log_probs_of_logits
from jaxrl_mini.tasks.compiled import compile_task
from jaxrl_mini.tasks.specification import load_task

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def logits_of(task, seed=0):
    return np.random.default_rng(seed).normal(size=task.shape)


# Moments, against every batch there is

GROUPS = SIZE = 2


class Batches:
    """Every batch of 2 x 2 episodes of a task: [batch, group, episode], with probabilities."""

    def __init__(self, make):
        self.task = compile_task(make(), "tiny")
        self.log_probs = log_probs_of_logits(logits_of(self.task, seed=3))
        members, group = make().splits["train"], []
        for instance in members:
            every = walk.merged(make, self.task, instance, self.log_probs)
            group += [(one[0] * other[0] / len(members), one, other) for one, other in itertools.product(every, every)]
        rows = list(itertools.product(group, group))
        self.chance = np.array([one[0] * other[0] for one, other in rows])
        played = [[list(one[1:]), list(other[1:])] for one, other in rows]
        self.rewards = np.array([[[float(e[2]) for e in g] for g in batch] for batch in played])
        self.lengths = np.array([[[len(e[1]) for e in g] for g in batch] for batch in played])
        known = {}
        for batch in played:
            for one in itertools.chain(*batch):
                known.setdefault(one[1], self._counts(one[1]))
        self.counts = np.array([[[known[e[1]] for e in g] for g in batch] for batch in played])
        probs = np.exp(self.log_probs)
        self.scores = self.counts - self.counts.sum(axis=-1, keepdims=True) * probs

    def _counts(self, choices):
        counts = np.zeros(self.task.shape)
        for choice in choices:
            counts[choice] += 1
        return counts

    def moments(self, coefficients, terms):
        """Mean and variance of sums over a batch of coefficient * term."""
        values = np.einsum("bge,bgeca->bca", coefficients, terms)
        mean = np.einsum("b,bca->ca", self.chance, values)
        return mean, float(self.chance @ ((values - mean) ** 2).sum(axis=(1, 2)))

    def shares(self, aggregation):
        return {
            "episode-mean": 1 / (self.lengths * GROUPS * SIZE),
            "step-mean": np.broadcast_to(1 / self.lengths.sum(axis=(1, 2), keepdims=True), self.lengths.shape),
            "fixed-length": np.full(self.lengths.shape, 1 / (self.task.max_steps * GROUPS * SIZE)),
        }[aggregation]


TINY = {
    "two hidden": functools.partial(Doors, 2),
    "three hidden": functools.partial(Doors, 3),
    "three shown": functools.partial(Doors, 3, shown=True),
    "with chance": functools.partial(Generated, 7, actions=2, steps=2, places=2, instances=2),
}


@pytest.fixture(scope="module", params=TINY)
def batches(request):
    made = Batches(TINY[request.param])
    assert made.chance.sum() == pytest.approx(1.0, abs=1e-12) and made.rewards.any()
    return made


OWN = """
def odd(reward, successes, size, batch_successes, batch_size):
    return (reward + 1) * (successes + 2) / size - batch_successes**2 / batch_size
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """An advantage that no symmetry makes easy."""
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return own.load_advantage(f"{file}:odd")


def credited(rewards, advantage):
    """By their definitions, rewards[batch, group, episode]."""
    mean, size = rewards.mean(axis=2, keepdims=True), rewards.shape[2]
    total, episodes = rewards.sum(axis=(1, 2), keepdims=True), rewards[0].size
    if advantage == "reinforce":
        return rewards
    if advantage == "rs-sft":
        return np.divide(rewards * episodes, total, out=np.zeros_like(rewards), where=total > 0)
    if advantage == "rloo":
        return rewards - (size * mean - rewards) / (size - 1)
    if advantage not in ADVANTAGES:
        return (rewards + 1) * (size * mean + 2) / size - total**2 / episodes
    scale = {
        "group-std": rewards.std(axis=2, keepdims=True),
        "group-sample-std": rewards.std(axis=2, ddof=1, keepdims=True),
        "batch-std": rewards.std(axis=(1, 2), keepdims=True),
        "maxrl": mean,
    }.get(advantage, np.ones_like(mean))
    return np.divide(rewards - mean, scale, out=np.zeros_like(rewards), where=scale > 0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_means_and_variances_are_those_of_every_batch(batches, odd, aggregation):
    found = laws.laws_of(batches.task, batches.log_probs)
    for advantage in (*ADVANTAGES, odd, "rs-sft"):
        method = "rs-sft" if advantage == "rs-sft" else "grpo"
        variant = Variant("group-std" if method == "rs-sft" else advantage, aggregation)
        coefficients = credited(batches.rewards, advantage) * batches.shares(aggregation)
        mean, variance = batches.moments(coefficients, batches.scores)
        ours = moments.batch_moments(found, GROUPS, SIZE, variant, method)
        np.testing.assert_allclose(ours.mean, mean, atol=1e-13, err_msg=advantage)
        assert ours.variance == pytest.approx(variance, abs=1e-13), advantage


@pytest.mark.parametrize("aggregation", ["episode-mean", "fixed-length"])
@pytest.mark.parametrize("kl", KLS)
def test_the_kl_terms_moments_are_those_of_every_batch(batches, kl, aggregation):
    reference, probs = log_probs_of_logits(logits_of(batches.task, seed=9)), np.exp(batches.log_probs)
    gap = batches.log_probs - reference
    if kl == "exact":
        slope = probs * (gap - (probs * gap).sum(axis=1, keepdims=True))
        terms = batches.counts.sum(axis=-1, keepdims=True) * slope
    else:
        weighted = batches.counts * {"k1": np.ones_like(gap), "k2": gap, "k3": 1 - np.exp(-gap)}[kl]
        terms = weighted - probs * weighted.sum(axis=-1, keepdims=True)
    mean, variance = batches.moments(batches.shares(aggregation), terms)
    found = laws.laws_of(batches.task, batches.log_probs)
    ours = moments.kl_moments(found, reference, kl, aggregation, SIZE)
    np.testing.assert_allclose(ours.mean, mean, atol=1e-13)
    assert ours.variance == pytest.approx(GROUPS * SIZE * variance, abs=1e-13)


def test_means_and_variances_are_those_of_sampled_batches_of_the_training_programs():
    """1,024 batches of 3 x 4 episodes as `train` plays and credits them."""
    task, groups, size = load_task("repair:lines=3"), 3, 4
    logits = 0.7 * logits_of(task, seed=2)
    logits[:, 5] += 0.5  # finishes, and so succeeds in one of eight
    here = grounds(task)
    probs = jnp.repeat(jax.nn.softmax(jnp.asarray(logits, jnp.float32), axis=1)[..., None], 64, axis=-1)
    seeds, drawn = jnp.arange(64, dtype=jnp.uint32), {"stream": rollout.TRAINING, "groups": groups, "group_size": size}
    views, actions = task.width, task.shape[1]

    @functools.partial(jax.jit, static_argnames="variant")
    def gradients(number, variant):
        played = play.play(probs, seeds, number, here.tables, here.members, **drawn)
        rewards = play.grade(played, here.accepted, seeds, number, stream=rollout.TRAINING)
        advantages = objective.advantages(rewards, method="grpo", advantage=variant.advantage)
        credit = objective.play_credit(played, rewards, advantages, variant, views=views, actions=actions)
        by_choice = credit.plus + credit.minus
        return by_choice - probs * by_choice.sum(axis=1, keepdims=True)

    found = laws.laws_of(task, log_probs_of_logits(logits))
    for variant in (Variant(), Variant("batch-std", "step-mean")):
        sampled = [np.asarray(gradients(jnp.int32(number), variant), np.float64) for number in range(16)]
        rows = np.concatenate(sampled, axis=-1).reshape(-1, 16 * 64)
        exact = moments.batch_moments(found, groups, size, variant)
        mean, batches = exact.mean.ravel(), rows.shape[1]
        along = mean @ rows / np.linalg.norm(mean)
        assert abs(along.mean() - np.linalg.norm(mean)) < 4 * along.std() / math.sqrt(batches), variant
        squares = ((rows - mean[:, None]) ** 2).sum(axis=0)
        assert abs(squares.mean() - exact.variance) < 4 * squares.std() / math.sqrt(batches), variant
        assert squares.std() / math.sqrt(batches) < 0.1 * exact.variance


# Objectives


def test_with_a_fixed_length_rloo_follows_mean_success_the_others_ever_closer_to_their_own():
    """On instances of different difficulty; with groups of 256, group-std and maxrl are near their limits."""
    task = compile_task(Doors(3), "doors")
    log_probs = log_probs_of_logits(logits_of(task))
    found = laws.laws_of(task, log_probs)
    gradients = {name: laws.objective_gradient(found, name) for name in laws.OBJECTIVES}
    cosines = np.array([[bias._cosine(one, other) for other in gradients.values()] for one in gradients.values()])
    assert cosines[~np.eye(3, dtype=bool)].max() < 0.999  # the three differ
    follows = {
        "rloo": "success",
        "group-mean": "success",
        "reinforce": "success",
        "group-std": "arcsin",
        "maxrl": "log",
    }
    for advantage, name in follows.items():
        gaps = []
        for size in (4, 16, 64):
            mean = moments.batch_moments(found, 2, size, Variant(advantage, "fixed-length")).mean
            gaps.append(1 - bias._cosine(mean, gradients[name]))
        assert max(gaps) < 1e-12 if name == "success" else gaps[0] > 2 * gaps[1] > 4 * gaps[2], (advantage, gaps)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_an_advantage_weighs_the_gradient_of_each_instance_by_its_success_alone(size):
    """With a fixed length of two: w(p) / 2, as docs/estimators.md has it, and for three of them in closed form."""
    task = compile_task(Doors(3), "doors")
    found = laws.laws_of(task, log_probs_of_logits(logits_of(task)))
    for advantage in ("rloo", "reinforce", "group-mean", "group-std", "group-sample-std", "maxrl"):
        function, weights = formula(advantage), []
        for p in (law.success for law in found):
            chances = [math.comb(size - 1, k) * p**k * (1 - p) ** (size - 1 - k) for k in range(size)]
            margins = [function(1.0, k + 1.0, size) - function(0.0, float(k), size) for k in range(size)]
            weights.append(np.dot(chances, margins))
            closed = {"rloo": 1.0, "group-mean": (size - 1) / size, "maxrl": sum((1 - p) ** j for j in range(size - 1))}
            closed |= {"group-std": 1.0} if size == 2 else {}
            assert weights[-1] == pytest.approx(closed.get(advantage, weights[-1]), abs=1e-12)
        mean = moments.batch_moments(found, 3, size, Variant(advantage, "fixed-length")).mean
        wanted = np.mean([weight * law.gradient / 2 for weight, law in zip(weights, found, strict=True)], axis=0)
        np.testing.assert_allclose(mean, wanted, atol=1e-13)


def test_objectives_are_finite_differences():
    task = compile_task(Doors(3), "doors")
    logits = logits_of(task)
    found = laws.laws_of(task, log_probs_of_logits(logits))
    functions = {"success": lambda p: p, "arcsin": lambda p: np.arcsin(np.sqrt(p)), "log": np.log}
    for name, function in functions.items():
        gradient = laws.objective_gradient(found, name)
        for index in np.ndindex(task.shape):
            step = np.zeros(task.shape)
            step[index] = 1e-5
            up, down = (
                function(situations.by_instance(task, log_probs_of_logits(logits + sign * step), "train")[0]).mean()
                for sign in (1, -1)
            )
            assert gradient[index] == pytest.approx((up - down) / 2e-5, abs=1e-8)


def test_an_instance_that_cannot_succeed_counts_as_nothing():
    class Hopeless(Doors):
        @staticmethod
        def verify(submission, instance):
            return 0.5 * instance

    task = compile_task(Hopeless(2), "hopeless")
    found = laws.laws_of(task, log_probs_of_logits(logits_of(task)))
    for name in laws.OBJECTIVES:
        assert np.isfinite(laws.objective_gradient(found, name)).all()
