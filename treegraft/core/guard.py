"""The boundary around drafters and their models: time is charged to them, faults carry names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor

from treegraft.core.errors import DrafterError, TreeError
from treegraft.core.language_model import LanguageModel
from treegraft.core.offers import Offers
from treegraft.core.roles import Commit, Context, Drafter, ScoringDrafter, TreeBackend
from treegraft.core.stopwatch import DRAFTER, FORWARD, SCHEDULER, Stopwatch
from treegraft.core.tree import Proposals


def guard(drafter: Drafter, name: str, watch: Stopwatch) -> Drafter:
    """Wrap ``drafter`` so that it is timed as ``name`` and its answers are checked."""
    boundary = _Boundary(name, watch)
    if isinstance(drafter, ScoringDrafter):
        return _GuardedScoringDrafter(drafter, boundary)
    return _GuardedDrafter(drafter, boundary)


class _Call:
    """Charges the time inside to the drafter and turns what it raises into one line."""

    __slots__ = ("_boundary", "_method", "_stage")

    def __init__(self, boundary: _Boundary, method: str, stage: str) -> None:
        self._boundary = boundary
        self._method = method
        self._stage = stage

    def __enter__(self) -> None:
        self._boundary.watch.enter(self._stage)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._boundary.watch.leave()
        if isinstance(error, Exception):
            raise DrafterError(
                f"drafter {self._boundary.name!r} failed in {self._method}: "
                f"{type(error).__name__}: {error}"
            ) from error


class _Boundary:
    def __init__(self, name: str, watch: Stopwatch) -> None:
        self.name = name
        self.stage = DRAFTER + name
        self.watch = watch

    def call(self, method: str, stage: str | None = None) -> _Call:
        return _Call(self, method, stage or self.stage)

    def propose(
        self, drafter: Drafter, tree: TreeBackend, positions: Tensor, width: int
    ) -> Proposals:
        with self.call("propose"):
            proposals = drafter.propose(tree, positions, width)
            if not isinstance(proposals, Proposals):
                raise TypeError(f"Proposals must be returned, found {type(proposals).__name__}")
            proposals.check(tree.n_nodes)
            n_paths, n_positions = proposals.positions.shape[0], positions.shape[0]
            if n_paths > n_positions * width:
                raise TreeError(
                    f"at most {width} paths under each of {n_positions} positions were asked for, "
                    f"found {n_paths}"
                )
        return proposals

    def offers(
        self, drafter: Drafter, tree: TreeBackend, path: Sequence[int], width: int
    ) -> Offers | None:
        """Timed as what the scheduler does: no drafting needs it."""
        with self.call("offers", SCHEDULER):
            offers = drafter.offers(tree, path, width)
            if offers is not None and not isinstance(offers, Mapping):
                raise TypeError(
                    f"a mapping of places to paths must be returned, found {type(offers).__name__}"
                )
        return offers


@final
class _GuardedDrafter(Drafter):
    def __init__(self, drafter: Drafter, boundary: _Boundary) -> None:
        self._drafter = drafter
        self._boundary = boundary
        self.target_top = drafter.target_top
        self.tree_top = drafter.tree_top
        self.target_hidden = drafter.target_hidden
        self.limit = drafter.limit

    def begin(self, context: Context) -> None:
        with self._boundary.call("begin"):
            self._drafter.begin(context)

    def observe(self, commit: Commit) -> None:
        with self._boundary.call("observe"):
            self._drafter.observe(commit)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        return self._boundary.propose(self._drafter, tree, positions, width)

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers | None:
        return self._boundary.offers(self._drafter, tree, path, width)


@final
class _GuardedScoringDrafter(ScoringDrafter):
    def __init__(self, drafter: ScoringDrafter, boundary: _Boundary) -> None:
        self._drafter = drafter
        self._boundary = boundary
        self.target_top = drafter.target_top
        self.tree_top = drafter.tree_top
        self.target_hidden = drafter.target_hidden
        self.limit = drafter.limit

    def begin(self, context: Context) -> None:
        with self._boundary.call("begin"):
            self._drafter.begin(context)

    def observe(self, commit: Commit) -> None:
        with self._boundary.call("observe"):
            self._drafter.observe(commit)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        return self._boundary.propose(self._drafter, tree, positions, width)

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers | None:
        return self._boundary.offers(self._drafter, tree, path, width)

    def score(self, tree: TreeBackend) -> Tensor:
        with self._boundary.call("score"):
            scores = self._drafter.score(tree)
        if not isinstance(scores, torch.Tensor) or scores.shape != (tree.n_nodes,):
            found = list(scores.shape) if isinstance(scores, torch.Tensor) else type(scores)
            raise DrafterError(
                f"drafter {self._boundary.name!r} must return scores of shape "
                f"[{tree.n_nodes}] from score, found {found}"
            )
        return scores


@final
class TimedModel(LanguageModel):
    """A drafter's model whose forwards are charged to a stage of their own (``stopwatch.FORWARD``).

    So that what a drafter computes around its forwards can be told from the forwards.
    """

    def __init__(self, model: LanguageModel, name: str, watch: Stopwatch) -> None:
        self._model = model
        self._stage = FORWARD + name
        self._watch = watch
        self.name = model.name
        self.vocab_size = model.vocab_size
        self.max_positions = model.max_positions
        self.device = model.device
        # The counts themselves: the model goes on counting in them.
        self.forward_counts = model.forward_counts

    def new_cache(self, n_rows: int, old: Any = None) -> Any:
        return self._model.new_cache(n_rows, old)

    def forward(
        self,
        cache: Any,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Tensor:
        with self._watch.stage(self._stage):
            return self._model.forward(cache, tokens, rows, positions, visible, last_only)

    def move_(self, cache: Any, source: Tensor, target: Tensor) -> None:
        self._model.move_(cache, source, target)
