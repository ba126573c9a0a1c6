"""The recycling drafter: what the target thought likely after the same token, wherever it stood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
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
        description="Successors kept per token; more of them widen the tree and take "
        "12 bytes per token of the vocabulary each.",
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

    ``_successors`` int64 [V, k], -1 where none is known, and ``_logprobs`` float32 [V, k]. A row
    is what the target gave the last time it read that token, whatever stood before; the prompt,
    the committed tokens and the rejected nodes of the tree all fill it. Under each position hang
    its token's successors, likeliest first, with the logprobs of that time.
    """

    target_top: int | None = 8
    tree_top = True

    def __init__(self, config: RecycleConfig) -> None:
        self.target_top = config.k
        self._k = config.k
        self._levels = config.levels
        self._keep = config.keep
        self._last = -1
        self._open(0)

    def _open(self, vocab_size: int) -> None:
        k = min(self._k, vocab_size)
        self._successors: NDArray[np.int64] = np.full((vocab_size, k), -1, dtype=np.int64)
        self._logprobs: NDArray[np.float32] = np.full((vocab_size, k), -np.inf, dtype=np.float32)

    def begin(self, context: Context) -> None:
        if self._successors.shape[0] != context.vocab_size:
            self._open(context.vocab_size)
        elif not self._keep:
            self._successors.fill(-1)
            self._logprobs.fill(-np.inf)
        if context.top is not None:
            self._note(np.array(context.tokens[:-1]), context.top.tokens, context.top.logprobs)
        self._last = context.tokens[-1]

    def observe(self, commit: Commit) -> None:
        # The committed places come last: they were read behind what was really said.
        if commit.tree_top is not None:
            top = commit.tree_top
            self._note(top.token.numpy(), top.tokens, top.logprobs)
        if commit.top is not None:
            read = np.array([self._last, *commit.tokens[:-1]])
            self._note(read, commit.top.tokens, commit.top.logprobs)
        self._last = commit.tokens[-1]

    def _note(self, read: NDArray[np.int64], tokens: Tensor, logprobs: Tensor) -> None:
        """Let ``tokens`` int64 [n, >= k] succeed ``read`` int64 [n]; the last of a token counts."""
        k = self._successors.shape[1]
        # numpy assigns in order where an index repeats.
        self._successors[read] = tokens[:, :k].numpy()
        self._logprobs[read] = logprobs[:, :k].numpy()

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers:
        return offers_of(self.propose(tree, torch.tensor(path), width), path)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        token = tree.lists().token
        at = np.array([token[node] for node in positions.tolist()], dtype=np.int64)
        first = self._successors[at, :width]
        row, rank = (first >= 0).nonzero()
        if not row.shape[0]:
            return Proposals.empty()
        tokens = np.full((row.shape[0], self._levels), -1, dtype=np.int64)
        logprobs = np.full(tokens.shape, -np.inf, dtype=np.float32)
        tokens[:, 0] = first[row, rank]
        logprobs[:, 0] = self._logprobs[at[row], rank]
        for level in range(1, self._levels):
            above = tokens[:, level - 1]
            known = above >= 0
            tokens[known, level] = self._successors[above[known], 0]
            logprobs[known, level] = self._logprobs[above[known], 0]
        return Proposals(
            torch.from_numpy(positions.numpy()[row]),
            torch.from_numpy(tokens),
            torch.from_numpy(logprobs),
            torch.from_numpy(np.ones(row.shape[0], dtype=np.int64)),
        )
