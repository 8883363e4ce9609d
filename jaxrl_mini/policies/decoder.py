"""A decoder with rotary positions in flax.nnx, whose flags make it Llama, Mistral, Qwen2, Qwen3, Gemma or SmolLM3.

Like `gpt2`, it reads packed rows with any attention mask and an optional key/value cache, and has no dropout. Modules
and parameters carry the names they have in Hugging Face checkpoints; kernels are [in, out], the other way round.

Sources: Touvron et al. 2023 (arXiv 2302.13971); rotary positions: Su et al. 2021 (arXiv 2104.09864); grouped heads:
Ainslie et al. 2023 (arXiv 2305.13245); yarn: Peng et al. 2023 (arXiv 2309.00071).
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl_mini.policies.blocks import ACTIVATIONS, KeysValues, attend, next_token_logits, stacked, through


@dataclass(frozen=True)
class Rope:
    """Rotary positions: a token at position t turns feature pair i by the angle t * frequency[i]."""

    theta: float
    """The frequencies fall from 1 to about 1 / theta."""
    kind: str = "default"
    """`default`; `linear` and `llama3` slow frequencies down, all or the low ones; `yarn` the low ones, and scales."""
    factor: float = 1.0
    """By how much."""
    original: float = 0.0
    """The longest sequence before that was done."""
    low: float = 1.0
    """llama3: frequencies with fewer turns in `original` are slowed down wholly; yarn: `beta_slow`, the same."""
    high: float = 4.0
    """llama3: those with more turns are left; yarn: `beta_fast`, the same."""
    scale: float = 1.0
    """yarn: a factor on both cosine and sine."""
    whole: bool = True
    """yarn: the bounds between which frequencies are mixed are whole numbers."""

    def frequencies(self, features: int) -> Float[np.ndarray, " pair"]:
        """In float64, for heads of so many features."""
        plain = self.theta ** -(np.arange(0, features, 2) / features)
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            turns = self.original * plain / (2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
            return plain * (kept + (1.0 - kept) / self.factor)
        if self.kind == "yarn":
            first, last = (
                features * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
                for turns in (self.high, self.low)
            )
            if self.whole:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, features - 1)
            slowed = np.clip((np.arange(len(plain)) - first) / max(last - first, 1e-3), 0.0, 1.0)
            return plain * ((1.0 - slowed) + slowed / self.factor)
        return plain


@dataclass(frozen=True)
class DecoderConfig:
    """What determines the function a decoder computes; names of `config.json` where it has them."""

    vocab_size: int
    """Rows of the token embedding; may exceed the tokenizer's vocabulary (a padded vocabulary)."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the feed-forward layers."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    """Query head h reads key/value head h // (num_attention_heads / num_key_value_heads)."""
    head_dim: int
    """Features of a head; may be another number than hidden_size / num_attention_heads."""
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope: Rope
    sliding_window: int | None = None
    """A token sees so many; only sequences that fit are read, which see all of themselves."""
    rotated: tuple[bool, ...] = ()
    """By layer, whether queries and keys are turned; empty: in all."""
    attention_bias: bool = False
    """On queries, keys and values."""
    output_bias: bool = False
    """On what attention returns."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Each head's query and key are normalized before they are turned."""
    unit_offset: bool = False
    """Norms multiply by 1 + weight, in float32."""
    scale_embedding: bool = False
    """The embedding is multiplied by sqrt(hidden_size), rounded to the type of the computation."""
    tie_word_embeddings: bool = False
    """Use the token embedding as the output head."""
    initializer_range: float = 0.02
    """Standard deviation of random initial weights."""

    @property
    def layers(self) -> tuple[str, int]:
        """How many blocks there are, and what that is called."""
        return "num_hidden_layers", self.num_hidden_layers

    @property
    def longest(self) -> tuple[str, int]:
        """What bounds the length of a sequence, and the bound."""
        bounds = {"max_position_embeddings": self.max_position_embeddings}
        if self.sliding_window is not None:
            bounds["sliding_window"] = self.sliding_window
        return min(bounds.items(), key=lambda pair: pair[1])


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) in float32, times a weight."""

    def __init__(self, config: DecoderConfig, features: int, dtype: DTypeLike):
        self.epsilon, self.offset, self.dtype = config.rms_norm_eps, config.unit_offset, dtype
        self.scale = nnx.Param((jnp.zeros if config.unit_offset else jnp.ones)(features, jnp.float32))

    def __call__(self, x: Array) -> Array:
        """Along the last axis."""
        wide = x.astype(jnp.float32)
        wide *= lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        if self.offset:
            return (wide * (1.0 + self.scale[...])).astype(self.dtype)
        return wide.astype(self.dtype) * self.scale[...].astype(self.dtype)


class Attention(nnx.Module):
    """Attention with fewer heads of keys and values than of queries; `mask` says what each token sees."""

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.groups, self.head_dim = config.num_key_value_heads, config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = _linear(config, config.hidden_size, queries, dtype, rngs, bias=config.attention_bias)
        self.k_proj = _linear(config, config.hidden_size, keys, dtype, rngs, bias=config.attention_bias)
        self.v_proj = _linear(config, config.hidden_size, keys, dtype, rngs, bias=config.attention_bias)
        self.o_proj = _linear(config, queries, config.hidden_size, dtype, rngs, bias=config.output_bias)
        self.q_norm = RMSNorm(config, config.head_dim, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config, config.head_dim, dtype) if config.qk_norm else None

    def __call__(
        self, x: Array, mask: Array, past: KeysValues | None, turn: Float[Array, "part row token pair"]
    ) -> tuple[Array, KeysValues]:
        """[row, token, hidden] to the same shape, and what to remember of the tokens."""

        def heads(projection: nnx.Linear, norm: RMSNorm | None = None) -> Array:
            found = projection(x).reshape(*x.shape[:2], -1, self.head_dim)
            return (found if norm is None else norm(found)).swapaxes(1, 2)  # [row, head, token, feature]

        query, keys = (turned(heads(p, n), turn) for p, n in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm)))
        new = KeysValues(keys, heads(self.v_proj))
        seen = new if past is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b], 2), past, new)
        rows, count, tokens, features = query.shape
        # The queries of a group of heads stand behind each other: to their key/value head they are more tokens.
        grouped = query.reshape(rows, self.groups, -1, features)
        masks = jnp.broadcast_to(mask[:, None], (rows, count // self.groups, *mask.shape[1:])).reshape(
            rows, -1, mask.shape[2]
        )
        mixed = attend(grouped * self.head_dim**-0.5, seen, masks).reshape(rows, count, tokens, features)
        return self.o_proj(mixed.swapaxes(1, 2).reshape(rows, tokens, -1)), new


class MLP(nnx.Module):
    """The gated feed-forward layers."""

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.activation = ACTIVATIONS[config.hidden_act]
        sizes, bias = (config.hidden_size, config.intermediate_size), config.mlp_bias
        self.gate_proj = _linear(config, *sizes, dtype, rngs, bias=bias)
        self.up_proj = _linear(config, *sizes, dtype, rngs, bias=bias)
        self.down_proj = _linear(config, *sizes[::-1], dtype, rngs, bias=bias)

    def __call__(self, x: Array) -> Array:
        """[row, token, hidden] to the same shape."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """Attention, then feed-forward layers; each reads the normalized residual stream and adds to it."""

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config, config.hidden_size, dtype)
        self.self_attn = Attention(config, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(config, config.hidden_size, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, x: Array, mask: Array, past: KeysValues | None, turn: Array) -> tuple[Array, KeysValues]:
        """[row, token, hidden] to the same shape, and what to remember of the tokens."""
        mixed, new = self.self_attn(self.input_layernorm(x), mask, past, turn)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), new


class Decoder(nnx.Module):
    """The network, from tokens to the residual stream (`__call__`) and from there to logits (`logits`).

    Args:
      config: the architecture.
      dtype: of the computation; parameters, angles, softmax and logits are float32 in any case.
      rngs: draws the initial weights, normal with `initializer_range`.
    """

    def __init__(self, config: DecoderConfig, dtype: DTypeLike = jnp.float32, *, rngs: nnx.Rngs):
        self.rope, self.head_dim, self.rotated = config.rope, config.head_dim, config.rotated
        self.scale = config.hidden_size**0.5 if config.scale_embedding else 1.0
        init = nnx.initializers.normal(config.initializer_range)
        self.embed_tokens = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, embedding_init=init, rngs=rngs
        )
        self.layers = stacked(lambda rngs: Block(config, dtype, rngs), config.num_hidden_layers, rngs)
        self.norm = RMSNorm(config, config.hidden_size, dtype)
        sizes = config.hidden_size, config.vocab_size
        self.lm_head = None if config.tie_word_embeddings else _linear(config, *sizes, dtype, rngs, bias=False)

    def __call__(
        self,
        tokens: Int[Array, "row token"],
        positions: Int[Array, "row token"],
        mask: Bool[Array, "row token seen"],
        past: KeysValues | None = None,
    ) -> tuple[Float[Array, "row token hidden"], KeysValues]:
        """Runs the blocks over new tokens; see `GPT2`."""
        angles = positions[..., None].astype(jnp.float32) * self.rope.frequencies(self.head_dim).astype(np.float32)
        turn = self.rope.scale * jnp.stack([jnp.cos(angles), jnp.sin(angles)])  # [part, row, token, pair]
        still = jnp.stack([jnp.ones_like(angles), jnp.zeros_like(angles)])

        def read(block: Block, x: Array, past: KeysValues | None, number: Array) -> tuple[Array, KeysValues]:
            turns = turn if all(self.rotated) else jnp.where(jnp.array(self.rotated)[number], turn, still)
            return block(x, mask, past, turns)

        x = self.embed_tokens(tokens)  # [row, token, hidden]
        x, cache = through(self.layers, read, x * jnp.asarray(self.scale, x.dtype), past)
        return self.norm(x), cache

    def logits(self, hidden: Float[Array, "*row hidden"]) -> Float[Array, "*row vocab"]:
        """Next-token logits, accumulated in float32."""
        return next_token_logits(hidden, self.embed_tokens, self.lm_head)


def turned(
    heads: Float[Array, "row head token feature"], turn: Float[Array, "part row token pair"]
) -> Float[Array, "row head token feature"]:
    """Turns each pair of features, the first of which stand in the first half, by the cosines and sines of a token."""
    first, second = jnp.split(heads, 2, axis=-1)
    cosine, sine = turn[:, :, None].astype(heads.dtype)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def _linear(
    config: DecoderConfig, inputs: int, outputs: int, dtype: DTypeLike, rngs: nnx.Rngs, *, bias: bool
) -> nnx.Linear:
    init = nnx.initializers.normal(config.initializer_range)
    return nnx.Linear(inputs, outputs, use_bias=bias, dtype=dtype, kernel_init=init, rngs=rngs)
