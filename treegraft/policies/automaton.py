"""A suffix automaton that grows token by token and counts what followed every short context."""

from __future__ import annotations

import math
from typing import NamedTuple, final

START = 0
"""The state of the empty context."""

_MOST_RANKED = 64
"""Continuations that a state keeps in order: as many as a builder's widest layer can ask for."""


class Match(NamedTuple):
    """The longest suffix of some context that stands in the texts: its state, and its length."""

    state: int
    length: int


@final
class SuffixAutomaton:
    """All contexts of up to ``max_match`` tokens in one or more texts, with continuation counts.

    Why an automaton: it has at most two states and three transitions per token, so its memory is
    linear in the text whatever the depth. A trie of bounded depth, as SuffixDecoding has it, is
    simpler and keeps up to ``max_match`` nodes per token of a text that was copied once.

    Counts are exact. An automaton alone would have to pass every occurrence on along all suffix
    links, which in a periodic text is a chain as long as the text. Here only contexts up to
    ``max_match`` tokens are counted, and those are the end of that chain: ``_tail`` is the state
    of the longest counted suffix, kept by one transition per token, and from there at most
    ``max_match + 1`` links lead to the start. A token costs O(1) amortised for the structure and
    O(max_match) at most for the counts, whatever the length of the text.

    States are numbers into parallel lists, and transitions are dicts of numbers, which Python's
    garbage collector does not visit.
    """

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self._length = [0]  # of the longest context of the state
        self._link = [-1]  # state of the longest suffix that has other occurrences too
        self._next: list[dict[int, int]] = [{}]
        self._count = [0]  # occurrences
        self._followed = [0]  # occurrences with a token behind them
        # State -> its continuations, most frequent first and the latest first among equals; only
        # for states that have several.
        self._ranked: dict[int, list[int]] = {}
        self._last = START  # state of the whole text
        self._tail = Match(START, 0)

    @property
    def match(self) -> Match:
        """The text's own end, up to ``max_match`` tokens."""
        return self._capped(*self._tail)

    def start(self) -> None:
        """Begin another text; what was counted stays."""
        self._last = START
        self._tail = Match(START, 0)

    def append(self, token: int) -> None:
        """Let ``token`` follow the text."""
        old = self._extend(token)
        count, link, following = self._count, self._link, self._next
        state, length = following[old.state][token], old.length + 1
        if length > self.max_match + 1:
            # One longer than what is matched: its count is that of a continuation.
            length = self.max_match + 1
            if self._length[link[state]] >= length:
                state = link[state]
        self._tail = Match(state, length)
        while state != START:
            count[state] += 1
            state = link[state]
        state = old.state
        while state != -1:
            self._followed[state] += 1
            if len(following[state]) > 1:
                self._promote(state, token)
            state = link[state]

    def _extend(self, token: int) -> Match:
        """Add the states and transitions of one more token; returns the tail before it.

        Blumer et al. 1985, with the rule for several texts: a transition that is there already is
        taken, or split.
        """
        following, lengths, link = self._next, self._length, self._link
        tail = self._tail
        state = self._last
        if token in following[state]:
            found = following[state][token]
            if lengths[found] == lengths[state] + 1:
                self._last = found
                return tail
            split = self._split(state, token, found)
            self._last = split
        else:
            new = self._last = self._add(lengths[state] + 1, {}, START)
            while state != -1 and token not in following[state]:
                following[state][token] = new
                state = link[state]
            if state == -1:
                return tail
            found = following[state][token]
            if lengths[found] == lengths[state] + 1:
                link[new] = found
                return tail
            link[new] = split = self._split(state, token, found)
        # The tail's context may be among those that the new state took over.
        if tail.state == found and tail.length <= lengths[split]:
            tail = Match(split, tail.length)
        return tail

    def _split(self, state: int, token: int, found: int) -> int:
        """Give the contexts of ``found`` up to that of ``state`` and ``token`` their own state."""
        following, link = self._next, self._link
        split = self._add(self._length[state] + 1, dict(following[found]), link[found])
        self._count[split] = self._count[found]
        self._followed[split] = self._followed[found]
        if found in self._ranked:
            self._ranked[split] = self._ranked[found].copy()
        link[found] = split
        while state != -1 and following[state].get(token) == found:
            following[state][token] = split
            state = link[state]
        return split

    def _add(self, length: int, following: dict[int, int], link: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._next.append(following)
        self._count.append(0)
        self._followed.append(0)
        return len(self._length) - 1

    def _promote(self, state: int, token: int) -> None:
        """Move ``token``, which was just counted, to its place in the state's ranking."""
        following, count = self._next[state], self._count
        ranked = self._ranked.get(state)
        if ranked is None:
            ranked = self._ranked[state] = list(following)
        now = count[following[token]]
        try:
            place = ranked.index(token)
        except ValueError:
            place = len(ranked)
            if place < _MOST_RANKED:
                ranked.append(token)
            else:
                place -= 1
                if count[following[ranked[place]]] > now:
                    return
        while place > 0 and count[following[ranked[place - 1]]] <= now:
            ranked[place] = ranked[place - 1]
            place -= 1
        ranked[place] = token

    def _capped(self, state: int, length: int) -> Match:
        """The same context cut to ``max_match`` tokens; ``length`` is at most one more."""
        if length > self.max_match:
            length = self.max_match
            if self._length[self._link[state]] >= length:
                state = self._link[state]
        return Match(state, length)

    def advance(self, match: Match, token: int) -> Match:
        """The longest match of the context behind ``match`` once ``token`` follows it."""
        state, length = match
        while token not in self._next[state]:
            state = self._link[state]
            if state == -1:
                return Match(START, 0)
            length = self._length[state]
        return self._capped(self._next[state][token], length + 1)

    def wider(self, match: Match) -> Match | None:
        """The longest shorter context that was followed by more; None if none was."""
        link, following = self._link, self._next
        state = link[match.state]
        # Whatever followed a context followed its suffixes too.
        n_known = len(following[match.state])
        while state != -1 and len(following[state]) == n_known:
            state = link[state]
        return None if state == -1 else Match(state, self._length[state])

    def continuations(self, state: int, most: int) -> list[int]:
        """Tokens that followed, most frequent first and the latest first among equals.

        At most ``most`` of them, and never more than 64.
        """
        following = self._next[state]
        return list(following) if len(following) < 2 else self._ranked[state][:most]

    def path(
        self, match: Match, token: int, most: int, min_share: float = 0.0, min_match: int = 0
    ) -> tuple[list[int], list[float]]:
        """``token``, one of the continuations of ``match``, and the most frequent way on from it.

        A token's share is that among all continuations of its context. The path ends before the
        product of its shares falls below ``min_share``. Where only the end of a text has so long
        a context, a shorter one goes on, down to ``min_match`` tokens: a text that repeats itself
        is continued beyond its end.

        Returns
        -------
        From 1 to ``most`` tokens, and the log of each one's share.
        """
        following, count, followed, link = self._next, self._count, self._followed, self._link
        lengths, max_match = self._length, self.max_match
        state, length = match
        after = following[state][token]
        product = count[after] / followed[state]
        tokens, logprobs = [token], [math.log(product)]
        while len(tokens) < most and product >= min_share:
            state, length = after, length + 1
            if length > max_match:  # as in _capped
                length = max_match
                if lengths[link[state]] >= length:
                    state = link[state]
            behind = following[state]
            while not behind:
                state = link[state]
                length = lengths[state]
                behind = following[state]
            if length < min_match:
                break
            token = next(iter(behind)) if len(behind) == 1 else self._ranked[state][0]
            after = behind[token]
            share = count[after] / followed[state]
            product *= share
            if product < min_share:
                break
            tokens.append(token)
            logprobs.append(0.0 if share == 1.0 else math.log(share))
        return tokens, logprobs

    @property
    def n_states(self) -> int:
        """Size, for whoever watches memory."""
        return len(self._length)
