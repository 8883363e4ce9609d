"""Makes a small random GPT-2: ``python -m jaxrl_mini.tiny_model DIR``."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_mini.config import ARTICLE, MAX_SEED
from jaxrl_mini.machine import commandline

if TYPE_CHECKING:
    from jaxrl_mini.tasks.compiled import CompiledTask

EXAMPLES = """\
examples:
  python -m jaxrl_mini.tiny_model runs/tiny
  python -m jaxrl_mini.train --backend hf --model runs/tiny --lr 1e-3
  python -m jaxrl_mini.tiny_model runs/guess --task guess:numbers=4

Writes a Hugging Face checkpoint folder, and downloads nothing.
"""

TOKENIZERS = ("word", "bpe")
END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
BPE_VOCABULARY = 384
LIMITS = {"layers": (1, 24), "width": (1, 1024), "heads": (1, 1024), "seed": (0, MAX_SEED)}
WARM_START_SECONDS = 20.0
"""Of the default size, about."""


def main(arguments: list[str]) -> None:
    """Makes the model that the command line asks for."""
    parser = commandline.Parser("tiny_model", description="Makes a small random GPT-2.", epilog=EXAMPLES)
    parser.add_argument(
        "folder", type=commandline.output, metavar="DIR", help="where to write; made if it does not exist"
    )
    parser.add_argument(
        "--tokenizer",
        choices=TOKENIZERS,
        default="word",
        help="word: a token is what stands between spaces, so one per action; bpe: byte-level, trained on the task's "
        "own texts, where some actions are several tokens [word]",
    )
    parser.add_argument("--task", default=ARTICLE, metavar="TASK", help=f"whose texts it has tokens for [{ARTICLE}]")
    for name, default, text in (
        ("layers", 2, "blocks"),
        ("width", 64, "of the residual stream; a multiple of the heads"),
        ("heads", 2, "attention heads"),
        ("seed", 0, "of the random weights"),
    ):
        kind = commandline.number(int, _expected(name))
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="INT", help=f"{text} [{default}]")
    parser.add_argument(
        "--warm-start",
        action="store_true",
        help="learn uniformly random play as text first: a random model gives an action of three tokens a probability "
        "near 1e-11 and would hardly ever try it",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is in DIR")
    chosen = parser.parse_args(arguments)
    for name, (least, most) in LIMITS.items():
        if not least <= getattr(chosen, name) <= most:
            parser.error(f"--{name} {getattr(chosen, name)} is out of range: expected {_expected(name)}")
    if chosen.width % chosen.heads:
        parser.error(f"--width {chosen.width} is no multiple of --heads {chosen.heads}")
    chosen.folder = Path(chosen.folder)
    commandline.use_device(None)
    if chosen.warm_start:
        commandline.say_how_long(WARM_START_SECONDS * max(1.0, chosen.layers * chosen.width**2 / (2 * 64**2)))
    description = make_tiny_model(**vars(chosen))
    commandline.say(json.dumps({"output": str(chosen.folder), **description}))


def _expected(name: str) -> str:
    least, most = LIMITS[name]
    return f"a whole number from {least} to {most}"


def make_tiny_model(
    folder: Path,
    tokenizer: str = "word",
    layers: int = 2,
    width: int = 64,
    heads: int = 2,
    seed: int = 0,
    warm_start: bool = False,
    overwrite: bool = False,
    task: str = ARTICLE,
) -> dict[str, object]:
    """Writes the folder, and returns its configuration and what the warm start reached, if any.

    Raises:
      UserError: the folder cannot be written, or is not empty and not to be overwritten, nor the same model; or the
        task is none.
    """
    import jax.numpy as jnp
    from flax import nnx

    from jaxrl_mini.machine import jax_settings
    from jaxrl_mini.policies import folders
    from jaxrl_mini.policies.gpt2 import GPT2, GPT2Config
    from jaxrl_mini.policies.language import LanguagePolicy
    from jaxrl_mini.policies.pretrained import Checkpoint, write_checkpoint
    from jaxrl_mini.policies.prompts import tokenize_task
    from jaxrl_mini.policies.warm_start import fit_random_play
    from jaxrl_mini.tasks.specification import load_task

    compiled = load_task(task)
    made_by = {"tokenizer": tokenizer, "layers": layers, "width": width, "heads": heads, "seed": seed}
    made_by |= {"command": "tiny_model", "warm_start": warm_start}
    place = folders.Destination(folder, overwrite, folders.made_by(made_by, compiled))
    built = (_word_tokenizer if tokenizer == "word" else _bpe_tokenizer)(_texts(compiled))
    built.encode_special_tokens = True

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in built.encode_batch(list(texts), add_special_tokens=False)]

    end_of_text = built.token_to_id(END_OF_TEXT)
    tokens = tokenize_task(encode, end_of_text, compiled)
    config = GPT2Config(
        vocab_size=built.get_vocab_size(),
        n_positions=-(-tokens.longest // 64) * 64,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
    )
    reached = {}
    with jax_settings.own():
        network, params = nnx.split(GPT2(config, jnp.float32, rngs=nnx.Rngs(seed)))
        if warm_start:
            params, losses = fit_random_play(LanguagePolicy(network, tokens), params, seed)
            reached = {"warm_start_losses": losses}
    built.encode_special_tokens = False
    companions = {
        "config.json": json.dumps(
            {"model_type": "gpt2", "bos_token_id": end_of_text, "eos_token_id": end_of_text, **asdict(config)}
        ).encode(),
        "tokenizer.json": built.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END_OF_TEXT,
                **({"unk_token": UNKNOWN} if tokenizer == "word" else {}),
            },
            indent=2,
        ).encode(),
    }
    write_checkpoint(place, Checkpoint(config, network, params, encode, end_of_text, companions))
    return {**asdict(config), **reached}


def _texts(task: "CompiledTask") -> list[str]:
    """The texts that a tokenizer is made of: all that the task can show, as often as there are ways to it."""
    from jaxrl_mini.policies.prompts import candidate_texts, opening_texts, segment_texts
    from jaxrl_mini.tasks.segments import segments

    if task.name == ARTICLE:
        return _texts_of_the_article(task)
    pieces, parts = segments(task), segment_texts(task)
    ways = [parts[segment] for segment in pieces.of_outcome if segment != pieces.nothing]
    return [*opening_texts(task), *candidate_texts(task), *ways]


def _texts_of_the_article(task: "CompiledTask") -> list[str]:
    """The same with every artifact at every step, also where none leads to it: such tokenizers there are."""
    import numpy as np

    from jaxrl_mini.policies.prompts import CUE, opening_texts
    from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_ACTIONS, VARIANTS, BinarySearchRepair

    texts, played = [opening_texts(task)[0] + " finish"], BinarySearchRepair()
    for played.steps, variant, action in np.ndindex(MAX_STEPS - 1, len(VARIANTS), NUM_ACTIONS):
        name, played.artifact, played.submitted = task.actions[action], VARIANTS[variant], False
        observation = played.step(name)
        if not played.submitted:
            texts.append(f" {name}\n{observation}{CUE}")
    return texts


def _word_tokenizer(texts: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(special_tokens=[END_OF_TEXT, UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _bpe_tokenizer(texts: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


if __name__ == "__main__":
    commandline.run_command(main)
