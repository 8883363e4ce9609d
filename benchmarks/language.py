"""The language-model policy's speed, memory and compilation: ``python -m benchmarks.language [--size small] ...``.

Prints a JSON object per measure, and appends it to a file if asked (--output). Everything is compared in one process
on the same arrays, compiled beforehand and waited for; a figure is the median of some repetitions, with the fastest
and slowest beside it. `packed` asks a whole episode in one row behind the shared opening; `plain` gives every prompt
and candidate a row of its own; `recomputed` plays an episode by scoring the packed row anew at every step. Runs
unchanged on a GPU.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_mini import objective
from jaxrl_mini.exact.expectations import expectations
from jaxrl_mini.learning import language_episodes, language_training, training
from jaxrl_mini.learning.language_episodes import Batch
from jaxrl_mini.machine.hardware import cores
from jaxrl_mini.policies.gpt2 import GPT2, GPT2Config
from jaxrl_mini.policies.language import LanguagePolicy, draw, load_policy
from jaxrl_mini.policies.pretrained import Checkpoint, save_checkpoint
from jaxrl_mini.policies.scenes import HISTORIES_AT_ONCE, Prompts, Start, in_chunks, reading, scene
from jaxrl_mini.tasks.histories import histories
from jaxrl_mini.tasks.repair import ACTIONS, MAX_STEPS
from jaxrl_mini.tiny_model import make_tiny_model

SIZES = {
    "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 2},
    "small": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
}
PLAIN_ACTIONS = {"tiny": 1000, "small": 6}
"""Actions whose plain rows are scored at once, at most: the logits of more would not fit in memory."""
MEASURES = ("packed", "rollout", "iteration", "exact", "memory", "pytorch")


def model(size: str, dtype: str) -> tuple[LanguagePolicy, Checkpoint]:
    """A random network of the size, with the word tokenizer of tiny models."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder) / "model", layers=1, width=8)
        policy, checkpoint = load_policy(Path(folder) / "model")
    config = GPT2Config(**{**vars(checkpoint.config), **SIZES[size]})
    network, params = nnx.split(GPT2(config, jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    written = json.loads(checkpoint.companions["config.json"]) | vars(config)
    companions = {**checkpoint.companions, "config.json": json.dumps(written).encode()}
    remade = Checkpoint(config, network, params, checkpoint.encode, checkpoint.end_of_text, companions)
    return LanguagePolicy(network, policy.task), remade


def timed(function: Callable[..., Any], *arguments: Any, repetitions: int) -> tuple[dict[str, float], Any]:
    """Compiles, runs once, then measures; also what the function returns."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    compile_seconds = time.perf_counter() - start
    returned = jax.block_until_ready(compiled(*arguments))
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
    figures = {"seconds": statistics.median(seconds), "fastest": min(seconds), "slowest": max(seconds)}
    figures["compile_seconds"] = compile_seconds
    return {name: round(value, 5) for name, value in figures.items()}, returned


def random_episodes(policy: LanguagePolicy, count: int, seed: int = 0) -> Batch:
    """Uniform play."""
    actions = np.random.default_rng(seed).integers(0, len(ACTIONS), (MAX_STEPS, count, 1))
    finish = actions == ACTIONS.index("finish")
    taken = np.where(np.cumsum(finish, axis=0) - finish > 0, -1, actions)
    return language_episodes.replayed(policy.task.task, taken)


def plain_rows(policy: LanguagePolicy, end_of_text: int, batch: Batch) -> tuple[np.ndarray, ...]:
    """A row of tokens per action taken and candidate, padded at its end, and where its candidate starts and ends."""
    task, tree = policy.task, policy.task.tree
    candidates = [[int(token) for token in tree.edge_tokens[path > 0]] for path in tree.paths]
    rows, starts, live = [], [], []
    for episode, actions in enumerate(language_episodes.taken(batch, len(ACTIONS)).T):
        prompt = task.openings[0].tolist()
        for step in range((actions >= 0).sum()):
            if step:
                segment = batch.played.prompts.segments[step - 1, episode]
                prompt = prompt + task.segments[segment][-task.lengths[segment] :].tolist()
            live.append((step, episode))
            rows += [prompt + candidate for candidate in candidates]
            starts += [len(prompt)] * len(candidates)
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, np.array(starts), np.array([len(ids) for ids in rows]), np.array(live).T


def plain_log_probs(network: Any, params: Any, tokens: Any, starts: Any, ends: Any) -> Any:
    """[action taken, candidate], from rows of `plain_rows`."""
    rows, width = tokens.shape
    module = nnx.merge(network, params)
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    hidden, _ = module(tokens, positions, jnp.broadcast_to(jnp.tri(width, dtype=bool), (rows, width, width)))
    log_probs = jax.nn.log_softmax(module.logits(hidden[:, :-1]))
    each = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2)[..., 0]
    index = jnp.arange(1, width)
    scored = (index >= starts[:, None]) & (index < ends[:, None])
    return jax.nn.log_softmax(jnp.where(scored, each, 0).sum(axis=1).reshape(-1, len(ACTIONS)))


def measure_packed(
    policy: LanguagePolicy, checkpoint: Checkpoint, episodes: int, repetitions: int, at_once: int
) -> dict[str, Any]:
    """Forward and backward over some episodes: packed against plain, which scores so many actions at once."""
    batch = random_episodes(policy, episodes)
    tokens, starts, ends, live = plain_rows(policy, checkpoint.end_of_text, batch)
    taken = live.shape[1]
    parts = taken // max(size for size in range(1, at_once + 1) if taken % size == 0)

    def plain(params: Any, *rows: Any) -> Any:
        return plain_log_probs(checkpoint.network, params, *rows)

    def packed(params: Any, prompts: Any) -> Any:
        return policy.log_probs(params, prompts)[tuple(live)]

    def gradient(function: Any) -> Any:
        def summed(params: Any, *rest: Any) -> tuple[Any, Any]:
            log_probs = function(params, *rest)
            return log_probs.sum(), log_probs

        return jax.grad(summed, has_aux=True)

    def plain_gradient(params: Any, *rows: Any) -> Any:
        def add(total: Any, part: Any) -> tuple[Any, Any]:
            more, log_probs = gradient(plain)(params, *part)
            return jax.tree.map(jnp.add, total, more), log_probs

        total, log_probs = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), rows)
        return total, log_probs.reshape(taken, -1)

    params, rows = checkpoint.params, [array.reshape(parts, -1, *array.shape[1:]) for array in (tokens, starts, ends)]
    slow, (_, slow_log_probs) = timed(plain_gradient, params, *rows, repetitions=max(1, repetitions // 3))
    fast, (_, fast_log_probs) = timed(gradient(packed), params, batch.played.prompts, repetitions=repetitions)
    difference = jnp.abs(slow_log_probs - fast_log_probs).max()
    speedup = round(slow["seconds"] / fast["seconds"], 2)
    return {"speedup": speedup, "max_difference": float(difference), "packed": fast, "plain": slow}


def measure_rollout(policy: LanguagePolicy, checkpoint: Checkpoint, episodes: int, repetitions: int) -> dict[str, Any]:
    """Playing episodes: with the key/value cache, and scoring the packed rows anew at every step."""
    here, nothing = jax.tree.map(jnp.asarray, scene(policy.task.task)), len(policy.task.lengths) - 1
    rows, first = here.next_row.shape[1], np.zeros(episodes, np.int32)

    def recomputed(params: Any, uniforms: Any) -> Any:
        row, shown = jnp.asarray(first), jnp.full((MAX_STEPS, episodes), nothing)
        for step in range(MAX_STEPS):
            action = draw(policy.log_probs(params, Prompts(first, shown[:-1]))[step], uniforms[step])
            place = step, jnp.minimum(row, rows - 1), action, 0
            shown = shown.at[step].set(jnp.where(row < rows, here.segment[place], nothing))
            row = jnp.where(row < rows, here.next_row[place], rows)
        return shown[:-1]

    def cached(params: Any, uniforms: Any) -> Any:
        played, _ = policy.sample(params, here, Start(first, first, uniforms, None))
        return played.prompts.segments

    uniforms = jax.random.uniform(jax.random.key(0), (MAX_STEPS, episodes))
    slow, shown = timed(recomputed, checkpoint.params, uniforms, repetitions=max(1, repetitions // 3))
    fast, same = timed(cached, checkpoint.params, uniforms, repetitions=repetitions)
    assert (np.asarray(shown) == np.asarray(same)).mean() > 0.99, "the two play other episodes"
    return {"speedup": round(slow["seconds"] / fast["seconds"], 2), "cached": fast, "recomputed": slow}


def measure_iteration(policy: LanguagePolicy, checkpoint: Checkpoint, repetitions: int) -> dict[str, Any]:
    """Whole iterations of 4 groups of 8 episodes with two optimizer steps, from the random policy."""
    sizes = training.Sizes("grpo", groups=4, group_size=8, epochs=2)
    settings = training.Settings(*map(jnp.float32, (1e-3, 0.2, 0.02)))
    state = training.initial_state(jax.tree.map(jnp.copy, checkpoint.params))
    seconds = []
    for number in range(repetitions + 1):
        start = time.perf_counter()
        state = iteration(policy, state, sizes, settings, number)
        seconds.append(time.perf_counter() - start)
    first, *rest = seconds
    figures = {"seconds": statistics.median(rest), "fastest": min(rest), "slowest": max(rest), "first_seconds": first}
    return {name: round(value, 4) for name, value in figures.items()}


def iteration(policy: LanguagePolicy, state: Any, sizes: Any, settings: Any, number: int) -> Any:
    """One iteration with a uniform reference policy; returns the state after it, computed."""
    task, seed, batch = policy.task.task, np.array(7, np.uint32), sizes.groups * sizes.group_size
    found, uniform = histories(task), -np.log(len(ACTIONS))
    assert found is not None
    reference = language_training.Reference(np.full((found.size, len(ACTIONS)), uniform, np.float32), None)
    shape = {"groups": sizes.groups, "group_size": sizes.group_size}
    episodes, behavior = language_episodes.sample(policy, state.params, seed, number, **shape)
    prompts = episodes.played.prompts
    merged = objective.merge([episodes.played.choices], batch)
    state, *_ = language_training.learn(
        policy,
        state,
        reference,
        found.numbers(prompts.openings, prompts.segments)[:, merged.first],
        merged,
        episodes,
        language_episodes.grade(task, episodes, seed, number),
        behavior,
        settings,
        sizes=sizes,
        micro_batch=language_training.MICRO_BATCH,
    )
    return jax.block_until_ready(state)


def measure_exact(policy: LanguagePolicy, checkpoint: Checkpoint, repetitions: int) -> dict[str, Any]:
    """Exact evaluation: over all histories, over those that can succeed, and a sampled estimate of 20,000 episodes."""
    figures: dict[str, Any] = {}
    found, count = histories(policy.task.task), 20_000
    assert found is not None
    laid = reading(found)
    for name, wanted in (("all", np.ones(found.size, bool)), ("can_succeed", found.can_succeed([0]))):
        order = in_chunks(found, wanted, laid.waves, HISTORIES_AT_ONCE)
        reads = partial(policy.history_log_probs, room=laid.room)
        read = checkpoint.params, laid.pages, order, np.int32(len(order))
        figures[name], log_probs = timed(reads, *read, repetitions=repetitions)
        figures[name] |= {"histories": int(wanted.sum()), "success": expectations(found, log_probs).success}
    successes, *_ = language_episodes.evaluate(policy, checkpoint.params, "train", np.array(0, np.uint32), count)
    rate, exact = int(successes) / count, figures["all"]["success"]
    deviation = (exact * (1 - exact) / count) ** 0.5
    return {**figures, "sampled_success": rate, "sampled_deviations_off": round((rate - exact) / deviation, 2)}


def measure_memory(size: str, dtype: str) -> dict[str, Any]:
    """Peak memory of a process that makes one iteration of 8 episodes, compilation included."""
    program = f"from benchmarks.language import iterate_once; iterate_once({size!r}, {dtype!r})"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    return dict(json.loads(shown.splitlines()[-1]))


def iterate_once(size: str, dtype: str) -> None:
    """Makes one iteration of 8 episodes and prints this process's peak of memory."""
    policy, checkpoint = model(size, dtype)
    sizes = training.Sizes("grpo", groups=1, group_size=8, epochs=2)
    settings = training.Settings(*map(jnp.float32, (1e-6, 0.2, 0.02)))
    state = training.initial_state(checkpoint.params)
    iteration(policy, state, sizes, settings, 0)
    device = jax.devices()[0].memory_stats() or {}
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"host_gigabytes": host, "device_gigabytes": device.get("peak_bytes_in_use", 0) / 2**30}))


def measure_pytorch(
    policy: LanguagePolicy, checkpoint: Checkpoint, repetitions: int, torch_python: str
) -> dict[str, Any]:
    """One iteration of 4 x 8 episodes against `benchmarks.pytorch_language`, a process of its own, on all cores."""
    tokens, starts, ends, _ = plain_rows(policy, checkpoint.end_of_text, random_episodes(policy, 32))
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder) / "model", checkpoint)
        np.savez(Path(folder) / "rows.npz", tokens=tokens, starts=starts, ends=ends)
        program = Path(__file__).with_name("pytorch_language.py")
        command = [torch_python, str(program), folder, str(max(1, repetitions // 3))]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    theirs = json.loads(shown.splitlines()[-1])
    ours = measure_iteration(policy, checkpoint, repetitions)
    return {"speedup": round(theirs["seconds"] / ours["seconds"], 2), "pytorch": theirs, "ours": ours}


def main() -> None:
    """Runs the chosen measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--episodes", type=int, default=8, help="of packed and rollout [8]")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES[:-1])
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter with torch and transformers")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the JSON objects to this file")
    flags = parser.parse_args()
    policy, checkpoint = model(flags.size, flags.dtype)
    where = {"size": flags.size, "dtype": flags.dtype, "device": jax.devices()[0].device_kind, "cores": cores()}
    run = {
        "packed": lambda: measure_packed(
            policy, checkpoint, flags.episodes, flags.repetitions, PLAIN_ACTIONS[flags.size]
        ),
        "rollout": lambda: measure_rollout(policy, checkpoint, flags.episodes, flags.repetitions),
        "iteration": lambda: measure_iteration(policy, checkpoint, flags.repetitions),
        "exact": lambda: measure_exact(policy, checkpoint, max(1, flags.repetitions // 3)),
        "memory": lambda: measure_memory(flags.size, flags.dtype),
        "pytorch": lambda: measure_pytorch(policy, checkpoint, flags.repetitions, flags.torch_python),
    }
    for name in flags.measures:
        line = json.dumps({"measure": name, **where, **run[name]()})
        print(line, flush=True)
        if flags.output is not None:
            with flags.output.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
