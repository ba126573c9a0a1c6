"""The boundary around a drafter: its time is charged to it, its faults carry its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from treegraft.core.errors import DrafterError
from treegraft.core.roles import Commit, Context, Drafter, ScoringDrafter, TreeBackend
from treegraft.core.stopwatch import Stopwatch
from treegraft.core.tree import Proposals


def guard(drafter: Drafter, name: str, watch: Stopwatch) -> Drafter:
    """Wrap ``drafter`` so that it is timed as ``name`` and its answers are checked."""
    kind = _GuardedScoringDrafter if isinstance(drafter, ScoringDrafter) else _GuardedDrafter
    return kind(drafter, _Boundary(name, watch))


class _Boundary:
    def __init__(self, name: str, watch: Stopwatch) -> None:
        self.name = name
        self.watch = watch

    @contextmanager
    def call(self, method: str) -> Iterator[None]:
        with self.watch.stage(self.name):
            try:
                yield
            except DrafterError:
                raise
            except Exception as error:
                raise DrafterError(
                    f"drafter {self.name!r} failed in {method}: {type(error).__name__}: {error}"
                ) from error

    def propose(
        self, drafter: Drafter, tree: TreeBackend, positions: Tensor, width: int
    ) -> Proposals:
        with self.call("propose"):
            proposals = drafter.propose(tree, positions, width)
            if not isinstance(proposals, Proposals):
                raise DrafterError(
                    f"drafter {self.name!r} must return Proposals from propose, found "
                    f"{type(proposals).__name__}"
                )
            proposals.check(tree.n_nodes)
            return proposals


@final
class _GuardedDrafter(Drafter):
    def __init__(self, drafter: Drafter, boundary: _Boundary) -> None:
        self._drafter = drafter
        self._boundary = boundary
        self.target_top = drafter.target_top
        self.limit = drafter.limit

    def begin(self, context: Context) -> None:
        with self._boundary.call("begin"):
            self._drafter.begin(context)

    def observe(self, commit: Commit) -> None:
        with self._boundary.call("observe"):
            self._drafter.observe(commit)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        return self._boundary.propose(self._drafter, tree, positions, width)


@final
class _GuardedScoringDrafter(ScoringDrafter):
    def __init__(self, drafter: ScoringDrafter, boundary: _Boundary) -> None:
        self._drafter = drafter
        self._boundary = boundary
        self.target_top = drafter.target_top
        self.limit = drafter.limit

    def begin(self, context: Context) -> None:
        with self._boundary.call("begin"):
            self._drafter.begin(context)

    def observe(self, commit: Commit) -> None:
        with self._boundary.call("observe"):
            self._drafter.observe(commit)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        return self._boundary.propose(self._drafter, tree, positions, width)

    def score(self, tree: TreeBackend) -> Tensor:
        with self._boundary.call("score"):
            scores = self._drafter.score(tree)
            if not isinstance(scores, torch.Tensor) or scores.shape != (tree.n_nodes,):
                raise DrafterError(
                    f"drafter {self._boundary.name!r} must return scores of shape "
                    f"[{tree.n_nodes}] from score, found {getattr(scores, 'shape', scores)!r}"
                )
            return scores
