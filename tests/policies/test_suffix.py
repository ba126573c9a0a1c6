"""The suffix drafter: a story, then counting in the texts themselves, then store and edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.roles import Commit, Context
from treegraft.core.tree import ROOT, Proposals
from treegraft.policies.drafters.suffix import SuffixConfig, SuffixDrafter

V = 32


def begun(text: Sequence[int], **options: Any) -> SuffixDrafter:
    drafter = SuffixDrafter(SuffixConfig(**options))
    begin(drafter, text)
    return drafter


def begin(drafter: SuffixDrafter, text: Sequence[int]) -> None:
    drafter.begin(Context(tuple(text), 999, V, None))


def commit(drafter: SuffixDrafter, *tokens: int) -> None:
    drafter.observe(Commit(tokens, (), None))


def tree_of(root: int, *paths: Sequence[int]) -> TensorTree:
    tree = TensorTree(V)
    tree.reset_(root, 99)
    scores = [[-1.0] * len(path) for path in paths]
    tree.add_(Proposals.of_paths([ROOT] * len(paths), paths, scores), 0, False)
    return tree


def found(
    drafter: SuffixDrafter, tree: TensorTree, width: int = 9, nodes: Sequence[int] = (ROOT,)
) -> list[tuple[int, list[int], list[float], int]]:
    """(node, path, share of each token, match length) of each proposal, in order."""
    proposals = drafter.propose(tree, torch.tensor(nodes, dtype=torch.int64), width)
    proposals.check(tree.n_nodes)
    return [
        (int(node), [t for t in path.tolist() if t >= 0], row[row > -math.inf].exp().tolist(), n)
        for node, path, row, n in zip(
            proposals.positions,
            proposals.tokens,
            proposals.logprobs,
            proposals.match.tolist(),
            strict=True,
        )
    ]


def paths_of(*args: Any, **options: Any) -> list[list[int]]:
    return [path for _, path, _, _ in found(*args, **options)]


# --- the story ------------------------------------------------------------------------------------


def test_a_copied_text_is_drafted_to_the_end() -> None:
    passage = list(range(1, 12))
    drafter = begun([*passage, 0, *passage[:4]], factor=4)
    # "1 2 3 4" stood before, once. Behind the passage and the 0 comes the copy, once more.
    assert found(drafter, tree_of(4)) == [(ROOT, [*passage[4:], 0, *passage[:8]], [1.0] * 16, 4)]


def test_nothing_to_say_about_a_new_text() -> None:
    assert found(begun([1, 2, 3]), tree_of(3)) == []


def test_a_longer_match_drafts_further() -> None:
    text = list(range(1, 20))
    for n in range(1, 6):
        (path,) = paths_of(begun([*text, *text[:n]], factor=1.5), tree_of(n))
        assert path == text[n : n + max(1, int(1.5 * n))]
    assert paths_of(begun([*text, 1, 2, 3], length=2), tree_of(3)) == [[4, 5]]


def test_more_frequent_continuations_come_first_and_score_higher() -> None:
    text = [1, 5, 1, 6, 1, 5, 1, 7, 1]
    drafter = begun(text, factor=1)
    assert [(path, shares, n) for _, path, shares, n in found(drafter, tree_of(1))] == [
        ([5], [0.5], 1),
        ([7], [0.25], 1),
        ([6], [0.25], 1),
    ]
    assert paths_of(drafter, tree_of(1), width=2) == [[5], [7]]


def test_the_longest_context_speaks_first_and_shorter_ones_add_to_it() -> None:
    text = [1, 2, 3, 9, 2, 4, 9, 2, 4, 1, 2]
    drafter = begun(text, factor=1, length=1)
    assert [(path, n) for _, path, _, n in found(drafter, tree_of(2))] == [([3], 2), ([4], 1)]


def test_a_path_ends_where_it_gets_unlikely() -> None:
    text = [*[1, 2, 3], *[1, 2, 4], *[1, 2, 5], *[1, 2, 6], 1]
    assert paths_of(begun(text, factor=9, length=2, min_share=0.25), tree_of(1)) == [[2, 6]]
    assert paths_of(begun(text, factor=9, length=2, min_share=0.26), tree_of(1)) == [[2]]


def test_a_node_is_matched_by_its_own_path() -> None:
    drafter = begun([1, 2, 3, 4, 1], factor=1)
    tree = tree_of(1, [2], [9])
    assert found(drafter, tree, nodes=[1]) == [(1, [3, 4], [1.0, 1.0], 2)]
    assert found(drafter, tree, nodes=[2]) == []


def test_committed_tokens_are_found_at_once_and_rejected_ones_never() -> None:
    drafter = begun([1, 2], factor=9, length=3)
    tree_of(2, [7, 7])  # drafted and rejected: the drafter is told of what was committed alone
    commit(drafter, 3, 1, 2)
    assert paths_of(drafter, tree_of(2)) == [[3, 1, 2]]
    assert found(drafter, tree_of(2, [7]), nodes=[1]) == []


def test_a_new_text_forgets_the_old() -> None:
    drafter = begun([1, 2, 3, 1, 2])
    begin(drafter, [1, 2])
    assert found(drafter, tree_of(2)) == []


# --- the property ---------------------------------------------------------------------------------


def followers(texts: Sequence[Sequence[int]], context: Sequence[int]) -> list[int]:
    n = len(context)
    return [
        text[i + n]
        for text in texts
        for i in range(len(text) - n)
        if list(text[i : i + n]) == list(context)
    ]


def ranking(followed: Sequence[int]) -> list[int]:
    latest = {token: i for i, token in enumerate(followed)}
    return sorted(latest, key=lambda token: (-followed.count(token), -latest[token]))


def expected(
    texts: Sequence[Sequence[int]], context: list[int], width: int, config: SuffixConfig
) -> list[tuple[list[int], list[float], int]]:
    """What the drafter says it does, by counting in the texts. The last text is the current one.

    The longest context that stands anywhere bounds the match, with or without a continuation.
    """

    def longest(context: list[int], most: int) -> int:
        for n in range(min(most, len(context)), 0, -1):
            if followers(texts, context[-n:]):
                return n
        return 0

    def carried_on(start: list[int], token: int, n: int) -> tuple[list[int], list[float]]:
        most = min(config.length, max(1, int(config.factor * n)))
        context, path, shares = start[-n:], [token], [share(start[-n:], token)]
        while len(path) < most and math.prod(shares) >= config.min_share:
            context = [*context, path[-1]][-config.max_match :]
            n = longest(context, len(context))
            if n < config.min_match:
                break
            context = context[-n:] if n else []
            token = ranking(followers(texts, context))[0]
            if math.prod([*shares, share(context, token)]) < config.min_share:
                break
            path.append(token)
            shares.append(share(context, token))
        return path, shares

    def share(context: list[int], token: int) -> float:
        followed = followers(texts, context)
        return followed.count(token) / len(followed)

    proposals: list[tuple[list[int], list[float], int]] = []
    for n in range(min(config.max_match, len(context)), config.min_match - 1, -1):
        for token in ranking(followers(texts, context[-n:])):
            if token not in [path[0] for path, _, _ in proposals] and len(proposals) < width:
                proposals.append((*carried_on(context, token, n), n))
    return proposals


@st.composite
def configs(draw: st.DrawFn) -> SuffixConfig:
    max_match = draw(st.integers(1, 6))
    return SuffixConfig(
        max_match=max_match,
        min_match=draw(st.integers(1, max_match)),
        factor=draw(st.sampled_from([0.5, 1.0, 2.0, 5.0])),
        length=draw(st.integers(1, 6)),
        min_share=draw(st.sampled_from([0.0, 0.1, 0.3, 0.6])),
    )


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    path=st.lists(st.integers(0, 3), max_size=4),
    width=st.integers(1, 4),
    split=st.integers(1, 24),
    config=configs(),
)
def test_it_finds_what_counting_in_the_whole_text_finds(
    text: list[int], path: list[int], width: int, split: int, config: SuffixConfig
) -> None:
    drafter = SuffixDrafter(config)
    begin(drafter, text[:split])
    for token in text[split:]:
        commit(drafter, token)
    tree = tree_of(text[-1], *([path] if path else []))
    proposed = found(drafter, tree, width, nodes=[len(path)])
    wanted = expected([text], text + path, width, config)
    assert [(path, n) for _, path, _, n in proposed] == [(path, n) for path, _, n in wanted]
    for (_, _, shares, _), (_, right, _) in zip(proposed, wanted, strict=True):
        assert shares == pytest.approx(right, rel=1e-5)


# --- the store ------------------------------------------------------------------------------------


def test_without_a_store_no_text_knows_of_another() -> None:
    drafter = begun([1, 2])
    commit(drafter, 3, 4, 5)
    begin(drafter, [1, 2])
    assert found(drafter, tree_of(2)) == []


def test_the_store_drafts_from_what_was_generated_before() -> None:
    drafter = begun([9, 8, 1, 2], store_tokens=100, factor=9, max_match=2)
    commit(drafter, 3, 4)
    commit(drafter, 5)
    begin(drafter, [7, 1, 2])
    # The prompt's last tokens lead into the generated text; the rest of the prompt is not kept.
    assert found(drafter, tree_of(2)) == [(ROOT, [3, 4, 5], [1.0] * 3, 2)]
    assert found(drafter, tree_of(2, [9]), nodes=[1]) == []
    # What the store said is matched token by token.
    commit(drafter, 3, 4)
    assert paths_of(drafter, tree_of(4)) == [[5]]


def test_the_text_itself_speaks_before_the_store_where_both_match_as_much() -> None:
    drafter = begun([1], store_tokens=100, factor=1)
    commit(drafter, 2, 3, 2, 3)
    begin(drafter, [2, 4, 2])
    assert paths_of(drafter, tree_of(2)) == [[4], [3]]
    # A longer match in the store goes before a shorter one in the text.
    begin(drafter, [2, 4, 3, 2])
    assert [(path[0], n) for _, path, _, n in found(drafter, tree_of(2))] == [(3, 2), (4, 1)]


def test_the_oldest_texts_leave_a_full_store() -> None:
    drafter = SuffixDrafter(SuffixConfig(store_tokens=12, max_match=1))
    for start in (1, 5, 9):  # 4 tokens each, with the prompt's last
        begin(drafter, [start])
        commit(drafter, start + 1, start + 2, start + 3)
    begin(drafter, [1])
    assert paths_of(drafter, tree_of(1)) == [[2, 3]]
    commit(drafter, 20, 21, 22)
    begin(drafter, [1])
    # 16 tokens were too many; the oldest went until 9 or less were left.
    assert paths_of(drafter, tree_of(1)) == [[20, 21]]
    begin(drafter, [5])
    assert found(drafter, tree_of(5)) == []
    begin(drafter, [9])
    assert paths_of(drafter, tree_of(9)) == [[10, 11]]


def test_of_a_text_longer_than_the_store_the_end_is_kept() -> None:
    drafter = begun([1], store_tokens=4)
    commit(drafter, *range(2, 12))
    begin(drafter, [2])
    assert found(drafter, tree_of(2)) == []
    begin(drafter, [9])
    assert paths_of(drafter, tree_of(9)) == [[10, 11]]


@given(
    texts=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=5),
            st.lists(st.integers(0, 3), max_size=8),
        ),
        max_size=8,
    ),
    cap=st.integers(1, 40),
)
def test_a_store_never_holds_more_than_its_cap(
    texts: list[tuple[list[int], list[int]]], cap: int
) -> None:
    drafter = SuffixDrafter(SuffixConfig(store_tokens=cap, max_match=3))
    for prompt, output in texts:
        begin(drafter, prompt)
        if output:
            commit(drafter, *output)
        store = drafter._store
        assert store is not None
        held = [list(text) for text in store._texts]
        assert store._n_tokens == sum(map(len, held)) <= cap
        # Newest last, without a gap, and the index holds them alone.
        given_ = [[*p[-3:], *o][-cap:] for p, o in texts[: texts.index((prompt, output))] if o]
        assert held == given_[len(given_) - len(held) :] or texts.count((prompt, output)) > 1
        assert store.index.n_states <= 2 * sum(map(len, held)) + 1


def test_the_same_texts_give_the_same_drafts() -> None:
    def drafts() -> list[Any]:
        drafter = SuffixDrafter(SuffixConfig(store_tokens=20, max_match=3))
        said = []
        for text in ([1, 2, 1, 3], [2, 1, 2], [3, 1, 2, 1]):
            begin(drafter, text)
            commit(drafter, *text)
            said.append(found(drafter, tree_of(text[-1], [1, 2]), nodes=[0, 1, 2]))
        return said

    assert drafts() == drafts()


# --- edges ----------------------------------------------------------------------------------------


def test_a_prompt_of_one_token_drafts_nothing_at_first() -> None:
    drafter = begun([5])
    assert found(drafter, tree_of(5)) == []
    commit(drafter, 5)
    assert paths_of(drafter, tree_of(5)) == [[5, 5]]


def test_the_last_id_of_the_vocabulary_is_drafted() -> None:
    assert paths_of(begun([V - 1, 0, V - 1]), tree_of(V - 1)) == [[0, V - 1]]


def test_a_width_of_one_gives_the_most_frequent() -> None:
    drafter = begun([1, 2, 1, 3, 1, 3, 1], length=1)
    tree = tree_of(1, [2])
    assert paths_of(drafter, tree, width=1, nodes=[0, 1]) == [[3], [1]]


def test_short_contexts_can_be_left_out() -> None:
    assert found(begun([1, 2, 9, 2], min_match=2), tree_of(2)) == []


def test_drafting_leaves_the_index_as_it_was() -> None:
    drafter = begun([1, 2, 3, 1, 2])
    before = drafter._text.n_states
    for token in range(V):
        found(drafter, tree_of(2, [token]), nodes=[0, 1])
    assert drafter._text.n_states == before


def test_a_long_periodic_text_is_drafted_to_the_full_length() -> None:
    drafter = begun([1, 2, 3] * 2000)
    (proposal,) = found(drafter, tree_of(3))
    assert proposal == (ROOT, ([1, 2, 3] * 6)[:16], [1.0] * 16, 32)


def test_no_position_gives_no_proposal() -> None:
    assert found(begun([1, 1, 1]), tree_of(1), nodes=[]) == []
