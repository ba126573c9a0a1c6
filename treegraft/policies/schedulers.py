"""Schedulers: who drafts in which layer."""

from __future__ import annotations

from typing import Literal, final

from pydantic import BaseModel, ConfigDict, Field

from treegraft.core.roles import DraftState, Scheduler
from treegraft.core.stats import StepRecord


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
