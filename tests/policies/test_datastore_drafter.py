"""The datastore drafter: a story, then look-ups stated over all documents, then edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from listed_corpus import ListedCorpus

from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.errors import ConfigError
from treegraft.core.roles import Commit, Context
from treegraft.core.tree import ROOT, Proposals
from treegraft.policies.drafters.datastore import DatastoreConfig, DatastoreDrafter, _spread

V = 32
NONE = -math.inf
Found = tuple[int, list[int], list[float], int]


def begun(
    documents: Sequence[Sequence[int]], text: Sequence[int], **options: Any
) -> DatastoreDrafter:
    """A drafter over ``documents`` that has been told ``text``."""
    drafter = DatastoreDrafter(DatastoreConfig(path="s", **options), ListedCorpus(documents, V))
    drafter.begin(Context(tuple(text), 99, V, None))
    return drafter


def tree_of(root: int, *paths: Sequence[int]) -> TensorTree:
    tree = TensorTree(V)
    tree.reset_(root, 99)
    tree.add_(
        Proposals.of_paths([ROOT] * len(paths), paths, [[NONE] * len(p) for p in paths]), 0, False
    )
    return tree


def found(
    drafter: DatastoreDrafter, tree: TensorTree, width: int = 9, nodes: Sequence[int] = (ROOT,)
) -> list[Found]:
    """(node, path, share of each token, match length) of each proposal, in order."""
    proposals = drafter.propose(tree, torch.tensor(nodes), width)
    proposals.check(tree.n_nodes)
    entries = []
    for node, path, row, n in zip(
        proposals.positions, proposals.tokens, proposals.logprobs, proposals.match, strict=True
    ):
        tokens = [token for token in path.tolist() if token >= 0]
        shares = row[: len(tokens)].exp().tolist()
        assert bool((row[len(tokens) :] == NONE).all())
        entries.append((int(node), tokens, [round(share, 5) for share in shares], int(n)))
    return entries


# --- the story ------------------------------------------------------------------------------------


def test_it_goes_on_as_the_corpus_does() -> None:
    drafter = begun([[1, 2, 3, 4, 5]], [9, 1, 2], length=3)
    assert found(drafter, tree_of(2)) == [(ROOT, [3, 4, 5], [1, 1, 1], 2)]


def test_nothing_to_say_about_what_is_not_in_the_corpus() -> None:
    assert found(begun([[1, 2, 3, 4, 5]], [6, 7]), tree_of(7)) == []


def test_the_likelier_continuation_comes_first_with_its_share() -> None:
    drafter = begun([[1, 2, 8], [1, 3, 9], [1, 2, 7], [1, 2, 8], [1]], [1], length=2)
    third = round(1 / 3, 5)
    # Of five places one ends its document; 2 follows three times, and there 8 twice.
    assert found(drafter, tree_of(1)) == [
        (ROOT, [2, 8], [0.6, round(2 / 3, 5)], 1),
        (ROOT, [3, 9], [0.2, 1], 1),
        (ROOT, [2, 7], [0.6, third], 1),
    ]
    assert [path for _, path, _, _ in found(drafter, tree_of(1), width=2)] == [[2, 8], [3, 9]]


def test_a_longer_match_comes_first_and_keeps_its_score() -> None:
    drafter = begun([[1, 2, 3, 4], [5, 2, 3, 6], [5, 2, 7, 7]], [1, 2], length=2)
    assert found(drafter, tree_of(2)) == [
        (ROOT, [3, 4], [1, 1], 2),
        (ROOT, [7, 7], [round(1 / 3, 5), 1], 1),
        (ROOT, [3, 6], [1, 0.5], 1),
    ]


def test_a_node_is_matched_by_its_own_path() -> None:
    drafter = begun([[1, 2, 3], [1, 9, 4]], [1], length=1, min_n=2)
    tree = tree_of(1, [2], [9])
    assert found(drafter, tree, nodes=[1]) == [(1, [3], [1], 2)]
    assert found(drafter, tree, nodes=[2, 1]) == [(2, [4], [1], 2), (1, [3], [1], 2)]


def test_committed_tokens_count_at_once() -> None:
    drafter = begun([[1, 2, 3, 4]], [7])
    assert found(drafter, tree_of(7)) == []
    drafter.observe(Commit((1, 2), (), None))
    assert found(drafter, tree_of(2)) == [(ROOT, [3, 4], [1, 1], 2)]
    drafter.observe(Commit((3,), (), None))
    assert found(drafter, tree_of(3)) == [(ROOT, [4], [1], 3)]


def test_a_new_text_forgets_the_old() -> None:
    drafter = begun([[1, 2, 3]], [1, 2])
    drafter.begin(Context((2,), 99, V, None))
    assert [n for *_, n in found(drafter, tree_of(2))] == [1]


# --- the property ---------------------------------------------------------------------------------


def stated(
    documents: list[list[int]], tail: list[int], most: int, max_n: int, min_n: int, length: int
) -> list[tuple[list[int], list[float], int]]:
    """The look-up in so many words, over all documents."""
    done: dict[tuple[int, ...], float] = {}
    out: list[tuple[list[int], list[float], int]] = []
    for n in range(min(max_n, len(tail)), min_n - 1, -1):
        # What follows each occurrence; in suffix order, where the end of a document sorts last.
        rows = sorted(
            (
                document[i + n :]
                for document in documents
                for i in range(len(document) - n + 1)
                if document[i : i + n] == tail[-n:]
            ),
            key=lambda row: [*row, V],
        )
        rows = [tuple(row[:length]) for row in rows]
        beginnings = list(dict.fromkeys(row[: j + 1] for row in rows for j in range(len(row))))

        def count(prefix: tuple[int, ...], rows: list[tuple[int, ...]] = rows) -> int:
            return sum(row[: len(prefix)] == prefix for row in rows)

        for prefix in sorted(beginnings, key=lambda b: (-count(b), len(b))):
            if prefix in done or len(out) == most:
                continue
            path = prefix
            while longer := [b for b in beginnings if b[:-1] == path]:
                path = max(longer, key=count)
            for j in range(len(path)):
                done.setdefault(path[: j + 1], count(path[: j + 1]) / count(path[:j]))
            out.append((list(path), [round(done[path[: j + 1]], 5) for j in range(len(path))], n))
    return out


@given(
    documents=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=5),
    text=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    path=st.lists(st.integers(0, 2), max_size=3),
    max_n=st.integers(1, 5),
    min_n=st.integers(1, 5),
    length=st.integers(1, 4),
    paths=st.integers(1, 5),
    width=st.integers(1, 5),
    split=st.integers(1, 6),
)
def test_it_proposes_what_the_statement_says(
    documents: list[list[int]],
    text: list[int],
    path: list[int],
    max_n: int,
    min_n: int,
    length: int,
    paths: int,
    width: int,
    split: int,
) -> None:
    min_n = min(min_n, max_n)
    options = {"max_n": max_n, "min_n": min_n, "length": length, "paths": paths}
    drafter = begun(documents, text[:split], **options)
    if text[split:]:
        drafter.observe(Commit(tuple(text[split:]), (), None))
    tree = tree_of(text[-1], *([path] if path else []))
    expected = stated(documents, text + path, min(width, paths), max_n, min_n, length)
    assert [entry[1:] for entry in found(drafter, tree, width, [len(path)])] == expected


@given(st.integers(0, 50), st.integers(1, 200), st.integers(1, 20))
def test_places_are_spread_evenly(start: int, n: int, most: int) -> None:
    ranks = _spread(range(start, start + n), most).tolist()
    assert len(ranks) == min(n, most)
    assert ranks == sorted(set(ranks))
    assert start <= ranks[0]
    assert ranks[-1] < start + n
    # A run of r equal continuations gets its share to within one place.
    for run in range(1, n + 1):
        seen = sum(rank < start + run for rank in ranks)
        assert abs(seen - run * len(ranks) / n) <= 1


def test_of_many_places_a_share_is_looked_at() -> None:
    documents = [[1, 2]] * 300 + [[1, 3]] * 100
    assert found(begun(documents, [1], occurrences=8, length=1), tree_of(1)) == [
        (ROOT, [2], [0.75], 1),
        (ROOT, [3], [0.25], 1),
    ]


# --- edges ----------------------------------------------------------------------------------------


def test_no_position_gives_no_proposal() -> None:
    assert found(begun([[1, 2]], [1]), tree_of(1), nodes=[]) == []


def test_ids_that_the_corpus_has_not_match_nothing() -> None:
    drafter = begun([[1, 2, 3]], [1, 2])
    drafter.observe(Commit((V, V + 7), (), None))
    assert found(drafter, tree_of(2)) == []


def test_a_corpus_that_ends_here_has_nothing_to_say() -> None:
    assert found(begun([[1, 2], [2]], [1, 2]), tree_of(2)) == []


def test_matches_longer_than_the_store_sorts_are_refused() -> None:
    index = ListedCorpus([[1, 2]], V, order=8)
    with pytest.raises(ConfigError, match="max_n must be at most 8 in datastore 's', found 16"):
        DatastoreDrafter(DatastoreConfig(path="s"), index)
