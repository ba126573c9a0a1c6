"""Logits processors: other people's rules that change a row of logits given the text before it.

transformers' ``generate`` calls a list of them for every token, in a fixed order in which
treegraft's own sampling settings (core/sampling.py) are some of the entries. What may be relied on
is stated in docs/method.md, section 2. Shapes: n tokens of the text so far, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from treegraft.core.errors import PolicyError, ProcessorError, TreegraftError


class Place(IntEnum):
    """Between which of treegraft's own settings a processor stands, in the order of ``generate``.

    The user's own list ends ``AFTER_MINIMUM``. ``AFTER_TEMPERATURE`` and ``AFTER_MIN_P`` count only
    above temperature 0, ``LAST`` always.
    """

    BEFORE_PENALTY = 0
    AFTER_PENALTY = 1
    AFTER_MINIMUM = 2
    AFTER_TEMPERATURE = 3
    AFTER_MIN_P = 4
    LAST = 5


@dataclass(frozen=True, slots=True)
class Processor:
    """One rule, and what is known about it.

    Attributes
    ----------
    name : how errors call it.
    call : takes the text so far, int64 [1, n], and its row of logits, float [1, V]; returns the new
        row. Both are its own to keep or to write to.
    place : where it stands. stateless : its answer depends on its arguments alone.
    """

    name: str
    call: Callable[[Tensor, Tensor], Tensor]
    place: Place
    stateless: bool


@dataclass(slots=True)
class Processors:
    """The processors of one text, and the law under which those that keep state stay exact.

    ``would_end`` says whether tokens that came next would complete a stop string.
    """

    entries: tuple[Processor, ...]
    would_end: Callable[[Sequence[int]], bool] | None = None
    _last: tuple[int, tuple[int, ...]] | None = field(default=None, init=False)

    @property
    def stateful(self) -> tuple[Processor, ...]:
        """Those that may answer differently when they are called twice."""
        return tuple(entry for entry in self.entries if not entry.stateless)

    def ended(self, path: Sequence[int], eos: Sequence[int]) -> bool:
        """Whether the text is over within ``path``: no processor is asked about what comes after.

        ``generate`` would not ask it either, and a grammar has no answer there.
        """
        if any(token in eos for token in path):
            return True
        return bool(path) and self.would_end is not None and self.would_end(path)

    def visit(self, text: Sequence[int], path: Sequence[int]) -> None:
        """Take note that the place after ``text`` and ``path`` is asked about now.

        Raises
        ------
        PolicyError : if a processor keeps state, and this place does not follow the last one.
        """
        if self._last is not None and any(not entry.stateless for entry in self.entries):
            n_text, before = self._last
            n_before = n_text + len(before)
            since = [*text[n_text:], *path]
            if len(text) + len(path) != n_before + 1 or tuple(since[: len(before)]) != before:
                name = next(entry.name for entry in self.entries if not entry.stateless)
                raise PolicyError(
                    f"logits processor {name!r} may keep state, so a verifier must ask about every "
                    f"place of the text once and in order; it asked about the one after "
                    f"{len(text) + len(path)} tokens next to the one after {n_before}"
                )
        self._last = len(text), tuple(path)

    def apply(self, place: Place, ids: Tensor, scores: Tensor) -> Tensor:
        """float [1, V]: ``scores`` after the processors of ``place``, given ``ids`` int64 [1, n].

        Raises
        ------
        ProcessorError : one of them raised, or returned something else than a row of logits.
        """
        for entry in self.entries:
            if entry.place is place:
                scores = _checked(entry, ids, scores)
        return scores

    def check_open(self, ids: Tensor, raw: Tensor, scores: Tensor, sampled: bool) -> None:
        """ProcessorError if ``scores`` float [V] say nothing about what to take, unless ``raw`` do.

        That is where all are excluded, one is NaN, or one is infinite and is to be drawn from.
        """
        top = float(scores.max())
        if math.isfinite(top) or (top == math.inf and not sampled):
            return
        if math.isnan(top) and bool(raw.isnan().any()):
            return  # the target's own, which the pipeline has a notice for
        fault = "give NaN" if math.isnan(top) else "give an infinite logit to draw"
        if top == -math.inf:
            fault = "leave no token that may come"
        names = ", ".join(entry.name for entry in self.entries)
        raise ProcessorError(
            f"the logits processors {fault} after {ids.shape[1]} tokens; they are {names}"
        )


def _checked(entry: Processor, ids: Tensor, scores: Tensor) -> Tensor:
    n = ids.shape[1]
    try:
        answer = entry.call(ids, scores)
    except TreegraftError:
        raise
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        raise ProcessorError(
            f"logits processor {entry.name!r} failed after {n} tokens: "
            f"{type(error).__name__}: {message}"
        ) from error
    if not isinstance(answer, torch.Tensor) or not answer.is_floating_point():
        found = str(getattr(answer, "dtype", type(answer).__name__))
    elif answer.shape != scores.shape:
        found = f"shape {list(answer.shape)}"
    elif answer.device != scores.device:
        found = f"a tensor on {answer.device}"
    else:
        return answer
    raise ProcessorError(
        f"logits processor {entry.name!r} must return float logits of shape {list(scores.shape)} "
        f"on {scores.device}, found {found} after {n} tokens"
    )
