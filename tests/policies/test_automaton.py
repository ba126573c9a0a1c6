"""The suffix automaton against counting in the texts themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treegraft.policies.automaton import START, Match, SuffixAutomaton


def automaton(*texts: Sequence[int], max_match: int = 8) -> SuffixAutomaton:
    made = SuffixAutomaton(max_match)
    for text in texts:
        made.start()
        for token in text:
            made.append(token)
    return made


def at(made: SuffixAutomaton, context: Sequence[int]) -> Match:
    match = Match(START, 0)
    for token in context:
        match = made.advance(match, token)
    return match


def share(made: SuffixAutomaton, match: Match, token: int) -> float:
    return math.exp(made.path(match, token, 1)[1][0])


def followers(texts: Sequence[Sequence[int]], context: Sequence[int]) -> list[int]:
    """Every token that followed ``context``, in the order of the texts."""
    n = len(context)
    return [
        text[i + n]
        for text in texts
        for i in range(len(text) - n)
        if list(text[i : i + n]) == list(context)
    ]


def stands(texts: Sequence[Sequence[int]], context: Sequence[int]) -> bool:
    n = len(context)
    return any(
        list(text[i : i + n]) == list(context) for text in texts for i in range(len(text) - n + 1)
    )


def ranking(followed: Sequence[int]) -> list[int]:
    """Most frequent first, then the one that came last."""
    latest = {token: i for i, token in enumerate(followed)}
    return sorted(latest, key=lambda token: (-followed.count(token), -latest[token]))


def test_it_knows_how_often_what_followed_what() -> None:
    made = automaton([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2])
    assert made.match.length == 8
    # "1 2 3 1 2" is the longest suffix that stood before; a longer one has nothing behind it.
    longest = made.wider(made.match)
    assert longest is not None
    assert longest.length == 5
    assert made.continuations(longest.state, 9) == [4]
    shorter = made.wider(longest)
    assert shorter == at(made, [1, 2])
    assert shorter.length == 2
    assert made.continuations(shorter.state, 9) == [3, 4]
    assert share(made, shorter, 3) == pytest.approx(2 / 3)


def test_a_text_does_not_run_on_into_the_next() -> None:
    made = automaton([1, 2], [3, 4])
    assert at(made, [2]).length == 1
    assert made.continuations(at(made, [2]).state, 9) == []


def test_a_periodic_text_is_continued_beyond_its_end() -> None:
    made = automaton([1, 2, 3] * 2, max_match=32)
    match = made.wider(made.match)
    assert match is not None
    assert match.length == 3
    assert made.path(match, 1, 10) == ([1, 2, 3, 1, 2, 3, 1, 2, 3, 1], [0.0] * 10)
    # Four tokens of context stand at the end alone.
    assert made.path(match, 1, 10, min_match=4)[0] == [1, 2, 3]


def test_a_path_ends_before_its_share_gets_too_small() -> None:
    made = automaton([1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 5])
    one = at(made, [1])
    assert made.path(one, 2, 2, min_share=0.5) == ([2, 5], [0.0, math.log(0.5)])
    assert made.path(one, 2, 2, min_share=0.51) == ([2], [0.0])
    # The first token was asked for.
    assert made.path(at(made, [2]), 3, 2, min_share=0.9) == ([3], [math.log(0.25)])


TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=3)


@given(texts=TEXTS, max_match=st.integers(1, 5), path=st.lists(st.integers(0, 3), max_size=6))
@example(texts=[[0, 0, 0, 0]], max_match=2, path=[])
@example(texts=[[0, 1], [0, 1, 0]], max_match=1, path=[0])
def test_it_counts_what_the_texts_hold(
    texts: list[list[int]], max_match: int, path: list[int]
) -> None:
    made = automaton(*texts, max_match=max_match)
    context = texts[-1] + path
    match = made.match
    for token in path:
        match = made.advance(match, token)
    longest = next(
        n
        for n in range(min(max_match, len(context)), -1, -1)
        if stands(texts, context[len(context) - n :])
    )
    assert match.length == longest
    seen: set[int] = set()
    lengths = []  # of contexts that were followed by more than all longer ones
    for n in range(longest, -1, -1):
        here = context[len(context) - n :]
        found, followed = at(made, here), followers(texts, here)
        assert found.length == n
        assert made.continuations(found.state, 9) == ranking(followed)
        for token in followed:
            assert share(made, found, token) == pytest.approx(followed.count(token) / len(followed))
        if n < longest and set(followed) != seen:
            lengths.append(n)
        seen = set(followed)
    wider = made.wider(match)
    for n in lengths:
        assert wider is not None
        assert wider.length == n
        wider = made.wider(wider)
    assert wider is None


@given(
    text=st.lists(st.integers(0, 1), min_size=1, max_size=40).map(lambda t: t * 3),
    max_match=st.integers(1, 4),
)
def test_its_size_is_linear_in_the_text(text: list[int], max_match: int) -> None:
    assert automaton(text, max_match=max_match).n_states <= 2 * len(text) + 1


def test_of_many_continuations_the_64_most_frequent_are_ranked() -> None:
    # Token 100 is followed by 0..79, then by 0..69 again, from the last to the first.
    order = [*range(80), *range(69, -1, -1)]
    text = [token for after in order for token in (100, after)]
    made = automaton(text)
    state = at(made, [100]).state
    assert made.continuations(state, 99) == list(range(64))
    assert made.continuations(state, 5) == [0, 1, 2, 3, 4]


def test_a_long_periodic_text_is_counted_up_to_the_longest_match() -> None:
    """Every suffix is a state of its own: links lead through a chain as long as the text."""
    made = automaton([7] * 3000, max_match=4)
    for n in range(5):
        match = at(made, [7] * n)
        assert match.length == n
        assert made._followed[match.state] == 3000 - n
    assert made.match == at(made, [7] * 9) == at(made, [7] * 4)
