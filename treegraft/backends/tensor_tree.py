"""The working tree as flat tensors: every operation a handful of tensor calls, no loop over nodes.

Oracle: ``backends/reference.py``; the tests drive both with the same operations.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from treegraft.core.roles import TreeBackend
from treegraft.core.tree import NOBODY, ROOT, Proposals, TokenTree


@final
class TensorTree(TreeBackend):
    """Nodes in growing buffers of S slots; ``n_nodes`` of them are in use.

    ``_key`` is parent * V + token: two nodes are the same child exactly if their keys agree, which
    turns merging into one comparison of [k, N] integers.
    """

    def __init__(self, vocab_size: int, n_slots: int = 256) -> None:
        self._vocab_size = vocab_size
        self._n = 0
        self._max_depth = 0
        self._open(n_slots)

    def _open(self, n_slots: int) -> None:
        self._token = torch.zeros(n_slots, dtype=torch.int64)
        self._parent = torch.zeros(n_slots, dtype=torch.int64)
        self._depth = torch.zeros(n_slots, dtype=torch.int64)
        self._key = torch.full((n_slots,), -1, dtype=torch.int64)
        self._source = torch.full((n_slots,), NOBODY, dtype=torch.int64)
        self._scorer = torch.full((n_slots,), NOBODY, dtype=torch.int64)
        self._edge = torch.zeros(n_slots, dtype=torch.float32)
        self._logprob = torch.zeros(n_slots, dtype=torch.float32)
        self._lineage = torch.zeros(n_slots, n_slots, dtype=torch.bool)

    def _grow(self, n_nodes: int) -> None:
        n = self._n
        old = dict(vars(self))
        self._open(max(n_nodes, 2 * self._token.shape[0]))
        for name, buffer in old.items():
            if isinstance(buffer, Tensor):
                getattr(self, name)[(slice(0, n),) * buffer.dim()] = buffer[
                    (slice(0, n),) * buffer.dim()
                ]

    @property
    def n_nodes(self) -> int:
        return self._n

    @property
    def token(self) -> Tensor:
        return self._token[: self._n]

    @property
    def parent(self) -> Tensor:
        return self._parent[: self._n]

    @property
    def depth(self) -> Tensor:
        return self._depth[: self._n]

    @property
    def logprob(self) -> Tensor:
        return self._logprob[: self._n]

    @property
    def source(self) -> Tensor:
        return self._source[: self._n]

    @property
    def scorer(self) -> Tensor:
        return self._scorer[: self._n]

    def path(self, node: int) -> list[int]:
        # Nodes are numbered parents first, so the lineage lists the path in order.
        lineage = self._lineage[node, 1 : node + 1].nonzero()[:, 0] + 1
        return self._token[lineage].tolist()

    def ancestors(self, nodes: Tensor) -> Tensor:
        return self._lineage[nodes, : self._n]

    def reset_(self, token: int, max_depth: int) -> None:
        self._n = 1
        self._max_depth = max_depth
        self._token[ROOT] = token
        self._lineage[ROOT] = False
        self._lineage[ROOT, ROOT] = True

    def add_(self, proposals: Proposals, source: int, overwrite: bool) -> Tensor:
        n_paths, length = proposals.tokens.shape
        nodes = torch.full((n_paths, length), -1, dtype=torch.int64)
        # NaN is no score, and nothing is likelier than certain.
        scores = proposals.logprobs.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)
        alive = torch.arange(n_paths)
        above = proposals.positions
        stale = False
        for step in range(length):
            token = proposals.tokens[alive, step]
            valid = (token >= 0) & (token < self._vocab_size)
            valid &= self._depth[above] < self._max_depth
            if not bool(valid.all()):
                alive, above, token = alive[valid], above[valid], token[valid]
            if alive.shape[0] == 0:
                break
            above, changed = self._add_level_(above, token, scores[alive, step], source, overwrite)
            nodes[alive, step] = above
            stale = stale or changed
        if stale:
            self._accumulate_()
        return nodes

    def _add_level_(
        self, above: Tensor, token: Tensor, score: Tensor, source: int, overwrite: bool
    ) -> tuple[Tensor, bool]:
        """Add one child per entry; returns their nodes int64 [k] and whether old scores changed."""
        n, k = self._n, above.shape[0]
        key = above * self._vocab_size + token
        index = torch.arange(k)
        same = key[:, None] == key
        first = torch.where(same, index, k).amin(1)
        score = torch.where(same, score, -torch.inf).amax(1)
        known = key[:, None] == self._key[:n]
        found = known.any(1)
        leads = first == index
        fresh = leads & ~found
        n_fresh = int(fresh.sum())
        number = n + fresh.cumsum(0) - 1
        nodes = torch.where(found, known.to(torch.int8).argmax(1), number[first])
        if n_fresh:
            if n + n_fresh > self._token.shape[0]:
                self._grow(n + n_fresh)
            new = slice(n, n + n_fresh)
            parent, own = above[fresh], score[fresh]
            self._token[new] = token[fresh]
            self._parent[new] = parent
            self._depth[new] = self._depth[parent] + 1
            self._key[new] = key[fresh]
            self._source[new] = source
            self._scorer[new] = (
                source if overwrite else torch.where(own > -torch.inf, source, NOBODY)
            )
            self._edge[new] = own
            self._logprob[new] = self._logprob[parent] + own
            self._lineage[new] = self._lineage[parent]
            self._lineage[torch.arange(n, n + n_fresh), torch.arange(n, n + n_fresh)] = True
            self._n = n + n_fresh
        if n_fresh == k:
            return nodes, False
        old = nodes[leads & found]
        own = score[leads & found]
        if not overwrite:
            filled = (self._edge[old] == -torch.inf) & (own > -torch.inf)
            old, own = old[filled], own[filled]
        changed = bool((self._edge[old] != own).any())
        self._edge[old] = own
        self._scorer[old] = source
        return nodes, changed

    def _accumulate_(self) -> None:
        """Sum the scores of every path, top down.

        After d rounds every node down to depth d holds its sum, added up from the root, so the
        rounding is that of a walk down the path.
        """
        n = self._n
        edge, parent = self._edge[:n], self._parent[:n]
        logprob = torch.zeros(n)
        for _ in range(int(self._depth[:n].max())):
            logprob = logprob[parent] + edge
        self._logprob[:n] = logprob

    def rescore_(self, logprobs: Tensor, source: int) -> None:
        n = self._n
        own = logprobs.to(torch.float32).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        self._edge[1:n] = own[1:].clamp(max=0.0)
        self._scorer[1:n] = source
        self._accumulate_()

    def best(self, width: int, min_depth: int, max_depth: int) -> Tensor:
        depth = self.depth
        nodes = ((depth >= min_depth) & (depth <= max_depth)).nonzero()[:, 0]
        order = self._logprob[nodes].sort(descending=True, stable=True).indices
        return nodes[order[:width]]

    def rank(self, nodes: Tensor, match: Tensor, width: int) -> Tensor:
        longest = torch.full((self._n,), -1, dtype=torch.int64)
        longest = longest.scatter_reduce(0, nodes, match, "amax")
        nodes = (longest >= 0).nonzero()[:, 0]
        nodes = nodes[self._logprob[nodes].sort(descending=True, stable=True).indices]
        nodes = nodes[longest[nodes].sort(descending=True, stable=True).indices]
        return nodes[:width]

    def prune(self, budget: int) -> TokenTree:
        # A child never outscores its parent and is numbered after it, so a stable sort keeps every
        # kept node's ancestors, and sorting the kept numbers puts parents first.
        order = self.logprob.sort(descending=True, stable=True).indices
        kept = order[: budget + 1].sort().values
        place = torch.zeros(self._n, dtype=torch.int64)
        place[kept] = torch.arange(kept.shape[0])
        return TokenTree(
            token=self._token[kept],
            parent=place[self._parent[kept]],
            depth=self._depth[kept],
            logprob=self._logprob[kept],
            source=self._source[kept],
            scorer=self._scorer[kept],
            ancestors=self._lineage[kept][:, kept],
            node=kept,
        )
