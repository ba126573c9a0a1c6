"""Tokens to text while they arrive, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What we ask of a tokenizer (transformers' satisfy it)."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


class TextStream:
    """Decodes tokens as they come and never emits half a character.

    A piece is the difference between two decodings of a short tail, because many tokenizers join
    tokens differently at the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._end = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that became certain with ``tokens``."""
        self._tokens.extend(tokens)
        piece = self._difference()
        # Replacement characters at the end are usually a character whose bytes are not complete.
        # Of a character at most three bytes can stand there, so four are bytes that are no text.
        if piece.endswith("\ufffd") and not piece.endswith("\ufffd" * 4):
            return ""
        self._start, self._end = self._end, len(self._tokens)
        return piece

    def flush(self) -> str:
        """What is left at the end, complete or not."""
        piece = self._difference()
        self._start = self._end = len(self._tokens)
        return piece

    def _difference(self) -> str:
        def decode(end: int) -> str:
            return self._tokenizer.decode(self._tokens[self._start : end], skip_special_tokens=True)

        return decode(len(self._tokens))[len(decode(self._end)) :]


class StopStrings:
    """Tells the token that completes a stop string, whatever number of tokens came with it."""

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer) -> None:
        self._strings = strings
        self._tokenizer = tokenizer
        # Every token brings at least one byte, but for special ones; the rest is slack for those.
        self._tail = max(len(s.encode()) for s in strings) + 16
        self._tokens: list[int] = []

    def completes(self, token: int) -> bool:
        """Take note of one more token; True if a stop string now stands in the text."""
        self._tokens.append(token)
        return self._stands_in(self._tokens[-self._tail :])

    def would_end(self, tokens: Sequence[int]) -> bool:
        """Whether one of ``tokens`` would complete a stop string if they came next."""
        text = [*self._tokens[-self._tail :], *tokens]
        ends = range(len(text) - len(tokens) + 1, len(text) + 1)
        return any(self._stands_in(text[max(0, end - self._tail) : end]) for end in ends)

    def _stands_in(self, tokens: Sequence[int]) -> bool:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return any(s in text for s in self._strings)
