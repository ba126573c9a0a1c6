"""The model drafter: any smaller causal language model, with an incremental KV for the tree.

Shapes: N working-tree nodes, R nodes read so far, S cache rows, V vocabulary of this model. What
has an entry per node is a list (docs/decisions/0002-host-tree.md); what touches V is torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Literal, final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from treegraft.core.language_model import LanguageModel, extend, has_nan
from treegraft.core.offers import Offers
from treegraft.core.roles import Commit, Context, NodeLists, ScoringDrafter, TreeBackend
from treegraft.core.sampling import keyed_top
from treegraft.core.tree import Proposals, lineage_matrix


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
        self._rank: list[int] = []
        # Bit j of a rank's lineage: the node of rank j lies on its path.
        self._lineage: list[int] = []
        # log q of each node so far (-inf: unknown), and which have one; it never changes while the
        # committed text stands.
        self._scores: list[float] = []
        self._scored: list[bool] = []
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
            self._clear_tree()
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
        if self._lineage:
            ranks: list[int] = []
            for node in commit.path:
                if node >= len(self._rank) or self._rank[node] < 0:
                    break
                ranks.append(self._rank[node])
            base = len(self._text) - 1
            self._n_kv = base + 1 + len(ranks)
            if ranks != [*range(1, len(ranks) + 1)]:
                source = _int64([base + rank for rank in ranks])
                self._model.move_(self._cache, source, _int64(range(base + 1, self._n_kv)))
        self._text.extend(commit.tokens)
        self._clear_tree()

    def score(self, tree: TreeBackend) -> Tensor:
        lists = self._follow(tree)
        token, parent, alive, rank = lists.token, lists.parent, lists.alive, self._rank
        # Nodes that were taken out are not read for; one that comes back is scored then.
        fresh = [
            node for node, scored in enumerate(self._scored) if not scored and alive[node] and node
        ]
        if fresh:
            inner = {parent[node] for node in fresh}
            if any(rank[node] < 0 for node in inner):
                leaves = [
                    node
                    for node, place in enumerate(rank)
                    if place < 0 and alive[node] and node not in inner
                ]
                if len(leaves) <= self._read_ahead:
                    inner.update(leaves)
                self._read(lists, inner)
            vocab_size, last_id = self._model.vocab_size, self._last_id
            places = [rank[parent[node]] * vocab_size + min(token[node], last_id) for node in fresh]
            flat = self._logq.view(-1)
            scores = flat.index_select(0, _int64(places).to(flat.device)).tolist()
            for node, score in zip(fresh, scores, strict=True):
                self._scored[node] = True
                if token[node] <= last_id:  # an id that this model does not have cannot follow
                    self._scores[node] = score
        return torch.from_numpy(np.array(self._scores, dtype=np.float32))

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        lists = self._follow(tree)
        places: list[int] = positions.tolist()
        self._read(lists, places)
        logq = self._rows([self._rank[node] for node in places])
        if self._temperature > 0.0 and not has_nan(logq):
            return self._drawn(logq.cpu(), positions, width)
        top = logq.topk(min(width, self._model.vocab_size), dim=-1)
        k = top.indices.shape[-1]
        return Proposals(
            _int64([node for node in places for _ in range(k)]),
            top.indices.view(-1, 1).cpu(),
            top.values.view(-1, 1).cpu(),
            _int64([0] * (len(places) * k)),
        )

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers:
        """Its likeliest tokens behind the nodes that it has read, and behind text read late.

        Where it draws its children these are what it would have drawn most often. Text that it was
        not called for it reads with its next call, and tells then what it had thought of the last
        16 tokens of it.
        """
        self._asked = width
        self._follow(tree)
        read = [(j, self._rank[node]) for j, node in enumerate(path) if self._rank[node] >= 0]
        if not read:
            return self._late
        tokens = self._likeliest(self._rows([rank for _, rank in read]), width)
        return self._late | dict(zip((j for j, _ in read), tokens, strict=True))

    def _likeliest(self, logq: Tensor, width: int) -> list[list[list[int]]]:
        """The likeliest tokens of each row as paths."""
        top = logq.topk(min(width, self._model.vocab_size), dim=-1).indices
        paths: list[list[list[int]]] = top[..., None].tolist()
        return paths

    def _rows(self, ranks: Sequence[int]) -> Tensor:
        """float32 [k, V]: log q of what follows the nodes of these ranks. Not to be written to."""
        if ranks and [*ranks] == [*range(ranks[0], ranks[0] + len(ranks))]:
            return self._logq[ranks[0] : ranks[0] + len(ranks)]
        return self._logq.index_select(0, _int64(ranks).to(self._logq.device))

    def _drawn(self, logq: Tensor, positions: Tensor, width: int) -> Proposals:
        """Children of ``positions`` [k] given log q float32 [k, V], some of them drawn."""
        own = logq.numpy()
        n, vocab_size = own.shape
        n_drawn = min(width if self._children == "sample" else 1, vocab_size)
        n_likeliest = min(width - n_drawn, vocab_size)
        tempered = own.astype(np.float64)
        # As the target's logits are: a tiny temperature must not make all of them infinite.
        tempered -= tempered.max(-1, keepdims=True)
        tempered /= max(self._temperature, 1e-30)
        q = np.exp(tempered)
        q /= q.sum(-1, keepdims=True)
        likeliest = logq.topk(n_likeliest, dim=-1).indices.tolist() if n_likeliest else [[]] * n
        rows: list[int] = []
        tokens: list[int] = []
        draw: list[int] = []
        for row in range(n):
            place = (self._seed, len(self._text), self._stream, self._n_draws)
            self._n_draws += 1
            drawn = keyed_top(tempered[row], n_drawn, *place).tolist()
            # A probability that underflowed to 0 cannot be drawn.
            drawn = [token for token in drawn if q[row, token] > 0.0]
            tokens += drawn + likeliest[row]
            draw += [row] * len(drawn) + [-1] * len(likeliest[row])
            rows += [row] * (len(drawn) + len(likeliest[row]))
        return Proposals(
            positions=torch.from_numpy(positions.numpy()[rows]),
            tokens=torch.from_numpy(np.array(tokens, dtype=np.int64)[:, None]),
            logprobs=torch.from_numpy(own[rows, tokens][:, None]),
            match=torch.from_numpy(np.zeros(len(rows), dtype=np.int64)),
            draw=torch.from_numpy(np.array(draw, dtype=np.int64)),
            q=torch.from_numpy(q),
        )

    def _follow(self, tree: TreeBackend) -> NodeLists:
        """The tree's columns, after taking note of nodes that were added since the last call."""
        lists = tree.lists()
        more = len(lists.token) - len(self._rank)
        if more:
            self._rank += [-1] * more
            self._scores += [-inf] * more
            self._scored += [False] * more
        return lists

    def _read(self, lists: NodeLists, wanted: Iterable[int]) -> None:
        """One forward over the unread of ``wanted`` and their unread ancestors."""
        rank, lineage, parent = self._rank, self._lineage, lists.parent
        unread: set[int] = set()
        for node in wanted:
            while rank[node] < 0 and node not in unread:
                unread.add(node)
                node = parent[node]  # the root is its own
        if not unread:
            return
        first = len(lineage)
        nodes = sorted(unread)  # parents first
        for place, node in enumerate(nodes, first):
            rank[node] = place
            lineage.append(lineage[rank[parent[node]]] | 1 << place if node else 1)
        base, last = len(self._text) - 1, len(lineage)
        self._reserve(base + last)
        pending = self._pending(base) if first == 0 else []
        n_text = len(pending)
        # Columns: the committed text before the root, then the nodes read so far. Text that is
        # still to be read rides along in the same forward, causally.
        visible = np.empty((n_text + len(nodes), base + last), dtype=np.bool_)
        visible[n_text:, :base] = True
        visible[n_text:, base:] = lineage_matrix(lineage[first:], last)
        if n_text:
            visible[:n_text] = np.arange(base + last) <= np.arange(base - n_text, base)[:, None]
        tokens = pending + [lists.token[node] for node in nodes]
        depth = lists.depth
        positions = [*range(base - n_text, base), *(base + depth[node] for node in nodes)]
        logits = self._model.forward(
            self._cache,
            _int64([min(token, self._last_id) for token in tokens]),
            torch.from_numpy(np.arange(base + first - n_text, base + last)),
            _int64(positions),
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


def _int64(numbers: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.int64))
