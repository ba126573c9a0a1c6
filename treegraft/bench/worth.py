"""Whether drafting paid in a run, from the run itself and a few plain forwards."""

from __future__ import annotations

from statistics import median

from treegraft.bench.bare import BareForwards, Forward
from treegraft.core.stats import Statistics
from treegraft.pipeline import Pipeline

__all__ = ["gain_over_plain"]

_ROUNDS = 5
_LEAST_STEPS = 16


def gain_over_plain(pipeline: Pipeline, statistics: Statistics, n_text: int) -> float | None:
    """Tokens per second of a drafted run over those of plain decoding, prefill left out of both.

    A plain step is taken to be one forward over one token in a text of ``n_text`` tokens, which
    is a little less than it takes, so the gain comes out a little small. None where nothing was
    drafted, or too little to say.
    """
    if not statistics.drafters or statistics.target_calls < _LEAST_STEPS:
        return None
    target = pipeline.target
    span = max(1, min(n_text, target.max_positions or n_text))
    forwards = BareForwards({"target": target})
    taken = [forwards.seconds(Forward("target", 1, span, False)) for _ in range(_ROUNDS)]
    # The first finds everything cold.
    return statistics.tokens_per_second_decode * median(taken[1:])
