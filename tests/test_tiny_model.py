"""Random models made offline: folders that load, with the tokens they promise."""

import json

import numpy as np
import pytest

from jaxrl_mini import tiny_model
from jaxrl_mini.exact.expectations import expectations
from jaxrl_mini.learning import language_training
from jaxrl_mini.policies import warm_start
from jaxrl_mini.policies.language import load_policy
from jaxrl_mini.tasks.histories import histories


def test_a_word_tokenizer_has_one_token_per_action(command, tmp_path):
    outcome = command(tiny_model, "tiny", "--layers", 1, "--width", 8, "--heads", 2)
    assert outcome.code == 0, outcome.err
    policy, checkpoint = load_policy(tmp_path / "tiny")
    assert (policy.task.tree.depths == 1).all() and len(policy.task.tree.tokens) == 6
    assert (checkpoint.config.n_layer, checkpoint.config.n_embd, checkpoint.config.n_head) == (1, 8, 2)
    assert json.loads(outcome.out[-1])["output"] == "tiny"
    unknown = checkpoint.encode(["word-that-is-not-in-the-task"])[0][0]
    assert unknown not in policy.task.openings and unknown not in policy.task.segments


def test_a_bpe_tokenizer_has_actions_of_several_tokens(command, tmp_path):
    assert command(tiny_model, "tiny", "--tokenizer", "bpe", "--layers", 1, "--width", 8).code == 0
    policy, _ = load_policy(tmp_path / "tiny")
    assert policy.task.tree.depths.max() >= 3


def test_the_seed_decides_the_weights(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tiny_model.make_tiny_model(tmp_path / name, layers=1, width=8, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("tokenizer, width", [("word", 16), pytest.param("bpe", 32, marks=pytest.mark.full)])
def test_a_warm_start_plays_like_uniform_play(tmp_path, monkeypatch, tokenizer, width):
    monkeypatch.setattr(warm_start, "STEPS", 300)
    reached = tiny_model.make_tiny_model(tmp_path / "tiny", tokenizer, layers=1, width=width, warm_start=True)
    assert np.log(6) <= reached["warm_start_losses"]["candidates"] < np.log(6) + 0.3
    assert reached["warm_start_losses"]["observations"] < 1.5  # the logarithm of the vocabulary of bpe, 368, is 5.9
    policy, checkpoint = load_policy(tmp_path / "tiny")
    log_probs = language_training.history_log_probs(policy, checkpoint.params, "train")
    success = expectations(histories(policy.task.task), log_probs).success
    assert 0.04 < success < 0.1


@pytest.mark.parametrize(
    "flags",
    [["--layers", 0], ["--width", 10, "--heads", 4], ["--seed", -1], ["--tokenizer", "letters"], ["--heads", 0]],
)
def test_bad_flags_are_refused(command, tmp_path, flags):
    outcome = command(tiny_model, "tiny", *flags)
    assert outcome.code == 2 and len(outcome.err) == 1
    assert not (tmp_path / "tiny").exists()


def test_a_folder_with_content_is_replaced_only_if_asked(command, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/note").touch()
    for flags in ([], ["--overwrite"]):  # what holds no policy is never replaced
        assert command(tiny_model, "tiny", "--layers", 1, "--width", 8, *flags).code == 2
        assert (tmp_path / "tiny/note").exists()
    (tmp_path / "tiny/config.json").touch()
    assert command(tiny_model, "tiny", "--layers", 1, "--width", 8, "--overwrite").code == 0
    assert not (tmp_path / "tiny/note").exists()
