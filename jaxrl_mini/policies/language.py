"""The language-model policy: a causal language model, normalized over six complete action texts.

After a prompt, each action's candidate (a space, its name, the end-of-text token) has a score, the sum of its
tokens' log-probabilities; the policy is the softmax over the six scores. It is not free generation: no other
text can be chosen, and a name of many tokens starts with a lower score than a short one.

`score` is the one way a network is asked. It reads segments of text behind a key/value cache and scores the
candidates after each: one segment at a time in rollouts and in exact evaluation, a whole episode in one packed
row in updates, a whole prompt in `score_candidates`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxrl_mini.machine import jax_settings
from jaxrl_mini.machine.placement import ONE_DEVICE, Placement
from jaxrl_mini.policies.gpt2 import GPT2, GPT2Config, KeysValues
from jaxrl_mini.policies.pretrained import Checkpoint, load_checkpoint
from jaxrl_mini.policies.prompts import PromptError, TaskTokens, TokenTree, token_tree, tokenize_task
from jaxrl_mini.tasks.histories import enumerate_histories, in_chunks
from jaxrl_mini.tasks.repair import ACTIONS, MAX_STEPS
from jaxrl_mini.tasks.tables import TABLES
from jaxrl_mini.types import AnyArray

FINISH = ACTIONS.index("finish")
HISTORIES_AT_ONCE = 32
"""Rows of one step of exact evaluation: small enough for the caches of a GPT-2, large enough to fill two cores."""
PROMPTS_AT_ONCE = 32
"""Rows of one call of `score_candidates`."""


class Context(NamedTuple):
    """The text a network has read, one row for each continuation of it."""

    cache: KeysValues
    """Keys and values of its tokens; those that are padding are not visible."""
    visible: Bool[Array, "row token"]
    length: Int[Array, " row"]
    """Visible tokens, which is the position of the next one."""

    def repeat(self, rows: int) -> "Context":
        """The same text (of one row) in each of several rows."""
        cache = jax.tree.map(lambda x: jnp.broadcast_to(x, (x.shape[0], rows, *x.shape[2:])), self.cache)
        visible, length = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in (self.visible, self.length))
        return Context(cache, visible, length)


def score(
    network: GPT2,
    tree: TokenTree,
    tokens: Int[Array, "row step token"],
    lengths: Int[Array, "row step"],
    context: Context | None = None,
) -> tuple[Float[Array, "row step candidate"], KeysValues]:
    """Scores the candidates after each of one or more consecutive segments of text.

    Everything is one pass over one packed row: the segments' tokens attend to the context and to the segments
    up to themselves, and behind every segment the tree of candidates attends to the same and to its own
    ancestors. Positions continue from the segment's last token.

    Args:
      network: the language model.
      tree: the candidates.
      tokens: segments in order, right-aligned in `token`, so that each ends in its last column.
      lengths: tokens of each segment. Scores after an empty one are finite and mean nothing.
      context: what was read before; nothing if None.

    Returns:
      Sums of the candidates' log-probabilities, and keys and values of the first segment's tokens.
    """
    rows, steps, width = tokens.shape
    nodes = len(tree.tokens)
    before = 0 if context is None else context.length[:, None]  # [row, 1]
    ends = before + jnp.cumsum(lengths, axis=1)  # [row, step]: position after each segment
    packed = jnp.concatenate([tokens, jnp.broadcast_to(tree.tokens, (rows, steps, nodes))], axis=2)
    offsets = np.concatenate([np.arange(-width, 0), tree.depths - 1])  # [slot]: positions relative to the end
    positions = jnp.maximum(ends[..., None] + offsets, 0)  # [row, step, slot]
    real = offsets >= -lengths[..., None]  # [row, step, slot]
    mask = jnp.asarray(_packed_mask(steps, width, tree)) & real.reshape(rows, 1, -1)  # [row, query, key]
    if context is not None:
        past = jnp.broadcast_to(context.visible[:, None], (rows, mask.shape[1], context.visible.shape[1]))
        mask = jnp.concatenate([past, mask], axis=2)
    with jax.default_matmul_precision("float32"):
        hidden, cache = network(packed.reshape(rows, -1), positions.reshape(rows, -1), mask, context and context.cache)
        # A segment's last column is the cue's last token, node 0 of the tree.
        hidden = hidden.reshape(rows, steps, width + nodes, -1)[:, :, width - 1 :]  # [row, step, node, n_embd]
        logits = network.logits(hidden)  # [row, step, node, vocab]
        normalizers = jax.nn.logsumexp(logits, axis=-1)  # [row, step, node]
        edges = logits[..., tree.edge_nodes, tree.edge_tokens] - normalizers[..., tree.edge_nodes]
        scores = edges @ tree.paths.T  # [row, step, candidate]
    return scores, jax.tree.map(lambda x: x[..., :width, :], cache)


def _packed_mask(steps: int, width: int, tree: TokenTree) -> np.ndarray:
    """Whether a query sees a key; both run over (step, slot), slots being a segment's tokens, then the tree's nodes."""
    slots = width + len(tree.tokens)
    own = np.zeros((slots, slots), bool)  # inside one step
    own[:, :width] = np.tri(slots, width, dtype=bool)
    own[width:, width:] = tree.visible
    earlier = np.arange(slots) < width  # of an earlier step only the segment is seen, not its tree
    step = np.arange(steps)
    mask = np.where((step[:, None] == step)[:, None, :, None], own[None, :, None, :], False)
    mask |= (step[:, None] > step)[:, None, :, None] & earlier
    return mask.reshape(steps * slots, steps * slots)


@dataclass(frozen=True, eq=False)
class LanguagePolicy:
    """A network and the task in its tokens; parameters come as an argument, so that jit and grad see them."""

    network: nnx.GraphDef[GPT2]
    task: TaskTokens
    placement: Placement = ONE_DEVICE
    """Where episodes and histories are computed."""

    def read_opening(self, params: PyTree) -> tuple[Float[Array, " action"], Context]:
        """Scores of the first action, and the context that every episode continues."""
        tokens = jnp.asarray(self.task.opening)[None, None]  # [1, 1, token]
        length = tokens.shape[-1]
        scores, cache = score(self._merge(params), self.task.tree, tokens, jnp.full((1, 1), length))
        return scores[0, 0], Context(cache, jnp.ones((1, length), bool), jnp.full(1, length))

    def scores(self, params: PyTree, actions: Int[Array, "step episode"]) -> Float[Array, "step episode action"]:
        """Scores of all six actions at every step of some episodes.

        An episode is one packed row behind the shared opening.

        Args:
          params: the network's parameters.
          actions: the actions taken, -1 after an episode's end. The last step's do not matter.

        Returns:
          Scores before normalization; after an episode's end they are finite and mean nothing.
        """
        first, context = self.read_opening(params)
        episodes, actions = actions.shape[1], self.placement.rows(actions, axis=1)
        tokens, lengths = self._segments(actions[:-1], _variants(actions)[:-1])
        later, _ = score(
            self._merge(params), self.task.tree, tokens.swapaxes(0, 1), lengths.T, context.repeat(episodes)
        )
        return jnp.concatenate([jnp.broadcast_to(first, (1, episodes, len(ACTIONS))), later.swapaxes(0, 1)])

    def log_probs(self, params: PyTree, actions: Int[Array, "step episode"]) -> Float[Array, "step episode action"]:
        """Log-probabilities of all six actions at every step of some episodes: the softmax of `scores`."""
        return jax.nn.log_softmax(self.scores(params, actions))

    def sample(
        self, params: PyTree, uniforms: Float[Array, "step episode"]
    ) -> tuple[Int[Array, "step episode"], Float[Array, "step episode action"]]:
        """Plays episodes, appending to a key/value cache; it stops when all of them have ended.

        Args:
          params: the network's parameters.
          uniforms: in [0, 1); each action is the inverse of the distribution function at its number.

        Returns:
          The actions, -1 after an episode's end, and the log-probabilities they were drawn from, 0 there.
        """
        episodes, uniforms = uniforms.shape[1], self.placement.rows(uniforms, axis=1)
        width = self.task.segments.shape[-1]
        first, opening = self.read_opening(params)
        opened = opening.visible.shape[1]
        room = (MAX_STEPS - 1) * width
        context = Context(
            jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, room), (0, 0)]), opening.cache),
            jnp.pad(opening.visible, [(0, 0), (0, room)]),
            opening.length,
        ).repeat(episodes)
        network = self._merge(params)

        def act(
            step: Array | int, log_probs: Array, alive: Array, actions: Array, all_log_probs: Array
        ) -> tuple[Array, Array]:
            action = jnp.where(alive, draw(log_probs, uniforms[step]), -1)
            return actions.at[step].set(action), all_log_probs.at[step].set(jnp.where(alive[:, None], log_probs, 0))

        def some_alive(carry: tuple[Any, ...]) -> Array:
            step, alive, *_ = carry
            going: Array = (step < MAX_STEPS) & alive.any()
            return going

        def play(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            step, alive, variants, context, actions, log_probs = carry
            last = jnp.where(alive, actions[step - 1], FINISH)
            tokens, lengths = self._segment(step - 1, variants, last)
            scores, new = score(network, self.task.tree, tokens[:, None], lengths[:, None], context)
            at = opened + (step - 1) * width
            context = Context(
                jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, at, axis=3), context.cache, new),
                lax.dynamic_update_slice_in_dim(
                    context.visible, jnp.arange(width) >= width - lengths[:, None], at, axis=1
                ),
                context.length + lengths,
            )
            actions, log_probs = act(step, jax.nn.log_softmax(scores[:, 0]), alive, actions, log_probs)
            variants = jnp.asarray(TABLES.next_variant)[step - 1, variants, last]
            alive &= actions[step] != FINISH
            return step + 1, alive, variants, context, actions, log_probs

        nothing = jnp.full((MAX_STEPS, episodes), -1), jnp.zeros((MAX_STEPS, episodes, len(ACTIONS)))
        alive = jnp.ones(episodes, bool)
        first = jnp.broadcast_to(jax.nn.log_softmax(first), (episodes, len(ACTIONS)))
        actions, log_probs = act(0, first, alive, *nothing)
        carry = 1, actions[0] != FINISH, jnp.zeros(episodes, int), context, actions, log_probs
        *_, actions, log_probs = lax.while_loop(some_alive, play, carry)
        return actions, log_probs

    def history_log_probs(
        self, params: PyTree, *, can_succeed: Bool[AnyArray, ""] | bool = False
    ) -> Float[Array, "history action"]:
        """Log-probabilities of the next action after every history, or every one that can still succeed.

        Each history keeps the keys and values of its own segment, and those that continue it gather them; so
        nothing is read twice. They are read in chunks of one shape, which bounds the memory of attention.

        Returns:
          As `enumerate_histories` lists them; uniform for those that are not asked for.
        """
        histories, network, width = enumerate_histories(), self._merge(params), self.task.segments.shape[-1]
        tokens, lengths = self._segment(
            np.maximum(histories.step - 1, 0), histories.variant[histories.parent], histories.action
        )
        every = np.ones_like(histories.can_succeed)
        everything, fewer = (in_chunks(wanted, HISTORIES_AT_ONCE) for wanted in (every, histories.can_succeed))
        order = jnp.where(can_succeed, np.resize(fewer, everything.shape), everything)
        first, opening = self.read_opening(params)
        context = opening.repeat(HISTORIES_AT_ONCE)

        def joined(
            x: Float[Array, "layer row page head token feature"],
        ) -> Float[Array, "layer row head key feature"]:
            return jnp.moveaxis(x, 2, 3).reshape(*x.shape[:2], x.shape[3], -1, x.shape[5])

        def read(i: Array, carry: tuple[Array, KeysValues]) -> tuple[Array, KeysValues]:
            log_probs, pages = carry  # a page is a history's segment; the empty history is the opening and has none
            these = self.placement.rows(order[i], axis=0)
            ancestors = jnp.asarray(histories.ancestors)[these]
            past = jax.tree.map(lambda x: joined(x[:, ancestors]), pages)
            own = jnp.where(ancestors > 0, lengths[ancestors], 0)  # [row, ancestor]
            seen = jnp.arange(width) >= width - own[..., None]  # [row, ancestor, token]
            scores, new = score(
                network,
                self.task.tree,
                tokens[these][:, None],
                lengths[these][:, None],
                Context(
                    jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=3), context.cache, past),
                    jnp.concatenate([context.visible, seen.reshape(len(these), -1)], axis=1),
                    context.length + own.sum(1),
                ),
            )
            # Of the deepest histories, which none continues, there are no pages: those are dropped.
            kept = jax.tree.map(lambda x, y: x.at[:, these].set(y, mode="drop"), pages, new)
            return log_probs.at[these].set(jax.nn.log_softmax(scores[:, 0])), kept

        parents = int(histories.ancestors.max()) + 1
        pages = jax.tree.map(
            lambda x: jnp.zeros((len(x), parents, x.shape[2], width, x.shape[4]), x.dtype), opening.cache
        )
        log_probs = jnp.full((len(histories.step), len(ACTIONS)), -np.log(len(ACTIONS)), jnp.float32)
        log_probs = log_probs.at[0].set(jax.nn.log_softmax(first))
        return lax.fori_loop(0, jnp.where(can_succeed, len(fewer), len(everything)), read, (log_probs, pages))[0]

    def _merge(self, params: PyTree) -> GPT2:
        return nnx.merge(self.network, params)

    def _segment(
        self, step: ArrayLike, variant: ArrayLike, action: ArrayLike
    ) -> tuple[Int[Array, "*batch token"], Int[Array, "*batch"]]:
        """What an action appends, and its length."""
        return (
            jnp.asarray(self.task.segments)[step, variant, action],
            jnp.asarray(self.task.lengths)[step, variant, action],
        )

    def _segments(
        self, actions: Int[Array, "step episode"], variants: Int[Array, "step episode"]
    ) -> tuple[Int[Array, "step episode token"], Int[Array, "step episode"]]:
        """What each action appends; nothing after `finish` and after an episode's end."""
        steps = jnp.arange(len(actions))[:, None]
        return self._segment(steps, variants, jnp.where(actions < 0, FINISH, actions))


def draw(log_probs: Float[Array, "*batch action"], uniforms: Float[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Actions by inverse of the distribution function: how many of its first values do not exceed the number."""
    cumulative = jnp.cumsum(jnp.exp(log_probs), axis=-1)[..., :-1]
    return (uniforms[..., None] >= cumulative).sum(-1)


def _variants(actions: Int[Array, "step episode"]) -> Int[Array, "step episode"]:
    """The artifact before each action."""

    def advance(variant: Array, step_and_action: tuple[Array, Array]) -> tuple[Array, Array]:
        step, action = step_and_action
        return jnp.asarray(TABLES.next_variant)[step, variant, jnp.where(action < 0, FINISH, action)], variant

    return lax.scan(advance, jnp.zeros(actions.shape[1], jnp.int32), (jnp.arange(len(actions)), actions))[1]


def load_policy(folder: str | Path, dtype: DTypeLike = jnp.float32) -> tuple[LanguagePolicy, Checkpoint]:
    """Reads a checkpoint folder as a policy for the task; its initial parameters are the checkpoint's.

    Raises:
      CheckpointError: the folder cannot be read.
      PromptError: the tokenizer or the network's limits do not fit the task's prompts.
    """
    checkpoint = load_checkpoint(folder, dtype)
    task = tokenize_task(checkpoint.encode, checkpoint.end_of_text)
    ids = (task.opening, task.segments, task.tree.tokens, task.tree.edge_tokens)
    check_limits(max(int(array.max()) for array in ids), task.longest, checkpoint.config)
    return LanguagePolicy(checkpoint.network, task), checkpoint


def check_limits(largest_id: int, longest: int, config: GPT2Config) -> None:
    """Refuses tokens and lengths that a network has no embedding for; it would answer NaN without a word."""
    if largest_id >= config.vocab_size:
        raise PromptError(f"the tokenizer gives id {largest_id}, but the model's vocab_size is {config.vocab_size}")
    if longest > config.n_positions:
        raise PromptError(
            f"the longest prompt with a candidate has {longest} tokens, but the model's n_positions is "
            f"{config.n_positions}"
        )


@jax_settings.own()
def score_candidates(
    model_dir: str | Path, prompts: Sequence[str], candidates: Sequence[str]
) -> Float[np.ndarray, "prompt candidate"]:
    """Log-probabilities of some texts as continuations of prompts, normalized over the candidates.

    A candidate's score is the sum of the log-probabilities of its tokens and of the end-of-text token after
    them; the result is the log-softmax of the scores. Prompt and candidate are tokenized apart, and text that
    looks like a special token is not one.

    Args:
      model_dir: a checkpoint folder, see `pretrained`.
      prompts: what precedes a candidate.
      candidates: whole texts, with their leading space if there is one.

    Raises:
      CheckpointError: the folder cannot be read.
      PromptError: prompts or candidates are a text and no list; one of them is empty or too long; or candidates cannot
        be told apart.
    """
    for name, texts in (("prompts", prompts), ("candidates", candidates)):
        if isinstance(texts, str):
            raise PromptError(f"{name} {texts!r} is one text: expected a list of texts")
    checkpoint = load_checkpoint(model_dir)
    ids = checkpoint.encode(candidates)
    tree = token_tree([[*tokens, checkpoint.end_of_text] for tokens in ids], candidates)
    encoded = checkpoint.encode(prompts)
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if not tokens:
            raise PromptError(f"prompt {prompt!r} has no token: there is nothing to continue")
    if not prompts or not candidates:
        return np.zeros((len(prompts), len(candidates)), np.float32)
    width = max(map(len, encoded))
    largest = max(*map(max, encoded), *tree.tokens.tolist(), *tree.edge_tokens.tolist())
    check_limits(largest, width + int(tree.depths.max()), checkpoint.config)
    rows = min(len(prompts), PROMPTS_AT_ONCE)
    padded = np.zeros((-(-len(prompts) // rows) * rows, 1, width), np.int32)
    lengths = np.ones((len(padded), 1), np.int32)
    for row, tokens in enumerate(encoded):
        padded[row, 0, width - len(tokens) :] = tokens
        lengths[row] = len(tokens)

    @jax.jit
    def log_probs(params: PyTree, tokens: Array, lengths: Array) -> Array:
        scores, _ = score(nnx.merge(checkpoint.network, params), tree, tokens, lengths)
        return jax.nn.log_softmax(scores[:, 0])

    starts = range(0, len(padded), rows)
    parts = [log_probs(checkpoint.params, padded[i : i + rows], lengths[i : i + rows]) for i in starts]
    return np.concatenate(parts)[: len(prompts)]
