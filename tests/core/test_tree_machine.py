"""Any row of operations on both trees: equal after each, lawful, and nothing that was is undone.

The networkx tree is the specification; what both must obey is stated here once more without either.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from treegraft.backends.reference import ReferenceTree
from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.roles import NodeLists, TreeBackend
from treegraft.core.tree import NOBODY, ROOT, Proposals, TokenTree

V = 5
COLUMNS = ("token", "parent", "depth", "logprob", "source", "scorer", "proposers")
# Number 62 is the last drafter that a pipeline may have.
SOURCES = st.sampled_from([0, 1, 2, 62])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
SCORES = st.sampled_from(
    [
        -math.inf,
        math.nan,
        math.inf,
        0.5,
        0.0,
        -0.0,
        -1e-30,
        -1e-60,
        -0.1,
        -0.7,
        -2.5,
        -80.0,
        -3e38,
        -1e300,
    ]
)
TOKENS = st.one_of(st.integers(0, V - 1), st.sampled_from([-2, -1, V, V + 1, 2**62, -(2**63)]))
PATHS = st.lists(
    st.tuples(st.integers(0, 10**6), st.lists(st.tuples(TOKENS, SCORES), max_size=5)), max_size=6
)
NODES = st.lists(st.tuples(st.integers(-1, 10**6), st.integers(0, 3)), max_size=9)


class TwoTrees(RuleBasedStateMachine):
    """The same operations on both trees; every answer and every column must be equal.

    A node is drawn as a number that is taken modulo the size of the tree.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensor = TensorTree(V)
        self.reference = ReferenceTree(V)
        self.trees: tuple[TreeBackend, TreeBackend] = (self.tensor, self.reference)
        # Of each node what must never change: its path, and who proposed it.
        self.born: list[tuple[list[int], int]] = []
        self.max_depth = 0

    @property
    def n(self) -> int:
        return self.reference.n_nodes

    @initialize(token=st.integers(0, V - 1), max_depth=st.integers(0, 6))
    def start(self, token: int, max_depth: int) -> None:
        self.reset(token, max_depth)

    @rule(token=st.integers(0, V - 1), max_depth=st.integers(0, 6))
    def reset(self, token: int, max_depth: int) -> None:
        for tree in self.trees:
            tree.reset_(token, max_depth)
        assert self.n == 1
        assert int(self.reference.token[ROOT]) == token
        self.born, self.max_depth = [([], NOBODY)], max_depth

    @rule(drawn=PATHS, source=SOURCES, overwrite=st.booleans(), dtype=DTYPES)
    def add(
        self,
        drawn: list[tuple[int, list[tuple[int, float]]]],
        source: int,
        overwrite: bool,
        dtype: torch.dtype,
    ) -> None:
        made = Proposals.of_paths(
            [position % self.n for position, _ in drawn],
            [[token for token, _ in path] for _, path in drawn],
            [[0.0] * len(path) for _, path in drawn],
        )
        scores = torch.full(made.logprobs.shape, -math.inf, dtype=torch.float64)
        for row, (_, path) in zip(scores, drawn, strict=True):
            row[: len(path)] = torch.tensor([score for _, score in path], dtype=torch.float64)
        proposals = Proposals(made.positions, made.tokens, scores.to(dtype), made.match)
        proposals.check(self.n)
        n_before = self.n
        ours, theirs = (tree.add_(proposals, source, overwrite) for tree in self.trees)
        assert ours.dtype == theirs.dtype == torch.int64
        assert ours.tolist() == theirs.tolist()
        for new in range(len(self.born), self.n):
            self.born.append((self.reference.path(new), source))
        for (position, path), nodes in zip(drawn, ours.tolist(), strict=True):
            tokens = [token for token, _ in path]
            held = [node for node in nodes if node >= 0]
            # What could be hung is there, and nothing else.
            room = self.max_depth - len(self.born[position % n_before][0])
            fits = next((k for k, token in enumerate(tokens) if not 0 <= token < V), len(tokens))
            assert len(held) == min(fits, room)
            assert nodes[: len(held)] == held
            start = self.born[position % n_before][0]
            assert [self.born[node][0] for node in held] == [
                start + tokens[: k + 1] for k in range(len(held))
            ]

    @rule(data=st.data(), source=SOURCES, dtype=DTYPES)
    def rescore(self, data: st.DataObject, source: int, dtype: torch.dtype) -> None:
        drawn = data.draw(st.lists(SCORES, min_size=self.n, max_size=self.n))
        scores = torch.tensor(drawn, dtype=torch.float64).to(dtype)
        for tree in self.trees:
            tree.rescore_(scores, source)
            # Law 3, as far as float32 sums go: top down, each node adds its own log q.
            own = scores.to(torch.float32).nan_to_num(nan=-math.inf, neginf=-math.inf)
            own = own.clamp(max=0.0)
            parent, logprob = tree.parent.tolist(), tree.logprob
            for node in range(1, self.n):
                assert torch.equal(logprob[node], logprob[parent[node]] + own[node])
            assert tree.scorer.tolist() == [NOBODY] + [source] * (self.n - 1)

    @rule(
        width=st.integers(0, 12),
        low=st.integers(-4, 6),
        high=st.integers(-1, 6),
        unvisited_by=st.one_of(st.none(), SOURCES),
    )
    def best(self, width: int, low: int, high: int, unvisited_by: int | None) -> None:
        ours, theirs = (tree.best(width, low, high, unvisited_by).tolist() for tree in self.trees)
        assert ours == theirs
        assert len(ours) <= width
        assert all(low <= len(self.born[node][0]) <= high for node in ours)
        logprob = self.reference.logprob.tolist()
        assert ours == sorted(ours, key=lambda node: (-logprob[node], node))

    @rule(drawn=NODES, width=st.integers(0, 12))
    def rank(self, drawn: list[tuple[int, int]], width: int) -> None:
        nodes = [i if i < 0 else i % self.n for i, _ in drawn]
        match = torch.tensor([length for _, length in drawn], dtype=torch.int64)
        given = torch.tensor(nodes, dtype=torch.int64)
        ours, theirs = (tree.rank(given, match, width).tolist() for tree in self.trees)
        assert ours == theirs
        # Everyone once, and -1 is nobody.
        assert len(ours) == len(set(ours)) == min(width, len({*nodes} - {-1}))
        assert set(ours) <= {*nodes} - {-1}

    @rule(budget=st.integers(0, 40))
    def prune(self, budget: int) -> None:
        ours, theirs = (tree.prune(budget) for tree in self.trees)
        for name in (*COLUMNS, "ancestors", "node"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        for pruned in (ours, theirs):
            pruned.check()
            for i, node in enumerate(pruned.node.tolist()):
                assert (pruned.path(i), int(pruned.source[i])) == self.born[node]
        assert_law_5(self.reference, theirs, budget)
        # What was pruned is the step's own: growing the tree further must not reach into it.
        copies = {name: getattr(ours, name).clone() for name in (*COLUMNS, "ancestors", "node")}
        for tree in self.trees:
            tree.rescore_(torch.full((self.n,), -1.5), 1)
        assert all(torch.equal(getattr(ours, name), copy) for name, copy in copies.items())

    @precondition(lambda self: self.n > 1)
    @rule(drawn=st.lists(st.integers(0, 10**6), max_size=5))
    def ancestors(self, drawn: list[int]) -> None:
        nodes = torch.tensor([i % self.n for i in drawn], dtype=torch.int64)
        ours, theirs = (tree.ancestors(nodes) for tree in self.trees)
        assert ours.shape == theirs.shape == (len(drawn), self.n)
        assert torch.equal(ours, theirs)
        depth = [len(self.born[node][0]) for node in nodes.tolist()]
        assert ours.sum(1).tolist() == [d + 1 for d in depth]

    @invariant()
    def agree(self) -> None:
        for name in (*COLUMNS, "alive"):
            ours, theirs = (getattr(tree, name) for tree in self.trees)
            assert ours.dtype == theirs.dtype, name
            assert torch.equal(ours, theirs), name
            if hasattr(NodeLists, name):
                assert [*getattr(self.tensor.lists(), name)] == theirs.tolist(), name
        everyone = torch.arange(self.n)
        assert torch.equal(*(tree.ancestors(everyone) for tree in self.trees))
        for source in (0, 1, 2, 62, None):
            assert torch.equal(*(tree.best(99, 0, 9, source) for tree in self.trees))

    @invariant()
    def nothing_is_undone(self) -> None:
        """Law 2: every node keeps its number, its path and its source, whatever came after."""
        for tree in self.trees:
            assert tree.n_nodes == len(self.born)
            source = tree.source.tolist()
            now = [(tree.path(node), source[node]) for node in range(tree.n_nodes)]
            assert now == self.born

    @invariant()
    def the_tree_is_one(self) -> None:
        """Parents come first, one edge up, not outscored; siblings differ."""
        parent, depth = self.reference.parent.tolist(), self.reference.depth.tolist()
        logprob, token = self.reference.logprob.tolist(), self.reference.token.tolist()
        for node in range(1, self.n):
            assert parent[node] < node
            assert depth[node] == depth[parent[node]] + 1 <= self.max_depth
            assert logprob[node] <= logprob[parent[node]]
            assert 0 <= token[node] < V
        assert len({tuple(path) for path, _ in self.born}) == self.n


def assert_law_5(tree: TreeBackend, pruned: TokenTree, budget: int) -> None:
    """The budget holds, ancestors are kept, and no dropped node was the better choice."""
    kept = set(pruned.node.tolist())
    assert len(kept) == min(budget + 1, tree.n_nodes)
    parent, logprob = tree.parent.tolist(), tree.logprob.tolist()
    assert all(parent[node] in kept for node in kept)
    worst = min(logprob[node] for node in kept)
    available = [v for v in range(tree.n_nodes) if v not in kept and parent[v] in kept]
    assert all(logprob[v] <= worst for v in available)


class ManyTrees(TwoTrees):
    """The same, for the slow run."""


TestTrees: Any = TwoTrees.TestCase
TestTrees.settings = settings(max_examples=40, stateful_step_count=25)
TestTreesThoroughly: Any = pytest.mark.slow(ManyTrees.TestCase)
TestTreesThoroughly.settings = settings(
    settings.get_profile("thorough"), max_examples=600, stateful_step_count=40
)
