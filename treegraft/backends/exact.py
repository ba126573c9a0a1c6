"""Verification in exact arithmetic: the specification of the verifiers, and the law of their texts.

Plain Python over ``fractions.Fraction``. ``law_of`` runs a random program once for every outcome of
its choices, so the law of a decoding step, or of a whole short text, comes out as exact fractions
and must EQUAL the target's. The verifiers here and those in ``policies/verifiers.py`` must take the
same tokens when given the same noise.

Shapes: V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import TypeVar

import torch

from treegraft.core.errors import TreegraftError
from treegraft.core.sampling import TargetDistribution
from treegraft.core.tree import ROOT, TokenTree, Verdict

Law = Sequence[Fraction]
"""Probabilities of the ids 0..V-1."""

Outcome = TypeVar("Outcome", bound=Hashable)


class Dice(ABC):
    """Where the randomness of a program comes from."""

    @abstractmethod
    def pick(self, weights: Law, position: int) -> int:
        """An index with probability proportional to its weight; decides the token at a position."""

    @abstractmethod
    def accept(self, probability: Fraction, position: int, number: int) -> bool:
        """True with this probability; ``position`` and ``number`` name the coin."""


class _EveryOutcome(Dice):
    """Replays a list of choices, and takes the first open branch where the list ends."""

    def __init__(self, script: list[tuple[int, int]]) -> None:
        self.script = script
        self._at = 0
        self.probability = Fraction(1)

    def _choose(self, weights: Law) -> int:
        """Branches are numbered among the possible ones."""
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        if not possible:
            raise TreegraftError("a choice needs an outcome of positive probability")
        if self._at == len(self.script):
            self.script.append((0, len(possible)))
        branch = possible[self.script[self._at][0]]
        self._at += 1
        self.probability *= weights[branch] / sum(weights)
        return branch

    def pick(self, weights: Law, position: int) -> int:
        return self._choose(weights)

    def accept(self, probability: Fraction, position: int, number: int) -> bool:
        chance = min(max(probability, Fraction(0)), Fraction(1))
        return self._choose([1 - chance, chance]) == 1


def law_of(program: Callable[[Dice], Outcome]) -> dict[Outcome, Fraction]:
    """Exact law of what ``program`` returns, by running it for every outcome of its choices."""
    law: dict[Outcome, Fraction] = {}
    script: list[tuple[int, int]] = []
    while True:
        dice = _EveryOutcome(script)
        outcome = program(dice)
        law[outcome] = law.get(outcome, Fraction(0)) + dice.probability
        # On to the next branch of the last choice that has one.
        while script and script[-1][0] + 1 == script[-1][1]:
            script.pop()
        if not script:
            return law
        branch, of = script.pop()
        script.append((branch + 1, of))


class KeyedDice(Dice):
    """The decisions that the tensor verifiers take with the keyed noise of ``target``."""

    def __init__(self, target: TargetDistribution) -> None:
        self._target = target

    def pick(self, weights: Law, position: int) -> int:
        log = torch.tensor([float(weight) for weight in weights], dtype=torch.float64).log()
        if self._target.sampling.temperature == 0.0:
            return int(log.argmax())
        return int((log + self._target.noise.at(position)).argmax())

    def accept(self, probability: Fraction, position: int, number: int) -> bool:
        return Fraction(self._target.noise.coin(position, number)) < probability


class ExactVerifier(ABC):
    """A verification rule over a tree and the target's exact laws.

    Parameters
    ----------
    law : the target's law after node i of the tree, for every node that is looked at.
    q : exact rows of the ledger's ``q``; default: the floats as they stand, which are fractions.
    position : place in the text of the token after the root; only names the noise.
    """

    def __init__(
        self,
        tree: TokenTree,
        law: Callable[[int], Law],
        dice: Dice,
        q: Sequence[Law] | None = None,
        position: int = 0,
    ) -> None:
        self.tree = tree
        self.law = law
        self.dice = dice
        self.position = position
        if q is None and tree.ledger is not None:
            q = [[Fraction(value) for value in row] for row in tree.ledger.q.tolist()]
        self._q: Sequence[Law] = q or []

    @abstractmethod
    def verdict(self) -> Verdict:
        """The path and tokens that this outcome of the dice commits."""

    def depth(self, node: int) -> int:
        return int(self.tree.depth[node])

    def children(self, node: int) -> dict[int, int]:
        """Child by token."""
        inner = range(1, len(self.tree))
        return {int(self.tree.token[i]): i for i in inner if int(self.tree.parent[i]) == node}

    def slots(self, node: int) -> list[tuple[int, int, int, int]]:
        """(number, token, child or -1, row of q or -1) of every proposal under ``node``."""
        if self.tree.ledger is not None:
            return self.tree.ledger.under(node)
        return [(child, token, child, -1) for token, child in self.children(node).items()]

    def source(self, slots: Sequence[tuple[int, int, int, int]], place: int) -> Law:
        """What slot ``place`` was drawn from, given the draws before it: one-hot if it was not."""
        n_ids = len(self.law(ROOT))
        _, token, _, row = slots[place]
        if row < 0:
            return [Fraction(int(i == token)) for i in range(n_ids)]
        gone = {before[1] for before in slots[:place] if before[3] == row}
        left = [Fraction(0) if i in gone else w for i, w in enumerate(self._q[row])]
        total = sum(left)
        return [weight / total for weight in left]

    def rest(self, scaled: Law, q: Law) -> Law:
        """(scaled - q)+ over the target's ids."""
        return [
            max(p - (q[i] if i < len(q) else Fraction(0)), Fraction(0))
            for i, p in enumerate(scaled)
        ]


class ExactWalk(ExactVerifier):
    """The target's own token at every node."""

    def verdict(self) -> Verdict:
        path: list[int] = []
        tokens: list[int] = []
        node: int | None = ROOT
        while node is not None:
            tokens.append(self.dice.pick(self.law(node), self.position + self.depth(node)))
            node = self.children(node).get(tokens[-1])
            if node is not None:
                path.append(node)
        return Verdict(tuple(path), tuple(tokens))


class ExactLedger(ExactVerifier):
    """Recursive rejection, draws first in the order they were made, then the target's token."""

    def verdict(self) -> Verdict:
        path: list[int] = []
        tokens: list[int] = []
        node = ROOT
        while True:
            token, below = self.next(node)
            tokens.append(token)
            if below < 0:
                return Verdict(tuple(path), tuple(tokens))
            path.append(below)
            node = below

    def next(self, node: int) -> tuple[int, int]:
        """The token after ``node`` and its child, -1 if the tree holds none."""
        law, position = self.law(node), self.position + self.depth(node)
        slots = [slot for slot in self.slots(node) if slot[3] >= 0]
        for place, (number, token, below, _) in enumerate(slots):
            q = self.source(slots, place)
            if token < len(law) and self.accepts(law[token] / q[token], position, number):
                return token, below
            law = self.after_rejection(law, q)
        token = self.dice.pick(law, position)
        return token, self.children(node).get(token, -1)

    def accepts(self, ratio: Fraction, position: int, number: int) -> bool:
        return self.dice.accept(ratio, position, number)

    def after_rejection(self, law: Law, q: Law) -> Law:
        rest = self.rest(law, q)
        total = sum(rest)
        return [weight / total for weight in rest]


class ExactTraversal(ExactVerifier):
    """Leaves first; a node is reached with a rate, the root with 1."""

    def verdict(self) -> Verdict:
        found = self.visit(ROOT, Fraction(1))
        if found is None:
            raise TreegraftError("traversal verification must accept the root")
        return Verdict(tuple(found[0]), tuple(found[1]))

    def visit(self, node: int, rate: Fraction) -> tuple[list[int], list[int]] | None:
        """Nodes and tokens accepted under ``node``; None if the node itself is rejected."""
        law = self.law(node)
        slots = self.slots(node)
        for place, (number, token, below, _) in enumerate(slots):
            q = self.source(slots, place)
            scaled = [rate * p for p in law]
            passed = min(Fraction(1), scaled[token] / q[token]) if token < len(law) else Fraction(0)
            if passed > 0:
                found = self.try_slot(number, token, below, passed)
                if found is not None:
                    return found
            rest = self.rest(scaled, q)
            mass = sum(rest, Fraction(0))
            if mass == 0:
                return None
            law, rate = [weight / mass for weight in rest], mass / (mass + 1 - rate)
        n_coins = len(self.tree) if self.tree.ledger is None else len(self.tree.ledger.node)
        if not self.dice.accept(rate, self.position, n_coins + node):
            return None
        return [], [self.dice.pick(law, self.position + self.depth(node))]

    def try_slot(
        self, number: int, token: int, below: int, rate: Fraction
    ) -> tuple[list[int], list[int]] | None:
        """A slot whose node is not verified is a leaf without a bonus token."""
        if below < 0:
            return ([], [token]) if self.dice.accept(rate, self.position, number) else None
        found = self.visit(below, rate)
        return None if found is None else ([below, *found[0]], [token, *found[1]])
