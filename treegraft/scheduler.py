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

__all__ = ["build_scheduler", "costs_elsewhere"]


def costs_elsewhere(config: PipelineConfig, artefact: Artefact) -> tuple[str, ...]:
    """That a learned scheduler weighs by the costs of another machine, if it does.

    Its schedules hold anywhere, and tokens never depend on them; only they may not be the best.
    """
    backend = config.backend.model_dump(mode="json")
    here = environment(backend.pop("dtype"), backend.pop("device"), backend=backend)
    costs = artefact.header.get("costs")
    wrong = elsewhere(costs.get("environment") or {} if isinstance(costs, dict) else {}, here)
    if wrong is None or not isinstance(config.scheduler, ValueConfig):
        return ()
    return (
        f"scheduler {config.scheduler.artefact!r} weighs drafters by costs that were measured "
        f"elsewhere ({wrong}); the tokens are the same, and schedules may be better with your own: "
        "treegraft schedule calibrate and fit",
    )


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
