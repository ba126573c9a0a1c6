"""Whether a drafter's token ids mean what the target's do.

A draft is a list of ids. If a drafter maps ids to other text than its target, the output stays
right (the target verifies) but nothing is ever accepted; such a pair is refused before any forward.
"""

from __future__ import annotations

import hashlib
import json
from typing import Protocol

from treegraft.core.errors import UnsupportedModelError

__all__ = ["Vocabulary", "check_vocabularies", "fingerprint"]


class Vocabulary(Protocol):
    """The part of a transformers tokenizer that is asked here."""

    def get_vocab(self) -> dict[str, int]:
        """Ids of all tokens, added ones included."""


def check_vocabularies(
    target_tokenizer: Vocabulary | None,
    target_vocab: int,
    drafter_tokenizer: Vocabulary | None,
    drafter_vocab: int,
    names: tuple[str, str] = ("target", "drafter"),
    same_ids: bool = False,
) -> int:
    """Return how many ids the two models share, or raise UnsupportedModelError.

    Parameters
    ----------
    target_tokenizer, drafter_tokenizer : transformers tokenizers, or None where there is none.
    target_vocab, drafter_vocab : widths of the logits, padding rows included.
    names : how target and drafter are called in the message.
    same_ids : without two tokenizers to compare, widths must be equal; True says that the ids below
        the smaller width mean the same, so that unequal widths are padding.

    Returns
    -------
    The smaller width. Ids from there on exist in one model only; with equal tokenizers they are
    padding rows, which no text uses.
    """
    target, drafter = names
    if target_tokenizer is not None and drafter_tokenizer is not None:
        ours, theirs = target_tokenizer.get_vocab(), drafter_tokenizer.get_vocab()
        difference = None if ours == theirs else _first_difference(ours, theirs)
        if difference is not None:
            token, our_id, their_id = difference
            raise UnsupportedModelError(
                f"drafter {drafter!r} does not share the vocabulary of target {target!r}: token "
                f"{token!r} is {_id(their_id)} there and {_id(our_id)} in the target "
                f"({len(theirs)} and {len(ours)} tokens); use a drafter with the target's tokenizer"
            )
        n_ids = 1 + max(ours.values(), default=-1)
        for name, width in ((target, target_vocab), (drafter, drafter_vocab)):
            if width < n_ids:
                raise UnsupportedModelError(
                    f"model {name!r} gives logits for {width} ids but its tokenizer has {n_ids}: "
                    "the tokenizer belongs to another model"
                )
    elif target_vocab != drafter_vocab and not same_ids:
        raise UnsupportedModelError(
            f"drafter {drafter!r} has {drafter_vocab} token ids and target {target!r} has "
            f"{target_vocab}, and without both tokenizers nothing says that they mean the same: "
            "use a drafter with the target's vocabulary"
        )
    return min(target_vocab, drafter_vocab)


def fingerprint(tokenizer: Vocabulary) -> str:
    """SHA-256 in hex of the tokens and their ids: equal where ids mean the same."""
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode("ascii")).hexdigest()


def _first_difference(
    ours: dict[str, int], theirs: dict[str, int]
) -> tuple[str, int | None, int | None] | None:
    """Token, its id in the target and in the drafter, at the lowest id where the two differ."""
    differing = [
        (min(i for i in (ours.get(t), theirs.get(t)) if i is not None), t)
        for t in ours.keys() | theirs.keys()
        if ours.get(t) != theirs.get(t)
    ]
    if not differing:
        return None
    token = min(differing)[1]
    return token, ours.get(token), theirs.get(token)


def _id(number: int | None) -> str:
    return "missing" if number is None else f"id {number}"
