"""A graft policy of one's own: a model expands only the paths that it believes in."""

import math

from treegraft import Drafter, GraftPolicy, ScoringDrafter, Touched, TreeBackend


class CautiousGraft(GraftPolicy):
    """Like the built-in one without lookback, but unlikely positions are not expanded.

    Parameters
    ----------
    threshold : a position is expanded if its path has at least this probability.
    """

    def __init__(self, threshold: float = 0.05) -> None:
        self._least = math.log(threshold)

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier, width: int
    ) -> Touched:
        scores = isinstance(drafter, ScoringDrafter)
        positions = frontier[:width]
        if scores:
            tree.rescore_(drafter.score(tree), index)
            depth = tree.depth[frontier]
            best = tree.best(width, int(depth.min()), int(depth.max()))
            likely = tree.logprob[best] >= self._least
            # At least one position, or the layer would draft nothing.
            positions = best[likely] if likely.any() else best[:1]
        proposals = drafter.propose(tree, positions, width)
        children = tree.add_(proposals, index, overwrite=scores)[:, 0]
        made = children >= 0
        return Touched(children[made], proposals.match[made])
