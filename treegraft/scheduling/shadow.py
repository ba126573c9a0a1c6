"""One drafter for many trees of the same step: what it reads is shared, what it would cost is not.

What a model makes of a path does not depend on how the path got into a tree. So the schedules of a
step share one shadow tree, the union of theirs, which the drafter reads as it would read any tree
in decoding, every node once. Next to it each schedule keeps a ``Reading``: the forwards that the
drafter would have run had this schedule been the only one.

Shapes: N nodes of a schedule's tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.roles import Commit, Context, ScoringDrafter, TreeBackend
from treegraft.core.tree import ROOT, Proposals

__all__ = ["Reading", "ShadowDrafter"]


@dataclass(slots=True)
class Reading:
    """What one drafter has read of one schedule's tree, and where its nodes lie in the shadow.

    Attributes
    ----------
    place : int64 [N], node of the shadow tree. read : bool [N], nodes that went through the model.
    scored : bool [N], nodes whose score it has given.
    widths : nodes of each forward of this step, in order; text that it had not read yet is not
        counted.
    """

    place: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    read: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(1, dtype=np.bool_))
    scored: NDArray[np.bool_] = field(default_factory=lambda: np.ones(1, dtype=np.bool_))
    widths: tuple[int, ...] = ()

    def fork(self) -> Reading:
        """A copy that grows on its own: arrays are replaced here and never written to."""
        return replace(self)


@final
class ShadowDrafter(ScoringDrafter):
    """Wraps a scoring drafter; ``reading`` says for which schedule it acts.

    Parameters
    ----------
    read_ahead : as in ``LmConfig``; the widths in ``Reading`` follow its rules.
    """

    def __init__(self, drafter: ScoringDrafter, vocab_size: int, read_ahead: int) -> None:
        self._drafter = drafter
        self._read_ahead = read_ahead
        self._shadow = TensorTree(vocab_size)
        self._child: dict[tuple[int, int], int] = {}
        self.target_top = drafter.target_top
        self.tree_top = drafter.tree_top
        self.target_hidden = drafter.target_hidden
        self.limit = drafter.limit
        self.reading = Reading()

    def begin(self, context: Context) -> None:
        self._drafter.begin(context)

    def observe(self, commit: Commit) -> None:
        # Nodes of a schedule's tree mean nothing to the drafter, which has read the shadow's.
        self._drafter.observe(replace(commit, path=()))

    def start(self, token: int, max_depth: int) -> None:
        """A step begins: forget the trees of the one before."""
        self._shadow.reset_(token, max_depth)
        self._child.clear()
        self.reading = Reading()

    def score(self, tree: TreeBackend) -> Tensor:
        reading = self._follow(tree)
        alive = tree.alive.numpy()
        fresh = np.flatnonzero(alive & ~reading.scored)
        if fresh.shape[0]:
            inner = np.zeros(tree.n_nodes, dtype=np.bool_)
            inner[tree.parent.numpy()[fresh]] = True
            if not reading.read[inner].all():
                leaves = np.flatnonzero(alive & ~inner & ~reading.read)
                if leaves.shape[0] <= self._read_ahead:
                    inner[leaves] = True
                self._count(tree, inner)
            reading.scored = reading.scored.copy()
            reading.scored[fresh] = True
        return self._drafter.score(self._shadow)[torch.from_numpy(reading.place)]

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        reading = self._follow(tree)
        nodes = positions.numpy()
        wanted = np.zeros(tree.n_nodes, dtype=np.bool_)
        wanted[nodes] = True
        self._count(tree, wanted)
        places = reading.place[nodes]
        found = self._drafter.propose(self._shadow, torch.from_numpy(places), width)
        node_at = dict(zip(places.tolist(), nodes.tolist(), strict=True))
        back = [node_at[place] for place in found.positions.tolist()]
        return replace(found, positions=torch.tensor(back, dtype=torch.int64))

    def _count(self, tree: TreeBackend, wanted: NDArray[np.bool_]) -> None:
        """Note the forward over the unread of ``wanted`` bool [N] and their unread ancestors."""
        reading = self.reading
        unread = np.flatnonzero(wanted & ~reading.read)
        if unread.shape[0] == 0:
            return
        lineage = tree.ancestors(torch.from_numpy(unread)).numpy()
        nodes = lineage.any(0) & ~reading.read
        reading.read = reading.read | nodes
        reading.widths = (*reading.widths, int(nodes.sum()))

    def _follow(self, tree: TreeBackend) -> Reading:
        """Find the places of nodes that were added since this schedule's last visit."""
        reading = self.reading
        n_old = reading.place.shape[0]
        n_new = tree.n_nodes - n_old
        if not n_new:
            return reading
        parent, token = tree.parent.numpy()[n_old:], tree.token.numpy()[n_old:]
        level = tree.depth.numpy()[n_old:]
        place = np.concatenate([reading.place, np.full(n_new, -1, dtype=np.int64)])
        for depth in np.unique(level):
            here = np.flatnonzero(level == depth)
            above = place[parent[here]].tolist()
            keys = list(zip(above, token[here].tolist(), strict=True))
            missing = list(dict.fromkeys(key for key in keys if key not in self._child))
            if missing:
                paths = Proposals.of_paths(
                    [key[0] for key in missing],
                    [[key[1]] for key in missing],
                    [[-np.inf]] * len(missing),
                )
                made = self._shadow.add_(paths, 0, overwrite=False)[:, 0].tolist()
                self._child.update(zip(missing, made, strict=True))
            place[n_old + here] = [self._child[key] for key in keys]
        assert place[ROOT] == ROOT
        more = np.zeros(n_new, dtype=np.bool_)
        reading.place = place
        reading.read = np.concatenate([reading.read, more])
        reading.scored = np.concatenate([reading.scored, more])
        return reading
