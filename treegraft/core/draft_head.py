"""A draft head: what turns the target's hidden states into guesses at the tokens after them.

EAGLE's idea (arXiv 2401.15077): the state behind a place and the token that follows it tell the
state behind that token, and the target's own output layer says what comes after it. A head keeps
no state between calls; as for a LanguageModel, all of a text lives in a cache of the caller's.

Shapes (docs/shapes.md): n queries of this forward, K kv span, S cache rows, V vocabulary, d width
of the target's hidden states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class DraftHead(ABC):
    """A small network that reads tokens together with the state behind the place before each.

    Attributes
    ----------
    name : how the head is called in messages.
    vocab_size : number of token ids that it knows (V), the target's.
    hidden_size : width of the states (d), the target's.
    max_positions : how many positions it can address, or None if it does not say.
    device, dtype : where and in what its states live.
    """

    name: str
    vocab_size: int
    hidden_size: int
    max_positions: int | None
    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def new_cache(self, n_rows: int, old: Any = None) -> Any:
        """Open a KV cache with ``n_rows`` rows: see LanguageModel.new_cache."""

    @abstractmethod
    def forward(
        self,
        cache: Any,
        tokens: Tensor,
        states: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Read ``n`` tokens and write their keys and values.

        Parameters
        ----------
        states : float [n, d] on ``device`` in ``dtype``, the state behind the place before each
            token: the target's own or, in a draft, what this head said there; zeros at position 0.
        cache, tokens, rows, positions, visible, last_only : as for LanguageModel.forward.

        Returns
        -------
        float [n, d], its guess at the target's state behind each token, and float32 or float64
        [n, V] (or [1, V]), logits of the token after each.
        """

    @abstractmethod
    def move_(self, cache: Any, source: Tensor, target: Tensor) -> None:
        """Copy cache rows: see LanguageModel.move_."""
