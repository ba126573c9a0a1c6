"""What drafters and the target cost while decoding: given, or medians of what was measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Annotated, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from treegraft.core.stats import StepRecord

__all__ = ["WINDOW", "RunningCosts", "Seconds"]

WINDOW = 32
"""Forwards, visits and steps that a running cost looks back on."""

# Strict, as pydantic would take a switch for a number.
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False, strict=True)]


@final
class RunningCosts:
    """Seconds of visits and of target forwards: what was given, else medians of the last ones.

    Forwards are kept by the number of binary digits of the nodes that they read; between the
    medians of two sizes the seconds are linear, and they never fall with the nodes.

    Parameters
    ----------
    names : of the drafters; none if visits are of no interest. visits : seconds of a visit by
    drafter name. target : seconds of a target forward over the root alone, and node : those that
    each further node adds; None measures.
    """

    def __init__(
        self,
        names: Sequence[str],
        visits: Mapping[str, float],
        target: float | None = None,
        node: float = 0.0,
    ) -> None:
        self._given = [visits.get(name) for name in names]
        self._target, self._node = target, node
        self.measures = target is None or None in self._given
        """Whether anything is measured, so that costs differ from run to run."""
        self._visits: list[deque[float]] = [deque(maxlen=WINDOW) for _ in names]
        # Nodes and seconds of target forwards, by the number of binary digits of the nodes.
        self._forwards: dict[int, deque[tuple[int, float]]] = {}
        self._rests: deque[float] = deque(maxlen=WINDOW)

    def visit(self, index: int) -> float | None:
        """Seconds of a visit of drafter ``index``; None before one was measured."""
        given, measured = self._given[index], self._visits[index]
        if given is not None:
            return given
        return median(measured) if measured else None

    def has_read(self, n_nodes: int) -> bool:
        """Whether a target forward over about so many nodes is known."""
        return self._target is not None or n_nodes.bit_length() in self._forwards

    def forward(self, n_nodes: ArrayLike) -> NDArray[np.float64]:
        """float64, shaped like ``n_nodes``: seconds of target forwards, the root counted.

        0 before any forward was measured.
        """
        nodes = np.asarray(n_nodes, dtype=np.float64)
        if self._target is not None:
            return self._target + self._node * (nodes - 1)
        if not self._forwards:
            return np.zeros(nodes.shape)
        held = [self._forwards[digits] for digits in sorted(self._forwards)]
        known = [median(n for n, _ in forwards) for forwards in held]
        seconds = np.maximum.accumulate([median(s for _, s in forwards) for forwards in held])
        return np.asarray(np.interp(nodes, known, seconds))

    @property
    def rest(self) -> float:
        """Seconds of a step beside visits and target; 0 where nothing is measured."""
        return median(self._rests) if self._rests else 0.0

    def spent(self, record: StepRecord) -> float:
        """Seconds of a step: as measured, or by what was given if that is all."""
        if self.measures:
            return sum(record.seconds.values())
        return float(self.forward(record.n_tree)) + sum(self.visit(i) or 0.0 for i in record.calls)

    def learn(self, record: StepRecord) -> None:
        """Take note of a finished step."""
        if self._visits:
            for index, seconds in zip(record.calls, record.visit_seconds, strict=False):
                self._visits[index].append(seconds)
        if "target" in record.seconds:
            forwards = self._forwards.setdefault(record.n_tree.bit_length(), deque(maxlen=WINDOW))
            forwards.append((record.n_tree, record.seconds["target"]))
        if self.measures:
            known = sum(record.visit_seconds) + record.seconds.get("target", 0.0)
            self._rests.append(max(sum(record.seconds.values()) - known, 0.0))
