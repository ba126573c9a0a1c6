"""Graft policies: what a drafter's visit does to the shared tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from treegraft.core.errors import TreeError
from treegraft.core.roles import Drafter, GraftPolicy, ScoringDrafter, Touched, TreeBackend
from treegraft.core.tree import ROOT, Proposals

_Lookback = Field(
    5,
    ge=0,
    le=64,
    description="How many layers above the frontier a scoring drafter may take up again; "
    "a larger lookback recovers more paths that a weak drafter left unexplored.",
)
_Revisit = Field(
    False,
    description="Whether a position that the same drafter already expanded in this step may "
    "be taken again, as in the paper. It brings no new node and uses up a place: with a width "
    "of 1 the tree then never gets deeper than one edge.",
)


class TreegraftConfig(BaseModel):
    """The paper's graft: rescore, reselect with lookback, expand, integrate without removing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["treegraft"] = "treegraft"
    rescore: Literal["every_visit", "once", "never"] = Field(
        "every_visit",
        description="When a scoring drafter replaces the scores of the whole tree: in each of its "
        "visits, in one pass of the dearest that acted before the tree is pruned, or never.",
    )
    reselect: bool = Field(
        True,
        description="Whether a scoring drafter takes the best positions within the lookback; if "
        "not, it expands the frontier.",
    )
    recover: bool = Field(
        True,
        description="Whether nodes that have children may be positions of a scoring drafter; if "
        "not, only leaves.",
    )
    lookback: int = _Lookback
    reach: Literal["frontier", "any"] = Field(
        "frontier",
        description="Depths of the positions of a scoring drafter: from the lookback down to the "
        "frontier, or any. Only with any do the deeper tokens of a path that a look-up found "
        "compete.",
    )
    revisit: bool = _Revisit

    @model_validator(mode="after")
    def _check(self) -> TreegraftConfig:
        if self.reach == "any" and not self.reselect:
            raise ValueError("reach any needs reselect true, found false: the frontier is expanded")
        return self


class UnionConfig(BaseModel):
    """Every drafter extends the frontier and keeps the scores that it finds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["union"] = "union"


class ReplaceConfig(BaseModel):
    """The first scoring drafter of a step throws away what look-ups drafted (destructive)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["replace"] = "replace"
    lookback: int = _Lookback
    revisit: bool = _Revisit


class BudgetSwapConfig(BaseModel):
    """The paper's graft, then part of the budget goes to look-ups (cf. arXiv 2605.20104)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["budget_swap"] = "budget_swap"
    swap: int = Field(
        16,
        ge=1,
        le=1023,
        description="Places of the budget that look-ups fill after pruning; a larger number keeps "
        "fewer of the tree's best nodes.",
    )
    lookback: int = _Lookback
    revisit: bool = _Revisit


@final
class TreegraftGraft(GraftPolicy):
    """Non-destructive grafting (TreeGraft, arXiv 2608.26112; docs/method.md section 1).

    A scoring drafter rescores every node, takes the W best within the lookback as grafting
    positions (leaves and inner nodes alike) and hangs its likeliest tokens under them. A look-up
    drafter extends the frontier. Nothing is removed: an old branch may still be the right one.
    Each of these steps has a switch (docs/method.md section 6).
    """

    def __init__(self, config: TreegraftConfig) -> None:
        self._config = config

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Tensor, width: int
    ) -> Touched:
        if not isinstance(drafter, ScoringDrafter):
            return _expand(tree, drafter, index, frontier, width, overwrite=False)
        rescores = self._config.rescore == "every_visit"
        if rescores:
            tree.rescore_(drafter.score(tree), index)
        positions = self._positions(tree, index, frontier, width)
        if positions.shape[0] == 0:  # all that may be taken is expanded already
            return Touched(positions, positions)
        return _expand(tree, drafter, index, positions, width, overwrite=rescores)

    def _positions(self, tree: TreeBackend, index: int, frontier: Tensor, width: int) -> Tensor:
        """int64 [k]: where a scoring drafter hangs its tokens."""
        config = self._config
        depth = tree.lists().depth
        depths = [depth[node] for node in frontier.tolist()]
        low, high = min(depths) - config.lookback, max(depths)
        if config.reach == "any":
            low, high = 0, tree.n_nodes
        elif not config.reselect:
            low = min(depths)
        unvisited_by = None if config.revisit else index
        if config.reselect and config.recover:
            return tree.best(width, low, high, unvisited_by)
        best = tree.best(tree.n_nodes, low, high, unvisited_by)
        if not config.recover:
            best = best[tree.leaf[best]]
        if config.reselect:
            return best[:width]
        return frontier[torch.isin(frontier, best)]

    def finish(
        self,
        tree: TreeBackend,
        drafters: Mapping[int, Drafter],
        calls: Sequence[int],
        width: int,
        budget: int,
    ) -> Sequence[int]:
        """With ``rescore: once``: one pass of the dearest scoring drafter that acted."""
        if self._config.rescore != "once":
            return ()
        for index in sorted(set(calls), reverse=True):
            drafter = drafters.get(index)
            if isinstance(drafter, ScoringDrafter):
                tree.rescore_(drafter.score(tree), index)
                return (index,)
        return ()


@final
class UnionGraft(GraftPolicy):
    """The union of what each drafter would hang under the frontier: no score is replaced.

    What most hybrids of look-up and model do. It is ``treegraft`` without rescoring and without
    reselecting, with revisits.
    """

    def __init__(self, config: UnionConfig) -> None:
        del config

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Tensor, width: int
    ) -> Touched:
        return _expand(tree, drafter, index, frontier, width, overwrite=False)


@final
class ReplaceGraft(GraftPolicy):
    """A destructive baseline: a model's tree takes the place of what look-ups drafted.

    The first visit of a scoring drafter in a step takes out every node and starts from the root;
    what comes after it in the step is ``treegraft``. TreeError where something was drawn at random
    before: it would be lost.
    """

    def __init__(self, config: ReplaceConfig) -> None:
        self._graft = TreegraftGraft(
            TreegraftConfig(lookback=config.lookback, revisit=config.revisit)
        )
        self._scoring: set[int] = set()

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Tensor, width: int
    ) -> Touched:
        if isinstance(drafter, ScoringDrafter):
            self._scoring.add(index)
            # Whoever came first has expanded the root.
            if all(tree.best(1, 0, 0, unvisited_by=i).shape[0] for i in self._scoring):
                if tree.n_drawn:
                    raise TreeError(
                        "graft.kind 'replace' takes out what was drafted before a model, which may "
                        f"not be drawn at random, found {tree.n_drawn} draws; "
                        "use another graft.kind"
                    )
                frontier = torch.tensor([ROOT])
                tree.keep_(frontier)
        return self._graft.visit(tree, drafter, index, frontier, width)


@final
class BudgetSwapGraft(GraftPolicy):
    """Prune, then give the freed places to look-ups.

    The idea is Graft's (arXiv 2605.20104), the details are ours. Layers are those of ``treegraft``;
    after the last one, with budget B and ``swap`` S:

    1. The root and the B - S best nodes stay, and those under which something was drawn.
    2. The look-up drafters, the cheapest first and whether or not they acted in a layer, look up
       the W best leaves (best first).
    3. Their paths are hung one by one until S nodes have been added or B are reached: the longest
       match first, then the better leaf, then the order of the drafter's answer; the path on which
       the places run out is cut.

    TreeError if a look-up draws at random: what was drawn may not be cut.
    """

    def __init__(self, config: BudgetSwapConfig) -> None:
        self._graft = TreegraftGraft(
            TreegraftConfig(lookback=config.lookback, revisit=config.revisit)
        )
        self._swap = config.swap

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Tensor, width: int
    ) -> Touched:
        return self._graft.visit(tree, drafter, index, frontier, width)

    def finish(
        self,
        tree: TreeBackend,
        drafters: Mapping[int, Drafter],
        calls: Sequence[int],
        width: int,
        budget: int,
    ) -> Sequence[int]:
        tree.keep_(tree.best(1 + max(budget - self._swap, 0), 0, tree.n_nodes))
        most = min(_n_alive(tree) + self._swap, budget + 1)
        called: list[int] = []
        for index in sorted(drafters):
            drafter = drafters[index]
            if isinstance(drafter, ScoringDrafter) or _n_alive(tree) >= most:
                continue
            best = tree.best(tree.n_nodes, 0, tree.n_nodes)
            proposals = drafter.propose(tree, best[tree.leaf[best]][:width], width)
            called.append(index)
            if proposals.draw is not None and bool((proposals.draw >= 0).any()):
                raise TreeError(
                    f"graft.kind 'budget_swap' cuts what look-ups found, which may not be drawn at "
                    f"random, found draws of drafter {index}; use another graft.kind"
                )
            for position, tokens, logprobs in _longest_match_first(proposals):
                left = most - _n_alive(tree)
                if left <= 0:
                    break
                path = Proposals.of_paths([position], [tokens[:left]], [logprobs[:left]])
                tree.add_(path, index, overwrite=False)
        return called


def _expand(
    tree: TreeBackend, drafter: Drafter, index: int, positions: Tensor, width: int, overwrite: bool
) -> Touched:
    """Hang what ``drafter`` proposes under ``positions`` int64 [k] into the tree."""
    proposals = drafter.propose(tree, positions, width)
    paths = tree.add_(proposals, index, overwrite=overwrite)
    return Touched(paths[:, 0], proposals.match)


def _n_alive(tree: TreeBackend) -> int:
    """Nodes of the tree that were not taken out, the root included."""
    return sum(tree.lists().alive)


def _longest_match_first(proposals: Proposals) -> Iterator[tuple[int, list[int], list[float]]]:
    """(position, tokens, logprobs) of each path, without its padding."""
    order = np.argsort(-proposals.match.numpy(), kind="stable").tolist()
    for i in order:
        tokens = [token for token in proposals.tokens[i].tolist() if token >= 0]
        yield int(proposals.positions[i]), tokens, proposals.logprobs[i, : len(tokens)].tolist()
