"""The tokenizer of a folder in Hugging Face format, as its file says and nothing else."""

import json
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_mini.machine import files
from jaxrl_mini.policies.hugging_face import CheckpointError, ask, read_json
from jaxrl_mini.policies.prompts import Encode

FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))
"""A folder has a tokenizer if it has all files of one of these."""
_FILE = ("_file", "_files")


class Tokenizer(NamedTuple):
    """What texts become."""

    encode: Encode
    end_of_text: int
    """Id of the token that ends a text."""
    beginning: tuple[int, ...]
    """Ids that begin every text: mostly none, or one."""


def read_tokenizer(folder: Path) -> Tokenizer:
    """Reads the tokenizer of a folder.

    Raises:
      CheckpointError: there is none, it needs files elsewhere, has no end-of-text token, or begins texts otherwise than
        its file says.
    """
    # Without its files, transformers makes an empty tokenizer that maps all text to nothing.
    if not any(all((folder / name).is_file() for name in names) for names in FILES):
        wanted = " or ".join(" and ".join(names) for names in FILES)
        raise CheckpointError(f"model {str(folder)!r} has no tokenizer: {wanted} is missing")
    outside = [name for name, value in _tokenizer_settings(folder).items() if name.endswith(_FILE) and value]
    if outside:
        raise CheckpointError(f"tokenizer_config.json of model {str(folder)!r} names a {outside[0]}: remove it")
    tokenizer = ask(
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
    plain = _plain_tokenizer(folder)
    encode = partial(_encode, tokenizer, plain, folder)
    return Tokenizer(encode, tokenizer.eos_token_id, _beginning(tokenizer, plain, folder, encode))


def _beginning(tokenizer: Any, plain: Any, folder: Path, encode: Encode) -> tuple[int, ...]:
    """What is put before a text by transformers, and by the file."""
    (text,) = encode(["a"])
    whole = list(ask(lambda _: tokenizer("a", verbose=False).input_ids, folder, "tokenizer"))
    of_file = whole if plain is None else ask(lambda _: plain.encode("a").ids, folder, "tokenizer")
    begun, by_file = (
        next((tuple(ids[:at]) for at in range(len(ids)) if ids[at : at + len(text)] == text), ())
        for ids in (whole, of_file)
    )
    if begun != by_file:
        raise CheckpointError(
            f"transformers begins texts with tokens {[*begun]}, and tokenizer.json of model {str(folder)!r} with "
            f"{[*by_file]}: set tokenizer_class in tokenizer_config.json to PreTrainedTokenizerFast, which takes the "
            "file as it is"
        )
    return begun


def _plain_tokenizer(folder: Path) -> Any:
    """What the tokenizers library itself reads in tokenizer.json; None where the tokenizer is in two files."""
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    data = files.read(path).decode(errors="replace")
    plain = ask(lambda _: tokenizers.Tokenizer.from_str(data), folder, "tokenizer")
    plain.no_truncation()
    plain.no_padding()
    plain.encode_special_tokens = True
    return plain


def _encode(tokenizer: Any, plain: Any, folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Ids by transformers, which are also those of the file: some of its classes leave out parts of a pipeline."""
    if not texts:
        return []
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ids: list[list[int]] = ask(lambda _: tokenizer(list(texts), **options).input_ids, folder, "tokenizer")
    if plain is None:
        return ids
    encodings = ask(lambda _: plain.encode_batch(list(texts), add_special_tokens=False), folder, "tokenizer")
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
        stated = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
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
    return read_json(path) if path.is_file() else {}
