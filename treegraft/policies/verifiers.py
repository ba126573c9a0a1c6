"""Verifiers: which path of the tree the target keeps.

Shapes: V vocabulary. Rules and proofs: docs/losslessness.md.
"""

from __future__ import annotations

from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from treegraft.core.roles import Verifier
from treegraft.core.sampling import TargetDistribution
from treegraft.core.tree import ROOT, Ledger, TokenTree, Verdict


class WalkConfig(BaseModel):
    """Take the target's own token at each node and descend while the tree has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["walk"] = "walk"


class LedgerConfig(BaseModel):
    """Recursive rejection over the ledger, draws first; a walk where nothing was drawn."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["ledger"] = "ledger"


class TraversalConfig(BaseModel):
    """Traversal verification, leaves first: joint acceptance of whole drawn paths."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["traversal"] = "traversal"


@final
class WalkVerifier(Verifier):
    """Exact for every tree, as the target's noise is nobody else's (docs/method.md section 2).

    Every committed token is the target's draw given its prefix, so the output is that of plain
    decoding whatever the tree holds.
    """

    in_text_order = True

    def __init__(self, config: WalkConfig) -> None:
        del config

    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        child = _children(tree)
        path: list[int] = []
        tokens: list[int] = []
        node: int | None = ROOT
        while node is not None:
            tokens.append(target.token(node))
            node = child.get((node, tokens[-1]))
            if node is not None:
                path.append(node)
        return Verdict(tuple(path), tuple(tokens))


@final
class LedgerVerifier(Verifier):
    """Recursive rejection (SpecInfer, arXiv 2305.09781) over slots that each keep their own q.

    At a node r starts as the target's law p. Draws come first, in the order they were made: a slot
    is taken with probability min(1, r(x) / q(x)), else r becomes the normalised (r - q)+. A child
    that was not drawn has a one-hot q, and a series of such slots amounts to one token from r: it
    is taken with the noise of plain decoding, so where nothing was drawn the tokens are ``walk``'s.
    """

    in_text_order = True
    needs_ledger = True

    def __init__(self, config: LedgerConfig) -> None:
        del config

    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        child = _children(tree)
        path: list[int] = []
        tokens: list[int] = []
        node = ROOT
        while True:
            token, below = self._next(node, tree.ledger, target)
            tokens.append(token)
            if below is None:
                below = child.get((node, token), -1)
            if below < 0:
                return Verdict(tuple(path), tuple(tokens))
            path.append(below)
            node = below

    @staticmethod
    def _next(
        node: int, ledger: Ledger | None, target: TargetDistribution
    ) -> tuple[int, int | None]:
        """The token after ``node`` and the child that a draw names for it (None: look it up)."""
        slots = [slot for slot in ledger.under(node) if slot[3] >= 0] if ledger is not None else []
        if ledger is None or not slots:
            return target.token(node), None
        position = target.position(node)
        law = target.probabilities(node).numpy()
        sources = _Sources(ledger, law.shape[0])
        for slot, token, below, row in slots:
            q = sources.next(row, token)
            # An id that only the drafter has is never taken.
            wanted = float(law[token]) if token < law.shape[0] else 0.0
            if wanted > 0.0 and target.noise.coin(position, slot) * float(q[token]) < wanted:
                return token, below
            rest = np.maximum(law - q, 0.0)
            mass = float(rest.sum())
            if mass > 0.0:
                law = rest / mass
            elif wanted > 0.0:  # law and q are one and the same, so only rounding rejected it
                return token, below
            # Else rounding drew what the target excludes, and the law stays.
        return _pick(law, position, target), None


@final
class TraversalVerifier(Verifier):
    """Traversal verification (arXiv 2505.12398) over the ledger, slots in the order of proposing.

    A node is reached with a rate a, 1 at the root. A slot passes the rate min(1, a r(x) / q(x)) to
    its child, whose whole subtree is tried first; if nothing in it is accepted, the node goes on
    with the mass S of (a r - q)+: a becomes S / (S + 1 - a) and r its normalised form. After the
    last slot the node itself is accepted with probability a, and the bonus token comes from r. A
    slot whose node was pruned is a leaf without a bonus token.
    """

    needs_ledger = True

    def __init__(self, config: TraversalConfig) -> None:
        del config

    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        found = _Traversal(tree, target).visit(ROOT, 1.0)
        assert found is not None  # the root's rate stays 1
        return Verdict(tuple(found[0]), tuple(found[1]))


class _Traversal:
    def __init__(self, tree: TokenTree, target: TargetDistribution) -> None:
        self._tree = tree
        self._target = target
        self._root_position = target.position(ROOT)
        self._n_coins = len(tree) if tree.ledger is None else len(tree.ledger.node)

    def _slots(self, node: int) -> list[tuple[int, int, int, int]]:
        if self._tree.ledger is not None:
            return self._tree.ledger.under(node)
        children = (self._tree.parent == node).nonzero()[:, 0].tolist()
        return [(c, int(self._tree.token[c]), c, -1) for c in children if c != ROOT]

    def visit(self, node: int, rate: float) -> tuple[list[int], list[int]] | None:
        """Nodes and tokens of what is accepted under ``node``; None if the node is rejected."""
        law = self._target.probabilities(node).numpy()
        sources = _Sources(self._tree.ledger, law.shape[0])
        for slot, token, below, row in self._slots(node):
            q = sources.next(row, token)
            scaled = law * rate
            wanted = float(scaled[token]) if token < law.shape[0] else 0.0
            passed = min(1.0, wanted / float(q[token])) if wanted > 0.0 else 0.0
            if passed > 0.0:
                found = self._try(slot, token, below, passed)
                if found is not None:
                    return found
            rest = np.maximum(scaled - q, 0.0)
            mass = float(rest.sum())
            if mass <= 0.0:
                # All of the rate went into the slot; at the root a rounding error is what is left.
                if rate < 1.0:
                    return None
                break
            law, rate = rest / mass, mass / (mass + (1.0 - rate))
        if self._target.noise.coin(self._root_position, self._n_coins + node) >= rate:
            return None
        return [], [_pick(law, self._target.position(node), self._target)]

    def _try(
        self, slot: int, token: int, below: int, rate: float
    ) -> tuple[list[int], list[int]] | None:
        if below < 0:
            accepted = self._target.noise.coin(self._root_position, slot) < rate
            return ([], [token]) if accepted else None
        found = self.visit(below, rate)
        return None if found is None else ([below, *found[0]], [token, *found[1]])


class _Sources:
    """q of each slot under one node, float64 [V]: one-hot, or a row of the ledger without the
    tokens that were drawn from it before.
    """

    def __init__(self, ledger: Ledger | None, vocab_size: int) -> None:
        self._ledger = ledger
        self._vocab_size = vocab_size
        self._gone: dict[int, list[int]] = {}

    def next(self, row: int, token: int) -> NDArray[np.float64]:
        if row < 0 or self._ledger is None:
            q = np.zeros(self._vocab_size)
            q[token] = 1.0
            return q
        gone = self._gone.setdefault(row, [])
        left = self._ledger.q[row].numpy().astype(np.float64)
        left[gone] = 0.0
        left /= left.sum()
        gone.append(token)
        # Ids that only one of the two has: the target gives the drafter's 0, and it the target's.
        missing = self._vocab_size - left.shape[0]
        return np.pad(left, (0, missing)) if missing > 0 else left[: self._vocab_size]


def _pick(law: NDArray[np.float64], position: int, target: TargetDistribution) -> int:
    """The token at ``position`` by ``law`` float64 [V] and its noise; the likeliest if greedy."""
    if target.sampling.temperature == 0.0:
        return int(law.argmax())
    with np.errstate(divide="ignore"):
        return target.noise.token(position, torch.from_numpy(np.log(law)))


def _children(tree: TokenTree) -> dict[tuple[int, int], int]:
    parent, token = tree.lists().parent, tree.lists().token
    return {(parent[i], token[i]): i for i in range(1, len(token))}
