"""Schedulers: who drafts in which layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Literal, final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from treegraft.core.roles import DraftState, Scheduler, TreeBackend
from treegraft.core.stats import StepRecord
from treegraft.policies.costs import WINDOW, RunningCosts, Seconds


class NeverConfig(BaseModel):
    """Never call a dearer drafter: the cheapest one drafts every layer (a paper endpoint)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["never"] = "never"


class AlwaysConfig(BaseModel):
    """Always call the dearest drafter: it drafts every layer (the other paper endpoint)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["always"] = "always"


class FixedConfig(BaseModel):
    """The same schedule in every step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["fixed"] = "fixed"
    calls: tuple[str | int, ...] = Field(
        min_length=1,
        description="Drafter of each layer, by name or by number from 0; drafting stops after the "
        "last entry, so a longer list drafts longer paths.",
    )


class PriorityConfig(BaseModel):
    """The first drafter in the list that has something to propose drafts the step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["priority"] = "priority"
    hand_over: bool = Field(
        False,
        description="Whether the next drafter takes over where one that had something finds no "
        "more; else drafting then stops, and one drafter has made the whole tree.",
    )


class BudgetedConfig(BaseModel):
    """The dearest drafter in the first layers, the cheapest in the rest (the paper's B0)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["budgeted"] = "budgeted"
    calls: int | None = Field(
        None,
        ge=0,
        le=64,
        description="Layers of a step in which the dearest drafter acts; null takes how many of "
        "its visits fit into the time of a target forward, as measured in the last steps.",
    )


class CostAwareConfig(BaseModel):
    """Call whoever brings the most accepted tokens per second, or stop; needs calibration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["cost_aware"] = "cost_aware"
    trials: int = Field(
        8,
        ge=1,
        le=1000,
        description="Times each drafter is called before its record counts; a larger number starts "
        "slower and surer.",
    )
    retry_after: int = Field(
        16,
        ge=1,
        description="Steps without a call after which a drafter is tried once more; a smaller "
        "number follows a changing text sooner and wastes more calls.",
    )
    costs: dict[str, Seconds] = Field(
        {}, description="Seconds of a visit by drafter name; what is not given is measured."
    )
    target_cost: Seconds | None = Field(
        None, description="Seconds of a target forward over the root alone; null measures it."
    )
    node_cost: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = Field(
        0.0, description="Seconds that each verified node adds to target_cost."
    )


@final
class NeverScheduler(Scheduler):
    """Drafter 0 in every layer."""

    def __init__(self, config: NeverConfig) -> None:
        del config

    def choose(self, state: DraftState) -> int | None:
        return 0

    def finish(self, record: StepRecord) -> None:
        """Nothing to learn."""


@final
class AlwaysScheduler(Scheduler):
    """The last drafter in every layer."""

    def __init__(self, config: AlwaysConfig) -> None:
        del config

    def choose(self, state: DraftState) -> int | None:
        return state.n_drafters - 1

    def finish(self, record: StepRecord) -> None:
        """Nothing to learn."""


@final
class FixedScheduler(Scheduler):
    """Layer l is drafted by ``calls[l - 1]``, a drafter number."""

    def __init__(self, calls: tuple[int, ...]) -> None:
        self._calls = calls

    def choose(self, state: DraftState) -> int | None:
        return self._calls[state.layer - 1] if state.layer <= len(self._calls) else None

    def finish(self, record: StepRecord) -> None:
        """Nothing to learn."""


@final
class PriorityScheduler(Scheduler):
    """Drafters in the order of the list, each until a layer of its hands nothing on.

    That is llama.cpp's rule for several drafters: the first one whose draft is not empty makes the
    step's draft alone. What a drafter has to propose shows only when it acts, so a layer that found
    nothing is one of the builder's layers all the same.
    """

    def __init__(self, config: PriorityConfig) -> None:
        self._hand_over = config.hand_over
        self._turn = 0

    def choose(self, state: DraftState) -> int | None:
        # Whose turn it is, and not who acted: past its context limit another one acts instead.
        if state.layer == 1:
            self._turn = 0
        elif not state.reached[-1]:
            if any(state.reached) and not self._hand_over:
                return None
            self._turn += 1
        return self._turn if self._turn < state.n_drafters else None

    def finish(self, record: StepRecord) -> None:
        """Nothing to learn."""


@final
class BudgetedScheduler(Scheduler):
    """The last drafter in the first B0 layers of a step, drafter 0 in the others.

    Without a given number B0 is the target's forward over a visit of the last drafter, rounded
    down, in medians of the last 32 steps; the first step, of which nothing is known, has all
    layers. Measured times make the drafting, and never the text, differ from run to run.
    """

    def __init__(self, config: BudgetedConfig) -> None:
        self._calls = config.calls
        self._dearest = 0
        self._forwards: deque[float] = deque(maxlen=WINDOW)
        self._visits: deque[float] = deque(maxlen=WINDOW)

    def choose(self, state: DraftState) -> int | None:
        self._dearest = state.n_drafters - 1
        return self._dearest if state.layer <= self._most() else 0

    def _most(self) -> float:
        if self._calls is not None:
            return self._calls
        if not self._forwards or not self._visits:
            return float("inf")
        return median(self._forwards) // max(median(self._visits), 1e-9)

    def finish(self, record: StepRecord) -> None:
        if "target" in record.seconds:
            self._forwards.append(record.seconds["target"])
        for index, seconds in zip(record.calls, record.visit_seconds, strict=False):
            if index == self._dearest:
                self._visits.append(seconds)


_RECENT = 12
"""Visits that a drafter's record of gains looks back on; short, as calibration moves its scale."""


@dataclass(slots=True)
class _Visit:
    """A visit: nodes before it, nodes and mass of the frontier, and what it brought."""

    n_before: int
    n_frontier: int
    mass: float
    n_new: int = 0
    gain: float = 0.0


@final
class CostAwareScheduler(Scheduler):
    """Greedy in expected accepted tokens per second, against the rate that is reached anyway.

    With calibrated scores the path probabilities of the nodes that a visit adds sum up to the
    accepted tokens that it can be expected to bring. A drafter's record is that gain per mass (sum
    of path probabilities) of the frontier that it drafted from, over its last visits; its expected
    gain is the record times the mass of the frontier at hand. Its cost is the median seconds of its
    last visits and what the target's forward takes longer over the nodes that it tends to add. The
    highest gain per second wins if it beats the tokens per second of the last steps, which is when
    the visit raises that rate; else drafting stops.

    Cold start: each drafter is first called ``trials`` times, the least tried first; that comes
    back for one call after ``retry_after`` steps without one. Nobody is asked again where it just
    found nothing. Measured costs make schedules, and with them statistics, differ from run to run;
    with ``costs`` of all drafters and ``target_cost`` given nothing is measured.

    Parameters
    ----------
    names : of the drafters, for ``costs``. budget : most nodes that are verified.
    """

    def __init__(self, config: CostAwareConfig, names: Sequence[str], budget: int) -> None:
        self._config = config
        self._costs = RunningCosts(names, config.costs, config.target_cost, config.node_cost)
        self._budget = budget
        n = len(names)
        self._tries = [0] * n
        self._last_try = [0] * n
        self._record: list[deque[_Visit]] = [deque(maxlen=_RECENT) for _ in range(n)]
        # Tokens and seconds of the last steps.
        self._pace: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._n_steps = 0
        self._forget()

    def _forget(self) -> None:
        """Of this step, which may have ended half-way."""
        self._chosen: list[int] = []
        self._visits: list[_Visit] = []
        self._tree: TreeBackend | None = None

    def choose(self, state: DraftState) -> int | None:
        if state.layer == 1:
            self._forget()
        self._close()
        # Where a layer found nothing the frontier is the same, and so is what they would find.
        idle: set[int] = set()
        for layer in range(len(state.calls) - 1, -1, -1):
            if state.reached[layer]:
                break
            idle |= {state.calls[layer], self._chosen[layer]}
        able = [i for i in range(state.n_drafters) if i not in idle]
        scores = state.tree.logprob.numpy()
        mass = float(np.exp(scores[state.frontier.numpy()]).sum())
        n_frontier = state.frontier.shape[0]
        index = self._best(able, mass, n_frontier, state.tree.n_nodes)
        if index is not None:
            self._tree = state.tree
            self._chosen.append(index)
            self._visits.append(_Visit(state.tree.n_nodes, n_frontier, mass))
        return index

    def _best(self, able: Sequence[int], mass: float, n_frontier: int, n_nodes: int) -> int | None:
        tries = {i: self._tries[i] + self._chosen.count(i) for i in able}
        untried = [i for i in able if self._is_due(i, tries[i])]
        if untried:
            return min(untried, key=lambda i: (tries[i], i))
        worth = {i: self._worth(i, mass, n_frontier, n_nodes) for i in able if self._record[i]}
        if not worth:
            return None
        best = max(worth, key=lambda i: (worth[i], -i))
        return best if worth[best] > self._rate() else None

    def _is_due(self, index: int, tries: int) -> bool:
        if tries < self._config.trials:
            return True
        overdue = self._n_steps - self._last_try[index] >= self._config.retry_after
        return overdue and index not in self._chosen

    def _worth(self, index: int, mass: float, n_frontier: int, n_nodes: int) -> float:
        """Expected accepted tokens per second of a visit."""
        record = self._record[index]
        drafted_from = sum(visit.mass for visit in record)
        if not drafted_from:
            return 0.0
        gain = mass * sum(visit.gain for visit in record) / drafted_from
        n_positions = sum(visit.n_frontier for visit in record)
        more = n_frontier * sum(visit.n_new for visit in record) / n_positions
        before = min(n_nodes, self._budget + 1)
        after = min(n_nodes + more, self._budget + 1)
        first, last = map(float, self._costs.forward([before, after]))
        return gain / max((self._costs.visit(index) or 0.0) + last - first, 1e-9)

    def _rate(self) -> float:
        seconds = sum(seconds for _, seconds in self._pace)
        return sum(tokens for tokens, _ in self._pace) / seconds if seconds else 0.0

    def _close(self) -> None:
        """Note what the last visit brought."""
        if self._tree is not None:
            visit = self._visits[-1]
            visit.n_new = self._tree.n_nodes - visit.n_before
            chance = np.exp(self._tree.logprob.numpy())
            above = self._tree.parent.numpy()[visit.n_before :]
            # However sure the drafter is of each, one child at most is accepted.
            under = np.bincount(above, weights=chance[visit.n_before :], minlength=len(chance))
            visit.gain = float(np.minimum(under, chance).sum())
            self._tree = None

    def finish(self, record: StepRecord) -> None:
        self._close()
        self._n_steps += 1
        for index in self._chosen:
            self._tries[index] += 1
            self._last_try[index] = self._n_steps
        # The last one chosen may have had nobody to act for it.
        for index, visit in zip(record.calls, self._visits, strict=False):
            self._record[index].append(visit)
        self._costs.learn(record)
        self._pace.append((record.n_new, self._costs.spent(record)))
        self._forget()
