"""How far scores can be taken at their word: predicted against observed acceptance.

A score is a prediction that its token is accepted where its parent was. Each verified step puts the
scores of all nodes to the test whose parent it kept. ``before`` takes a score as the drafter gave
it (a token without one is a prediction of 0, as that is how it ranks), ``after`` as calibration
mapped it before the step was verified: both are judged on the same nodes, by what came later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treegraft.core.errors import ConfigError, TreegraftError
from treegraft.pipeline import Pipeline
from treegraft.policies.calibration import Outcomes
from treegraft.prompts import Prompt

__all__ = ["Bucket", "DrafterReliability", "Reliability", "measure_reliability", "reliability_of"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Predictions from ``low`` to below ``high`` (the last bucket includes 1).

    Attributes
    ----------
    n : their number. predicted : their mean. observed : the share that was accepted.
    """

    low: float
    high: float
    n: int
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True)
class Reliability:
    """One set of predictions.

    Attributes
    ----------
    n : predictions. buckets : those that are not empty, rising.
    brier : mean squared distance of prediction and outcome (0 or 1).
    ece : expected calibration error, |predicted - observed| of the buckets weighted by n.
    """

    n: int
    buckets: tuple[Bucket, ...]
    brier: float
    ece: float


@dataclass(frozen=True, slots=True)
class DrafterReliability:
    """What one drafter's scores were worth, as given and as calibrated, on the same nodes.

    ``n_unscored`` of them had no score of its; ``scored`` leaves those out.
    """

    drafter: str
    n_unscored: int
    before: Reliability
    after: Reliability
    scored_before: Reliability
    scored_after: Reliability


def reliability_of(
    predicted: NDArray[np.float64], accepted: NDArray[np.bool_], n_buckets: int = 10
) -> Reliability:
    """The reliability of ``predicted`` float64 [m] in 0..1, in buckets of equal width."""
    n = predicted.shape[0]
    if n == 0:
        return Reliability(0, (), 0.0, 0.0)
    place = np.minimum((predicted * n_buckets).astype(np.int64), n_buckets - 1)
    buckets = tuple(
        Bucket(
            low=b / n_buckets,
            high=(b + 1) / n_buckets,
            n=int((place == b).sum()),
            predicted=float(predicted[place == b].mean()),
            observed=float(accepted[place == b].mean()),
        )
        for b in np.unique(place).tolist()
    )
    return Reliability(
        n=n,
        buckets=buckets,
        brier=float(((predicted - accepted) ** 2).mean()),
        ece=sum(b.n * abs(b.predicted - b.observed) for b in buckets) / n,
    )


def measure_reliability(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    on_text: Callable[[], None] | None = None,
    **overrides: object,
) -> list[DrafterReliability]:
    """Decode ``prompts`` and judge every drafter's scores on the way.

    ``pipeline`` must calibrate (ConfigError otherwise); it goes on learning. ``overrides`` as in
    ``Pipeline.stream``.
    """
    calibration = pipeline.calibration
    if calibration is None:
        raise ConfigError("reliability needs calibration.kind 'online', found 'none'")
    if not prompts:
        raise TreegraftError("reliability needs at least one prompt, found none")
    seen: list[Outcomes] = []
    earlier, calibration.observer = calibration.observer, seen.append
    try:
        for prompt in prompts:
            pipeline.generate(prompt.content, **overrides)
            if on_text is not None:
                on_text()
    finally:
        calibration.observer = earlier
    return [_judged(name, i, seen) for i, name in enumerate(pipeline.drafter_names)]


def _judged(name: str, number: int, seen: Sequence[Outcomes]) -> DrafterReliability:
    def column(field: str) -> NDArray[np.float64]:
        parts = [getattr(outcomes, field)[outcomes.drafter == number] for outcomes in seen]
        return np.concatenate(parts) if parts else np.empty(0)

    accepted = column("accepted").astype(bool)
    raw = column("raw")
    before = np.exp(np.minimum(raw, 0.0)).astype(np.float64)
    after = np.exp(column("calibrated")).astype(np.float64)
    scored = raw > -np.inf
    return DrafterReliability(
        drafter=name,
        n_unscored=int((~scored).sum()),
        before=reliability_of(before, accepted),
        after=reliability_of(after, accepted),
        scored_before=reliability_of(before[scored], accepted[scored]),
        scored_after=reliability_of(after[scored], accepted[scored]),
    )
