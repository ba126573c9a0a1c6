"""Measures the cost model of a pipeline: forwards by themselves, and the rest of real steps.

Forwards are timed alone on a grid (``backends.cost``). Then the pipeline decodes with schedules
drawn at random: how much longer forwards take in decoding gives each curve its scale, and what a
step takes besides is fitted to the layers of each drafter and to the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treegraft.backends.cost import (
    DRAFTER,
    TARGET,
    CostModel,
    Curve,
    HostCosts,
    clock_of,
    environment,
    measure_curves,
)
from treegraft.backends.identity import model_identity
from treegraft.core.language_model import LanguageModel
from treegraft.core.roles import DraftState, Scheduler
from treegraft.core.stats import StepRecord
from treegraft.pipeline import Pipeline
from treegraft.policies.drafters.lm import LmConfig
from treegraft.policies.features import StateFeatures, TextFeatures
from treegraft.policies.value import Decider, ValueNetwork
from treegraft.prompts import Prompt

__all__ = ["CostCalibration", "calibrate", "curve_models", "pipeline_environment"]

CONTEXTS = (48, 256, 768)
_FEWEST_LATER = 20
"""Forwards of a drafter after a layer of its own, from which on they are told from others."""
_HIDDEN = 64
"""Units of the networks with which decisions are timed; what they reckon is the least of it."""
_WIDTHS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def curve_models(pipeline: Pipeline) -> dict[str, LanguageModel]:
    """The models that have a curve, by its name: the target, and drafters that are models."""
    config = pipeline.config
    found = {TARGET: pipeline.models[config.target.model]}
    for name, drafter in zip(config.drafter_names, config.drafters, strict=True):
        if isinstance(drafter, LmConfig):
            found[DRAFTER + name] = pipeline.models[drafter.model]
    return found


def pipeline_environment(pipeline: Pipeline) -> dict[str, Any]:
    """``environment`` of a pipeline: its backend settings and its temperature are part of it.

    Noise and the law of every verified node take their time, which greedy decoding does not.
    """
    backend = pipeline.config.backend.model_dump(mode="json")
    device = backend.pop("device")
    temperature = pipeline.config.sampling.temperature
    return environment(backend.pop("dtype"), device, backend=backend, temperature=temperature)


@dataclass(frozen=True, slots=True)
class CostCalibration:
    """A cost model and how well it predicts.

    Attributes
    ----------
    costs : with ``checked`` filled in. steps : that were decoded to measure.
    stages : predicted over measured seconds by stage, on the half of the steps that nothing was
        fitted to.
    """

    costs: CostModel
    steps: int
    stages: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "predicted_over_measured": self.costs.checked,
            "stages": self.stages,
            "steps": self.steps,
            "costs": self.costs.as_dict(),
        }


@final
class _Drawn(Scheduler):
    """Draws each layer's drafter; one layer in five drafting stops.

    Before that it goes through what ``value`` would do, with weights that are drawn too.

    Attributes
    ----------
    follow, decision : seconds of reading a step's new text, and of each decision.
    """

    def __init__(self, seed: int, pipeline: Pipeline, clock: Callable[[], float]) -> None:
        self._dice = np.random.default_rng(seed)
        self._clock = clock
        n, builder = len(pipeline.drafter_names), pipeline.builder
        depth = max(builder.depth, 1)
        self._features = StateFeatures(n, depth, builder.width, builder.budget)
        self._text = TextFeatures()
        n_features, h = len(self._features.names), _HIDDEN
        sizes = [(n_features, h), (h,), (h, h), (h,), (h, n + 1), (n + 1,)]
        weights = [self._dice.normal(size=(depth, *s)).astype(np.float32) for s in sizes]
        self._decider = Decider(ValueNetwork(*weights))
        self._taken = 0.0
        self.follow: list[float] = []
        self.decision: list[float] = []

    def choose(self, state: DraftState) -> int | None:
        clock = self._clock
        began = clock()
        text = self._text.follow(state.text)
        read = clock()
        self._decider.best(state.layer, self._features.values(state, text, 0))
        self._note(read - began, clock() - read, state.layer == 1)
        if self._dice.random() < 0.2:
            return None
        return int(self._dice.integers(state.n_drafters))

    def finish(self, record: StepRecord) -> None:
        """Nothing to learn."""

    def _note(self, follow: float, decision: float, first: bool) -> None:
        self._taken += follow + decision
        self.decision.append(decision)
        # Later layers have nothing new to read.
        if first:
            self.follow.append(follow)

    def take(self) -> float:
        """Seconds that were gone through so since the last call."""
        taken, self._taken = self._taken, 0.0
        return taken


_Noted = list[tuple[int, int, float]]


@contextmanager
def _metered(
    models: Mapping[str, LanguageModel], clock: Callable[[], float]
) -> Iterator[dict[str, _Noted]]:
    """Inside, forwards of the models are noted by name: width, context and seconds of each.

    The models themselves are watched, not stand-ins for them, so that compiled ones stay compiled.
    """
    noted: dict[str, _Noted] = {name: [] for name in models}

    def watched(forward: Callable[..., Any], mine: _Noted) -> Callable[..., Any]:
        def run(
            cache: Any,
            tokens: Tensor,
            rows: Tensor,
            positions: Tensor,
            visible: Tensor,
            *rest: Any,
            **more: Any,
        ) -> Any:
            start = clock()
            logits = forward(cache, tokens, rows, positions, visible, *rest, **more)
            width = int(tokens.shape[0])
            mine.append((width, int(visible.shape[1]) - width, clock() - start))
            return logits

        return run

    try:
        for name, model in models.items():
            vars(model)["forward"] = watched(model.forward, noted[name])
        yield noted
    finally:
        for model in models.values():
            vars(model).pop("forward", None)


@dataclass(slots=True)
class _Step:
    """A decoded step: forwards as (curve, width, context, seconds), and the rest.

    Attributes
    ----------
    turns : of each forward, whether another drafter or the target acted before it; None where the
        layers do not tell.
    """

    forwards: list[tuple[str, int, int, float]]
    turns: list[bool | None]
    rest: float
    row: list[float] = field(default_factory=list)


def calibrate(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    repeats: int = 7,
    tokens: int = 48,
    seed: int = 0,
    on_part: Callable[[object], None] | None = None,
) -> CostCalibration:
    """Measure the cost model of a pipeline.

    Parameters
    ----------
    pipeline : with drafters. prompts : to decode, at least one; the more the surer.
    repeats : rounds of timing alone. tokens : new tokens per prompt.
    on_part : called after each round and each prompt, for progress.
    """
    models = curve_models(pipeline)
    builder = pipeline.builder
    most_drafted = 1 + builder.width + builder.depth * builder.width**2
    most = {
        name: min(builder.budget + 1 if name == TARGET else max(most_drafted, 32), 1024)
        for name in models
    }
    widths = {name: [w for w in _WIDTHS if w < limit] + [limit] for name, limit in most.items()}
    clock = clock_of(pipeline.config.backend.device)
    curves = measure_curves(models, widths, CONTEXTS, repeats, on_part, clock)
    drawn = _Drawn(seed, pipeline, clock)
    steps = _decode(pipeline, drawn, prompts, tokens, clock, on_part)
    fitted, held = steps[::2], steps[1::2]
    curves = {name: _in_decoding(curve, name, fitted) for name, curve in curves.items()}
    names = pipeline.drafter_names
    host = replace(
        _host(fitted, names), follow=_calm_mean(drawn.follow), decision=_calm_mean(drawn.decision)
    )
    costs = CostModel(
        pipeline_environment(pipeline),
        {name: model_identity(model) for name, model in models.items()},
        curves,
        host,
    )
    stages = _check(costs, held or fitted, names)
    return CostCalibration(replace(costs, checked=stages["step"]), len(steps), stages)


def _decode(
    pipeline: Pipeline,
    drawn: _Drawn,
    prompts: Sequence[Prompt],
    tokens: int,
    clock: Callable[[], float],
    on_part: Callable[[object], None] | None,
) -> list[_Step]:
    """Decode with drawn schedules and metered models; the first step of a text does not count."""
    config = pipeline.config
    decoding = pipeline.with_scheduler(drawn)
    by_curve = {TARGET: config.target.model}
    for name, drafter in zip(config.drafter_names, config.drafters, strict=True):
        if isinstance(drafter, LmConfig):
            by_curve[DRAFTER + name] = drafter.model
    steps: list[_Step] = []
    for prompt in prompts:
        encoded = pipeline.encode(prompt.content)
        number = 0
        for record, seconds, by_model in _noting(decoding, encoded, tokens, clock):
            decided = drawn.take()
            forwards = _assigned({name: by_model[source] for name, source in by_curve.items()})
            number += 1
            if number == 1:
                continue
            # Drawing takes no time to speak of; what decisions take is kept apart.
            rest = seconds - decided - sum(each for *_, each in forwards)
            row = _row(record.n_tree, sum(record.drafted), record.calls, len(config.drafters))
            turns = _turns([who for who, *_ in forwards], record.calls, pipeline.drafter_names)
            steps.append(_Step(forwards, turns, rest, row))
        if on_part is not None:
            on_part(prompt)
    return steps


def _noting(
    pipeline: Pipeline, prompt: Sequence[int], tokens: int, clock: Callable[[], float]
) -> Iterator[tuple[StepRecord, float, dict[str, _Noted]]]:
    """The record of each step, its seconds, and the forwards in it."""
    with _metered(pipeline.models, clock) as noted:
        began = clock()
        for chunk in pipeline.stream(prompt, max_new_tokens=tokens, min_new_tokens=0):
            seconds = clock() - began
            yield chunk.step, seconds, {name: list(forwards) for name, forwards in noted.items()}
            for forwards in noted.values():
                forwards.clear()
            began = clock()


def _assigned(noted: Mapping[str, _Noted]) -> list[tuple[str, int, int, float]]:
    """The forwards of a step by curve; where roles share a model the last one is the target's."""
    found = [(TARGET, *noted[TARGET][-1])] if noted[TARGET] else []
    shared = noted[TARGET]
    for name, forwards in noted.items():
        if name != TARGET:
            mine = forwards[:-1] if forwards is shared else forwards
            found += [(name, *forward) for forward in mine]
    return found


def _row(n_tree: int, n_drafted: int, calls: Sequence[int], n_drafters: int) -> list[float]:
    return [
        1.0,
        float(n_tree),
        float(n_drafted),
        *(float(calls.count(i)) for i in range(n_drafters)),
        *(float(_is_turn(calls, i).count(True)) for i in range(n_drafters)),
    ]


def _is_turn(calls: Sequence[int], index: int) -> list[bool]:
    """Of each layer of a drafter, whether it is the first one or follows on another drafter's."""
    return [
        layer == 0 or calls[layer - 1] != index for layer, who in enumerate(calls) if who == index
    ]


def _turns(curves: Sequence[str], calls: Sequence[int], names: Sequence[str]) -> list[bool | None]:
    """``_Step.turns`` of forwards by their curves, where a drafter's are as many as its layers."""
    turns: list[bool | None] = [True if who == TARGET else None for who in curves]
    for index, name in enumerate(names):
        mine = [place for place, who in enumerate(curves) if who == DRAFTER + name]
        layers = _is_turn(calls, index)
        if len(mine) == len(layers):
            for place, is_turn in zip(mine, layers, strict=True):
                turns[place] = is_turn
    return turns


def _in_decoding(curve: Curve, name: str, steps: Sequence[_Step]) -> Curve:
    """The curve with what forwards take in decoding: its scale, and what a turn adds.

    Forwards wider than the grid tell nothing. The fiftieth that took longest for what they are is
    left out: something else held them up.
    """
    cold: list[tuple[float, float]] = []
    warm: list[tuple[float, float]] = []
    for step in steps:
        for (who, width, context, seconds), turn in zip(step.forwards, step.turns, strict=True):
            if who == name and width <= curve.widths[-1] and turn is not None:
                (cold if turn else warm).append((seconds, float(curve.at(width, context))))
    if name == TARGET or len(warm) < _FEWEST_LATER:
        return replace(curve, scale=_scale(cold + warm))
    scale = _scale(warm)
    more = _calm_mean([seconds - scale * alone for seconds, alone in cold])
    return replace(curve, scale=scale, turn=max(more, 0.0))


def _calm_mean(seconds: Sequence[float]) -> float:
    """Mean without the longest fiftieth, in which something else came between; 0 of none."""
    found = sorted(seconds)
    calm = found[: len(found) - len(found) // 50]
    return sum(calm) / len(calm) if calm else 0.0


def _scale(pairs: Sequence[tuple[float, float]]) -> float:
    """Measured over predicted seconds, most of them."""
    found = sorted(pairs, key=lambda pair: pair[0] / pair[1])
    calm = found[: len(found) - len(found) // 50]
    return sum(s for s, _ in calm) / sum(p for _, p in calm) if calm else 1.0


def _host(steps: Sequence[_Step], names: Sequence[str]) -> HostCosts:
    """Least squares with coefficients from 0, of steps that no interruption has stretched."""
    table = np.array([step.row for step in steps])
    rest = np.array([step.rest for step in steps])
    fit = _from_zero(table, rest)
    for _ in range(3):
        # Interruptions only ever add; what lies far above is left out.
        off = rest - table @ fit
        spread = np.median(np.abs(off - np.median(off)))
        calm = off <= np.median(off) + 6 * max(float(spread), 1e-9)
        fit = _from_zero(table[calm], rest[calm])
    visit = dict(zip(names, fit[3:].tolist(), strict=False))
    turn = dict(zip(names, fit[3 + len(names) :].tolist(), strict=True))
    return HostCosts(float(fit[0]), float(fit[1]), float(fit[2]), visit, turn)


def _from_zero(table: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares; coefficients that come out below 0 are set to 0, the lowest first."""
    used = list(range(table.shape[1]))
    fit = np.zeros(table.shape[1])
    while used:
        found, *_ = np.linalg.lstsq(table[:, used], values, rcond=None)
        if found.min() >= 0:
            fit[used] = found
            break
        del used[int(found.argmin())]
    return fit


def _check(costs: CostModel, steps: Sequence[_Step], names: Sequence[str]) -> dict[str, float]:
    """Predicted over measured seconds: all of a step, forwards by curve, and the rest."""
    predicted: dict[str, float] = {}
    measured: dict[str, float] = {}
    host = costs.host
    by_drafter = [costs_of[name] for costs_of in (host.visit, host.turn) for name in names]
    weights = np.array([host.step, host.node, host.drafted, *by_drafter])
    for step in steps:
        for (who, width, context, seconds), turn in zip(step.forwards, step.turns, strict=True):
            curve = costs.curves[who]
            here = float(curve.at(width, context)) + (curve.turn if turn else 0.0)
            predicted[who] = predicted.get(who, 0.0) + here
            measured[who] = measured.get(who, 0.0) + seconds
        predicted["rest"] = predicted.get("rest", 0.0) + float(weights @ np.array(step.row))
        measured["rest"] = measured.get("rest", 0.0) + step.rest
    ratios = {name: predicted[name] / max(measured[name], 1e-12) for name in predicted}
    return {"step": sum(predicted.values()) / max(sum(measured.values()), 1e-12), **ratios}
