"""Graft policies: what a drafter's visit does to the shared tree."""

from __future__ import annotations

from typing import Literal, final

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from treegraft.core.roles import Drafter, GraftPolicy, ScoringDrafter, Touched, TreeBackend


class TreegraftConfig(BaseModel):
    """The paper's graft: rescore, reselect with lookback, expand, integrate without removing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["treegraft"] = "treegraft"
    lookback: int = Field(
        5,
        ge=0,
        le=64,
        description="How many layers above the frontier a scoring drafter may take up again; "
        "a larger lookback recovers more paths that a weak drafter left unexplored.",
    )
    revisit: bool = Field(
        False,
        description="Whether a position that the same drafter already expanded in this step may "
        "be taken again, as in the paper. It brings no new node and uses up a place: with a width "
        "of 1 the tree then never gets deeper than one edge.",
    )


@final
class TreegraftGraft(GraftPolicy):
    """Non-destructive grafting (TreeGraft, arXiv 2608.26112; docs/method.md section 1).

    A scoring drafter rescores every node, takes the W best within the lookback as grafting
    positions (leaves and inner nodes alike) and hangs its likeliest tokens under them. A look-up
    drafter extends the frontier. Nothing is removed: an old branch may still be the right one.
    """

    def __init__(self, config: TreegraftConfig) -> None:
        self._lookback = config.lookback
        self._revisit = config.revisit

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Tensor, width: int
    ) -> Touched:
        scores = isinstance(drafter, ScoringDrafter)
        positions = frontier
        if isinstance(drafter, ScoringDrafter):
            tree.rescore_(drafter.score(tree), index)
            depth = tree.depth.numpy()[frontier.numpy()]
            positions = tree.best(
                width,
                int(depth.min()) - self._lookback,
                int(depth.max()),
                unvisited_by=None if self._revisit else index,
            )
            if positions.shape[0] == 0:  # all within the lookback is expanded already
                return Touched(positions, positions)
        proposals = drafter.propose(tree, positions, width)
        paths = tree.add_(proposals, index, overwrite=scores)
        return Touched(paths[:, 0], proposals.match)
