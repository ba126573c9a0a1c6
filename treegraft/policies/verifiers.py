"""Verifiers: which path of the tree the target keeps."""

from __future__ import annotations

from typing import Literal, final

from pydantic import BaseModel, ConfigDict

from treegraft.core.roles import Verifier
from treegraft.core.sampling import TargetDistribution
from treegraft.core.tree import ROOT, TokenTree, Verdict


class WalkConfig(BaseModel):
    """Take the target's own token at each node and descend while the tree has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["walk"] = "walk"


@final
class WalkVerifier(Verifier):
    """Exact for trees that are a function of the committed tokens (docs/method.md section 3).

    Every committed token is the target's draw given its prefix, so the output is that of plain
    decoding whatever the tree holds.
    """

    in_text_order = True

    def __init__(self, config: WalkConfig) -> None:
        del config

    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        parent, token = tree.parent.tolist(), tree.token.tolist()
        child = {(parent[i], token[i]): i for i in range(1, len(token))}
        path: list[int] = []
        tokens: list[int] = []
        node: int | None = ROOT
        while node is not None:
            tokens.append(target.token(node))
            node = child.get((node, tokens[-1]))
            if node is not None:
                path.append(node)
        return Verdict(tuple(path), tuple(tokens))
