"""The decoding of one text: draft a tree, verify it in one forward, commit, repeat.

Shapes: N nodes of the verified tree, K kv span, n committed tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treegraft.core.errors import PolicyError, TreeError, TreegraftError
from treegraft.core.language_model import LanguageModel, extend
from treegraft.core.roles import (
    Commit,
    Context,
    Drafter,
    DraftState,
    GraftPolicy,
    Scheduler,
    TargetTop,
    TreeBackend,
    TreeBuilder,
    Verifier,
)
from treegraft.core.sampling import DRAWS, History, Noise, Sampling, TargetDistribution
from treegraft.core.stats import StepRecord
from treegraft.core.stopwatch import Stopwatch
from treegraft.core.tree import ROOT, TokenTree, Verdict


@dataclass(frozen=True, slots=True)
class Parts:
    """The components that a decoding runs on; ``tree`` makes an empty working tree."""

    target: LanguageModel
    drafters: Sequence[Drafter]
    names: Sequence[str]
    builder: TreeBuilder
    graft: GraftPolicy
    scheduler: Scheduler
    verifier: Verifier
    tree: Callable[[], TreeBackend]
    watch: Stopwatch


@dataclass(frozen=True, slots=True)
class Step:
    """One target forward: what it read and what it committed.

    Attributes
    ----------
    tokens : the committed ids: those of ``path``, then the bonus token (unless a stop cut it off).
    tree : what the target read. path : indices into ``tree`` of the committed nodes, top down.
    layers : what was decided before each layer and what came of it.
    record : the figures.
    """

    tokens: list[int]
    tree: TokenTree
    path: tuple[int, ...]
    layers: tuple[Layer, ...]
    record: StepRecord


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of drafting. Nodes are numbered as in the working tree (``TokenTree.node``).

    Attributes
    ----------
    chosen : the drafter that the scheduler chose; None to stop.
    drafter : the drafter that acted: a cheaper one where the chosen one's context had ended, None
        if nobody did, and the layer is then the last.
    frontier : int64 [k], where it could draft.
    touched : int64 [m], the children that it made or touched; repeats and -1 as in ``Touched``.
    n_nodes : nodes of the working tree after it.
    seconds : wall time of the visit, drafter and graft policy.
    """

    chosen: int | None
    drafter: int | None
    frontier: Tensor
    touched: Tensor
    n_nodes: int
    seconds: float


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
    _own_nan: bool = False
    _noise: Noise = field(init=False)
    _tree: TreeBackend = field(init=False)

    def __post_init__(self) -> None:
        target = self.parts.target
        self._capacity = len(self.history.tokens) + self.max_new_tokens
        if target.max_positions is not None:
            self._capacity = min(self._capacity, target.max_positions)
        wanted = [d.target_top for d in self.parts.drafters if d.target_top is not None]
        self._top_k = max(wanted) if wanted else None
        self._noise = Noise(self.sampling.seed, target.vocab_size)
        self._tree = self.parts.tree()

    def prefill(self) -> None:
        """Read the prompt but its last token, and tell the drafters about it."""
        watch, target, text = self.parts.watch, self.parts.target, self.history.tokens
        tops: list[TargetTop] = []
        with watch.stage("prefill"):
            self.cache.reserve(target, self._capacity + self.parts.builder.budget + 1)
            last_only = self._top_k is None
            for offset, logits in extend(
                target, self.cache.content, text[:-1], 0, last_only=last_only
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
        for number, drafter in enumerate(self.parts.drafters):
            context = Context(
                tuple(text),
                self._capacity,
                target.vocab_size,
                top,
                temperature=self.sampling.temperature,
                seed=self.sampling.seed,
                stream=DRAWS + number,
            )
            drafter.begin(context)

    def _top(self, logits: Tensor, tokens: Sequence[int]) -> TargetTop:
        logp = logits.log_softmax(-1).to(torch.float32)
        here = torch.tensor(tokens, device=logp.device)
        chosen = logp.gather(1, here[:, None])[:, 0]
        top = logp.topk(min(self._top_k or 0, logp.shape[-1]), dim=-1)
        # Drafters work on the host.
        return TargetTop(chosen.cpu(), top.indices.cpu(), top.values.cpu())

    def step(self) -> Step:
        """Draft, let the target read, commit."""
        parts = self.parts
        n_kv = len(self.history.tokens) - 1
        tree, layers = self._draft()
        logits = self._forward(tree, n_kv)
        # One column tells: a NaN in a node's state is in all its logits.
        if bool(logits[:, 0].isnan().any()):
            tree, logits = self._without_draft(tree, logits)
        with parts.watch.stage("verify"):
            target = TargetDistribution(logits, tree, self.sampling, self.history, self._noise)
            with _named("verifier", parts.verifier, "verdict"):
                verdict = parts.verifier.verdict(tree, target)
                _check_verdict(verdict, tree, parts.target.vocab_size)
            tokens = self._cut(verdict.tokens)
            path = verdict.path[: len(tokens)]
            self.history.extend(tokens)
            self._noise.forget_before(len(self.history.tokens))
            top = None
            if self._top_k is not None:
                rows = [ROOT, *verdict.path][: len(tokens)]
                top = self._top(logits[rows], tokens)
            # A first chain already sits where it belongs.
            moved = [(i, j + 1) for j, i in enumerate(path) if i != j + 1]
            if moved and self.finish_reason is None:
                source, place = torch.tensor(moved).T
                parts.target.move_(self.cache.content, n_kv + source, n_kv + place)
        nodes = tree.node[list(path)].tolist()
        if self.finish_reason is None:
            commit = Commit(tuple(tokens), tuple(nodes), top)
            for drafter in parts.drafters:
                drafter.observe(commit)
        if layers:
            with parts.watch.stage("tree"):
                self._tree.learn_(nodes, tokens)
        n = len(parts.drafters)
        source = tree.source.tolist()
        proposers = tree.proposers[list(path)].tolist()
        visits = [layer for layer in layers if layer.drafter is not None]
        drafted = proposed = (0,) * n
        if layers:
            drafted = _count(self._tree.source.tolist(), n)
            proposed = _count_bits(self._tree.proposers, n)
        record = StepRecord(
            n_new=len(tokens),
            n_path=len(verdict.path),
            n_tree=len(tree),
            calls=tuple(layer.drafter for layer in layers if layer.drafter is not None),
            drafted=drafted,
            proposed=proposed,
            kept=_count(source, n),
            accepted=_count([source[i] for i in path], n),
            accepted_alone=tuple(proposers.count(1 << i) for i in range(n)),
            seconds=parts.watch.lap(),
            visit_seconds=tuple(layer.seconds for layer in visits),
        )
        with parts.watch.stage("scheduler"), _named("scheduler", parts.scheduler, "finish"):
            parts.scheduler.finish(record)
        return Step(tokens, tree, path, layers, record)

    def _draft(self) -> tuple[TokenTree, tuple[Layer, ...]]:
        """Grow a tree layer by layer and prune it; plain decoding gets the bare root.

        The working tree holds this step's draft exactly if there is a layer.
        """
        parts, text, tree = self.parts, self.history.tokens, self._tree
        # The bonus token follows the deepest node, and both must fit.
        max_depth = self._capacity - len(text) - 1
        n = len(parts.drafters)
        if not parts.drafters or max_depth < 1:
            return TokenTree.root_only(text[-1]), ()
        layers: list[Layer] = []
        calls: list[int] = []
        n_reached: list[int] = []
        with parts.watch.stage("tree"):
            tree.reset_(text[-1], max_depth, parts.builder.budget)
            frontier = torch.tensor([ROOT])
            for layer in range(1, parts.builder.depth + 1):
                with parts.watch.stage("scheduler"):
                    state = DraftState(
                        layer=layer,
                        depth=parts.builder.depth,
                        calls=tuple(calls),
                        n_drafters=n,
                        n_prompt=self.history.n_prompt,
                        n_committed=len(text),
                        tree=tree,
                        frontier=frontier,
                        reached=tuple(n_reached),
                    )
                    with _named("scheduler", parts.scheduler, "choose"):
                        chosen = parts.scheduler.choose(state)
                    index = self._within_limit(chosen, tree)
                if index is None:
                    nothing = frontier.new_empty(0)
                    layers.append(Layer(chosen, None, frontier, nothing, tree.n_nodes, 0.0))
                    break
                calls.append(index)
                drafter = parts.drafters[index]
                began = perf_counter()
                with _named("graft", parts.graft, "visit"):
                    touched = parts.graft.visit(tree, drafter, index, frontier, parts.builder.width)
                seconds = perf_counter() - began
                layers.append(Layer(chosen, index, frontier, touched.nodes, tree.n_nodes, seconds))
                with _named("builder", parts.builder, "frontier"):
                    reached = parts.builder.frontier(tree, touched, layer)
                n_reached.append(reached.shape[0])
                # A layer that found nothing leaves the frontier to the next drafter.
                if reached.shape[0]:
                    frontier = reached
                if not frontier.shape[0]:
                    break
            with _named("builder", parts.builder, "prune"):
                pruned = parts.builder.prune(tree)
            self._check(pruned, max_depth, tree.n_drawn)
            return pruned, tuple(layers)

    def _check(self, tree: TokenTree, max_depth: int, n_drawn: int) -> None:
        """TreeError if what is to be verified is no tree over the committed text.

        Grafts and builders may be anybody's; with this they can waste time but change no token.
        """
        tree.check()
        root, last = int(tree.token[ROOT]), self.history.tokens[-1]
        if root != last:
            raise TreeError(f"the draft tree's root must hold the last token {last}, found {root}")
        budget, deepest = self.parts.builder.budget, int(tree.depth.max())
        if len(tree) > budget + 1:
            raise TreeError(f"the builder's budget is {budget} nodes, found {len(tree) - 1} pruned")
        if deepest > max_depth:
            raise TreeError(f"the text has room for a depth of {max_depth}, found {deepest}")
        n_slots = 0 if tree.ledger is None else int((tree.ledger.row >= 0).sum())
        if n_slots != n_drawn:
            raise TreeError(
                f"the pruned tree's ledger must hold all {n_drawn} draws, found {n_slots}"
            )

    def _within_limit(self, index: int | None, tree: TreeBackend) -> int | None:
        """The chosen drafter, or the next cheaper one whose context still has room."""
        n = len(self.parts.drafters)
        if index is not None and (type(index) is not int or not 0 <= index < n):
            raise PolicyError(
                f"the scheduler must choose a drafter 0..{n - 1} or None, found {index!r}"
            )
        while index is not None:
            limit = self.parts.drafters[index].limit
            if limit is None or len(self.history.tokens) + int(tree.depth.max()) <= limit:
                return index
            notice = (
                f"drafter {self.parts.names[index]!r} is left out where text and draft tree pass "
                f"its context limit of {limit} tokens"
            )
            if notice not in self.notices:
                self.notices.append(notice)
            index = index - 1 if index > 0 else None
        return None

    def _forward(self, tree: TokenTree, n_kv: int) -> Tensor:
        """float [N, V]: one forward of the target over the tree."""
        n = len(tree)
        rows = torch.arange(n_kv, n_kv + n)
        visible = torch.ones(n, n_kv + n, dtype=torch.bool)
        visible[:, n_kv:] = tree.ancestors
        positions = n_kv + tree.depth
        with self.parts.watch.stage("target"):
            return self.parts.target.forward(
                self.cache.content, tree.token, rows, positions, visible
            )

    def _without_draft(self, tree: TokenTree, logits: Tensor) -> tuple[TokenTree, Tensor]:
        """The step over the bare root and a clean cache, after NaN turned up in the logits.

        A masked row weighs 0, but 0 times NaN is NaN: one node whose keys or values are not finite
        (an untrained embedding row, an overflow in half precision) spoils every node, and whatever
        reads its row later. What is NaN without any draft is the model's own.
        """
        if self._own_nan:
            return tree, logits
        target, text = self.parts.target, self.history.tokens
        with self.parts.watch.stage("target"):
            self.cache.content = target.new_cache(self.cache.rows)
            for _ in extend(target, self.cache.content, text[:-1], 0, last_only=True):
                pass
        bare = TokenTree.root_only(text[-1])
        logits = self._forward(bare, len(text) - 1)
        self._own_nan = bool(logits[:, 0].isnan().any())
        notice = (
            f"target {target.name!r} gives NaN for this text"
            if self._own_nan
            else f"a draft made target {target.name!r} give NaN; such steps are decoded without it"
        )
        if notice not in self.notices:
            self.notices.append(notice)
        return bare, logits

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


@contextmanager
def _named(role: str, part: object, method: str) -> Iterator[None]:
    """Turn whatever a policy raises into one line that says whose fault it is."""
    try:
        yield
    except TreegraftError:
        raise
    except Exception as error:
        raise PolicyError(
            f"{role} {type(part).__name__!r} failed in {method}: {type(error).__name__}: {error}"
        ) from error


def _check_verdict(verdict: Verdict, tree: TokenTree, vocab_size: int) -> None:
    """ValueError unless the verdict is a path of the tree and one token more.

    Which path and which token is the verifier's to decide; without this, one that commits nothing
    would never end, and one that commits what it did not walk would break the KV cache.
    """
    path, tokens = list(verdict.path), list(verdict.tokens)
    parent, token = tree.parent.tolist(), tree.token.tolist()
    above = ROOT
    for node in path:
        if not 0 < node < len(token) or parent[node] != above:
            raise ValueError(f"path must lead down from the root, found {path} in {parent}")
        above = node
    if len(tokens) != len(path) + 1 or tokens[:-1] != [token[node] for node in path]:
        raise ValueError(f"tokens must be those of path {path} and one more, found {tokens}")
    if not 0 <= tokens[-1] < vocab_size:
        raise ValueError(f"tokens must be in 0..{vocab_size - 1}, found {tokens[-1]}")


def _count(sources: Sequence[int], n_drafters: int) -> tuple[int, ...]:
    return tuple(sources.count(i) for i in range(n_drafters))


def _count_bits(proposers: Tensor, n_drafters: int) -> tuple[int, ...]:
    bits = proposers.numpy()[:, None] >> np.arange(n_drafters) & 1
    return tuple(bits.sum(0).tolist())
