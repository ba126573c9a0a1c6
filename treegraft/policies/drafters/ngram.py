"""The look-up drafter: what followed the last n tokens when they stood in the text before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, final

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from treegraft.core.offers import Offers, offers_of
from treegraft.core.roles import Commit, Context, Drafter, TargetTop, TreeBackend
from treegraft.core.tree import Proposals


class NgramConfig(BaseModel):
    """Look-ups in prompt and generated text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["ngram"] = "ngram"
    name: str | None = Field(
        None, min_length=1, description="Name in statistics and schedules; default: kind."
    )
    max_n: int = Field(
        3, ge=1, le=16, description="Longest match in tokens; longer ones are rarer and surer."
    )
    min_n: int = Field(
        1, ge=1, le=16, description="Shortest match in tokens; raising it drafts less and surer."
    )
    length: int = Field(
        3, ge=1, le=64, description="Tokens of a continuation; longer ones deepen the tree."
    )
    long_length: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Tokens of a continuation after a match of max_n tokens; null takes length. "
        "Pays where the budget has room for deep paths, or their tokens get scores.",
    )

    @model_validator(mode="after")
    def _check(self) -> NgramConfig:
        if self.min_n > self.max_n:
            raise ValueError(f"min_n must be at most max_n ({self.max_n}), found {self.min_n}")
        if self.long_length is not None and self.long_length < self.length:
            raise ValueError(
                f"long_length must be at least length ({self.length}), found {self.long_length}"
            )
        return self


@final
class NgramDrafter(Drafter):
    """Longest match first, the latest occurrence first (method: weak drafter).

    The first token of a continuation carries the target's own logprob for it at the place where
    the match was found; the tokens after it carry no score until a drafter scores them.
    The index grows with every committed token and a look-up costs the same in a long text as in a
    short one: it looks at a bounded number of the latest occurrences.
    """

    target_top = 0

    def __init__(self, config: NgramConfig) -> None:
        self._max_n = config.max_n
        self._min_n = config.min_n
        self._length = config.length
        self._long_length = config.long_length or config.length
        self._forget()

    def _forget(self) -> None:
        self._text: list[int] = []
        self._chosen: list[float] = []
        # n-gram -> places right after its occurrences, oldest first.
        self._after: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def begin(self, context: Context) -> None:
        self._forget()
        # Place 0 has no distribution before it, so it has no score.
        self._note(context.tokens[:1], [float("-inf")])
        self._note(context.tokens[1:], _scores(context.top, len(context.tokens) - 1))

    def observe(self, commit: Commit) -> None:
        self._note(commit.tokens, _scores(commit.top, len(commit.tokens)))

    def _note(self, tokens: Iterable[int], scores: Iterable[float]) -> None:
        for token, score in zip(tokens, scores, strict=True):
            self._text.append(token)
            self._chosen.append(score)
            end = len(self._text)
            for n in range(self._min_n, min(self._max_n, end) + 1):
                self._after[tuple(self._text[end - n : end])].append(end)

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers:
        return offers_of(self.propose(tree, torch.tensor(path), width), path)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        nodes: list[int] = []
        paths: list[list[int]] = []
        scores: list[list[float]] = []
        match: list[int] = []
        for node in positions.tolist():
            for path, place, n in self._matches(tree.path(node), width):
                nodes.append(node)
                paths.append(path)
                scores.append([self._chosen[place]] + [float("-inf")] * (len(path) - 1))
                match.append(n)
        return Proposals.of_paths(nodes, paths, scores, match)

    def _matches(self, path: list[int], width: int) -> Iterator[tuple[list[int], int, int]]:
        """Distinct continuations, at most ``width``, with where they start and match length."""
        tail = (self._text[-self._max_n :] + path)[-self._max_n :]
        seen: set[tuple[int, ...]] = set()
        # What of them a shorter match could bring: it would add nothing to the tree.
        short: set[tuple[int, ...]] = set()
        for n in range(min(self._max_n, len(tail)), self._min_n - 1, -1):
            longest = n == self._max_n
            length, known = (self._long_length, seen) if longest else (self._length, short)
            # .get: a look-up must not grow the index.
            places = self._after.get(tuple(tail[-n:]), ())
            for place in reversed(places[-4 * width :]):
                found = self._text[place : place + length]
                if not found or tuple(found) in known:
                    continue
                seen.add(tuple(found))
                short.add(tuple(found[: self._length]))
                yield found, place, n
                if len(seen) == width:
                    return


def _scores(top: TargetTop | None, n_tokens: int) -> list[float]:
    return [float("-inf")] * n_tokens if top is None else top.chosen.tolist()
