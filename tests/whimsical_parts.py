"""Parts that do whatever is allowed, by the fall of dice that are keyed by the tree.

Configs name them as ``whimsical_parts:WhimsicalGraft``. The same tree gives the same whim, so a run
can be repeated; a pipeline must say what the target says under any of them.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from treegraft.core.roles import (
    Drafter,
    DraftState,
    GraftPolicy,
    Scheduler,
    ScoringDrafter,
    Touched,
    TreeBackend,
    TreeBuilder,
)
from treegraft.core.stats import StepRecord
from treegraft.core.tree import ROOT, TokenTree


def dice(seed: int, *key: object) -> random.Random:
    return random.Random(f"{seed} {key}")


class WhimsicalScheduler(Scheduler):
    """Anybody, or an early end, in every layer."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def choose(self, state: DraftState) -> int | None:
        rolled = dice(self.seed, state.layer, state.n_committed).randint(-1, 4 * state.n_drafters)
        return None if rolled < 0 else rolled % state.n_drafters

    def finish(self, record: StepRecord) -> None: ...


class WhimsicalBuilder(TreeBuilder):
    """Drafts on from any nodes, and verifies any part of the tree that hangs together."""

    def __init__(self, seed: int, depth: int, width: int, budget: int) -> None:
        self.seed, self.depth, self.width, self.budget = seed, depth, width, budget

    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> Tensor:
        roll = dice(self.seed, layer, tree.token.tolist())
        k = roll.randint(0, min(self.width, tree.n_nodes))
        return torch.tensor(roll.sample(range(tree.n_nodes), k), dtype=torch.int64)

    def prune(self, tree: TreeBackend) -> TokenTree:
        if tree.n_drawn:  # a part of one's own making would lack draws
            return tree.prune(self.budget)
        whole = tree.prune(tree.n_nodes)
        roll = dice(self.seed, tree.token.tolist())
        kept = [ROOT]
        for node, parent in enumerate(whole.parent.tolist()):
            if node != ROOT and parent in kept and len(kept) <= self.budget and roll.random() < 0.8:
                kept.append(node)
        place = {node: i for i, node in enumerate(kept)}
        numbers = torch.tensor(kept)
        return TokenTree(
            token=whole.token[numbers],
            parent=torch.tensor([place[i] for i in whole.parent[numbers].tolist()]),
            depth=whole.depth[numbers],
            logprob=whole.logprob[numbers],
            source=whole.source[numbers],
            scorer=whole.scorer[numbers],
            proposers=whole.proposers[numbers],
            ancestors=whole.ancestors[numbers][:, numbers],
            node=whole.node[numbers],
        )


class WhimsicalGraft(GraftPolicy):
    """Rescores or does not, and expands any nodes of the tree."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Tensor, width: int
    ) -> Touched:
        roll = dice(self.seed, index, tree.token.tolist())
        if isinstance(drafter, ScoringDrafter) and roll.random() < 0.5:
            tree.rescore_(drafter.score(tree), index)
        k = roll.randint(1, min(width, tree.n_nodes))
        positions = torch.tensor(roll.sample(range(tree.n_nodes), k))
        proposals = drafter.propose(tree, positions, width)
        paths = tree.add_(proposals, index, overwrite=roll.random() < 0.5)
        return Touched(paths[:, -1], proposals.match)
