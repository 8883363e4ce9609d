"""The language-model policy the plain way, as an oracle: every prompt and candidate is a row of its own.

Prompts are made by playing the Python task, tokenized as whole texts, and scored without a cache, packing or
merging: the sum of the log-probabilities of the tokens after the prompt.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_mini.policies.prompts import CUE
from jaxrl_mini.tasks.repair import ACTIONS, HEADER, BinarySearchRepair

CANDIDATES = tuple(f" {action}" for action in ACTIONS)


def prompt_after(actions) -> str:
    """The prompt for the next action, after some actions."""
    task = BinarySearchRepair()
    text = HEADER + task.reset() + CUE
    for action in actions:
        text += f" {ACTIONS[action]}\n{task.step(ACTIONS[action])}{CUE}"
    return text


@partial(jax.jit, static_argnames="network")
def plain_scores(network, params, tokens, starts, ends):
    """Sum over each row's tokens from `starts` to before `ends` of their log-probability; [row]."""
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    model = nnx.merge(network, params)
    hidden, _ = model(tokens, positions, jnp.broadcast_to(jnp.tri(width, dtype=bool), (rows, width, width)))
    log_probs = jax.nn.log_softmax(model.logits(hidden[:, :-1]))
    each = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2)[..., 0]  # [row, token - 1]
    index = jnp.arange(1, width)
    return jnp.where((index >= starts[:, None]) & (index < ends[:, None]), each, 0).sum(axis=1)


def plain_log_probs(checkpoint, params, prompts, candidates=CANDIDATES):
    """[prompt, candidate]: normalized over the candidates."""
    ids = [[*tokens, checkpoint.end_of_text] for tokens in checkpoint.encode(list(candidates))]
    encoded = [[*checkpoint.beginning, *ids] for ids in checkpoint.encode(list(prompts))]
    rows = [prompt + candidate for prompt in encoded for candidate in ids]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, full in zip(tokens, rows, strict=True):
        row[: len(full)] = full
    starts = np.repeat([len(prompt) for prompt in encoded], len(ids))
    ends = np.array([len(row) for row in rows])
    return jax.nn.log_softmax(plain_scores(checkpoint.network, params, tokens, starts, ends).reshape(-1, len(ids)))
