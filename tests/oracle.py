"""The experiment once more: one episode, one step, one action at a time, in plain Python and float64 NumPy.

Nothing here comes from the package, and nothing here is clever; the tests compare the package with it.
"""

import math
from typing import NamedTuple

import numpy as np

READ, FIX_LOW, FIX_HIGH, UNDO_LOW, TEST, FINISH = range(6)
MAX_STEPS = 6


class Played(NamedTuple):
    """An episode after its end."""

    states: list[int]
    actions: list[int]
    low_fixed: bool
    high_fixed: bool
    submitted: bool


def play(actions) -> Played:
    """Takes the actions up to the episode's end; whatever comes after it is not even read."""
    low_fixed = high_fixed = False
    states, taken = [], []
    for step in range(MAX_STEPS):
        action = int(actions[step])
        states.append(step * 4 + low_fixed * 2 + high_fixed)
        taken.append(action)
        if action == FINISH:
            return Played(states, taken, low_fixed, high_fixed, True)
        if action == FIX_LOW:
            low_fixed = True
        if action == FIX_HIGH:
            high_fixed = True
        if action == UNDO_LOW:
            low_fixed = False
    return Played(states, taken, low_fixed, high_fixed, False)


def all_action_sequences() -> list[tuple[int, ...]]:
    """Every sequence of actions that ends an episode: 5^0 + ... + 5^5 that submit, and 5^6 that run out of steps."""
    ended, open_ones = [], [()]
    for _ in range(MAX_STEPS):
        ended += [(*sequence, FINISH) for sequence in open_ones]
        open_ones = [(*sequence, action) for sequence in open_ones for action in range(FINISH)]
    return ended + open_ones


def search(low_fixed: bool, high_fixed: bool, values, target: int) -> int | None:
    """A binary search with zero, one or two of its update lines right; None after 2 * len + 4 iterations."""
    low, high = 0, len(values) - 1
    for _ in range(2 * len(values) + 4):
        if low > high:
            return -1
        middle = low + (high - low) // 2
        if values[middle] == target:
            return middle
        if values[middle] < target:
            low = middle + 1 if low_fixed else middle
        else:
            high = middle - 1 if high_fixed else middle
    return None


def passes(low_fixed: bool, high_fixed: bool, arrays) -> bool:
    """The private check: every element, and -41, 41 and 0, in every array."""
    for values in arrays:
        for target in [*values, -41, 41, 0]:
            right = list(values).index(target) if target in values else -1
            if search(low_fixed, high_fixed, values, target) != right:
                return False
    return True


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def expectations(log_probs: np.ndarray, accepted=(0.0, 0.0, 0.0, 1.0)) -> tuple[float, float]:
    """Success probability and mean actions of a policy [24, 6], summed over every action sequence."""
    success = actions = total = 0.0
    for sequence in all_action_sequences():
        episode = play(sequence)
        probability = math.exp(sum(log_probs[s, a] for s, a in zip(episode.states, episode.actions, strict=True)))
        total += probability
        actions += probability * len(episode.actions)
        if episode.submitted:
            success += probability * accepted[2 * episode.low_fixed + episode.high_fixed]
    assert abs(total - 1.0) < 1e-9
    return success, actions


def group_advantages(rewards: np.ndarray, advantage: str = "group-std") -> np.ndarray:
    """rewards[group, episode], one episode at a time, as the papers write it; 0 in a group without differences."""
    rewards = rewards.astype(np.float64)
    out = np.zeros(rewards.shape)
    for g, e in np.ndindex(rewards.shape):
        group, others = rewards[g], np.delete(rewards[g], e)
        if advantage == "reinforce":
            out[g, e] = group[e]
        elif advantage == "rloo":
            out[g, e] = group[e] - others.mean()
        elif len(set(group)) > 1:
            scale = {
                "group-std": group.std(),
                "group-sample-std": group.std(ddof=1),
                "group-mean": 1.0,
                "batch-std": rewards.std(),
                "maxrl": group.mean(),
            }[advantage]
            out[g, e] = (group[e] - group.mean()) / scale
    return out


class Step(NamedTuple):
    """A loss, its gradient with respect to the logits [24, 6], and what is logged beside it."""

    loss: float
    gradient: np.ndarray
    mean_kl: float
    outside: float
    entropy: float


def grpo_step(logits, behavior, reference, actions, advantages, clip, beta) -> Step:
    """The clipped surrogate with exact KL of a batch actions[group, episode, 6]; the policies are log-probabilities."""
    log_probs = log_softmax(logits)
    loss, gradient = 0.0, np.zeros_like(log_probs)
    kls, outside, entropies = [], [], []
    episodes = actions.shape[0] * actions.shape[1]
    for g, e in np.ndindex(actions.shape[:2]):
        episode, advantage = play(actions[g, e]), float(advantages[g, e])
        weight = 1.0 / (len(episode.actions) * episodes)
        for state, action in zip(episode.states, episode.actions, strict=True):
            p = np.exp(log_probs[state])
            ratio = math.exp(log_probs[state, action] - behavior[state, action])
            clipped = min(max(ratio, 1.0 - clip), 1.0 + clip)
            kl = float(np.sum(p * (log_probs[state] - reference[state])))
            loss += weight * (-min(ratio * advantage, clipped * advantage) + beta * kl)
            if ratio * advantage <= clipped * advantage:
                chosen = np.eye(6)[action]
                gradient[state] -= weight * advantage * ratio * (chosen - p)
            gradient[state] += weight * beta * p * (log_probs[state] - reference[state] - kl)
            kls.append(kl)
            outside.append(ratio < 1.0 - clip or ratio > 1.0 + clip)
            entropies.append(-float(np.sum(p * log_probs[state])))
    return Step(loss, gradient, float(np.mean(kls)), float(np.mean(outside)), float(np.mean(entropies)))


def sft_step(logits, behavior, reference, actions, rewards, clip) -> Step:
    """Negative log-likelihood: mean over an episode's actions, then over the successful episodes; 0 without any."""
    log_probs = log_softmax(logits)
    logged = grpo_step(logits, behavior, reference, actions, np.zeros(rewards.shape), clip, 0.0)
    loss, gradient = 0.0, np.zeros_like(log_probs)
    kept = [play(actions[index]) for index in np.ndindex(rewards.shape) if rewards[index] == 1]
    for episode in kept:
        weight = 1.0 / (len(episode.actions) * len(kept))
        for state, action in zip(episode.states, episode.actions, strict=True):
            loss -= weight * log_probs[state, action]
            gradient[state] -= weight * (np.eye(6)[action] - np.exp(log_probs[state]))
    return logged._replace(loss=loss, gradient=gradient)


class Adam:
    """Adam after a global norm clip at 1, as Kingma and Ba (2015) write it."""

    def __init__(self) -> None:
        self.first = self.second = np.zeros((24, 6))
        self.count = 0

    def step(self, logits: np.ndarray, gradient: np.ndarray, lr: float) -> np.ndarray:
        norm = math.sqrt(float(np.sum(gradient**2)))
        gradient = gradient * min(1.0, 1.0 / (norm + 1e-6))
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        first = self.first / (1 - 0.9**self.count)
        second = self.second / (1 - 0.999**self.count)
        return logits - lr * first / (np.sqrt(second) + 1e-8)


def update(logits, adam: Adam, reference, actions, rewards, config) -> tuple[np.ndarray, Step | None]:
    """All optimizer steps on one batch; returns the logits and what the last step started from."""
    logits = np.asarray(logits, np.float64)
    behavior, step = log_softmax(logits), None
    for _ in range(config["epochs"]):
        if config["method"] == "grpo":
            advantages = group_advantages(rewards)
            step = grpo_step(logits, behavior, reference, actions, advantages, config["clip"], config["beta"])
        else:
            step = sft_step(logits, behavior, reference, actions, rewards, config["clip"])
            if not rewards.any():
                continue
        logits = adam.step(logits, step.gradient, config["lr"])
    return logits, step
