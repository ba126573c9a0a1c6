"""The scheduler of a pipeline, made from its config, and whether a learned one fits it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

import numpy as np

from treegraft.backends.artefact import Artefact
from treegraft.backends.cost import elsewhere, environment
from treegraft.components import build_component, component_class
from treegraft.config import PipelineConfig
from treegraft.core.errors import ScheduleError
from treegraft.core.language_model import LanguageModel
from treegraft.core.roles import Scheduler, ScoringDrafter, TreeBuilder
from treegraft.policies.features import FEATURES_VERSION, StateFeatures
from treegraft.policies.grafts import (
    BudgetSwapConfig,
    ReplaceConfig,
    TreegraftConfig,
)
from treegraft.policies.online import OnlineConfig, OnlineScheduler
from treegraft.policies.replay import Habits
from treegraft.policies.schedulers import (
    CostAwareConfig,
    CostAwareScheduler,
    FixedConfig,
    FixedScheduler,
)
from treegraft.policies.value import ValueConfig, ValueNetwork, ValueScheduler
from treegraft.signature import completed, difference, signature

__all__ = ["build_scheduler", "fitted_elsewhere"]


def fitted_elsewhere(config: PipelineConfig, artefact: Artefact | None) -> tuple[str, ...]:
    """That a learned scheduler weighs by the costs of another machine, or knows other texts' ends.

    Its schedules hold anywhere, and tokens never depend on them; only they may not be the best.
    """
    if artefact is None or not isinstance(config.scheduler, ValueConfig):
        return ()
    name = config.scheduler.artefact
    found = []
    backend = config.backend.model_dump(mode="json")
    here = environment(backend.pop("dtype"), backend.pop("device"), backend=backend)
    costs = artefact.header.get("costs")
    wrong = elsewhere(costs.get("environment") or {} if isinstance(costs, dict) else {}, here)
    if wrong is not None:
        found.append(
            f"scheduler {name!r} weighs drafters by costs that were measured elsewhere ({wrong}); "
            "the tokens are the same, and schedules may be better with your own: "
            "treegraft schedule calibrate and fit"
        )
    other = _sampling_difference(config, artefact)
    if other is not None:
        found.append(
            f"scheduler {name!r} was fitted for texts of another sampling ({other}); the tokens "
            "are the same, and schedules may be better with traces of this one: "
            "treegraft schedule collect and fit"
        )
    return tuple(found)


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What decides how predictable texts are; without a temperature, none of the others but the last
changes a token.
"""


def _sampling_difference(config: PipelineConfig, artefact: Artefact) -> str | None:
    data = artefact.header.get("data")
    there = data.get("sampling") if isinstance(data, dict) else None
    if not isinstance(there, dict):
        return None
    here = config.sampling.model_dump(mode="json")
    greedy = not here["temperature"] and not there.get("temperature")
    names = ("repetition_penalty",) if greedy else _SAMPLING
    wrong = [
        f"{n} {there[n]} there, {here[n]} here" for n in names if there.get(n, here[n]) != here[n]
    ]
    return "; ".join(wrong) or None


def build_scheduler(
    config: PipelineConfig,
    builder: TreeBuilder,
    artefact: Artefact | None,
    models: Mapping[str, LanguageModel],
) -> Scheduler:
    """The scheduler of ``config``; ``artefact`` is what a learned one was distilled to."""
    settings = config.scheduler
    if isinstance(settings, FixedConfig):
        # Names become numbers here, where the drafters are known.
        return FixedScheduler(config.fixed_calls)
    if isinstance(settings, CostAwareConfig):
        return CostAwareScheduler(settings, config.drafter_names, builder.budget)
    if isinstance(settings, OnlineConfig):
        names, habits = config.drafter_names, _habits(config)
        return OnlineScheduler(settings, names, builder.depth, builder.budget, habits)
    if isinstance(settings, ValueConfig):
        assert artefact is not None
        return _value_scheduler(config, settings, builder, artefact, models)
    scheduler: Scheduler = build_component("scheduler", settings)
    return scheduler


def _habits(config: PipelineConfig) -> Habits:
    """How the drafters act in the trees of ``config``; a graft of one's own recovers nothing."""
    classes = [component_class("drafter", drafter) for drafter in config.drafters]
    scores = np.array([issubclass(found, ScoringDrafter) for found in classes], dtype=np.bool_)
    graft = config.graft
    if isinstance(graft, TreegraftConfig):
        recovers = graft.reselect and graft.recover and graft.lookback > 0
        anywhere = graft.reach == "any"
    else:
        recovers = isinstance(graft, ReplaceConfig | BudgetSwapConfig) and graft.lookback > 0
        anywhere = False
    riders = tuple(map(config.drafter_names.index, config.ride_along))
    return Habits(scores & recovers, anywhere, scores, riders)


def _value_scheduler(
    config: PipelineConfig,
    settings: ValueConfig,
    builder: TreeBuilder,
    artefact: Artefact,
    models: Mapping[str, LanguageModel],
) -> ValueScheduler:
    """ScheduleError unless the artefact was made for this pipeline; names what differs."""
    header, where = artefact.header, f"scheduler.artefact {settings.artefact!r}"
    wrong = difference(completed(header["signature"], config), signature(config, models))
    if wrong is not None:
        raise ScheduleError(f"{where} was made for another pipeline: {wrong}")
    features = StateFeatures(
        len(config.drafters), max(builder.depth, 1), builder.width, builder.budget
    )
    if header.get("features_version") != FEATURES_VERSION:
        raise ScheduleError(
            f"{where} was fitted on features of version {header.get('features_version')!r}, this "
            f"treegraft has {FEATURES_VERSION}; collect and fit again"
        )
    if header["features"] != list(features.names):
        pairs = zip_longest(header["features"], features.names)
        there, here = next((a, b) for a, b in pairs if a != b)
        raise ScheduleError(
            f"{where} was fitted on other features: {there!r} there and {here!r} here; collect and "
            "fit again"
        )
    return ValueScheduler(settings, ValueNetwork(**artefact.arrays), features)
