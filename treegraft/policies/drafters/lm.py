"""The model drafter: any smaller causal language model, with an incremental KV for the tree.

Shapes: N working-tree nodes, R nodes read so far, S cache rows, V vocabulary of this model. Small
index arithmetic is numpy's (docs/decisions/0002-host-tree.md); what touches V is torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from treegraft.core.language_model import LanguageModel, extend, has_nan
from treegraft.core.offers import Offers
from treegraft.core.roles import Commit, Context, ScoringDrafter, TreeBackend
from treegraft.core.sampling import keyed_gumbel
from treegraft.core.tree import ROOT, Proposals


class ModelDrafterConfig(BaseModel):
    """What drafters that read the tree with a network have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    name: str | None = Field(
        None,
        min_length=1,
        description="Name in statistics and schedules; default: the last part of the model.",
    )
    model: str = Field(
        min_length=1,
        description="zoo:NAME, a local path, or a hub id; with [:N] behind it its first N layers. "
        "Of the target's own name they share its weights.",
    )
    read_ahead: int = Field(
        32,
        ge=0,
        le=1024,
        description="When scoring needs a forward, read up to so many leaves in the same forward; "
        "a larger number makes that forward wider and often saves the next one.",
    )
    children: Literal["topk", "sample", "topk_plus_one_sample"] = Field(
        "topk",
        description="How the children of a position are chosen: the likeliest, drawn without "
        "replacement, or one drawn and the likeliest. What is drawn gains from the verifiers "
        "ledger and traversal. At temperature 0 nothing is drawn.",
    )
    draw_temperature: float | None = Field(
        None,
        gt=0.0,
        le=100.0,
        description="Temperature of the draws; null takes that of the sampling.",
    )


class LmConfig(ModelDrafterConfig):
    """A causal language model of the target's family."""

    kind: Literal["lm"] = "lm"


_N_NODES = 256  # room for nodes of the working tree, before it has to grow
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

    def __init__(self, config: ModelDrafterConfig, model: LanguageModel) -> None:
        self._model = model
        # Ids that only the target has (a larger embedding, another drafter's guess) are read as
        # this one: what is drafted after them is worth little, and harms nobody.
        self._last_id = model.vocab_size - 1
        self._read_ahead = config.read_ahead
        self._children = config.children
        self._own_temperature = config.draw_temperature
        self._temperature = 0.0
        self._seed = self._stream = 0
        self._n_draws = 0
        self.limit = model.max_positions
        self._cache: object = None
        self._n_rows = 0
        self._text: list[int] = []
        self._n_kv = 0
        self._spoiled = False
        self._logq = torch.empty(0)
        # Paths a place that ``offers`` was last asked for; 0: nobody asks.
        self._asked = 0
        self._clear_tree()

    def _clear_tree(self) -> None:
        # Node -> its rank in reading order (-1: unread); its KV row is len(text) - 1 + rank, and
        # log q of what follows it is row rank of _logq, float32 [>= R, V] on the model's device.
        self._n_nodes = self._n_read = 0
        # The arrays have room for more nodes than there are, and are cut when they are read.
        self._rank: NDArray[np.int64] = np.full(_N_NODES, -1, dtype=np.int64)
        # log q of each node so far, and which have one (not the root, whose entry says nothing); it
        # never changes while the committed text stands.
        self._scores: NDArray[np.float32] = np.full(_N_NODES, -np.inf, dtype=np.float32)
        self._scored: NDArray[np.bool_] = np.zeros(_N_NODES, dtype=np.bool_)
        self._scored[ROOT] = True
        # Draws of this step, so that no two use the same noise.
        self._n_draws = 0
        # What follows text that was read late, if somebody asks (see ``offers``).
        self._late: dict[int, list[list[int]]] = {}

    def begin(self, context: Context) -> None:
        self._text = list(context.tokens)
        self._temperature = 0.0
        if self._children != "topk" and context.temperature > 0.0:
            self._temperature = self._own_temperature or context.temperature
        self._seed, self._stream = context.seed, context.stream
        self._clean_cache()
        self._n_kv = 0
        self._clear_tree()
        # Anew for each text: it is as wide as the vocabulary, and one text may need few rows.
        self._logq = torch.empty(
            0, self._model.vocab_size, dtype=torch.float32, device=self._model.device
        )
        self._reserve(context.capacity + 64)

    def _clean_cache(self) -> None:
        """Let go of a cache in which a NaN turned up.

        It would reach every later node through masked weights (0 times NaN is NaN), and nothing
        would be accepted any more. The text is read again with the next call.
        """
        if self._spoiled:
            self._cache, self._n_rows, self._n_kv = None, 0, 0
            self._n_read = 0
            self._spoiled = False

    def _reserve(self, n_rows: int) -> None:
        """Make sure that the cache has so many rows; what it holds is kept."""
        if n_rows > self._n_rows:
            # Rows grow by half, so that a tree which keeps growing copies the cache rarely.
            n_rows = max(n_rows, self._n_rows * 3 // 2)
            # Let go of the old cache first: should the new one fail, it is not to be used again.
            old, self._cache, self._n_rows = self._cache, None, 0
            self._cache, self._n_rows = self._model.new_cache(n_rows, old), n_rows

    def observe(self, commit: Commit) -> None:
        self._clean_cache()
        if self._n_read:
            ranks: list[int] = []
            for node in commit.path:
                if node >= self._n_nodes or self._rank[node] < 0:
                    break
                ranks.append(int(self._rank[node]))
            base = len(self._text) - 1
            self._n_kv = base + 1 + len(ranks)
            if any(rank != place for place, rank in enumerate(ranks, 1)):
                source = base + torch.tensor(ranks)
                place = torch.arange(base + 1, self._n_kv)
                self._model.move_(self._cache, source, place)
        self._text.extend(commit.tokens)
        self._clear_tree()

    def score(self, tree: TreeBackend) -> Tensor:
        n = self._follow(tree)
        alive = tree.alive.numpy()
        # Nodes that were taken out are not read for; one that comes back is scored then.
        fresh = (alive & ~self._scored[:n]).nonzero()[0]
        if fresh.shape[0]:
            parent, token = tree.parent.numpy()[fresh], tree.token.numpy()[fresh]
            unread = self._rank[:n] < 0
            inner = np.zeros(n, dtype=np.bool_)
            inner[parent] = True
            if (inner & unread).any():
                leaves = (alive & ~inner & unread).nonzero()[0]
                if leaves.shape[0] <= self._read_ahead:
                    inner[leaves] = True
                self._read(tree, inner)
            known = np.minimum(token, self._last_id)
            place = self._rank[parent] * self._model.vocab_size + known
            flat = self._logq.view(-1)
            scores = flat.index_select(0, torch.from_numpy(place).to(flat.device)).cpu().numpy()
            if token.max() > self._last_id:  # an id that this model does not have cannot follow
                scores[token > self._last_id] = -np.inf
            self._scores[fresh] = scores
            self._scored[fresh] = True
        return torch.from_numpy(self._scores[:n].copy())

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        self._follow(tree)
        places = positions.numpy()
        wanted = np.zeros(tree.n_nodes, dtype=np.bool_)
        wanted[places] = True
        self._read(tree, wanted)
        ranks = torch.from_numpy(self._rank[places])
        logq = self._logq.index_select(0, ranks.to(self._logq.device))
        if self._temperature > 0.0 and not bool(logq[:, 0].isnan().any()):
            return self._drawn(logq.cpu(), positions, width)
        top = logq.topk(min(width, self._model.vocab_size), dim=-1)
        k = top.indices.shape[-1]
        return Proposals(
            torch.from_numpy(places.repeat(k)),
            top.indices.view(-1, 1).cpu(),
            top.values.view(-1, 1).cpu(),
            torch.from_numpy(np.zeros(len(places) * k, dtype=np.int64)),
        )

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers:
        """Its likeliest tokens behind the nodes that it has read, and behind text read late.

        Where it draws its children these are what it would have drawn most often. Text that it was
        not called for it reads with its next call, and tells then what it had thought of the last
        16 tokens of it.
        """
        self._asked = width
        self._follow(tree)
        read = [(j, int(self._rank[node])) for j, node in enumerate(path) if self._rank[node] >= 0]
        if not read:
            return self._late
        ranks = torch.tensor([rank for _, rank in read], device=self._logq.device)
        tokens = self._likeliest(self._logq.index_select(0, ranks), width)
        return self._late | dict(zip((j for j, _ in read), tokens, strict=True))

    def _likeliest(self, logq: Tensor, width: int) -> list[list[list[int]]]:
        """The likeliest tokens of each row as paths."""
        top = logq.topk(min(width, self._model.vocab_size), dim=-1).indices
        paths: list[list[list[int]]] = top[..., None].tolist()
        return paths

    def _drawn(self, logq: Tensor, positions: Tensor, width: int) -> Proposals:
        """Children of ``positions`` [k] given log q float32 [k, V], some of them drawn.

        The highest of log q + Gumbel noise are draws without replacement in their order (Gumbel
        top-k; Kool et al. 2019).
        """
        n, vocab_size = logq.shape
        # As the target's logits are: a tiny temperature must not make all of them infinite.
        shifted = logq.double() - logq.double().amax(-1, keepdim=True)
        tempered = (shifted / max(self._temperature, 1e-30)).log_softmax(-1)
        noise = torch.stack(
            [
                keyed_gumbel(
                    self._seed, len(self._text), vocab_size, self._stream, self._n_draws + i
                )
                for i in range(n)
            ]
        )
        self._n_draws += n
        n_drawn = min(width if self._children == "sample" else 1, vocab_size)
        drawn = (tempered + noise).topk(n_drawn, dim=-1).indices
        likeliest = logq.topk(min(width - n_drawn, vocab_size), dim=-1).indices
        tokens = torch.cat([drawn, likeliest], dim=1)
        k = tokens.shape[1]
        row = torch.arange(n)[:, None].expand(n, n_drawn)
        draw = torch.cat([row, torch.full((n, k - n_drawn), -1)], dim=1).reshape(-1)
        q = tempered.exp()
        scores = logq.gather(1, tokens)
        # A probability that underflowed to 0 cannot be drawn.
        possible = (draw < 0) | (q.gather(1, tokens) > 0).reshape(-1)
        return Proposals(
            positions.repeat_interleave(k)[possible],
            tokens.reshape(-1, 1)[possible],
            scores.reshape(-1, 1)[possible],
            torch.zeros(n * k, dtype=torch.int64)[possible],
            draw[possible],
            q,
        )

    def _follow(self, tree: TreeBackend) -> int:
        """Take note of nodes that were added since the last call; how many nodes there are."""
        n, room = tree.n_nodes, self._rank.shape[0]
        self._n_nodes = n
        if n > room:
            more = max(n - room, room)
            self._rank = np.concatenate([self._rank, np.full(more, -1, dtype=np.int64)])
            self._scored = np.concatenate([self._scored, np.zeros(more, dtype=np.bool_)])
            unscored = np.full(more, -np.inf, dtype=np.float32)
            self._scores = np.concatenate([self._scores, unscored])
        return n

    def _read(self, tree: TreeBackend, wanted: NDArray[np.bool_]) -> None:
        """One forward over the unread of ``wanted`` bool [N] and their unread ancestors."""
        missing = self._rank[: self._n_nodes] < 0
        unread = (wanted & missing).nonzero()[0]
        if unread.shape[0] == 0:
            return
        lineage = tree.ancestors(torch.from_numpy(unread)).numpy()
        nodes = (lineage.any(0) & missing).nonzero()[0]
        if nodes.shape[0] != unread.shape[0]:
            lineage = tree.ancestors(torch.from_numpy(nodes)).numpy()
        base = len(self._text) - 1
        first, last = self._n_read, self._n_read + nodes.shape[0]
        self._rank[nodes] = np.arange(first, last)
        self._n_read = last
        self._reserve(base + last)
        pending = self._pending(base) if first == 0 else []
        n_text = len(pending)
        # Columns: the committed text before the root, then the nodes read so far. Text that is
        # still to be read rides along in the same forward, causally.
        visible = np.zeros((n_text + nodes.shape[0], base + last), dtype=np.bool_)
        visible[n_text:, :base] = True
        query, ancestor = lineage.nonzero()
        visible[n_text + query, base + self._rank[ancestor]] = True
        tokens, depth = tree.token.numpy()[nodes], tree.depth.numpy()[nodes]
        rows, positions = np.arange(base + first, base + last), base + depth
        if n_text:
            places = np.arange(base - n_text, base)
            visible[:n_text, :base] = np.arange(base) <= places[:, None]
            tokens = np.concatenate([np.array(pending, dtype=np.int64), tokens])
            rows = np.arange(base - n_text, base + last)
            positions = np.concatenate([places, positions])
        logits = self._model.forward(
            self._cache,
            torch.from_numpy(np.minimum(tokens, self._last_id)),
            torch.from_numpy(rows),
            torch.from_numpy(positions),
            torch.from_numpy(visible),
        )
        self._spoiled = self._spoiled or has_nan(logits)
        if n_text and self._asked:
            likeliest = self._likeliest(logits[:n_text], self._asked)
            self._late = dict(enumerate(likeliest, -n_text))
        self._keep(logits[n_text:], first, last)
        self._n_kv = max(self._n_kv, base)

    def _keep(self, logits: Tensor, first: int, last: int) -> None:
        """Store log q of logits [last - first, V] in rows first..last-1 of a buffer that grows."""
        if last > self._logq.shape[0]:
            held = self._logq[:first]
            self._logq = held.new_empty(2 * last, self._model.vocab_size)
            self._logq[:first] = held
        place = self._logq[first:last]
        if logits.dtype == place.dtype:
            torch.log_softmax(logits, -1, out=place)
        else:
            place.copy_(logits.log_softmax(-1))

    def _pending(self, base: int) -> list[int]:
        """Committed text that is still unread; all but its last stretch is read right here."""
        n_early = base - self._n_kv - _RIDE
        if n_early > 0:
            stretch = self._text[self._n_kv : self._n_kv + n_early]
            early = [min(token, self._last_id) for token in stretch]
            for _ in extend(self._model, self._cache, early, self._n_kv, last_only=True):
                pass
            self._n_kv += n_early
        return self._text[self._n_kv : base]
