"""The table of a trace: one row per schedule up to some layer, in one step.

Shapes: F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Outcome", "TraceRows"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What stopping here brings: tokens, nodes that the target reads, forwards of the graft's end.

    ``unread`` : of the accepted nodes, how many each drafter that acted has not read.
    """

    n_new: int
    n_tree: int
    finish: tuple[int, int]
    unread: tuple[int, ...]


@final
class TraceRows:
    """Rows of a text as they are made."""

    def __init__(self, n_drafters: int, n_features: int) -> None:
        self._n_drafters, self._n_features = n_drafters, n_features
        self._steps: list[tuple[int, int]] = []
        self._rows: list[tuple[int, ...]] = []
        self._unread: list[tuple[int, ...]] = []
        self._features: list[tuple[int, NDArray[np.float32]]] = []

    def begin(self, position: int, n_left: int) -> None:
        """Begin a step at ``position`` committed tokens, with ``n_left`` of the text to come."""
        self._steps.append((position, n_left))

    def add(
        self,
        parent: int,
        action: int,
        layer: int,
        n_nodes: int,
        outcome: Outcome,
        widths: Sequence[int],
    ) -> int:
        """Note a schedule up to ``layer``; its number within the text."""
        first, second = (*widths, 0, 0)[:2]
        self._rows.append(
            (
                len(self._steps) - 1,
                parent,
                action,
                layer,
                outcome.n_new,
                outcome.n_tree,
                n_nodes,
                first,
                second + sum(widths[2:]),
                *outcome.finish,
            )
        )
        self._unread.append(outcome.unread)
        return len(self._rows) - 1

    def describe(self, row: int, features: NDArray[np.float32]) -> None:
        """Keep ``features`` float32 [F] of a row that can be continued."""
        self._features.append((row, features))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All rows and steps, by the names of docs/scheduling.md."""
        steps = np.array(self._steps, dtype=np.int32).reshape(-1, 2)
        rows = np.array(self._rows, dtype=np.int32).reshape(-1, 11)
        held = {row: features for row, features in self._features}
        features = [held[row] for row in sorted(held)]
        return {
            "position": steps[:, 0].copy(),
            "n_left": steps[:, 1].copy(),
            "step": rows[:, 0].copy(),
            "parent": rows[:, 1].copy(),
            "action": rows[:, 2].astype(np.int8),
            "layer": rows[:, 3].astype(np.int8),
            "n_new": rows[:, 4].astype(np.int16),
            "n_tree": rows[:, 5].astype(np.int16),
            "n_nodes": rows[:, 6].astype(np.int16),
            "widths": rows[:, 7:9].astype(np.int16),
            "finish": rows[:, 9:11].astype(np.int16),
            "unread": np.array(self._unread, dtype=np.int8).reshape(-1, self._n_drafters),
            "described": np.array(sorted(held), dtype=np.int32),
            "features": np.array(features, dtype=np.float32).reshape(-1, self._n_features),
        }
