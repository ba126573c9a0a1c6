"""A drafter of one's own: the tokens that most often followed the last one in this text."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise

import torch

import treegraft
from treegraft import Commit, Context, Proposals, TreeBackend


class Bigram(treegraft.Drafter):
    """``least`` is how often a pair must have been seen before it is proposed."""

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def begin(self, context: Context) -> None:
        """Forget the last text and start on a new one."""
        self.followers: dict[int, Counter[int]] = defaultdict(Counter)
        self.last = context.tokens[0]
        self._count(context.tokens[1:])

    def observe(self, commit: Commit) -> None:
        """Take note of committed tokens."""
        self._count(commit.tokens)

    def _count(self, tokens) -> None:
        for before, after in pairwise((self.last, *tokens)):
            self.followers[before][after] += 1
            self.last = after

    def propose(self, tree: TreeBackend, positions: torch.Tensor, width: int) -> Proposals:
        """At most ``width`` children under each node, with the log of their share."""
        nodes, paths, scores = [], [], []
        for node in positions.tolist():
            seen = self.followers.get(int(tree.token[node]), Counter())
            total = sum(seen.values())
            for token, n in seen.most_common(width):
                if n >= self.least:
                    nodes.append(node)
                    paths.append([token])
                    scores.append([math.log(n / total)])
        return Proposals.of_paths(nodes, paths, scores)
