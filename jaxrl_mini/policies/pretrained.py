"""Hugging Face checkpoint folders of causal language models, in and out.

A folder holds `config.json`, weights as safetensors (one file, or shards with an index) and a tokenizer; `families`
says which models there are, and how their tensors are called.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxrl_mini.machine import files
from jaxrl_mini.policies import folders
from jaxrl_mini.policies.families import FAMILIES, Family, NetworkConfig, Unsupported
from jaxrl_mini.policies.hugging_face import CheckpointError, ask, read_json
from jaxrl_mini.policies.prompts import Encode
from jaxrl_mini.policies.tokenizer import read_tokenizer
from jaxrl_mini.types import ByContent

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of the names of tensors that old folders hold beside the weights: causal masks, frequencies."""


@dataclass(frozen=True, eq=False)
class Checkpoint(ByContent):
    """A model as read from a folder; equal to another where its weights, configuration and files are."""

    config: NetworkConfig
    network: nnx.GraphDef[Any] = field(compare=False)
    params: PyTree
    """The weights, in float32 whatever the file held."""
    encode: Encode = field(compare=False)
    end_of_text: int
    """Id of the token that ends a text."""
    companions: Mapping[str, bytes]
    """The files to be written beside the weights by `save_checkpoint`, as they were read."""
    dtype: str = "float32"
    """What the network computes in and `save_checkpoint` writes; `params` keep small optimizer steps in float32."""
    beginning: tuple[int, ...] = ()
    """Ids that begin every text."""

    @property
    def family(self) -> Family:
        """Which the configuration says."""
        return FAMILIES[json.loads(self.companions["config.json"])["model_type"]]


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
        family, config = _read_config(folder)
        tensors = dict(_tensors(_weight_files(folder), family))
        name, blocks = config.layers
        if blocks > len(tensors):  # before a network of so many is described
            raise CheckpointError(f"model {str(folder)!r} has no tensors for its {name} {blocks} blocks")
        tokenizer = read_tokenizer(folder)
        network, shapes = nnx.split(nnx.eval_shape(lambda: family.network(config, dtype, rngs=nnx.Rngs(0))))
        params = _read_weights(folder, tensors, shapes, family, tied=config.tie_word_embeddings)
        companions = {name: files.read(folder / name) for name in folders.COMPANIONS if (folder / name).is_file()}
    except OSError as error:
        raise CheckpointError(f"model {str(folder)!r} cannot be read: {error}") from error
    encode, end_of_text, beginning = tokenizer
    return Checkpoint(config, network, params, encode, end_of_text, companions, jnp.dtype(dtype).name, beginning)


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
    tensors, family = dict[str, np.ndarray](), checkpoint.family
    for place, variable in nnx.to_flat_state(checkpoint.params):
        tensor = np.asarray(variable[...]).astype(jnp.dtype(checkpoint.dtype))
        parts = tensor if place[0] == family.blocks else tensor[None]
        parts = parts.swapaxes(1, 2) if family.is_transposed(place) else parts
        tensors |= dict(zip(family.names(place, len(parts)), map(np.ascontiguousarray, parts), strict=True))
    config = json.loads(checkpoint.companions["config.json"])
    config.pop("torch_dtype", None)  # what `dtype` was called before
    config |= {"architectures": [family.architectures[0]], "dtype": checkpoint.dtype}
    companions = {**checkpoint.companions, "config.json": (json.dumps(config, indent=2) + "\n").encode()}
    destination.write(WEIGHTS, tensors, companions)


def _read_config(folder: Path) -> tuple[Family, NetworkConfig]:
    raw = read_json(folder / "config.json")
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(
            f"model {str(folder)!r} has model_type {model_type!r}: supported are {', '.join(FAMILIES)}"
        )
    architectures = raw.get("architectures") or [family.architectures[0]]
    if not (isinstance(architectures, list) and all(one in family.architectures for one in architectures)):
        raise CheckpointError(
            f"model {str(folder)!r} has model_type {model_type!r} and architectures {architectures}: "
            f"supported are {', '.join(family.architectures)}"
        )
    for flag in ("add_cross_attention", "quantization_config", "auto_map"):
        if raw.get(flag):
            raise CheckpointError(f"model {str(folder)!r} sets {flag}, which is not supported: remove it")
    read = ask(lambda t: t.AutoConfig.for_model(**raw), folder, "config.json")
    try:
        return family, family.describe(read)
    except Unsupported as error:
        raise CheckpointError(f"model {str(folder)!r} has {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        placed = read_json(folder / INDEX).get("weight_map")
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


def _tensors(paths: list[Path], family: Family) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name without the family's prefix, tensor), except what old checkpoints hold beside the weights."""
    for path in paths:
        try:
            with safetensors.safe_open(path, "numpy") as file:
                for name in file.keys():  # noqa: SIM118, the file is no mapping
                    if not name.endswith(CONSTANTS):
                        yield name.removeprefix(family.prefix), file.get_tensor(name)
        except Exception as error:  # types of numbers that NumPy lacks raise errors of many kinds
            raise CheckpointError(f"weights {str(path)!r} cannot be read: {error}") from error


def _read_weights(
    folder: Path, tensors: dict[str, np.ndarray], shapes: PyTree, family: Family, *, tied: bool
) -> PyTree:
    if tied and "lm_head.weight" in tensors:
        head = tensors.pop("lm_head.weight")
        if not np.array_equal(tensors.setdefault(family.embedding, head), head):
            raise CheckpointError(
                f"model {str(folder)!r} has tie_word_embeddings, but lm_head.weight differs from {family.embedding}"
            )
    params = nnx.map_state(partial(_take, folder, tensors, family), shapes)
    if tensors:
        network = family.architectures[0]
        raise CheckpointError(f"model {str(folder)!r} has a tensor {min(tensors)!r} that {network} does not have")
    return params


def _take(folder: Path, tensors: dict[str, np.ndarray], family: Family, place: tuple[Any, ...], variable: Any) -> Any:
    """A parameter of the network from the tensors of a folder; they are taken out of them."""
    expected, stacked = variable.get_value(), place[0] == family.blocks
    shape, turned = expected.shape[stacked:], family.is_transposed(place)
    parts = [
        _take_tensor(folder, tensors, name, family, shape=shape[::-1] if turned else shape, dtype=expected.dtype)
        for name in family.names(place, expected.shape[0])
    ]
    parts = [part.T for part in parts] if turned else parts
    return variable.replace(jnp.asarray(np.stack(parts) if stacked else parts[0]))


def _take_tensor(
    folder: Path,
    tensors: dict[str, np.ndarray],
    name: str,
    family: Family,
    *,
    shape: tuple[int, ...],
    dtype: DTypeLike,
) -> np.ndarray:
    key = name.removeprefix(family.prefix)
    if key not in tensors:
        raise CheckpointError(f"model {str(folder)!r} has no tensor {name!r}")
    tensor = tensors.pop(key)
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
