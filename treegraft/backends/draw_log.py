"""What was drawn at random in a working tree: what must be verified for it, and its ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from treegraft.core.tree import ROOT, Ledger, Proposals

__all__ = ["DrawLog"]


@dataclass(frozen=True, slots=True)
class _Draw:
    """A token drawn under ``node`` from ``row`` when the tree had ``since`` nodes."""

    node: int
    token: int
    child: int
    row: int
    since: int


@final
class DrawLog:
    """The draws of one working tree, whose columns are handed in.

    ``bound`` are the nodes that are verified whatever they score: drawn under, or above such a
    node.
    """

    def __init__(self) -> None:
        self.bound = {ROOT}
        self._draws: list[_Draw] = []
        self._q: list[NDArray[np.float64]] = []

    def __len__(self) -> int:
        return len(self._draws)

    def bind(self, position: int, parent: Sequence[int], budget: int | None) -> bool:
        """Promise that ``position`` will be verified; False where ``budget`` could not keep it."""
        if position in self.bound:
            return True
        bound, node = self.bound.copy(), position
        while node not in bound:
            bound.add(node)
            node = parent[node]
        if budget is not None and len(bound) > budget + 1:
            return False
        self.bound = bound
        return True

    def note(
        self, proposals: Proposals, drawn: Sequence[int], child: Sequence[int], since: int
    ) -> None:
        """Enter what was drawn, whether it brought a node or not.

        Parameters
        ----------
        drawn : the paths whose draw counts. child : by path, the node that holds it, or -1.
        since : nodes of the tree before they were hung into it.
        """
        assert proposals.draw is not None
        assert proposals.q is not None
        q = proposals.q.detach().to(torch.float64).numpy()
        rows, positions = proposals.draw.tolist(), proposals.positions.tolist()
        tokens = proposals.tokens.tolist()
        place: dict[int, int] = {}
        for path in drawn:
            row = rows[path]
            if row not in place:
                place[row] = len(self._q)
                # A copy: the drafter may use its buffer again.
                self._q.append(q[row].copy())
            self._draws.append(
                _Draw(positions[path], tokens[path][0], child[path], place[row], since)
            )

    def ledger(
        self, place: Mapping[int, int], token: Sequence[int], parent: Sequence[int]
    ) -> Ledger | None:
        """Slots under the nodes in ``place``, draws of a call before its other children.

        ``place`` says where in the verified tree a node stands. None where nothing was drawn.
        """
        if not self._draws:
            return None
        # A draw of a child that was there before is one more slot; it does not move the child's.
        made = {draw.child for draw in self._draws if draw.child >= draw.since}
        slots = [
            (d.since, 0, i, d.node, d.token, d.child, d.row) for i, d in enumerate(self._draws)
        ]
        for node in range(1, len(token)):
            if node not in made and parent[node] in place:
                slots.append((node, 1, 0, parent[node], token[node], node, -1))
        slots.sort()
        table = np.zeros((len(self._q), max(q.shape[0] for q in self._q)))
        for row, q in zip(table, self._q, strict=True):
            row[: q.shape[0]] = q
        columns = [
            (place[node], own, place.get(child, -1), row)
            for _, _, _, node, own, child, row in slots
        ]
        node, own, child, row = torch.from_numpy(np.array(columns, dtype=np.int64).T.copy())
        return Ledger(node=node, token=own, child=child, row=row, q=torch.from_numpy(table))
