"""The recycling drafter: what the target thought likely after the same token, wherever it stood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from treegraft.core.offers import Offers, offers_of
from treegraft.core.roles import Commit, Context, Drafter, TreeBackend
from treegraft.core.tree import Proposals


class RecycleConfig(BaseModel):
    """Successors of a token that the target gave before, free of extra forwards."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["recycle"] = "recycle"
    name: str | None = Field(
        None, min_length=1, description="Name in statistics and schedules; default: kind."
    )
    k: int = Field(
        8,
        ge=1,
        le=64,
        description="Successors kept per token; more of them widen the tree. A token "
        "that was read keeps about half a kilobyte.",
    )
    levels: int = Field(
        1,
        ge=1,
        le=64,
        description="Tokens of a path; more of them deepen the tree in one call, along the "
        "likeliest successors.",
    )
    keep: bool = Field(
        False,
        description="Whether the table outlives a text. It then starts the next text warm, and "
        "drafts, and so the speed, depend on what was decoded before; the tokens never do.",
    )


@final
class RecycleDrafter(Drafter):
    """Token Recycling (arXiv 2408.08696): an adjacency table filled with the target's top tokens.

    ``_table`` has the successors of a token, likeliest first, and their logprobs, as the target
    gave them the last time it read that token, whatever stood before; the prompt, the committed
    tokens and the rejected nodes of the tree all fill it. Under each position hang its token's
    successors with the logprobs of that time.
    """

    target_top: int | None = 8
    tree_top = True

    def __init__(self, config: RecycleConfig) -> None:
        self.target_top = config.k
        self._k = config.k
        self._levels = config.levels
        self._keep = config.keep
        self._last = -1
        self._vocab_size = 0
        self._table: dict[int, tuple[list[int], list[float]]] = {}

    def begin(self, context: Context) -> None:
        if not self._keep or self._vocab_size != context.vocab_size:
            self._table = {}
        self._vocab_size = context.vocab_size
        if context.top is not None:
            self._note(context.tokens[:-1], context.top.tokens, context.top.logprobs)
        self._last = context.tokens[-1]

    def observe(self, commit: Commit) -> None:
        # The committed places come last: they were read behind what was really said.
        if commit.tree_top is not None:
            top = commit.tree_top
            self._note(top.token.tolist(), top.tokens, top.logprobs)
        if commit.top is not None:
            read = (self._last, *commit.tokens[:-1])
            self._note(read, commit.top.tokens, commit.top.logprobs)
        self._last = commit.tokens[-1]

    def _note(self, read: Sequence[int], tokens: Tensor, logprobs: Tensor) -> None:
        """Let ``tokens`` int64 [n, >= k] succeed ``read`` [n]; the last of a token counts."""
        if tokens.shape[1] > self._k:
            tokens, logprobs = tokens[:, : self._k], logprobs[:, : self._k]
        rows = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        self._table.update(zip(read, rows, strict=True))

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers:
        return offers_of(self.propose(tree, torch.tensor(path), width), path)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        token, table = tree.lists().token, self._table
        above: list[int] = []
        paths: list[list[int]] = []
        logprobs: list[list[float]] = []
        for node in positions.tolist():
            known = table.get(token[node])
            if known is None:
                continue
            for successor, logprob in zip(known[0][:width], known[1], strict=False):
                above.append(node)
                paths.append([successor])
                logprobs.append([logprob])
        if not above:
            return Proposals.empty()
        if self._levels > 1:
            for path, own in zip(paths, logprobs, strict=True):
                self._deepen(path, own)
        return Proposals.of_paths(above, paths, logprobs, [1] * len(above))

    def _deepen(self, path: list[int], logprobs: list[float]) -> None:
        """Go on along the likeliest successors, to ``levels`` tokens or an unknown one."""
        while len(path) < self._levels:
            known = self._table.get(path[-1])
            if known is None:
                return
            path.append(known[0][0])
            logprobs.append(known[1][0])
