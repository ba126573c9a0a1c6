"""A corpus index in plain Python: every suffix is listed, and searched one by one. The oracle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treegraft.core.corpus_index import CorpusIndex


class ListedCorpus(CorpusIndex):
    """Sorted by ``order`` tokens; a document's end sorts last, as the separator does on disk."""

    def __init__(
        self, documents: Sequence[Sequence[int]], vocab_size: int, order: int = 32
    ) -> None:
        self.vocab_size = vocab_size
        self.order = order
        text = [token for document in documents for token in (*document, vocab_size)]
        self.suffixes = sorted(
            (text[place : place + order], place, text[place:]) for place in range(len(text))
        )

    def locate(self, tokens: Sequence[int]) -> range:
        wanted = list(tokens)
        ranks = [
            rank
            for rank, (_, _, suffix) in enumerate(self.suffixes)
            if suffix[: len(wanted)] == wanted and self.vocab_size not in wanted
        ]
        assert ranks == list(range(ranks[0], ranks[-1] + 1)) if ranks else True
        return range(ranks[0], ranks[-1] + 1) if ranks else range(0)

    def following(self, ranks: NDArray[np.int64], skip: int, length: int) -> NDArray[np.int64]:
        rows = []
        for rank in ranks.tolist():
            row = self.suffixes[rank][2][skip : skip + length]
            if self.vocab_size in row:
                row = row[: row.index(self.vocab_size)]
            rows.append(row + [-1] * (length - len(row)))
        return np.array(rows, dtype=np.int64).reshape(len(rows), length)
