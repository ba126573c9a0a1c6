"""Tiny language models given as functions of the text, with a cache that honours visibility.

They see a text only through rows, positions and the visibility they are given, so a pipeline that
hands over a wrong row, position or mask gets wrong tokens. Their hidden states tell the whole text,
so a draft head of tables sees whether it got the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from treegraft.core.draft_head import DraftHead
from treegraft.core.language_model import LanguageModel

STATE_SIZE = 3


def next_state(before: Tensor, token: int) -> Tensor:
    """The state behind ``token``, float32 [3], given the one before it: a hash of the text."""
    key, length, _ = before.tolist()
    return torch.tensor([(key * 31 + token + 1) % 8191, length + 1, token + 1])


def state_of(text: Sequence[int]) -> Tensor:
    """The state behind a whole text; zeros for none."""
    state = torch.zeros(STATE_SIZE)
    for token in text:
        state = next_state(state, token)
    return state


@dataclass
class TableCache:
    token: Tensor
    position: Tensor


def read(
    cache: TableCache, tokens: Tensor, rows: Tensor, positions: Tensor, visible: Tensor
) -> list[list[int]]:
    """Write the tokens to their rows; the text that each of them ends."""
    assert len(set(rows.tolist())) == len(rows), "rows of one forward must differ"
    assert bool(visible[torch.arange(len(rows)), rows].all()), "a query must see itself"
    cache.token[rows] = tokens
    cache.position[rows] = positions
    texts = []
    for i in range(len(rows)):
        seen = visible[i].nonzero()[:, 0]
        where = cache.position[seen]
        text = cache.token[seen][where.argsort()].tolist()
        assert sorted(where.tolist()) == list(range(len(text))), "positions must form a path"
        assert int(positions[i]) == len(text) - 1, "a query must be the end of its path"
        texts.append(text)
    return texts


@dataclass
class TableModel(LanguageModel):
    """``logits(text) -> float [V]``; ``reads`` counts the tokens that went through the model."""

    logits: Callable[[Sequence[int]], Tensor] = field(repr=False)
    vocab_size: int
    name: str = "table"
    max_positions: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"), repr=False)
    hidden_size: int | None = STATE_SIZE
    reads: int = field(default=0, repr=False)
    forwards: int = field(default=0, repr=False)

    def new_cache(self, n_rows: int, old: Any = None) -> TableCache:
        cache = TableCache(torch.full((n_rows,), -1), torch.full((n_rows,), -1))
        if old is not None:
            n_old = old.token.shape[0]
            cache.token[:n_old], cache.position[:n_old] = old.token, old.position
            # Whoever goes on with the old one finds nothing in it.
            old.token = old.position = torch.empty(0, dtype=torch.int64)
        return cache

    def forward(
        self,
        cache: TableCache,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Tensor:
        limit = self.max_positions
        assert limit is None or int(positions.max()) < limit, "a position past the context limit"
        self.reads += len(rows)
        self.forwards += 1
        texts = read(cache, tokens, rows, positions, visible)
        stacked = torch.stack([self.logits(text).float() for text in texts])
        return stacked[-1:] if last_only else stacked

    def forward_hidden(
        self, cache: TableCache, tokens: Tensor, rows: Tensor, positions: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = self.forward(cache, tokens, rows, positions, visible)
        texts = read(cache, tokens, rows, positions, visible)
        return logits, torch.stack([state_of(text) for text in texts])

    def move_(self, cache: TableCache, source: Tensor, target: Tensor) -> None:
        cache.token[target] = cache.token[source].clone()
        cache.position[target] = cache.position[source].clone()


@dataclass
class TableHead(DraftHead):
    """Says of a text what ``model`` says, and refuses a state that is not that of the text before.

    Its own states are right, so in a draft too a wrong one can only come from a wrong place.
    """

    model: TableModel
    name: str = "table head"
    max_positions: int | None = None
    hidden_size: int = STATE_SIZE
    device: torch.device = field(default_factory=lambda: torch.device("cpu"), repr=False)
    dtype: torch.dtype = torch.float32
    reads: int = field(default=0, repr=False)
    forwards: int = field(default=0, repr=False)

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return self.model.vocab_size

    def new_cache(self, n_rows: int, old: Any = None) -> TableCache:
        return self.model.new_cache(n_rows, old)

    def forward(
        self,
        cache: TableCache,
        tokens: Tensor,
        states: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        limit = self.max_positions
        assert limit is None or int(positions.max()) < limit, "a position past the context limit"
        texts = read(cache, tokens, rows, positions, visible)
        for text, state in zip(texts, states, strict=True):
            assert torch.equal(state, state_of(text[:-1])), (
                f"a wrong state before the end of {text}"
            )
        self.reads += len(texts)
        self.forwards += 1
        logits = torch.stack([self.model.logits(text).float() for text in texts])
        said = torch.stack([state_of(text) for text in texts])
        return said, logits[-1:] if last_only else logits

    def move_(self, cache: TableCache, source: Tensor, target: Tensor) -> None:
        self.model.move_(cache, source, target)


def hashed_model(vocab_size: int, seed: int, order: int = 2, scale: float = 3.0) -> TableModel:
    """Logits that are a fixed random function of the last ``order`` tokens."""

    @lru_cache(maxsize=4096)
    def after(tail: tuple[int, ...]) -> Tensor:
        key = seed
        for token in tail:
            key = (key * 1_000_003 + token + 1) % (2**31 - 1)
        generator = torch.Generator().manual_seed(key)
        return torch.randn(vocab_size, generator=generator) * scale

    def logits(text: Sequence[int]) -> Tensor:
        return after(tuple(text[-order:]))

    return TableModel(logits, vocab_size, name=f"hashed-{seed}")


def mixed_model(target: TableModel, other: TableModel, share: float) -> TableModel:
    """A drafter that is close to ``target``: its logits mixed with those of ``other``."""

    def logits(text: Sequence[int]) -> Tensor:
        return (1 - share) * target.logits(text) + share * other.logits(text)

    return TableModel(logits, target.vocab_size, name="mixed")


def looping_model(loop: Sequence[int], vocab_size: int) -> TableModel:
    """Says ``loop`` again and again, by position: what look-ups are good at."""

    def logits(text: Sequence[int]) -> Tensor:
        said = torch.tensor(loop[len(text) % len(loop)] % vocab_size)
        return torch.nn.functional.one_hot(said, vocab_size) * 4.0

    return TableModel(logits, vocab_size, name="looping")


def tied_model(model: TableModel) -> TableModel:
    """``model`` with logits of a few values only, so that the likeliest tokens often tie."""
    return TableModel(lambda text: (model.logits(text) / 2).round(), model.vocab_size, name="tied")


def holed_model(model: TableModel) -> TableModel:
    """``model`` with -inf for every token but the likelier half."""

    def logits(text: Sequence[int]) -> Tensor:
        whole = model.logits(text)
        return whole.masked_fill(whole < whole.median(), -torch.inf)

    return TableModel(logits, model.vocab_size, name="holed")
