"""The recycling drafter: a story, then a dict that does the same, then edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_models import TableModel, hashed_model

from treegraft.backends.tensor_tree import TensorTree
from treegraft.config import parse_config
from treegraft.core.roles import Commit, Context, TargetTop, TreeTop
from treegraft.core.tree import ROOT, Proposals
from treegraft.pipeline import build_pipeline
from treegraft.policies.drafters.recycle import RecycleConfig, RecycleDrafter

V = 12
Rows = Sequence[Sequence[int]]


def scores(tokens: Sequence[int], k: int) -> list[float]:
    """Falling logprobs that tell rows apart."""
    return [-0.5 * (rank + 1) - 0.01 * sum(tokens) for rank in range(k)]


def top(rows: Rows) -> TargetTop:
    """The target at one place per row; ``rows`` are its likeliest tokens there."""
    k = len(rows[0]) if rows else 0
    logprobs = torch.tensor([scores(row, k) for row in rows], dtype=torch.float32).view(-1, k)
    return TargetTop(torch.zeros(len(rows)), torch.tensor(rows).view(-1, k), logprobs)


def begun(text: Sequence[int], rows: Rows, **options: Any) -> RecycleDrafter:
    """A drafter told ``text`` and the target's ``rows`` at its places from 1 on."""
    drafter = RecycleDrafter(RecycleConfig(**options))
    drafter.begin(Context(tuple(text), 99, V, top(rows) if rows else None))
    return drafter


def tree_of(root: int, *paths: Sequence[int]) -> TensorTree:
    tree = TensorTree(V)
    tree.reset_(root, 99)
    logprobs = [[-1.0] * len(path) for path in paths]
    tree.add_(Proposals.of_paths([ROOT] * len(paths), paths, logprobs), 0, False)
    return tree


def found(
    drafter: RecycleDrafter, tree: TensorTree, width: int = 9, nodes: Sequence[int] = (ROOT,)
) -> list[tuple[int, list[int]]]:
    proposals = drafter.propose(tree, torch.tensor(nodes, dtype=torch.int64), width)
    proposals.check(tree.n_nodes)
    assert bool((proposals.match == 1).all()), "one token of context is matched"
    for path, row in zip(proposals.tokens, proposals.logprobs, strict=True):
        assert (path >= 0).tolist() == (row > -math.inf).tolist(), "every token has a score"
    return [
        (int(node), [t for t in path.tolist() if t >= 0])
        for node, path in zip(proposals.positions, proposals.tokens, strict=True)
    ]


# --- the story ------------------------------------------------------------------------------------


def test_it_proposes_what_the_target_thought_likely_after_the_same_token() -> None:
    # After 1 the target thought of 2, 5 and 6; after 2 of 7, 1 and 8. Then 1 came again.
    drafter = begun([1, 2, 1], [[2, 5, 6], [7, 1, 8]], k=3)
    assert found(drafter, tree_of(1)) == [(ROOT, [2]), (ROOT, [5]), (ROOT, [6])]
    proposals = drafter.propose(tree_of(1), torch.tensor([ROOT]), 9)
    assert proposals.logprobs[:, 0].tolist() == pytest.approx(scores([2, 5, 6], 3))


def test_nothing_to_say_about_a_token_that_was_never_read() -> None:
    assert found(begun([1, 2, 3], [[2, 5], [3, 5]], k=2), tree_of(3)) == []


def test_a_node_is_looked_up_by_its_own_token() -> None:
    drafter = begun([1, 2, 3], [[2, 5], [3, 6]], k=2)
    tree = tree_of(3, [1, 2], [9])
    # Node 2 holds the 9, node 3 the 2: the tree adds level by level.
    assert found(drafter, tree, nodes=[1, 2, 3]) == [(1, [2]), (1, [5]), (3, [3]), (3, [6])]


def test_more_levels_go_on_along_the_likeliest_successors() -> None:
    rows = [[2, 5], [3, 6], [4, 1], [5, 9]]
    drafter = begun([1, 2, 3, 4, 1], rows, k=2, levels=4)
    # 5 was never read: the second path ends there.
    assert found(drafter, tree_of(1)) == [(ROOT, [2, 3, 4, 5]), (ROOT, [5])]


def test_committed_places_are_recycled_at_once() -> None:
    drafter = begun([1], [], k=2)
    drafter.observe(Commit((2, 3), (1,), top([[2, 7], [3, 8]])))
    tree = tree_of(3, [1], [2])
    assert found(drafter, tree, nodes=[1, 2]) == [(1, [2]), (1, [7]), (2, [3]), (2, [8])]
    # The last token has not been read yet.
    assert found(drafter, tree) == []
    drafter.observe(Commit((4,), (), top([[4, 9]])))
    assert found(drafter, tree) == [(ROOT, [4]), (ROOT, [9])]


def test_rejected_nodes_are_recycled_and_committed_ones_count_more() -> None:
    drafter = begun([1], [], k=1)
    every = top([[5], [6], [7], [8]])
    # The root 1, a child 2 that is accepted, and below it 3 and another 1, both rejected.
    read = TreeTop(torch.tensor([1, 2, 3, 1]), every.tokens, every.logprobs)
    drafter.observe(Commit((2, 9), (1,), top([[5], [6]]), read))
    tree = tree_of(9, [1], [2], [3])
    assert found(drafter, tree, nodes=[1, 2, 3]) == [(1, [5]), (2, [6]), (3, [7])]


def test_the_latest_row_of_a_token_counts() -> None:
    drafter = begun([1, 2, 1, 3, 1], [[2], [4], [3], [5]], k=1)
    assert found(drafter, tree_of(1)) == [(ROOT, [3])]


@pytest.mark.parametrize("keep", [False, True])
def test_a_new_text_starts_cold_unless_the_table_is_kept(keep: bool) -> None:
    drafter = begun([1, 2], [[5, 6]], k=2, keep=keep)
    drafter.begin(Context((1,), 99, V, None))
    assert found(drafter, tree_of(1)) == ([(ROOT, [5]), (ROOT, [6])] if keep else [])


# --- the property ---------------------------------------------------------------------------------

IDS = st.integers(0, V - 1)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[tuple[Any, ...]]]:
    k = draw(st.integers(1, 4))
    row = st.lists(IDS, min_size=k, max_size=k, unique=True)
    prompt = draw(st.lists(IDS, min_size=1, max_size=6))
    rows = draw(st.lists(row, min_size=len(prompt) - 1, max_size=len(prompt) - 1))
    steps = []
    for _ in range(draw(st.integers(0, 3))):
        n, n_tree = draw(st.integers(1, 4)), draw(st.integers(1, 5))
        tokens = draw(st.lists(IDS, min_size=n, max_size=n))
        here = draw(st.lists(row, min_size=n, max_size=n))
        nodes = draw(st.lists(IDS, min_size=n_tree, max_size=n_tree))
        behind = draw(st.lists(row, min_size=n_tree, max_size=n_tree))
        steps.append((tokens, here, nodes, behind))
    return k, prompt, rows, steps


@given(
    history=histories(),
    wanted=st.integers(1, 4),
    levels=st.integers(1, 3),
    width=st.integers(1, 5),
    below=st.lists(IDS, max_size=4, unique=True),
)
def test_it_does_what_a_dict_does(
    history: tuple[int, list[int], list[int], list[tuple[Any, ...]]],
    wanted: int,
    levels: int,
    width: int,
    below: list[int],
) -> None:
    """Other drafters may ask for more of the target's tokens than this one keeps."""
    k, prompt, rows, steps = history
    wanted = min(wanted, k)
    drafter = begun(prompt, rows, k=wanted, levels=levels)
    table: dict[int, list[int]] = dict(zip(prompt, rows, strict=False))
    last = prompt[-1]
    for tokens, here, nodes, behind in steps:
        every = top(behind)
        read = TreeTop(torch.tensor(nodes), every.tokens, every.logprobs)
        drafter.observe(Commit(tuple(tokens), (), top(here), read))
        table |= dict(zip(nodes, behind, strict=True))
        table |= dict(zip([last, *tokens[:-1]], here, strict=True))
        last = tokens[-1]

    expected = []
    for node, token in enumerate([last, *below]):
        for successor in table.get(token, [])[: min(wanted, width)]:
            path = [successor]
            while len(path) < levels and path[-1] in table:
                path.append(table[path[-1]][0])
            expected.append((node, path))
    tree = tree_of(last, *([t] for t in below))
    assert found(drafter, tree, width, list(range(len(below) + 1))) == expected


# --- in a pipeline --------------------------------------------------------------------------------


def decode(target: TableModel, prompt: Sequence[int], temperature: float = 0.0) -> Any:
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "recycle", "k": 3}],
        "sampling": {"temperature": temperature},
        "builder": {"kind": "layered", "depth": 4, "width": 3, "budget": 20},
    }
    return build_pipeline(parse_config(config), {"t": target}).generate(prompt, max_new_tokens=40)


def test_a_target_that_looks_at_one_token_is_accepted_whole_once_all_is_read() -> None:
    """What comes next then depends on the last token alone, which is all that the table knows."""
    target = hashed_model(4, seed=3, order=1)
    result = decode(target, [0, 1, 2, 3, 0])
    assert [step.n_new for step in result.steps] == [5] * 8


def test_rejected_nodes_make_it_draft_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer target calls than with what was committed alone."""
    target = hashed_model(30, seed=1, order=1)
    steps = len(decode(target, [1, 2, 3], temperature=1.0).steps)
    monkeypatch.setattr(RecycleDrafter, "tree_top", False)
    assert steps < len(decode(target, [1, 2, 3], temperature=1.0).steps)


# --- edges ----------------------------------------------------------------------------------------


def test_a_prompt_of_one_token_drafts_nothing_at_first() -> None:
    assert found(begun([5], []), tree_of(5)) == []


def test_ids_at_the_edge_of_the_vocabulary_are_recycled() -> None:
    drafter = begun([V - 1, 0], [[0, V - 1]], k=2)
    assert found(drafter, tree_of(V - 1)) == [(ROOT, [0]), (ROOT, [V - 1])]


def test_a_width_of_one_gives_the_likeliest() -> None:
    assert found(begun([1, 2], [[5, 6]], k=2), tree_of(1), width=1) == [(ROOT, [5])]


def test_more_successors_than_the_vocabulary_has_are_all_of_it() -> None:
    drafter = RecycleDrafter(RecycleConfig(k=9))
    drafter.begin(Context((1, 0), 99, 2, top([[0, 1]])))
    tree = TensorTree(2)
    tree.reset_(1, 9)
    assert found(drafter, tree) == [(ROOT, [0]), (ROOT, [1])]


def test_another_vocabulary_opens_another_table() -> None:
    drafter = begun([1, 2], [[5, 6]], k=2, keep=True)
    drafter.begin(Context((1,), 99, V + 1, None))
    assert found(drafter, tree_of(1)) == []


def test_drafting_leaves_the_tree_and_the_table_as_they_were() -> None:
    drafter = begun([1, 2, 1], [[2, 5], [1, 6]], k=2, levels=2)
    tree = tree_of(1)
    before = dict(drafter._table)
    first = drafter.propose(tree, torch.tensor([ROOT]), 9)
    first.tokens.fill_(0)
    first.logprobs.fill_(0)
    assert drafter._table == before
    assert tree.n_nodes == 1


def test_no_position_gives_no_proposal() -> None:
    assert found(begun([1, 2], [[5, 6]], k=2), tree_of(1), nodes=[]) == []
