"""Random little worlds for the exact law: a target and drafters given as fractions, policies that
grow a tree, and the law of what a verifier then emits.

Everything random is a choice of ``Dice``, so that a whole step can be enumerated. The trees are
grown by the product's own tree, builder and graft.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from pydantic import BaseModel
from torch import Tensor

from treegraft.backends.exact import Dice, ExactVerifier, Law, law_of
from treegraft.backends.tensor_tree import TensorTree
from treegraft.components import build_component
from treegraft.core.roles import (
    Commit,
    Context,
    Drafter,
    GraftPolicy,
    ScoringDrafter,
    Touched,
    TreeBackend,
    TreeBuilder,
)
from treegraft.core.tree import ROOT, Proposals, TokenTree
from treegraft.policies.builders import LayeredConfig
from treegraft.policies.grafts import TreegraftConfig

PROMPT = (0, 1)


class TooLarge(Exception):
    """A case has more outcomes than a test has time for."""


@cache
def weights(seed: int, n_ids: int, tail: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Whole numbers >= 0 that sum to ``total``: a fixed function of the arguments."""
    key = seed + 1
    for token in tail:
        key = (key * 1_000_003 + token + 7) % (2**61 - 1)
    left = [0] * n_ids
    for _ in range(total):
        key = (key * 6364136223846793005 + 1442695040888963407) % 2**64
        left[(key >> 33) * n_ids >> 31] += 1
    return tuple(left)


@cache
def fractions(seed: int, n_ids: int, tail: tuple[int, ...], total: int) -> tuple[Fraction, ...]:
    return tuple(Fraction(w, total) for w in weights(seed, n_ids, tail, total))


@dataclass(frozen=True)
class World:
    """A target over ``n_ids`` tokens that looks at the last ``order`` tokens of its text."""

    n_ids: int
    order: int
    seed: int

    def law(self, text: Sequence[int]) -> Law:
        tail = tuple(text[len(text) - self.order :]) if self.order else ()
        return fractions(self.seed, self.n_ids, tail, 9)

    def law_of_texts(self, text: tuple[int, ...], n_new: int) -> dict[tuple[int, ...], Fraction]:
        """The target's law of the ``n_new`` tokens after ``text``; impossible ones are left out."""
        law = {(): Fraction(1)}
        for _ in range(n_new):
            law = {
                (*new, token): p * q
                for new, p in law.items()
                for token, q in enumerate(self.law((*text, *new)))
                if q
            }
        return law


@dataclass(frozen=True)
class Rule:
    """How one drafter proposes: drawn and likeliest children, or a fixed path as a look-up has it.

    Attributes
    ----------
    n_drawn, n_likeliest : children of each kind under a position.
    path : tokens that a look-up hangs under every position.
    surplus : ids that the drafter has beyond the target's.
    """

    seed: int
    order: int = 1
    n_drawn: int = 0
    n_likeliest: int = 0
    path: tuple[int, ...] = ()
    surplus: int = 0


class TableDrafter(ScoringDrafter):
    """Probabilities in sixteenths, so that floats hold them exactly."""

    def __init__(self, rule: Rule, world: World, dice: Dice, most_draws: int) -> None:
        self.rule, self.world, self.dice = rule, world, dice
        self.text: tuple[int, ...] = ()
        self.most_draws = most_draws

    def begin(self, context: Context) -> None:
        self.text = tuple(context.tokens)

    def observe(self, commit: Commit) -> None:
        self.text = (*self.text, *commit.tokens)

    def q(self, tree: TreeBackend, node: int) -> list[Fraction]:
        tail = (*self.text, *tree.path(node))[-self.rule.order :] if self.rule.order else ()
        n_ids = self.world.n_ids + self.rule.surplus
        return list(fractions(self.rule.seed, n_ids, tail, 16))

    def score(self, tree: TreeBackend) -> Tensor:
        parent, token = tree.parent.tolist(), tree.token.tolist()
        own = [float(self.q(tree, parent[v])[token[v]]) for v in range(tree.n_nodes)]
        return torch.tensor(own).log()

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        places: list[int] = []
        paths: list[tuple[int, ...]] = []
        scores: list[list[float]] = []
        draw: list[int] = []
        table: list[list[float]] = []
        for position in positions.tolist():
            q = self.q(tree, position)
            floats = torch.tensor([float(w) for w in q], dtype=torch.float64)
            tokens: list[int] = []
            left = list(q)
            while len(tokens) < self.rule.n_drawn and any(left) and self.most_draws:
                tokens.append(self.dice.pick(left, 0))
                left[tokens[-1]] = Fraction(0)
                self.most_draws -= 1
            if tokens:
                table.append(floats.tolist())
            rows = [len(table) - 1] * len(tokens)
            best = sorted(range(len(q)), key=lambda i, q=q: (-q[i], i))[: self.rule.n_likeliest]
            for token, row in zip([*tokens, *best], [*rows, *[-1] * len(best)], strict=True):
                places.append(position)
                paths.append((token,))
                scores.append([float(floats[token].log())])
                draw.append(row)
            if self.rule.path:
                places.append(position)
                paths.append(self.rule.path)
                scores.append([-torch.inf] * len(self.rule.path))
                draw.append(-1)
        if not places:
            return Proposals.empty()
        made = Proposals.of_paths(places, paths, scores)
        if not table:
            return made
        return Proposals(
            made.positions,
            made.tokens,
            made.logprobs,
            made.match,
            torch.tensor(draw),
            torch.tensor(table, dtype=torch.float64),
        )


class LookUp(Drafter):
    """The same drafter for policies that must not see scores."""

    def __init__(self, inner: TableDrafter) -> None:
        self.inner = inner

    def begin(self, context: Context) -> None:
        self.inner.begin(context)

    def observe(self, commit: Commit) -> None:
        self.inner.observe(commit)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        return self.inner.propose(tree, positions, width)


class WhimsicalGraft(GraftPolicy):
    """Picks positions and scores by a hash of all that the tree holds: no policy is more fickle."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Tensor, width: int
    ) -> Touched:
        content = (*tree.token.tolist(), *tree.parent.tolist())
        n = tree.n_nodes
        order = weights(self.seed, n, content, 3 * n)
        positions = torch.tensor(sorted(range(n), key=lambda v: (-order[v], v))[:width])
        paths = tree.add_(drafter.propose(tree, positions, width), index, overwrite=True)
        n = tree.n_nodes
        content = (*tree.token.tolist(), *tree.parent.tolist())
        own = weights(self.seed + 1, n, content, 2 * n)
        tree.rescore_(torch.tensor([-1.0 / (1 + w) for w in own]), index)
        return Touched(paths[:, 0], torch.zeros(paths.shape[0], dtype=torch.int64))


@dataclass(frozen=True)
class Case:
    """A world, drafters, who acts in each layer, and the shape of the tree."""

    world: World
    rules: tuple[Rule, ...]
    calls: tuple[int, ...]
    width: int
    budget: int
    lookback: int
    whim: int | None
    most_draws: int = 3
    prompt: tuple[int, ...] = field(default=PROMPT)
    graft: BaseModel | None = None
    builder: BaseModel | None = None

    def policies(self) -> tuple[GraftPolicy, TreeBuilder]:
        """Fresh ones for each step; the ways of this case where no config names others."""
        graft = self.graft or TreegraftConfig(lookback=self.lookback)
        builder = self.builder or LayeredConfig(
            depth=len(self.calls), width=self.width, budget=self.budget
        )
        made = build_component("graft", graft), build_component("builder", builder)
        return (WhimsicalGraft(self.whim), made[1]) if self.whim is not None else made

    def grow(self, text: tuple[int, ...], dice: Dice, spoil: Callable[[Any], None]) -> TokenTree:
        """One step's tree, by the product's own policies."""
        tree = TensorTree(self.world.n_ids)
        tree.reset_(text[-1], max_depth=3, budget=self.policies()[1].budget)
        graft, builder = self.policies()
        drafters: list[Drafter] = []
        for rule in self.rules:
            inner = TableDrafter(rule, self.world, dice, self.most_draws)
            drafters.append(LookUp(inner) if rule.path else inner)
            drafters[-1].begin(Context(text, 99, self.world.n_ids, None))
        frontier = torch.tensor([ROOT])
        for layer, call in enumerate(self.calls, 1):
            touched = graft.visit(tree, drafters[call], call, frontier, builder.width)
            reached = builder.frontier(tree, touched, layer)
            if reached is None:
                break
            frontier = reached if len(reached) else frontier
        if self.calls:
            able = dict(enumerate(drafters))
            graft.finish(tree, able, self.calls, builder.width, builder.budget)
        spoil(tree)
        pruned = builder.prune(tree)
        pruned.check()
        return pruned

    def step(
        self,
        text: tuple[int, ...],
        dice: Dice,
        verifier: type[ExactVerifier],
        spoil: Callable[[Any], None] = lambda tree: None,
    ) -> tuple[int, ...]:
        """Tokens that one step commits after ``text``."""
        tree = self.grow(text, dice, spoil)
        laws: dict[int, Law] = {}

        def law(node: int) -> Law:
            if node not in laws:
                laws[node] = self.world.law((*text, *tree.path(node)))
            return laws[node]

        verdict = verifier(tree, law, dice).verdict()
        assert [int(tree.token[i]) for i in verdict.path] == list(verdict.tokens[:-1])
        return verdict.tokens

    def law_of_step(
        self, verifier: type[ExactVerifier], n_new: int, most_outcomes: int = 4000, **more: Any
    ) -> dict[tuple[int, ...], Fraction]:
        """Law of ``n_new`` tokens, those that one step commits and the target's own after them."""
        step = self._counted(
            lambda dice: self.step(self.prompt, dice, verifier, **more), most_outcomes
        )
        law: dict[tuple[int, ...], Fraction] = {}
        for tokens, p in law_of(step).items():
            rest = self.world.law_of_texts((*self.prompt, *tokens), max(n_new - len(tokens), 0))
            for more_tokens, q in rest.items():
                text = (*tokens, *more_tokens)[:n_new]
                law[text] = law.get(text, Fraction(0)) + p * q
        return law

    def law_of_text(
        self, verifier: type[ExactVerifier], n_new: int, most_outcomes: int = 40000
    ) -> dict[tuple[int, ...], Fraction]:
        """Law of a whole text of ``n_new`` tokens: steps of drafting, and the last one cut."""

        def run(dice: Dice) -> tuple[int, ...]:
            new: tuple[int, ...] = ()
            while len(new) < n_new:
                new = (*new, *self.step((*self.prompt, *new), dice, verifier))
            return new[:n_new]

        return law_of(self._counted(run, most_outcomes))

    @staticmethod
    def _counted(
        run: Callable[[Dice], tuple[int, ...]], most_outcomes: int
    ) -> Callable[[Dice], tuple[int, ...]]:
        runs = itertools.count(1)

        def counted(dice: Dice) -> tuple[int, ...]:
            if next(runs) > most_outcomes:
                raise TooLarge
            return run(dice)

        return counted


RULES = st.one_of(
    st.builds(
        Rule,
        seed=st.integers(0, 99),
        order=st.integers(0, 2),
        n_drawn=st.integers(1, 2),
        n_likeliest=st.integers(0, 1),
        surplus=st.integers(0, 1),
    ),
    st.builds(
        Rule, seed=st.integers(0, 99), order=st.integers(0, 2), n_likeliest=st.integers(1, 3)
    ),
    st.builds(
        Rule,
        seed=st.integers(0, 99),
        path=st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple),
    ),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Chains and wide trees, duplicates, empty ones, full width, pruned to any budget."""
    rules = tuple(draw(st.lists(RULES, min_size=1, max_size=3)))
    calls = draw(st.lists(st.integers(0, len(rules) - 1), max_size=3))
    world = World(
        n_ids=draw(st.integers(3, 5)), order=draw(st.integers(0, 2)), seed=draw(st.integers(0, 99))
    )
    return Case(
        world,
        rules,
        tuple(calls),
        width=draw(st.integers(1, 3)),
        budget=draw(st.integers(0, 8)),
        lookback=draw(st.integers(0, 3)),
        whim=draw(st.one_of(st.none(), st.integers(0, 50))),
    )
