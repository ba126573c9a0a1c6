"""Where the seconds of a step go: exclusive wall time by stage."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType

HOST = "host"
SCHEDULER = "scheduler"
DRAFTER = "drafter:"
"""Prefix of a drafter's stage: its name is the user's and may be that of another stage."""
FORWARD = "forward:"
"""Prefix of the stage that holds the forwards of a drafter's model."""


class Stopwatch:
    """Adds wall time to the innermost open stage; what no stage claims is ``host``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stages = [HOST]
        self._since = perf_counter()

    def _charge(self) -> None:
        now = perf_counter()
        stage = self._stages[-1]
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now

    def stage(self, name: str) -> _Stage:
        """A context: charge the time inside to ``name``, and not to the stage around it."""
        return _Stage(self, name)

    def enter(self, name: str) -> None:
        """Open a stage; ``leave`` closes it."""
        self._charge()
        self._stages.append(name)

    def leave(self) -> None:
        """Close the stage that was opened last."""
        self._charge()
        self._stages.pop()

    def lap(self) -> dict[str, float]:
        """Seconds by stage since the last lap; starts the next one."""
        self._charge()
        taken, self.seconds = self.seconds, {}
        return taken

    def skip(self) -> None:
        """Forget the time since the last charge (a caller held the generator, not we)."""
        self._since = perf_counter()


class _Stage:
    """A class and not a generator: a step enters some forty contexts."""

    __slots__ = ("_name", "_watch")

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch = watch
        self._name = name

    def __enter__(self) -> None:
        self._watch.enter(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.leave()
