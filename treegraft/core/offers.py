"""What a drafter would have proposed along a path that was verified: feedback without a visit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treegraft.core.tree import Proposals

__all__ = ["Hindsight", "Offers", "offers_of"]

Offers = Mapping[int, Sequence[Sequence[int]]]
"""Place to the paths that a drafter would have proposed there; a place with none is an empty list.

Places count from the first token that the step committed, which is 0: place j lies behind the first
j nodes of the path, and negative places in the text before the step. A place that is not a key is
not known.
"""


@dataclass(frozen=True, slots=True)
class Hindsight:
    """What a scheduler that asks for it is told when a step was verified.

    Attributes
    ----------
    text : the committed text, the step's tokens included; the same list, longer, in every step of a
        text. Not to be written to.
    n_new : tokens that the step committed.
    offers : by drafter number; None from a drafter that cannot tell, and empty where the step
        was not drafted.
    """

    text: Sequence[int]
    n_new: int
    offers: Sequence[Offers | None]


def offers_of(proposals: Proposals, path: Sequence[int]) -> dict[int, list[list[int]]]:
    """Proposals under the nodes of ``path``, by place: what hangs under ``path[j]`` is at j."""
    place = {node: j for j, node in enumerate(path)}
    found: dict[int, list[list[int]]] = {j: [] for j in range(len(path))}
    rows = zip(proposals.positions.tolist(), proposals.tokens.tolist(), strict=True)
    for node, tokens in rows:
        if -1 in tokens:
            tokens = tokens[: tokens.index(-1)]
        found[place[node]].append(tokens)
    return found
