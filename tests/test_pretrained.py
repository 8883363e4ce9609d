"""Checkpoint folders: what is read computes what PyTorch computes, what is saved PyTorch reads, the rest is refused."""

import json
import os
import shutil
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from plain_language import CANDIDATES, plain_log_probs
from safetensors.numpy import load_file, save_file

from jaxrl_mini.config import UserError
from jaxrl_mini.policies import score_candidates
from jaxrl_mini.policies.folders import Destination
from jaxrl_mini.policies.pretrained import CheckpointError, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.usefixtures("quick_to_compile")

PROMPTS = ["Repair binary search.", "low = mid ; high = mid - 1\nAction:", "x"]


@pytest.fixture
def folder(golden, tmp_path):
    """A copy of a checkpoint, to be changed."""
    return shutil.copytree(golden / "tiny-gpt2-word", tmp_path / "model")


def set_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def set_tensors(folder, change):
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def untie(tensors):
    head = np.random.default_rng(0).normal(0, 0.1, tensors["transformer.wte.weight"].shape).astype(np.float32)
    return tensors | {"lm_head.weight": head}


def scores(folder):
    return np.asarray(score_candidates(folder, PROMPTS, CANDIDATES))


def without_prefix(tensors):
    masks = {f"h.{i}.attn.bias": np.tri(8, dtype=np.float32) for i in range(2)}  # old folders hold causal masks
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | masks


def shard(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_prefix_shards_and_a_written_tied_head_do_not_matter(golden, folder):
    expected = scores(golden / "tiny-gpt2-word")
    set_tensors(folder, lambda t: t | {"lm_head.weight": t["transformer.wte.weight"]})
    np.testing.assert_array_equal(scores(folder), expected)
    set_tensors(folder, without_prefix)
    np.testing.assert_array_equal(scores(folder), expected)
    shard(folder)
    np.testing.assert_array_equal(scores(folder), expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weights_of_half_precision_are_read_as_float32(folder, dtype):
    set_tensors(folder, lambda t: {name: tensor.astype(dtype) for name, tensor in t.items()})
    params = load_checkpoint(folder).params
    halves = load_file(folder / "model.safetensors")
    read = params["wte"]["embedding"][...]
    assert read.dtype == jnp.float32
    np.testing.assert_array_equal(read, halves["transformer.wte.weight"].astype(np.float32))


FLAGS = [
    {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True},
    {"layer_norm_epsilon": 0.1},
    {"activation_function": "relu"},
    {"tie_word_embeddings": False},
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_every_flag_changes_the_scores(golden, folder, flags):
    if "tie_word_embeddings" in flags:
        set_tensors(folder, untie)
    set_config(folder, **flags)
    assert np.abs(scores(folder) - scores(golden / "tiny-gpt2-word")).max() > 1e-4


def everything_else(folder):
    """A model with no flag at its default: untied head, padded vocabulary, another inner width."""
    rng = np.random.default_rng(1)

    def widen(tensors):
        for layer in range(2):
            mlp = f"transformer.h.{layer}.mlp."
            for name, shape in (("c_fc.weight", (16, 24)), ("c_fc.bias", (24,)), ("c_proj.weight", (24, 16))):
                tensors[mlp + name] = rng.normal(0, 0.2, shape).astype(np.float32)
        padding = np.full((4, 16), 0.3, np.float32)
        tensors["transformer.wte.weight"] = np.concatenate([tensors["transformer.wte.weight"], padding])
        return untie(tensors)

    set_tensors(folder, widen)
    set_config(
        folder,
        n_inner=24,
        vocab_size=40,
        tie_word_embeddings=False,
        scale_attn_by_inverse_layer_idx=True,
        layer_norm_epsilon=0.01,
        activation_function="gelu",
    )


def test_a_saved_folder_scores_the_same_and_has_the_standard_names(folder, tmp_path):
    everything_else(folder)
    checkpoint = load_checkpoint(folder)
    save_checkpoint(tmp_path / "saved", checkpoint)
    np.testing.assert_array_equal(scores(tmp_path / "saved"), scores(folder))
    saved, loaded = (load_file(path / "model.safetensors") for path in (tmp_path / "saved", folder))
    assert saved.keys() == loaded.keys()
    for name in saved:
        np.testing.assert_array_equal(saved[name], loaded[name])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_saved_but_small_steps_are_kept_while_training(folder, tmp_path, dtype):
    checkpoint = load_checkpoint(folder, dtype)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(checkpoint.params))
    save_checkpoint(tmp_path / "saved", checkpoint)
    assert {tensor.dtype.name for tensor in load_file(tmp_path / "saved/model.safetensors").values()} == {dtype}
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == dtype
    rounded = np.abs(scores(tmp_path / "saved") - scores(folder)).max()
    assert 1e-6 < rounded < 0.05


def test_a_tied_head_is_not_written(golden, tmp_path):
    checkpoint = load_checkpoint(golden / "tiny-gpt2-bpe")
    save_checkpoint(tmp_path / "saved", checkpoint)
    names = load_file(tmp_path / "saved/model.safetensors").keys()
    assert names == load_file(golden / "tiny-gpt2-bpe/model.safetensors").keys()


def test_what_is_saved_does_not_depend_on_the_folder_that_was_read(folder, tmp_path):
    checkpoint = load_checkpoint(folder)
    expected = scores(folder)
    shutil.rmtree(folder)
    save_checkpoint(tmp_path / "saved", checkpoint)
    np.testing.assert_array_equal(scores(tmp_path / "saved"), expected)


def test_a_chat_template_goes_along(folder, tmp_path):
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    save_checkpoint(tmp_path / "saved", load_checkpoint(folder))
    assert (tmp_path / "saved/chat_template.jinja").read_text() == "{{ messages }}"


def test_a_folder_is_written_whole_or_not_at_all(golden, tmp_path, monkeypatch):
    checkpoint = load_checkpoint(golden / "tiny-gpt2-word")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(UserError, match=r"cannot save a policy to .*disk full"):
        save_checkpoint(tmp_path / "saved", checkpoint)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_content_is_replaced_only_if_asked(golden, tmp_path):
    checkpoint = load_checkpoint(golden / "tiny-gpt2-word")
    (tmp_path / "saved").mkdir()
    save_checkpoint(tmp_path / "saved", checkpoint)  # over an empty one
    (tmp_path / "saved/note").touch()
    with pytest.raises(UserError, match="not empty"):
        save_checkpoint(tmp_path / "saved", checkpoint)
    save_checkpoint(tmp_path / "saved", checkpoint, overwrite=True)
    assert not (tmp_path / "saved/note").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_destination_that_cannot_be_written_is_refused_first(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot save"):
            Destination(place)


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def missing_shard(folder):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def outside_shard(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "../weights.safetensors"}}')


REFUSED = {
    "is not a folder": shutil.rmtree,
    "has no config.json": lambda f: (f / "config.json").unlink(),
    "config.json' cannot be read": lambda f: (f / "config.json").write_text("{"),
    "has no weights: model.safetensors": lambda f: (f / "model.safetensors").unlink(),
    "weights .* cannot be read": lambda f: (f / "model.safetensors").write_bytes(b"0" * 99),
    "pickled weights .*save_pretrained.*AutoTokenizer": pickled,
    "names 'model-00002-of-00002.safetensors', which is not": missing_shard,
    "names '../weights.safetensors', which is not": outside_shard,
    "has no tokenizer: tokenizer.json or vocab.json and merges.txt": lambda f: (f / "tokenizer.json").unlink(),
    "the tokenizer of .* cannot be read": lambda f: (f / "tokenizer.json").write_text("{}"),
    "no EOS token": lambda f: (f / "tokenizer_config.json").write_text("{}"),
    "model_type 'bloom': supported are gpt2, llama": lambda f: set_config(f, model_type="bloom"),
    "GPT2ForSequenceClassification": lambda f: set_config(f, architectures=["GPT2ForSequenceClassification"]),
    "sets add_cross_attention": lambda f: set_config(f, add_cross_attention=True),
    "sets quantization_config": lambda f: set_config(f, quantization_config={"quant_method": "fp8"}),
    "sets auto_map": lambda f: set_config(f, auto_map={"AutoConfig": "code.Config"}),
    "activation_function 'laplace': supported are gelu": lambda f: set_config(f, activation_function="laplace"),
    "config.json of .* cannot be read.*n_layer": lambda f: set_config(f, n_layer="two"),
    "n_layer 0: it must be from 1 to": lambda f: set_config(f, n_layer=0),
    "not a multiple of n_head 3": lambda f: set_config(f, n_head=3),
    "has no tensor 'transformer.h.2.attn": lambda f: set_config(f, n_layer=3),
    "no tensors for its n_layer 1000000000 blocks": lambda f: set_config(f, n_layer=10**9),
    "n_embd 100.*it must be from 1 to": lambda f: set_config(f, n_embd=10**30),
    "layer_norm_epsilon -1": lambda f: set_config(f, layer_norm_epsilon=-1.0),
    "holds numbers that are not finite": lambda f: set_tensors(
        f, lambda t: {name: np.full_like(x, np.nan) for name, x in t.items()}
    ),
    "names a tokenizer_file: remove it": lambda f: (f / "tokenizer_config.json").write_text(
        '{"tokenizer_file": "../other/tokenizer.json"}'
    ),
    "tensor 'h.1.* GPT2LMHeadModel does not have": lambda f: set_config(f, n_layer=1),
    r"config.json asks for floats \[99, 16\]": lambda f: set_config(f, vocab_size=99),
    "is int8": lambda f: set_tensors(f, lambda t: {name: x.astype(np.int8) for name, x in t.items()}),
    "has no tensor 'lm_head.weight'": lambda f: set_config(f, tie_word_embeddings=False),
    "lm_head.weight differs": lambda f: set_tensors(f, untie),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(folder, message):
    REFUSED[message](folder)
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_checkpoint(folder)
    assert "\n" not in str(refusal.value)


def test_a_tokenizer_in_two_files_is_read(golden, tmp_path):
    shutil.copytree(golden / "tiny-gpt2-bpe", tmp_path / "model")
    model = json.loads((tmp_path / "model/tokenizer.json").read_text())["model"]
    (tmp_path / "model/tokenizer.json").unlink()
    (tmp_path / "model/vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "model/merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    (tmp_path / "model/tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    np.testing.assert_array_equal(scores(tmp_path / "model"), scores(golden / "tiny-gpt2-bpe"))


def torch_scores(folder):
    """Scores by transformers on PyTorch, a row per prompt and candidate."""
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    encode = load_checkpoint(folder).encode
    end_of_text = load_checkpoint(folder).end_of_text
    result = np.zeros((len(PROMPTS), len(CANDIDATES)))
    for place in product(range(len(PROMPTS)), range(len(CANDIDATES))):
        prompt, candidate = encode([PROMPTS[place[0]], CANDIDATES[place[1]]])
        ids = torch.tensor([prompt + candidate + [end_of_text]])
        with torch.no_grad():
            log_probs = model.eval()(ids).logits.log_softmax(-1)[0, :-1]
        result[place] = log_probs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()
    return result - np.logaddexp.reduce(result, axis=1, keepdims=True)


@pytest.mark.full
@pytest.mark.parametrize(
    "change", [*(lambda f, flags=flags: set_config(f, **flags) for flags in FLAGS[:4]), everything_else]
)
def test_pytorch_loads_what_is_saved_and_scores_the_same(folder, tmp_path, change):
    pytest.importorskip("torch")
    change(folder)
    checkpoint = load_checkpoint(folder)
    save_checkpoint(tmp_path / "saved", checkpoint)
    np.testing.assert_allclose(scores(folder), torch_scores(tmp_path / "saved"), atol=1e-4)


@pytest.mark.parametrize("name", ["tiny-gpt2-word", "tiny-gpt2-bpe"])
def test_gradient_norms_are_those_of_an_independent_implementation(golden, name):
    expected = json.loads((golden / name / "expected.json").read_text())
    checkpoint = load_checkpoint(golden / name)
    prompts = [case["prompt"] for case in expected["cases"]]

    @jax.jit
    def gradients(params):
        return jax.jacrev(lambda p: -jnp.diagonal(plain_log_probs(checkpoint, p, prompts)))(params)

    per_case = gradients(checkpoint.params)
    squares = sum((leaf**2).reshape(len(prompts), -1).sum(axis=1) for leaf in jax.tree.leaves(per_case))
    wanted = [case["gradient_norm"] for case in expected["cases"]]
    np.testing.assert_allclose(np.sqrt(squares), wanted, rtol=1e-3)
    embedding = per_case["wte"]["embedding"][...].reshape(len(prompts), -1)
    wanted = [case["wte_gradient_norm"] for case in expected["cases"]]
    np.testing.assert_allclose(np.linalg.norm(embedding, axis=1), wanted, rtol=1e-3)
