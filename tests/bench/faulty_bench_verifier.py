"""A verifier that breaks the law on purpose."""

from __future__ import annotations

from treegraft import TokenTree, Verdict, Verifier
from treegraft.core.sampling import TargetDistribution


class AlwaysZero(Verifier):
    """Commits token 0 whatever the target says."""

    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        return Verdict((), (0,))
