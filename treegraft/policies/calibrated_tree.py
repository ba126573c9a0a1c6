"""A working tree whose scores are calibrated on their way in, and that learns from the verdict.

Shapes: N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegraft.core.roles import NodeLists, TreeBackend
from treegraft.core.tree import ROOT, Proposals, TokenTree
from treegraft.policies.calibration import Calibration, Ints, Outcomes, groups

__all__ = ["CalibratedTree"]


@final
class CalibratedTree(TreeBackend):
    """A working tree whose scores are calibrated on their way in; everything else is ``inner``'s.

    All scores enter a tree through ``add_`` and ``rescore_``, whatever policy calls them, so here
    is the one place where they can be mapped. Match lengths are part of the calibrated score, so
    ``rank`` no longer puts them first.
    """

    def __init__(self, inner: TreeBackend, calibration: Calibration) -> None:
        self._inner = inner
        self._calibration = calibration
        self._forget()

    def _forget(self) -> None:
        # Drafter -> what it said about each node that it scored.
        self._said: dict[int, _Opinions] = {}

    def reset_(self, token: int, max_depth: int, budget: int | None = None) -> None:
        self._forget()
        self._inner.reset_(token, max_depth, budget)

    def reroot_(self, node: int, max_depth: int, budget: int | None = None) -> None:
        self._forget()
        self._inner.reroot_(node, max_depth, budget)

    def add_(self, proposals: Proposals, source: int, overwrite: bool) -> Tensor:
        raw = proposals.logprobs.detach().to(torch.float32).numpy()
        match = proposals.match.numpy()
        group = 0 if raw.shape[1] == 1 and not match.any() else groups(match, raw.shape[1])
        value, place = self._calibration.apply(source, group, raw, overwrite)
        calibrated = replace(proposals, logprobs=torch.from_numpy(value))
        nodes = self._inner.add_(calibrated, source, overwrite)
        found = nodes.numpy()
        held = (found >= 0) & (place >= 0)
        self._note(source, found[held], place[held], raw[held], value[held], overwrite)
        return nodes

    def rescore_(self, logprobs: Tensor, source: int) -> None:
        raw = logprobs.detach().to(torch.float32).numpy()
        value, place = self._calibration.apply(source, 0, raw, True)
        self._inner.rescore_(torch.from_numpy(value), source)
        nodes = np.flatnonzero(place >= 0)
        nodes = nodes[nodes != ROOT]
        self._note(source, nodes, place[nodes], raw[nodes], value[nodes], True)

    def _note(
        self,
        source: int,
        nodes: Ints,
        place: Ints,
        raw: NDArray[np.float32],
        value: NDArray[np.float32],
        overwrite: bool,
    ) -> None:
        said = self._said.setdefault(source, _Opinions())
        said.reserve(self._inner.n_nodes)
        if not overwrite:  # the first score stands
            new = said.place[nodes] < 0
            nodes, place, raw, value = nodes[new], place[new], raw[new], value[new]
        # Of several scores in one call the highest counts, so it is written last.
        order = np.argsort(value, kind="stable")
        nodes = nodes[order]
        said.place[nodes] = place[order]
        said.raw[nodes] = raw[order]
        said.value[nodes] = value[order]

    def learn_(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        # Every node under the root or an accepted node was put to the test, be it that the pruning
        # left it out: the token that the target took there is known.
        token, parent = self._inner.token.numpy(), self._inner.parent.numpy()
        following: Ints = np.full(token.shape[0], -1, dtype=np.int64)
        above = ROOT
        for node, taken in zip([*path, -1], tokens, strict=False):
            following[above] = taken
            if not 0 < node < token.shape[0] or parent[node] != above or token[node] != taken:
                break  # the end, or a builder that numbered nodes in its own way
            above = node
        expected = following[parent]
        expected[ROOT] = -1
        reached = np.flatnonzero(expected >= 0)
        accepted = token[reached] == expected[reached]
        columns: list[tuple[NDArray[Any], ...]] = []
        for drafter, said in self._said.items():
            said.reserve(token.shape[0])
            spoke = said.place[reached] >= 0
            nodes = reached[spoke]
            said_here = (said.place[nodes], said.raw[nodes], said.value[nodes])
            columns.append((np.full(nodes.shape, drafter), accepted[spoke], *said_here))
        if columns:
            who, took, place, raw, value = map(np.concatenate, zip(*columns, strict=True))
            self._calibration.learn(who, place, took)
            if self._calibration.observer is not None:
                self._calibration.observer(Outcomes(who, raw, value, took))
        self._forget()

    def keep_(self, nodes: Tensor) -> None:
        self._inner.keep_(nodes)

    def rank(self, nodes: Tensor, match: Tensor, width: int) -> Tensor:
        return self._inner.rank(nodes, torch.zeros_like(match), width)

    def best(
        self, width: int, min_depth: int, max_depth: int, unvisited_by: int | None = None
    ) -> Tensor:
        return self._inner.best(width, min_depth, max_depth, unvisited_by)

    def prune(self, budget: int) -> TokenTree:
        return self._inner.prune(budget)

    def lists(self) -> NodeLists:
        return self._inner.lists()

    def path(self, node: int) -> list[int]:
        return self._inner.path(node)

    def ancestors(self, nodes: Tensor) -> Tensor:
        return self._inner.ancestors(nodes)

    @property
    def n_nodes(self) -> int:
        return self._inner.n_nodes

    @property
    def n_drawn(self) -> int:
        return self._inner.n_drawn

    @property
    def token(self) -> Tensor:
        return self._inner.token

    @property
    def parent(self) -> Tensor:
        return self._inner.parent

    @property
    def depth(self) -> Tensor:
        return self._inner.depth

    @property
    def logprob(self) -> Tensor:
        return self._inner.logprob

    @property
    def source(self) -> Tensor:
        return self._inner.source

    @property
    def scorer(self) -> Tensor:
        return self._inner.scorer

    @property
    def proposers(self) -> Tensor:
        return self._inner.proposers

    @property
    def alive(self) -> Tensor:
        return self._inner.alive

    @property
    def leaf(self) -> Tensor:
        return self._inner.leaf


class _Opinions:
    """One drafter's scores of nodes: cell (-1: none), raw and calibrated, each [>= N]."""

    def __init__(self) -> None:
        self.place: Ints = np.empty(0, dtype=np.int64)
        self.raw: NDArray[np.float32] = np.empty(0, dtype=np.float32)
        self.value: NDArray[np.float32] = np.empty(0, dtype=np.float32)

    def reserve(self, n_nodes: int) -> None:
        more = n_nodes - self.place.shape[0]
        if more > 0:
            more = max(more, 128)
            self.place = np.concatenate([self.place, np.full(more, -1)])
            padding: Any = np.zeros(more, dtype=np.float32)
            self.raw = np.concatenate([self.raw, padding])
            self.value = np.concatenate([self.value, padding])
