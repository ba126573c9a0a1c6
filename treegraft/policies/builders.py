"""Tree builders: the shape of the draft tree."""

from __future__ import annotations

from typing import Annotated, Any, Literal, final

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from torch import Tensor

from treegraft.core.roles import Touched, TreeBackend, TreeBuilder
from treegraft.core.tree import ROOT, TokenTree
from treegraft.policies.budget import BudgetCosts

_Depth = Field(
    5, ge=0, le=64, description="Drafting layers a step; more layers draft longer paths."
)
_Width = Field(
    10,
    ge=1,
    le=64,
    description="Positions expanded per layer and paths per position; a larger width drafts "
    "more alternatives and costs the drafters more.",
)
_Nodes = Annotated[int, Field(ge=0, le=1023)]


def _number_or_auto(value: Any) -> Any:
    if isinstance(value, str) and value != "auto" and not value.lstrip("+-").isdecimal():
        raise ValueError(f"it must be a number of nodes, 0 to 1023, or 'auto', found {value!r}")
    return value


_BudgetOption = Annotated[
    Annotated[_Nodes, Tag("number")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if value == "auto" else "number"),
    BeforeValidator(_number_or_auto),
]
_MOST = 63


class _BudgetedConfig(BaseModel):
    """What builders have in common whose trees are pruned to a budget."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    depth: int = _Depth
    width: int = _Width
    budget: _BudgetOption = Field(
        _MOST,
        description="Most nodes the target reads besides the root; a larger budget accepts more "
        "and makes its forward dearer. auto: in each step as many as bring the most expected "
        "tokens per second, which needs calibration.",
    )
    budget_limit: _Nodes | None = Field(
        None,
        description="Most nodes where budget is auto; a larger limit takes more memory. Null: 63.",
    )
    budget_costs: str | BudgetCosts | None = Field(
        None,
        description="What auto reckons with: a file of treegraft schedule calibrate, or seconds; "
        "null measures while decoding.",
    )

    @property
    def most(self) -> int:
        """Most nodes that the target reads besides the root, whatever the step."""
        if self.budget == "auto":
            return _MOST if self.budget_limit is None else self.budget_limit
        return self.budget

    @model_validator(mode="after")
    def _check_auto(self) -> Any:
        if self.budget != "auto":
            for name in ("budget_limit", "budget_costs"):
                if (found := getattr(self, name)) is not None:
                    shown = found if isinstance(found, int | str) else found.model_dump()
                    raise ValueError(
                        f"{name} is for budget 'auto', found {shown!r} with budget {self.budget}"
                    )
        return self


class LayeredConfig(_BudgetedConfig):
    """The paper's builder: layer by layer, the W best children of a layer carry the next."""

    kind: Literal["layered"] = "layered"


class BestFirstConfig(_BudgetedConfig):
    """Grow where the path is likeliest, at any depth, as long as it can change what is verified."""

    kind: Literal["best_first"] = "best_first"


class ChainConfig(BaseModel):
    """One path: no alternatives, as in speculative decoding without a tree."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["chain"] = "chain"
    depth: int = Field(
        5,
        ge=0,
        le=64,
        description="Drafting layers a step and tokens of the chain; a longer one accepts more and "
        "wastes more.",
    )


class StaticConfig(BaseModel):
    """A tree of fixed shape, given as paths of child ranks (as Medusa and EAGLE-1 give theirs)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["static"] = "static"
    paths: tuple[tuple[int, ...], ...] = Field(
        min_length=1,
        max_length=1023,
        description="Each node as the ranks of the children on its path, 0 the first that was "
        "proposed: [[0], [1], [0, 0]] is two children of the root and one child of the first.",
    )

    @property
    def depth(self) -> int:
        """Drafting layers: the longest path."""
        return max(map(len, self.paths))

    @model_validator(mode="after")
    def _check(self) -> StaticConfig:
        known = set(self.paths)
        for path in self.paths:
            shown = list(path)
            if not 1 <= len(path) <= 64:
                raise ValueError(f"paths must have 1 to 64 ranks, found {shown}")
            if not all(0 <= rank <= 63 for rank in path):
                raise ValueError(f"paths must hold ranks 0 to 63, found {shown}")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"paths must hold the parent of each, found {shown} without one")
        if len(known) < len(self.paths):
            twice = next(path for path in self.paths if self.paths.count(path) > 1)
            raise ValueError(f"paths must differ, found {list(twice)} twice")
        return self


@final
class LayeredBuilder(TreeBuilder):
    """Layer 1 keeps every child it made; later layers the W best (method: frontier)."""

    def __init__(self, config: LayeredConfig) -> None:
        self.depth = config.depth
        self.width = config.width
        self.budget = config.most

    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> Tensor:
        keep = tree.n_nodes if layer == 1 else self.width
        return tree.rank(touched.nodes, touched.match, keep)

    def prune(self, tree: TreeBackend) -> TokenTree:
        return tree.prune(self.budget)


@final
class BestFirstBuilder(TreeBuilder):
    """The frontier is the W best leaves of any depth that can still bring a node into the best B.

    A child scores at most what its parent does and is younger, so a leaf that does not score above
    the tree's B-th best node cannot. Where no leaf does, by the scores of that moment, the tree is
    complete. Unscored leaves (the deeper tokens of a look-up's path) come last.
    """

    def __init__(self, config: BestFirstConfig) -> None:
        self.depth = config.depth
        self.width = config.width
        self.budget = config.most

    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> Tensor | None:
        ranked = tree.best(tree.n_nodes, 0, tree.n_nodes)
        logprob = tree.logprob
        leaves = ranked[tree.leaf[ranked]]
        if ranked.shape[0] > self.budget:
            leaves = leaves[logprob[leaves] > logprob[ranked[self.budget]]]
        return leaves[: self.width] if leaves.shape[0] else None

    def prune(self, tree: TreeBackend) -> TokenTree:
        return tree.prune(self.budget)


@final
class ChainBuilder(TreeBuilder):
    """Width 1; each layer goes on from the end of the path that the last one touched.

    It ends when the path has ``depth`` tokens. A graft that reselects may take up a node further
    up and so branch; of such a tree the ``depth`` best nodes are verified.
    """

    def __init__(self, config: ChainConfig) -> None:
        self.depth = self.budget = config.depth
        self.width = 1

    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> Tensor | None:
        first = tree.rank(touched.nodes, touched.match, 1)
        if first.shape[0] == 0:
            return first
        below = tree.ancestors(torch.arange(tree.n_nodes))[:, int(first[0])] & tree.alive
        nodes = below.nonzero()[:, 0]
        end = nodes[tree.depth[nodes].argmax()]
        return end[None] if int(tree.depth[end]) < self.depth else None

    def prune(self, tree: TreeBackend) -> TokenTree:
        return tree.prune(self.budget)


@final
class StaticBuilder(TreeBuilder):
    """Expands exactly the nodes that have children in the given shape, and verifies its nodes.

    The rank of a child is its age: a model proposes its likeliest token first, a look-up its
    longest match, and draws count in the order in which they were made, not by their scores. A node
    that lacks a child of the shape, because the drafter had fewer to offer, goes without.
    """

    def __init__(self, config: StaticConfig) -> None:
        self._paths = sorted(config.paths, key=len)
        self._inner = {path[:-1] for path in self._paths}
        self.depth = config.depth
        self.width = 1 + max(map(max, self._paths))
        self.budget = len(self._paths)

    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> Tensor | None:
        nodes = [node for path, node in self._nodes(tree).items() if path in self._inner]
        unexpanded = torch.tensor(nodes)[tree.leaf[nodes]]
        return unexpanded if unexpanded.shape[0] else None

    def prune(self, tree: TreeBackend) -> TokenTree:
        tree.keep_(torch.tensor(list(self._nodes(tree).values())))
        return tree.prune(self.budget)

    def _nodes(self, tree: TreeBackend) -> dict[tuple[int, ...], int]:
        """The nodes of the shape that the tree has, by path, the root included."""
        children: dict[int, list[int]] = {}
        parent = tree.parent.tolist()
        for node, alive in enumerate(tree.alive.tolist()):
            if alive and node != ROOT:
                children.setdefault(parent[node], []).append(node)
        found: dict[tuple[int, ...], int] = {(): ROOT}
        for path in self._paths:
            ranked = children.get(found.get(path[:-1], -1), [])
            if path[-1] < len(ranked):
                found[path] = ranked[path[-1]]
        return found
