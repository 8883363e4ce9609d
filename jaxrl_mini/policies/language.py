"""The language-model policy: a causal language model, normalized over complete action texts.

After a prompt, each action's candidate (a space, its name, the end-of-text token) has a score, the sum of its
tokens' log-probabilities; the policy is the softmax over the scores. It is not free generation: no other
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
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxrl_mini.machine import jax_settings
from jaxrl_mini.machine.placement import ONE_DEVICE, Placement
from jaxrl_mini.policies.blocks import KeysValues
from jaxrl_mini.policies.families import Network, NetworkConfig
from jaxrl_mini.policies.pretrained import Checkpoint, load_checkpoint
from jaxrl_mini.policies.prompts import PromptError, TaskTokens, TokenTree, token_tree, tokenize_task
from jaxrl_mini.policies.scenes import Pages, Played, Prompts, Scene, Start
from jaxrl_mini.tasks.compiled import CompiledTask
from jaxrl_mini.types import AnyArray

REPLIES = ("candidates", "free")
"""What a reply can be: one of the candidates, or any text."""
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

    def of(self, texts: Int[AnyArray, " row"]) -> "Context":
        """For each row the text of one of these."""
        if len(self.length) == 1:
            return self.repeat(len(texts))
        return Context(jax.tree.map(lambda x: x[:, texts], self.cache), self.visible[texts], self.length[texts])


def score(
    network: Network,
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

    network: nnx.GraphDef[Any]
    task: TaskTokens
    placement: Placement = ONE_DEVICE
    """Where episodes and histories are computed."""

    def read_openings(self, params: PyTree) -> tuple[Float[Array, "opening action"], Context]:
        """Scores of the first action, and the contexts that episodes continue."""
        tokens, lengths = jnp.asarray(self.task.openings)[:, None], self.task.opening_lengths
        width = tokens.shape[-1]
        scores, cache = score(self._merge(params), self.task.tree, tokens, jnp.asarray(lengths)[:, None])
        visible = np.arange(width) >= width - lengths[:, None]
        return scores[:, 0], Context(cache, jnp.asarray(visible), jnp.asarray(lengths))

    def scores(self, params: PyTree, prompts: Prompts) -> Float[Array, "step episode action"]:
        """Scores of all actions at every step of some episodes.

        An episode is one packed row behind its opening, which it may share with others.

        Args:
          params: the network's parameters.
          prompts: what the episodes were shown.

        Returns:
          Scores before normalization; after an episode's end they are finite and mean nothing.
        """
        first, context = self.read_openings(params)
        openings, shown = prompts.openings, self.placement.rows(jnp.asarray(prompts.segments), axis=1)
        first = jnp.broadcast_to(first, (len(openings), first.shape[1])) if len(first) == 1 else first[openings]
        if not len(shown):
            return first[None]
        tokens, lengths = self._segments(shown)
        later, _ = score(self._merge(params), self.task.tree, tokens.swapaxes(0, 1), lengths.T, context.of(openings))
        return jnp.concatenate([first[None], later.swapaxes(0, 1)])

    def log_probs(self, params: PyTree, prompts: Prompts) -> Float[Array, "step episode action"]:
        """Log-probabilities of all actions at every step of some episodes: the softmax of `scores`."""
        return jax.nn.log_softmax(self.scores(params, prompts))

    def sample(self, params: PyTree, scene: Scene, start: Start) -> tuple[Played, Float[Array, "step episode action"]]:
        """Plays episodes, appending to a key/value cache; it stops when all of them have ended.

        Args:
          params: the network's parameters.
          scene: the task's tables.
          start: where each episode begins, and the numbers that its actions and draws of chance are drawn with: each
            action is the inverse of the distribution function at its number.

        Returns:
          The episodes, and the log-probabilities that their actions were drawn from, 0 after the end.
        """
        uniforms = self.placement.rows(start.uniforms, axis=1)
        steps, rows, actions, draws = scene.next_row.shape
        episodes, width, nothing = uniforms.shape[1], self.task.segments.shape[-1], len(self.task.lengths) - 1
        first, opening = self.read_openings(params)
        opened = opening.visible.shape[1]
        room = (steps - 1) * width
        context = Context(
            jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, room), (0, 0)]), opening.cache),
            jnp.pad(opening.visible, [(0, 0), (0, room)]),
            opening.length,
        ).of(start.openings)
        network = self._merge(params)

        def act(
            step: Array | int, log_probs: Array, row: Array, played: Played, all_log_probs: Array
        ) -> tuple[Array, Played, Array]:
            alive, action = row < rows, draw(log_probs, uniforms[step])
            place = (jnp.minimum(row, rows - 1) * actions + action) * draws
            if start.chances is not None:
                bounds = scene.bounds[step].reshape(-1, draws - 1)[place // draws]
                place += (start.chances[step][:, None] >= bounds).sum(-1)
            after, handed_in, shown = (
                table[step].ravel()[place] for table in (scene.next_row, scene.submission, scene.segment)
            )
            choice = scene.view[step][row] * actions + action
            played = Played(
                played.choices.at[step].set(jnp.where(alive, choice, -1)),
                jnp.where(alive, handed_in, played.submission),
                Prompts(start.openings, played.prompts.segments.at[step].set(jnp.where(alive, shown, nothing))),
            )
            log_probs = jnp.where(alive[:, None], log_probs, 0)
            return jnp.where(alive, after, rows), played, all_log_probs.at[step].set(log_probs)

        def some_alive(carry: tuple[Any, ...]) -> Array:
            step, row, *_ = carry
            going: Array = (step < steps) & (row < rows).any()
            return going

        def play(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            step, row, context, played, log_probs = carry
            tokens, lengths = self._segments(played.prompts.segments[step - 1])
            scores, new = score(network, self.task.tree, tokens[:, None], lengths[:, None], context)
            at = opened + (step - 1) * width
            context = Context(
                jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, at, axis=3), context.cache, new),
                lax.dynamic_update_slice_in_dim(
                    context.visible, jnp.arange(width) >= width - lengths[:, None], at, axis=1
                ),
                context.length + lengths,
            )
            row, played, log_probs = act(step, jax.nn.log_softmax(scores[:, 0]), row, played, log_probs)
            return step + 1, row, context, played, log_probs

        empty = Prompts(start.openings, jnp.full((steps, episodes), nothing))
        begun = Played(jnp.full((steps, episodes), -1), jnp.zeros(episodes, jnp.int32), empty)
        first = jax.nn.log_softmax(first)
        first = jnp.broadcast_to(first, (episodes, actions)) if len(first) == 1 else first[start.openings]
        row, played, log_probs = act(0, first, start.rows, begun, jnp.zeros((steps, episodes, actions)))
        *_, played, log_probs = lax.while_loop(some_alive, play, (1, row, context, played, log_probs))
        shown = Prompts(start.openings, played.prompts.segments[:-1])
        return played._replace(prompts=shown), log_probs

    def history_log_probs(
        self, params: PyTree, pages: Pages, order: Int[AnyArray, "chunk row"], count: Int[AnyArray, ""], *, room: int
    ) -> Float[Array, "history action"]:
        """Log-probabilities of the next action after histories.

        Each history keeps the keys and values of its own segment, a page, and those that continue it gather them; so
        nothing is read twice. They are read in chunks of one shape, which bounds the memory of attention.

        Args:
          params: the network's parameters.
          pages: the histories, and where what is kept of them has its place.
          order: which are read in which order, all but the openings, none before its parent.
          count: so many chunks of them.
          room: pages.

        Returns:
          Log-probabilities by history; uniform for those that are not read.
        """
        network, width, actions = self._merge(params), self.task.segments.shape[-1], self.task.tree.paths.shape[0]
        first, opening = self.read_openings(params)

        def joined(
            x: Float[Array, "layer row page head token feature"],
        ) -> Float[Array, "layer row head key feature"]:
            return jnp.moveaxis(x, 2, 3).reshape(*x.shape[:2], x.shape[3], -1, x.shape[5])

        def read(i: Array, carry: tuple[Array, KeysValues]) -> tuple[Array, KeysValues]:
            log_probs, kept = carry
            these = self.placement.rows(order[i], axis=0)
            ancestors, context = pages.ancestors[these], opening.of(pages.opening[these])
            past = jax.tree.map(lambda x: joined(x[:, pages.page[ancestors]]), kept)
            own = jnp.asarray(self.task.lengths)[pages.segment[ancestors]]  # [row, ancestor]
            seen = jnp.arange(width) >= width - own[..., None]  # [row, ancestor, token]
            tokens, lengths = self._segments(pages.segment[these])
            scores, new = score(
                network,
                self.task.tree,
                tokens[:, None],
                lengths[:, None],
                Context(
                    jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=3), context.cache, past),
                    jnp.concatenate([context.visible, seen.reshape(len(these), -1)], axis=1),
                    context.length + own.sum(1),
                ),
            )
            # Of histories that none continues there are no pages: those are dropped.
            page = pages.page[these]
            kept = jax.tree.map(lambda x, y: x.at[:, page].set(y, mode="drop"), kept, new)
            return log_probs.at[these].set(jax.nn.log_softmax(scores[:, 0])), kept

        empty = jax.tree.map(lambda x: jnp.zeros((len(x), room, x.shape[2], width, x.shape[4]), x.dtype), opening.cache)
        log_probs = jnp.full((len(pages.segment), actions), -np.log(actions), jnp.float32)
        log_probs = log_probs.at[: len(first)].set(jax.nn.log_softmax(first))
        return lax.fori_loop(0, count, read, (log_probs, empty))[0] if len(order) else log_probs

    def _merge(self, params: PyTree) -> Network:
        return nnx.merge(self.network, params)

    def _segments(self, numbers: Int[Array, "*batch"]) -> tuple[Int[Array, "*batch token"], Int[Array, "*batch"]]:
        """Tokens and lengths of segments."""
        return jnp.asarray(self.task.segments)[numbers], jnp.asarray(self.task.lengths)[numbers]


def with_rest(log_probs: Float[Array, "*batch event"]) -> Float[Array, "*batch event_and_rest"]:
    """Log-probabilities of events that exclude each other, and of none of them."""
    some = jnp.minimum(jax.nn.logsumexp(log_probs, axis=-1, keepdims=True), -np.finfo(np.float32).tiny)
    return jnp.concatenate([log_probs, jax.nn.log1mexp(-some)], axis=-1)


def draw(log_probs: Float[Array, "*batch action"], uniforms: Float[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Actions by inverse of the distribution function: how many of its first values do not exceed the number."""
    cumulative = jnp.cumsum(jnp.exp(log_probs), axis=-1)[..., :-1]
    return (uniforms[..., None] >= cumulative).sum(-1)


def load_policy(
    folder: str | Path, dtype: DTypeLike = jnp.float32, task: CompiledTask | None = None
) -> tuple[LanguagePolicy, Checkpoint]:
    """Reads a checkpoint folder as a policy for a task, the article's if none is given, and its initial parameters.

    Raises:
      CheckpointError: the folder cannot be read.
      PromptError: the tokenizer or the network's limits do not fit the task's prompts.
    """
    checkpoint = load_checkpoint(folder, dtype)
    tokens = tokenize_task(checkpoint.encode, checkpoint.end_of_text, task, checkpoint.beginning)
    ids = (tokens.openings, tokens.segments, tokens.tree.tokens, tokens.tree.edge_tokens)
    check_limits(max(int(array.max()) for array in ids), tokens.longest, checkpoint.config)
    return LanguagePolicy(checkpoint.network, tokens), checkpoint


def check_limits(largest_id: int, longest: int, config: NetworkConfig) -> None:
    """Refuses tokens and lengths that a network has no embedding for; it would answer NaN without a word."""
    if largest_id >= config.vocab_size:
        raise PromptError(f"the tokenizer gives id {largest_id}, but the model's vocab_size is {config.vocab_size}")
    name, bound = config.longest
    if longest > bound:
        raise PromptError(
            f"the longest prompt with a candidate has {longest} tokens, but the model's {name} is {bound}"
        )


@jax_settings.own()
def score_candidates(
    model_dir: str | Path, prompts: Sequence[str], candidates: Sequence[str], *, replies: str = "candidates"
) -> Float[np.ndarray, "prompt column"]:
    """Log-probabilities of some texts as continuations of prompts.

    A candidate's score is the sum of the log-probabilities of its tokens and of the end-of-text token after
    them. Prompt and candidate are tokenized apart, and text that looks like a special token is not one. A prompt
    begins a text: where the tokenizer has a token for that, it comes first.

    Args:
      model_dir: a checkpoint folder, see `pretrained`.
      prompts: what precedes a candidate.
      candidates: whole texts, with their leading space if there is one.
      replies: `candidates`: the log-softmax of the scores, a column per candidate. `free`: what free generation would
        do, the scores themselves, and a last column for any other text, log(1 - their sum).

    Raises:
      CheckpointError: the folder cannot be read.
      PromptError: prompts or candidates are a text and no list; one of them is empty or too long; or candidates cannot
        be told apart.
    """
    if replies not in REPLIES:
        raise PromptError(f"replies {replies!r} is unknown: expected one of {', '.join(REPLIES)}")
    for name, texts in (("prompts", prompts), ("candidates", candidates)):
        if isinstance(texts, str):
            raise PromptError(f"{name} {texts!r} is one text: expected a list of texts")
    checkpoint = load_checkpoint(model_dir)
    ids = checkpoint.encode(candidates)
    tree = token_tree([[*tokens, checkpoint.end_of_text] for tokens in ids], candidates)
    encoded = [[*checkpoint.beginning, *tokens] for tokens in checkpoint.encode(prompts)]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if not tokens:
            raise PromptError(f"prompt {prompt!r} has no token: there is nothing to continue")
    if not prompts or not candidates:
        return np.zeros((len(prompts), len(candidates) + (replies == "free")), np.float32)
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
        return jax.nn.log_softmax(scores[:, 0]) if replies == "candidates" else with_rest(scores[:, 0])

    starts = range(0, len(padded), rows)
    parts = [log_probs(checkpoint.params, padded[i : i + rows], lengths[i : i + rows]) for i in starts]
    return np.concatenate(parts)[: len(prompts)]
