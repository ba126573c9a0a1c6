"""The datastore drafter: what follows the last tokens in a corpus, by how often it does.

The idea of drafting from a corpus is REST's (arXiv 2311.08252); how matches become paths and scores
is described in docs/method.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from treegraft.core.corpus_index import CorpusIndex
from treegraft.core.errors import ConfigError
from treegraft.core.offers import Offers, offers_of
from treegraft.core.roles import Commit, Context, Drafter, TreeBackend
from treegraft.core.tree import Proposals


class DatastoreConfig(BaseModel):
    """Look-ups in a corpus of one's own, made by treegraft datastore build."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["datastore"] = "datastore"
    name: str | None = Field(
        None, min_length=1, description="Name in statistics and schedules; default: kind."
    )
    path: str = Field(min_length=1, description="Folder of the datastore.")
    max_n: int = Field(
        16, ge=1, le=32, description="Longest match in tokens; longer ones are rarer and surer."
    )
    min_n: int = Field(
        1, ge=1, le=32, description="Shortest match in tokens; raising it drafts less and surer."
    )
    length: int = Field(
        10, ge=1, le=64, description="Tokens of a continuation; longer ones deepen the tree."
    )
    paths: int = Field(
        10,
        ge=1,
        le=64,
        description="Continuations under a node, likeliest first; more of them widen the tree.",
    )
    occurrences: int = Field(
        64,
        ge=1,
        le=4096,
        description="Places of a match that are looked at, spread evenly over all of them; more "
        "make scores finer and look-ups dearer.",
    )

    @model_validator(mode="after")
    def _check(self) -> DatastoreConfig:
        if self.min_n > self.max_n:
            raise ValueError(f"min_n must be at most max_n ({self.max_n}), found {self.min_n}")
        return self


_Prefix = tuple[int, ...]


@final
class DatastoreDrafter(Drafter):
    """Longest match first; under one match the most frequent continuations.

    A token's logprob is the log of its share: how many of the places where its path so far occurs
    go on with it, among those looked at. What a longer match already proposed keeps that score.
    A look-up costs O(max_n log n) in a corpus of n tokens, whatever it finds.
    """

    def __init__(self, config: DatastoreConfig, index: CorpusIndex) -> None:
        if config.max_n > index.order:
            raise ConfigError(
                f"max_n must be at most {index.order} in datastore {config.path!r}, found "
                f"{config.max_n}"
            )
        self._index = index
        self._max_n = config.max_n
        self._min_n = config.min_n
        self._length = config.length
        self._paths = config.paths
        self._occurrences = config.occurrences
        self._tail: list[int] = []

    def begin(self, context: Context) -> None:
        self._tail = list(context.tokens[-self._max_n :])

    def observe(self, commit: Commit) -> None:
        self._tail = [*self._tail, *commit.tokens][-self._max_n :]

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers:
        return offers_of(self.propose(tree, torch.tensor(path), width), path)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        nodes: list[int] = []
        paths: list[_Prefix] = []
        scores: list[list[float]] = []
        match: list[int] = []
        for node in positions.tolist():
            tail = (self._tail + tree.path(node))[-self._max_n :]
            for path, logprobs, n in self._continuations(tail, min(width, self._paths)):
                nodes.append(node)
                paths.append(path)
                scores.append(logprobs)
                match.append(n)
        return Proposals.of_paths(nodes, paths, scores, match)

    def _continuations(
        self, tail: list[int], most: int
    ) -> Iterator[tuple[_Prefix, list[float], int]]:
        """At most ``most`` paths, each with something new, their scores and match lengths."""
        scored: dict[_Prefix, float] = {}
        n_paths = n_places = 0
        for n in range(self._longest(tail), self._min_n - 1, -1):
            ranks = self._index.locate(tail[-n:])
            if len(ranks) == n_places:
                continue  # the same places as of the longer match
            n_places = len(ranks)
            rows = self._index.following(_spread(ranks, self._occurrences), n, self._length)
            for path in _paths(rows, scored):
                yield path, [scored[path[: i + 1]] for i in range(len(path))], n
                n_paths += 1
                if n_paths == most:
                    return

    def _longest(self, tail: list[int]) -> int:
        """Tokens of the longest match; below ``min_n`` if there is none."""
        lengths = range(self._min_n, len(tail) + 1)
        # What occurs occurs with any beginning cut off, so the lengths that match come first.
        return (
            self._min_n
            - 1
            + bisect_left(lengths, True, key=lambda n: not self._index.locate(tail[-n:]))
        )


def _spread(ranks: range, most: int) -> NDArray[np.int64]:
    """All of ``ranks``, or ``most`` of them at even distances.

    Suffixes with one continuation stand together, so each gets its share to within one place.
    """
    n = len(ranks)
    if n <= most:
        return np.arange(ranks.start, ranks.stop)
    return ranks.start + (2 * np.arange(most) + 1) * n // (2 * most)


def _paths(rows: NDArray[np.int64], scored: dict[_Prefix, float]) -> Iterator[_Prefix]:
    """Paths of ``rows`` int64 [k, C] (-1 padded) that bring something new, the most frequent first.

    Each begins with the most frequent beginning that is not in ``scored`` yet (of equals the
    shorter) and goes on with the most frequent token; other ties go to the first of ``rows``. Its
    logprobs are noted in ``scored``.
    """
    # A trie as columns; node 0 is where all rows begin. It is half the work of a look-up, so nodes
    # are numbers and prefixes are spelled out only where they are asked for.
    above, token_of, depth, count = [0], [-1], [0], [rows.shape[0]]
    below: list[dict[int, int]] = [{}]
    for row, n in Counter(map(tuple, rows.tolist())).items():
        node = 0
        for token in row:
            if token < 0:
                break
            child = below[node].get(token)
            if child is None:
                child = below[node][token] = len(count)
                above.append(node)
                token_of.append(token)
                depth.append(depth[node] + 1)
                count.append(0)
                below.append({})
            count[child] += n
            node = child
    for node in sorted(range(1, len(count)), key=lambda node: (-count[node], depth[node])):
        if _spelled(node, above, token_of) in scored:
            continue
        while below[node]:
            node = max(below[node].values(), key=count.__getitem__)
        path = _spelled(node, above, token_of)
        for i in range(len(path), 0, -1):
            scored.setdefault(path[:i], math.log(count[node] / count[above[node]]))
            node = above[node]
        yield path


def _spelled(node: int, above: list[int], token_of: list[int]) -> _Prefix:
    tokens = []
    while node:
        tokens.append(token_of[node])
        node = above[node]
    return tuple(reversed(tokens))
