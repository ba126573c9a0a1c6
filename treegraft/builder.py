"""The builder of a pipeline, made from its config, and what its budget reckons with."""

from __future__ import annotations

import numpy as np

from treegraft.backends.cost import TARGET, CostModel, environment, load_costs
from treegraft.config import PipelineConfig
from treegraft.core.language_model import LanguageModel
from treegraft.core.roles import TreeBuilder
from treegraft.policies.budget import AutoBudgetBuilder, BudgetCosts, StepSeconds
from treegraft.policies.builders import BestFirstConfig, LayeredConfig

__all__ = ["build_builder", "check_budget_costs"]


def check_budget_costs(config: PipelineConfig) -> None:
    """ScheduleError where the costs of ``builder.budget_costs`` cannot be read."""
    path = _costs_file(config)
    if path is not None:
        load_costs(path)


def build_builder(config: PipelineConfig, made: TreeBuilder, target: LanguageModel) -> TreeBuilder:
    """``made``, or one that finds the budget of its trees where that is auto.

    ScheduleError where the costs are not those of ``target`` here.
    """
    builder = config.builder
    if not isinstance(builder, LayeredConfig | BestFirstConfig) or builder.budget != "auto":
        return made
    costs = builder.budget_costs
    if isinstance(costs, BudgetCosts):
        return AutoBudgetBuilder(made, given(costs), costs.drafting)
    path = _costs_file(config)
    if path is None:
        return AutoBudgetBuilder(made, None)
    backend = config.backend.model_dump(mode="json")
    here = environment(backend.pop("dtype"), backend.pop("device"), backend=backend)
    return AutoBudgetBuilder(made, measured(load_costs(path, {TARGET: target}, here)))


def _costs_file(config: PipelineConfig) -> str | None:
    costs = getattr(config.builder, "budget_costs", None)
    return costs if isinstance(costs, str) else None


def given(costs: BudgetCosts) -> StepSeconds:
    """Seconds of a step from numbers in the config."""
    return lambda nodes, n_text, n_drafted: np.asarray(
        costs.target + costs.node * (nodes.astype(np.float64) - 1.0)
    )


def measured(costs: CostModel) -> StepSeconds:
    """Seconds of a step from a cost model: T(n) at the text's length, and the host's work."""
    curve, host = costs.curves[TARGET], costs.host
    return lambda nodes, n_text, n_drafted: np.asarray(
        curve.at(nodes, n_text - 1) + host.node * nodes + host.drafted * n_drafted + host.step
    )
