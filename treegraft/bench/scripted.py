"""A drafter that knows the text and errs as often as it is told to: what would drafting pay if ...?

For measurements only: it reads a recorded text, so it drafts at a set acceptance with any target,
one with random weights included. Name it in a config by import path:

    drafters:
      - kind: "treegraft.bench.scripted:ScriptedDrafter"
        params: {script: [...], acceptance: 0.8, length: 5}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from torch import Tensor

from treegraft.core.roles import Commit, Context, Drafter, TreeBackend
from treegraft.core.sampling import DRAWS, keyed_uniform
from treegraft.core.tree import Proposals

__all__ = ["ScriptedDrafter"]


@final
class ScriptedDrafter(Drafter):
    """One path of the recorded text under each node, and decoys beside it that are wrong.

    Parameters
    ----------
    script : the recorded ids, prompt included; behind its end nothing is drafted.
    acceptance : probability that a token of the path is the recorded one, for each place of the
        text on its own, by a dice keyed by seed and place.
    length : tokens of a path. seed : key of the dice.
    """

    def __init__(
        self, script: Sequence[int], acceptance: float, length: int = 4, seed: int = 0
    ) -> None:
        if not 0.0 <= acceptance <= 1.0:
            raise ValueError(f"acceptance must be in 0..1, found {acceptance}")
        if length < 1:
            raise ValueError(f"length must be at least 1, found {length}")
        self._script = list(script)
        self._acceptance = acceptance
        self._length = length
        self._seed = seed
        self._n_text = 0
        self._vocab_size = 0
        self._stream = DRAWS

    def begin(self, context: Context) -> None:
        self._n_text = len(context.tokens)
        self._vocab_size = context.vocab_size
        self._stream = context.stream

    def observe(self, commit: Commit) -> None:
        self._n_text += len(commit.tokens)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        nodes: list[int] = []
        paths: list[list[int]] = []
        scores: list[list[float]] = []
        sure = math.log(max(self._acceptance, 1e-9))
        doubtful = math.log(max((1.0 - self._acceptance) / max(width, 1), 1e-9))
        for node in positions.tolist():
            # The root is the text's last token; what follows depth d stands d places further on.
            place = self._n_text + int(tree.depth[node])
            right = self._script[place : place + self._length]
            if not right:
                continue
            path = [self._said(place + i, token) for i, token in enumerate(right)]
            others = [(path[0] + k) % self._vocab_size for k in range(1, width + 1)]
            decoys = [token for token in others if token not in (path[0], right[0])][: width - 1]
            for i, first in enumerate((path[0], *decoys)):
                nodes.append(node)
                paths.append([first, *path[1:]])
                scores.append([sure if i == 0 else doubtful, *[sure] * (len(path) - 1)])
        return Proposals.of_paths(nodes, paths, scores)

    def _said(self, place: int, token: int) -> int:
        """The token that is drafted where ``token`` is right."""
        errs, which = keyed_uniform(self._seed, place, 2, self._stream)
        if errs < self._acceptance:
            return token
        return (token + 1 + int(which * (self._vocab_size - 1))) % self._vocab_size
