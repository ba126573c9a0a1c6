"""The decoding of one text: draft a tree, verify it in one forward, commit, repeat.

Shapes: N nodes of the verified tree, K kv span, n committed tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

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
    ScoringDrafter,
    TargetTop,
    Touched,
    TreeBackend,
    TreeBuilder,
    TreeTop,
    Verifier,
)
from treegraft.core.sampling import DRAWS, History, Noise, Sampling, TargetDistribution
from treegraft.core.stats import StepRecord
from treegraft.core.stopwatch import Stopwatch
from treegraft.core.tree import ROOT, TokenTree, Verdict


@dataclass(frozen=True, slots=True)
class Parts:
    """The components that a decoding runs on; ``tree`` makes an empty working tree.

    ``riders`` are the numbers of the drafters that ride along, ``leftover`` says whether what is
    left of a tree starts the next one (docs/method.md section 5).
    """

    target: LanguageModel
    drafters: Sequence[Drafter]
    names: Sequence[str]
    builder: TreeBuilder
    graft: GraftPolicy
    scheduler: Scheduler
    verifier: Verifier
    tree: Callable[[], TreeBackend]
    watch: Stopwatch
    riders: Sequence[int] = ()
    leftover: bool = False


@dataclass(frozen=True, slots=True)
class _Draft:
    """A pruned tree and how it was drafted, as in StepRecord."""

    tree: TokenTree
    calls: tuple[int, ...]
    side_calls: tuple[int, ...]
    drafted: tuple[int, ...]
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One target forward: what it read and what it committed.

    Attributes
    ----------
    tokens : the committed ids: those of ``path``, then the bonus token (unless a stop cut it off).
    tree : what the target read. path : indices into ``tree`` of the committed nodes, top down.
    record : the figures.
    """

    tokens: list[int]
    tree: TokenTree
    path: tuple[int, ...]
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
    _own_nan: bool = False
    # Node of the working tree that holds the bonus token: the next tree's root.
    _left: int | None = None
    _noise: Noise = field(init=False)
    _tree: TreeBackend = field(init=False)

    def __post_init__(self) -> None:
        target = self.parts.target
        self._capacity = len(self.history.tokens) + self.max_new_tokens
        if target.max_positions is not None:
            self._capacity = min(self._capacity, target.max_positions)
        wanted = [d.target_top for d in self.parts.drafters if d.target_top is not None]
        self._top_k = max(wanted) if wanted else None
        self._wants_tree_top = any(d.tree_top for d in self.parts.drafters)
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
        logp = _logp(logits)
        return TargetTop(_chosen(logp, tokens), *self._likeliest(logp))

    def _likeliest(self, logp: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [n, k] and float32 [n, k]: the likeliest tokens of each row, and their log p."""
        top = logp.topk(min(self._top_k or 0, logp.shape[-1]), dim=-1)
        return top.indices.cpu(), top.values.cpu()

    def step(self) -> Step:
        """Draft, let the target read, commit."""
        parts = self.parts
        n_kv = len(self.history.tokens) - 1
        draft = self._draft()
        tree = draft.tree
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
            top, tree_top = None, None
            if self._top_k is not None:
                rows = [ROOT, *verdict.path][: len(tokens)]
                if self._wants_tree_top:
                    logp = _logp(logits)
                    every = self._likeliest(logp)
                    tree_top = TreeTop(tree.token, *every)
                    likeliest = (every[0][rows], every[1][rows])
                    top = TargetTop(_chosen(logp[rows], tokens), *likeliest)
                else:
                    top = self._top(logits[rows], tokens)
            # A first chain already sits where it belongs.
            moved = [(i, j + 1) for j, i in enumerate(path) if i != j + 1]
            if moved and self.finish_reason is None:
                source, place = torch.tensor(moved).T
                parts.target.move_(self.cache.content, n_kv + source, n_kv + place)
        nodes = tree.node[list(path)].tolist()
        if parts.leftover and draft.calls and self.finish_reason is None:
            self._left = self._find(nodes[-1] if nodes else ROOT, tokens[-1])
        if self.finish_reason is None:
            commit = Commit(tuple(tokens), tuple(nodes), top, tree_top)
            for drafter in parts.drafters:
                drafter.observe(commit)
        n = len(parts.drafters)
        source = tree.source.tolist()
        record = StepRecord(
            n_new=len(tokens),
            n_path=len(verdict.path),
            n_tree=len(tree),
            calls=draft.calls,
            drafted=draft.drafted,
            kept=_count(source, n),
            accepted=_count([source[i] for i in path], n),
            seconds=parts.watch.lap(),
            side_calls=draft.side_calls,
            reused=draft.reused,
        )
        with parts.watch.stage("scheduler"), _named("scheduler", parts.scheduler, "finish"):
            parts.scheduler.finish(record)
        return Step(tokens, tree, path, record)

    def _draft(self) -> _Draft:
        """Grow a tree layer by layer and prune it; plain decoding gets the bare root."""
        parts, text, tree = self.parts, self.history.tokens, self._tree
        # The bonus token follows the deepest node, and both must fit.
        max_depth = self._capacity - len(text) - 1
        n = len(parts.drafters)
        if not parts.drafters or max_depth < 1:
            return _Draft(TokenTree.root_only(text[-1]), (), (0,) * n, (0,) * n)
        calls: list[int] = []
        side_calls: list[int] = []
        n_reached: list[int] = []
        with parts.watch.stage("tree"):
            if self._left is None:
                tree.reset_(text[-1], max_depth, parts.builder.budget)
            else:
                tree.reroot_(self._left, max_depth, parts.builder.budget)
                self._left = None
            reused = tree.n_nodes - 1
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
                        text=text,
                    )
                    with _named("scheduler", parts.scheduler, "choose"):
                        chosen = parts.scheduler.choose(state)
                    index = self.within_limit(chosen, tree)
                if index is None:
                    break
                touched, riders, acted = self.layer(tree, index, frontier)
                side_calls += riders
                if not acted:
                    break
                calls.append(index)
                with _named("builder", parts.builder, "frontier"):
                    reached = parts.builder.frontier(tree, touched, layer)
                if reached is None:
                    break
                n_reached.append(reached.shape[0])
                # A layer that found nothing leaves the frontier to the next drafter.
                if reached.shape[0]:
                    frontier = reached
                if not frontier.shape[0]:
                    break
            if calls:
                side_calls += self.finish_draft(tree, calls)
            with _named("builder", parts.builder, "prune"):
                pruned = parts.builder.prune(tree)
            self._check(pruned, max_depth, tree.n_drawn)
            drafted = _count(tree.source.tolist(), n)
            return _Draft(pruned, tuple(calls), _count(side_calls, n), drafted, reused)

    def _find(self, node: int, token: int) -> int | None:
        """The child of a working-tree node that holds ``token``; None if drawn trees may not be."""
        tree = self._tree
        if tree.n_drawn:
            return None
        found = tree.alive & (tree.parent == node) & (tree.token == token)
        found[ROOT] = False
        children = found.nonzero()[:, 0].tolist()
        return children[0] if children else None

    def layer(
        self, tree: TreeBackend, index: int, frontier: Tensor
    ) -> tuple[Touched, Sequence[int], bool]:
        """One layer: drafter ``index``, before it the riders if it scores.

        Also who they were, and whether ``index`` acted: riders may take the room that it had left.
        """
        parts = self.parts
        scores = isinstance(parts.drafters[index], ScoringDrafter)
        riders = [i for i in parts.riders if scores and self._has_room(i, tree)]
        visits: list[Touched] = []
        for i in (*riders, index):
            if i == index and self.within_limit(index, tree) != index:
                return Touched(frontier, torch.zeros_like(frontier)), riders, False
            with _named("graft", parts.graft, "visit"):
                visits.append(
                    parts.graft.visit(tree, parts.drafters[i], i, frontier, parts.builder.width)
                )
        if not riders:
            return visits[0], (), True
        nodes = torch.cat([visit.nodes for visit in visits])
        # A model has scored them all: the frontier ranks them by that, not by what they matched.
        return Touched(nodes, torch.zeros_like(nodes)), riders, True

    def finish_draft(self, tree: TreeBackend, calls: Sequence[int]) -> Sequence[int]:
        """Let the graft act on the whole tree; numbers of the drafters that it called."""
        parts = self.parts
        able = {i: d for i, d in enumerate(parts.drafters) if self._has_room(i, tree)}
        with _named("graft", parts.graft, "finish"):
            called = parts.graft.finish(
                tree, able, tuple(calls), parts.builder.width, parts.builder.budget
            )
        if not isinstance(called, Sequence) or any(i not in able for i in called):
            raise PolicyError(
                f"the graft's finish must return numbers of the drafters that it called, of "
                f"{sorted(able)}, found {called!r}"
            )
        return called

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
        if self.parts.verifier.needs_ledger and n_slots != n_drawn:
            raise TreeError(
                f"the pruned tree's ledger must hold all {n_drawn} draws, found {n_slots}; prune "
                "with the tree's own prune"
            )

    def within_limit(self, index: int | None, tree: TreeBackend) -> int | None:
        """The chosen drafter, or the next cheaper one whose context still has room."""
        n = len(self.parts.drafters)
        if index is not None and (type(index) is not int or not 0 <= index < n):
            raise PolicyError(
                f"the scheduler must choose a drafter 0..{n - 1} or None, found {index!r}"
            )
        while index is not None:
            if self._has_room(index, tree):
                return index
            limit = self.parts.drafters[index].limit
            notice = (
                f"drafter {self.parts.names[index]!r} is left out where text and draft tree pass "
                f"its context limit of {limit} tokens"
            )
            if notice not in self.notices:
                self.notices.append(notice)
            index = index - 1 if index > 0 else None
        return None

    def _has_room(self, index: int, tree: TreeBackend) -> bool:
        """Whether text and tree lie within the context of a drafter."""
        limit = self.parts.drafters[index].limit
        return limit is None or len(self.history.tokens) + int(tree.depth.max()) <= limit

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
        # Whether the draft was spoiled may depend on what was drawn, so that must not be forgotten.
        drawn = None if tree.ledger is None else tree.ledger.of_root()
        bare = replace(TokenTree.root_only(text[-1]), ledger=drawn)
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


def _logp(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1).to(torch.float32)


def _chosen(logp: Tensor, tokens: Sequence[int]) -> Tensor:
    """float32 [n] on the host, where drafters work: log p of one token per row."""
    here = torch.tensor(tokens, device=logp.device)
    return logp.gather(1, here[:, None])[:, 0].cpu()


def _count(sources: Sequence[int], n_drafters: int) -> tuple[int, ...]:
    return tuple(sources.count(i) for i in range(n_drafters))
