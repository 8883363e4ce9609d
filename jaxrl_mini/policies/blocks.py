"""What the networks have in common: activations, attention to what is seen, and any number of blocks as one.

All blocks of a network are one module, whose parameters have a first axis `layer`. So one block is compiled, whatever
their number.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

B = TypeVar("B", bound=nnx.Module)

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_fast": jax.nn.gelu,
    "gelu_new": jax.nn.gelu,
    "gelu_python": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
    "mish": jax.nn.mish,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}
"""The activation functions by their names in a configuration. Of the gelus, most are its approximation by tanh."""


class KeysValues(NamedTuple):
    """What blocks remember of tokens they have seen."""

    keys: Float[Array, "*layer row head token feature"]
    values: Float[Array, "*layer row head token feature"]


def attend(
    query: Float[Array, "row head query feature"], seen: KeysValues, mask: Bool[Array, "row query key"]
) -> Float[Array, "row head query feature"]:
    """Mixes the values that each query sees, by the softmax of its products with their keys.

    In float32 whatever the dtype. A query that sees nothing gets finite nonsense. Twice as fast on a CPU as
    jax.nn.dot_product_attention: the mask is added, and the division comes after the last sum.
    """
    scores = jnp.einsum("rhqf,rhkf->rhqk", query, seen.keys, preferred_element_type=jnp.float32)
    scores += jnp.where(mask, 0.0, -1e30)[:, None]  # [row, head, query, key]
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    mixed = jnp.einsum("rhqk,rhkf->rhqf", weights.astype(query.dtype), seen.values)
    return mixed / weights.sum(axis=-1)[..., None].astype(query.dtype)


def stacked(make: Callable[[nnx.Rngs], B], layers: int, rngs: nnx.Rngs) -> B:
    """So many blocks in one, each with random numbers of its own."""
    blocks: B = nnx.split_rngs(splits=layers)(nnx.vmap(make))(rngs)
    return blocks


def through(
    blocks: B,
    read: Callable[[B, Array, KeysValues | None, Array], tuple[Array, KeysValues]],
    x: Float[Array, "row token feature"],
    past: KeysValues | None,
) -> tuple[Float[Array, "row token feature"], KeysValues]:
    """Takes the residual stream through all blocks.

    Args:
      blocks: as `stacked` makes them.
      read: a block, the stream, what the block remembers of earlier tokens, and its number, from 0 -> the stream behind
        it, and what to remember of the new tokens.
      x: the stream.
      past: by layer.
    """
    graph, params = nnx.split(blocks)

    def step(x: Array, layer: tuple[PyTree, KeysValues | None, Array]) -> tuple[Array, KeysValues]:
        params, past, number = layer
        return read(nnx.merge(graph, params), x, past, number)

    numbers = jnp.arange(jax.tree.leaves(params)[0].shape[0])
    after, new = lax.scan(step, x, (params, past, numbers))
    return after, new


def next_token_logits(
    hidden: Float[Array, "*row feature"], embedding: nnx.Embed, head: nnx.Linear | None
) -> Float[Array, "*row vocab"]:
    """Accumulated in float32; by the embedding, where there is no head of its own."""
    kernel = embedding.embedding[...].T if head is None else head.kernel[...]
    return jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)
