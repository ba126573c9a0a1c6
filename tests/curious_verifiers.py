"""Verifiers that look at more of the tree than the walk does; named by import path in tests."""

from __future__ import annotations

from typing import ClassVar

from treegraft import TokenTree, Verdict, Verifier
from treegraft.core.sampling import TargetDistribution
from treegraft.policies.verifiers import WalkConfig, WalkVerifier


class Everywhere(Verifier):
    """Asks about every node, deepest first and some twice, then walks as usual."""

    trees: ClassVar[list[TokenTree]] = []

    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        self.trees.append(tree)
        for node in (*reversed(range(len(tree))), *range(0, len(tree), 2)):
            target.processed(node)
        return WalkVerifier(WalkConfig()).verdict(tree, target)


class Lying(Everywhere):
    """Says that it keeps to the text, and does not."""

    in_text_order = True
