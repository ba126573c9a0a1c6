"""The components that one decoding runs on, and whose name a fault of theirs bears."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Parts:
    """The components of a pipeline; ``tree`` makes an empty working tree.

    ``riders`` are the numbers of the drafters that ride along, ``leftover`` says whether what is
    left of a tree starts the next one (docs/method.md section 6).
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


@contextmanager
def named(role: str, part: object, method: str) -> Iterator[None]:
    """Turn whatever a policy raises into one line that says whose fault it is."""
    try:
        yield
    except TreegraftError:
        raise
    except Exception as error:
        raise PolicyError(
            f"{role} {type(part).__name__!r} failed in {method}: {type(error).__name__}: {error}"
        ) from error
