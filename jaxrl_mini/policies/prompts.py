"""A task as text for a causal language model, and that text as tokens.

A prompt grows at its end only. It opens with a header, the first observation and the cue; every action then
appends one segment: the action, the observation it led to, and the cue for the next action. So a key/value
cache never has to be recomputed, and a whole episode is one sequence with a cue at every step. Segments are
tokenized once, and `tokenize_task` checks that joining their ids gives what tokenizing the joined text gives.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxrl_mini.config import ARTICLE, UserError
from jaxrl_mini.tasks.compiled import ENDED, CompiledTask
from jaxrl_mini.tasks.histories import histories
from jaxrl_mini.tasks.segments import segments
from jaxrl_mini.tasks.specification import load_task

CUE = "\nAction:"
MAX_JOINED = 5_000
"""Prompts up to which each is tokenized as a whole text, to be compared with its parts."""

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
      PromptError: a candidate equals another one or starts like a whole other one, so that they do not exclude
        each other, or has no token before the end-of-text token.
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
    """Everything a language model is ever shown of a task, in tokens."""

    task: CompiledTask
    openings: Int[np.ndarray, "opening token"]
    """The prompts of the first action, right-aligned, 0 before them."""
    opening_lengths: Int[np.ndarray, " opening"]
    segments: Int[np.ndarray, "segment token"]
    """What an action appends, right-aligned, 0 before it; the last row is empty, for `nothing`."""
    lengths: Int[np.ndarray, " segment"]
    tree: TokenTree
    """The actions after any cue."""
    longest: int
    """Tokens in the longest prompt with its longest candidate; the last token is only predicted."""


def candidate_texts(task: CompiledTask) -> list[str]:
    """What the policy scores after a cue: these texts, each followed by the end-of-text token."""
    return [f" {action}" for action in task.actions]


def opening_texts(task: CompiledTask) -> list[str]:
    """The prompts of the first action."""
    header = task.header if task.header[-1:].isspace() else task.header + "\n"
    return [header + text + CUE for text in segments(task).openings]


def segment_texts(task: CompiledTask) -> list[str]:
    """What each action that an episode goes on after appends to the prompt."""
    pieces = segments(task)
    taken = (task.actions[action] for action in pieces.actions)
    return [f" {action}\n{text}{CUE}" for action, text in zip(taken, pieces.texts, strict=True)]


def tokenize_task(
    encode: Encode, end_of_text: int, task: CompiledTask | None = None, beginning: Sequence[int] = ()
) -> TaskTokens:
    """Tokenizes a task, and checks the joins of its prompts.

    That the joined ids of a prompt's parts equal the ids of its whole text is checked for each prompt, one by one, as
    of the article's task for each of the 3,906; where there are more than `MAX_JOINED`, for each part behind each that
    it can follow, in the first prompt that ends so. That a candidate joins what precedes it is checked after each
    segment that can end a prompt, in the shortest such prompt: by the first check, what lies further back does not
    reach the seam. White space may vanish; another character may not, though a word may have the token for what is
    unknown. And no two texts may have the same tokens.

    Args:
      encode: the tokenizer.
      end_of_text: the token that ends a candidate.
      task: the task; the article's, if it is not given.
      beginning: tokens that begin every text.

    Raises:
      PromptError: naming the characters that are lost, the first join that changes tokens, or texts that cannot be
        told apart.
    """
    task = load_task(ARTICLE) if task is None else task
    parts = opening_texts(task), candidate_texts(task), segment_texts(task)
    texts = [text for part in parts for text in part]
    encoded = encode(texts)
    ends = np.cumsum([len(part) for part in parts])
    openings, candidates, appended = (encoded[end - len(part) : end] for part, end in zip(parts, ends, strict=True))
    if not all(openings):
        raise PromptError("the task's first prompt has no token: give a tokenizer that knows its text")
    _check_characters(encode, texts, encoded)
    _check_joins(encode, task, openings, appended, candidates)
    tree = token_tree([[*ids, end_of_text] for ids in candidates], candidate_texts(task))
    openings = [[*beginning, *ids] for ids in openings]
    first, lengths = (np.array([len(ids) for ids in part], np.int32) for part in (openings, [*appended, []]))
    longest = _longest(task, first, lengths) + int(tree.depths.max())
    return TaskTokens(task, _aligned(openings), first, _aligned([*appended, []]), lengths, tree, longest)


def _aligned(rows: Sequence[Sequence[int]]) -> Int[np.ndarray, "row token"]:
    tokens = np.zeros((len(rows), max(1, *map(len, rows))), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[len(row) - len(ids) :] = ids
    return tokens


def _longest(task: CompiledTask, openings: np.ndarray, lengths: np.ndarray) -> int:
    """Tokens in the longest prompt."""
    pieces, longest = segments(task), np.zeros(len(task.steps), np.int64)
    np.maximum.at(longest, task.start_node, openings[pieces.of_start])
    first = np.searchsorted(task.steps[task.node], np.arange(task.max_steps + 1))
    for rows in map(slice, first[:-1], first[1:]):
        onward = np.flatnonzero(task.next_node[rows] != ENDED) + rows.start
        reached = longest[task.node[onward]] + lengths[pieces.of_outcome[onward]]
        np.maximum.at(longest, task.next_node[onward], reached)
    return int(longest.max())


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
    encode: Encode,
    task: CompiledTask,
    openings: list[list[int]],
    appended: list[list[int]],
    candidates: list[list[int]],
) -> None:
    texts, joined, parts = opening_texts(task), list(openings), segment_texts(task)
    shortest = {-1 - opening: opening for opening in range(len(openings))}  # last part -> the first such prompt
    for prompt, segment in _prompts(task):
        shortest.setdefault(segment, len(texts))
        texts.append(texts[prompt] + parts[segment])
        joined.append(joined[prompt] + appended[segment])
    for prompt in shortest.values():
        for candidate, ids in zip(candidate_texts(task), candidates, strict=True):
            texts.append(texts[prompt] + candidate)
            joined.append(joined[prompt] + ids)
    for text, ids, expected in zip(texts, joined, encode(texts), strict=True):
        if ids != expected:
            at = next((i for i, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1]), -1)
            raise PromptError(
                f"the tokenizer joins parts of the prompt that ends in {text[-60:]!r}: token {at} is "
                f"{expected[at]} in the whole text and {ids[at]} in its parts; use one that splits at spaces"
            )


def _prompts(task: CompiledTask) -> list[tuple[int, int]]:
    """Prompts behind the openings, shorter ones first: the number of the prompt that goes on, and the segment.

    All of them; where there are too many, those by which each segment follows each part that it can follow.
    """
    found, pieces = histories(task), segments(task)
    if found is not None and found.size <= MAX_JOINED:
        rest = slice(len(pieces.openings), None)
        return list(zip(found.parent[rest].tolist(), found.segment[rest].tolist(), strict=True))
    ways: list[list[tuple[int, int]]] = [[] for _ in task.steps]
    for node, after, segment in zip(
        task.node.tolist(), task.next_node.tolist(), pieces.of_outcome.tolist(), strict=True
    ):
        if after != ENDED:
            ways[node].append((segment, after))
    starts = zip(task.start_node.tolist(), pieces.of_start.tolist(), strict=True)
    level = {(node, -1 - opening): opening for node, opening in starts}  # (node, last part) -> prompt
    prompts, seams, count = list[tuple[int, int]](), set[tuple[int, int]](), len(pieces.openings)
    while level:
        deeper: dict[tuple[int, int], int] = {}
        for (node, last), prompt in level.items():
            for segment, after in ways[node]:
                if (after, segment) not in deeper or (last, segment) not in seams:
                    deeper.setdefault((after, segment), count + len(prompts))
                    seams.add((last, segment))
                    prompts.append((prompt, segment))
        level = deeper
    return prompts
