"""The draft tree as data: what a drafter proposes, what is verified, what the verifier decides.

Shapes: N tree nodes, K proposed paths, C tokens of the longest path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

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
    """

    positions: Tensor
    tokens: Tensor
    logprobs: Tensor
    match: Tensor

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
        return Proposals(
            torch.tensor(positions, dtype=torch.int64),
            torch.from_numpy(_left_aligned(paths, longest, -1, np.int64)),
            torch.from_numpy(_left_aligned(logprobs, longest, -np.inf, np.float32)),
            torch.tensor([0] * len(paths) if match is None else match, dtype=torch.int64),
        )

    def check(self, n_nodes: int) -> None:
        """Raise TreeError where shapes or types are wrong or a position is no node of the tree."""
        if self.positions.dim() != 1:
            raise TreeError(
                f"proposals need positions of shape [K], found {list(self.positions.shape)}"
            )
        n_paths = self.positions.shape[0]
        shape = self.tokens.shape
        if shape != self.logprobs.shape or shape[:1] != (n_paths,) or len(shape) != 2:
            raise TreeError(
                f"proposals need tokens and logprobs of shape [{n_paths}, C], found "
                f"{list(self.tokens.shape)} and {list(self.logprobs.shape)}"
            )
        if not shape[1]:
            raise TreeError(
                f"proposals need at least one column of tokens, found {list(shape)}; "
                "return Proposals.empty() for no path"
            )
        if self.match.shape != (n_paths,):
            raise TreeError(
                f"proposals need match of shape [{n_paths}], found {list(self.match.shape)}"
            )
        for name in ("positions", "tokens", "match"):
            dtype = getattr(self, name).dtype
            if dtype != torch.int64:
                raise TreeError(f"proposals need {name} of type int64, found {dtype}")
            if getattr(self, name).device.type != "cpu":
                raise TreeError(f"proposals must be on the cpu, found {name} elsewhere")
        if not self.logprobs.is_floating_point():
            raise TreeError(f"proposals need logprobs of a float type, found {self.logprobs.dtype}")
        if self.logprobs.device.type != "cpu":
            raise TreeError("proposals must be on the cpu, found logprobs elsewhere")
        if n_paths == 0:
            return
        match, positions = self.match.numpy(), self.positions.numpy()
        if match.min() < 0:
            raise TreeError(f"proposal match must be 0 or more, found {match.min()}")
        if positions.min() < 0 or positions.max() >= n_nodes:
            raise TreeError(
                f"proposal positions must be nodes 0..{n_nodes - 1}, found "
                f"{self.positions.tolist()}"
            )


def _left_aligned(
    rows: Sequence[Sequence[float]], n_columns: int, padding: float, dtype: type
) -> NDArray[Any]:
    """[K, n_columns] from rows of unequal length; torch would read a list of lists far slower."""
    filled = np.arange(n_columns) < np.array([len(row) for row in rows])[:, None]
    aligned: NDArray[Any] = np.full(filled.shape, padding, dtype=dtype)
    aligned[filled] = np.fromiter(chain.from_iterable(rows), dtype)
    return aligned


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
    source : int64 [N], drafter that proposed the node (NOBODY for the root).
    scorer : int64 [N], drafter that last scored it (NOBODY if none).
    ancestors : bool [N, N].
    node : int64 [N], the node's number in the working tree that it was pruned from.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    logprob: Tensor
    source: Tensor
    scorer: Tensor
    ancestors: Tensor
    node: Tensor

    def __len__(self) -> int:
        return int(self.token.shape[0])

    @staticmethod
    def root_only(token: int) -> TokenTree:
        """The tree of plain decoding: the last committed token and nothing else."""
        zero = torch.zeros(1, dtype=torch.int64)
        return TokenTree(
            token=torch.tensor([token]),
            parent=zero,
            depth=zero,
            logprob=torch.zeros(1, dtype=torch.float32),
            source=zero + NOBODY,
            scorer=zero + NOBODY,
            ancestors=torch.ones(1, 1, dtype=torch.bool),
            node=zero,
        )

    def path(self, index: int) -> list[int]:
        """Tokens from the root's child down to node ``index`` (empty for the root)."""
        tokens: list[int] = []
        while index != ROOT:
            tokens.append(int(self.token[index]))
            index = int(self.parent[index])
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
        columns = (self.token, self.parent, self.depth, self.logprob, self.source, self.scorer)
        shapes = all(column.shape == (n,) for column in (*columns, self.node))
        yield "columns have one entry per node", shapes and self.ancestors.shape == (n, n)
        parent, depth = self.parent.numpy(), self.depth.numpy()
        logprob, lineage = self.logprob.numpy(), self.ancestors.numpy()
        own = np.arange(n)
        root = parent[0] == 0 and depth[0] == 0 and logprob[0] == 0.0
        yield "node 0 is the root: own parent, depth 0, logprob 0", bool(root)
        above, inner = parent[1:], own[1:]
        yield "parent[i] < i", bool(((above >= 0) & (above < inner)).all())
        yield "depth[i] = depth[parent[i]] + 1", bool((depth[1:] == depth[above] + 1).all())
        yield "logprob[i] <= logprob[parent[i]]", bool((logprob[1:] <= logprob[above]).all())
        children = set(zip(above.tolist(), self.token[1:].tolist(), strict=True))
        yield "siblings have different tokens", len(children) == n - 1
        expected = lineage[parent]
        expected[0] = False
        expected[own, own] = True
        yield "ancestors are the path to the root", bool((lineage == expected).all())


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
