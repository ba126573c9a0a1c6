"""The draft tree as data: what a drafter proposes, what is verified, what the verifier decides.

Shapes: N tree nodes, K proposed paths, C tokens of the longest path, L ledger slots, Q rows of draw
probabilities, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegraft.core.errors import TreeError

ROOT = 0
NOBODY = -1
"""Source of the root, and scorer of a node whose token nobody has scored yet."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Paths of one or more tokens that a drafter hangs under nodes of the tree.

    Attributes
    ----------
    positions : int64 [K], the node under which each path hangs.
    tokens : int64 [K, C], the paths, left aligned, padded with -1.
    logprobs : float32 [K, C], log q(token | its path) in nats; -inf where unscored. A value above
        0 counts as 0, so that no child ever outranks its parent.
    match : int64 [K], tokens of context that a look-up matched (0 for models). The frontier ranks
        by it before it ranks by logprob.
    draw : int64 [K] or None. A path whose token was drawn at random says here from which row of
        ``q``; -1 for the others, None if nothing was drawn. A drawn path is one token long.
    q : float [Q, V'], the probabilities that tokens were drawn from. Paths that name one row hang
        under one node and were drawn without replacement, in their order. A verifier that is exact
        for drawn trees (ledger, traversal) relies on this being the truth.
    """

    positions: Tensor
    tokens: Tensor
    logprobs: Tensor
    match: Tensor
    draw: Tensor | None = None
    q: Tensor | None = None

    @staticmethod
    def empty() -> Proposals:
        """No path at all: a drafter that has nothing to say returns this."""
        none = torch.empty(0, dtype=torch.int64)
        return Proposals(none, none.view(0, 1), torch.empty(0, 1, dtype=torch.float32), none)

    @staticmethod
    def of_paths(
        positions: Sequence[int],
        paths: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
        match: Sequence[int] | None = None,
    ) -> Proposals:
        """Build proposals from Python lists of unequal length, as look-ups have them."""
        if not paths:
            return Proposals.empty()
        longest = max(1, *(len(path) for path in paths))
        match = [0] * len(paths) if match is None else match
        return Proposals(
            torch.from_numpy(np.array(positions, dtype=np.int64)),
            torch.from_numpy(_left_aligned(paths, longest, -1, np.int64)),
            torch.from_numpy(_left_aligned(logprobs, longest, -np.inf, np.float32)),
            torch.from_numpy(np.array(match, dtype=np.int64)),
        )

    def check(self, n_nodes: int) -> None:
        """Raise TreeError where shapes or types are wrong or a position is no node of the tree."""
        positions, tokens, match = self.positions, self.tokens, self.match
        if positions.dim() != 1:
            raise TreeError(f"proposals need positions of shape [K], found {list(positions.shape)}")
        n_paths, shape = positions.shape[0], tokens.shape
        if shape != self.logprobs.shape or shape[:1] != (n_paths,) or len(shape) != 2:
            raise TreeError(
                f"proposals need tokens and logprobs of shape [{n_paths}, C], found "
                f"{list(shape)} and {list(self.logprobs.shape)}"
            )
        if not shape[1]:
            raise TreeError(
                f"proposals need at least one column of tokens, found {list(shape)}; "
                "return Proposals.empty() for no path"
            )
        if match.shape != (n_paths,):
            raise TreeError(f"proposals need match of shape [{n_paths}], found {list(match.shape)}")
        for name, column in (("positions", positions), ("tokens", tokens), ("match", match)):
            if column.dtype is not torch.int64:
                raise TreeError(f"proposals need {name} of type int64, found {column.dtype}")
        if not self.logprobs.is_floating_point():
            raise TreeError(f"proposals need logprobs of a float type, found {self.logprobs.dtype}")
        for name in ("positions", "tokens", "logprobs", "match", "draw", "q"):
            column = getattr(self, name)
            if column is not None and not column.is_cpu:
                raise TreeError(f"proposals must be on the cpu, found {name} on {column.device}")
        if n_paths == 0:
            return
        # Lists: for a handful of paths a reduction of numpy costs more than Python's.
        lowest, above = min(match.tolist()), positions.tolist()
        if lowest < 0:
            raise TreeError(f"proposal match must be 0 or more, found {lowest}")
        if min(above) < 0 or max(above) >= n_nodes:
            raise TreeError(f"proposal positions must be nodes 0..{n_nodes - 1}, found {above}")
        if self.draw is not None:
            self._check_draws(self.draw)

    def _check_draws(self, draw: Tensor) -> None:
        """Raise TreeError unless drawn paths say truly how they can have been drawn."""
        n_paths = self.positions.shape[0]
        if draw.shape != (n_paths,) or draw.dtype != torch.int64:
            raise TreeError(
                f"proposals need draw of shape [{n_paths}] and type int64, found "
                f"{list(draw.shape)} of {draw.dtype}"
            )
        if self.q is None or self.q.dim() != 2 or not self.q.is_floating_point():
            raise TreeError("drawn proposals need q of shape [Q, V] and a float type")
        rows, tokens = draw.tolist(), self.tokens.tolist()
        q = self.q.detach().to(torch.float64).numpy()
        n_rows, vocab_size = q.shape
        if min(rows) < -1 or max(rows) >= n_rows:
            raise TreeError(f"proposal draws must name rows -1..{n_rows - 1} of q, found {rows}")
        # Written so that NaN fails.
        if q.size and not (q.min() >= 0.0 and q.max() <= 1.0 and abs(q.sum(1) - 1).max() <= 1e-3):
            raise TreeError("drawn proposals need rows of q that are probabilities and sum to 1")
        under: dict[int, int] = {}
        taken: set[tuple[int, int]] = set()
        for position, row, path in zip(self.positions.tolist(), rows, tokens, strict=True):
            if row < 0:
                continue
            token = path[0]
            if any(after != -1 for after in path[1:]):
                raise TreeError("a drawn path must be one token long")
            if not 0 <= token < vocab_size:
                raise TreeError(f"drawn tokens must be 0..{vocab_size - 1}, found {token}")
            if q[row, token] <= 0.0:
                raise TreeError("a token of probability 0 cannot have been drawn")
            if under.setdefault(row, position) != position:
                raise TreeError(f"draws from row {row} of q must hang under one node")
            if (row, token) in taken:
                raise TreeError(f"token {token} was drawn twice from row {row} of q")
            taken.add((row, token))


@dataclass(frozen=True, slots=True)
class Ledger:
    """What was proposed under the nodes of a verified tree, in the order of proposing.

    A tree in which children were drawn at random can be verified exactly only if nothing that was
    drawn is forgotten: neither a token that somebody had proposed before, nor one whose node did
    not survive the pruning. So the ledger holds a slot for each draw, and one for each child that
    was not drawn, for every node that is verified (docs/losslessness.md).

    Attributes
    ----------
    node : int64 [L], index in the verified tree of the node under which the slot was proposed.
    token : int64 [L], its token.
    child : int64 [L], index of the child that holds it, -1 if the tree holds none.
    row : int64 [L], row of ``q`` that it was drawn from, -1 if it was not drawn. Slots of one row
        were drawn without replacement.
    q : float [Q, V'], draw probabilities.
    """

    node: Tensor
    token: Tensor
    child: Tensor
    row: Tensor
    q: Tensor

    def of_root(self) -> Ledger | None:
        """The root's slots alone, for a tree that has lost all other nodes; None if none was drawn.

        What was drawn under the root counts even then.
        """
        here = self.node == ROOT
        if not bool((self.row[here] >= 0).any()):
            return None
        lost = torch.full_like(self.child[here], -1)
        return Ledger(self.node[here], self.token[here], lost, self.row[here], self.q)

    def under(self, node: int) -> list[tuple[int, int, int, int]]:
        """(slot, token, child, row) of every slot proposed under ``node``, in order."""
        columns = (self.node, self.token, self.child, self.row)
        slots = enumerate(zip(*(column.tolist() for column in columns), strict=True))
        return [(slot, *rest) for slot, (above, *rest) in slots if above == node]


def _left_aligned(
    rows: Sequence[Sequence[float]], n_columns: int, padding: float, dtype: type
) -> NDArray[Any]:
    """[K, n_columns] from rows of unequal length; of a list of lists all would be slower."""
    padded = chain.from_iterable([*row, *[padding] * (n_columns - len(row))] for row in rows)
    aligned: NDArray[Any] = np.array([*padded], dtype=dtype).reshape(len(rows), n_columns)
    return aligned


def lineage_matrix(lineages: Sequence[int], n_nodes: int) -> NDArray[np.bool_]:
    """bool [k, N] from k bit sets over N nodes: bit j says whether node j lies on the path."""
    n_bytes = -(-n_nodes // 8)
    rows = b"".join([lineage.to_bytes(n_bytes, "little") for lineage in lineages])
    packed = np.frombuffer(rows, dtype=np.uint8).reshape(len(lineages), n_bytes)
    return np.unpackbits(packed, axis=1, count=n_nodes, bitorder="little").view(np.bool_)


def _bit_sets(matrix: NDArray[np.bool_]) -> list[int]:
    """What ``lineage_matrix`` undoes: a bit set per row."""
    packed = np.packbits(matrix, axis=1, bitorder="little")
    rows, n_bytes = packed.tobytes(), packed.shape[1]
    starts = range(0, len(rows), n_bytes)
    return [int.from_bytes(rows[start : start + n_bytes], "little") for start in starts]


class TreeLists(NamedTuple):
    """Columns of a ``TokenTree`` as lists [N]. Not to be written to."""

    token: list[int]
    parent: list[int]
    depth: list[int]
    source: list[int]
    proposers: list[int]
    node: list[int]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A finished draft tree, pruned and ready to be verified.

    Laws (``check`` raises TreeError on a breach): node 0 is the root, its own parent, at depth 0
    with logprob 0; ``parent[i] < i`` elsewhere; ``depth[i] = depth[parent[i]] + 1``;
    ``logprob[i] <= logprob[parent[i]]``; siblings have different tokens; ``ancestors[i, j]`` is
    True exactly where j lies on the path from the root to i, both ends included.

    Attributes
    ----------
    token, parent, depth : int64 [N].
    logprob : float32 [N], log probability of the path in nats, -inf where a part is unscored.
    source : int64 [N], drafter that proposed the node first (NOBODY for the root).
    scorer : int64 [N], drafter that last scored it (NOBODY if none).
    proposers : int64 [N], every drafter that proposed it: bit i is drafter i, the source's among
        them (0 for the root).
    ancestors : bool [N, N].
    node : int64 [N], the node's number in the working tree that it was pruned from.
    ledger : what was proposed, in order; None where nothing was drawn at random.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    logprob: Tensor
    source: Tensor
    scorer: Tensor
    proposers: Tensor
    ancestors: Tensor
    node: Tensor
    ledger: Ledger | None = None
    _lists: TreeLists | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.token.shape[0])

    @staticmethod
    def root_only(token: int) -> TokenTree:
        """The tree of plain decoding: the last committed token and nothing else."""
        lists = TreeLists([token], [0], [0], [NOBODY], [0], [0])
        return TokenTree.of_lists(lists, [NOBODY], [0.0], [1], None)

    @staticmethod
    def of_lists(
        lists: TreeLists,
        scorer: Sequence[int],
        logprob: Sequence[float],
        lineages: Sequence[int],
        ledger: Ledger | None,
    ) -> TokenTree:
        """The tree of these columns, [N] each, which are kept as its ``lists``.

        ``lineages`` are bit sets: bit j of the i-th is ``ancestors[i, j]``.
        """
        # One conversion for all columns.
        rows = np.array([*lists, scorer], dtype=np.int64)
        token, parent, depth, source, proposers, node, scored = torch.from_numpy(rows).unbind()
        tree = TokenTree(
            token=token,
            parent=parent,
            depth=depth,
            logprob=torch.from_numpy(np.array(logprob, dtype=np.float32)),
            source=source,
            scorer=scored,
            proposers=proposers,
            ancestors=torch.from_numpy(lineage_matrix(lineages, len(lineages))),
            node=node,
            ledger=ledger,
        )
        object.__setattr__(tree, "_lists", lists)
        return tree

    def lists(self) -> TreeLists:
        """Columns as lists, made once: as they were when the tree was checked."""
        return self._lists or self._listed()

    def _listed(self) -> TreeLists:
        columns = (self.token, self.parent, self.depth, self.source, self.proposers, self.node)
        lists = TreeLists(*(column.tolist() for column in columns))
        object.__setattr__(self, "_lists", lists)
        return lists

    def path(self, index: int) -> list[int]:
        """Tokens from the root's child down to node ``index`` (empty for the root)."""
        token, parent = self.lists().token, self.lists().parent
        tokens: list[int] = []
        while index != ROOT:
            tokens.append(token[index])
            index = parent[index]
        return tokens[::-1]

    def check(self) -> None:
        """Raise TreeError naming the first law that does not hold.

        Cheap enough for every step: a custom builder or graft must not be able to make the target
        read a tree that is none.
        """
        for law, holds in self._laws():
            if not holds:
                raise TreeError(f"draft tree breaks the law: {law}")

    def _laws(self) -> Iterator[tuple[str, bool]]:
        """Each law and whether it holds; a law may rely on those before it."""
        n = len(self)
        scores = (self.logprob, self.source, self.scorer, self.proposers)
        columns = (self.token, self.parent, self.depth, *scores)
        shapes = all(column.shape == (n,) for column in (*columns, self.node))
        yield "columns have one entry per node", shapes and self.ancestors.shape == (n, n)
        token, parent, depth, source, proposers, _ = self._listed()
        logprob = self.logprob.tolist()
        inner = range(1, n)
        root = parent[0] == 0 and depth[0] == 0 and logprob[0] == 0.0
        yield "node 0 is the root: own parent, depth 0, logprob 0", root
        yield "parent[i] < i", all(0 <= parent[i] < i for i in inner)
        falls = all(depth[i] == depth[parent[i]] + 1 for i in inner)
        yield "depth[i] = depth[parent[i]] + 1", falls
        outranked = all(logprob[i] <= logprob[parent[i]] for i in inner)
        yield "logprob[i] <= logprob[parent[i]]", outranked
        named = all(by < 0 or who >> by & 1 for by, who in zip(source, proposers, strict=True))
        yield "a node's source is among its proposers", named
        children = set(zip(parent[1:], token[1:], strict=True))
        yield "siblings have different tokens", len(children) == n - 1
        lineage = _bit_sets(self.ancestors.numpy() != 0)
        paths = all(lineage[i] == lineage[parent[i]] | 1 << i for i in inner)
        yield "ancestors are the path to the root", paths and lineage[0] == 1
        if self.ledger is not None:
            slots = self.ledger
            held, below = slots.token.tolist(), slots.child.tolist()
            node = slots.node.tolist()
            yield "ledger slots hang under nodes", all(0 <= above < n for above in node)
            holds = all(
                child < 0 or (child < n and parent[child] == above and token[child] == own)
                for above, own, child in zip(node, held, below, strict=True)
            )
            yield "ledger children hold their slot's token under its node", holds


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target keeps of a tree.

    Attributes
    ----------
    path : indices into the verified TokenTree of the accepted nodes, top down, without the root.
    tokens : the tokens to commit: those of ``path``, then the bonus token.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
