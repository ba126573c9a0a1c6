"""The text decoded again by every call schedule, from what drafters would have proposed in it.

Nothing is forwarded for it: drafters say what they would have proposed along each verified path
(``Drafter.offers``), and the text says how much of that was right.

Shapes: N schedules, n of one level (as many calls), P places of the text, K drafters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

import numpy as np
from numpy.typing import NDArray

from treegraft.core.offers import Hindsight

__all__ = ["MOST_SCHEDULES", "PATIENCE", "Habits", "OfferLog", "Replay", "Schedules"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

MOST_SCHEDULES = 1024
PATIENCE = 16
"""Tokens for which a place is waited for that a drafter has told nothing of yet.

Models tell late of text that they read late (``LmDrafter.offers``), and of no more than this.
"""

_KNOWN, _WAITS, _UNKNOWN = 0, 1, 2
_DETOURS = 2
"""Tokens of a path that were not their drafter's first choice, up to which they are told apart."""
_PRIOR = 4.0
"""Tokens that count as kept before any was seen."""


@final
class Schedules:
    """Call schedules of up to ``depth`` layers, level by level, the empty one first.

    All of them where that is at most ``MOST_SCHEDULES``; else those of one drafter, or of one and
    then another; else those of one drafter. Each one's beginnings are among them.

    Attributes
    ----------
    calls : the drafters of each of the N schedules. levels : per level above the first, its place
    among all, and for each of its schedules the number, in the level above, of the one that it
    continues, and the drafter that it adds, int64 [n].
    """

    def __init__(self, n_drafters: int, depth: int) -> None:
        self.calls: tuple[tuple[int, ...], ...] = tuple(_family(n_drafters, depth))
        self.levels: list[tuple[slice, Ints, Ints]] = []
        number = {calls: i for i, calls in enumerate(self.calls)}
        above, begin = 0, 1
        while begin < len(self.calls):
            n = len(self.calls[begin])
            level = [calls for calls in self.calls[begin:] if len(calls) == n]
            parent = np.array([number[calls[:-1]] - above for calls in level])
            added = np.array([calls[-1] for calls in level])
            self.levels.append((slice(begin, begin + len(level)), parent, added))
            above, begin = begin, begin + len(level)
        self.first = np.array([calls[0] if calls else -1 for calls in self.calls])

    def __len__(self) -> int:
        return len(self.calls)

    def summed(self, first: Floats, later: Floats) -> Floats:
        """float64 [N]: per-layer amounts by drafter added up; ``first`` [K] in the first layer."""
        total = np.zeros(len(self.calls))
        above = total[:1]
        amount = first
        for level, parent, added in self.levels:
            total[level] = above[parent] + amount[added]
            above, amount = total[level], later
        return total


def _family(n_drafters: int, depth: int) -> list[tuple[int, ...]]:
    who = range(n_drafters)
    if sum(n_drafters**n for n in range(depth + 1)) <= MOST_SCHEDULES:
        return [calls for n in range(depth + 1) for calls in product(who, repeat=n)]
    pairs = n_drafters * (n_drafters - 1)
    if 1 + n_drafters * depth + pairs * depth * (depth - 1) // 2 <= MOST_SCHEDULES:
        return [
            (i,) * (n - m) + (j,) * m
            for n in range(depth + 1)
            for m in range(max(n, 1))
            for i in (who if n else [0])
            for j in (who if m else [i])
            if m == 0 or i != j
        ]
    return [(i,) * n for n in range(depth + 1) for i in (who if n else [0])]


@dataclass(frozen=True, slots=True)
class Habits:
    """How drafters act in the trees of a pipeline.

    Attributes
    ----------
    recovers : bool [K], who takes up the verified path again where a layer before had left it.
    anywhere : whether who recovers also goes on behind deep tokens that a look-up found at once.
    riders : drafters that ride along with those that ``scores`` bool [K] names.
    """

    recovers: Bools
    anywhere: bool
    scores: Bools
    riders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """What drafters' paths would have held of the text, [K, P] each.

    Attributes
    ----------
    run : tokens of the text that the best of its paths begins with; -1 where it is not known.
    more : whether they may be more, as the text ends there. silent : whether it proposed nothing.
    first : whether its first path begins with the text's token.
    """

    run: Ints
    more: Bools
    silent: Bools
    first: Bools

    def with_riders(self, habits: Habits) -> Held:
        """As it would have been with those that ride along."""
        riders, scores = list(habits.riders), habits.scores
        if not riders or not scores.any():
            return self
        run, more, silent = self.run.copy(), self.more.copy(), self.silent.copy()
        unknown = run[scores] < 0
        run[scores] = np.where(unknown, -1, np.maximum(run[scores], run[riders].max(0)))
        more[scores] |= more[riders].any(0)
        silent[scores] &= silent[riders].all(0)
        return Held(run, more, silent, self.first)


@final
class OfferLog:
    """How many tokens of the text each drafter's paths would have held, at each place of it.

    Attributes
    ----------
    begin, end : places from and up to which the text is followed: its tokens are known below
    ``end``.
    """

    def __init__(self, n_drafters: int) -> None:
        self._n = n_drafters
        self._text: Sequence[int] | None = None
        self.begin = self.end = 0
        self._open_arrays(0)

    def _open_arrays(self, n_places: int) -> None:
        # As in ``Held``.
        self._run: Ints = np.full((self._n, n_places), -1)
        self._more: Bools = np.zeros((self._n, n_places), dtype=np.bool_)
        self._silent: Bools = np.zeros((self._n, n_places), dtype=np.bool_)
        self._first: Bools = np.zeros((self._n, n_places), dtype=np.bool_)
        # Paths that are right as far as the text goes, by drafter and place.
        self._running: dict[tuple[int, int], Sequence[Sequence[int]]] = {}

    def follow(self, hindsight: Hindsight) -> bool:
        """Take note of a step; whether it is one of another text than the last."""
        text = hindsight.text
        end = len(text)
        start = end - hindsight.n_new
        new = text is not self._text or start != self.end
        if new:
            self._text, self.begin = text, start
            self._open_arrays(256)
        self.end = end
        if end - self.begin > self._run.shape[1]:
            self._grow(2 * (end - self.begin))
        for (drafter, place), paths in list(self._running.items()):
            self._judge(drafter, place, paths)
        for drafter, offers in enumerate(hindsight.offers):
            for j, paths in (offers or {}).items():
                place = start + j
                if self.begin <= place < end and self._run[drafter, place - self.begin] < 0:
                    self._judge(drafter, place, paths)
        return new

    def _grow(self, n_places: int) -> None:
        more = n_places - self._run.shape[1]
        self._run = np.pad(self._run, ((0, 0), (0, more)), constant_values=-1)
        self._more = np.pad(self._more, ((0, 0), (0, more)))
        self._silent = np.pad(self._silent, ((0, 0), (0, more)))
        self._first = np.pad(self._first, ((0, 0), (0, more)))

    def _judge(self, drafter: int, place: int, paths: Sequence[Sequence[int]]) -> None:
        text, end = self._text, self.end
        assert text is not None
        longest = 0
        running: list[Sequence[int]] = []
        for path in paths:
            n = 0
            for token in path:
                if place + n == end:
                    running.append(path)
                    break
                if token != text[place + n]:
                    break
                n += 1
            longest = max(longest, n)
        at = (drafter, place - self.begin)
        self._run[at], self._silent[at], self._more[at] = longest, not paths, bool(running)
        if place < end and paths:
            self._first[at] = list(paths[0][:1]) == [text[place]]
        if running:
            self._running[drafter, place] = running
        else:
            self._running.pop((drafter, place), None)

    def held(self, begin: int) -> Held:
        """What is known of the places from ``begin`` on."""
        here = slice(begin - self.begin, self.end - self.begin)
        run, more = self._run[:, here], self._more[:, here]
        return Held(run, more, self._silent[:, here], self._first[:, here])


@dataclass(frozen=True, slots=True)
class Steps:
    """A step of each schedule from each place, [P, N] each; without layers nothing is accepted.

    Attributes
    ----------
    length : tokens that it would have accepted. expected : how many of them remain, as far as
        seen, where the frontier's width and the budget may cut the path off. state : whether this
        is known (0), waits for more text (1) or for news of a drafter (2).
    """

    length: Ints
    expected: Floats
    state: Ints


@final
class Replay:
    """Every schedule decodes the text on its own, from step to step.

    A step's layers go on where the layers before it have come to on the verified path. A drafter
    whose paths hold the next token leads on; one whose paths don't leads astray, and the layers
    after it bring nothing, but for drafters that recover (``Habits``). One that proposes nothing
    at the root leaves the place to the next. What a real tree loses of such a path, as its frontier
    is narrow and its budget small, is learned from the steps that were carried out: the share of
    tokens that were accepted, by their depth and by how many of the path were not their drafter's
    first choice.
    """

    def __init__(self, schedules: Schedules, habits: Habits) -> None:
        self._schedules, self._habits = schedules, habits
        # By detours and depth: tokens that a path would have had accepted, and those that were.
        self._seen: Floats = np.zeros((_DETOURS + 1, 1))
        self._kept: Floats = np.zeros((_DETOURS + 1, 1))
        self.forget(0)

    def forget(self, place: int) -> None:
        """A text begins at ``place``."""
        self.done = place
        self._at = [place] * len(self._schedules)
        # By schedule: shares of steps from ``done`` on.
        self._spent: list[list[float]] = [[] for _ in self._schedules.calls]

    def advance(self, log: OfferLog) -> Floats:
        """float64 [P, N]: for each place that is settled now, the share of a step that each
        schedule's decoding spent on it; NaN where it could not be told.

        A step that commits n tokens spends 1 / n on each. Places are settled in order, each once.
        """
        begin, end = min(self._at), log.end
        if begin < end:
            steps = self.steps(log, begin)
            columns = zip(
                (steps.length + 1).T.tolist(),
                (1.0 / (1.0 + steps.expected)).T.tolist(),
                steps.state.T.tolist(),
                strict=True,
            )
            for number, (n_new, share, state) in enumerate(columns):
                spent, at = self._spent[number], self._at[number] - begin
                while at < end - begin:
                    if state[at] == _KNOWN:
                        spent += [share[at]] * n_new[at]
                        at += n_new[at]
                    elif state[at] == _UNKNOWN and end - begin - at > PATIENCE:
                        spent.append(math.nan)
                        at += 1
                    else:
                        break
                self._at[number] = begin + at
        settled = max(min(*self._at, end) - self.done, 0)
        self.done += settled
        shares = np.array([spent[:settled] for spent in self._spent])
        for spent in self._spent:
            del spent[:settled]
        return shares.T

    def steps(self, log: OfferLog, begin: int) -> Steps:
        """Those from the places from ``begin`` on."""
        held = log.held(begin).with_riders(self._habits)
        n_places = held.run.shape[1]
        place = np.arange(n_places)[:, None]
        shape = (n_places, len(self._schedules))
        every = Steps(np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape, np.int64))
        most = len(self._schedules.levels) * max(int(held.run.max(initial=1)), 1)
        remaining = self._remaining(most)
        # Of the level above: tokens accepted, edges down to where the next layer goes on, whether
        # that lies beside the verified path, and detours.
        known: Ints = np.zeros((n_places, 1), dtype=np.int64)
        front, state, detours = known, known, known
        expected: Floats = np.zeros((n_places, 1))
        lost: Bools = np.zeros((n_places, 1), dtype=np.bool_)
        for level, parent, who in self._schedules.levels:
            known, front, detours = known[:, parent], front[:, parent], detours[:, parent]
            state, lost, expected = state[:, parent], lost[:, parent], expected[:, parent]
            recovers = self._habits.recovers[who]
            down = np.where(recovers, known, front) if self._habits.anywhere else front
            at = place + down
            acts = (state == _KNOWN) & (~lost | recovers)
            beyond = at >= n_places
            at = np.minimum(at, n_places - 1)
            found = held.run[who, at]
            waits = beyond | held.more[who, at]
            news = np.where(waits, _WAITS, np.where(found < 0, _UNKNOWN, _KNOWN))
            state = np.where(acts, news, state)
            right = acts & (found > 0)
            detours = detours + (right & ~held.first[who, at])
            far = np.where(right, np.maximum(known, down + found), known)
            of = np.minimum(detours, _DETOURS)
            expected = expected + remaining[of, far] - remaining[of, known]
            known = far
            front = np.where(right, down + 1, front)
            # Deeper down another node of the frontier may have led on.
            astray = (found == 0) & ~(held.silent[who, at] & (down == 0))
            lost = np.where(acts, astray, lost)
            every.length[:, level], every.state[:, level] = known, state
            every.expected[:, level] = expected
        return every

    def _remaining(self, most: int) -> Floats:
        """float64 [detours, > most]: tokens that remain of the first so many of a path."""
        depth = self._seen.shape[1]
        # A deeper token is accepted only if those above it are.
        kept = np.minimum.accumulate((self._kept + _PRIOR) / (self._seen + _PRIOR), axis=1)
        total = np.cumsum(kept[:, 1:], axis=1)
        total = np.concatenate([np.zeros((_DETOURS + 1, 1)), total], axis=1)
        if most < depth:
            return total
        beyond = np.arange(1, most - depth + 2)
        return np.concatenate([total, total[:, -1:] + kept[:, -1:] * beyond], axis=1)

    def compare(self, log: OfferLog, place: int, calls: tuple[int, ...], n_path: int) -> bool:
        """A step from ``place`` with these calls had ``n_path`` tokens accepted.

        Whether something was learned from it: not if it is not known yet what was to be expected.
        """
        path = self.path(log, place, calls)
        if path is None:
            return False
        more = len(path) + 1 - self._seen.shape[1]
        if more > 0:
            self._seen = np.pad(self._seen, ((0, 0), (0, more)))
            self._kept = np.pad(self._kept, ((0, 0), (0, more)))
        for depth, detours in enumerate(path, 1):
            at = (min(detours, _DETOURS), depth)
            self._seen[at] += 1
            self._kept[at] += depth <= n_path
        return True

    def path(self, log: OfferLog, place: int, calls: Sequence[int]) -> list[int] | None:
        """Detours so far at each depth of what a step would have accepted; None if not known."""
        held = log.held(place).with_riders(self._habits)
        path: list[int] = []
        front = detours = 0
        lost = False
        for who in calls:
            recovers = bool(self._habits.recovers[who])
            if lost and not recovers:
                continue
            at = len(path) if recovers and self._habits.anywhere else front
            if at >= held.run.shape[1] or held.more[who, at] or held.run[who, at] < 0:
                return None
            found = int(held.run[who, at])
            lost = found == 0 and not (held.silent[who, at] and at == 0)
            if found:
                detours += not held.first[who, at]
                path += [detours] * (at + found - len(path))
                front = at + 1
        return path
