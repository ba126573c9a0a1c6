"""What the target makes of two tokens at one place, and whether rounding alone could decide.

Decoding one token at a time, over a tree and in one causal forward are the same sums in another
order. In float32 and float64 that is never taken for an excuse. In bfloat16 and float16 a
difference is a *tie* if logits that differ by no more than rounding from those of a causal forward
would make the target take either token.

Rounding moves each logit by at most ``rounding_units / 2 * eps * m``. eps is that of the type. The
magnitude m is the largest |logit| of the tokens in question, or the median |logit| of the
vocabulary if that is larger (the first choice may happen to stand near 0). The units are
``max(2, sqrt(L))``: two logits are each rounded to half a unit in the last place in each of two
forwards; and a residual stream is rounded again in each of L layers, whose errors add up like the
steps of a random walk. (Measured on the zoo's target, 12 layers: 28 of 5403 first choices flip
between the three orders in bfloat16, across gaps of up to 1.5 units, where 3.5 are excused.)

Two tokens without filters or penalties so tie if neither lies more than ``units * eps * m`` below
the first choice, divided by the temperature if sampled, where noise is added before they are
compared. With top-k, top-p, min-p or a repetition penalty the moved logits go through these as the
target's own do: a token at the edge of what is kept ties although its value is minus infinity.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from treegraft.backends.adapter import AdapterReport
from treegraft.core.language_model import LanguageModel, extend
from treegraft.core.sampling import History, Noise, Sampling, process

__all__ = [
    "Candidate",
    "Choice",
    "adapter_report",
    "arithmetic_type",
    "choice_between",
    "is_exact",
    "rounding_units",
]

_EXACT = (torch.float32, torch.float64)
_FEWEST_UNITS = 2.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token at one place of the text.

    Attributes
    ----------
    token : its id.
    logit : the target's own. value : what the target compares: the logit after the sampling
        settings, with the noise of the seed if sampled; minus infinity where they exclude it.
    """

    token: int
    logit: float
    value: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data; None for what is not finite, which JSON cannot hold."""
        return {
            "token": self.token,
            "logit": _finite(self.logit),
            "value": _finite(self.value),
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """What the target makes of two tokens at one place, by a causal forward without any tree.

    Attributes
    ----------
    first : the target's own first choice.
    expected, found : plain decoding's token and the drafted one; None where a text had ended.
    tolerance : largest gap that rounding explains, in units of ``value``; 0 in exact arithmetic.
    is_tie : whether rounding alone may decide between the two tokens.
    """

    first: Candidate
    expected: Candidate | None
    found: Candidate | None
    tolerance: float
    is_tie: bool

    @property
    def gap(self) -> float:
        """How far the worse of the two tokens lies below the first choice."""
        if self.expected is None or self.found is None:
            return math.inf
        return self.first.value - min(self.expected.value, self.found.value)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the gap."""
        return {
            "first": self.first.as_dict(),
            "expected": None if self.expected is None else self.expected.as_dict(),
            "found": None if self.found is None else self.found.as_dict(),
            "gap": _finite(self.gap),
            "tolerance": _finite(self.tolerance),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def choice_between(
    target: LanguageModel,
    text: Sequence[int],
    n_prompt: int,
    expected: int | None,
    found: int | None,
    sampling: Sampling,
) -> Choice:
    """What the target makes of ``expected`` and ``found`` after ``text``.

    Parameters
    ----------
    text : ids before the place, of which the first ``n_prompt`` are the prompt.
    expected, found : plain decoding's token and the drafted one; None where a text had ended,
        which never is a tie.
    """
    # As in a pipeline, whatever the caller's modes and default device are.
    with torch.no_grad(), torch.device("cpu"):
        cache = target.new_cache(len(text))
        logits = torch.empty(0)
        for _, rows in extend(target, cache, text, 0, last_only=True):
            logits = rows[-1]
        history = History(list(text), n_prompt)
        noise = Noise(sampling.seed, target.vocab_size).at(len(text))

        def values_of(raw: Tensor, settings: Sampling = sampling) -> Tensor:
            values = process(raw, settings, history)
            return values if sampling.temperature == 0.0 else values + noise.to(values)

        values = values_of(logits)
        unfiltered = values_of(logits, replace(sampling, top_k=None, top_p=None, min_p=None))
        first = int(values.argmax())
        tokens = [token for token in (expected, found) if token is not None]
        dtype = arithmetic_type(target)
        moved = 0.0
        if not is_exact(dtype):
            moved = rounding_units(target) / 2 * torch.finfo(dtype).eps
            moved *= _magnitude(logits, [first, *tokens])
        is_tie = (
            moved > 0.0
            and len(tokens) == 2
            and all(
                _may_win(token, logits, moved, values_of, unfiltered > unfiltered[token])
                for token in tokens
            )
        )
        candidates = {
            token: Candidate(token, float(logits[token]), float(values[token]))
            for token in (first, *tokens)
        }
    return Choice(
        first=candidates[first],
        expected=None if expected is None else candidates[expected],
        found=None if found is None else candidates[found],
        tolerance=2 * moved / (sampling.temperature or 1.0),
        is_tie=is_tie,
    )


def _magnitude(logits: Tensor, tokens: list[int]) -> float:
    """The largest |logit| of ``tokens``, or the median of all; what is not finite has no size."""
    finite = logits.isfinite()
    if not finite.any():
        return 0.0
    largest = logits[tokens][finite[tokens]].abs().amax().item() if finite[tokens].any() else 0.0
    return max(largest, float(logits[finite].abs().median()))


def _may_win(
    token: int,
    logits: Tensor,
    moved: float,
    values_of: Callable[[Tensor], Tensor],
    rivals: Tensor,
) -> bool:
    """Whether ``token`` can come out first if each of ``logits`` float [V] moves by ``moved``.

    ``rivals`` bool [V] : what would beat it if no filter excluded anything.

    Tried are the logits as they are and the two ways of moving them that do most for the token.
    Against all others raises its value and its rank as far as can be, which matters at the edge of
    a filter. Against its rivals alone pushes out of a filter what would beat it. Several filters at
    once could ask for a mixture of the two; a tie that needs one is not excused.
    """
    against_all = logits - moved
    against_rivals = torch.where(rivals, logits - moved, logits + moved)
    against_all[token] = against_rivals[token] = logits[token] + moved
    outcomes = (values_of(logits), values_of(against_all), values_of(against_rivals))
    # Minus infinity is no way to win, nor is NaN.
    return any(
        bool(outcome[token] >= outcome.max()) and bool(outcome[token].isfinite())
        for outcome in outcomes
    )


def rounding_units(target: LanguageModel) -> float:
    """Gap that rounding explains in the target's narrow type, in units of eps * magnitude."""
    report = adapter_report(target)
    return max(_FEWEST_UNITS, math.sqrt(report.n_layers if report is not None else 0))


def adapter_report(model: LanguageModel) -> AdapterReport | None:
    """What the adapter decided; a model of one's own need not have a report."""
    report = getattr(model, "report", None)
    return report if isinstance(report, AdapterReport) else None


def arithmetic_type(target: LanguageModel) -> torch.dtype:
    """The type that the target's sums round like; a model of one's own counts as exact.

    That of its weights, except where CUDA multiplies float32 as TF32: TF32 keeps as many bits of
    the mantissa as float16.
    """
    report = adapter_report(target)
    if report is None:
        return torch.float64
    # The getter also takes in the older switches (allow_tf32, set_float32_matmul_precision) and
    # what is set for all of torch; "none" is torch's own default, which is float32 as it stands.
    precision = torch.backends.cuda.matmul.fp32_precision
    if report.dtype == torch.float32 and torch.device(target.device).type == "cuda":
        return torch.float32 if precision in ("none", "ieee") else torch.float16
    return report.dtype


def is_exact(dtype: torch.dtype) -> bool:
    """Whether a difference in arithmetic of this type is a fault and never a tie."""
    return dtype in _EXACT
