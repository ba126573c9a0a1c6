"""The model drafter: any smaller causal language model, with an incremental KV for the tree.

Shapes: N working-tree nodes, R nodes read so far, S cache rows, V vocabulary of this model.
"""

from __future__ import annotations

from typing import Literal, final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from treegraft.core.language_model import LanguageModel, extend
from treegraft.core.roles import Commit, Context, ScoringDrafter, TreeBackend
from treegraft.core.tree import ROOT, Proposals


class LmConfig(BaseModel):
    """A causal language model of the target's family."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["lm"] = "lm"
    name: str | None = Field(
        None, description="Name in statistics and schedules; default: the last part of the model."
    )
    model: str = Field(description="zoo:NAME, a local path, or a hub id.")
    read_ahead: int = Field(
        32,
        ge=0,
        le=1024,
        description="When scoring needs a forward, read up to so many leaves in the same forward; "
        "a larger number makes that forward wider and often saves the next one.",
    )


_RIDE = 16
"""Unread text up to this many tokens goes through the model together with the tree's nodes."""


@final
class LmDrafter(ScoringDrafter):
    """Reads every node at most once; only nodes it has not read go through the model.

    Rows of its KV cache: the committed text up to ``_n_kv``, then, from the root's row
    ``len(text) - 1`` on, tree nodes in the order they were read. A commit moves the rows of
    accepted nodes down to their place in the text; whatever of the text it has not read (a bonus
    token, another drafter's nodes, steps in which it was not called) is read with the next call.
    """

    def __init__(self, config: LmConfig, model: LanguageModel) -> None:
        self._model = model
        self._read_ahead = config.read_ahead
        self.limit = model.max_positions
        self._cache: object = None
        self._n_rows = 0
        self._text: list[int] = []
        self._n_kv = 0
        self._clear_tree()

    def _clear_tree(self) -> None:
        # Node -> its rank in reading order (-1: unread); its KV row is len(text) - 1 + rank.
        self._rank = torch.empty(0, dtype=torch.int64)
        self._logq: list[Tensor] = []
        self._n_read = 0

    def begin(self, context: Context) -> None:
        self._text = list(context.tokens)
        self._n_kv = 0
        self._clear_tree()
        self._reserve(context.capacity + 64)

    def _reserve(self, n_rows: int) -> None:
        """Make sure that the cache has so many rows; what it holds is kept."""
        if n_rows > self._n_rows:
            # Rows grow by half, so that a tree which keeps growing copies the cache rarely.
            self._n_rows = max(n_rows, self._n_rows * 3 // 2)
            self._cache = self._model.new_cache(self._n_rows, self._cache)

    def observe(self, commit: Commit) -> None:
        if self._n_read:
            ranks = []
            for node in commit.path:
                rank = int(self._rank[node]) if node < self._rank.shape[0] else -1
                if rank < 0:
                    break
                ranks.append(rank)
            base = len(self._text) - 1
            self._n_kv = base + 1 + len(ranks)
            if ranks:
                source = base + torch.tensor(ranks)
                self._model.move_(
                    self._cache, source, torch.arange(base + 1, base + 1 + len(ranks))
                )
        self._text.extend(commit.tokens)
        self._clear_tree()

    def score(self, tree: TreeBackend) -> Tensor:
        parent, token = tree.parent, tree.token
        self._follow(tree)
        inner = torch.zeros(tree.n_nodes, dtype=torch.bool)
        inner[parent[1:]] = True
        if bool((self._rank[inner] < 0).any()):
            leaves = (~inner & (self._rank < 0)).nonzero()[:, 0]
            if leaves.shape[0] <= self._read_ahead:
                inner[leaves] = True
            self._read(tree, inner)
        scores = torch.full((tree.n_nodes,), -torch.inf)
        known = token < self._model.vocab_size
        known[ROOT] = False
        if bool(known.any()):
            rows = self._rank[parent[known]]
            scores[known] = self._logq_rows()[rows, token[known]]
        return scores

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        self._follow(tree)
        wanted = torch.zeros(tree.n_nodes, dtype=torch.bool)
        wanted[positions] = True
        self._read(tree, wanted)
        logq = self._logq_rows()[self._rank[positions]]
        top = logq.topk(min(width, logq.shape[-1]), dim=-1)
        k = top.indices.shape[-1]
        return Proposals(
            positions.repeat_interleave(k),
            top.indices.reshape(-1, 1),
            top.values.reshape(-1, 1),
            torch.zeros(positions.shape[0] * k, dtype=torch.int64),
        )

    def _follow(self, tree: TreeBackend) -> None:
        """Take note of nodes that were added since the last call."""
        n_new = tree.n_nodes - self._rank.shape[0]
        self._rank = torch.cat([self._rank, torch.full((n_new,), -1, dtype=torch.int64)])

    def _logq_rows(self) -> Tensor:
        """float32 [R, V] log q after each node read, in reading order."""
        if len(self._logq) > 1:
            self._logq = [torch.cat(self._logq)]
        return self._logq[0]

    def _read(self, tree: TreeBackend, wanted: Tensor) -> None:
        """One forward over the unread of ``wanted`` bool [N] and their unread ancestors."""
        unread = wanted & (self._rank < 0)
        if not bool(unread.any()):
            return
        lineage = tree.ancestors(unread.nonzero()[:, 0])
        nodes = (lineage.any(0) & (self._rank < 0)).nonzero()[:, 0]
        base = len(self._text) - 1
        first, last = self._n_read, self._n_read + nodes.shape[0]
        self._rank[nodes] = torch.arange(first, last)
        self._n_read = last
        self._reserve(base + last)
        pending = self._pending(base) if first == 0 else []
        n_text = len(pending)
        # Columns: the committed text before the root, then the nodes read so far. Text that is
        # still to be read rides along in the same forward, causally.
        visible = torch.zeros(n_text + nodes.shape[0], base + last, dtype=torch.bool)
        visible[n_text:, :base] = True
        query, ancestor = tree.ancestors(nodes).nonzero(as_tuple=True)
        visible[n_text + query, base + self._rank[ancestor]] = True
        tokens, rows, positions = tree.token[nodes], base + self._rank[nodes], tree.depth[nodes]
        positions = base + positions
        if n_text:
            places = torch.arange(base - n_text, base)
            visible[:n_text, :base] = torch.arange(base) <= places[:, None]
            tokens = torch.cat([torch.tensor(pending), tokens])
            rows, positions = torch.cat([places, rows]), torch.cat([places, positions])
        logits = self._model.forward(self._cache, tokens, rows, positions, visible)
        self._logq.append(logits[n_text:].log_softmax(-1).to(torch.float32))
        self._n_kv = max(self._n_kv, base)

    def _pending(self, base: int) -> list[int]:
        """Committed text that is still unread; all but its last stretch is read right here."""
        n_early = base - self._n_kv - _RIDE
        if n_early > 0:
            early = self._text[self._n_kv : self._n_kv + n_early]
            for _ in extend(self._model, self._cache, early, self._n_kv, last_only=True):
                pass
            self._n_kv += n_early
        return self._text[self._n_kv : base]
