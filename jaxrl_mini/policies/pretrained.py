"""Hugging Face checkpoint folders of the GPT-2 family, in and out.

A folder holds `config.json`, weights as safetensors (one file, or shards with an index) and a tokenizer. The
`transformers` library reads configuration and tokenizer; it is imported here only, and only when a folder is
read, because importing it takes seconds. Nothing is fetched, no code from a folder runs, and no pickle is read.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxrl_mini.config import MAX_COUNT, UserError
from jaxrl_mini.machine import files
from jaxrl_mini.policies import folders
from jaxrl_mini.policies.gpt2 import ACTIVATIONS, GPT2, GPT2Config
from jaxrl_mini.policies.prompts import Encode
from jaxrl_mini.types import ByContent

ARCHITECTURES = ("GPT2LMHeadModel", "GPT2Model")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"))
"""A folder has a tokenizer if it has all files of one of these."""
_FILE = ("_file", "_files")
ADAPTER = "adapter_config.json"


class CheckpointError(UserError):
    """A folder that cannot be read as a checkpoint; one line that says what and why."""


@dataclass(frozen=True, eq=False)
class Checkpoint(ByContent):
    """A model as read from a folder; equal to another where its weights, configuration and files are."""

    config: GPT2Config
    network: nnx.GraphDef[GPT2] = field(compare=False)
    params: PyTree
    """The weights, in float32 whatever the file held."""
    encode: Encode = field(compare=False)
    end_of_text: int
    """Id of the token that ends a text."""
    companions: Mapping[str, bytes]
    """The files to be written beside the weights by `save_checkpoint`, as they were read."""
    dtype: str = "float32"
    """What the network computes in and `save_checkpoint` writes; `params` keep small optimizer steps in float32."""


def load_checkpoint(folder: str | os.PathLike[str], dtype: DTypeLike = jnp.float32) -> Checkpoint:
    """Reads a checkpoint folder.

    Args:
      folder: holds `config.json`, safetensors and a tokenizer.
      dtype: what the network computes in, and what weights are saved in; those in memory are float32.

    Raises:
      CheckpointError: a file is missing or damaged, the architecture or one of its flags is not supported, a
        tensor is missing, has another shape or should not be there, there is an adapter beside the weights, or there
        is no end-of-text token.
    """
    folder = Path(folder)
    try:
        if not folder.is_dir():
            raise CheckpointError(f"model {str(folder)!r} is not a folder: give one with a Hugging Face checkpoint")
        if (folder / ADAPTER).exists():
            raise CheckpointError(
                f"model {str(folder)!r} has an {ADAPTER}, and no adapter is read: merge it into the weights with peft, "
                "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(NEW_FOLDER)"
            )
        config = _read_config(folder)
        tensors = dict(_tensors(_weight_files(folder)))
        if config.n_layer > len(tensors):  # before a network of so many blocks is described
            raise CheckpointError(f"model {str(folder)!r} has no tensors for its n_layer {config.n_layer} blocks")
        encode, end_of_text = _read_tokenizer(folder)
        network, shapes = nnx.split(nnx.eval_shape(lambda: GPT2(config, dtype, rngs=nnx.Rngs(0))))
        params = _read_weights(folder, tensors, shapes, config)
        companions = {name: files.read(folder / name) for name in folders.COMPANIONS if (folder / name).is_file()}
    except OSError as error:
        raise CheckpointError(f"model {str(folder)!r} cannot be read: {error}") from error
    return Checkpoint(config, network, params, encode, end_of_text, companions, jnp.dtype(dtype).name)


def save_checkpoint(folder: str | os.PathLike[str], checkpoint: Checkpoint, overwrite: bool = False) -> None:
    """`write_checkpoint` to a place named now."""
    write_checkpoint(folders.Destination(folder, overwrite), checkpoint)


def write_checkpoint(destination: folders.Destination, checkpoint: Checkpoint) -> None:
    """Writes a folder that `transformers` loads as a causal language model, whole or not at all.

    The tensors have their standard names and the checkpoint's dtype; configuration and tokenizer are those of the
    folder that was read.

    Raises:
      UserError: as `Destination.write`.
    """
    tensors: dict[str, np.ndarray] = {}
    for place, variable in nnx.to_flat_state(checkpoint.params):
        tensor = np.asarray(variable[...]).astype(jnp.dtype(checkpoint.dtype))
        names = _tensor_names(place, tensor.shape)
        parts = tensor if place[0] == "h" else [tensor.T if place[0] == "lm_head" else tensor]
        tensors |= dict(zip(names, map(np.ascontiguousarray, parts), strict=True))
    config = json.loads(checkpoint.companions["config.json"])
    config.pop("torch_dtype", None)  # what `dtype` was called before
    config |= {"architectures": [ARCHITECTURES[0]], "dtype": checkpoint.dtype}
    companions = {**checkpoint.companions, "config.json": (json.dumps(config, indent=2) + "\n").encode()}
    destination.write(WEIGHTS, tensors, companions)


def _read_config(folder: Path) -> GPT2Config:
    raw = _read_json(folder / "config.json")
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or [ARCHITECTURES[0]]
    supported = isinstance(architectures, list) and all(one in ARCHITECTURES for one in architectures)
    if model_type != "gpt2" or not supported:
        raise CheckpointError(
            f"model {str(folder)!r} has model_type {model_type!r} and architectures {architectures}: "
            f"supported are model_type 'gpt2' and {', '.join(ARCHITECTURES)}"
        )
    for flag in ("add_cross_attention", "quantization_config", "auto_map"):
        if raw.get(flag):
            raise CheckpointError(f"model {str(folder)!r} sets {flag}, which is not supported: remove it")
    read = _transformers(lambda t: t.GPT2Config(**raw), folder, "config.json")
    config = GPT2Config(**{field.name: getattr(read, field.name) for field in fields(GPT2Config)})
    if config.activation_function not in ACTIVATIONS:
        raise CheckpointError(
            f"model {str(folder)!r} has activation_function {config.activation_function!r}: "
            f"supported are {', '.join(ACTIVATIONS)}"
        )
    for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"):
        size = getattr(config, name)
        if not (name == "n_inner" and size is None) and not (type(size) is int and 1 <= size <= MAX_COUNT):
            raise CheckpointError(f"model {str(folder)!r} has {name} {size!r}: it must be from 1 to {MAX_COUNT}")
    if not (isinstance(config.layer_norm_epsilon, (int, float)) and 0 < config.layer_norm_epsilon < 1):
        raise CheckpointError(
            f"model {str(folder)!r} has layer_norm_epsilon {config.layer_norm_epsilon!r}: "
            f"it must be above 0 and below 1"
        )
    if config.n_embd % config.n_head:
        raise CheckpointError(
            f"model {str(folder)!r} has n_embd {config.n_embd}, which is not a multiple of n_head {config.n_head}"
        )
    return config


def _read_tokenizer(folder: Path) -> tuple[Encode, int]:
    # Without its files, transformers makes an empty tokenizer that maps all text to nothing.
    if not any(all((folder / name).is_file() for name in names) for names in TOKENIZERS):
        wanted = " or ".join(" and ".join(names) for names in TOKENIZERS)
        raise CheckpointError(f"model {str(folder)!r} has no tokenizer: {wanted} is missing")
    outside = [name for name, value in _tokenizer_settings(folder).items() if name.endswith(_FILE) and value]
    if outside:
        raise CheckpointError(f"tokenizer_config.json of model {str(folder)!r} names a {outside[0]}: remove it")
    tokenizer = _transformers(
        lambda t: t.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False),
        folder,
        "tokenizer",
    )
    # Where the files name none, some classes of transformers invent one past the vocabulary.
    named = [folder / name for name in ("tokenizer.json", "vocab.json", "added_tokens.json")]
    vocabulary = "".join(files.read(path).decode(errors="replace") for path in named if path.is_file())
    token = tokenizer.eos_token
    if token is None or not (token in vocabulary or json.dumps(token)[1:-1] in vocabulary):
        raise CheckpointError(
            f"model {str(folder)!r} has no EOS token: set eos_token in tokenizer_config.json to one of its vocabulary"
        )
    _compare_ends(folder, token, tokenizer.eos_token_id)
    return partial(_encode, tokenizer, _plain_tokenizer(folder), folder), tokenizer.eos_token_id


def _plain_tokenizer(folder: Path) -> Any:
    """What the tokenizers library itself reads in tokenizer.json; None where the tokenizer is in two files."""
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    data = files.read(path).decode(errors="replace")
    plain = _transformers(lambda _: tokenizers.Tokenizer.from_str(data), folder, "tokenizer")
    plain.no_truncation()
    plain.no_padding()
    plain.encode_special_tokens = True
    return plain


def _encode(tokenizer: Any, plain: Any, folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Ids by transformers, which are also those of the file: some of its classes leave out parts of a pipeline."""
    if not texts:
        return []
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ids: list[list[int]] = _transformers(lambda _: tokenizer(list(texts), **options).input_ids, folder, "tokenizer")
    if plain is None:
        return ids
    encodings = _transformers(lambda _: plain.encode_batch(list(texts), add_special_tokens=False), folder, "tokenizer")
    of_file = [encoding.ids for encoding in encodings]
    if ids != of_file:
        text = min((text for text, *both in zip(texts, ids, of_file, strict=True) if both[0] != both[1]), key=len)
        raise CheckpointError(
            f"transformers gives {text[:60]!r} other tokens than tokenizer.json of model {str(folder)!r} says: set "
            f"tokenizer_class in tokenizer_config.json to PreTrainedTokenizerFast, which takes the file as it is"
        )
    return ids


def _compare_ends(folder: Path, token: str, end_of_text: int) -> None:
    """Says where a configuration ends a text with another token than the tokenizer, whose is used."""
    for name in ("config.json", "generation_config.json"):
        stated = _read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if stated is not None and end_of_text not in (stated if isinstance(stated, list) else [stated]):
            _say(
                f"{name} of model {str(folder)!r} has eos_token_id {stated!r}, its tokenizer has {token!r}, id "
                f"{end_of_text}: candidates end with the tokenizer's"
            )


@cache
def _say(message: str) -> None:
    """To stderr, once a process."""
    print(message, file=sys.stderr, flush=True)


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return _read_json(path) if path.is_file() else {}


def _transformers(read: Callable[[Any], Any], folder: Path, what: str) -> Any:
    """Calls the transformers library and turns whatever it raises into one line."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what matters is said here, in one line
    try:
        with _alone:
            import transformers

            return read(transformers)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        reason = " ".join(str(error).split())[:200]
        message = f"the {what} of model {str(folder)!r} cannot be read: {type(error).__name__}: {reason}"
        raise CheckpointError(message) from error


_alone = threading.Lock()
"""The library imports its parts when they are asked for, and lacks those that another thread is importing."""


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        placed = _read_json(folder / INDEX).get("weight_map")
        names = list(dict.fromkeys(map(str, placed.values() if isinstance(placed, dict) else ["no weight_map"])))
        for name in names:
            if "\0" in name or Path(name).name != name or not (folder / name).is_file():
                raise CheckpointError(f"{INDEX} of model {str(folder)!r} names {name!r}, which is not in the folder")
        return [folder / name for name in names]
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickled:
        raise CheckpointError(
            f"model {str(folder)!r} has pickled weights ({pickled[0]}), which are not read: convert it with "
            "transformers, X.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) for X = AutoModelForCausalLM and "
            "AutoTokenizer"
        )
    raise CheckpointError(f"model {str(folder)!r} has no weights: {WEIGHTS} or {INDEX} is missing")


def _tensors(paths: list[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name without the prefix, tensor), except the causal masks that old checkpoints hold."""
    for path in paths:
        try:
            with safetensors.safe_open(path, "numpy") as file:
                for name in file.keys():  # noqa: SIM118, the file is no mapping
                    if not name.endswith((".attn.bias", ".attn.masked_bias")):
                        yield name.removeprefix("transformer."), file.get_tensor(name)
        except Exception as error:  # types of numbers that NumPy lacks raise errors of many kinds
            raise CheckpointError(f"weights {str(path)!r} cannot be read: {error}") from error


def _read_weights(folder: Path, tensors: dict[str, np.ndarray], shapes: PyTree, config: GPT2Config) -> PyTree:
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        head = tensors.pop("lm_head.weight")
        if not np.array_equal(tensors.setdefault("wte.weight", head), head):
            raise CheckpointError(
                f"model {str(folder)!r} has tie_word_embeddings, but lm_head.weight differs from wte.weight"
            )

    params = nnx.map_state(partial(_take, folder, tensors), shapes)
    if tensors:
        raise CheckpointError(f"model {str(folder)!r} has a tensor {min(tensors)!r} that GPT-2 does not have")
    return params


def _take(folder: Path, tensors: dict[str, np.ndarray], place: tuple[Any, ...], variable: Any) -> Any:
    """A parameter of the network from the tensors of a folder; they are taken out of them."""
    expected = variable.get_value()
    take = partial(_take_tensor, folder, tensors, dtype=expected.dtype)
    if place[0] == "h":
        parts = [take(name, shape=expected.shape[1:]) for name in _tensor_names(place, expected.shape)]
        return variable.replace(jnp.asarray(np.stack(parts)))
    (name,) = _tensor_names(place, expected.shape)
    return variable.replace(jnp.asarray(take(name, shape=expected.shape)))


def _take_tensor(
    folder: Path, tensors: dict[str, np.ndarray], name: str, *, shape: tuple[int, ...], dtype: DTypeLike
) -> np.ndarray:
    key = name.removeprefix("transformer.")
    if key not in tensors:
        raise CheckpointError(f"model {str(folder)!r} has no tensor {name!r}")
    tensor = tensors.pop(key)
    if key == "lm_head.weight":
        tensor = tensor.T
    if tensor.shape != shape or not jnp.issubdtype(tensor.dtype, jnp.floating):
        raise CheckpointError(
            f"tensor {name!r} of model {str(folder)!r} is {tensor.dtype} {list(tensor.shape)}: "
            f"config.json asks for floats {list(shape)}"
        )
    with np.errstate(over="ignore"):
        weights = tensor.astype(dtype)
    if not np.isfinite(weights).all():
        raise CheckpointError(f"tensor {name!r} of model {str(folder)!r} holds numbers that are not finite in float32")
    return weights


def _tensor_names(place: tuple[Any, ...], shape: tuple[int, ...]) -> list[str]:
    """The checkpoint's names of a parameter: ("h", "ln_1", "scale") is "transformer.h.0.ln_1.weight" and so on."""
    module, *inner = place[:-1]
    end = ["bias" if place[-1] == "bias" else "weight"]
    if module == "h":
        return [".".join(["transformer.h", str(layer), *inner, *end]) for layer in range(shape[0])]
    name = ".".join([module, *inner, *end])
    return [name if module == "lm_head" else f"transformer.{name}"]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(files.read(path))
        if not isinstance(data, dict):
            raise ValueError("it holds no JSON object")
        return data
    except FileNotFoundError:
        raise CheckpointError(f"model {str(path.parent)!r} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
