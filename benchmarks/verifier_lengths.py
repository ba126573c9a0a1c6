"""Expected tokens per step of each verifier, exact, on little table models.

A target over 4 tokens and a drafter whose probabilities mix its law with another table; every
outcome of the draws and coins is enumerated. ``agreement`` is the share of the target in the mix.

    PYTHONPATH=tests python benchmarks/verifier_lengths.py
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from statistics import mean
from typing import Annotated

import exact_cases
import typer
from exact_cases import Case, Rule, TableDrafter, World, fractions
from rich.console import Console
from rich.table import Table

from treegraft.backends.exact import (
    Dice,
    ExactLedger,
    ExactTraversal,
    ExactVerifier,
    ExactWalk,
    Law,
    law_of,
)
from treegraft.core.roles import TreeBackend

VERIFIERS: dict[str, type[ExactVerifier]] = {
    "walk": ExactWalk,
    "ledger": ExactLedger,
    "traversal": ExactTraversal,
}
# name: drawn and likeliest children of a position, layers, positions per layer.
SHAPES = {
    "1 likeliest, chain of 2": (0, 1, 2, 1),
    "1 drawn, chain of 2": (1, 0, 2, 1),
    "2 likeliest, 1 layer": (0, 2, 1, 1),
    "2 drawn, 1 layer": (2, 0, 1, 1),
    "1 drawn + 1 likeliest, 1 layer": (1, 1, 1, 1),
    "2 likeliest, 2 layers": (0, 2, 2, 1),
    "2 drawn, 2 layers": (2, 0, 2, 1),
    "1 drawn + 1 likeliest, 2 layers": (1, 1, 2, 1),
}


@dataclass(frozen=True)
class Sixteenths(World):
    """A target whose probabilities floats hold exactly."""

    def law(self, text: tuple[int, ...]) -> Law:
        return fractions(self.seed, self.n_ids, tuple(text[-1:]), 16)


class Mixed(TableDrafter):
    """q = share of the target's law + the rest of a table of its own; ``order`` holds quarters."""

    def q(self, tree: TreeBackend, node: int) -> list[Fraction]:
        text = (*self.text, *tree.path(node))
        share = Fraction(self.rule.order, 4)
        own = fractions(self.rule.seed, self.world.n_ids, text[-1:], 16)
        return [share * p + (1 - share) * w for p, w in zip(self.world.law(text), own, strict=True)]


def expected_tokens(case: Case, verifier: type[ExactVerifier]) -> Fraction:
    """Mean number of tokens that a step commits."""

    def length(dice: Dice) -> int:
        return len(case.step(case.prompt, dice, verifier))

    return sum((n * p for n, p in law_of(length).items()), Fraction(0))


def main(
    worlds: Annotated[int, typer.Option(help="Targets and drafters to average over.")] = 12,
) -> None:
    """Print the table."""
    exact_cases.TableDrafter = Mixed  # the cases build their drafters by this name
    table = Table("tree", "agreement", *VERIFIERS, "best in most worlds")
    for name, (n_drawn, n_likeliest, layers, width) in SHAPES.items():
        for quarters in (1, 3):
            found: dict[str, list[Fraction]] = {verifier: [] for verifier in VERIFIERS}
            for seed in range(worlds):
                rule = Rule(seed + 500, order=quarters, n_drawn=n_drawn, n_likeliest=n_likeliest)
                world = Sixteenths(n_ids=4, order=1, seed=seed)
                case = Case(world, (rule,), (0,) * layers, width, 4, 0, None, most_draws=9)
                for verifier, rule_class in VERIFIERS.items():
                    found[verifier].append(expected_tokens(case, rule_class))
            wins = dict.fromkeys(VERIFIERS, 0)
            for values in zip(*found.values(), strict=True):
                for verifier, value in zip(VERIFIERS, values, strict=True):
                    wins[verifier] += value == max(values)
            best = [f"{verifier} {n}" for verifier, n in wins.items() if n == max(wins.values())]
            means = [f"{float(mean(values)):.3f}" for values in found.values()]
            table.add_row(name, f"{quarters / 4:.2f}", *means, f"{', '.join(best)} of {worlds}")
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
