"""The suffix array: a story, then against sorting lists, then what repeats."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegraft.backends.suffix_array import suffix_array


def test_banana() -> None:
    # a $ an.. ana.. ba.. na.. nana
    banana = np.array([ord(c) - ord("a") for c in "banana"], dtype=np.uint16)
    assert suffix_array(banana, 6).tolist() == [5, 3, 1, 0, 4, 2]


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    scale=st.sampled_from([1, 250, 2**16, 2**30]),
    order=st.integers(1, 40),
)
def test_it_is_the_sorted_list_of_suffixes(tokens: list[int], scale: int, order: int) -> None:
    """Whatever number of tokens fit into one key; ties beyond the order keep their places."""
    text = np.array([token * scale for token in tokens], dtype=np.uint32)
    found = suffix_array(text, order).tolist()
    ids = text.tolist()
    assert sorted(found) == list(range(len(ids)))
    heads = [ids[place : place + order] for place in found]
    assert heads == sorted(heads)
    # At least order tokens are compared; what is equal for good, or tied, is in order of place.
    for a, b in pairwise(found):
        assert ids[a:] < ids[b:] or a < b


@pytest.mark.parametrize("order", [1, 5, 32])
def test_a_text_of_one_token_is_sorted_in_bounded_rounds(order: int) -> None:
    """Its longest repeat is as long as itself, which a full sort would pay for."""
    found = suffix_array(np.zeros(5000, dtype=np.uint16), order)
    # The last suffixes end within the order and sort before; the rest is tied.
    assert found[0] == 4999
    depth = int(np.argmax(found == 0))
    assert depth >= order - 1
    assert found[:depth].tolist() == list(range(4999, 4999 - depth, -1))
    assert found[depth:].tolist() == list(range(5000 - depth))


def test_tokens_are_left_as_they_were() -> None:
    tokens = np.array([3, 1, 2, 3, 1], dtype=np.uint32)
    suffix_array(tokens, 4)
    assert tokens.tolist() == [3, 1, 2, 3, 1]


def test_no_token_and_one() -> None:
    assert suffix_array(np.empty(0, dtype=np.uint16), 8).tolist() == []
    assert suffix_array(np.array([7], dtype=np.uint16), 8).tolist() == [0]
