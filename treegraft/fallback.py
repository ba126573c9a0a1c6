"""Plain decoding where drafting turns out not to pay, found out while decoding.

Steps are timed as they are: a few plain ones now and then, and all drafted ones. Where a plain step
brings more tokens per second than the latest drafted ones did, the next steps are plain, and after
some pause drafting is tried again. No token depends on it, only the time.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import final

__all__ = ["Fallback"]

_TRIAL = 8  # drafted steps before the first judgement, and in every later trial
_WINDOW = 32  # drafted steps that are judged by
_PLAIN = 3  # plain steps in a row whenever plain decoding is timed; the first is not counted
_EVERY = 128  # drafted steps between two such times
_SHORTEST, _LONGEST = 32, 1024  # plain steps before drafting is tried again; doubled each time


@final
class Fallback:
    """Says before each step whether to draft, and learns from each step what it brought.

    One per pipeline: what was learned is kept from text to text. ``drafted_rate`` and
    ``plain_rate`` are tokens per second, 0.0 before anything was timed.
    """

    def __init__(self) -> None:
        self._drafted: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._plain: deque[float] = deque(maxlen=_PLAIN * 3)
        self._n_plain = _PLAIN  # plain steps to come
        self._timing = True  # whether those are there to be timed
        self._n_drafted = 0  # drafted steps since plain ones were timed
        self._pause = _SHORTEST
        self._n_trial = 0

    @property
    def drafted_rate(self) -> float:
        """Tokens per second of the latest drafted steps."""
        seconds = sum(seconds for _, seconds in self._drafted)
        return sum(n for n, _ in self._drafted) / seconds if seconds else 0.0

    @property
    def plain_rate(self) -> float:
        """Tokens per second of plain steps."""
        return 1.0 / max(median(self._plain), 1e-9) if self._plain else 0.0

    def drafts(self) -> bool:
        """Whether the step to come is to be drafted."""
        return self._n_plain == 0

    def finish(self, n_new: int, seconds: float) -> bool:
        """A step is over that brought ``n_new`` tokens; whether plain steps follow from here on."""
        if self._n_plain:
            self._finish_plain(seconds)
            return False
        self._drafted.append((n_new, seconds))
        self._n_drafted += 1
        self._n_trial += 1
        if self._n_trial >= _TRIAL and self.drafted_rate < self.plain_rate:
            self._n_plain, self._timing = self._pause, False
            self._pause = min(2 * self._pause, _LONGEST)
            return True
        if self._n_trial >= _WINDOW:
            self._pause = _SHORTEST  # it has paid for a while
        if self._n_drafted >= _EVERY:
            self._n_plain, self._timing, self._n_drafted = _PLAIN, True, 0
        return False

    def _finish_plain(self, seconds: float) -> None:
        # The first plain step finds caches and programs cold.
        if not self._timing or self._n_plain < _PLAIN:
            self._plain.append(seconds)
        self._n_plain -= 1
        if self._n_plain == 0 and not self._timing:
            # A trial speaks for itself: what did not pay before says nothing now.
            self._drafted.clear()
            self._n_trial = 0
