"""The worked example of docs/method.md section 7: every score, position and node that is read.

The tables of the page are the expectation, and the drafters of the example are made from them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from treegraft.backends.reference import ReferenceTree
from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.roles import Commit, Context, Drafter, ScoringDrafter, TreeBackend
from treegraft.core.sampling import History, Noise, Sampling, TargetDistribution
from treegraft.core.tree import ROOT, Proposals
from treegraft.policies.builders import LayeredBuilder, LayeredConfig
from treegraft.policies.grafts import TreegraftConfig, TreegraftGraft
from treegraft.policies.verifiers import WalkConfig, WalkVerifier

PAGE = (Path(__file__).parents[2] / "docs" / "method.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## 7. A worked example") :]
LETTERS = "abcde"
NONE = -float("inf")


def table(header: str) -> list[list[str]]:
    """Cells of the rows of the section's table that has this header."""
    lines = SECTION[SECTION.index(header) :].splitlines()[2:]
    rows = [line for line in lines[: next(i for i, li in enumerate(lines) if not li)] if line]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def ids(path: str) -> list[int]:
    return [LETTERS.index(letter) for letter in path.split()]


class Model(ScoringDrafter):
    """log q by the token before."""

    def __init__(self) -> None:
        self.logq = torch.full((5, 5), -4.0)
        for before, entries in table("| after | log q |"):
            for entry in entries.split(", "):
                token, score = entry.split()
                self.logq[LETTERS.index(before), LETTERS.index(token)] = float(score)
        self.positions: list[list[int]] = []

    def begin(self, context: Context) -> None: ...

    def observe(self, commit: Commit) -> None: ...

    def score(self, tree: TreeBackend) -> Tensor:
        return self.logq[tree.token[tree.parent], tree.token]

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        self.positions.append(positions.tolist())
        top = self.logq[tree.token[positions]].topk(width)
        return Proposals(
            positions.repeat_interleave(width),
            top.indices.reshape(-1, 1),
            top.values.reshape(-1, 1),
            torch.zeros(width * len(positions), dtype=torch.int64),
        )


class LookUp(Drafter):
    """What is found in a layer, under a path."""

    def __init__(self) -> None:
        self.layer = 0
        self.found: dict[tuple[int, str], list[tuple[list[int], int, float]]] = {}
        pattern = re.compile(r"([a-e ]+) \(match (\d), (-[\d.]+)\)")
        for layer, under, found in table("| layer | under | found |"):
            self.found[int(layer), under] = [
                (ids(path), int(match), float(score))
                for path, match, score in pattern.findall(found)
            ]

    def begin(self, context: Context) -> None: ...

    def observe(self, commit: Commit) -> None: ...

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        self.layer += 2  # it acts in layers 1 and 3
        entries = []
        for node in positions.tolist():
            under = " ".join(LETTERS[token] for token in tree.path(node)) or "root"
            entries += [(node, *e) for e in self.found.get((self.layer - 1, under), [])[:width]]
        return Proposals.of_paths(
            [node for node, _, _, _ in entries],
            [path for _, path, _, _ in entries],
            [[score] + [NONE] * (len(path) - 1) for _, path, _, score in entries],
            [match for _, _, match, _ in entries],
        )


@pytest.fixture(params=[TensorTree, ReferenceTree], ids=["tensor", "reference"])
def tree(request: pytest.FixtureRequest) -> TreeBackend:
    made: TreeBackend = request.param(len(LETTERS))
    made.reset_(token=0, max_depth=9, budget=6)
    return made


BUILDER = LayeredBuilder(LayeredConfig(depth=4, width=2, budget=6))
ROWS = table("| node | path | by | 1 | 2 | 3 | 4 | read |")


def grow(tree: TreeBackend, revisit: bool = False) -> tuple[list[list[int]], list[list[int]]]:
    """The frontier after each layer, and the model's positions; scores are checked on the way."""
    graft = TreegraftGraft(TreegraftConfig(lookback=1, revisit=revisit))
    lookup, model = LookUp(), Model()
    frontier, frontiers = torch.tensor([ROOT]), []
    for layer in range(1, 5):
        index, drafter = [(0, lookup), (1, model)][(layer - 1) % 2]
        touched = graft.visit(tree, drafter, index, frontier, BUILDER.width)
        frontier = BUILDER.frontier(tree, touched, layer)
        frontiers.append(frontier.tolist())
        if not revisit:
            expected = [float(row[2 + layer]) for row in ROWS if row[2 + layer]]
            assert tree.logprob.tolist() == [0.0, *expected], f"layer {layer}"
    return frontiers, model.positions


def test_every_score_position_and_frontier_is_that_of_the_page(tree: TreeBackend) -> None:
    frontiers, positions = grow(tree)
    assert [tree.path(node) for node in range(1, tree.n_nodes)] == [ids(row[1]) for row in ROWS]
    proposers = [["look-up", "model"][i] for i in tree.source[1:].tolist()]
    assert proposers == [row[2] for row in ROWS]
    assert [int(row[0]) for row in ROWS] == list(range(1, tree.n_nodes))
    assert frontiers[:3] == [[1, 2], [6, 1], [8, 7]]
    assert positions == [[ROOT, 1], [6, 8]]


def test_with_revisits_the_older_of_two_equal_positions_is_taken_again(tree: TreeBackend) -> None:
    _, positions = grow(tree, revisit=True)
    assert positions == [[ROOT, 1], [6, 1]]
    assert [tree.path(node) for node in range(1, tree.n_nodes)] == [
        ids(row[1]) for row in ROWS[:-1]
    ]


def test_the_nodes_that_are_read_and_the_tokens_that_are_committed(tree: TreeBackend) -> None:
    grow(tree)
    pruned = BUILDER.prune(tree)
    assert pruned.node.tolist() == [ROOT, *(int(row[0]) for row in ROWS if row[-1] == "yes")]
    said = {(): "b", (1,): "c", (1, 2): "d", (1, 2, 3): "e"}
    logits = torch.zeros(len(pruned), len(LETTERS))
    for i in range(len(pruned)):
        token = said.get(tuple(pruned.path(i)), "a")
        logits[i, LETTERS.index(token)] = 1.0
    sampling, history = Sampling(), History([0], 1)
    target = TargetDistribution(logits, pruned, sampling, history, Noise(0, len(LETTERS)))
    verdict = WalkVerifier(WalkConfig()).verdict(pruned, target)
    assert pruned.node[list(verdict.path)].tolist() == [6, 8, 9]
    assert [LETTERS[token] for token in verdict.tokens] == ["b", "c", "d", "e"]
