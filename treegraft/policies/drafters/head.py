"""The head drafter: a trained block on the target's hidden states, grown along the tree.

Shapes: n queries of a forward, K kv span, S cache rows, V vocabulary, d width of the target's
hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from treegraft.core.draft_head import DraftHead
from treegraft.core.language_model import LanguageModel
from treegraft.core.offers import Offers
from treegraft.core.roles import Commit, Context, ScoringDrafter, TreeBackend
from treegraft.core.tree import Proposals
from treegraft.policies.drafters.lm import LmDrafter, ModelDrafterConfig


class HeadConfig(ModelDrafterConfig):
    """A head trained on the hidden states of this very target."""

    kind: Literal["head"] = "head"
    model: str = Field(min_length=1, description="Folder of the head (head.json).")
    read_ahead: int = Field(
        0,
        ge=0,
        le=1024,
        description="When scoring needs a forward, read up to so many leaves in the same call. "
        "Each depth is a pass of its own, so this rarely saves one.",
    )


@dataclass(slots=True)
class _HeadCache:
    """Of one text: the head's keys and values, and per row what it said and where that stands."""

    content: Any
    said: Tensor  # [S, d] on the head's device
    position: Tensor  # int64 [S] on the host


@final
class TextModel(LanguageModel):
    """A head as a language model of one text, whose states the target hands over bit by bit.

    A token of the text is read with the target's state before it. A token of the draft is read with
    what the head itself said behind its parent, so the parent must have been read, in an earlier
    forward or in this one: a forward goes through the head once for each depth in it.
    """

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self.name = head.name
        self.vocab_size = head.vocab_size
        self.max_positions = head.max_positions
        self.device = head.device
        self._states = self._nothing(0)
        self._n_known = 0

    def _nothing(self, n_rows: int) -> Tensor:
        return torch.zeros(
            n_rows, self._head.hidden_size, dtype=self._head.dtype, device=self._head.device
        )

    def begin(self, states: Tensor, capacity: int) -> None:
        """Start on a text of at most ``capacity`` tokens; ``states`` float [n, d] as in Context."""
        self._states = self._nothing(capacity)
        self._n_known = 0
        self.extend(states)

    def extend(self, states: Tensor) -> None:
        """Take the target's states behind the next places of the text, float [n, d]."""
        last = self._n_known + states.shape[0]
        # A state that is no number would spoil the keys of all that follows.
        self._states[self._n_known : last] = states.nan_to_num(0.0, 0.0, 0.0)
        self._n_known = last

    def new_cache(self, n_rows: int, old: _HeadCache | None = None) -> _HeadCache:
        said, position = self._nothing(n_rows), torch.zeros(n_rows, dtype=torch.int64)
        if old is None:
            return _HeadCache(self._head.new_cache(n_rows), said, position)
        said[: old.said.shape[0]] = old.said
        position[: old.position.shape[0]] = old.position
        return _HeadCache(self._head.new_cache(n_rows, old.content), said, position)

    def forward(
        self,
        cache: _HeadCache,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Tensor:
        """Read tokens of the text or of the draft: see LanguageModel.forward."""
        cache.position[rows] = positions
        # 0 where the target's state stands before the token: the text, the root included.
        depth = (positions - self._n_known).clamp(min=0)
        levels = sorted(set(depth.tolist()))
        if len(levels) == 1:
            before = self._before(cache, levels[0], rows, positions, visible)
            said, logits = self._head.forward(
                cache.content, tokens, before, rows, positions, visible, last_only
            )
            cache.said[rows.to(said.device)] = said
            return logits
        parts: list[Tensor] = []
        order: list[Tensor] = []
        for level in levels:
            here = (depth == level).nonzero()[:, 0]
            part = (rows[here], positions[here], visible[here])
            before = self._before(cache, level, *part)
            said, logits = self._head.forward(cache.content, tokens[here], before, *part)
            cache.said[part[0].to(said.device)] = said
            parts.append(logits)
            order.append(here)
        every = torch.cat(parts)
        logits = torch.empty_like(every)
        logits[torch.cat(order).to(every.device)] = every
        return logits[-1:] if last_only else logits

    def _before(
        self, cache: _HeadCache, level: int, rows: Tensor, positions: Tensor, visible: Tensor
    ) -> Tensor:
        """float [n, d]: the state before each of some tokens of one depth."""
        if level == 0:
            states = self._states[(positions - 1).clamp(min=0).to(self.device)]
            first = (positions == 0).nonzero()[:, 0]
            if first.shape[0]:
                states[first.to(self.device)] = 0.0
            return states
        # The parent is the deepest that a node sees besides itself.
        depth = torch.where(visible, cache.position[: visible.shape[1]], -1)
        depth[torch.arange(rows.shape[0]), rows] = -1
        return cache.said[depth.argmax(1).to(self.device)]

    def move_(self, cache: _HeadCache, source: Tensor, target: Tensor) -> None:
        """Copy cache rows: see LanguageModel.move_."""
        self._head.move_(cache.content, source, target)
        cache.said[target.to(self.device)] = cache.said[source.to(self.device)]
        cache.position[target] = cache.position[source]


@final
class HeadDrafter(ScoringDrafter):
    """Reads the tree as LmDrafter does, by way of the head as a language model of the text.

    Accepted nodes were read on the head's own guesses at their states. They are read again on the
    target's, in the forward that reads the next root, so that a score is a function of the text and
    the path and not of how they came about.

    Parameters
    ----------
    head : the head; ``timed`` may wrap the model that is made of it.
    """

    target_hidden = True

    def __init__(
        self,
        config: HeadConfig,
        head: DraftHead,
        timed: Callable[[LanguageModel], LanguageModel] = lambda model: model,
    ) -> None:
        self._text = TextModel(head)
        self._reader = LmDrafter(config, timed(self._text))
        self.limit = self._reader.limit

    def begin(self, context: Context) -> None:
        if context.hidden is None:
            raise ValueError("a head needs the target's hidden states, found none in the context")
        self._text.begin(context.hidden, context.capacity)
        self._reader.begin(context)

    def observe(self, commit: Commit) -> None:
        if commit.hidden is None:
            raise ValueError("a head needs the target's hidden states, found none in the commit")
        self._text.extend(commit.hidden)
        self._reader.observe(replace(commit, path=()))

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        return self._reader.propose(tree, positions, width)

    def offers(self, tree: TreeBackend, path: Sequence[int], width: int) -> Offers:
        return self._reader.offers(tree, path, width)

    def score(self, tree: TreeBackend) -> Tensor:
        return self._reader.score(tree)
