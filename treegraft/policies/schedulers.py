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
