"""The task as text for a causal language model, and that text as tokens.

A prompt grows at its end only. It opens with a header, the first observation and the cue; every action then
appends one segment: the action, the observation it led to, and the cue for the next action. So a key/value
cache never has to be recomputed, and a whole episode is one sequence with a cue at every step. Segments are
tokenized once, and `tokenize_task` checks that joining their ids gives what tokenizing the joined text gives,
for every prompt the task can make.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from jaxrl_mini.config import UserError
from jaxrl_mini.tasks.repair import ACTIONS, HEADER, MAX_STEPS, NUM_ACTIONS, NUM_VARIANTS, VARIANTS, BinarySearchRepair
from jaxrl_mini.tasks.tables import TABLES

CUE = "\nAction:"
CANDIDATES = tuple(f" {action}" for action in ACTIONS)
"""What the policy scores after a cue: these texts, each followed by the end-of-text token."""

CONTINUING = [action for action in range(NUM_ACTIONS) if not TABLES.submits[:, :, action].any()]
"""The actions after which an episode can go on."""

UNHEARD_OF = "\u16a0\u2042"
"""A letter and a sign that no text of the task has."""

Encode = Callable[[Sequence[str]], list[list[int]]]
"""Turns texts into token ids, with no special token added and none recognized in the text."""


class PromptError(UserError):
    """A text that cannot be scored with a given tokenizer or network; one line that says which and why."""


class TokenTree(NamedTuple):
    """The candidates as a tree of tokens under the cue, so that what they share is computed once.

    Node 0 is the cue's last token; node n > 0 is the token `tokens[n - 1]`. An edge is one next-token
    prediction, (the node that predicts, the predicted token); a candidate's score is the sum of the
    log-probabilities of its edges. The last edge of each candidate predicts the end-of-text token, so no node
    is needed for it.
    """

    tokens: np.ndarray
    """int [node]: without the cue."""
    depths: np.ndarray
    """int [node]: how many tokens after the cue's last one, from 1."""
    visible: np.ndarray
    """bool [node, node]: entry [n, m] says that n attends to m: m is n itself or an ancestor."""
    edge_nodes: np.ndarray
    """int [edge]: the node that predicts, the cue's last token being 0."""
    edge_tokens: np.ndarray
    """int [edge]: the predicted token."""
    paths: np.ndarray
    """float [candidate, edge]: 1 where the edge belongs to the candidate."""


def token_tree(candidates: Sequence[Sequence[int]], texts: Sequence[str]) -> TokenTree:
    """Builds the tree of candidates, token ids that end with the end-of-text token.

    Raises:
      PromptError: a candidate equals another one or starts like a whole other one, so that the six do not
        exclude each other, or has no token before the end-of-text token.
    """
    for first, ids in enumerate(candidates):
        if len(ids) < 2:
            raise PromptError(f"candidate {texts[first]!r} has no token: give it a text that the tokenizer knows")
        for second, other in enumerate(candidates):
            if first != second and list(other[: len(ids)]) == list(ids):
                raise PromptError(
                    f"candidates {texts[first]!r} and {texts[second]!r} have tokens {list(ids)} and {list(other)}: "
                    "they must be distinct and none may begin with another"
                )
    nodes: dict[tuple[int, ...], int] = {(): 0}
    edges: dict[tuple[int, int], int] = {}
    for ids in candidates:
        for end in range(len(ids) - 1):
            nodes.setdefault(tuple(ids[: end + 1]), len(nodes))
        for end, token in enumerate(ids):
            edges.setdefault((nodes[tuple(ids[:end])], token), len(edges))
    visible = np.zeros((len(nodes), len(nodes)), bool)
    for prefix, node in nodes.items():
        for end in range(1, len(prefix) + 1):
            visible[node, nodes[prefix[:end]]] = True
    paths = np.zeros((len(candidates), len(edges)), np.float32)
    for row, ids in enumerate(candidates):
        for end, token in enumerate(ids):
            paths[row, edges[nodes[tuple(ids[:end])], token]] = 1
    return TokenTree(
        tokens=np.array([prefix[-1] for prefix in nodes if prefix], np.int32),
        depths=np.array([len(prefix) for prefix in nodes if prefix], np.int32),
        visible=visible[1:, 1:],
        edge_nodes=np.array([node for node, _ in edges], np.int32),
        edge_tokens=np.array([token for _, token in edges], np.int32),
        paths=paths,
    )


class TaskTokens(NamedTuple):
    """Everything a language model is ever shown of the task, in tokens."""

    opening: np.ndarray
    """int [token]: the prompt of the first action."""
    segments: np.ndarray
    """int [step, variant, action, token]: what the action taken there appends, right-aligned, 0 before it."""
    lengths: np.ndarray
    """int [step, variant, action]: tokens in each segment."""
    tree: TokenTree
    """The six actions after any cue."""

    @property
    def longest(self) -> int:
        """Tokens in the longest prompt with its longest candidate; the last token is only predicted."""
        per_step = self.lengths.max(axis=(1, 2))
        return len(self.opening) + int(per_step.sum()) + int(self.tree.depths.max())


def opening_text() -> str:
    """The prompt of the first action."""
    return HEADER + BinarySearchRepair().reset() + CUE


@cache
def segment_text(step: int, variant: int, action: int) -> str:
    """What an action appends to the prompt when it is taken at `step` (from 0) on the artifact `variant`."""
    task = BinarySearchRepair()
    task.steps, task.artifact = step, VARIANTS[variant]
    return f" {ACTIONS[action]}\n{task.step(ACTIONS[action])}{CUE}"


def tokenize_task(encode: Encode, end_of_text: int) -> TaskTokens:
    """Tokenizes the task, and checks the joins of all its prompts.

    That the joined ids of a prompt's parts equal the ids of its whole text is checked for each of the 3,906
    prompts, one by one. That a candidate joins what precedes it is checked after each segment that can end a
    prompt, in the shortest such prompt: by the first check, what lies further back does not reach the seam.
    White space may vanish; another character may not, though a word may have the token for what is unknown. And no two
    texts may have the same tokens.

    Args:
      encode: the tokenizer.
      end_of_text: the token that ends a candidate.

    Raises:
      PromptError: naming the characters that are lost, the first join that changes tokens, or texts that cannot be
        told apart.
    """
    shape = (MAX_STEPS - 1, NUM_VARIANTS, NUM_ACTIONS)
    places = [(step, variant, a) for step, variant, a in np.ndindex(shape) if a in CONTINUING]
    texts = [opening_text(), *CANDIDATES, *(segment_text(*place) for place in places)]
    encoded = encode(texts)
    opening, candidates, segments = encoded[0], encoded[1 : 1 + NUM_ACTIONS], encoded[1 + NUM_ACTIONS :]
    if not opening:
        raise PromptError("the task's first prompt has no token: give a tokenizer that knows its text")
    _check_characters(encode, texts, encoded)
    _check_joins(encode, opening, dict(zip(places, segments, strict=True)), candidates)
    lengths = np.zeros(shape, np.int32)
    tokens = np.zeros((*shape, max(map(len, segments))), np.int32)
    for place, ids in zip(places, segments, strict=True):
        lengths[place] = len(ids)
        tokens[place][tokens.shape[-1] - len(ids) :] = ids
    tree = token_tree([[*ids, end_of_text] for ids in candidates], CANDIDATES)
    return TaskTokens(np.array(opening, np.int32), tokens, lengths, tree)


def _check_characters(encode: Encode, texts: list[str], encoded: list[list[int]]) -> None:
    words = sorted({f" {word}" for text in texts for word in text.split()})
    space, unheard_of, *of_words = encode([" ", UNHEARD_OF, *words])
    unknown = set(unheard_of) - set(space)
    read = {word: ids for word, ids in zip(words, of_words, strict=True) if unknown.isdisjoint(ids)}
    places = [(word, at) for word in read for at in range(1, len(word))]
    without = encode([word[:at] + word[at + 1 :] for word, at in places])
    lost = {word[at] for (word, at), ids in zip(places, without, strict=True) if ids == read[word]}
    if lost:
        named = ", ".join(map(repr, sorted(lost)))
        raise PromptError(f"the tokenizer loses {named} of the task's texts: use one that has tokens for all of them")
    known: dict[tuple[int, ...], str] = {}
    for text, ids in zip(texts, encoded, strict=True):
        if (other := known.setdefault(tuple(ids), text)) != text:
            raise PromptError(
                f"the tokenizer gives {other!r} and {text!r} the same tokens: use one that tells them apart"
            )


def _check_joins(
    encode: Encode, opening: list[int], segments: dict[tuple[int, int, int], list[int]], candidates: list[list[int]]
) -> None:
    texts, joined = [opening_text()], [opening]
    shortest: dict[tuple[int, int, int] | None, int] = {None: 0}  # last segment of a prompt -> the first such prompt
    level = [(0, 0)]  # (prompt, artifact) after `step` actions
    for step in range(MAX_STEPS - 1):
        deeper = []
        for prompt, variant in level:
            for action in CONTINUING:
                place = (step, variant, action)
                shortest.setdefault(place, len(texts))
                deeper.append((len(texts), int(TABLES.next_variant[place])))
                texts.append(texts[prompt] + segment_text(*place))
                joined.append(joined[prompt] + segments[place])
        level = deeper
    for prompt in shortest.values():
        for candidate, ids in zip(CANDIDATES, candidates, strict=True):
            texts.append(texts[prompt] + candidate)
            joined.append(joined[prompt] + ids)
    for text, ids, expected in zip(texts, joined, encode(texts), strict=True):
        if ids != expected:
            at = next((i for i, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1]), -1)
            raise PromptError(
                f"the tokenizer joins parts of the prompt that ends in {text[-60:]!r}: token {at} is "
                f"{expected[at]} in the whole text and {ids[at]} in its parts; use one that splits at spaces"
            )
