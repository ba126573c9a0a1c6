"""Prefill in chunks: the same logits and the same cache as in one piece."""

from __future__ import annotations

import pytest
import torch
from table_models import hashed_model

from treegraft.core.language_model import extend

TEXT = [1, 4, 2, 0, 3, 3, 1]


@pytest.mark.parametrize("chunk", [1, 2, 3, 6, 7, 100])
@pytest.mark.parametrize("n_kv", [0, 3])
def test_chunks_change_nothing(chunk: int, n_kv: int) -> None:
    model = hashed_model(5, seed=1, order=4)
    cache = model.new_cache(len(TEXT))
    for _ in extend(model, cache, TEXT[:n_kv], 0):
        pass
    parts = list(extend(model, cache, TEXT[n_kv:], n_kv, chunk))
    assert [offset for offset, _ in parts] == list(range(0, len(TEXT) - n_kv, chunk))
    logits = torch.cat([part for _, part in parts])
    expected = torch.stack([model.logits(TEXT[: i + 1]) for i in range(n_kv, len(TEXT))])
    assert torch.equal(logits, expected)
    assert cache.token.tolist() == TEXT
    assert cache.position.tolist() == list(range(len(TEXT)))


def test_the_last_logits_alone_are_those_of_each_chunks_end() -> None:
    model = hashed_model(5, seed=1, order=4)
    parts = extend(model, model.new_cache(7), TEXT, 0, chunk=3, last_only=True)
    for (_, logits), end in zip(parts, (3, 6, 7), strict=True):
        assert torch.equal(logits, model.logits(TEXT[:end])[None])


def test_nothing_to_read_is_no_forward() -> None:
    model = hashed_model(5, seed=1)
    assert list(extend(model, model.new_cache(1), [], 0)) == []
    assert model.forwards == 0
