"""The look-up drafter: a story, then the look-up stated over the whole text, then edges."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.roles import Commit, Context, TargetTop
from treegraft.core.tree import ROOT, Proposals
from treegraft.policies.drafters.ngram import NgramConfig, NgramDrafter

V = 32
NONE = -math.inf


def top(scores: Sequence[float]) -> TargetTop:
    return TargetTop(
        torch.tensor(scores, dtype=torch.float32),
        torch.zeros(len(scores), 0, dtype=torch.int64),
        torch.zeros(len(scores), 0),
    )


def begun(text: Sequence[int], scores: Sequence[float] | None = None, **options: int):
    """A drafter that has been told ``text``; ``scores`` are of its places from 1 on."""
    drafter = NgramDrafter(NgramConfig(**options))
    drafter.begin(Context(tuple(text), 99, V, top(scores) if scores is not None else None))
    return drafter


def tree_of(root: int, *paths: Sequence[int]) -> TensorTree:
    tree = TensorTree(V)
    tree.reset_(root, 99)
    tree.add_(
        Proposals.of_paths([ROOT] * len(paths), paths, [[NONE] * len(p) for p in paths]), 0, 0
    )
    return tree


def found(
    drafter: NgramDrafter, tree: TensorTree, width: int = 9, nodes: Sequence[int] = (ROOT,)
) -> list[tuple[int, list[int], float, int]]:
    """(node, path, score of its first token, match length) of each proposal, in order."""
    proposals = drafter.propose(tree, torch.tensor(nodes), width)
    proposals.check(tree.n_nodes)
    assert bool((proposals.logprobs[:, 1:] == NONE).all()), "only the first token has a score"
    return [
        (int(node), [t for t in path.tolist() if t >= 0], float(score[0]), int(n))
        for node, path, score, n in zip(
            proposals.positions,
            proposals.tokens,
            proposals.logprobs,
            proposals.match,
            strict=True,
        )
    ]


# --- the story ------------------------------------------------------------------------------------


def test_it_continues_as_the_text_did_before() -> None:
    drafter = begun([1, 2, 3, 4, 5, 1, 2], scores=[-0.1, -0.2, -0.3, -0.4, -0.5, -0.6])
    # "1 2" stood before; "3 4 5" followed, and the target gave 3 a logprob of -0.2 there.
    assert found(drafter, tree_of(2)) == [(ROOT, [3, 4, 5], pytest.approx(-0.2), 2)]


def test_nothing_to_say_about_a_new_text() -> None:
    drafter = begun([1, 2, 3])
    assert found(drafter, tree_of(3)) == []


def test_longest_match_first_then_the_latest() -> None:
    #        0  1  2  3  4  5  6  7  8  9
    text = [1, 2, 7, 9, 2, 8, 5, 2, 6, 1, 2]
    drafter = begun(text, length=1)
    assert [(path, n) for _, path, _, n in found(drafter, tree_of(2))] == [
        ([7], 2),
        ([6], 1),
        ([8], 1),
    ]
    assert [path for _, path, _, _ in found(drafter, tree_of(2), width=2)] == [[7], [6]]


def test_only_the_longest_match_goes_on_for_longer() -> None:
    text = [7, 2, 5, 1, 2, 3, 4, 5, 6, 8, 1, 2]
    drafter = begun(text, max_n=2, length=2, long_length=5)
    assert [(path, n) for _, path, _, n in found(drafter, tree_of(2))] == [
        ([3, 4, 5, 6, 8], 2),
        ([5, 1], 1),
    ]
    # The place after "1 2" is matched by "2" as well: two tokens of a path that is there already.
    assert len(found(drafter, tree_of(2), width=1)) == 1


def test_long_continuations_that_part_late_are_both_drafted() -> None:
    drafter = begun([1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 0, 1, 2], max_n=2, length=2, long_length=3)
    assert [(path, n) for _, path, _, n in found(drafter, tree_of(2))] == [
        ([3, 4, 6], 2),
        ([3, 4, 5], 2),
    ]


def test_long_continuations_are_no_shorter_than_the_others() -> None:
    with pytest.raises(ValueError, match=r"long_length must be at least length \(3\), found 2"):
        NgramConfig(long_length=2)


def test_a_node_is_matched_by_its_own_path() -> None:
    drafter = begun([1, 2, 3, 4, 1], length=1)
    tree = tree_of(1, [2], [9])
    assert found(drafter, tree, nodes=[1]) == [(1, [3], NONE, 2)]
    assert found(drafter, tree, nodes=[2]) == []


def test_committed_tokens_are_found_at_once() -> None:
    drafter = begun([1, 2])
    drafter.observe(Commit((3, 1, 2), (), top([-0.7, -0.8, -0.9])))
    assert found(drafter, tree_of(2)) == [(ROOT, [3, 1, 2], pytest.approx(-0.7), 2)]


def test_a_new_text_forgets_the_old() -> None:
    drafter = begun([1, 2, 3, 1, 2])
    drafter.begin(Context((1, 2), 99, V, None))
    assert found(drafter, tree_of(2)) == []


# --- the property ---------------------------------------------------------------------------------


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=24),
    path=st.lists(st.integers(0, 3), max_size=3),
    max_n=st.integers(1, 4),
    min_n=st.integers(1, 4),
    length=st.integers(1, 3),
    more=st.integers(0, 4),
    width=st.integers(1, 4),
    split=st.integers(1, 24),
)
@settings(max_examples=100)
def test_it_finds_what_a_search_of_the_whole_text_finds(
    text: list[int],
    path: list[int],
    max_n: int,
    min_n: int,
    length: int,
    more: int,
    width: int,
    split: int,
) -> None:
    min_n = min(min_n, max_n)
    split = min(split, len(text))
    scores = [-float(i) for i in range(len(text))]
    options = {"max_n": max_n, "min_n": min_n, "length": length}
    if more:
        options["long_length"] = length + more
    drafter = begun(text[:split], scores[1:split], **options)
    if text[split:]:
        drafter.observe(Commit(tuple(text[split:]), (), top(scores[split:])))

    tail = text + path
    expected: list[tuple[list[int], float, int]] = []
    for n in range(max_n, min_n - 1, -1):
        for place in range(len(text) - 1, n - 1, -1):
            reach = length + more if n == max_n else length
            continuation = text[place : place + reach]
            if len(tail) >= n and text[place - n : place] == tail[-n:]:
                score = NONE if place == 0 else scores[place]
                if continuation not in [path[:reach] for path, _, _ in expected]:
                    expected.append((continuation, score, n))
    tree = tree_of(text[-1], *([path] if path else []))
    proposed = [entry[1:] for entry in found(drafter, tree, width, nodes=[len(path)])]
    # It looks at a bounded number of occurrences, which is enough for these short texts only if
    # not cut; what it finds is a prefix of the full list, in its order.
    n_looked_at = sum(
        1 for place in range(1, len(text) + 1) if text[place - 1 : place] == tail[-1:]
    )
    if n_looked_at <= 4 * width:
        assert proposed == expected[:width]
    else:
        assert all(entry in expected for entry in proposed)


# --- edges ----------------------------------------------------------------------------------------


def test_a_prompt_of_one_token_drafts_nothing() -> None:
    drafter = begun([5], scores=[])
    assert found(drafter, tree_of(5)) == []
    drafter.observe(Commit((5,), (), None))
    assert found(drafter, tree_of(5)) == [(ROOT, [5], NONE, 1)]


def test_a_lookup_does_not_grow_the_index() -> None:
    drafter = begun([1, 2, 3])
    before = len(drafter._after)
    for token in range(V):
        found(drafter, tree_of(3, [token]), nodes=[1])
    assert len(drafter._after) == before


def test_a_look_up_in_a_long_repeating_text_is_bounded() -> None:
    drafter = begun([1, 2] * 2000)
    proposals = drafter.propose(tree_of(2), torch.tensor([ROOT]), 3)
    # Near the end the continuations are cut by the end of the text.
    assert {tuple(p for p in path if p >= 0) for path in proposals.tokens.tolist()} <= {
        (1, 2, 1),
        (1, 2),
        (1,),
    }


def test_no_position_gives_no_proposal() -> None:
    assert found(begun([1, 1, 1]), tree_of(1), nodes=[]) == []
