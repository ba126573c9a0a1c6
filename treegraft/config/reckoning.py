"""Rules for parts that reckon with costs and chances: who needs what to be given or learned."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from treegraft.policies.calibration import CalibrationConfig
from treegraft.policies.online import OnlineConfig
from treegraft.policies.schedulers import CostAwareConfig

__all__ = ["check_costs", "check_reckoning"]


def check_reckoning(
    scheduler: BaseModel, builder: BaseModel, calibration: CalibrationConfig
) -> None:
    """ValueError where something adds up chances of acceptance and scores are none."""
    if isinstance(scheduler, CostAwareConfig) and calibration.kind == "none":
        raise ValueError(
            "scheduler cost_aware reckons with chances of acceptance: set calibration.kind to "
            "'online', found 'none'"
        )
    if getattr(builder, "budget", None) == "auto" and calibration.kind == "none":
        raise ValueError(
            "builder.budget 'auto' reckons with chances of acceptance: set calibration.kind to "
            "'online', found 'none'"
        )


def check_costs(scheduler: BaseModel, names: Sequence[str]) -> None:
    """ValueError where given costs are of nobody, or of a part of a forward alone."""
    if not isinstance(scheduler, CostAwareConfig | OnlineConfig):
        return
    for name in scheduler.costs:
        if name not in names:
            raise ValueError(
                f"scheduler.costs names drafter {name!r}, found drafters {list(names)}"
            )
    if scheduler.node_cost and scheduler.target_cost is None:
        raise ValueError(
            f"scheduler.node_cost needs scheduler.target_cost, found {scheduler.node_cost} without"
        )
