"""Makes a small random GPT-2: ``python -m jaxrl_mini.tiny_model DIR``."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_mini.config import MAX_SEED
from jaxrl_mini.machine import commandline

if TYPE_CHECKING:
    from jaxrl_mini.policies.language import LanguagePolicy

EXAMPLES = """\
examples:
  python -m jaxrl_mini.tiny_model runs/tiny
  python -m jaxrl_mini.train --backend hf --model runs/tiny --lr 1e-3

Writes a Hugging Face checkpoint folder, and downloads nothing.
"""

TOKENIZERS = ("word", "bpe")
END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
BPE_VOCABULARY = 384
LIMITS = {"layers": (1, 24), "width": (1, 1024), "heads": (1, 1024), "seed": (0, MAX_SEED)}
WARM_START_STEPS, WARM_START_EPISODES, WARM_START_LR = 400, 4, 3e-3
WARM_START_TRANSCRIPTS = 512
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
) -> dict[str, object]:
    """Writes the folder, and returns its configuration and what the warm start reached, if any.

    Raises:
      UserError: the folder cannot be written, or is not empty and not to be overwritten, nor the same model.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxrl_mini.machine import jax_settings
    from jaxrl_mini.policies import folders
    from jaxrl_mini.policies.gpt2 import GPT2, GPT2Config
    from jaxrl_mini.policies.language import LanguagePolicy
    from jaxrl_mini.policies.pretrained import Checkpoint, write_checkpoint
    from jaxrl_mini.policies.prompts import tokenize_task

    made_by = {"tokenizer": tokenizer, "layers": layers, "width": width, "heads": heads, "seed": seed}
    made_by |= {"command": "tiny_model", "warm_start": warm_start}
    place = folders.Destination(folder, overwrite, folders.made_by(made_by))
    built = _word_tokenizer() if tokenizer == "word" else _bpe_tokenizer()
    built.encode_special_tokens = True

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in built.encode_batch(list(texts), add_special_tokens=False)]

    end_of_text = built.token_to_id(END_OF_TEXT)
    task = tokenize_task(encode, end_of_text)
    config = GPT2Config(
        vocab_size=built.get_vocab_size(),
        n_positions=-(-task.longest // 64) * 64,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
    )
    reached = {}
    with jax_settings.own():
        network, params = nnx.split(GPT2(config, jnp.float32, rngs=nnx.Rngs(seed)))
        if warm_start:
            params, losses = fit_random_play(LanguagePolicy(network, task), params, jax.random.key(seed))
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


def fit_random_play(policy: "LanguagePolicy", params: Any, key: Any) -> tuple[Any, dict[str, float]]:
    """Learns uniformly random play as text, by maximum likelihood.

    The loss is a sum of two means of -log p. That of the six candidates' raw scores, over the steps of random
    episodes, is at least log 6: there the network puts all its probability on the six, equally. That of the tokens
    of the observations has hardly a limit below: an observation follows from the last one and the action.

    Without the observations the network drowns what it reads in a constant (with 2 blocks of width 64, histories with
    another line fixed then differed by 0.4 % of the final hidden state, and by 20 % at random weights), and
    training stays long at a success of 0.93, which is that of fixing lines at random until both are fixed.

    Returns:
      The fitted parameters, and both parts of the loss of the last batch.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from jaxrl_mini.tasks.repair import MAX_STEPS

    random_key, key = jax.random.split(key)
    played = np.array(jax.random.randint(random_key, (WARM_START_TRANSCRIPTS, MAX_STEPS), 0, 5))
    tokens, observed = _transcripts(policy, played[:, :-1])
    causal = np.tri(tokens.shape[1], dtype=bool)
    rate = optax.warmup_cosine_decay_schedule(0.0, WARM_START_LR, WARM_START_STEPS // 20, WARM_START_STEPS)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    def loss(params: Any, rows: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        ids, weights = jnp.asarray(tokens)[rows], jnp.asarray(observed)[rows, 1:]
        network = nnx.merge(policy.network, params)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        hidden, _ = network(ids, positions, jnp.broadcast_to(causal, (len(rows), *causal.shape)))
        log_probs = jax.nn.log_softmax(network.logits(hidden[:, :-1]))
        each = jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=2)[..., 0]  # [row, token - 1]
        parts = {
            "candidates": -policy.scores(params, jnp.asarray(played)[rows].T).mean(),
            "observations": -(each * weights).sum() / weights.sum(),
        }
        return parts["candidates"] + parts["observations"], parts

    @jax.jit
    def fit(params: Any, key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        def step(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], dict[str, jax.Array]]:
            params, state = carry
            rows = jax.random.randint(key, (WARM_START_EPISODES,), 0, WARM_START_TRANSCRIPTS)
            gradient, parts = jax.grad(loss, has_aux=True)(params, rows)
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(params, updates), state), parts

        (params, _), parts = jax.lax.scan(
            step, (params, optimizer.init(params)), jax.random.split(key, WARM_START_STEPS)
        )
        return params, jax.tree.map(lambda losses: losses[-1], parts)

    params, parts = fit(params, key)
    return params, {name: float(part) for name, part in parts.items()}


def _transcripts(policy: "LanguagePolicy", actions: Any) -> tuple[Any, Any]:
    """Whole episodes as rows of tokens, padded at their end, and 1 where a token is part of an observation, else 0."""
    import numpy as np

    from jaxrl_mini.tasks.tables import TABLES

    task, rows = policy.task, []
    action_tokens = task.tree.paths.sum(axis=1).astype(int) - 1  # without the end-of-text token
    for episode in actions:
        ids, observed, variant = [task.opening], [np.zeros(len(task.opening))], 0
        for step, action in enumerate(episode):
            length = task.lengths[step, variant, action]
            ids.append(task.segments[step, variant, action][-length:])
            observed.append(np.arange(length) >= action_tokens[action])
            variant = int(TABLES.next_variant[step, variant, action])
        rows.append((np.concatenate(ids), np.concatenate(observed)))
    width = max(len(ids) for ids, _ in rows)
    padded = [[np.pad(part, (0, width - len(part))) for part in row] for row in rows]
    tokens, masks = (np.stack(column) for column in zip(*padded, strict=True))
    return tokens.astype(np.int32), masks.astype(np.float32)


def _texts() -> Iterator[str]:
    """All texts that the task can show."""
    import numpy as np

    from jaxrl_mini.policies.prompts import CONTINUING, opening_text, segment_text
    from jaxrl_mini.tasks.repair import MAX_STEPS, NUM_VARIANTS

    yield opening_text() + " finish"
    for step, variant in np.ndindex(MAX_STEPS - 1, NUM_VARIANTS):
        for action in CONTINUING:
            yield segment_text(step, variant, action)


def _word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(special_tokens=[END_OF_TEXT, UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _bpe_tokenizer() -> Any:
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
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


if __name__ == "__main__":
    commandline.run_command(main)
