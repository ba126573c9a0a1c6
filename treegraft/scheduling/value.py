"""The best schedule policy for tokens per second, which is a ratio of sums.

For one text the objective is E[tokens] / E[seconds]. A policy that maximises
E[tokens] - rate * E[seconds] at the rate that it itself reaches maximises the ratio (Dinkelbach
1967; a semi-Markov decision process with average reward), so the rate is iterated to its fixed
point, and for each rate the layers are solved backwards, from the last to the first.

Several texts have their lengths whatever is drafted: one that goes slowly takes more steps. So the
seconds of each are its length over its own rate, the rate of all is all tokens over all seconds,
and what a second is worth differs from text to text: it is what the policy makes of it there. That
is where the steps that were evaluated are only a sample of those that a policy would take.

Shapes: S steps, R rows (a row is a schedule up to some layer, in one step), K drafters, T texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

__all__ = ["STOP", "Problem", "Solution"]

STOP = -1
"""The action that ends drafting; drafters are 0..K-1."""
_MOST_ROUNDS = 100

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Solution:
    """A policy and what it reaches on the steps that it was solved for.

    Attributes
    ----------
    actions : int64 [R], STOP or the drafter that acts next; STOP where a row cannot be continued.
    ends : int64 [S], the row in which each step stops.
    rate : tokens per second.
    """

    actions: Ints
    ends: Ints
    rate: float


@final
class Problem:
    """The schedules of some steps, what each would commit and how long it would take.

    Parameters
    ----------
    step, parent, action, layer : int [R] as in ``traces.ARRAYS``; parents come before their rows,
        and a step's first row has parent -1 and layer 0.
    tokens, seconds : float [R], of the step if drafting stops in the row; seconds are above 0.
    n_drafters : K.
    complete : whether every schedule was tried from every step, or only a beam.
    text : int [S], the text of each step; one text if left out. lengths : float [T], their tokens.
    """

    def __init__(
        self,
        step: NDArray[np.integer],
        parent: NDArray[np.integer],
        action: NDArray[np.integer],
        layer: NDArray[np.integer],
        tokens: NDArray[np.floating] | NDArray[np.integer],
        seconds: NDArray[np.floating],
        n_drafters: int,
        complete: bool = True,
        text: NDArray[np.integer] | None = None,
        lengths: NDArray[np.floating] | NDArray[np.integer] | None = None,
    ) -> None:
        self.step, self.parent = step.astype(np.int64), parent.astype(np.int64)
        self.action, self.layer = action.astype(np.int64), layer.astype(np.int64)
        self.tokens, self.seconds = tokens.astype(np.float64), seconds.astype(np.float64)
        self.n_drafters, self.complete = n_drafters, complete
        n = self.step.shape[0]
        self.child: Ints = np.full((n, n_drafters), -1, dtype=np.int64)
        below = np.flatnonzero(self.parent >= 0)
        self.child[self.parent[below], self.action[below]] = below
        self.roots: Ints = np.flatnonzero(self.parent < 0)
        # Of each row, and every text's share of all tokens.
        self.text: Ints = np.zeros(n, dtype=np.int64)
        if text is not None:
            by_step = np.zeros(int(self.step.max(initial=-1)) + 1, dtype=np.int64)
            by_step[self.step[self.roots]] = text
            self.text = by_step[self.step]
        self.lengths: Floats = np.ones(1) if lengths is None else lengths.astype(np.float64)
        self._by_layer = [
            np.flatnonzero(self.layer == number)
            for number in range(int(self.layer.max(initial=0)) + 1)
        ]

    def restrict(self, steps: NDArray[np.bool_]) -> Problem:
        """The same for ``steps`` bool [S] alone, in the order of their first rows."""
        kept = np.zeros(int(self.step.max(initial=-1)) + 1, dtype=np.bool_)
        kept[self.step[self.roots[steps]]] = True
        rows = np.flatnonzero(kept[self.step])
        place = np.full(self.step.shape[0] + 1, -1, dtype=np.int64)
        place[rows] = np.arange(rows.shape[0])
        return Problem(
            self.step[rows],
            place[self.parent[rows]],
            self.action[rows],
            self.layer[rows],
            self.tokens[rows],
            self.seconds[rows],
            self.n_drafters,
            self.complete,
            self.text[self.roots[steps]],
            self.lengths,
        )

    @property
    def depth(self) -> int:
        """Layers of the longest schedule."""
        return len(self._by_layer) - 1

    def rows_of_layer(self, layer: int) -> Ints:
        """Rows in which ``layer`` layers were carried out."""
        return self._by_layer[layer]

    def follow(self, actions: Ints) -> Ints:
        """int64 [S]: where each step stops under ``actions`` int64 [R]."""
        rows = self.roots
        for _ in range(self.depth):
            chosen = actions[rows]
            after = self.child[rows, np.maximum(chosen, 0)]
            rows = np.where((chosen != STOP) & (after >= 0), after, rows)
        return rows

    def rate(self, ends: Ints) -> float:
        """Tokens per second if steps stop in the rows ``ends`` int64, one per step."""
        tokens, seconds = self._sums(ends)
        there = tokens > 0
        length = self.lengths[there]
        return float(length.sum() / (length * seconds[there] / tokens[there]).sum())

    def estimate(self, ends: Ints) -> float:
        """``rate`` as it would be of all steps of these texts, if few of each were evaluated.

        The seconds of a text are a ratio, and a ratio of few steps comes out high on average, the
        more so the more the tokens vary from step to step; so ``rate`` finds drafting worth less
        than it is. The jackknife (Quenouille 1956) takes most of that away: each text's ratio times
        its steps, less the mean of the ratios without one of them times one step less. A text of
        one step stays as it is.
        """
        texts, n_texts = self.text[ends], self.lengths.shape[0]
        n = np.bincount(texts, minlength=n_texts).astype(np.float64)
        tokens, seconds = self._sums(ends)
        there = tokens > 0
        ratio = seconds / np.where(there, tokens, 1.0)
        others = tokens[texts] - self.tokens[ends]
        without = (seconds[texts] - self.seconds[ends]) / np.where(others > 0, others, 1.0)
        mean = np.bincount(texts, without, minlength=n_texts) / np.maximum(n, 1.0)
        ratio = np.where(n > 1, n * ratio - (n - 1) * mean, ratio)[there]
        length = self.lengths[there]
        total = float((length * ratio).sum())
        # Of a handful of steps the correction can be larger than what it corrects.
        return float(length.sum()) / total if total > 0 else self.rate(ends)

    def _sums(self, ends: Ints) -> tuple[Floats, Floats]:
        """float64 [T]: tokens and seconds of the steps of each text."""
        texts, n = self.text[ends], self.lengths.shape[0]
        return (
            np.bincount(texts, self.tokens[ends], minlength=n).astype(np.float64),
            np.bincount(texts, self.seconds[ends], minlength=n).astype(np.float64),
        )

    def prices(self, ends: Ints, shrink: float = 0.0) -> Floats:
        """float64 [T]: tokens that a second brings in each text.

        With ``shrink`` so many average steps are added to each text, which may have few.
        """
        tokens, seconds = self._sums(ends)
        n = max(ends.shape[0], 1)
        more = shrink + 1e-12
        mean_tokens, mean_seconds = self.tokens[ends].sum() / n, self.seconds[ends].sum() / n
        found: Floats = (tokens + more * mean_tokens) / (seconds + more * mean_seconds)
        return found

    def fixed(self, calls: Sequence[int]) -> Ints:
        """int64 [S]: where each step stops under one schedule for all of them.

        A layer in which its drafter cannot act is where the step stops, as in decoding.
        """
        rows = self.roots
        going = np.ones(rows.shape[0], dtype=np.bool_)
        for index in calls:
            after = self.child[rows, index]
            going &= after >= 0
            rows = np.where(going, after, rows)
        return rows

    def schedules(self) -> list[tuple[int, ...]]:
        """Every schedule that was tried from some step, shorter ones first; () stops at once."""
        known: dict[int, tuple[int, ...]] = {int(row): () for row in self.roots}
        found: dict[tuple[int, ...], None] = {(): None}
        for number in range(1, self.depth + 1):
            for row in self._by_layer[number].tolist():
                calls = (*known[int(self.parent[row])], int(self.action[row]))
                known[row] = calls
                found[calls] = None
        return list(found)

    def best_fixed(self) -> tuple[tuple[int, ...], float]:
        """The schedule that is fastest if all steps use it, and its rate; shortest on ties.

        Of a beam only schedules are compared that reach as deep as they say in every step.
        """
        best: tuple[tuple[int, ...], float] = ((), -np.inf)
        for calls in self.schedules():
            ends = self.fixed(calls)
            if not self.complete and bool((self.layer[ends] < len(calls)).any()):
                continue
            rate = self.rate(ends)
            if rate > best[1]:
                best = (calls, rate)
        return best

    def gains(self, ends: Ints, shrink: float = 0.0) -> Floats:
        """float64 [R]: seconds that stopping in each row saves, at the prices that ``ends`` makes.

        Tokens over their price, less the row's seconds, times the steps that the text takes per
        step that was evaluated: to first order, what the seconds of all texts fall by.
        """
        prices = self.prices(ends, shrink)
        tokens, _ = self._sums(ends)
        weight = self.lengths / np.maximum(tokens, 1e-12)
        found: Floats = weight[self.text] * (self.tokens / prices[self.text] - self.seconds)
        return found

    def options(self, rows: Ints, value: Floats) -> tuple[Floats, NDArray[np.bool_]]:
        """What each action is worth in ``rows`` int64 [n], and whether it can be taken.

        float64 and bool [n, K + 1]: stopping first, then the drafters; who cannot act leaves the
        step as it is. ``value`` float64 [R] : of each row, what follows included.
        """
        after = self.child[rows]
        there = after >= 0
        stop = value[rows][:, None]
        worth = np.concatenate([stop, np.where(there, value[after], stop)], axis=1)
        able = np.concatenate([np.ones((rows.shape[0], 1), dtype=np.bool_), there], axis=1)
        return worth, able

    def induce(self, ends: Ints, groups: Ints | None = None) -> Solution:
        """The best policy at the prices that ``ends`` makes, by backward induction.

        ``groups`` int64 [R] says what a policy can tell apart: it takes the same action in all rows
        of a group. None is the clairvoyant policy, which knows each step's continuation (the
        oracle). Whoever remembers what was seen and done can tell apart at least what could be told
        apart before, without which working backwards would not be right: ValueError.
        """
        value = self.gains(ends)
        actions = np.full(value.shape[0], STOP, dtype=np.int64)
        if groups is not None:
            self._check_recall(groups)
        for number in range(self.depth - 1, -1, -1):
            rows = self._by_layer[number]
            worth, able = self.options(rows, value)
            if groups is None:
                best = np.where(able, worth, -np.inf).argmax(1)
            else:
                _, mine = np.unique(groups[rows], return_inverse=True)
                n_groups = int(mine.max(initial=-1)) + 1
                total = np.zeros((n_groups, worth.shape[1]))
                np.add.at(total, mine, worth)
                anyone = np.zeros(total.shape, dtype=np.bool_)
                np.logical_or.at(anyone, mine, able)
                best = np.where(anyone, total, -np.inf).argmax(1)[mine]
            actions[rows] = best - 1
            value[rows] = worth[np.arange(rows.shape[0]), best]
        reached = self.follow(actions)
        return Solution(actions, reached, self.rate(reached))

    def solve(self, groups: Ints | None = None) -> Solution:
        """The policy with the highest tokens per second: ``induce`` at its own prices.

        It begins with the best fixed schedule and goes on while the rate rises, so it is no slower
        than any. With one text, or for the clairvoyant, it is the best policy there is.
        """
        calls, rate = self.best_fixed()
        actions = self.actions_of(calls)
        solution = Solution(actions, self.follow(actions), rate)
        for _ in range(_MOST_ROUNDS):
            better = self.induce(solution.ends, groups)
            if better.rate <= solution.rate * (1 + 1e-12):
                break
            solution = better
        return solution

    def actions_of(self, calls: Sequence[int]) -> Ints:
        """int64 [R]: the actions of one schedule for all steps."""
        actions = np.full(self.step.shape[0], STOP, dtype=np.int64)
        rows = self.roots
        for index in calls:
            after = self.child[rows, index]
            actions[rows[after >= 0]] = index
            rows = after[after >= 0]
        return actions

    def _check_recall(self, groups: Ints) -> None:
        below = np.flatnonzero(self.parent >= 0)
        came = np.stack([groups[below], groups[self.parent[below]], self.action[below]], axis=1)
        ways = np.unique(came, axis=0)
        if np.unique(ways[:, 0]).shape[0] != ways.shape[0]:
            raise ValueError("groups must tell apart what was told apart or done in layers before")
        if (
            np.unique(groups[self.roots]).shape[0]
            and np.isin(groups[self.roots], groups[below]).any()
        ):
            raise ValueError("groups must tell the first layer from later ones")
