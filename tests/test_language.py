"""The language-model policy is the plain way's, faster: same scores, gradients, episodes and expectations."""

import itertools
import json
import shutil
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_language import CANDIDATES, plain_log_probs, prompt_after

from jaxrl_mini import load_player, play
from jaxrl_mini.exact.expectations import expectations
from jaxrl_mini.learning import language_episodes, language_training
from jaxrl_mini.policies import language, score_candidates
from jaxrl_mini.policies.language import draw, load_policy
from jaxrl_mini.policies.pretrained import load_checkpoint
from jaxrl_mini.policies.prompts import PromptError, token_tree, tokenize_task
from jaxrl_mini.policies.scenes import Start, scene
from jaxrl_mini.tasks.histories import histories
from jaxrl_mini.tasks.repair import ACTIONS, MAX_STEPS

pytestmark = pytest.mark.usefixtures("quick_to_compile")

FINISH = ACTIONS.index("finish")
EPISODES, AT_ONCE = 4, 32
"""That are scored, and played, in one call: everywhere as many, so that a policy's programs are compiled once."""


load = cache(load_policy)


@pytest.fixture(scope="module", params=["tiny-gpt2-word", "tiny-gpt2-bpe"])
def loaded(request, golden):
    return load(golden / request.param)


@pytest.fixture(scope="module")
def word(tiny_folder):
    return load_policy(tiny_folder)


def episodes(seed, count=EPISODES):
    """Random action sequences, -1 after `finish`; [step, episode]."""
    actions = np.random.default_rng(seed).integers(0, 6, (MAX_STEPS, count))
    ended = np.cumsum(actions == FINISH, axis=0) - (actions == FINISH) > 0
    return np.where(ended, -1, actions).astype(np.int32)


def shown(policy, actions):
    """What episodes were shown that took these actions."""
    return language_episodes.replayed(policy.task.task, actions[..., None]).played.prompts


def played(policy, params, uniforms):
    """Actions drawn with these numbers, -1 after the end, and the log-probabilities they were drawn from."""
    nothing = np.zeros(uniforms.shape[1], np.int32)
    start = Start(nothing, nothing, uniforms, None)
    episodes, behavior = language_episodes.play(policy, params, scene(policy.task.task), start)
    return language_episodes.taken(language_episodes.Batch(episodes, nothing), 6), behavior


@pytest.mark.parametrize("name", ["tiny-gpt2-word", "tiny-gpt2-bpe"])
def test_candidates_score_as_in_an_independent_implementation(golden, name):
    expected = json.loads((golden / name / "expected.json").read_text())
    prompts = [case["prompt"] for case in expected["cases"]]
    got = score_candidates(golden / name, prompts, [f" {action}" for action in expected["actions"]])
    np.testing.assert_allclose(got, [case["log_probs"] for case in expected["cases"]], atol=1e-4)


@pytest.mark.parametrize("name", ["tiny-gpt2-word", "tiny-gpt2-bpe"])
def test_token_ids_are_the_independent_implementations(golden, name):
    checkpoint = load_checkpoint(golden / name)
    for case in json.loads((golden / name / "expected.json").read_text())["cases"]:
        assert checkpoint.encode([case["prompt"]]) == [case["prompt_ids"]]
        ids = checkpoint.encode(CANDIDATES)
        assert [[*tokens, checkpoint.end_of_text] for tokens in ids] == case["candidate_ids"]


def live_prompts(actions):
    """The (step, episode) of every action taken, and the prompts before them."""
    places = np.argwhere(actions >= 0)
    return tuple(places.T), [prompt_after(actions[:step, episode]) for step, episode in places]


def test_packed_episodes_score_like_every_prompt_and_candidate_in_a_row_of_its_own(loaded):
    policy, checkpoint = loaded
    actions = episodes(0)
    packed = language_training.log_probs(policy, checkpoint.params, shown(policy, actions))
    places, prompts = live_prompts(actions)
    np.testing.assert_allclose(packed[places], plain_log_probs(checkpoint, checkpoint.params, prompts), atol=1e-5)
    assert np.isfinite(packed).all()


def test_gradients_of_packed_episodes_are_the_plain_ways(golden):
    policy, checkpoint = load(golden / "tiny-gpt2-bpe")  # actions of several tokens, a tree with branches
    actions = episodes(1, count=2)
    places, prompts = live_prompts(actions)
    weights = np.random.default_rng(2).normal(size=(len(prompts), 6))

    def plain(params):
        return (weights * plain_log_probs(checkpoint, params, prompts)).sum()

    def packed(params):
        return (weights * policy.log_probs(params, shown(policy, actions))[places]).sum()

    want, got = (jax.jit(jax.grad(f))(checkpoint.params) for f in (plain, packed))
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-5 * scale)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_happens_later_or_elsewhere_changes_no_score(word, data):
    policy, checkpoint = word

    def score(params, actions):
        return language_training.log_probs(policy, params, shown(policy, actions))

    actions = episodes(data.draw(st.integers(0, 10**6)))
    step = data.draw(st.integers(0, MAX_STEPS - 1))
    changed = actions.copy()
    changed[step:] = episodes(data.draw(st.integers(0, 10**6)))[step:]
    changed[:, 1:] = np.roll(changed[:, 1:], 1, axis=1)
    a, b = score(checkpoint.params, actions), score(checkpoint.params, changed)
    live = actions[: step + 1, 0] >= 0
    np.testing.assert_allclose(a[: step + 1, 0][live], b[: step + 1, 0][live], atol=2e-6)


def test_the_sampler_draws_from_what_the_learner_computes(word):
    policy, checkpoint = word
    uniforms = jax.random.uniform(jax.random.key(3), (MAX_STEPS, AT_ONCE))
    actions, behavior = played(policy, checkpoint.params, uniforms)
    live = np.asarray(actions) >= 0
    parts = np.split(np.asarray(actions), AT_ONCE // EPISODES, axis=1)
    scored = [language_training.log_probs(policy, checkpoint.params, shown(policy, part)) for part in parts]
    log_probs = np.concatenate(scored, axis=1)
    ratios = np.exp(np.asarray(log_probs - behavior))[live]
    np.testing.assert_allclose(ratios, 1.0, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(actions)[live], np.asarray(draw(behavior, uniforms))[live])


def test_an_episode_is_over_after_finish_and_not_before(word):
    policy, checkpoint = word
    uniforms = jax.random.uniform(jax.random.key(4), (MAX_STEPS, AT_ONCE))
    actions, behavior = (np.asarray(x) for x in played(policy, checkpoint.params, uniforms))
    finished = np.cumsum(actions == FINISH, axis=0) - (actions == FINISH) > 0
    np.testing.assert_array_equal(actions == -1, finished)
    assert (behavior[finished] == 0).all()
    assert finished.any() and not finished[-1].all()


def test_an_episodes_draws_do_not_depend_on_its_neighbours(word):
    policy, checkpoint = word
    uniforms = jax.random.uniform(jax.random.key(5), (MAX_STEPS, AT_ONCE))
    together, _ = played(policy, checkpoint.params, uniforms)
    swapped, _ = played(policy, checkpoint.params, uniforms[:, ::-1])
    np.testing.assert_array_equal(together, swapped[:, ::-1])


def test_actions_follow_the_inverse_distribution_function():
    log_probs = jnp.log(jnp.array([0.5, 0.125, 0.125, 0.0625, 0.0625, 0.125]))
    uniforms = jnp.array([0.0, 0.49, 0.5, 0.7, 0.74, 0.76, 0.85, 0.875, 0.999])
    np.testing.assert_array_equal(draw(jnp.tile(log_probs, (9, 1)), uniforms), [0, 0, 1, 2, 2, 3, 4, 5, 5])


def test_histories_score_like_the_plain_way(loaded):
    policy, checkpoint = loaded
    found = histories(policy.task.task)
    every, some = (
        language_training.history_log_probs(policy, checkpoint.params, can_succeed) for can_succeed in (None, "train")
    )
    can_succeed = found.can_succeed([0])
    np.testing.assert_array_equal(some[can_succeed], every[can_succeed])
    np.testing.assert_array_equal(some[~can_succeed], np.float32(-np.log(6)))
    picked = np.array([0, 1, 4, 17, 100, 600, 2000, found.size - 1])
    prompts = [prompt_after([found.action[h] for h in [*found.ancestors[last], last] if h]) for last in picked]
    np.testing.assert_allclose(every[picked], plain_log_probs(checkpoint, checkpoint.params, prompts), atol=1e-5)


def test_the_longest_prompt_is_that_of_all(loaded):
    policy, checkpoint = loaded
    prompts = [prompt_after(actions) for actions in itertools.product(range(FINISH), repeat=MAX_STEPS - 1)]
    longest, candidates = (max(map(len, checkpoint.encode(list(texts)))) for texts in (prompts, CANDIDATES))
    assert policy.task.longest == longest + candidates


def test_exact_success_lies_in_the_interval_of_a_sampled_estimate(word):
    policy, checkpoint = word
    exact = expectations(histories(policy.task.task), language_training.history_log_probs(policy, checkpoint.params))
    successes, lengths, count = 0, [], 160 * AT_ONCE
    for chunk in range(160):
        uniforms = jax.random.uniform(jax.random.key(chunk), (MAX_STEPS, AT_ONCE))
        actions, _ = played(policy, checkpoint.params, uniforms)
        low, high = np.zeros((2, actions.shape[1]), bool)
        for row in actions:
            low, high = (low | (row == 1)) & (row != 3), high | (row == 2)
        successes += int(((actions == FINISH).any(axis=0) & low & high).sum())
        lengths.append((actions >= 0).sum(axis=0))
    deviation = (exact.success * (1 - exact.success) / count) ** 0.5
    assert abs(successes / count - exact.success) < 3.3 * deviation
    lengths = np.concatenate(lengths)
    assert abs(lengths.mean() - exact.mean_actions) < 3.3 * lengths.std() / count**0.5


def test_text_that_looks_like_a_special_token_is_not_one(golden):
    checkpoint = load_checkpoint(golden / "tiny-gpt2-bpe")
    (ids,) = checkpoint.encode(["read <|endoftext|>"])
    assert checkpoint.end_of_text not in ids


def test_joins_are_refused_where_a_tokenizer_merges_across_them():
    def encode(texts):
        merged = [text.replace(":\x20test", "\x01").replace("g: f", "\x02") for text in texts]
        return [[ord(letter) for letter in text] for text in merged]

    with pytest.raises(PromptError, match="joins parts of the prompt"):
        tokenize_task(encode, 0)


def test_joins_are_checked_behind_every_history():
    first = "".join(prompt_after([0, 1, 2, 4, 4]))

    def encode(texts):  # joins only in one prompt of the deepest level
        return [[1, *map(ord, text[1:])] if text == first else [2, *map(ord, text[1:])] for text in texts]

    with pytest.raises(PromptError):
        tokenize_task(encode, 0)


@pytest.mark.parametrize("candidates", [[[1, 0], [1, 0]], [[1, 0], [1, 0, 2, 0]], [[0], [1, 0]]])
def test_candidates_that_do_not_exclude_each_other_are_refused(candidates):
    with pytest.raises(PromptError):
        token_tree(candidates, ["a", "b"])


def test_a_tree_shares_what_candidates_share():
    tree = token_tree([[5, 6, 7, 0], [5, 6, 8, 0], [9, 0]], ["a", "b", "c"])
    np.testing.assert_array_equal(tree.tokens, [5, 6, 7, 8, 9])
    np.testing.assert_array_equal(tree.depths, [1, 2, 3, 3, 1])
    np.testing.assert_array_equal(tree.paths.sum(axis=1), [4, 4, 2])
    np.testing.assert_array_equal(tree.visible.sum(axis=1), [1, 2, 3, 3, 1])


@pytest.mark.parametrize(
    ("flag", "value", "message"), [("n_positions", 100, "n_positions is 100"), ("vocab_size", 30, "vocab_size is 30")]
)
def test_what_the_network_has_no_embedding_for_is_refused(golden, tmp_path, flag, value, message):
    from safetensors.numpy import load_file, save_file

    shutil.copytree(golden / "tiny-gpt2-word", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text()) | {flag: value}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model/model.safetensors")
    cut = {"n_positions": "transformer.wpe.weight", "vocab_size": "transformer.wte.weight"}[flag]
    save_file(tensors | {cut: tensors[cut][:value].copy()}, tmp_path / "model/model.safetensors")
    with pytest.raises(PromptError, match=message):
        load_policy(tmp_path / "model")


def test_an_empty_prompt_or_candidate_is_refused(golden):
    with pytest.raises(PromptError, match="no token"):
        score_candidates(golden / "tiny-gpt2-word", [""], CANDIDATES)
    with pytest.raises(PromptError, match="no token"):
        score_candidates(golden / "tiny-gpt2-word", ["Action:"], ["", " read"])


def test_prompts_of_any_number_and_length_score_alike(golden, monkeypatch):
    prompts = ["Action:", "low = mid step 3", "x", prompt_after([0, 1]), "mid"]
    together = score_candidates(golden / "tiny-gpt2-word", prompts, CANDIDATES)
    monkeypatch.setattr(language, "PROMPTS_AT_ONCE", 2)
    in_parts = score_candidates(golden / "tiny-gpt2-word", prompts, CANDIDATES)
    np.testing.assert_allclose(in_parts, together, atol=1e-5)
    assert score_candidates(golden / "tiny-gpt2-word", [], CANDIDATES).shape == (0, 6)


def test_bfloat16_computes_close_to_float32(golden):
    policy, checkpoint = load(golden / "tiny-gpt2-word")
    half, _ = load_policy(golden / "tiny-gpt2-word", jnp.bfloat16)
    actions = episodes(6)
    prompts = shown(policy, actions)
    full, rounded = (language_training.log_probs(p, checkpoint.params, prompts) for p in (policy, half))
    assert rounded.dtype == jnp.float32
    difference = np.abs(full - rounded)[actions >= 0]
    assert 1e-5 < difference.max() < 0.2


@pytest.mark.parametrize(
    ("prompts", "candidates", "name"), [("text", CANDIDATES, "prompts"), (["text"], " a", "candidates")]
)
def test_a_text_in_place_of_a_list_of_texts_is_refused(golden, no_type_checks, prompts, candidates, name):
    """Its letters would be scored."""
    with pytest.raises(PromptError, match=f"{name} '.*' is one text: expected a list of texts"):
        score_candidates(golden / "tiny-gpt2-word", prompts, candidates)


def test_a_language_model_plays_too(word, tiny_folder, capsys):
    player, (_, checkpoint) = load_player(tiny_folder), word
    play.play(player.task, 7, player)
    assert capsys.readouterr().out.rstrip().endswith(("success", "failure"))
    taken = [], [ACTIONS.index("fix_low"), ACTIONS.index("read")]
    probabilities = [player.probabilities(actions) for actions in taken]
    expected = plain_log_probs(checkpoint, checkpoint.params, [prompt_after(actions) for actions in taken])
    np.testing.assert_allclose(np.log(probabilities), expected, atol=1e-4)
