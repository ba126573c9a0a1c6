"""The working tree as a networkx graph, and decoding one token at a time: the specification.

Slow and plain on purpose. The tensor tree must agree with it after every operation, and every
pipeline must emit what ``plain_tokens`` emits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import final

import networkx as nx
import numpy as np
import torch
from torch import Tensor

from treegraft.core.roles import TreeBackend
from treegraft.core.sampling import History, Noise, Sampling, TargetDistribution
from treegraft.core.tree import NOBODY, ROOT, Proposals, TokenTree


@final
class ReferenceTree(TreeBackend):
    """A ``networkx.DiGraph`` whose edges run from parent to child.

    Scores are float32, added up from the root like everywhere else, so that results are equal and
    not merely close.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._max_depth = 0
        self.graph = nx.DiGraph()

    def _column(self, name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([self.graph.nodes[v][name] for v in range(self.n_nodes)], dtype=dtype)

    def _above(self, node: int) -> int:
        return int(next(iter(self.graph.predecessors(node)), ROOT))

    def _lineage(self, node: int) -> list[int]:
        return [*sorted(nx.ancestors(self.graph, node)), node]

    @property
    def n_nodes(self) -> int:
        return len(self.graph)

    @property
    def token(self) -> Tensor:
        return self._column("token", torch.int64)

    @property
    def parent(self) -> Tensor:
        return torch.tensor([self._above(v) for v in range(self.n_nodes)])

    @property
    def depth(self) -> Tensor:
        return torch.tensor([len(self._lineage(v)) - 1 for v in range(self.n_nodes)])

    @property
    def logprob(self) -> Tensor:
        return torch.tensor([self._sum(v) for v in range(self.n_nodes)], dtype=torch.float32)

    @property
    def source(self) -> Tensor:
        return self._column("source", torch.int64)

    @property
    def scorer(self) -> Tensor:
        return self._column("scorer", torch.int64)

    @np.errstate(over="ignore")
    def _sum(self, node: int) -> float:
        total = np.float32(0.0)
        for v in self._lineage(node)[1:]:
            total = np.float32(total + np.float32(self.graph.nodes[v]["edge"]))
        return float(total)

    def path(self, node: int) -> list[int]:
        return [self.graph.nodes[v]["token"] for v in self._lineage(node)[1:]]

    def ancestors(self, nodes: Tensor) -> Tensor:
        rows = torch.zeros(nodes.shape[0], self.n_nodes, dtype=torch.bool)
        for row, node in zip(rows, nodes.tolist(), strict=True):
            row[self._lineage(node)] = True
        return rows

    def reset_(self, token: int, max_depth: int) -> None:
        self._max_depth = max_depth
        self.graph = nx.DiGraph()
        self.graph.add_node(
            ROOT, token=token, edge=0.0, source=NOBODY, scorer=NOBODY, visitors=set()
        )

    def add_(self, proposals: Proposals, source: int, overwrite: bool) -> Tensor:
        n_paths, length = proposals.tokens.shape
        # Rounded first: what float32 holds as -inf is no score.
        logprobs = proposals.logprobs.detach().to(torch.float32)
        nodes = torch.full((n_paths, length), -1, dtype=torch.int64)
        above = proposals.positions.tolist()
        for node in above:
            self.graph.nodes[node]["visitors"].add(source)
        alive = list(range(n_paths))
        # Level by level, so that the numbering does not depend on which path comes first.
        for step in range(length):
            level: dict[tuple[int, int], float] = {}
            members: dict[tuple[int, int], list[int]] = {}
            for i in alive:
                token = int(proposals.tokens[i, step])
                if not 0 <= token < self._vocab_size:
                    continue
                if len(self._lineage(above[i])) - 1 >= self._max_depth:
                    continue
                score = float(logprobs[i, step])
                score = -math.inf if math.isnan(score) else min(score, 0.0)
                child = (above[i], token)
                level[child] = max(level.get(child, -math.inf), score)
                members.setdefault(child, []).append(i)
            alive = []
            for (parent, token), score in level.items():
                node = self._place(parent, token, score, source, overwrite)
                for i in members[parent, token]:
                    nodes[i, step] = node
                    above[i] = node
                    alive.append(i)
            alive.sort()
        return nodes

    def _place(self, parent: int, token: int, score: float, source: int, overwrite: bool) -> int:
        for node in self.graph.successors(parent):
            if self.graph.nodes[node]["token"] == token:
                held = self.graph.nodes[node]
                if overwrite or (held["edge"] == -math.inf and score > -math.inf):
                    held.update(edge=score, scorer=source)
                return int(node)
        node = self.n_nodes
        scorer = source if overwrite or score > -math.inf else NOBODY
        self.graph.add_node(
            node, token=token, edge=score, source=source, scorer=scorer, visitors=set()
        )
        self.graph.add_edge(parent, node)
        return node

    def rescore_(self, logprobs: Tensor, source: int) -> None:
        for node in range(1, self.n_nodes):
            score = float(logprobs[node].detach().to(torch.float32))
            score = -math.inf if math.isnan(score) else min(score, 0.0)
            self.graph.nodes[node].update(edge=score, scorer=source)

    def best(
        self, width: int, min_depth: int, max_depth: int, unvisited_by: int | None = None
    ) -> Tensor:
        depth = self.depth.tolist()
        nodes = [
            v
            for v in range(self.n_nodes)
            if min_depth <= depth[v] <= max_depth
            and unvisited_by not in self.graph.nodes[v]["visitors"]
        ]
        nodes.sort(key=lambda v: (-self._sum(v), v))
        return torch.tensor(nodes[:width], dtype=torch.int64)

    def rank(self, nodes: Tensor, match: Tensor, width: int) -> Tensor:
        longest: dict[int, int] = {}
        for node, length in zip(nodes.tolist(), match.tolist(), strict=True):
            if node >= 0:
                longest[node] = max(longest.get(node, 0), length)
        ranked = sorted(longest, key=lambda v: (-longest[v], -self._sum(v), v))
        return torch.tensor(ranked[:width], dtype=torch.int64)

    def prune(self, budget: int) -> TokenTree:
        ranked = sorted(range(self.n_nodes), key=lambda v: (-self._sum(v), v))
        kept = sorted(ranked[: budget + 1])
        place = {node: i for i, node in enumerate(kept)}
        numbers = torch.tensor(kept)
        return TokenTree(
            token=self.token[numbers],
            parent=torch.tensor([place[self._above(v)] for v in kept]),
            depth=self.depth[numbers],
            logprob=self.logprob[numbers],
            source=self.source[numbers],
            scorer=self.scorer[numbers],
            ancestors=self.ancestors(numbers)[:, numbers],
            node=numbers,
        )


def plain_tokens(
    logits_after: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    n_new: int,
    sampling: Sampling,
) -> list[int]:
    """Decode without any tree, token by token: what every pipeline must emit.

    Parameters
    ----------
    logits_after : the model: float [V] logits after a whole text, asked anew for every token.
    n_new : tokens to produce; an id of ``sampling.eos`` ends the text earlier (and is kept).
    """
    history = History(list(prompt), len(prompt))
    for _ in range(n_new):
        logits = logits_after(history.tokens)
        target = TargetDistribution(
            logits[None, :],
            TokenTree.root_only(history.tokens[-1]),
            sampling,
            history,
            Noise(sampling.seed, logits.shape[-1]),
        )
        token = target.token(ROOT)
        history.extend([token])
        if token in sampling.eos:
            break
    return history.tokens[len(prompt) :]
