"""The same experiment as a plain eager PyTorch program: what the JAX version is compared with.

It is written as such programs usually are: episodes are played one after the other, a policy call per step, the
verifier runs the search in Python, and the update is a batch of padded episodes. Run it as a process:
``python -m benchmarks.pytorch_loop --seed 7``. Needs torch, which nothing else in this project does.
"""

import argparse
import json
import random

import torch

ACTIONS = ("read", "fix_low", "fix_high", "undo_low", "test", "finish")
FINISH = ACTIONS.index("finish")
STEPS = 6


def search(low_fixed, high_fixed, values, target):
    low, high = 0, len(values) - 1
    for _ in range(2 * len(values) + 4):
        if low > high:
            return -1
        mid = (low + high) // 2
        if values[mid] == target:
            return mid
        if values[mid] < target:
            low = mid + low_fixed
        else:
            high = mid - high_fixed
    return None


def verify(low_fixed, high_fixed, name):
    generator = random.Random(name)
    arrays = [[], [1], [1, 3], [-2, 0, 4]]
    arrays += [sorted(generator.sample(range(-40, 41), generator.randint(1, 13))) for _ in range(12)]
    for values in arrays:
        for target in [*values, -41, 41, 0]:
            expected = values.index(target) if target in values else -1
            if search(low_fixed, high_fixed, values, target) != expected:
                return False
    return True


def play(logits, generator):
    low_fixed = high_fixed = submitted = False
    states, actions, log_probs = [], [], []
    for step in range(STEPS):
        state = step * 4 + low_fixed * 2 + high_fixed
        distribution = torch.log_softmax(logits[state], dim=-1)
        action = int(torch.multinomial(distribution.exp(), 1, generator=generator))
        states.append(state)
        actions.append(action)
        log_probs.append(float(distribution[action]))
        if action == 1:
            low_fixed = True
        elif action == 2:
            high_fixed = True
        elif action == 3:
            low_fixed = False
        elif action == FINISH:
            submitted = True
            break
    return states, actions, log_probs, (low_fixed, high_fixed, submitted)


@torch.no_grad()
def evaluate(logits, episodes, seed):
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    successes = steps = 0
    for episode in range(episodes):
        _, actions, _, (low_fixed, high_fixed, submitted) = play(logits, generator)
        successes += submitted and verify(low_fixed, high_fixed, f"evaluation {episode}")
        steps += len(actions)
    return {"episodes": episodes, "success_rate": successes / episodes, "mean_actions": steps / episodes}


def padded(rows, fill, dtype):
    return torch.tensor([row + [fill] * (STEPS - len(row)) for row in rows], dtype=dtype)


def train(seed, iterations, groups, group_size, epochs, lr, clip, beta):
    logits = torch.zeros(24, 6, requires_grad=True)
    reference = torch.log_softmax(logits.detach().clone(), dim=-1)
    optimizer = torch.optim.Adam([logits], lr=lr)
    generator = torch.Generator().manual_seed(seed)
    before = evaluate(logits, 500, seed)
    for iteration in range(iterations):
        episodes, rewards = [], torch.zeros(groups, group_size)
        with torch.no_grad():
            for group in range(groups):
                for member in range(group_size):
                    *episode, (low_fixed, high_fixed, submitted) = play(logits, generator)
                    passed = submitted and verify(low_fixed, high_fixed, f"training {iteration} {group}")
                    rewards[group, member] = float(passed)
                    episodes.append(episode)
        deviation = rewards - rewards.mean(dim=1, keepdim=True)
        spread = rewards.std(dim=1, keepdim=True, correction=0)
        advantages = torch.where(spread > 0, deviation / spread.clamp_min(1e-12), 0.0).reshape(-1, 1)
        states = padded([episode[0] for episode in episodes], 0, torch.long)
        actions = padded([episode[1] for episode in episodes], -1, torch.long)
        old = padded([episode[2] for episode in episodes], 0.0, torch.float32)
        mask = (actions >= 0).float()
        for _ in range(epochs):
            log_probs = torch.log_softmax(logits[states], dim=-1)
            taken = log_probs.gather(-1, actions.clamp_min(0)[..., None])[..., 0]
            ratio = (taken - old).exp()
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
            kl = (log_probs.exp() * (log_probs - reference[states])).sum(dim=-1)
            loss = (((beta * kl - surrogate) * mask).sum(dim=1) / mask.sum(dim=1)).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([logits], 1.0)
            optimizer.step()
    return before, evaluate(logits, 500, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before, after = train(arguments.seed, arguments.iterations, 4, 8, 2, 0.08, 0.2, 0.02)
    print(json.dumps({"before": before, "after": after}))
