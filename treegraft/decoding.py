"""The decoding of one text: draft a tree, verify it in one forward, commit, repeat.

Shapes: N nodes of the verified tree, K kv span, n committed tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treegraft.core.language_model import LanguageModel, extend, has_nan
from treegraft.core.offers import Hindsight
from treegraft.core.roles import Commit, Context, TargetTop, TreeTop
from treegraft.core.sampling import DRAWS, History, Noise, Sampling, TargetDistribution
from treegraft.core.stats import StepRecord
from treegraft.core.tree import ROOT, TokenTree, Verdict
from treegraft.drafting import Draft, Drafting, Layer, count
from treegraft.parts import Parts, named


@dataclass(frozen=True, slots=True)
class Step:
    """One target forward: what it read and what it committed.

    Attributes
    ----------
    tokens : the committed ids: those of ``path``, then the bonus token (unless a stop cut it off).
    tree : what the target read. path : indices into ``tree`` of the committed nodes, top down.
    layers : what was decided before each layer of drafting and what came of it.
    record : the figures.
    """

    tokens: list[int]
    tree: TokenTree
    path: tuple[int, ...]
    layers: tuple[Layer, ...]
    record: StepRecord


@dataclass(slots=True)
class TargetCache:
    """The target's KV cache, kept from text to text."""

    rows: int = 0
    content: Any = None

    def reserve(self, model: LanguageModel, n_rows: int) -> None:
        """Make sure that there are ``n_rows`` rows (old content is of no use to a new text)."""
        if n_rows > self.rows:
            # Let go of the old rows first; should the new ones not fit, there are none.
            self.content, self.rows = None, 0
            self.content, self.rows = model.new_cache(n_rows), n_rows


@dataclass(slots=True)
class Decoding:
    """State of one text. ``prefill`` first, then ``step`` until ``finish_reason`` is set.

    ``completes`` says whether a token completes a stop string. Target KV: row r holds the text's
    token r; the root (last token of the text) is not in it yet. During a step node i of the tree
    sits in row ``len(text) - 1 + i`` at position ``len(text) - 1 + depth[i]``.
    """

    parts: Parts
    sampling: Sampling
    history: History
    max_new_tokens: int
    cache: TargetCache
    completes: Callable[[int], bool] | None = None
    finish_reason: str | None = None
    notices: list[str] = field(default_factory=list)
    _capacity: int = 0
    _top_k: int | None = None
    _wants_tree_top: bool = False
    _wants_hidden: bool = False
    _own_nan: bool = False
    _noise: Noise = field(init=False)
    _drafting: Drafting = field(init=False)

    def __post_init__(self) -> None:
        target = self.parts.target
        self._capacity = len(self.history.tokens) + self.max_new_tokens
        if target.max_positions is not None:
            self._capacity = min(self._capacity, target.max_positions)
        wanted = [d.target_top for d in self.parts.drafters if d.target_top is not None]
        self._top_k = max(wanted) if wanted else None
        self._wants_tree_top = any(d.tree_top for d in self.parts.drafters)
        self._wants_hidden = any(d.target_hidden for d in self.parts.drafters)
        self._noise = Noise(self.sampling.seed, target.vocab_size)
        self._drafting = Drafting(self.parts, self.history, self._capacity, self.notices)

    def prefill(self) -> None:
        """Read the prompt but its last token, and tell the drafters about it."""
        watch, target, text = self.parts.watch, self.parts.target, self.history.tokens
        tops: list[TargetTop] = []
        with watch.stage("prefill"):
            self.cache.reserve(target, self._capacity + self.parts.builder.budget + 1)
            last_only = self._top_k is None
            states: list[Tensor] | None = [] if self._wants_hidden else None
            for offset, logits in extend(
                target, self.cache.content, text[:-1], 0, last_only=last_only, states=states
            ):
                if not last_only:
                    here = text[offset + 1 : offset + 1 + logits.shape[0]]
                    tops.append(self._top(logits, here))
        top = None
        if tops:
            top = TargetTop(
                torch.cat([t.chosen for t in tops]),
                torch.cat([t.tokens for t in tops]),
                torch.cat([t.logprobs for t in tops]),
            )
        hidden = None
        if states is not None:
            none = torch.empty(0, target.hidden_size or 0, device=target.device)
            hidden = torch.cat(states) if states else none
        for number, drafter in enumerate(self.parts.drafters):
            context = Context(
                tuple(text),
                self._capacity,
                target.vocab_size,
                top,
                temperature=self.sampling.temperature,
                seed=self.sampling.seed,
                stream=DRAWS + number,
                hidden=hidden,
            )
            drafter.begin(context)

    def _top(self, logits: Tensor, tokens: Sequence[int]) -> TargetTop:
        """The target at the places of ``tokens``, given float [n, V]."""
        logp = _logp(logits)
        return TargetTop(_chosen(logp, range(len(tokens)), tokens), *self._likeliest(logp))

    def _tops(
        self, logits: Tensor, tree: TokenTree, rows: Sequence[int], tokens: Sequence[int]
    ) -> tuple[TargetTop | None, TreeTop | None]:
        """What drafters asked to see of logits [N, V]; ``tokens`` stand behind ``rows``."""
        if self._top_k is None:
            return None, None
        if not self._wants_tree_top:
            return self._top(logits.index_select(0, _int64(rows).to(logits.device)), tokens), None
        logp = _logp(logits)
        every = self._likeliest(logp)
        places = _int64(rows)
        likeliest = (column.index_select(0, places) for column in every)
        top = TargetTop(_chosen(logp, rows, tokens), *likeliest)
        return top, TreeTop(tree.token, *every)

    def _likeliest(self, logp: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [n, k] and float32 [n, k]: the likeliest tokens of each row, and their log p."""
        if not self._top_k:
            none = np.empty((logp.shape[0], 0), dtype=np.float32)
            return torch.from_numpy(none.astype(np.int64)), torch.from_numpy(none)
        top = logp.topk(min(self._top_k, logp.shape[-1]), dim=-1)
        return top.indices.cpu(), top.values.cpu()

    def step(self) -> Step:
        """Draft, let the target read, commit."""
        fallback = self.parts.fallback
        if fallback is None or not self.parts.drafters:
            return self._step(self._drafting.draft)
        began = perf_counter()
        step = self._step(self._drafting.draft if fallback.drafts() else self._drafting.plain)
        if fallback.finish(len(step.tokens), perf_counter() - began):
            drafted, plain = fallback.drafted_rate, fallback.plain_rate
            notice = (
                f"drafting did not pay after {len(self.history.tokens) - self.history.n_prompt} "
                f"tokens ({drafted:.3g} tokens/s, plain {plain:.3g}); it pauses"
            )
            self.notices.append(notice)
        return step

    def _step(self, make_draft: Callable[[], Draft]) -> Step:
        parts = self.parts
        n_kv = len(self.history.tokens) - 1
        draft = make_draft()
        tree = draft.tree
        logits, hidden = self._forward(tree, n_kv)
        if has_nan(logits):
            tree, logits, hidden = self._without_draft(tree, logits, hidden)
        with parts.watch.stage("verify"):
            target = TargetDistribution(logits, tree, self.sampling, self.history, self._noise)
            with named("verifier", parts.verifier, "verdict"):
                verdict = parts.verifier.verdict(tree, target)
                _check_verdict(verdict, tree, parts.target.vocab_size)
            tokens = self._cut(verdict.tokens)
            path = verdict.path[: len(tokens)]
            self.history.extend(tokens)
            rows = [ROOT, *verdict.path][: len(tokens)]
            top, tree_top = self._tops(logits, tree, rows, tokens)
            # A first chain already sits where it belongs.
            moved = [(i, j) for j, i in enumerate(path, 1) if i != j]
            if moved and self.finish_reason is None:
                old = _int64([n_kv + i for i, _ in moved])
                new = _int64([n_kv + j for _, j in moved])
                parts.target.move_(self.cache.content, old, new)
        lists = tree.lists()
        nodes = [lists.node[i] for i in path]
        proposers = [lists.proposers[i] for i in path]
        if parts.scheduler.asks_offers:
            with parts.watch.stage("scheduler"):
                offers = self._drafting.offers(nodes) if draft.layers else []
                hindsight = Hindsight(self.history.tokens, len(tokens), offers)
                with named("scheduler", parts.scheduler, "hindsight"):
                    parts.scheduler.hindsight(hindsight)
        if self.finish_reason is None:
            states = None if hidden is None else hidden[[ROOT, *path][: len(tokens)]]
            commit = Commit(tuple(tokens), tuple(nodes), top, tree_top, states)
            for drafter in parts.drafters:
                drafter.observe(commit)
        if draft.layers:
            self._drafting.committed(nodes, tokens, more=self.finish_reason is None)
        n = len(parts.drafters)
        accepted = tuple(lists.source[i] for i in path)
        record = StepRecord(
            n_new=len(tokens),
            n_path=len(verdict.path),
            n_tree=len(tree),
            calls=draft.calls,
            drafted=draft.drafted,
            proposed=draft.proposed,
            kept=count(lists.source, n),
            accepted=count(accepted, n),
            accepted_alone=tuple(proposers.count(1 << i) for i in range(n)),
            seconds=parts.watch.lap(),
            visit_seconds=draft.visit_seconds,
            side_calls=draft.side_calls,
            reused=draft.reused,
            path_sources=accepted,
        )
        with parts.watch.stage("scheduler"), named("scheduler", parts.scheduler, "finish"):
            parts.scheduler.finish(record)
        with named("builder", parts.builder, "finish"):
            parts.builder.finish(record)
        return Step(tokens, tree, path, draft.layers, record)

    def _forward(self, tree: TokenTree, n_kv: int) -> tuple[Tensor, Tensor | None]:
        """float [N, V] and, if a drafter asked, float [N, d]: one forward of the target."""
        n = len(tree)
        visible = np.empty((n, n_kv + n), dtype=np.bool_)
        visible[:, :n_kv] = True
        visible[:, n_kv:] = tree.ancestors.numpy()
        read = (
            self.cache.content,
            tree.token,
            torch.from_numpy(np.arange(n_kv, n_kv + n)),
            torch.from_numpy(n_kv + tree.depth.numpy()),
            torch.from_numpy(visible),
        )
        with self.parts.watch.stage("target"):
            if self._wants_hidden:
                return self.parts.target.forward_hidden(*read)
            return self.parts.target.forward(*read), None

    def _without_draft(
        self, tree: TokenTree, logits: Tensor, hidden: Tensor | None
    ) -> tuple[TokenTree, Tensor, Tensor | None]:
        """The step over the bare root and a clean cache, after NaN turned up in the logits.

        A masked row weighs 0, but 0 times NaN is NaN: one node whose keys or values are not finite
        (an untrained embedding row, an overflow in half precision) spoils every node, and whatever
        reads its row later. What is NaN without any draft is the model's own.
        """
        if self._own_nan:
            return tree, logits, hidden
        target, text = self.parts.target, self.history.tokens
        with self.parts.watch.stage("target"):
            self.cache.content = target.new_cache(self.cache.rows)
            for _ in extend(target, self.cache.content, text[:-1], 0, last_only=True):
                pass
        # Whether the draft was spoiled may depend on what was drawn, so that must not be forgotten.
        drawn = None if tree.ledger is None else tree.ledger.of_root()
        bare = replace(TokenTree.root_only(text[-1]), ledger=drawn)
        logits, hidden = self._forward(bare, len(text) - 1)
        self._own_nan = has_nan(logits)
        notice = (
            f"target {target.name!r} gives NaN for this text"
            if self._own_nan
            else f"a draft made target {target.name!r} give NaN; such steps are decoded without it"
        )
        if notice not in self.notices:
            self.notices.append(notice)
        return bare, logits, hidden

    def _cut(self, tokens: Sequence[int]) -> list[int]:
        """The tokens up to the first that ends the text; sets ``finish_reason`` if one does."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            n_text = len(self.history.tokens) + len(kept)
            if token in self.sampling.eos:
                self.finish_reason = "eos"
            elif self.completes is not None and self.completes(token):
                self.finish_reason = "stop_string"
            elif n_text - self.history.n_prompt >= self.max_new_tokens:
                self.finish_reason = "length"
            elif n_text >= self._capacity:
                self.finish_reason = "context_limit"
            if self.finish_reason is not None:
                break
        return kept


def _check_verdict(verdict: Verdict, tree: TokenTree, vocab_size: int) -> None:
    """ValueError unless the verdict is a path of the tree and one token more.

    Which path and which token is the verifier's to decide; without this, one that commits nothing
    would never end, and one that commits what it did not walk would break the KV cache.
    """
    path, tokens = list(verdict.path), list(verdict.tokens)
    parent, token = tree.lists().parent, tree.lists().token
    above = ROOT
    for node in path:
        if not 0 < node < len(token) or parent[node] != above:
            raise ValueError(f"path must lead down from the root, found {path} in {parent}")
        above = node
    if len(tokens) != len(path) + 1 or tokens[:-1] != [token[node] for node in path]:
        raise ValueError(f"tokens must be those of path {path} and one more, found {tokens}")
    if not 0 <= tokens[-1] < vocab_size:
        raise ValueError(f"tokens must be in 0..{vocab_size - 1}, found {tokens[-1]}")


def _logp(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1).to(torch.float32)


def _chosen(logp: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """float32 [n] on the host, where drafters work: log p of one token in each of ``rows``."""
    vocab_size = logp.shape[-1]
    places = [row * vocab_size + token for row, token in zip(rows, tokens, strict=True)]
    return logp.reshape(-1).index_select(0, _int64(places).to(logp.device)).cpu()


def _int64(numbers: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.int64))
