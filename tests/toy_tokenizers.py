"""Tokenizers over a handful of pieces, and over bytes."""

from __future__ import annotations

from collections.abc import Sequence


class PieceTokenizer:
    """Token i is the text ``pieces[i]``; an empty piece is a special token ``<i>``."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def __call__(self, text: str) -> dict[str, list[int]]:
        ids = []
        while text:
            fits = [i for i, piece in enumerate(self.pieces) if piece and text.startswith(piece)]
            ids.append(max(fits, key=lambda i: len(self.pieces[i])))
            text = text[len(self.pieces[ids[-1]]) :]
        return {"input_ids": ids}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        special = "" if skip_special_tokens else "<{}>"
        return "".join(self.pieces[i] or special.format(i) for i in token_ids)


class ByteTokenizer:
    """A token is a byte, so that most characters take several tokens."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode(errors="replace")
