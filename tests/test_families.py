"""Families of causal language models: scores and gradients are transformers', what is saved is what was read."""

import json
import math
import shutil
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_language import plain_log_probs
from safetensors.numpy import load_file

from jaxrl_mini.config import Config
from jaxrl_mini.learning import language_training
from jaxrl_mini.policies import score_candidates
from jaxrl_mini.policies.decoder import Decoder, DecoderConfig, Rope
from jaxrl_mini.policies.language import load_policy, with_rest
from jaxrl_mini.policies.pretrained import CheckpointError, load_checkpoint, save_checkpoint
from jaxrl_mini.policies.prompts import PromptError

pytestmark = pytest.mark.usefixtures("quick_to_compile")

FAMILIES = ["llama", "qwen2", "qwen3", "smollm2", "mistral", "gemma"]
load = cache(load_checkpoint)


@pytest.fixture(params=FAMILIES)
def family(request, golden):
    return golden / f"tiny-{request.param}"


@pytest.fixture
def changed(golden, tmp_path):
    """A copy of a family's folder with other settings; None leaves one out."""

    def change(name, **settings):
        folder = shutil.copytree(golden / f"tiny-{name}", tmp_path / name)
        config = json.loads((folder / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return folder

    return change


def expected(folder):
    found = json.loads((folder / "expected.json").read_text())
    return found, [case["prompt"] for case in found["cases"]], [f" {action}" for action in found["actions"]]


def test_candidates_score_as_in_an_independent_implementation(family):
    found, prompts, candidates = expected(family)
    ours = score_candidates(family, prompts, candidates)
    np.testing.assert_allclose(ours, [case["log_probs"] for case in found["cases"]], atol=1e-4)
    free = score_candidates(family, prompts, candidates, replies="free")
    scores = np.array([case["scores"] for case in found["cases"]])
    np.testing.assert_allclose(free[:, :-1], scores, atol=1e-4)
    np.testing.assert_allclose(free[:, -1], np.log1p(-np.exp(scores).sum(axis=1)), atol=1e-4)


def test_token_ids_are_the_independent_implementations(family):
    found, prompts, candidates = expected(family)
    checkpoint = load(family)
    assert bool(checkpoint.beginning) == found["prompt_has_bos"]
    ids = [[*checkpoint.beginning, *tokens] for tokens in checkpoint.encode(prompts)]
    assert ids == [case["prompt_ids"] for case in found["cases"]]
    candidates = [[*tokens, checkpoint.end_of_text] for tokens in checkpoint.encode(candidates)]
    assert candidates == found["cases"][0]["candidate_ids"]


def test_gradient_norms_are_those_of_an_independent_implementation(family):
    found, prompts, candidates = expected(family)
    checkpoint = load(family)
    case = found["cases"][0]
    assert case["gradient_of"] == "-log_probs[0]"

    def log_prob(params):
        return plain_log_probs(checkpoint, params, prompts[:1], candidates)[0, 0]

    gradient = jax.jit(jax.grad(log_prob))(checkpoint.params)
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
    assert norm == pytest.approx(case["gradient_norm"], rel=1e-4)
    embedding = float(jnp.linalg.norm(gradient["embed_tokens"]["embedding"][...]))
    assert embedding == pytest.approx(case["embedding_gradient_norm"], rel=1e-4)


def test_what_is_saved_is_what_was_read(family, tmp_path):
    checkpoint = load(family)
    save_checkpoint(tmp_path / "saved", checkpoint)
    read, saved = (load_file(folder / "model.safetensors") for folder in (family, tmp_path / "saved"))
    assert {*read} == {*saved}
    for name, tensor in saved.items():
        np.testing.assert_array_equal(tensor, read[name].astype(np.float32), err_msg=name)
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert (
        config["dtype"] == "float32"
        and config["architectures"] == json.loads((family / "config.json").read_text())["architectures"]
    )


@pytest.mark.parametrize(
    "name, settings, least",
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, 1e-2),
        ("llama", {"rms_norm_eps": 1e-4}, 3e-4),
        ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, 1e-2),
        ("smollm2", {"rope_theta": 10000}, 1e-2),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000000.0}}, 1e-2),
        ("gemma", {"hidden_act": "silu", "hidden_activation": "silu"}, 1e-3),
    ],
)
def test_settings_change_the_scores(golden, changed, name, settings, least):
    found, prompts, candidates = expected(golden / f"tiny-{name}")
    ours = score_candidates(changed(name, **settings), prompts, candidates)
    difference = np.abs(ours - np.array([case["log_probs"] for case in found["cases"]]))
    assert difference.max(axis=1)[:3].min() > least


@pytest.mark.parametrize(
    "name, settings, words",
    [
        ("llama", {"model_type": "bloom"}, "model_type 'bloom': supported are gpt2, llama, mistral"),
        ("llama", {"architectures": ["LlamaForTokenClassification"]}, "supported are LlamaForCausalLM"),
        ("llama", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ("llama", {"head_dim": 15}, "`head_dim`=15"),
        ("llama", {"hidden_act": "gelu_10"}, "hidden_act 'gelu_10': supported are"),
        ("llama", {"rms_norm_eps": 1.5}, "rms_norm_eps 1.5: it must be above 0"),
        ("llama", {"num_hidden_layers": 10**9}, "has no tensors for its num_hidden_layers 1000000000 blocks"),
        ("llama", {"num_hidden_layers": 2}, "'layers.2.input_layernorm.weight' that LlamaForCausalLM does not have"),
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2}}, "rope_type 'dynamic'"),
        ("qwen3", {"attention_bias": True}, "no tensor 'model.layers.0.self_attn."),
    ],
)  # fmt: skip
def test_what_no_network_computes_is_refused_in_one_line(changed, name, settings, words):
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(changed(name, **settings))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_what_does_not_fit_into_the_window_is_refused(changed, golden):
    policy, _ = load_policy(changed("mistral", sliding_window=512))
    assert 256 < policy.task.longest <= 512
    with pytest.raises(PromptError, match="but the model's sliding_window is 256"):
        load_policy(golden / "tiny-mistral")


def test_frequencies_by_hand():
    assert Rope(10000.0).frequencies(4).tolist() == pytest.approx([1.0, 0.01])
    assert Rope(10000.0, "linear", 4.0).frequencies(4).tolist() == pytest.approx([0.25, 0.0025])
    # 64 tokens are 10.2 turns of the first pair, 0.1 of the second: above 4, and below 1.
    assert Rope(10000.0, "llama3", 8.0, 64.0, 1.0, 4.0).frequencies(4).tolist() == pytest.approx([1.0, 0.01 / 8])
    # 2.5 turns are half way between 1 and 4.
    between = Rope(10000.0, "llama3", 8.0, 5 * math.pi, 1.0, 4.0).frequencies(2)
    assert between.tolist() == pytest.approx([0.5 + 0.5 / 8])


def small(**flags) -> DecoderConfig:
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return DecoderConfig(**{**sizes, **heads, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope": Rope(100.0)} | flags)


def test_depth_does_not_grow_the_program():
    sizes = []
    for layers in (2, 9):
        network = nnx.eval_shape(lambda layers=layers: Decoder(small(num_hidden_layers=layers), rngs=nnx.Rngs(0)))
        graph, params = nnx.split(network)

        def run(params, graph=graph):
            return nnx.merge(graph, params)(jnp.zeros((1, 5), int), jnp.arange(5)[None], jnp.ones((1, 5, 5), bool))[0]

        sizes.append(len(str(jax.make_jaxpr(run)(params)).splitlines()))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("flags", [{}, {"qk_norm": True, "rotated": (True, False)}, {"unit_offset": True}], ids=str)
def test_what_was_read_before_is_kept(flags):
    """A text at once, or its end behind the keys and values of its beginning."""
    network = Decoder(small(**flags), rngs=nnx.Rngs(0))
    tokens, positions = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6]]), jnp.arange(8)[None]
    whole, _ = network(tokens, positions, jnp.tri(8, dtype=bool)[None])
    _, cache = network(tokens[:, :5], positions[:, :5], jnp.tri(5, dtype=bool)[None])
    end, _ = network(tokens[:, 5:], positions[:, 5:], jnp.tri(8, dtype=bool)[None, 5:], cache)
    np.testing.assert_allclose(end, whole[:, 5:], atol=1e-5)
    assert cache.keys.shape == (2, 1, 2, 5, 4)


def test_only_differences_of_positions_matter_where_all_are_turned():
    network = Decoder(small(), rngs=nnx.Rngs(1))
    tokens, mask = jnp.array([[3, 1, 4, 1]]), jnp.tri(4, dtype=bool)[None]
    here, there = (network(tokens, jnp.arange(first, first + 4)[None], mask)[0] for first in (0, 30))
    np.testing.assert_allclose(here, there, atol=1e-4)


def test_the_rest_is_what_is_missing_to_one():
    log_probs = jnp.log(jnp.array([[0.25, 0.5], [1e-9, 1e-12], [0.5, 0.5]]))
    rest = np.asarray(with_rest(log_probs))[:, -1]
    np.testing.assert_allclose(rest[:2], [np.log(0.25), -1e-9 - 1e-12], rtol=1e-5)
    assert rest[2] < -80 and np.isfinite(rest[2])
    gradient = jax.grad(lambda x: with_rest(x)[0, -1])(log_probs)
    np.testing.assert_allclose(gradient[0], [-1.0, -2.0], rtol=1e-5)


def test_replies_of_another_kind_are_refused(golden):
    with pytest.raises(PromptError, match="replies 'any' is unknown: expected one of candidates, free"):
        score_candidates(golden / "tiny-gpt2-word", ["a"], [" b"], replies="any")


@pytest.mark.full
def test_a_family_trains(family, changed):
    folder = changed("mistral", sliding_window=512) if family.name == "tiny-mistral" else family
    config = Config(backend="hf", model=str(folder), lr=1e-3, iterations=2, groups=2, group_size=4, eval_episodes=32)
    result = language_training.run(config)
    assert np.isfinite(result.history["loss"]).all() and result.after.exact_mean_kl > 0
    rate, sampled = result.after.exact_success_rate, result.after.successes / 32
    assert abs(rate - sampled) < 4 * (rate * (1 - rate) / 32) ** 0.5 + 1e-9


# PyTorch


def torch_scores(folder, prompts, candidates):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    checkpoint, result = load_checkpoint(folder), np.zeros((len(prompts), len(candidates)))
    for place in np.ndindex(result.shape):
        prompt = [*checkpoint.beginning, *checkpoint.encode([prompts[place[0]]])[0]]
        ids = torch.tensor([prompt + checkpoint.encode([candidates[place[1]]])[0] + [checkpoint.end_of_text]])
        with torch.no_grad():
            log_probs = model.eval()(ids).logits.log_softmax(-1)[0, :-1]
        result[place] = log_probs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()
    return result


@pytest.mark.full
def test_pytorch_loads_what_is_saved_and_scores_the_same(family, tmp_path):
    _, prompts, candidates = expected(family)
    save_checkpoint(tmp_path / "saved", load(family))
    ours = score_candidates(tmp_path / "saved", prompts, candidates, replies="free")[:, :-1]
    np.testing.assert_allclose(ours, torch_scores(tmp_path / "saved", prompts, candidates), atol=1e-4)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, settings",
    [
        ("SmolLM3", {"no_rope_layers": [1, 1, 0], "num_hidden_layers": 3, "no_rope_layer_interval": 3}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
        ("Llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
        ("Qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}, "attention_bias": True}),
        ("Gemma", {"hidden_activation": "gelu"}),
    ],
    ids=str,
)
def test_other_flags_are_those_of_transformers(golden, tmp_path, kind, settings):
    """Random models made there, with biases and norms that are not those of the beginning."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 432, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, "pad_token_id": None} | settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    folder = shutil.copytree(golden / "tiny-qwen2", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    _, prompts, candidates = expected(golden / "tiny-qwen2")
    ours = score_candidates(folder, prompts, candidates, replies="free")[:, :-1]
    np.testing.assert_allclose(ours, torch_scores(folder, prompts, candidates), atol=1e-4)
