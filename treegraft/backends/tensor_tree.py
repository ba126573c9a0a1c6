"""The working tree as flat arrays on the host: a dict finds children, arrays hold everything else.

Oracle: ``backends/reference.py``; the tests drive both with the same operations. The arrays are
numpy views that torch shares without a copy: a tree has some hundred nodes, and at that size an
operation of numpy costs a fifth of one of torch (docs/decisions/0002-host-tree.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegraft.core.errors import TreeError
from treegraft.core.roles import TreeBackend
from treegraft.core.tree import NOBODY, ROOT, Ledger, Proposals, TokenTree


@final
class TensorTree(TreeBackend):
    """Nodes in growing buffers of S slots; ``n_nodes`` of them are in use.

    Two nodes are the same child exactly if parent * V + token agree; ``_child`` maps that key to
    the node.
    """

    def __init__(self, vocab_size: int, n_slots: int = 256) -> None:
        self._vocab_size = vocab_size
        self._n = 0
        self._max_depth = 0
        self._child: dict[int, int] = {}
        self._budget: int | None = None
        self._draws: list[_Draw] = []
        self._q: list[Tensor] = []
        # Nodes that are verified whatever they score: drawn under, or above such a node.
        self._bound: set[int] = {ROOT}
        # Whether some node may not be alive.
        self._taken_out = False
        self._open(n_slots)

    def _open(self, n_slots: int) -> None:
        self._token = np.zeros(n_slots, dtype=np.int64)
        self._parent = np.zeros(n_slots, dtype=np.int64)
        self._depth = np.zeros(n_slots, dtype=np.int64)
        self._source = np.full(n_slots, NOBODY, dtype=np.int64)
        self._scorer = np.full(n_slots, NOBODY, dtype=np.int64)
        self._edge = np.zeros(n_slots, dtype=np.float32)
        self._logprob = np.zeros(n_slots, dtype=np.float32)
        self._lineage = np.zeros((n_slots, n_slots), dtype=np.bool_)
        # Bit i: drafter i has hung paths here, and drafter i has proposed this node.
        self._visited = np.zeros(n_slots, dtype=np.int64)
        self._alive = np.ones(n_slots, dtype=np.bool_)
        self._proposers = np.zeros(n_slots, dtype=np.int64)

    def _grow(self, n_nodes: int) -> None:
        old = {name: held for name, held in vars(self).items() if isinstance(held, np.ndarray)}
        self._open(max(n_nodes, 2 * self._token.shape[0]))
        for name, buffer in old.items():
            getattr(self, name)[tuple(slice(0, size) for size in buffer.shape)] = buffer

    @property
    def n_nodes(self) -> int:
        return self._n

    @property
    def token(self) -> Tensor:
        return torch.from_numpy(self._token[: self._n])

    @property
    def parent(self) -> Tensor:
        return torch.from_numpy(self._parent[: self._n])

    @property
    def depth(self) -> Tensor:
        return torch.from_numpy(self._depth[: self._n])

    @property
    def logprob(self) -> Tensor:
        return torch.from_numpy(self._logprob[: self._n])

    @property
    def source(self) -> Tensor:
        return torch.from_numpy(self._source[: self._n])

    @property
    def scorer(self) -> Tensor:
        return torch.from_numpy(self._scorer[: self._n])

    @property
    def proposers(self) -> Tensor:
        return torch.from_numpy(self._proposers[: self._n])

    @property
    def alive(self) -> Tensor:
        return torch.from_numpy(self._alive[: self._n])

    @property
    def leaf(self) -> Tensor:
        alive = self._alive[: self._n]
        leaf = alive.copy()
        leaf[self._parent[1 : self._n][alive[1:]]] = False
        return torch.from_numpy(leaf)

    def path(self, node: int) -> list[int]:
        # Nodes are numbered parents first, so the lineage lists the path in order.
        tokens: list[int] = self._token[1 : node + 1][self._lineage[node, 1 : node + 1]].tolist()
        return tokens

    def ancestors(self, nodes: Tensor) -> Tensor:
        return torch.from_numpy(self._lineage[nodes.numpy(), : self._n])

    @property
    def n_drawn(self) -> int:
        return len(self._draws)

    def reset_(self, token: int, max_depth: int, budget: int | None = None) -> None:
        self._n = 1
        self._max_depth = max_depth
        self._budget = budget
        if self._draws:
            self._draws, self._q, self._bound = [], [], {ROOT}
        self._child.clear()
        self._taken_out = False
        self._token[ROOT] = token
        self._lineage[ROOT] = False
        self._lineage[ROOT, ROOT] = True
        self._visited[ROOT] = 0
        self._proposers[ROOT] = 0

    def reroot_(self, node: int, max_depth: int, budget: int | None = None) -> None:
        n = self._n
        if not 0 <= node < n or not self._alive[node]:
            raise TreeError(f"the new root must be a node of the tree, found {node}")
        if self._draws:
            raise TreeError(f"a tree with {len(self._draws)} draws cannot begin at another node")
        depth = self._depth[:n] - self._depth[node]
        kept = (self._lineage[:n, node] & self._alive[:n] & (depth <= max_depth)).nonzero()[0]
        k = kept.shape[0]
        place = np.zeros(n, dtype=np.int64)  # the new root's parent is the new root
        place[kept] = np.arange(k)
        parent, depth = place[self._parent[kept]], depth[kept]
        lineage = self._lineage[np.ix_(kept, kept)]
        self.reset_(int(self._token[node]), max_depth, budget)
        self._n = k
        self._parent[1:k], self._depth[1:k] = parent[1:], depth[1:]
        self._lineage[:k] = False
        self._lineage[:k, :k] = lineage
        for column in (self._token, self._source, self._scorer, self._proposers, self._edge):
            column[1:k] = column[kept[1:]]
        self._visited[:k], self._alive[:k] = 0, True
        keys = self._parent[1:k] * self._vocab_size + self._token[1:k]
        self._child.update(zip(keys.tolist(), range(1, k), strict=True))
        self._accumulate_()

    def add_(self, proposals: Proposals, source: int, overwrite: bool) -> Tensor:
        tokens, scores = proposals.tokens.numpy(), _own(proposals.logprobs)
        n_paths, length = tokens.shape
        nodes = np.full((n_paths, length), -1, dtype=np.int64)
        alive: NDArray[np.int64] = np.arange(n_paths)
        above = proposals.positions.numpy()
        if self._taken_out and not self._alive[above].all():
            lost = above[~self._alive[above]]
            raise TreeError(f"paths cannot hang under node {lost[0]}, which was taken out")
        self._visited[above] |= 1 << source
        since = self._n
        drawn: list[int] = []
        if proposals.draw is not None:
            drawn, refused = self._bind_(proposals.draw, above)
            if refused:
                alive = np.setdiff1d(alive, refused)
                above = above[alive]
        stale = False
        # A sum below what float32 holds is -inf, and no reason for a warning.
        with np.errstate(over="ignore"):
            for step in range(length):
                token = tokens[alive, step]
                valid = (token >= 0) & (token < self._vocab_size)
                valid &= self._depth[above] < self._max_depth
                if not valid.all():
                    alive, above, token = alive[valid], above[valid], token[valid]
                if alive.shape[0] == 0:
                    break
                score = scores[alive, step]
                above, changed = self._add_level_(above, token, score, source, overwrite)
                nodes[alive, step] = above
                stale = stale or changed
            if stale:
                self._accumulate_()
        if drawn:
            self._note_(proposals, drawn, nodes[:, 0], since)
        return torch.from_numpy(nodes)

    def _bind_(self, draw: Tensor, above: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Paths whose draw counts, and those refused, whose position cannot be promised a place."""
        rows = draw.numpy()
        drawn, refused = [], []
        for path in (rows >= 0).nonzero()[0].tolist():
            position = int(above[path])
            if self._depth[position] >= self._max_depth:
                continue
            if position not in self._bound:
                lineage = self._lineage[position, : position + 1].nonzero()[0].tolist()
                bound = self._bound.union(lineage)
                if self._budget is not None and len(bound) > self._budget + 1:
                    refused.append(path)
                    continue
                self._bound = bound
            drawn.append(path)
        return drawn, refused

    def _note_(
        self, proposals: Proposals, drawn: list[int], nodes: NDArray[np.int64], since: int
    ) -> None:
        """Enter what was drawn, whether it brought a node or not."""
        assert proposals.draw is not None
        assert proposals.q is not None
        place: dict[int, int] = {}
        for path in drawn:
            row = int(proposals.draw[path])
            if row not in place:
                place[row] = len(self._q)
                # A copy: the drafter may use its buffer again.
                self._q.append(proposals.q[row].clone())
            self._draws.append(
                _Draw(
                    int(proposals.positions[path]),
                    int(proposals.tokens[path, 0]),
                    int(nodes[path]),
                    place[row],
                    since,
                )
            )

    def _add_level_(
        self,
        above: NDArray[np.int64],
        token: NDArray[np.int64],
        score: NDArray[np.float32],
        source: int,
        overwrite: bool,
    ) -> tuple[NDArray[np.int64], bool]:
        """Add one child per entry; returns their nodes int64 [k] and whether old scores changed."""
        n, child = self._n, self._child
        listed: list[int] = []
        first: list[int] = []  # entries that brought a new node
        best: dict[int, float] = {}  # several entries may score one node: the highest counts
        keys = (above * self._vocab_size + token).tolist()
        for i, (key, own) in enumerate(zip(keys, score.tolist(), strict=True)):
            node = child.get(key)
            if node is None:
                node = child[key] = n + len(first)
                first.append(i)
            listed.append(node)
            if own > best.get(node, -np.inf) or node not in best:
                best[node] = own
        nodes = np.array(listed)
        if first:
            end = n + len(first)
            if end > self._token.shape[0]:
                self._grow(end)
            whole = len(first) == len(listed)
            parent, new = (above if whole else above[first]), slice(n, end)
            edge = score if whole else np.array([best[node] for node in range(n, end)], np.float32)
            self._token[new] = token if whole else token[first]
            self._parent[new] = parent
            self._depth[new] = self._depth[parent] + 1
            self._source[new] = source
            self._scorer[new] = source if overwrite else np.where(edge > -np.inf, source, NOBODY)
            self._edge[new] = edge
            self._logprob[new] = self._logprob[parent] + edge
            self._visited[new] = 0
            self._alive[new] = True
            self._proposers[new] = 1 << source
            # Only the columns in use: those behind them are False, and rows are as wide as S.
            self._lineage[new, :end] = self._lineage[parent, :end]
            self._lineage[new, n:end].flat[:: end - n + 1] = True
            self._n = end
            if whole:
                return nodes, False
        held = [node for node in best if node < n]
        if not held:
            return nodes, False
        return nodes, self._add_scores_(held, best, source, overwrite)

    def _add_scores_(
        self, held: list[int], best: dict[int, float], source: int, overwrite: bool
    ) -> bool:
        """Score nodes that were there before; returns whether a score changed."""
        old = np.array(held)
        own = np.array([best[node] for node in held], dtype=np.float32)
        lost = old[~self._alive[old]] if self._taken_out else old[:0]
        if lost.shape[0]:
            self._alive[lost] = True
            self._source[lost] = source
            self._edge[lost] = -np.inf
            self._scorer[lost] = source if overwrite else NOBODY
            self._visited[lost] = 0
            self._proposers[lost] = 0
        self._proposers[old] |= 1 << source
        if not overwrite:
            fills = (self._edge[old] == -np.inf) & (own > -np.inf)
            old, own = old[fills], own[fills]
        changed = lost.shape[0] > 0 or bool((self._edge[old] != own).any())
        self._edge[old] = own
        self._scorer[old] = source
        return changed

    def _accumulate_(self) -> None:
        """Sum the scores of every path, top down.

        After d rounds every node down to depth d holds its sum, added up from the root, so the
        rounding is that of a walk down the path.
        """
        n = self._n
        edge, parent = self._edge[:n], self._parent[:n]
        logprob = np.zeros(n, dtype=np.float32)
        for _ in range(int(self._depth[:n].max())):
            logprob = logprob[parent] + edge
        self._logprob[:n] = logprob

    def rescore_(self, logprobs: Tensor, source: int) -> None:
        n = self._n
        self._edge[1:n] = _own(logprobs)[1:]
        self._scorer[1:n] = source
        with np.errstate(over="ignore"):
            self._accumulate_()

    def keep_(self, nodes: Tensor) -> None:
        n, wanted = self._n, nodes.numpy()
        known = (wanted >= 0) & (wanted < n)
        known &= self._alive[np.where(known, wanted, ROOT)]
        if not known.all():
            raise TreeError(f"nodes to keep must be in the tree, found {wanted[~known][0]}")
        kept = np.logical_or.reduce(self._lineage[wanted, :n], axis=0)
        kept[list(self._bound)] = True
        self._alive[:n] &= kept
        self._taken_out = True

    def best(
        self, width: int, min_depth: int, max_depth: int, unvisited_by: int | None = None
    ) -> Tensor:
        depth = self._depth[: self._n]
        eligible = (depth >= min_depth) & (depth <= max_depth)
        if self._taken_out:
            eligible &= self._alive[: self._n]
        if unvisited_by is not None:
            eligible &= self._visited[: self._n] & (1 << unvisited_by) == 0
        nodes = eligible.nonzero()[0]
        return torch.from_numpy(nodes[_falling(self._logprob[nodes])[:width]])

    def rank(self, nodes: Tensor, match: Tensor, width: int) -> Tensor:
        # One slot more than nodes: -1, no node, lands in it.
        longest = np.full(self._n + 1, -1, dtype=np.int64)
        np.maximum.at(longest, nodes.numpy(), match.numpy())
        found = ((longest[:-1] >= 0) & self._alive[: self._n]).nonzero()[0]
        found = found[_falling(self._logprob[found])]
        return torch.from_numpy(found[_falling(longest[found])[:width]])

    def prune(self, budget: int) -> TokenTree:
        # A child never outscores its parent and is numbered after it, so a stable sort keeps every
        # kept node's ancestors, and sorting the kept numbers puts parents first.
        order = _falling(self._logprob[: self._n])
        if self._taken_out:
            order = order[self._alive[order]]
        if self._draws:
            if len(self._bound) > budget + 1:
                raise TreeError(
                    f"a budget of {budget} cannot hold the {len(self._bound) - 1} nodes under "
                    "which something was drawn"
                )
            bound = np.zeros(self._n, dtype=np.bool_)
            bound[list(self._bound)] = True
            order = np.concatenate([order[bound[order]], order[~bound[order]]])
        kept = np.sort(order[: budget + 1])
        place = np.full(self._n, -1, dtype=np.int64)
        place[kept] = np.arange(kept.shape[0])
        return TokenTree(
            token=torch.from_numpy(self._token[kept]),
            parent=torch.from_numpy(place[self._parent[kept]]),
            depth=torch.from_numpy(self._depth[kept]),
            logprob=torch.from_numpy(self._logprob[kept]),
            source=torch.from_numpy(self._source[kept]),
            scorer=torch.from_numpy(self._scorer[kept]),
            proposers=torch.from_numpy(self._proposers[kept]),
            ancestors=torch.from_numpy(self._lineage[np.ix_(kept, kept)]),
            node=torch.from_numpy(kept),
            ledger=self._ledger(place) if self._draws else None,
        )

    def _ledger(self, place: NDArray[np.int64]) -> Ledger:
        """Slots under kept nodes (``place`` >= 0), draws of a call before its other children."""
        # A draw of a child that was there before is one more slot; it does not move the child's.
        made = {draw.child for draw in self._draws if draw.child >= draw.since}
        slots = [
            (d.since, 0, i, d.node, d.token, d.child, d.row) for i, d in enumerate(self._draws)
        ]
        for node in range(1, self._n):
            above = int(self._parent[node])
            if node not in made and place[above] >= 0:
                slots.append((node, 1, 0, above, int(self._token[node]), node, -1))
        slots.sort()
        rows = np.array([slot[3:] for slot in slots], dtype=np.int64).reshape(-1, 4)
        width = max(q.shape[0] for q in self._q)
        table = torch.zeros(len(self._q), width, dtype=torch.float64)
        for row, q in enumerate(self._q):
            table[row, : q.shape[0]] = q
        child = rows[:, 2]
        return Ledger(
            node=torch.from_numpy(place[rows[:, 0]]),
            token=torch.from_numpy(rows[:, 1].copy()),
            child=torch.from_numpy(np.where(child >= 0, place[child], -1)),
            row=torch.from_numpy(rows[:, 3].copy()),
            q=table,
        )


@dataclass(frozen=True, slots=True)
class _Draw:
    """A token drawn under ``node`` from ``row`` when the tree had ``since`` nodes."""

    node: int
    token: int
    child: int
    row: int
    since: int


def _own(logprobs: Tensor) -> NDArray[np.float32]:
    """float32 scores: NaN is no score, and nothing is likelier than certain."""
    scores = logprobs.detach().to(torch.float32).numpy()
    own: NDArray[np.float32] = np.minimum(scores, np.float32(0.0))
    if own.size and np.isnan(own.min()):  # a minimum passes NaN on
        own[np.isnan(own)] = -np.inf
    return own


def _falling(values: NDArray[np.float32] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Order of the values from the highest down, the first one first on ties."""
    return np.argsort(-values, kind="stable")
