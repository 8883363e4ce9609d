"""Tokenizers that would be wrong without a word: read otherwise than written, lossy, or with another end of text."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from jaxrl_mini import config
from jaxrl_mini.policies import prompts
from jaxrl_mini.policies.pretrained import CheckpointError, load_checkpoint
from jaxrl_mini.policies.prompts import PromptError, tokenize_task
from jaxrl_mini.tasks.specification import load_task

ARTICLE = load_task(config.ARTICLE)
TASK = [*prompts.opening_texts(ARTICLE), *prompts.candidate_texts(ARTICLE), *prompts.segment_texts(ARTICLE)]


@pytest.fixture
def folder(golden, tmp_path):
    """A copy of a checkpoint, to be changed."""
    return shutil.copytree(golden / "tiny-gpt2-bpe", tmp_path / "model")


def set_json(path, **changes):
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in data.items() if value != "absent"}))


def set_pipeline(folder, **parts):
    built = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, part in parts.items():
        setattr(built, name, part)
    built.save(str(folder / "tokenizer.json"))
    return built


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
REBUILT = {
    "digits": {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])},
    "normalizer": {"normalizer": normalizers.Lowercase()},
}


@pytest.mark.parametrize("name", ["GPT2TokenizerFast", "GPT2Tokenizer", "absent"])
@pytest.mark.parametrize("part", REBUILT)
def test_ids_are_those_of_tokenizer_json_or_refused(folder, part, name):
    """These classes build a pipeline of their own, and leave out what the file has beyond it."""
    built = set_pipeline(folder, **REBUILT[part])
    text = "Low = 1033"
    set_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert load_checkpoint(folder).encode([text]) == [built.encode(text, add_special_tokens=False).ids]
    set_json(folder / "tokenizer_config.json", tokenizer_class=name)
    encode = load_checkpoint(folder).encode
    assert encode(["mid"]) == [built.encode("mid", add_special_tokens=False).ids]
    with pytest.raises(CheckpointError, match=r"'Low = 1033'.*set tokenizer_class .* to PreTrainedTokenizerFast"):
        encode([text, "a longer text with Digits 1033"])


def test_what_tokenizer_json_says_of_truncation_and_padding_changes_no_ids(folder):
    expected = load_checkpoint(folder).encode(["low", "low = mid + 1"])
    built = Tokenizer.from_file(str(folder / "tokenizer.json"))
    built.enable_truncation(2)
    built.enable_padding(length=9)
    built.save(str(folder / "tokenizer.json"))
    assert load_checkpoint(folder).encode(["low", "low = mid + 1"]) == expected


def encoder(unknown: str | None):
    """A byte-pair encoding that knows the task's texts but for the plus."""
    built = Tokenizer(models.BPE(unk_token=unknown))
    built.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    trainer = trainers.BpeTrainer(special_tokens=["[UNK]"], show_progress=False)
    built.train_from_iterator([text.replace("+", " ") for text in TASK], trainer)
    return lambda texts: [one.ids for one in built.encode_batch(list(texts), add_special_tokens=False)]


def test_a_tokenizer_that_loses_characters_of_the_task_is_refused_by_their_names():
    encode = encoder(unknown=None)
    assert encode(["mid + 1"]) == encode(["mid  1"])
    with pytest.raises(PromptError, match=r"loses '\+' of the task's texts"):
        tokenize_task(encode, 0)


def test_a_token_for_what_is_unknown_is_not_nothing():
    encode = encoder(unknown="[UNK]")
    assert encode(["mid + 1"]) != encode(["mid  1"])
    tokenize_task(encode, 0)


def test_a_normalizer_that_takes_characters_away_is_seen_behind_a_token_for_the_unknown():
    encode = encoder(unknown="[UNK]")
    with pytest.raises(PromptError, match="loses '=' of"):
        tokenize_task(lambda texts: encode([text.replace("=", "") for text in texts]), 0)


def test_a_tokenizer_that_takes_one_text_of_the_task_for_another_is_refused():
    def encode(texts):
        return [list(map(ord, text.replace("4", "3"))) for text in texts]

    with pytest.raises(PromptError, match=r"step 3 of 6.*step 4 of 6.* the same tokens"):
        tokenize_task(encode, 0)


def test_a_tokenizer_that_marks_the_start_of_every_text_is_refused(folder):
    """As those of Llama 2 do: a prompt is put together from texts that do not start one."""
    set_pipeline(folder, normalizer=normalizers.Prepend("\N{LOWER ONE EIGHTH BLOCK}"))
    set_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    checkpoint = load_checkpoint(folder)
    with pytest.raises(PromptError, match="the tokenizer joins parts of the prompt"):
        tokenize_task(checkpoint.encode, checkpoint.end_of_text)


def test_an_adapter_beside_the_weights_is_refused_with_the_way_to_merge_it(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match=r"adapter_config.json.*merge_and_unload\(\)"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config.json": 5}, "has eos_token_id 5,"),
        ({"generation_config.json": [5, 6]}, "has eos_token_id [5, 6],"),
        ({"config.json": "absent", "generation_config.json": [5, 0]}, None),
        ({}, None),
    ],
)
def test_another_end_of_text_in_a_configuration_is_said_once_in_one_line(folder, capsys, changes, said):
    for name, ends in changes.items():
        set_json(folder / name, eos_token_id=ends)
    for _ in range(2):
        load_checkpoint(folder)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (said is not None)
    assert not lines or (said in lines[0] and "its tokenizer has '<|endoftext|>', id 0" in lines[0])
