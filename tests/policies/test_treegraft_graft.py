"""The paper's graft: nothing is removed (law 2), all is rescored (law 3), lost paths return."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_models import TableModel, hashed_model
from torch import Tensor

from treegraft.backends.reference import ReferenceTree
from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.roles import Commit, Context, Drafter, ScoringDrafter, Touched, TreeBackend
from treegraft.core.tree import NOBODY, ROOT, Proposals
from treegraft.policies.drafters.lm import LmConfig, LmDrafter
from treegraft.policies.grafts import TreegraftConfig, TreegraftGraft

V = 6
NONE = -float("inf")


class Lookup(Drafter):
    """Proposes the same paths under every position."""

    def __init__(self, *paths: Sequence[int], match: int = 2) -> None:
        self.paths, self.match = paths, match
        self.positions: list[int] = []

    def begin(self, context: Context) -> None: ...

    def observe(self, commit: Commit) -> None: ...

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        self.positions = positions.tolist()
        entries = [(node, path) for node in self.positions for path in self.paths[:width]]
        return Proposals.of_paths(
            [node for node, _ in entries],
            [path for _, path in entries],
            [[-0.5] + [NONE] * (len(path) - 1) for _, path in entries],
            [self.match] * len(entries),
        )


class Scorer(ScoringDrafter):
    """Gives every node the logprob of its token in a fixed table; proposes the likeliest."""

    def __init__(self, *table: float) -> None:
        self.table = torch.tensor(table)
        self.positions: list[int] = []

    def begin(self, context: Context) -> None: ...

    def observe(self, commit: Commit) -> None: ...

    def score(self, tree: TreeBackend) -> Tensor:
        return self.table[tree.token]

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        self.positions = positions.tolist()
        top = self.table.topk(width)
        n = len(self.positions)
        return Proposals(
            positions.repeat_interleave(width),
            top.indices.repeat(n)[:, None],
            top.values.repeat(n)[:, None],
            torch.zeros(n * width, dtype=torch.int64),
        )


@pytest.fixture(params=[TensorTree, ReferenceTree], ids=["tensor", "reference"])
def tree(request: pytest.FixtureRequest) -> TreeBackend:
    made: TreeBackend = request.param(V)
    made.reset_(token=0, max_depth=9)
    return made


def graft(lookback: int = 5) -> TreegraftGraft:
    return TreegraftGraft(TreegraftConfig(lookback=lookback))


def nodes(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


# --- the story ------------------------------------------------------------------------------------


def test_a_lookup_extends_the_frontier_and_scores_little(tree: TreeBackend) -> None:
    touched = graft().visit(tree, Lookup([1, 2], [3]), 0, nodes(ROOT), width=4)
    assert tree.n_nodes == 4
    assert touched.nodes.tolist() == [1, 2]
    assert touched.match.tolist() == [2, 2]
    assert tree.logprob.tolist() == [0.0, -0.5, -0.5, NONE]
    assert tree.scorer.tolist() == [NOBODY, 0, 0, NOBODY]


def test_a_scorer_rescores_what_the_lookup_left(tree: TreeBackend) -> None:
    graft().visit(tree, Lookup([1, 2], [3]), 0, nodes(ROOT), width=4)
    graft().visit(tree, Scorer(-9.0, -1.0, -2.0, -3.0, -4.0, -5.0), 1, nodes(1, 2), width=1)
    assert tree.logprob[:4].tolist() == [0.0, -1.0, -3.0, -3.0]
    assert tree.scorer[1:4].tolist() == [1, 1, 1]
    assert tree.source[1:4].tolist() == [0, 0, 0]


def test_what_a_scorer_proposes_counts_over_what_stood_there(tree: TreeBackend) -> None:
    """A model's proposal replaces the score that stands, also by none."""
    graft().visit(tree, Lookup([1]), 0, nodes(ROOT), width=2)
    scorer = Scorer(NONE, -4.0, NONE, NONE, NONE, NONE)
    said = scorer.propose(tree, nodes(ROOT), 2)
    scorer.propose = lambda *_: Proposals(  # type: ignore[method-assign]
        said.positions, torch.tensor([[1], [3]]), torch.tensor([[-2.0], [NONE]]), said.match
    )
    graft().visit(tree, scorer, 1, nodes(1), width=2)
    assert tree.token.tolist() == [0, 1, 3]
    assert tree.logprob.tolist() == [0.0, -2.0, NONE]
    assert tree.scorer.tolist() == [NOBODY, 1, 1]


def test_a_promising_path_off_the_frontier_is_recovered(tree: TreeBackend) -> None:
    """The look-up followed 3; the scorer likes 1, a leaf one layer up, and takes it up again."""
    lookup = Lookup([1], [3])
    graft().visit(tree, lookup, 0, nodes(ROOT), width=2)
    lookup.paths = ([4],)
    graft().visit(tree, lookup, 0, nodes(2), width=2)  # node 3 = path [3, 4]
    scorer = Scorer(-9.0, -0.1, -9.0, -5.0, -0.2, -9.0)
    touched = graft().visit(tree, scorer, 1, nodes(3), width=2)
    assert scorer.positions == [ROOT, 1]  # best first: 0.0, -0.1, then -5.0 and -5.2
    assert [tree.path(node) for node in touched.nodes.tolist()] == [[1], [4], [1, 1], [1, 4]]


def test_without_lookback_only_the_frontiers_layer_is_looked_at(tree: TreeBackend) -> None:
    lookup = Lookup([1], [3])
    graft().visit(tree, lookup, 0, nodes(ROOT), width=2)
    lookup.paths = ([4],)
    graft().visit(tree, lookup, 0, nodes(2), width=2)
    scorer = Scorer(-9.0, -0.1, -9.0, -5.0, -0.2, -9.0)
    graft(lookback=0).visit(tree, scorer, 1, nodes(3), width=2)
    assert scorer.positions == [3]


def test_without_revisits_the_next_best_position_has_its_turn(tree: TreeBackend) -> None:
    scorer = Scorer(-9.0, -0.1, -9.0, -5.0, -0.2, -9.0)
    for revisit, expected in ((True, [[ROOT], [ROOT], [ROOT]]), (False, [[ROOT], [1], [2]])):
        tree.reset_(token=0, max_depth=9)
        policy = TreegraftGraft(TreegraftConfig(revisit=revisit))
        frontier, positions = nodes(ROOT), []
        for _ in range(3):
            touched = policy.visit(tree, scorer, 1, frontier, width=1)
            frontier = touched.nodes
            positions.append(scorer.positions)
        assert positions == expected


def test_when_every_position_was_visited_nothing_happens(tree: TreeBackend) -> None:
    policy = TreegraftGraft(TreegraftConfig(revisit=False, lookback=0))
    scorer = Scorer(*[-1.0] * V)
    policy.visit(tree, scorer, 1, nodes(ROOT), width=2)
    touched = policy.visit(tree, scorer, 1, nodes(ROOT), width=2)
    assert touched.nodes.tolist() == []
    assert tree.n_nodes == 3


@pytest.mark.parametrize(("lookback", "shallowest"), [(0, 3), (1, 2), (2, 1), (3, 0), (9, 0)])
def test_lookback_counts_layers_above_the_frontier(
    tree: TreeBackend, lookback: int, shallowest: int
) -> None:
    tree.add_(Proposals.of_paths([ROOT], [[1, 2, 3, 4]], [[-1.0] * 4]), 0, False)
    scorer = Scorer(*[-1.0] * V)
    graft(lookback).visit(tree, scorer, 1, nodes(3), width=V)
    # Node i of the chain is at depth i; node 4 lies below the frontier.
    assert scorer.positions == list(range(shallowest, 4))


def test_the_range_spans_a_frontier_of_mixed_depth(tree: TreeBackend) -> None:
    tree.add_(Proposals.of_paths([ROOT], [[1, 2, 3, 4]], [[-1.0] * 4]), 0, False)
    scorer = Scorer(*[-1.0] * V)
    graft(lookback=1).visit(tree, scorer, 1, nodes(2, 3), width=V)
    assert scorer.positions == [1, 2, 3]


def test_a_layer_that_found_nothing_touches_nothing(tree: TreeBackend) -> None:
    touched = graft().visit(tree, Lookup(), 0, nodes(ROOT), width=4)
    assert [node for node in touched.nodes.tolist() if node >= 0] == []
    assert tree.n_nodes == 1


def test_children_that_are_refused_are_not_touched(tree: TreeBackend) -> None:
    touched = graft().visit(tree, Lookup([V], [1]), 0, nodes(ROOT), width=4)
    assert [node for node in touched.nodes.tolist() if node >= 0] == [1]
    kept = tree.rank(touched.nodes, touched.match, 9)
    assert kept.tolist() == [1]


# --- the laws -------------------------------------------------------------------------------------

VISITS = st.lists(
    st.one_of(
        st.lists(st.lists(st.integers(-1, V), min_size=1, max_size=3), max_size=4),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=5,
)


@given(visits=VISITS, width=st.integers(1, 4), lookback=st.integers(0, 4), revisit=st.booleans())
def test_any_row_of_visits_keeps_the_laws(
    visits: list[list[list[int]] | int], width: int, lookback: int, revisit: bool
) -> None:
    """Laws 2 and 3 after every visit, and both trees the same."""
    trees: list[TreeBackend] = [TensorTree(V), ReferenceTree(V)]
    models = [hashed_model(V, seed=seed) for seed in range(3)]
    drafters = [[lm(model) for model in models] for _ in trees]
    frontiers = []
    for tree in trees:
        tree.reset_(2, 6)
        frontiers.append(nodes(ROOT))
    for visit in visits:
        for k, tree in enumerate(trees):
            paths = [tree.path(node) for node in range(tree.n_nodes)]
            drafter: Drafter = drafters[k][visit] if isinstance(visit, int) else Lookup(*visit)
            index = visit if isinstance(visit, int) else 3
            policy = TreegraftGraft(TreegraftConfig(lookback=lookback, revisit=revisit))
            touched = policy.visit(tree, drafter, index, frontiers[k], width)
            assert [tree.path(node) for node in range(len(paths))] == paths  # law 2
            if isinstance(visit, int):
                assert_law_3(tree, models[visit], index)
            assert_sound(tree, touched)
            reached = tree.rank(touched.nodes, touched.match, width)
            frontiers[k] = reached if len(reached) else frontiers[k]
        assert torch.equal(frontiers[0], frontiers[1])
        for column in ("token", "parent", "depth", "logprob", "source", "scorer", "proposers"):
            assert torch.equal(getattr(trees[0], column), getattr(trees[1], column))


def lm(model: TableModel) -> LmDrafter:
    drafter = LmDrafter(LmConfig(model="m"), model)
    drafter.begin(Context((1, 2), 50, V, None))
    return drafter


def assert_law_3(tree: TreeBackend, model: TableModel, index: int) -> None:
    """After a visit of a model every edge is its log q, and every node names it as scorer."""
    assert tree.scorer[1:].tolist() == [index] * (tree.n_nodes - 1)
    for node in range(1, tree.n_nodes):
        *above, token = tree.path(node)
        expected = model.logits([1, 2, *above]).log_softmax(-1)[token]
        edge = tree.logprob[node] - tree.logprob[tree.parent[node]]
        torch.testing.assert_close(edge, expected, rtol=0, atol=1e-4)


def assert_sound(tree: TreeBackend, touched: Touched) -> None:
    tree.prune(tree.n_nodes).check()
    assert touched.nodes.shape == touched.match.shape
    assert all(-1 <= node < tree.n_nodes for node in touched.nodes.tolist())
