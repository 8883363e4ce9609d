"""The families of causal language models: what their configurations mean, and how their tensors are called.

A family is a description: which network, which of its flags, which names. Everything else is refused by name.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxrl_mini.config import MAX_COUNT
from jaxrl_mini.policies.blocks import ACTIVATIONS
from jaxrl_mini.policies.decoder import Decoder, DecoderConfig, Rope
from jaxrl_mini.policies.gpt2 import GPT2, GPT2Config

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


def _counts(options: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if not (type(size := options[name]) is int and 1 <= size <= MAX_COUNT):
            raise Unsupported(f"{name} {size!r}: it must be from 1 to {MAX_COUNT}")


def _activation(name: str, value: Any) -> None:
    if value not in ACTIVATIONS:
        raise Unsupported(f"{name} {value!r}: supported are {', '.join(ACTIVATIONS)}")


def _epsilon(name: str, value: Any) -> None:
    if not (isinstance(value, float) and 0 < value < 1):
        raise Unsupported(f"{name} {value!r}: it must be above 0 and below 1")


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise Unsupported(f"{name} {value!r}: it must be a number above 0")
    return float(value)


def _gpt2(read: Any) -> GPT2Config:
    options = {field.name: getattr(read, field.name) for field in fields(GPT2Config)}
    _activation("activation_function", options["activation_function"])
    inner = () if options["n_inner"] is None else ("n_inner",)
    _counts(options, ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", *inner))
    _epsilon("layer_norm_epsilon", options["layer_norm_epsilon"])
    if options["n_embd"] % options["n_head"]:
        raise Unsupported(f"n_embd {options['n_embd']}, which is not a multiple of n_head {options['n_head']}")
    return GPT2Config(**options)


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "max_position_embeddings")  # fmt: skip
"""Of a decoder, by the names that all of them have; so are `OTHERS`."""
OTHERS = ("rms_norm_eps", "hidden_act", "tie_word_embeddings", "initializer_range")


def _decoder(**flags: Callable[[Any], Any]) -> Callable[[Any], DecoderConfig]:
    """A description by what a family adds to that."""

    def describe(read: Any) -> DecoderConfig:
        options = {name: getattr(read, name) for name in (*SIZES, *OTHERS)}
        heads = options["num_attention_heads"]
        options["num_key_value_heads"] = groups = getattr(read, "num_key_value_heads", None) or heads
        _counts(options, SIZES)
        options["head_dim"] = head_dim = getattr(read, "head_dim", None) or options["hidden_size"] // heads
        options |= {name: flag(read) for name, flag in flags.items()}
        _counts(options, ("num_key_value_heads", "head_dim"))
        _activation("hidden_act", options["hidden_act"])
        _epsilon("rms_norm_eps", options["rms_norm_eps"])
        if heads % groups:
            raise Unsupported(f"num_attention_heads {heads}, which is not a multiple of num_key_value_heads {groups}")
        if head_dim % 2:
            raise Unsupported(f"head_dim {head_dim}: pairs of features are turned, so it must be even")
        return DecoderConfig(rope=_rope(read), **options)

    return describe


def _rope(read: Any) -> Rope:
    """Rotary positions, as transformers names them."""
    stated: Mapping[str, Any] = getattr(read, "rope_parameters", None) or {}

    def number(name: str, default: Any = None) -> float:
        return _positive(f"rope_parameters {name}", stated.get(name) or default)

    kind, theta = stated.get("rope_type", "default"), number("rope_theta", getattr(read, "rope_theta", 10000.0))
    if stated.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("a partial_rotary_factor: all features are turned, so it must be 1")
    if kind == "default":
        return Rope(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise Unsupported(f"rope_type {kind!r}: supported are default, linear, llama3 and yarn")
    factor, original = number("factor"), number("original_max_position_embeddings", read.max_position_embeddings)
    if kind == "linear":
        return Rope(theta, kind, factor)
    if kind == "llama3":
        return Rope(theta, kind, factor, original, number("low_freq_factor"), number("high_freq_factor"))

    def magnitude(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    both = stated.get("mscale") and stated.get("mscale_all_dim")
    scale = magnitude(number("mscale")) / magnitude(number("mscale_all_dim")) if both else magnitude(1.0)
    bounds = number("beta_slow", 1.0), number("beta_fast", 32.0)
    return Rope(theta, kind, factor, original, *bounds, number("attention_factor", scale), stated.get("truncate", True))


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


def _of(architecture: str, **flags: Callable[[Any], Any]) -> Family:
    describe = _decoder(**flags)
    return Family((architecture,), Decoder, describe, "model.", "layers", "embed_tokens.weight", _KERNELS)


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        ("GPT2LMHeadModel", "GPT2Model"), GPT2, _gpt2, "transformer.", "h", "wte.weight", ("lm_head",),
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
