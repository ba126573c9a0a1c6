"""Bare forwards: what a step's forwards would take with nothing else around them.

This is the one definition of the physical limit. A *bare forward* is the model's own forward,
called with arguments that are ready: ids, positions, the additive mask, a cache that knows where to
write. It reads as many tokens over as wide a span as the forward that it stands for, on a cache of
its own. For a model of transformers that is the call of its module, or of the program it was
compiled to, without padding; for a ``LanguageModel`` of one's own it is ``forward`` with ready
tensors, so what that prepares itself counts as the forward's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from treegraft.backends.graphs import CompiledModel
from treegraft.backends.hf import HFLanguageModel
from treegraft.core.language_model import LanguageModel

__all__ = ["BareForwards", "Forward", "ForwardLog"]


_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward that a model was asked for.

    Attributes
    ----------
    model : name in the log. n : tokens read. span : width of ``visible`` (K).
    last_only : whether only the last query's logits were asked for.
    """

    model: str
    n: int
    span: int
    last_only: bool


class ForwardLog:
    """While it is entered, notes the forwards of some models; they are left as they were.

    A model that is named twice is noted under its first name.
    """

    def __init__(self, models: Mapping[str, LanguageModel]) -> None:
        self._models = {id(model): (name, model) for name, model in reversed([*models.items()])}
        self._noted: list[Forward] = []

    def __enter__(self) -> ForwardLog:
        for name, model in self._models.values():
            # On the instance, in front of the method of its class.
            model.forward = self._noting(name, model.forward)  # type: ignore[method-assign]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _, model in self._models.values():
            del model.forward

    def take(self) -> list[Forward]:
        """What was noted since the last time, in order."""
        noted, self._noted = self._noted, []
        return noted

    def _noting(self, name: str, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(
            cache: Any,
            tokens: Tensor,
            rows: Tensor,
            positions: Tensor,
            visible: Tensor,
            last_only: bool = False,
        ) -> Tensor:
            self._noted.append(Forward(name, tokens.shape[0], visible.shape[1], last_only))
            return forward(cache, tokens, rows, positions, visible, last_only)

        return noted


class BareForwards:
    """Runs forwards of given shapes with ready arguments and takes their time by ``clock``."""

    def __init__(
        self, models: Mapping[str, LanguageModel], clock: Callable[[], float] = perf_counter
    ) -> None:
        self._models = models
        self._clock = clock
        self._caches: dict[str, tuple[Any, int]] = {}

    def seconds(self, forward: Forward) -> float:
        """Time of one bare forward of this shape, work on a device included."""
        model = self._models[forward.model]
        device = torch.device(model.device)
        with torch.no_grad():
            call = self._ready(model, forward)
            _synchronise(device)
            start = self._clock()
            call()
            _synchronise(device)
            return self._clock() - start

    def _cache(self, model: LanguageModel, forward: Forward) -> Any:
        cache, n_rows = self._caches.get(forward.model, (None, 0))
        if n_rows < forward.span:
            limit = model.max_positions or 2 * forward.span
            n_rows = max(forward.span, min(2 * forward.span, limit))
            cache = model.new_cache(n_rows)
            if not isinstance(model, HFLanguageModel | CompiledModel):
                # A model of one's own may look at what it has read.
                for first in range(0, n_rows, _CHUNK):
                    _reading(model, cache, first, min(first + _CHUNK, n_rows), True)()
            self._caches[forward.model] = (cache, n_rows)
        return cache

    def _ready(self, model: LanguageModel, forward: Forward) -> Callable[[], Any]:
        cache, first = self._cache(model, forward), forward.span - forward.n
        if not isinstance(model, HFLanguageModel | CompiledModel):
            return _reading(model, cache, first, forward.span, forward.last_only)
        # The device is named, not made the default: that slows every call inside down.
        rows = torch.arange(first, forward.span, device="cpu")
        visible = torch.ones(forward.n, forward.span, dtype=torch.bool, device="cpu")
        given = (cache, rows % model.vocab_size, rows, rows, visible, forward.last_only)
        if isinstance(model, CompiledModel):
            return model.ready(*given)
        return model.ready(model.call, *given)


def _reading(
    model: LanguageModel, cache: Any, first: int, last: int, last_only: bool
) -> Callable[[], Any]:
    """A call that reads rows ``first`` to ``last - 1`` causally, all arguments ready."""
    rows = torch.arange(first, last, device="cpu")
    visible = torch.arange(last, device="cpu") <= rows[:, None]
    # Of the class: on the instance a log may stand in front of it.
    forward = type(model).forward
    return lambda: forward(model, cache, rows % model.vocab_size, rows, rows, visible, last_only)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
