"""The components that one decoding runs on, and whose name a fault of theirs bears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from treegraft.core.errors import PolicyError, TreegraftError
from treegraft.core.language_model import LanguageModel
from treegraft.core.roles import (
    Drafter,
    GraftPolicy,
    Scheduler,
    TreeBackend,
    TreeBuilder,
    Verifier,
)
from treegraft.core.stopwatch import Stopwatch
from treegraft.fallback import Fallback


@dataclass(frozen=True, slots=True)
class Parts:
    """The components of a pipeline; ``tree`` makes an empty working tree.

    ``riders`` are the numbers of the drafters that ride along, ``leftover`` says whether what is
    left of a tree starts the next one (docs/method.md section 6). ``fallback`` decides for which
    steps drafting pays; without it all are drafted. ``foreign`` says whether a part that touches
    trees is somebody's own: each pruned tree is then held against the laws of a tree.
    """

    target: LanguageModel
    drafters: Sequence[Drafter]
    names: Sequence[str]
    builder: TreeBuilder
    graft: GraftPolicy
    scheduler: Scheduler
    verifier: Verifier
    tree: Callable[[], TreeBackend]
    watch: Stopwatch
    riders: Sequence[int] = ()
    leftover: bool = False
    fallback: Fallback | None = None
    foreign: bool = True


def named(role: str, part: object, method: str) -> _Named:
    """A context: turn whatever a policy raises into one line that says whose fault it is."""
    return _Named(role, part, method)


class _Named:
    """A class and not a generator: a step enters some ten of them."""

    __slots__ = ("_method", "_part", "_role")

    def __init__(self, role: str, part: object, method: str) -> None:
        self._role, self._part, self._method = role, part, method

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, TreegraftError):
            raise PolicyError(
                f"{self._role} {type(self._part).__name__!r} failed in {self._method}: "
                f"{type(error).__name__}: {error}"
            ) from error
