"""The verification budget of each step: as many nodes as bring the most tokens per second.

Shapes: N nodes of a tree, B budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from treegraft.core.roles import Touched, TreeBackend, TreeBuilder
from treegraft.core.stats import StepRecord
from treegraft.core.tree import ROOT, TokenTree
from treegraft.policies.costs import RunningCosts, Seconds

__all__ = ["AutoBudgetBuilder", "BudgetCosts", "StepSeconds", "expected_tokens", "first_peak"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

StepSeconds = Callable[[Ints, int, int], Floats]
"""Verified nodes (root included) int64 [n], tokens of the text and drafted nodes to float64 [n]:
the seconds of a step, drafting left out."""

_TRIALS = 3
"""Steps in which each size of tree is measured in the beginning."""


class BudgetCosts(BaseModel):
    """Seconds of a step that are taken as given, so that nothing is measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: Seconds = Field(description="Seconds of a target forward over the root alone.")
    node: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = Field(
        0.0, description="Seconds that each further node adds; the dearer, the fewer are verified."
    )
    drafting: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = Field(
        0.0, description="Seconds of a step's drafting; the dearer, the more nodes are verified."
    )


def expected_tokens(chance: Floats, parent: Ints, order: Ints) -> Floats:
    """float64 [n + 1]: tokens that a step is expected to commit with the first 0, 1, ..., n nodes.

    The bonus token is one of them. Of the children of a node at most one is accepted, and no more
    often than the node itself: what scores promise beyond that does not count.

    Parameters
    ----------
    chance : float64 [N], path probabilities. parent : int64 [N]. order : int64 [n], the nodes as
    they are ranked, parents first, without the root.
    """
    left = {ROOT: 1.0}
    total = [1.0]
    chances, parents = chance.tolist(), parent.tolist()
    for node in order.tolist():
        above = parents[node]
        gain = min(chances[node], left[above])
        left[above] -= gain
        left[node] = gain
        total.append(total[-1] + gain)
    return np.array(total)


def first_peak(tokens: Floats, seconds: Floats) -> int:
    """Index up to which ``tokens / seconds`` does not fall: the first local maximum."""
    rate = tokens / np.maximum(seconds, 1e-12)
    falls = np.flatnonzero(rate[1:] < rate[:-1])
    return int(falls[0]) if falls.shape[0] else rate.shape[0] - 1


@final
class AutoBudgetBuilder(TreeBuilder):
    """Another builder's trees, of which each step verifies as much as pays (cf. arXiv 2606.01813).

    With calibrated scores a node's path probability is what it adds to the step's tokens. Nodes are
    taken in the order of the pruning while expected tokens over seconds rises, up to the first fall
    or ``budget``. The seconds are those that the step's drafting has taken, the target's forward
    over so many nodes, T(n), and the rest of a step. Where T(n) is convex that first peak is the
    highest one, as nodes come with ever less to add.

    Where something was drawn in a step the whole budget is used: what was drawn upon must be
    verified (docs/losslessness.md).

    Parameters
    ----------
    inner : its ``budget`` is the most that is verified. seconds : what a step takes after drafting;
    None takes running medians of forwards and of the rest over the last steps. To have some, the
    first steps verify 0, 1, 3, 7, ... nodes up to the budget, three times in turn.
    drafting : seconds of a step's drafting; None takes what was measured in this one.
    """

    def __init__(
        self, inner: TreeBuilder, seconds: StepSeconds | None, drafting: float | None = None
    ) -> None:
        self._inner = inner
        self.depth, self.width, self.budget = inner.depth, inner.width, inner.budget
        self._seconds, self._given = seconds, drafting
        self._measured = RunningCosts((), {})
        sizes = {min(2**digits - 1, self.budget) for digits in range(self.budget.bit_length() + 1)}
        self._trials = sorted(sizes) * _TRIALS if seconds is None else []
        self._drafting, self._n_text = drafting or 0.0, 0

    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> Tensor | None:
        return self._inner.frontier(tree, touched, layer)

    def drafted(self, seconds: float, n_text: int) -> None:
        self._drafting = seconds if self._given is None else self._given
        self._n_text = n_text

    def finish(self, record: StepRecord) -> None:
        if self._seconds is None:
            self._measured.learn(record)

    def prune(self, tree: TreeBackend) -> TokenTree:
        if self._trials and not tree.n_drawn:
            return tree.prune(self._trials.pop())
        return tree.prune(self.size(tree))

    def size(self, tree: TreeBackend) -> int:
        """How many nodes besides the root are verified."""
        most = self.budget
        if tree.n_drawn:
            return most
        order = tree.best(most + 1, 0, tree.n_nodes).numpy()
        order = order[order != ROOT]
        nodes = np.arange(1, order.shape[0] + 2)
        if self._seconds is None:
            seconds = self._measured.forward(nodes) + self._measured.rest
        else:
            seconds = self._seconds(nodes, self._n_text, tree.n_nodes)
        chance = np.exp(tree.logprob.numpy().astype(np.float64))
        tokens = expected_tokens(chance, tree.parent.numpy(), order)
        return first_peak(tokens, seconds + self._drafting)
