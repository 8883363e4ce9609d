"""GPT-2 in flax.nnx: a decoder over packed rows with any attention mask and an optional key/value cache.

Modules and parameters carry the names they have in Hugging Face checkpoints, but for the blocks: `h.0.attn.c_attn`
and so on are one `h.attn.c_attn` (see `blocks`). There is no dropout: the policy that samples and the policy that is
updated must be the same function of the parameters.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl_mini.policies.blocks import ACTIVATIONS, KeysValues, attend, next_token_logits, stacked, through


@dataclass(frozen=True)
class GPT2Config:
    """What determines the function a GPT-2 computes, under the names of its `config.json`."""

    vocab_size: int
    """Rows of the token embedding; may exceed the tokenizer's vocabulary (a padded vocabulary)."""
    n_positions: int
    """Longest sequence: rows of the position embedding."""
    n_embd: int
    """Width of the residual stream."""
    n_layer: int
    n_head: int
    n_inner: int | None = None
    """Width inside the feed-forward layers; 4 * n_embd if None."""
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    """Standard deviation of random initial weights."""
    scale_attn_weights: bool = True
    """Divide attention scores by sqrt(head width)."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Divide them by the block's number, counted from 1, as well."""
    tie_word_embeddings: bool = True
    """Use the token embedding as the output head."""

    @property
    def layers(self) -> tuple[str, int]:
        """How many blocks there are, and what that is called."""
        return "n_layer", self.n_layer

    @property
    def longest(self) -> tuple[str, int]:
        """What bounds the length of a sequence, and the bound."""
        return "n_positions", self.n_positions


class Attention(nnx.Module):
    """Multi-head attention; `mask` says what each token sees."""

    def __init__(self, config: GPT2Config, dtype: DTypeLike, rngs: nnx.Rngs):
        self.n_head = config.n_head
        self.scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        self.by_layer = config.scale_attn_by_inverse_layer_idx
        self.c_attn = _linear(config, config.n_embd, 3 * config.n_embd, dtype, rngs)
        self.c_proj = _linear(config, config.n_embd, config.n_embd, dtype, rngs, residual=True)

    def __call__(self, x: Array, mask: Array, past: KeysValues | None, layer: int | Array) -> tuple[Array, KeysValues]:
        """[row, token, n_embd] to the same shape, and what to remember of the tokens."""
        qkv = self.c_attn(x)  # [row, token, 3 * n_embd]
        qkv = qkv.reshape(*qkv.shape[:-1], 3, self.n_head, -1).transpose(2, 0, 3, 1, 4)
        query, keys, values = qkv  # each [row, head, token, feature], as fast matrix products take it
        new = KeysValues(keys, values)
        seen = new if past is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b], 2), past, new)
        scale = self.scale / (layer + 1) if self.by_layer else self.scale
        mixed = attend(query * scale, seen, mask)
        return self.c_proj(mixed.swapaxes(1, 2).reshape(x.shape)), new


class MLP(nnx.Module):
    """The feed-forward layers."""

    def __init__(self, config: GPT2Config, dtype: DTypeLike, rngs: nnx.Rngs):
        inner = 4 * config.n_embd if config.n_inner is None else config.n_inner
        self.activation = ACTIVATIONS[config.activation_function]
        self.c_fc = _linear(config, config.n_embd, inner, dtype, rngs)
        self.c_proj = _linear(config, inner, config.n_embd, dtype, rngs, residual=True)

    def __call__(self, x: Array) -> Array:
        """[row, token, n_embd] to the same shape."""
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nnx.Module):
    """Attention, then feed-forward layers; each reads the normalized residual stream and adds to it."""

    def __init__(self, config: GPT2Config, dtype: DTypeLike, rngs: nnx.Rngs):
        self.ln_1 = _layer_norm(config, dtype, rngs)
        self.attn = Attention(config, dtype, rngs)
        self.ln_2 = _layer_norm(config, dtype, rngs)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, x: Array, mask: Array, past: KeysValues | None, layer: int | Array) -> tuple[Array, KeysValues]:
        """[row, token, n_embd] to the same shape, and what to remember of the tokens."""
        mixed, new = self.attn(self.ln_1(x), mask, past, layer)
        x = x + mixed
        return x + self.mlp(self.ln_2(x)), new


class GPT2(nnx.Module):
    """The network, from tokens to the residual stream (`__call__`) and from there to logits (`logits`).

    Args:
      config: the architecture.
      dtype: of the computation; parameters, softmax and logits are float32 in any case.
      rngs: draws the initial weights, as GPT-2 does: normal with `initializer_range`, the projections that
        write to the residual stream narrower by sqrt(2 * n_layer).
    """

    def __init__(self, config: GPT2Config, dtype: DTypeLike = jnp.float32, *, rngs: nnx.Rngs):
        self.wte = _embedding(config, config.vocab_size, dtype, rngs)
        self.wpe = _embedding(config, config.n_positions, dtype, rngs)
        self.h = stacked(lambda rngs: Block(config, dtype, rngs), config.n_layer, rngs)
        self.ln_f = _layer_norm(config, dtype, rngs)
        self.lm_head = None if config.tie_word_embeddings else _head(config, rngs)

    def __call__(
        self,
        tokens: Int[Array, "row token"],
        positions: Int[Array, "row token"],
        mask: Bool[Array, "row token seen"],
        past: KeysValues | None = None,
    ) -> tuple[Float[Array, "row token n_embd"], KeysValues]:
        """Runs the blocks over new tokens.

        Args:
          tokens: ids, below `vocab_size`; an id past the vocabulary reads NaN without a word.
          positions: of each token in its own sequence, below `n_positions`.
          mask: what each token attends to; `seen` runs over the tokens of `past`, then over the new ones.
          past: keys and values of tokens seen before.

        Returns:
          The final, normalized hidden states and the keys and values of the new tokens.
        """

        def read(block: Block, x: Array, past: KeysValues | None, number: Array) -> tuple[Array, KeysValues]:
            return block(x, mask, past, number)

        x, cache = through(self.h, read, self.wte(tokens) + self.wpe(positions), past)
        return self.ln_f(x), cache

    def logits(self, hidden: Float[Array, "*row n_embd"]) -> Float[Array, "*row vocab"]:
        """Next-token logits, accumulated in float32."""
        return next_token_logits(hidden, self.wte, self.lm_head)


def _linear(
    config: GPT2Config, inputs: int, outputs: int, dtype: DTypeLike, rngs: nnx.Rngs, residual: bool = False
) -> nnx.Linear:
    deviation = config.initializer_range / (2 * config.n_layer) ** 0.5 if residual else config.initializer_range
    return nnx.Linear(inputs, outputs, dtype=dtype, kernel_init=nnx.initializers.normal(deviation), rngs=rngs)


def _head(config: GPT2Config, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.normal(config.initializer_range)
    return nnx.Linear(config.n_embd, config.vocab_size, use_bias=False, kernel_init=init, rngs=rngs)


def _embedding(config: GPT2Config, rows: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(config.initializer_range)
    return nnx.Embed(rows, config.n_embd, dtype=dtype, embedding_init=init, rngs=rngs)


def _layer_norm(config: GPT2Config, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # The fast variance, E[x^2] - E[x]^2, cancels in float32.
    return nnx.LayerNorm(
        config.n_embd, epsilon=config.layer_norm_epsilon, use_fast_variance=False, dtype=dtype, rngs=rngs
    )
