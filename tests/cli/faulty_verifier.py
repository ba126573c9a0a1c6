"""A verifier that breaks the law on purpose, to show that the checks can fail."""

from __future__ import annotations

from treegraft import TokenTree, Verdict, Verifier
from treegraft.core.sampling import TargetDistribution


class AcceptsTheFirstChild(Verifier):
    """Takes the first drafted token without asking the target."""

    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        if len(tree) == 1:
            return Verdict((), (target.token(0),))
        return Verdict((1,), (int(tree.token[1]), target.token(1)))
