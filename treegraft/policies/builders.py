"""Tree builders: the shape of the draft tree."""

from __future__ import annotations

from typing import Literal, final

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from treegraft.core.roles import Touched, TreeBackend, TreeBuilder
from treegraft.core.tree import TokenTree


class LayeredConfig(BaseModel):
    """The paper's builder: layer by layer, the W best children of a layer carry the next."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["layered"] = "layered"
    depth: int = Field(
        5, ge=0, le=64, description="Drafting layers a step; more layers draft longer paths."
    )
    width: int = Field(
        10,
        ge=1,
        le=64,
        description="Positions expanded per layer and paths per position; a larger width drafts "
        "more alternatives and costs the drafters more.",
    )
    budget: int = Field(
        63,
        ge=0,
        le=1023,
        description="Most nodes the target reads besides the root; a larger budget accepts more "
        "and makes its forward dearer.",
    )


@final
class LayeredBuilder(TreeBuilder):
    """Layer 1 keeps every child it made; later layers the W best (method: frontier)."""

    def __init__(self, config: LayeredConfig) -> None:
        self.depth = config.depth
        self.width = config.width
        self.budget = config.budget

    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> Tensor:
        keep = tree.n_nodes if layer == 1 else self.width
        return tree.rank(touched.nodes, touched.match, keep)

    def prune(self, tree: TreeBackend) -> TokenTree:
        return tree.prune(self.budget)
