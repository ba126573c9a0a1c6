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

from treegraft.core.errors import TreeError
from treegraft.core.roles import TreeBackend
from treegraft.core.sampling import History, Noise, Sampling, TargetDistribution
from treegraft.core.tree import NOBODY, ROOT, Ledger, Proposals, TokenTree


@final
class ReferenceTree(TreeBackend):
    """A ``networkx.DiGraph`` whose edges run from parent to child.

    Scores are float32, added up from the root like everywhere else, so that results are equal and
    not merely close.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._max_depth = 0
        self._budget: int | None = None
        # (node, token, child or -1, probabilities, number of nodes before) of each draw.
        self._draws: list[tuple[int, int, int, Tensor, int]] = []
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

    @property
    def proposers(self) -> Tensor:
        proposers = [self.graph.nodes[v]["proposers"] for v in range(self.n_nodes)]
        return torch.tensor([sum(1 << i for i in found) for found in proposers])

    @property
    def alive(self) -> Tensor:
        return self._column("alive", torch.bool)

    @property
    def leaf(self) -> Tensor:
        tree = self.graph.subgraph(self._living())
        return torch.tensor([v in tree and not tree.out_degree(v) for v in range(self.n_nodes)])

    def _living(self) -> list[int]:
        return [v for v in range(self.n_nodes) if self.graph.nodes[v]["alive"]]

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

    @property
    def n_drawn(self) -> int:
        return len(self._draws)

    def _bound(self, *more: int) -> set[int]:
        """Nodes under which something was drawn (or is to be, under ``more``), and all above."""
        drawn_under = {ROOT, *more, *(draw[0] for draw in self._draws)}
        return {above for node in drawn_under for above in self._lineage(node)}

    def reset_(self, token: int, max_depth: int, budget: int | None = None) -> None:
        self._max_depth = max_depth
        self._budget = budget
        self._draws = []
        self.graph = nx.DiGraph()
        self.graph.add_node(
            ROOT,
            token=token,
            edge=0.0,
            source=NOBODY,
            scorer=NOBODY,
            proposers=set(),
            visitors=set(),
            alive=True,
        )

    def reroot_(self, node: int, max_depth: int, budget: int | None = None) -> None:
        if node not in self._living():
            raise TreeError(f"the new root must be a node of the tree, found {node}")
        if self._draws:
            raise TreeError(f"a tree with {len(self._draws)} draws cannot begin at another node")
        old = self.graph.subgraph(self._living())
        above = len(self._lineage(node))
        self.reset_(old.nodes[node]["token"], max_depth, budget)
        place = {node: ROOT}
        for v in sorted(nx.descendants(old, node)):
            if len(nx.ancestors(old, v)) + 1 - above > max_depth:
                continue
            place[v] = len(self.graph)
            self.graph.add_node(place[v], **{**old.nodes[v], "visitors": set()})
            self.graph.add_edge(place[next(iter(old.predecessors(v)))], place[v])

    def add_(self, proposals: Proposals, source: int, overwrite: bool) -> Tensor:
        n_paths, length = proposals.tokens.shape
        # Rounded first: what float32 holds as -inf is no score.
        logprobs = proposals.logprobs.detach().to(torch.float32)
        nodes = torch.full((n_paths, length), -1, dtype=torch.int64)
        above = proposals.positions.tolist()
        for node in above:
            if not self.graph.nodes[node]["alive"]:
                raise TreeError(f"paths cannot hang under node {node}, which was taken out")
        for node in above:
            self.graph.nodes[node]["visitors"].add(source)
        alive = list(range(n_paths))
        since, drawn = self.n_nodes, self._accepted_draws(proposals)
        if proposals.draw is not None:
            alive = [i for i in alive if proposals.draw[i] < 0 or i in drawn]
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
        rows: dict[int, Tensor] = {}
        for i in drawn:
            assert proposals.draw is not None
            assert proposals.q is not None
            row = int(proposals.draw[i])
            q = rows.setdefault(row, proposals.q[row].clone())
            position, token = int(proposals.positions[i]), int(proposals.tokens[i, 0])
            self._draws.append((position, token, int(nodes[i, 0]), q, since))
        return nodes

    def _accepted_draws(self, proposals: Proposals) -> list[int]:
        """Drawn paths whose position the budget can keep and the depth allows."""
        if proposals.draw is None:
            return []
        accepted: list[int] = []
        promised: list[int] = []
        for i, row in enumerate(proposals.draw.tolist()):
            position = int(proposals.positions[i])
            if row < 0 or len(self._lineage(position)) - 1 >= self._max_depth:
                continue
            if self._budget is None or len(self._bound(*promised, position)) <= self._budget + 1:
                promised.append(position)
                accepted.append(i)
        return accepted

    def _place(self, parent: int, token: int, score: float, source: int, overwrite: bool) -> int:
        for node in self.graph.successors(parent):
            if self.graph.nodes[node]["token"] == token:
                held = self.graph.nodes[node]
                if not held["alive"]:
                    held.update(alive=True, source=source, proposers=set(), visitors=set())
                    held.update(edge=-math.inf, scorer=source if overwrite else NOBODY)
                held["proposers"].add(source)
                if overwrite or (held["edge"] == -math.inf and score > -math.inf):
                    held.update(edge=score, scorer=source)
                return int(node)
        node = self.n_nodes
        scorer = source if overwrite or score > -math.inf else NOBODY
        self.graph.add_node(
            node,
            token=token,
            edge=score,
            source=source,
            scorer=scorer,
            proposers={source},
            visitors=set(),
            alive=True,
        )
        self.graph.add_edge(parent, node)
        return node

    def rescore_(self, logprobs: Tensor, source: int) -> None:
        for node in range(1, self.n_nodes):
            score = float(logprobs[node].detach().to(torch.float32))
            score = -math.inf if math.isnan(score) else min(score, 0.0)
            self.graph.nodes[node].update(edge=score, scorer=source)

    def keep_(self, nodes: Tensor) -> None:
        living = set(self._living())
        kept = self._bound()
        for node in nodes.tolist():
            if node not in living:
                raise TreeError(f"nodes to keep must be in the tree, found {node}")
            kept.update(self._lineage(node))
        for node in living - kept:
            self.graph.nodes[node]["alive"] = False

    def best(
        self, width: int, min_depth: int, max_depth: int, unvisited_by: int | None = None
    ) -> Tensor:
        depth = self.depth.tolist()
        nodes = [
            v
            for v in self._living()
            if min_depth <= depth[v] <= max_depth
            and unvisited_by not in self.graph.nodes[v]["visitors"]
        ]
        nodes.sort(key=lambda v: (-self._sum(v), v))
        return torch.tensor(nodes[:width], dtype=torch.int64)

    def rank(self, nodes: Tensor, match: Tensor, width: int) -> Tensor:
        longest: dict[int, int] = {}
        for node, length in zip(nodes.tolist(), match.tolist(), strict=True):
            if node >= 0 and self.graph.nodes[node]["alive"]:
                longest[node] = max(longest.get(node, 0), length)
        ranked = sorted(longest, key=lambda v: (-longest[v], -self._sum(v), v))
        return torch.tensor(ranked[:width], dtype=torch.int64)

    def prune(self, budget: int) -> TokenTree:
        bound = self._bound()
        if len(bound) > budget + 1:
            raise TreeError(
                f"a budget of {budget} cannot hold the {len(bound) - 1} nodes under which "
                "something was drawn"
            )
        ranked = sorted(self._living(), key=lambda v: (v not in bound, -self._sum(v), v))
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
            proposers=self.proposers[numbers],
            ancestors=self.ancestors(numbers)[:, numbers],
            node=numbers,
            ledger=self._ledger(place) if self._draws else None,
        )

    def _ledger(self, place: dict[int, int]) -> Ledger:
        rows: list[Tensor] = []
        slots: list[tuple[tuple[int, ...], int, int, int, int]] = []
        made = set()
        for i, (node, token, child, q, since) in enumerate(self._draws):
            if not any(q is row for row in rows):
                rows.append(q)
            row = next(r for r, held in enumerate(rows) if held is q)
            slots.append(((since, 0, i), node, token, child, row))
            if child >= since:
                made.add(child)
        for node in range(1, self.n_nodes):
            above, token = self._above(node), self.graph.nodes[node]["token"]
            if node not in made and above in place:
                slots.append(((node, 1), above, token, node, -1))
        slots.sort()
        q = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.float64)
        for held, row in zip(rows, q, strict=True):
            row[: len(held)] = held
        return Ledger(
            node=torch.tensor([place[node] for _, node, _, _, _ in slots]),
            token=torch.tensor([token for _, _, token, _, _ in slots]),
            child=torch.tensor([place.get(child, -1) for _, _, _, child, _ in slots]),
            row=torch.tensor([row for _, _, _, _, row in slots]),
            q=q,
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
