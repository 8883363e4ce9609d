"""The families of causal language models: what their configurations mean, and how their tensors are called.

A family is a description: which network, which of its flags, which names. Everything else is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxrl_mini.config import MAX_COUNT
from jaxrl_mini.policies.decoder import Decoder, DecoderConfig, Rope
from jaxrl_mini.policies.gpt2 import ACTIVATIONS, GPT2, GPT2Config

NetworkConfig = GPT2Config | DecoderConfig
Network = GPT2 | Decoder


class Unsupported(ValueError):
    """A configuration that a family has no network for; says what it has and what would be right."""


@dataclass(frozen=True)
class Family:
    """What a `model_type` of `config.json` stands for."""

    architectures: tuple[str, ...]
    """Of the folders that are read; the first is written."""
    network: Callable[..., Network]
    describe: Callable[[Any], NetworkConfig]
    """The network's configuration, by that of transformers, whose defaults differ from family to family."""
    prefix: str
    """Before the names of all tensors but the head's."""
    blocks: str
    """The module that holds all blocks; the number of a block stands behind it in the names of its tensors."""
    embedding: str
    """The tensor that a tied head is, without the prefix."""
    transposed: tuple[str, ...]
    """Modules whose kernels are [out, in] in the folder."""
    sizes: tuple[str, ...]
    """Attributes of the network's configuration that must be counts."""

    def names(self, place: tuple[Any, ...], layers: int) -> list[str]:
        """The tensors that make up a parameter: one, or one a block."""
        module, *inner = place[:-1]
        end = "bias" if place[-1] == "bias" else "weight"
        if module == self.blocks:
            return [f"{self.prefix}{module}.{layer}." + ".".join([*inner, end]) for layer in range(layers)]
        name = ".".join([module, *inner, end])
        return [name if module == "lm_head" else self.prefix + name]

    def is_transposed(self, place: tuple[Any, ...]) -> bool:
        """Whether a parameter is a kernel that stands the other way round in the folder."""
        return place[-1] == "kernel" and place[-2] in self.transposed


def check(config: NetworkConfig, family: Family) -> None:
    """Refuses sizes that no network has.

    Raises:
      Unsupported: naming one.
    """
    for name in family.sizes:
        size = getattr(config, name)
        if not (name == "n_inner" and size is None) and not (type(size) is int and 1 <= size <= MAX_COUNT):
            raise Unsupported(f"{name} {size!r}: it must be from 1 to {MAX_COUNT}")


def _activation(name: str, value: Any) -> None:
    if value not in ACTIVATIONS:
        raise Unsupported(f"{name} {value!r}: supported are {', '.join(ACTIVATIONS)}")


def _epsilon(name: str, value: Any) -> None:
    if not (isinstance(value, (int, float)) and 0 < value < 1):
        raise Unsupported(f"{name} {value!r}: it must be above 0 and below 1")


def _gpt2(read: Any) -> GPT2Config:
    config = GPT2Config(**{field.name: getattr(read, field.name) for field in fields(GPT2Config)})
    _activation("activation_function", config.activation_function)
    check(config, FAMILIES["gpt2"])
    _epsilon("layer_norm_epsilon", config.layer_norm_epsilon)
    if config.n_embd % config.n_head:
        raise Unsupported(f"n_embd {config.n_embd}, which is not a multiple of n_head {config.n_head}")
    return config


def _decoder(**flags: Callable[[Any], Any]) -> Callable[[Any], DecoderConfig]:
    """A description by what a family adds to what all decoders name alike."""

    def describe(read: Any) -> DecoderConfig:
        heads = read.num_attention_heads
        own = {name: flag(read) for name, flag in flags.items()}
        head_dim = getattr(read, "head_dim", None) or (read.hidden_size // heads if type(heads) is int and heads else 0)
        common = {
            name: getattr(read, name)
            for name in (
                "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "initializer_range",
            )
        }  # fmt: skip
        groups = getattr(read, "num_key_value_heads", None) or heads
        options = {"head_dim": head_dim, "num_key_value_heads": groups, "rope": _rope(read, head_dim), **common, **own}
        config = DecoderConfig(**options)
        _activation("hidden_act", config.hidden_act)
        check(config, FAMILIES["llama"])
        _epsilon("rms_norm_eps", config.rms_norm_eps)
        if config.num_attention_heads % config.num_key_value_heads:
            raise Unsupported(
                f"num_attention_heads {config.num_attention_heads}, which is not a multiple of num_key_value_heads "
                f"{config.num_key_value_heads}"
            )
        if config.head_dim % 2:
            raise Unsupported(f"head_dim {config.head_dim}: pairs of features are turned, so it must be even")
        return config

    return describe


def _rope(read: Any, head_dim: int) -> Rope:
    """Rotary positions, as transformers names them."""
    import math

    stated: Mapping[str, Any] = getattr(read, "rope_parameters", None) or {}
    kind, factor = stated.get("rope_type", "default"), stated.get("factor", 1.0)
    if stated.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("partial_rotary_factor: all features are turned, so it must be 1")
    theta = stated.get("rope_theta", getattr(read, "rope_theta", 10000.0))
    original = stated.get("original_max_position_embeddings") or read.max_position_embeddings
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, factor)
    if kind == "llama3":
        return Rope(theta, kind, factor, original, stated["low_freq_factor"], stated["high_freq_factor"])
    if kind == "yarn":

        def mscale(by: float) -> float:
            return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

        scale, by, all_by = (stated.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
        if scale is None:
            scale = mscale(by) / mscale(all_by) if by and all_by else mscale(1.0)
        low, high = stated.get("beta_slow") or 1.0, stated.get("beta_fast") or 32.0
        return Rope(theta, kind, factor, original, low, high, scale, stated.get("truncate", True))
    raise Unsupported(f"rope_type {kind!r}: supported are default, linear, llama3 and yarn")


def _window(read: Any) -> int | None:
    """The window of attention, where some layer has one."""
    kinds = getattr(read, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    window: int | None = getattr(read, "sliding_window", None)
    return window


def _gemma_activation(read: Any) -> str:
    """By "gelu" its configurations mean the approximation by tanh."""
    stated = getattr(read, "hidden_activation", None) or read.hidden_act
    return "gelu_pytorch_tanh" if stated == "gelu" else stated


def _rotated(read: Any) -> tuple[bool, ...]:
    return tuple(map(bool, getattr(read, "no_rope_layers", None) or ()))


_KERNELS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip


def _of(architecture: str, **flags: Callable[[Any], Any]) -> Family:
    describe = _decoder(**flags)
    return Family((architecture,), Decoder, describe, "model.", "layers", "embed_tokens.weight", _KERNELS, _SIZES)


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        ("GPT2LMHeadModel", "GPT2Model"), GPT2, _gpt2, "transformer.", "h", "wte.weight", ("lm_head",),
        ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"),
    ),
    "llama": _of(
        "LlamaForCausalLM",
        attention_bias=lambda read: read.attention_bias,
        output_bias=lambda read: read.attention_bias,
        mlp_bias=lambda read: read.mlp_bias,
    ),
    "mistral": _of("MistralForCausalLM", sliding_window=_window),
    "qwen2": _of("Qwen2ForCausalLM", attention_bias=lambda read: True, sliding_window=_window),
    "qwen3": _of(
        "Qwen3ForCausalLM",
        attention_bias=lambda read: read.attention_bias,
        output_bias=lambda read: read.attention_bias,
        qk_norm=lambda read: True,
        sliding_window=_window,
    ),
    "gemma": _of(
        "GemmaForCausalLM",
        attention_bias=lambda read: read.attention_bias,
        output_bias=lambda read: read.attention_bias,
        hidden_act=_gemma_activation,
        unit_offset=lambda read: True,
        scale_embedding=lambda read: True,
    ),
    "smollm3": _of(
        "SmolLM3ForCausalLM",
        attention_bias=lambda read: read.attention_bias,
        output_bias=lambda read: read.attention_bias,
        mlp_bias=lambda read: read.mlp_bias,
        rotated=_rotated,
        sliding_window=_window,
    ),
}  # fmt: skip
"""By `model_type`."""
