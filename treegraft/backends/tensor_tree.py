"""The working tree as Python lists on the host: a dict finds children, and lineages are bit sets.

Oracle: ``backends/reference.py``; the tests drive both with the same operations. Tensors are made
where a policy or the target asks for them: a tree has from ten to some hundred nodes, and at that
size a call of numpy or torch costs more than the loop (docs/decisions/0002-host-tree.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, compress
from math import inf
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from treegraft.backends.draw_log import DrawLog
from treegraft.core.errors import TreeError
from treegraft.core.roles import NodeLists, TreeBackend
from treegraft.core.tree import (
    NOBODY,
    ROOT,
    Proposals,
    TokenTree,
    TreeLists,
    lineage_matrix,
)


@final
class TensorTree(TreeBackend):
    """A column is a list with an entry per node.

    Two nodes are the same child exactly if parent * V + token agree; ``_child`` maps that key to
    the node. Sums of scores are float32: the array that holds them rounds each.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._max_depth = 0
        self._budget: int | None = None
        self._open()

    def _open(self) -> None:
        self._token: list[int] = []
        self._parent: list[int] = []
        self._depth: list[int] = []
        self._source: list[int] = []
        self._scorer: list[int] = []
        self._edge: list[float] = []
        self._logprob = array("f")
        # Bit j of a node's lineage: node j lies on its path, both ends included.
        self._lineage: list[int] = []
        # Bit i: drafter i has hung paths here, and drafter i has proposed this node.
        self._visited: list[int] = []
        self._proposers: list[int] = []
        self._alive: list[bool] = []
        self._child: dict[int, int] = {}
        self._draws = DrawLog()

    @property
    def n_nodes(self) -> int:
        return len(self._token)

    @property
    def token(self) -> Tensor:
        return _int64(self._token)

    @property
    def parent(self) -> Tensor:
        return _int64(self._parent)

    @property
    def depth(self) -> Tensor:
        return _int64(self._depth)

    @property
    def logprob(self) -> Tensor:
        return torch.from_numpy(np.array(self._logprob, dtype=np.float32))

    @property
    def source(self) -> Tensor:
        return _int64(self._source)

    @property
    def scorer(self) -> Tensor:
        return _int64(self._scorer)

    @property
    def proposers(self) -> Tensor:
        return _int64(self._proposers)

    @property
    def alive(self) -> Tensor:
        return torch.from_numpy(np.array(self._alive, dtype=np.bool_))

    @property
    def leaf(self) -> Tensor:
        leaf = self._alive.copy()
        for above in compress(self._parent[1:], self._alive[1:]):
            leaf[above] = False
        return torch.from_numpy(np.array(leaf, dtype=np.bool_))

    def lists(self) -> NodeLists:
        return NodeLists(
            self._token,
            self._parent,
            self._depth,
            self._logprob,
            self._alive,
            self._source,
            self._proposers,
        )

    def path(self, node: int) -> list[int]:
        token, parent = self._token, self._parent
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(token[node])
            node = parent[node]
        return tokens[::-1]

    def ancestors(self, nodes: Tensor) -> Tensor:
        n, lineage = len(self._token), self._lineage
        return torch.from_numpy(lineage_matrix([lineage[node] for node in nodes.tolist()], n))

    @property
    def n_drawn(self) -> int:
        return len(self._draws)

    def reset_(self, token: int, max_depth: int, budget: int | None = None) -> None:
        self._max_depth = max_depth
        self._budget = budget
        self._open()
        self._append(ROOT, token)
        self._describe(NOBODY, NOBODY, 0, 0.0)

    def _append(self, parent: int, token: int) -> int:
        """A new node, which ``_describe`` completes."""
        node = len(self._token)
        self._token.append(token)
        self._parent.append(parent)
        self._depth.append(self._depth[parent] + 1 if node else 0)
        self._lineage.append(self._lineage[parent] | 1 << node if node else 1)
        return node

    def _describe(self, source: int, scorer: int, proposers: int, edge: float) -> None:
        node = len(self._source)
        self._source.append(source)
        self._scorer.append(scorer)
        self._proposers.append(proposers)
        self._edge.append(edge)
        self._logprob.append(self._logprob[self._parent[node]] + edge if node else 0.0)
        self._visited.append(0)
        self._alive.append(True)

    def reroot_(self, node: int, max_depth: int, budget: int | None = None) -> None:
        n = len(self._token)
        if not 0 <= node < n or not self._alive[node]:
            raise TreeError(f"the new root must be a node of the tree, found {node}")
        if self._draws:
            raise TreeError(f"a tree with {len(self._draws)} draws cannot begin at another node")
        token, parent, depth = self._token, self._parent, self._depth
        source, scorer = self._source, self._scorer
        proposers, edge = self._proposers, self._edge
        deepest = depth[node] + max_depth
        kept = [
            old
            for old in range(node + 1, n)
            if self._alive[old] and depth[old] <= deepest and self._lineage[old] >> node & 1
        ]
        self.reset_(token[node], max_depth, budget)
        place = {node: ROOT}
        for old in kept:
            above = place[parent[old]]
            key = above * self._vocab_size + token[old]
            place[old] = self._child[key] = self._append(above, token[old])
            self._describe(source[old], scorer[old], proposers[old], edge[old])

    def add_(self, proposals: Proposals, source: int, overwrite: bool) -> Tensor:
        n_paths, length = proposals.tokens.shape
        tokens = [*chain.from_iterable(proposals.tokens.tolist())]
        scores = _scores(chain.from_iterable(_listed(proposals.logprobs)))
        above: list[int] = proposals.positions.tolist()
        for node in above:
            if not self._alive[node]:
                raise TreeError(f"paths cannot hang under node {node}, which was taken out")
        for node in above:
            self._visited[node] |= 1 << source
        since = len(self._token)
        paths: Sequence[int] = range(n_paths)
        drawn: Sequence[int] = ()
        if proposals.draw is not None:
            paths, drawn = self._bind_(proposals.draw.tolist(), above)
        found = [-1] * (n_paths * length)
        depth, child = self._depth, self._child
        stale = False
        # Level by level, so that the numbering does not depend on which path comes first.
        for step in range(length):
            first = len(self._token)
            best: dict[int, float] = {}  # several paths may score one node: the highest counts
            going: list[int] = []
            for path in paths:
                parent, place = above[path], path * length + step
                token = tokens[place]
                if not 0 <= token < self._vocab_size or depth[parent] >= self._max_depth:
                    continue
                key = parent * self._vocab_size + token
                held = child.get(key)
                if held is None:
                    held = child[key] = self._append(parent, token)
                above[path] = found[place] = held
                going.append(path)
                if held not in best or scores[place] > best[held]:
                    best[held] = scores[place]
            if not going:
                break
            stale = self._score_(best, first, source, overwrite) or stale
            paths = going
        if stale:
            self._accumulate_()
        if drawn:
            self._draws.note(proposals, drawn, found[::length], since)
        return torch.from_numpy(np.array(found, dtype=np.int64).reshape(n_paths, length))

    def _bind_(self, rows: Sequence[int], above: Sequence[int]) -> tuple[list[int], list[int]]:
        """Paths that may be hung, and those of them whose draw counts."""
        able: list[int] = []
        drawn: list[int] = []
        for path, (row, position) in enumerate(zip(rows, above, strict=True)):
            counts = row >= 0 and self._depth[position] < self._max_depth
            if counts and not self._draws.bind(position, self._parent, self._budget):
                continue  # its position cannot be promised a place
            able.append(path)
            if counts:
                drawn.append(path)
        return able, drawn

    def _score_(self, best: dict[int, float], first: int, source: int, overwrite: bool) -> bool:
        """Score nodes, new from ``first`` on; whether the score of an old one changed."""
        changed = False
        for node, own in best.items():
            scorer = source if overwrite or own > -inf else NOBODY
            if node >= first:
                self._describe(source, scorer, 1 << source, own)
                continue
            if not self._alive[node]:
                self._alive[node] = changed = True
                self._source[node] = source
                self._scorer[node] = source if overwrite else NOBODY
                self._edge[node] = -inf
                self._visited[node] = self._proposers[node] = 0
            self._proposers[node] |= 1 << source
            if overwrite or (self._edge[node] == -inf and own > -inf):
                changed = changed or self._edge[node] != own
                self._edge[node] = own
                self._scorer[node] = source
        return changed

    def _accumulate_(self) -> None:
        """Sum the scores of every path, top down."""
        logprob, parent, edge = self._logprob, self._parent, self._edge
        for node in range(1, len(parent)):
            logprob[node] = logprob[parent[node]] + edge[node]

    def rescore_(self, logprobs: Tensor, source: int) -> None:
        self._edge[1:] = _scores(_listed(logprobs)[1:])
        self._scorer[1:] = [source] * (len(self._scorer) - 1)
        self._accumulate_()

    def keep_(self, nodes: Tensor) -> None:
        alive, kept = self._alive, self._draws.bound.copy()
        n = len(alive)
        for wanted in nodes.tolist():
            if not 0 <= wanted < n or not alive[wanted]:
                raise TreeError(f"nodes to keep must be in the tree, found {wanted}")
            node = wanted
            while node not in kept:
                kept.add(node)
                node = self._parent[node]
        self._alive = [alive[node] and node in kept for node in range(n)]

    def best(
        self, width: int, min_depth: int, max_depth: int, unvisited_by: int | None = None
    ) -> Tensor:
        bit = 0 if unvisited_by is None else 1 << unvisited_by
        nodes = [
            node
            for node, (depth, alive, visited) in enumerate(
                zip(self._depth, self._alive, self._visited, strict=True)
            )
            if alive and min_depth <= depth <= max_depth and not visited & bit
        ]
        return _int64(self._ranked(nodes)[:width])

    def _ranked(self, nodes: list[int]) -> list[int]:
        """``nodes``, the best-scored first, on ties in their order."""
        # A reversed sort is stable too.
        return sorted(nodes, key=self._logprob.__getitem__, reverse=True)

    def rank(self, nodes: Tensor, match: Tensor, width: int) -> Tensor:
        longest: dict[int, int] = {}
        for node, length in zip(nodes.tolist(), match.tolist(), strict=True):
            if node >= 0 and self._alive[node] and length > longest.get(node, -1):
                longest[node] = length
        ranked = self._ranked(sorted(longest))
        if any(longest.values()):
            ranked.sort(key=longest.__getitem__, reverse=True)
        return _int64(ranked[:width])

    def prune(self, budget: int) -> TokenTree:
        # A child never outscores its parent and is numbered after it, so a stable sort keeps every
        # kept node's ancestors, and sorting the kept numbers puts parents first.
        kept = [node for node, alive in enumerate(self._alive) if alive]
        if len(kept) > budget + 1:
            ranked = self._ranked(kept)
            if self._draws:
                ranked.sort(key=self._draws.bound.__contains__, reverse=True)
            kept = sorted(ranked[: budget + 1])
        n_bound = len(self._draws.bound)
        if n_bound > budget + 1:
            raise TreeError(
                f"a budget of {budget} cannot hold the {n_bound - 1} nodes under which something "
                "was drawn"
            )
        place = {node: i for i, node in enumerate(kept)}
        parent = [place[self._parent[node]] for node in kept]
        lineage: list[int] = []
        for i, above in enumerate(parent):
            lineage.append(lineage[above] | 1 << i if i else 1)
        columns = (self._token, self._depth, self._source, self._proposers, self._scorer)
        token, depth, source, proposers, scorer = ([c[node] for node in kept] for c in columns)
        return TokenTree.of_lists(
            TreeLists(token, parent, depth, source, proposers, kept),
            scorer,
            [self._logprob[node] for node in kept],
            lineage,
            self._draws.ledger(place, self._token, self._parent),
        )


def _int64(numbers: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


def _listed(logprobs: Tensor) -> list[Any]:
    """float32 scores as Python numbers, nested as the tensor is."""
    if logprobs.dtype is not torch.float32:
        logprobs = logprobs.to(torch.float32)
    listed: list[Any] = logprobs.tolist()
    return listed


def _scores(given: Iterable[float]) -> list[float]:
    """NaN is no score, and nothing is likelier than certain."""
    return [own if own <= 0.0 else 0.0 if own > 0.0 else -inf for own in given]
