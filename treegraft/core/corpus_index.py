"""What a drafter may ask of an indexed corpus: where tokens stand, and what follows there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class CorpusIndex(ABC):
    """A corpus of documents whose suffixes are sorted, so that equal beginnings stand together.

    A *rank* is the number of a suffix in that order.

    Attributes
    ----------
    vocab_size : ids of the corpus are 0..vocab_size-1.
    order : longest sequence that can be located; suffixes are sorted by their first ``order``
        tokens, or by more.
    """

    vocab_size: int
    order: int

    @abstractmethod
    def locate(self, tokens: Sequence[int]) -> range:
        """Ranks of the suffixes that begin with ``tokens``, at least one and at most ``order``.

        Empty if they stand nowhere within a document.
        """

    @abstractmethod
    def following(self, ranks: NDArray[np.int64], skip: int, length: int) -> NDArray[np.int64]:
        """int64 [k, length]: what stands ``skip`` tokens behind the start of suffix ``ranks`` [k].

        -1 from the end of the document on.
        """
