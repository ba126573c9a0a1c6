"""Puts traces and a cost model together: what every schedule would have taken.

Traces count (nodes of forwards, tokens), a cost model knows seconds. So one collection serves
every device and backend, and targets whose cost is scaled.

Shapes: R rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treegraft.backends.cost import DRAFTER, TARGET, CostModel
from treegraft.core.errors import ScheduleError
from treegraft.scheduling.collect import MOST_SCHEDULES
from treegraft.scheduling.traces import Traces
from treegraft.scheduling.value import Problem

__all__ = ["decision_seconds", "problem_of", "row_seconds"]

_BESIDE = 4
"""Nodes beside which text that a drafter has still to read is counted."""


def row_seconds(traces: Traces, costs: CostModel) -> NDArray[np.float64]:
    """float64 [R]: seconds of a step that stops in each row.

    Layers cost their forwards and what their drafter takes besides; stopping costs the target's
    forward over the pruned tree and the rest of the step. Accepted nodes that a drafter has not
    read are read with its next call; their share of that forward is counted here.
    """
    names = list(traces.header["signature"]["drafters"])
    missing = [name for name in names if name not in costs.host.visit]
    if missing:
        raise ScheduleError(
            f"the cost model knows drafters {', '.join(costs.host.visit)}, the traces are of "
            f"{', '.join(names)}; measure again with: treegraft schedule calibrate"
        )
    _check_models(traces, costs)
    a = traces.arrays
    context = a["position"][a["step"]].astype(np.float64) - 1.0
    layer, parent, action = a["layer"], a["parent"], a["action"]
    visit = np.zeros(layer.shape[0])
    late = np.zeros(layer.shape[0])
    for i, name in enumerate(names):
        curve = costs.curves.get(DRAFTER + name)
        mine = action == i
        visit[mine] += costs.host.visit[name]
        # Whoever acted before has gone through the caches.
        turn = mine & (action[np.maximum(parent, 0)] != i)
        visit[turn] += costs.host.turn.get(name, 0.0)
        if curve is None:
            continue
        for column in range(a["widths"].shape[1]):
            visit[mine] += curve.at(a["widths"][mine, column], context[mine])
        visit[turn & (a["widths"].sum(1) > 0)] += curve.turn
        ends = a["finish"][:, 0] == i
        late[ends] += curve.at(a["finish"][ends, 1], context[ends])
        unread = a["unread"][:, i].astype(np.float64)
        late += curve.at(_BESIDE + unread, context) - curve.at(
            np.full_like(unread, _BESIDE), context
        )
    total = visit.copy()
    for number in range(1, int(layer.max(initial=0)) + 1):
        rows = np.flatnonzero(layer == number)
        total[rows] += total[parent[rows]]
    host = costs.host
    late += costs.curves[TARGET].at(a["n_tree"], context)
    late += host.step + host.node * a["n_tree"] + host.drafted * a["n_nodes"]
    return total + late


def _check_models(traces: Traces, costs: CostModel) -> None:
    """ScheduleError if a curve was measured with another model than the traces were made with."""
    signature = traces.header["signature"]
    used = {TARGET: signature["target"]}
    for name, options in signature["drafters"].items():
        if options["kind"] == "lm":
            used[DRAFTER + name] = options["model"]
    for name, identity in used.items():
        measured = costs.models.get(name, identity)
        if measured != identity and not (name == TARGET and costs.texts_of == identity):
            raise ScheduleError(
                f"the costs were measured for another {name} ({measured}) than the traces' "
                f"({identity}); measure again with: treegraft schedule calibrate"
            )


def decision_seconds(traces: Traces, costs: CostModel) -> NDArray[np.float64]:
    """float64 [R]: seconds that a learned scheduler takes in a step that stops in each row.

    It reads the new text, and decides before every layer and, where there could be one more, that
    there is none.
    """
    decisions = traces.arrays["layer"].astype(np.float64)
    decisions[traces.arrays["described"]] += 1.0
    found: NDArray[np.float64] = costs.host.follow + costs.host.decision * decisions
    return found


def problem_of(traces: Traces, costs: CostModel, decided: bool = False) -> Problem:
    """The schedules of traces with their tokens and seconds.

    ``decided`` : whether seconds are those of a learned scheduler, whose decisions take their time.
    """
    a = traces.arrays
    depth = int(traces.header["signature"]["builder"].get("depth", int(a["layer"].max())))
    return Problem(
        a["step"],
        a["parent"],
        a["action"],
        a["layer"],
        a["n_new"],
        row_seconds(traces, costs) + (decision_seconds(traces, costs) if decided else 0.0),
        traces.n_drafters,
        complete=traces.n_drafters**depth <= MOST_SCHEDULES,
        text=traces.prompt,
        lengths=np.array([prompt.n_new for prompt in traces.prompts]),
    )
