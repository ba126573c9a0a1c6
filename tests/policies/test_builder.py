"""The layered builder: what the next layer drafts from, and what the target reads."""

from __future__ import annotations

import torch

from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.roles import Touched
from treegraft.core.tree import ROOT, Proposals
from treegraft.policies.builders import LayeredBuilder, LayeredConfig


def tree_with_children(*scores: float) -> TensorTree:
    tree = TensorTree(16)
    tree.reset_(token=0, max_depth=9)
    tokens = [[i] for i in range(len(scores))]
    tree.add_(Proposals.of_paths([ROOT] * len(scores), tokens, [[s] for s in scores]), 0, True)
    return tree


def touched(*nodes: int, match: tuple[int, ...] | None = None) -> Touched:
    return Touched(torch.tensor(nodes), torch.tensor(match or (0,) * len(nodes)))


def test_the_first_layer_keeps_every_child_best_first() -> None:
    builder = LayeredBuilder(LayeredConfig(width=2))
    tree = tree_with_children(-3.0, -1.0, -2.0, -4.0)
    assert builder.frontier(tree, touched(1, 2, 3, 4), layer=1).tolist() == [2, 3, 1, 4]


def test_later_layers_keep_the_best() -> None:
    builder = LayeredBuilder(LayeredConfig(width=2))
    tree = tree_with_children(-3.0, -1.0, -2.0, -4.0)
    assert builder.frontier(tree, touched(1, 2, 3, 4), layer=2).tolist() == [2, 3]


def test_a_longer_match_beats_a_better_score() -> None:
    builder = LayeredBuilder(LayeredConfig(width=2))
    tree = tree_with_children(-3.0, -1.0, -2.0)
    frontier = builder.frontier(tree, touched(1, 2, 3, 1, match=(1, 1, 1, 3)), layer=2)
    assert frontier.tolist() == [1, 2]


def test_the_budget_counts_nodes_besides_the_root() -> None:
    tree = tree_with_children(-3.0, -1.0, -2.0, -4.0)
    for budget, tokens in ((0, []), (2, [1, 2]), (99, [0, 1, 2, 3])):
        pruned = LayeredBuilder(LayeredConfig(budget=budget)).prune(tree)
        assert pruned.token[1:].tolist() == tokens
