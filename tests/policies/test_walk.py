"""The walk: accepts all, accepts none, accepts some; then chains, wide trees and many trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.sampling import History, Noise, Sampling, TargetDistribution
from treegraft.core.tree import ROOT, Proposals, TokenTree, Verdict
from treegraft.policies.verifiers import WalkConfig, WalkVerifier

V = 6


def tree_of(*paths: Sequence[int]) -> TokenTree:
    """A tree with these paths under a root that holds 0."""
    tree = TensorTree(V)
    tree.reset_(token=0, max_depth=99)
    scores = [[-0.1] * len(path) for path in paths]
    tree.add_(Proposals.of_paths([ROOT] * len(paths), paths, scores), 0, True)
    return tree.prune(999)


def walk(tree: TokenTree, says: Sequence[int]) -> Verdict:
    """The verdict of a greedy target that says ``says[i]`` after node i."""
    logits = torch.nn.functional.one_hot(torch.tensor(says), V).float()
    target = TargetDistribution(logits, tree, Sampling(), History([3, 0], 2), Noise(0, V))
    return WalkVerifier(WalkConfig()).verdict(tree, target)


def test_accepts_all() -> None:
    assert walk(tree_of([1, 2, 3]), says=[1, 2, 3, 4]) == Verdict((1, 2, 3), (1, 2, 3, 4))


def test_rejects_all() -> None:
    assert walk(tree_of([1, 2, 3]), says=[5, 2, 3, 4]) == Verdict((), (5,))


def test_accepts_some() -> None:
    assert walk(tree_of([1, 2, 3]), says=[1, 2, 5, 4]) == Verdict((1, 2), (1, 2, 5))


def test_a_bare_root_gives_the_targets_token() -> None:
    assert walk(TokenTree.root_only(0), says=[4]) == Verdict((), (4,))


def test_a_wide_tree_is_entered_by_the_targets_branch() -> None:
    #  nodes: 1=[1] 2=[2] 3=[3], 4=[1,4] 5=[2,4] 6=[3,4]
    wide = tree_of([1, 4], [2, 4], [3, 4])
    assert walk(wide, says=[2, 0, 4, 0, 0, 1, 0]) == Verdict((2, 5), (2, 4, 1))


def test_an_equal_token_elsewhere_is_not_taken() -> None:
    """Token 4 hangs under node 1 only; after node 2 it is the bonus, not a step."""
    assert walk(tree_of([1, 4], [2]), says=[2, 4, 4, 0]) == Verdict((2,), (2, 4))


@given(
    paths=st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=5), max_size=8),
    data=st.data(),
)
@settings(max_examples=100)
def test_the_verdict_is_the_deepest_path_that_the_target_says(
    paths: list[list[int]], data: st.DataObject
) -> None:
    """Against the law stated over whole paths, without walking."""
    tree = tree_of(*paths) if paths else TokenTree.root_only(0)
    says = data.draw(st.lists(st.integers(0, V - 1), min_size=len(tree), max_size=len(tree)))
    agreed = [
        node
        for node in range(len(tree))
        if all(
            int(tree.token[i]) == says[int(tree.parent[i])]
            for i in range(1, len(tree))
            if tree.ancestors[node, i]
        )
    ]
    deepest = max(agreed, key=lambda node: int(tree.depth[node]))
    verdict = walk(tree, says)
    assert list(verdict.tokens) == [*tree.path(deepest), says[deepest]]
    assert [int(tree.token[i]) for i in verdict.path] == tree.path(deepest)
    assert (verdict.path[-1] if verdict.path else ROOT) == deepest


def test_a_sampled_walk_takes_what_plain_sampling_takes() -> None:
    """Node by node the noise is that of the place, so the walk follows the plain draw."""
    generator = torch.Generator().manual_seed(0)
    accepted = 0
    for seed in range(40):
        tree = tree_of([1, 2], [2, 2], [3, 3], [4, 1])
        logits = torch.randn(len(tree), V, generator=generator)
        sampling = Sampling(temperature=1.0, seed=seed)
        target = TargetDistribution(logits, tree, sampling, History([3, 0], 2), Noise(seed, V))
        verdict = WalkVerifier(WalkConfig()).verdict(tree, target)
        nodes = [ROOT, *verdict.path]
        for depth, (node, token) in enumerate(zip(nodes, verdict.tokens, strict=True)):
            noisy = logits[node].double() + Noise(seed, V).at(2 + depth)
            assert token == int(noisy.argmax())
        accepted += len(verdict.path)
    assert accepted > 20
