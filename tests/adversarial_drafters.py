"""Drafters that misbehave; configs name them as ``adversarial_drafters:AlwaysWrong``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from table_models import hashed_model
from torch import Tensor

from treegraft.core.errors import DrafterError
from treegraft.core.offers import Offers, offers_of
from treegraft.core.roles import Commit, Context, Drafter, ScoringDrafter, TreeBackend
from treegraft.core.tree import Proposals


class _Told(Drafter):
    """Keeps the text it is told."""

    def begin(self, context: Context) -> None:
        self.text = list(context.tokens)

    def observe(self, commit: Commit) -> None:
        self.text += commit.tokens

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers:
        return offers_of(self.propose(tree, torch.tensor(path), width), path)


class AlwaysWrong(_Told):
    """Knows the greedy target, ``hashed_model(vocab_size, seed)``; proposes all but its token."""

    right = False

    def __init__(self, seed: int, vocab_size: int, order: int = 2) -> None:
        self.model = hashed_model(vocab_size, seed, order)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        entries: list[tuple[int, int]] = []
        for node in positions.tolist():
            best = int(self.model.logits(self.text + tree.path(node)).argmax())
            tokens = (
                [best] if self.right else [t for t in range(self.model.vocab_size) if t != best]
            )
            entries += [(node, token) for token in tokens[:width]]
        return Proposals.of_paths(
            [node for node, _ in entries], [[t] for _, t in entries], [[-0.1]] * len(entries)
        )


class AlwaysRight(AlwaysWrong):
    """Proposes the greedy target's token, and nothing else."""

    right = True


class Scripted(_Told):
    """The same paths under every position, with the same scores, whatever was asked for."""

    def __init__(
        self, paths: Sequence[Sequence[int]], score: float = -0.5, match: int = 1, times: int = 1
    ) -> None:
        self.paths, self.score, self.match = list(paths) * times, score, match

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        entries = [(node, path) for node in positions.tolist() for path in self.paths]
        return Proposals.of_paths(
            [node for node, _ in entries],
            [path for _, path in entries],
            [[self.score] * len(path) for _, path in entries],
            [self.match] * len(entries),
        )


class Recorder(Drafter):
    """Proposes every token under every position and keeps what it was told."""

    def __init__(
        self,
        target_top: int | None,
        vocab_size: int,
        tree_top: bool = False,
        target_hidden: bool = False,
    ) -> None:
        self.target_top = target_top
        self.tree_top = tree_top
        self.target_hidden = target_hidden
        self.vocab_size = vocab_size
        self.contexts: list[Context] = []
        self.commits: list[Commit] = []
        self.paths: list[list[list[int]]] = []

    def begin(self, context: Context) -> None:
        self.contexts.append(context)

    def observe(self, commit: Commit) -> None:
        self.commits.append(commit)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        entries = [(node, t) for node in positions.tolist() for t in range(self.vocab_size)]
        proposals = Proposals.of_paths(
            [node for node, _ in entries], [[t] for _, t in entries], [[-0.1]] * len(entries)
        )
        # The numbering that a commit's path refers to: once this layer is added, as it will be.
        shadow = [tree.path(node) for node in range(tree.n_nodes)]
        self.paths.append([*shadow, *([*shadow[node], t] for node, t in entries)])
        return proposals


class ScriptedScorer(ScoringDrafter):
    """Gives every node ``score`` and proposes ``paths`` with it."""

    def __init__(self, paths: Sequence[Sequence[int]], score: float) -> None:
        self.inner, self.value = Scripted(paths, score), score

    def begin(self, context: Context) -> None:
        self.inner.begin(context)

    def observe(self, commit: Commit) -> None:
        self.inner.observe(commit)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        return self.inner.propose(tree, positions, width)

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers:
        return self.inner.offers(tree, path, width)

    def score(self, tree: TreeBackend) -> Tensor:
        return torch.full((tree.n_nodes,), self.value)


class Faulty(ScoringDrafter):
    """Works until its ``after``-th call of ``method``, then raises or returns ``answer``."""

    ERRORS = {  # noqa: RUF012
        "value": ValueError("no such thing"),
        "own": DrafterError("out of ideas"),
        "interrupt": KeyboardInterrupt(),
    }

    def __init__(self, method: str, answer: str, after: int = 0) -> None:
        self.method, self.answer, self.left = method, answer, after

    def _act(self, method: str, good: Any, n_nodes: int = 1) -> Any:
        if method != self.method:
            return good
        self.left -= 1
        if self.left >= 0:
            return good
        if self.answer in self.ERRORS:
            raise self.ERRORS[self.answer]
        zero, one = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
        score = torch.zeros(1, 1)
        return {
            "none": None,
            "list": [1, 2],
            "short": torch.zeros(n_nodes - 1),
            "no_column": Proposals(zero, one[:, :0], score[:, :0], zero),
            "unequal": Proposals(zero, one, torch.zeros(1, 2), zero),
            "no_node": Proposals(zero + 10**6, one, score, zero),
            "floats": Proposals(zero, score, score, zero),
            "elsewhere": Proposals(zero.to("meta"), one, score, zero),
            "scores_elsewhere": Proposals(zero, one, score.to("meta"), zero),
            "lists": Proposals([0], [[1]], [[0.0]], [0]),  # type: ignore[arg-type]
        }[self.answer]

    def begin(self, context: Context) -> None:
        self._act("begin", None)

    def observe(self, commit: Commit) -> None:
        self._act("observe", None)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        first = positions[:1].tolist()
        return self._act("propose", Proposals.of_paths(first, [[1]], [[-0.1]]))

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers:
        return self._act("offers", {0: [[1]]})

    def score(self, tree: TreeBackend) -> Tensor:
        return self._act("score", torch.full((tree.n_nodes,), -0.1), tree.n_nodes)
