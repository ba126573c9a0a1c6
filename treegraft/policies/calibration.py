"""Scores that can be compared: every drafter's score mapped to its chance of being accepted.

A model's logprob, a match length and a count are on no common scale. Here each becomes the share of
verified steps in which a token with such a score was accepted where its parent was, learned from
finished steps alone. Scores only decide what is drafted and kept, so no token ever depends on it.

Shapes: I drafters, G groups (match length by place in a path), J knots of a score, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

KNOTS: Floats = np.array(
    [-12, -9, -7, -5.5, -4.5, -3.5, -2.75, -2, -1.5, -1, -0.7, -0.45, -0.25, -0.12, -0.05, -0.01]
)
"""Scores, in nats, at which the map is learned; it is linear between them."""

UNSCORED_PRIOR = 0.25
"""Chance of a token without a score before anything was observed."""

_J = KNOTS.shape[0]
_UNSCORED = _J  # the cell after those of the knots
_CELLS = _J + 1
_EDGES = (KNOTS[1:] + KNOTS[:-1]) / 2
# Match lengths that share a group: 0, 1, 2, 3, 4, 5-6, 7-8, 9-12, 13 and more.
_MATCHES = np.array([1, 2, 3, 4, 5, 7, 9, 13])
_PLACES = 8  # places in a proposed path; the last one holds all deeper ones
_G = (len(_MATCHES) + 1) * _PLACES
_PRIOR = np.append(np.exp(KNOTS), UNSCORED_PRIOR)


class CalibrationConfig(BaseModel):
    """Whether scores are mapped to chances of acceptance, learned while decoding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["none", "online"] = Field(
        "none", description="none takes scores as drafters give them, as in the paper."
    )
    scope: Literal["pipeline", "text"] = Field(
        "pipeline", description="Whether what was learned is kept for the next text."
    )
    strength: float = Field(
        8.0,
        gt=0.0,
        le=1e6,
        description="Observations that the prior counts for; a larger number learns more slowly.",
    )


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What a step showed about scores: one entry per score given to a node whose parent was kept.

    Attributes
    ----------
    drafter : int64 [m], who gave the score.
    raw : float32 [m], the score as given, nats; -inf where the drafter gave none.
    calibrated : float32 [m], what it was mapped to before the step was verified.
    accepted : bool [m], whether the target took the token.
    """

    drafter: Ints
    raw: NDArray[np.float32]
    calibrated: NDArray[np.float32]
    accepted: NDArray[np.bool_]


@final
class Calibration:
    """Counts by drafter, match length, place in the path and score, and the map that they give.

    The estimate of a cell is a mean with a Beta prior of ``strength`` observations: the drafter's
    mean at that score over all matches and places, and behind that the score itself, so that
    before any observation a score maps to itself. Over the scores of a group it is then made
    monotone by isotonic regression, weighted by the observations.

    ``observer`` is called with the outcomes of every step.
    """

    def __init__(
        self,
        config: CalibrationConfig,
        n_drafters: int,
        observer: Callable[[Outcomes], None] | None = None,
    ) -> None:
        self.config = config
        self.observer = observer
        self._n_drafters = n_drafters
        self._seen: Floats = np.zeros((n_drafters, _G, _CELLS))
        self._taken: Floats = np.zeros((n_drafters, _G, _CELLS))
        # log chance at each knot and without a score; rows that ``_stale`` marks are out of date.
        self._table: Floats = np.zeros((n_drafters, _G, _CELLS))
        self._stale: NDArray[np.bool_] = np.ones((n_drafters, _G), dtype=np.bool_)

    def for_text(self) -> Calibration:
        """What a new text begins with: this one, or one that knows nothing (``scope``)."""
        if self.config.scope == "pipeline":
            return self
        return Calibration(self.config, self._n_drafters, self.observer)

    def apply(
        self, drafter: int, group: Ints | int, raw: NDArray[np.float32], scored: bool
    ) -> tuple[NDArray[np.float32], Ints]:
        """Calibrated scores and the cells that they came from, both shaped like ``raw``.

        Parameters
        ----------
        group : number below G of each score's match length and place, or one for all.
        raw : scores in nats; NaN and -inf are no score, above 0 counts as 0.
        scored : whether who gave them speaks about every token, so that no score means impossible
            and stays; else it is a token that a look-up found and said nothing more about.

        Returns
        -------
        Scores of at most 0, rising with ``raw`` within a group, and int64 cells (-1: no score).
        """
        known = raw > -np.inf  # False for NaN
        x = np.minimum(np.where(known, raw, KNOTS[0]), 0.0)
        value, unscored = (
            self._one_map(drafter, group, x)
            if isinstance(group, int)
            else self._maps(drafter, group, x)
        )
        if not known.all():
            value = np.where(known, value, -np.inf if scored else unscored)
        cell = np.where(known, np.searchsorted(_EDGES, x), -1 if scored else _UNSCORED)
        place: Ints = np.where(cell >= 0, group * _CELLS + cell, -1)
        return value.astype(np.float32), place

    def _one_map(self, drafter: int, group: int, x: Floats) -> tuple[Floats, float]:
        """``_maps`` for scores of one group, which are all that a model gives."""
        if self._stale[drafter, group]:
            self._renew(drafter, np.array([group]))
        row = self._table[drafter, group]
        value = np.minimum(np.interp(x, KNOTS, row[:_J]), row[_J - 1])
        lowest = KNOTS[0]
        if x.size and x.min() < lowest:
            value = value + np.minimum(x - lowest, 0.0)
        return value, row[_UNSCORED]

    def _maps(self, drafter: int, group: Ints, x: Floats) -> tuple[Floats, Floats]:
        """What scores ``x`` are mapped to, and what no score is, both shaped like ``group``."""
        self._renew(drafter, group)
        table = self._table[drafter]
        below = np.clip(np.searchsorted(KNOTS, x) - 1, 0, _J - 2)
        share = np.clip((x - KNOTS[below]) / (KNOTS[below + 1] - KNOTS[below]), 0.0, 1.0)
        low, high = table[group, below], table[group, below + 1]
        value = np.minimum(low + share * (high - low), high)
        # Below the lowest knot nobody looks closely: one nat less is one nat less.
        value = np.where(x < KNOTS[0], table[group, 0] + (x - KNOTS[0]), value)
        return value, table[group, _UNSCORED]

    def learn(self, drafter: Ints, place: Ints, accepted: NDArray[np.bool_]) -> None:
        """Count outcomes, each int64 / bool [m]; ``place`` as ``apply`` returned it."""
        index = drafter * (_G * _CELLS) + place
        size = self._seen.size
        self._seen += np.bincount(index, minlength=size).reshape(self._seen.shape)
        self._taken += np.bincount(index[accepted], minlength=size).reshape(self._seen.shape)
        # A drafter's groups lean on each other.
        self._stale[np.unique(drafter)] = True

    def _renew(self, drafter: int, group: Ints) -> None:
        """Bring the rows of the table up to date that ``group`` names."""
        wanted = np.zeros(_G, dtype=np.bool_)
        wanted[group] = True
        wanted &= self._stale[drafter]
        if not wanted.any():
            return
        seen, taken = self._seen[drafter], self._taken[drafter]
        k = self.config.strength
        overall = (taken.sum(0) + k * _PRIOR) / (seen.sum(0) + k)
        weight = seen[wanted] + k
        mean = (taken[wanted] + k * overall) / weight
        mean[:, :_J] = isotonic(mean[:, :_J], weight[:, :_J])
        # Sums of many observations round: a chance may not come out as 0 or above 1.
        self._table[drafter, wanted] = np.log(np.clip(mean, 1e-9, 1.0))
        self._stale[drafter] &= ~wanted


def isotonic(value: Floats, weight: Floats) -> Floats:
    """The rising sequences nearest to ``value`` float64 [G, J] in squares weighted by ``weight``.

    By the min-max formula of isotonic regression (Barlow et al. 1972): the largest, over all
    starts up to a place, of the smallest mean of a run from that start to any end from the place
    on. For the few knots here that is a handful of array operations for all rows at once; a library
    (scipy, scikit-learn) would be a heavy dependency and a call per row.
    """
    n = value.shape[1]
    zero = np.zeros((value.shape[0], 1))
    total = np.concatenate([zero, np.cumsum(value * weight, axis=1)], axis=1)
    mass = np.concatenate([zero, np.cumsum(weight, axis=1)], axis=1)
    start, end = np.triu_indices(n)
    mean = np.full((value.shape[0], n, n), np.inf)  # of the run from i to j, where i <= j
    total, mass = (column[:, end + 1] - column[:, start] for column in (total, mass))
    mean[:, start, end] = total / mass
    least = np.minimum.accumulate(mean[:, :, ::-1], axis=2)[:, :, ::-1]
    late, early = np.tril_indices(n, -1)
    least[:, late, early] = -np.inf  # runs that begin after the place
    rising: Floats = np.maximum.accumulate(least.max(axis=1), axis=1)  # rounding may fall by a hair
    return rising


def groups(match: Ints, n_places: int) -> Ints:
    """int64 [K, C]: the group of each token of paths with ``match`` int64 [K]."""
    place = np.minimum(np.arange(n_places), _PLACES - 1)
    band: Ints = np.searchsorted(_MATCHES, match, side="right")
    return band[:, None] * _PLACES + place
