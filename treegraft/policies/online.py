"""The scheduler that learns while it decodes, from what every drafter would have proposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from treegraft.core.offers import Hindsight
from treegraft.core.roles import DraftState, Scheduler
from treegraft.core.stats import StepRecord
from treegraft.policies.costs import RunningCosts, Seconds
from treegraft.policies.replay import PATIENCE, Habits, OfferLog, Replay, Schedules

__all__ = ["Hedge", "OnlineConfig", "OnlineScheduler"]

Floats = NDArray[np.float64]


class OnlineConfig(BaseModel):
    """Learn from every verified path what each call schedule would have made of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["online"] = "online"
    learning_rate: float = Field(
        4.0,
        gt=0.0,
        le=100.0,
        allow_inf_nan=False,
        description="How fast weight goes to schedules that would have been quicker; a larger "
        "number follows the last tokens, a smaller one the whole text.",
    )
    share: float = Field(
        0.002,
        ge=0.0,
        lt=1.0,
        description="Part of the weight that is dealt out evenly with every token, so that a "
        "changing text is followed; 0 never gives up on what was best so far.",
    )
    refresh: int = Field(
        24,
        ge=1,
        description="Steps in a row that may pass without news of a drafter, which a model gives "
        "only of what it reads; then a schedule that begins with it is drawn.",
    )
    seed: int = Field(0, ge=0, description="Of the draws of schedules.")
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
class Hedge:
    """Exponential weights over N experts with full information (Freund and Schapire 1997).

    With learning rate h and share a, gains of T rounds in [0, 1] and experts that are all awake,
    the gains of the weights add up to at least those of any one expert less
    ``(ln N - T ln(1 - a)) / h + h T / 8`` (fixed share: Herbster and Warmuth 1998). An expert that
    is asleep keeps its place among the others, and the bound holds over the rounds in which it is
    awake (Freund et al. 1997).
    """

    def __init__(self, n: int, learning_rate: float, share: float) -> None:
        self._learning_rate, self._share = learning_rate, share
        self.weights: Floats = np.full(n, 1.0 / n)
        """float64 [N], which sum to 1."""

    def learn(self, gains: Floats) -> None:
        """A round's ``gains`` float64 [N] in [0, 1]; NaN for an expert that is asleep."""
        awake = ~np.isnan(gains)
        if not awake.any():
            return
        gains, before = np.where(awake, gains, 0.0), self.weights
        grown = before * np.exp(self._learning_rate * gains)
        # Who is asleep keeps its weight, and so do the others in all.
        grown *= np.where(awake, before[awake].sum() / grown[awake].sum(), 1.0)
        # However bad an expert was, its weight can come back.
        weights = np.maximum(np.where(awake, grown, before), _LEAST)
        self.weights = (1.0 - self._share) * weights / weights.sum() + self._share / len(weights)


_LEAST = 1e-100
_WORST = 2.0
"""Seconds a token, in those of a plain step, from which on one schedule is as bad as another."""
_RECENT = 16
"""Visits that mean numbers of nodes look back on."""
_EVERY = 8
"""Tokens after which the schedules are replayed."""


@final
class OnlineScheduler(Scheduler):
    """Hedge over call schedules, each of which decodes the text again on its own.

    After a step every drafter says what it would have proposed along the verified path, whether or
    not it was called (cf. Not-a-Bandit, arXiv 2510.20064); look-ups look it up, a model knows it of
    the nodes that it has read, and of text that it was not called for (up to 16 tokens) once it has
    read that with its next call. No forward is run for it. From this follows how many tokens each
    schedule would have accepted at each place, and with the seconds of visits, nodes and the
    target's forward what a token of the text would have cost with it (``replay``). Those are the
    losses of ``Hedge``, in units of a plain step; each step's schedule is drawn by its weights.

    Where a model has told nothing of a place 16 tokens later, schedules that would have asked it
    there are asleep, and their record stays as it is. So there is no exploration but for this: a
    drafter of which there was no news in ``refresh`` steps, or whose cost is not known yet, is
    called once, and in the beginning one step is plain, where costs are measured.

    What was learned is kept from text to text. Measured costs make schedules, and with them
    statistics, differ from run to run; with ``costs`` of all drafters and ``target_cost`` given
    nothing is measured, and the same texts draw the same schedules.

    Parameters
    ----------
    names : of the drafters. depth, budget : of the builder. habits : of the drafters in its trees.
    """

    asks_offers = True

    def __init__(
        self, config: OnlineConfig, names: Sequence[str], depth: int, budget: int, habits: Habits
    ) -> None:
        self._config = config
        self._budget = budget
        self.schedules = Schedules(len(names), depth)
        self.hedge = Hedge(len(self.schedules), config.learning_rate, config.share)
        self._costs = RunningCosts(names, config.costs, config.target_cost, config.node_cost)
        self._log = OfferLog(len(names))
        self._replay = Replay(self.schedules, habits)
        self._dice = np.random.default_rng(config.seed)
        # Steps without news by drafter, and mean nodes of a visit: in the first layer, and later.
        self._silence = [0] * len(names)
        self._visited = [False] * len(names)
        self._added: Floats = np.zeros((2, len(names)))
        # Nodes that the target reads of trees that were too large; the builder's budget if fixed.
        self._read = float(budget)
        self._calls: tuple[int, ...] = ()
        self._n_nodes: list[int] = []
        # Steps that are still to be compared with what was to be expected of them.
        self._carried_out: list[tuple[int, tuple[int, ...], int]] = []

    def choose(self, state: DraftState) -> int | None:
        if state.layer == 1:
            self._calls = self.schedules.calls[self._draw()]
            self._n_nodes = []
        self._n_nodes.append(state.tree.n_nodes)
        return self._calls[state.layer - 1] if state.layer <= len(self._calls) else None

    def _draw(self) -> int:
        weights = self.hedge.weights
        due = self._due()
        if due is not None:
            weights = np.where(self.schedules.first == due, weights, 0.0)
        # Rounding may leave the last sum below the die.
        sums = np.cumsum(weights)
        place = np.searchsorted(sums, self._dice.random() * sums[-1], side="right")
        return min(int(place), len(sums) - 1)

    def _due(self) -> int | None:
        """The drafter that the step has to begin with; -1 for a plain step, None for no one."""
        if self._budget and not self._costs.has_read(1):
            return -1
        silent = [
            i
            for i, silence in enumerate(self._silence)
            if silence >= self._config.refresh
            or (not self._visited[i] and self._costs.visit(i) is None)
        ]
        due = max(silent, key=lambda i: self._silence[i], default=None)
        return due if due is None or (self.schedules.first == due).any() else None

    def hindsight(self, hindsight: Hindsight) -> None:
        if self._log.follow(hindsight):
            self._replay.forget(self._log.begin)
            self._carried_out.clear()
        for i, offers in enumerate(hindsight.offers):
            self._silence[i] = 0 if offers else self._silence[i] + 1
        if self._log.end - self._replay.done >= _EVERY:
            self._learn()

    def _learn(self) -> None:
        patient = self._log.end - PATIENCE
        self._carried_out = [
            step
            for step in self._carried_out
            if not self._replay.compare(self._log, *step) and step[0] > patient
        ]
        seconds = self._seconds()
        plain = seconds[0]
        if not plain > 0.0:
            return
        for share in self._replay.advance(self._log):
            self.hedge.learn(1.0 - np.minimum(share * seconds / plain / _WORST, 1.0))

    def _seconds(self) -> Floats:
        """float64 [N]: of a step of each schedule; NaN where a drafter's cost is not known."""
        costs = self._costs
        visits = [costs.visit(i) for i in range(len(self._silence))]
        per_visit = np.array([np.nan if cost is None else cost for cost in visits])
        nodes = np.minimum(self.schedules.summed(*self._added), self._read) + 1
        return self.schedules.summed(per_visit, per_visit) + costs.forward(nodes) + costs.rest

    def finish(self, record: StepRecord) -> None:
        self._costs.learn(record)
        # How many nodes each layer has added; the end of the last one only the record tells.
        ends = [*self._n_nodes[1:], sum(record.drafted) + 1]
        for layer, (who, begin, end) in enumerate(
            zip(record.calls, self._n_nodes, ends, strict=False)
        ):
            later = min(layer, 1)
            weight = 1 / _RECENT if self._added[later, who] else 1.0
            self._added[later, who] += weight * (end - begin - self._added[later, who])
        if sum(record.drafted) >= record.n_tree:
            self._read += (record.n_tree - 1 - self._read) / _RECENT
        if record.calls:
            place = self._log.end - record.n_new
            self._carried_out.append((place, record.calls, record.n_path))
        for who in self._calls[:1]:
            # Past its context limit it may be called and not act.
            self._silence[who], self._visited[who] = 0, True
        self._calls, self._n_nodes = (), []
