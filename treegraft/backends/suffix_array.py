"""The suffix array of a token sequence, sorted as far as look-ups reach.

Prefix doubling (Manber and Myers 1993), where each round sorts only what is still tied (Larsson
and Sadakane 2007). A full sort needs as many rounds as the longest repeat asks for; look-ups
compare a bounded number of tokens, so four or five rounds do whatever the corpus repeats.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["suffix_array"]


def suffix_array(tokens: NDArray[np.integer], order: int) -> NDArray[np.int64]:
    """int64 [n]: places of ``tokens`` [n] (ids from 0), sorted by the suffixes that begin there.

    Suffixes are compared by at least their first ``order`` tokens; one that ends sorts before one
    that goes on, and a tie goes to the earlier place. Takes about 70 bytes per token while it runs.
    """
    n = tokens.shape[0]
    if n == 0:
        return np.empty(0, dtype=np.int64)
    key, depth = _packed(tokens)
    places = np.argsort(key, kind="stable")
    first = _starts(key[places])
    del key
    rank = np.empty(n, dtype=np.int64)
    rank[places] = _group(first)
    while depth < order:
        alone = first.copy()
        alone[:-1] &= first[1:]
        tied = np.flatnonzero(~alone)
        if not tied.size:
            break
        here = places[tied]
        behind = here + depth
        # Rank 0 is the end of the text.
        follower = np.where(behind < n, rank[np.minimum(behind, n - 1)] + 1, 0)
        pair = rank[here].astype(np.uint64) * np.uint64(n + 1) + follower.astype(np.uint64)
        # The group is the larger digit, so each group stays in its own places; a stable sort
        # keeps the earlier place first.
        inner = np.argsort(pair, kind="stable")
        here = here[inner]
        places[tied] = here
        starts = _starts(pair[inner])
        first[tied] = starts
        rank[here] = tied[_group(starts)]
        depth *= 2
    return places


def _packed(tokens: NDArray[np.integer]) -> tuple[NDArray[np.uint64], int]:
    """uint64 [n] holding as many tokens from each place as fit, and how many those are."""
    n = tokens.shape[0]
    bits = (int(tokens.max()) + 1).bit_length()
    depth = max(1, min(64 // bits, n))
    key = np.zeros(n, dtype=np.uint64)
    for j in range(depth):
        key <<= np.uint64(bits)
        # 0 stands for the end.
        key[: n - j] |= tokens[j:].astype(np.uint64) + np.uint64(1)
    return key, depth


def _starts(keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """bool [k]: True where sorted ``keys`` [k] differ from the one before."""
    first = np.ones(keys.shape[0], dtype=np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return first


def _group(first: NDArray[np.bool_]) -> NDArray[np.int64]:
    """int64 [k]: for each entry the number of the one that its group starts with."""
    return np.maximum.accumulate(np.where(first, np.arange(first.shape[0]), 0))
