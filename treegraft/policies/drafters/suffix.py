"""The suffix drafter: what most often followed the longest context that stood anywhere before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, final

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from treegraft.core.offers import Offers, offers_of
from treegraft.core.roles import Commit, Context, Drafter, TreeBackend
from treegraft.core.tree import Proposals
from treegraft.policies.automaton import Match, SuffixAutomaton


class SuffixConfig(BaseModel):
    """Look-ups of any length in prompt, generated text and, if asked for, earlier texts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["suffix"] = "suffix"
    name: str | None = Field(
        None, min_length=1, description="Name in statistics and schedules; default: kind."
    )
    max_match: int = Field(
        32,
        ge=1,
        le=256,
        description="Longest match in tokens; a longer one tells repeated passages apart and "
        "costs more per token of a text that repeats itself.",
    )
    min_match: int = Field(
        1, ge=1, le=256, description="Shortest match in tokens; raising it drafts less and surer."
    )
    factor: float = Field(
        2.0,
        gt=0.0,
        le=64.0,
        description="Tokens of a continuation per token of match, at least one; a larger factor "
        "trusts short matches with longer paths.",
    )
    length: int = Field(
        16, ge=1, le=64, description="Most tokens of a continuation; longer ones deepen the tree."
    )
    min_share: float = Field(
        0.1,
        ge=0.0,
        le=1.0,
        description="A continuation ends before its logprob falls below the log of this; a larger "
        "share drafts shorter and surer, and costs less.",
    )
    store_tokens: int = Field(
        0,
        ge=0,
        le=2**22,
        description="Tokens of earlier texts of this pipeline that are kept to draft from, oldest "
        "texts dropped first, at about half a kilobyte each; 0 keeps none. Drafts, and so the "
        "speed, then depend on what was decoded before; the tokens never do.",
    )

    @model_validator(mode="after")
    def _check(self) -> SuffixConfig:
        if self.min_match > self.max_match:
            raise ValueError(
                f"min_match must be at most max_match ({self.max_match}), found {self.min_match}"
            )
        return self


@final
class SuffixDrafter(Drafter):
    """Longest context first, its most frequent continuations first.

    After SuffixDecoding (arXiv 2411.04975), of which it takes frequencies and draft lengths that
    grow with the match, on a suffix automaton as in SAM-Decoding (arXiv 2411.10666). Under each
    position hang up to W paths with different first tokens: those that followed the longest
    suffix of text and path, then those of shorter suffixes. Each goes on along the most frequent
    continuation for at most ``factor`` tokens per token of match. A token's logprob is the log of
    its share among all that followed its context, so it says more the longer the match is.

    The index grows with every committed token, and the end of the text is always matched in it: a
    look-up walks only the path of the position.
    """

    target_top = None

    def __init__(self, config: SuffixConfig) -> None:
        self._max_match = config.max_match
        self._min_match = config.min_match
        self._factor = config.factor
        self._length = config.length
        self._min_share = config.min_share
        self._store = None
        if config.store_tokens:
            self._store = _Store(config.store_tokens, config.max_match)
        self._forget()

    def _forget(self) -> None:
        self._text = SuffixAutomaton(self._max_match)
        # The end of the text in the store, and what the store will be given of this text.
        self._stored = Match(0, 0)
        self._lead: list[int] = []
        self._output: list[int] = []

    def begin(self, context: Context) -> None:
        if self._store is not None and self._output:
            self._store.add([*self._lead, *self._output])
        self._forget()
        self._note(context.tokens)
        self._lead = list(context.tokens[-self._max_match :])

    def observe(self, commit: Commit) -> None:
        self._note(commit.tokens)
        if self._store is not None:
            self._output += commit.tokens

    def _note(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text.append(token)
        if self._store is not None:
            for token in tokens[-self._max_match :]:
                self._stored = self._store.index.advance(self._stored, token)

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers:
        return offers_of(self.propose(tree, torch.tensor(path), width), path)

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        nodes: list[int] = []
        paths: list[list[int]] = []
        logprobs: list[list[float]] = []
        lengths: list[int] = []
        for node in positions.tolist():
            seen: set[int] = set()
            for index, match in self._contexts(tree.path(node)):
                most = min(self._length, max(1, int(self._factor * match.length)))
                for token in index.continuations(match.state, width):
                    if token in seen:
                        continue
                    seen.add(token)
                    path, scores = index.path(match, token, most, self._min_share, self._min_match)
                    nodes.append(node)
                    paths.append(path)
                    logprobs.append(scores)
                    lengths.append(match.length)
                    if len(seen) == width:
                        break
                if len(seen) == width:
                    break
        return Proposals.of_paths(nodes, paths, logprobs, lengths)

    def _contexts(self, path: list[int]) -> Iterator[tuple[SuffixAutomaton, Match]]:
        """Suffixes of text and ``path`` that stood before, longest first, the text's own first."""
        ends = [(self._text, self._text.match)]
        if self._store is not None:
            ends.append((self._store.index, self._stored))
        for i, (index, match) in enumerate(ends):
            for token in path:
                match = index.advance(match, token)
            ends[i] = (index, match)
        while ends:
            i = 0 if len(ends) == 1 or ends[0][1].length >= ends[1][1].length else 1
            index, match = ends[i]
            if match.length < self._min_match:
                return
            yield index, match
            wider = index.wider(match)
            if wider is None:
                del ends[i]
            else:
                ends[i] = (index, wider)


class _Store:
    """Earlier texts, at most ``cap`` tokens.

    A text is kept from ``max_match`` tokens before its generated part on, so that its first
    generated tokens are found too; of one that is longer than the cap the end is kept. Once the
    cap is passed, the oldest texts go until three quarters of it are left (the newest stays), and
    the index is made anew: an automaton can't forget. Over many texts that costs every token three
    more turns in the index at most.
    """

    def __init__(self, cap: int, max_match: int) -> None:
        self._cap = cap
        self._max_match = max_match
        self._texts: deque[list[int]] = deque()
        self._n_tokens = 0
        self.index = SuffixAutomaton(max_match)

    def add(self, text: list[int]) -> None:
        self._texts.append(text[-self._cap :])
        self._n_tokens += len(self._texts[-1])
        added = [self._texts[-1]]
        if self._n_tokens > self._cap:
            while len(self._texts) > 1 and self._n_tokens > self._cap * 3 // 4:
                self._n_tokens -= len(self._texts.popleft())
            self.index = SuffixAutomaton(self._max_match)
            added = list(self._texts)
        for each in added:
            self.index.start()
            for token in each:
                self.index.append(token)
