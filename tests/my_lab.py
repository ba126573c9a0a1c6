"""What a user's own module may hold, good and bad; named by import path in tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from treegraft import Drafter, GraftPolicy, Proposals, TokenTree, Touched, TreeBackend, TreeBuilder
from treegraft.core.errors import ConfigError
from treegraft.core.roles import Commit, Context
from treegraft.policies.grafts import TreegraftConfig, TreegraftGraft


class CautiousGraft(GraftPolicy):
    """Lets a drafter act only where the path is likely enough."""

    def __init__(self, threshold: float, note: str = "") -> None:
        if threshold < 0:
            raise ConfigError("threshold must be 0 or more, found a negative one")
        if threshold > 100:
            raise OverflowError("too cautious")
        self.threshold = threshold
        self.inner = TreegraftGraft(TreegraftConfig())

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Tensor, width: int
    ) -> Touched:
        likely = frontier[tree.logprob[frontier] >= -self.threshold]
        return self.inner.visit(tree, drafter, index, likely if len(likely) else frontier, width)


class Unfinished(Drafter):
    """Lacks two of its methods."""

    def begin(self, context: Any) -> None: ...


class Shapeless(TreeBuilder):
    """Never says how wide it is."""

    depth, budget = 3, 5

    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> Tensor:
        return tree.rank(touched.nodes, touched.match, 3)

    def prune(self, tree: TreeBackend) -> TokenTree:
        return tree.prune(self.budget)


class Switched(Shapeless):
    """Takes a switch for a width."""

    width = True


class Nested:
    class Graft(CautiousGraft):
        pass


not_a_class = 7


class QuietDrafter(Drafter):
    """Proposes nothing, and does not tell what it would have proposed."""

    def begin(self, context: Context) -> None:
        pass

    def observe(self, commit: Commit) -> None:
        pass

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        return Proposals.empty()
