"""What a drafter or verifier may ask of a language model: a forward over nodes, and a KV move.

A model keeps no state between calls; everything that depends on the text lives in a cache that
the caller opened, so one set of weights can serve as target and as drafter in one pipeline.

Shapes (docs/shapes.md): n queries of this forward, K kv span, S cache rows, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import torch
from torch import Tensor

from treegraft.core.errors import UnsupportedModelError


@dataclass(slots=True)
class ForwardCounts:
    """How the forwards of a model that may be compiled ran.

    Attributes
    ----------
    compiled : by a compiled program. eager : by the model's own code, as was chosen for their kind
        at warm-up; prefill of padded models, or of those traced by torch.compile, always. outside :
        by the model's own code because no program and no bucket fits them.
    """

    compiled: int = 0
    eager: int = 0
    outside: int = 0

    def __add__(self, other: ForwardCounts) -> ForwardCounts:
        return ForwardCounts(
            self.compiled + other.compiled,
            self.eager + other.eager,
            self.outside + other.outside,
        )

    def since(self, before: ForwardCounts) -> ForwardCounts:
        """What was counted after ``before``."""
        return ForwardCounts(
            self.compiled - before.compiled,
            self.eager - before.eager,
            self.outside - before.outside,
        )


class LanguageModel(ABC):
    """A causal language model that reads tokens at given cache rows under an explicit visibility.

    Attributes
    ----------
    name : how the model is called in messages and statistics.
    vocab_size : number of token ids that may be emitted (V); ids are 0..V-1.
    max_positions : how many positions the model can address, or None if it does not say.
    device : where logits are returned.
    hidden_size : width of the hidden states that ``forward_hidden`` hands out (d), or None if the
        model hands out none. Drafters that need them are refused for such a target.
    forward_counts : how its forwards ran so far, or None where none is compiled.
    compiled_as : what was compiled, in one line; None where nothing was to be.
    """

    name: str
    vocab_size: int
    max_positions: int | None
    device: torch.device
    hidden_size: int | None = None
    forward_counts: ForwardCounts | None = None
    compiled_as: str | None = None

    @abstractmethod
    def new_cache(self, n_rows: int, old: Any = None) -> Any:
        """Open a KV cache with ``n_rows`` rows (S). Its content is private to this model.

        With ``old``, a smaller cache of this model, the content is kept; ``old`` is not used any
        more and may be the object returned.
        """

    @abstractmethod
    def forward(
        self,
        cache: Any,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Tensor:
        """Read ``n`` tokens, write their keys and values, return next-token logits.

        Parameters
        ----------
        cache : what ``new_cache`` returned.
        tokens : int64 [n], the ids to read.
        rows : int64 [n], distinct cache rows that receive their keys and values.
        positions : int64 [n], position of each token in its own path (not its row).
        visible : bool [n, K], True where query i may attend to cache row k; K covers ``rows`` and
            every query sees at least its own row. Rows written by this very call count.
        last_only : return only the logits of the last query.

        Returns
        -------
        float32 or float64 [n, V] (or [1, V]) logits of the token after each query.
        """

    # Not abstract: few drafters ask for it, and a model may have no states to show.
    def forward_hidden(
        self, cache: Any, tokens: Tensor, rows: Tensor, positions: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read tokens as ``forward`` does, and hand out what the output layer read.

        Returns
        -------
        float32 or float64 [n, V], the logits of ``forward``, and float [n, d] in the model's own
        dtype, the hidden state behind each query: what the output layer made those logits of (in
        most architectures the last layer's output after the final norm).
        """
        raise UnsupportedModelError(f"model {self.name!r} hands out no hidden states")

    @abstractmethod
    def move_(self, cache: Any, source: Tensor, target: Tensor) -> None:
        """Copy cache rows ``source`` int64 [m] to rows ``target`` int64 [m].

        All sources are read before any target is written, so the two may overlap.
        """


def extend(
    model: LanguageModel,
    cache: Any,
    tokens: Sequence[int],
    n_kv: int,
    chunk: int = 512,
    last_only: bool = False,
    states: list[Tensor] | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Read ``tokens`` causally after the ``n_kv`` rows that the cache already holds (prefill).

    Rows equal positions here: token i goes to row and position ``n_kv + i``. Yields
    ``(offset, logits)`` per chunk, ``logits`` float [chunk, V] (or [1, V] with ``last_only``), so
    a caller never holds logits for the whole prompt. With ``states``, the hidden states of each
    chunk, float [chunk, d], are appended to it; ``last_only`` is then not looked at.
    """
    for offset in range(0, len(tokens), chunk):
        part = torch.tensor(tokens[offset : offset + chunk], dtype=torch.int64)
        places = torch.arange(n_kv + offset, n_kv + offset + len(part))
        visible = torch.arange(int(places[-1]) + 1)[None, :] <= places[:, None]
        if states is None:
            logits = model.forward(cache, part, places, places, visible, last_only=last_only)
        else:
            logits, hidden = model.forward_hidden(cache, part, places, places, visible)
            states.append(hidden)
        yield offset, logits


def has_nan(logits: Tensor) -> bool:
    """Whether a row of logits float [n, V] is NaN.

    One column tells, because a NaN in a token's state is in all its logits; and one copy to the
    host costs less than three reductions that nobody has called since the last forward.
    """
    return any(map(isnan, logits[:, 0].tolist()))
