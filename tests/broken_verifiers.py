"""Verifiers that break the law on purpose."""

from __future__ import annotations

from treegraft import TokenTree, Verdict, Verifier
from treegraft.core.sampling import TargetDistribution


class AlwaysZero(Verifier):
    """Commits token 0 whatever the target says."""

    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        return Verdict((), (0,))


class TakesTheDeepest(Verifier):
    """Accepts the longest path of the tree, whatever the target says."""

    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        node = int(tree.depth.argmax())
        path: list[int] = []
        while node:
            path.insert(0, node)
            node = int(tree.parent[node])
        tokens = [int(tree.token[node]) for node in path]
        return Verdict(tuple(path), (*tokens, target.token(path[-1] if path else 0)))


class TakesTheLastOfEquals(Verifier):
    """Walks like the built-in one, but of values within 0.002 it takes the last.

    As a forward does whose sums round the other way.
    """

    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        path: list[int] = []
        tokens: list[int] = []
        node = 0
        while True:
            tokens.append(self._token(tree, target, node))
            below = [
                i
                for i in range(1, len(tree))
                if int(tree.parent[i]) == node and int(tree.token[i]) == tokens[-1]
            ]
            if not below:
                return Verdict(tuple(path), tuple(tokens))
            node = below[0]
            path.append(node)

    def _token(self, tree: TokenTree, target: TargetDistribution, node: int) -> int:
        values = target.processed(node)
        if target.sampling.temperature:
            position = len(target.history.tokens) + int(tree.depth[node])
            values = values + target.noise.at(position).to(values)
        close = values >= values.max() - 0.002
        return int(close.nonzero()[-1])
