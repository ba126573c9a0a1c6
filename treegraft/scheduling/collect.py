"""Evaluates call schedules offline, from the steps of a text whose continuation is recorded.

Greedy decoding and seeded sampling under ``walk`` commit the same text whatever is drafted, so the
accepted length of any tree is read off the recorded continuation, without a target forward
(docs/method.md section 3). From one step all schedules are tried, layer by layer: those that begin
alike share the tree up to there, and all of them share what the models have read
(``shadow.ShadowDrafter``).

Shapes: S steps, R rows (a row is a schedule up to some layer, in one step), E rows that can be
continued, F features, K drafters.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegraft.core.errors import ConfigError
from treegraft.core.language_model import extend
from treegraft.core.roles import (
    Commit,
    Context,
    Drafter,
    DraftState,
    GraftPolicy,
    ScoringDrafter,
    TargetTop,
    TreeBackend,
)
from treegraft.core.sampling import DRAWS, History
from treegraft.core.tree import ROOT, TokenTree
from treegraft.drafting import Drafting
from treegraft.pipeline import Pipeline
from treegraft.policies.drafters.lm import LmConfig
from treegraft.policies.features import StateFeatures, TextFeatures
from treegraft.scheduling.collectable import check_collectable
from treegraft.scheduling.rows import Outcome, TraceRows
from treegraft.scheduling.shadow import Reading, ShadowDrafter

__all__ = [
    "MOST_SCHEDULES",
    "Collector",
    "PromptTrace",
    "prompt_key",
    "text_seed",
]

MOST_SCHEDULES = 243
"""Schedules of full depth up to which all are tried; above it a beam."""
_STOPPED = -1


def prompt_key(tokens: Sequence[int]) -> str:
    """SHA-256 of a prompt's token ids: names its trace, and decides on which split it is in."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i8").tobytes()).hexdigest()


def text_seed(seed: int, key: str) -> int:
    """The seed of one text's noise, from a run's ``seed`` and the text's ``prompt_key``."""
    return int(hashlib.sha256(f"{seed} {key}".encode()).hexdigest()[:12], 16)


@dataclass(frozen=True, slots=True)
class PromptTrace:
    """All schedules of some steps of one text, as arrays; docs/scheduling.md lists them.

    Attributes
    ----------
    key : ``prompt_key``. id, kind : of the prompt. n_prompt, n_new : tokens.
    arrays : by name, see ``ARRAYS`` in ``scheduling.traces``.
    text : int32, the recorded continuation. top_tokens int32 [n, k], top_logprobs float16 [n, k]:
        the target's likeliest tokens at each of its places.
    """

    key: str
    id: str
    kind: str | None
    n_prompt: int
    n_new: int
    arrays: dict[str, NDArray[Any]]

    @property
    def n_steps(self) -> int:
        """Steps from which schedules were evaluated."""
        return int(self.arrays["position"].shape[0])


@dataclass(slots=True)
class _Fork:
    """A schedule as far as it has been carried out, with a tree of its own."""

    tree: TreeBackend
    frontier: Tensor
    row: int = ROOT
    calls: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    n_before: int = 0
    readings: dict[int, Reading] = field(default_factory=dict)
    ended: bool = False

    def fork(self) -> _Fork:
        readings = {i: reading.fork() for i, reading in self.readings.items()}
        return replace(self, tree=copy.deepcopy(self.tree), readings=readings)


@final
class Collector:
    """Evaluates the schedules of texts with the parts of a pipeline.

    Parameters
    ----------
    pipeline : its config passes ``check_collectable``. Its drafters' state is used up.
    every : evaluate every so many steps; those between are gone through with one schedule.
    seed : of the schedules that carry a text forward.
    beam : schedules kept per layer where there are more than ``MOST_SCHEDULES``.
    top : how many of the target's likeliest tokens are kept at each place.
    own_noise : sample each text with a seed of its own (``text_seed``). Under one seed all texts
        have the same noise at the same place, which a scheduler could learn by heart.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        every: int = 4,
        seed: int = 0,
        beam: int = 24,
        top: int = 8,
        own_noise: bool = False,
    ) -> None:
        config, parts = pipeline.config, pipeline.parts
        check_collectable(config)
        if parts.builder.depth < 1:
            raise ConfigError("builder.depth must be at least 1 to schedule anything, found 0")
        self._pipeline = pipeline
        self._every, self._seed, self._beam, self._top = every, seed, beam, top
        self._own_noise = own_noise
        drafters: list[Drafter] = []
        for settings, drafter in zip(config.drafters, parts.drafters, strict=True):
            if isinstance(drafter, ScoringDrafter):
                ahead = settings.read_ahead if isinstance(settings, LmConfig) else 0
                drafters.append(ShadowDrafter(drafter, parts.target.vocab_size, ahead))
            else:
                drafters.append(drafter)
        self._parts = replace(parts, drafters=tuple(drafters))
        self._shadows = {i: d for i, d in enumerate(drafters) if isinstance(d, ShadowDrafter)}
        builder = parts.builder
        self._features = StateFeatures(len(drafters), builder.depth, builder.width, builder.budget)
        self._finishes = type(parts.graft).finish is not GraftPolicy.finish

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features, in the order of their columns."""
        return self._features.names

    def collect(self, prompt: str | Sequence[int], id: str, kind: str | None = None) -> PromptTrace:
        """Decode a prompt with the pipeline's own scheduler and evaluate schedules along its text.

        A text of one token leaves nothing to schedule; its trace has no step.
        """
        tokens = self._pipeline.encode(prompt)
        sampling = self._pipeline.config.sampling
        noise = text_seed(sampling.seed, prompt_key(tokens)) if self._own_noise else sampling.seed
        new = self._pipeline.generate(tokens, seed=noise).tokens
        text = [*tokens, *new]
        with torch.no_grad():
            top = self._read(text)
            rows = TraceRows(len(self._parts.drafters), len(self._features.names))
            if len(new) > 1:
                self._follow(text, len(tokens), top, rows)
        arrays = rows.arrays()
        kept = slice(len(tokens) - 1, len(text) - 1)
        arrays["text"] = np.array(new, dtype=np.int32)
        arrays["top_tokens"] = top.tokens[kept, : self._top].numpy().astype(np.int32)
        arrays["top_logprobs"] = top.logprobs[kept, : self._top].numpy().astype(np.float16)
        return PromptTrace(prompt_key(tokens), id, kind, len(tokens), len(new), arrays)

    def _read(self, text: Sequence[int]) -> TargetTop:
        """The target at places 1..len(text)-1, in one causal pass."""
        target = self._parts.target
        wanted = [d.target_top for d in self._parts.drafters if d.target_top is not None]
        k = min(max([self._top, *wanted]), target.vocab_size)
        tops: list[TargetTop] = []
        cache = target.new_cache(len(text))
        for offset, logits in extend(target, cache, text[:-1], 0):
            logp = logits.log_softmax(-1).to(torch.float32)
            here = torch.tensor(text[offset + 1 : offset + 1 + logits.shape[0]])
            chosen = logp.gather(1, here.to(logp.device)[:, None])[:, 0]
            best = logp.topk(k, dim=-1)
            tops.append(TargetTop(chosen.cpu(), best.indices.cpu(), best.values.cpu()))
        return TargetTop(
            torch.cat([t.chosen for t in tops]),
            torch.cat([t.tokens for t in tops]),
            torch.cat([t.logprobs for t in tops]),
        )

    def _follow(self, text: list[int], n_prompt: int, top: TargetTop, rows: TraceRows) -> None:
        """Go through the steps of a text, evaluating every so many of them."""
        parts, sampling = self._parts, self._pipeline.config.sampling
        wanted = [d.target_top for d in parts.drafters if d.target_top is not None]
        k = max(wanted) if wanted else None
        capacity = n_prompt + self._pipeline.config.stop.max_new_tokens
        limit = parts.target.max_positions
        if limit is not None:
            capacity = min(capacity, limit)
        for number, drafter in enumerate(parts.drafters):
            context = Context(
                tuple(text[:n_prompt]),
                capacity,
                parts.target.vocab_size,
                _part(top, 0, n_prompt - 1, k),
                temperature=sampling.temperature,
                seed=sampling.seed,
                stream=DRAWS + number,
            )
            drafter.begin(context)
        dice = np.random.default_rng([self._seed, int(prompt_key(text[:n_prompt])[:8], 16)])
        seen = TextFeatures()
        committed = text[:n_prompt]
        number = int(dice.integers(self._every))
        while len(committed) < len(text):
            position = len(committed)
            step = _StepSearch(self, committed, n_prompt, text, capacity, seen)
            calls = dice.integers(len(parts.drafters), size=parts.builder.depth).tolist()
            searched = number % self._every == 0
            n_new = step.search(rows, calls) if searched else step.carry_out(calls)
            number += 1
            commit = Commit(
                tuple(text[position : position + n_new]),
                (),
                _part(top, position - 1, position - 1 + n_new, k),
            )
            for drafter in parts.drafters:
                drafter.observe(commit)
            committed.extend(commit.tokens)


@final
class _StepSearch:
    """The schedules of one step."""

    def __init__(
        self,
        collector: Collector,
        committed: list[int],
        n_prompt: int,
        text: list[int],
        capacity: int,
        seen: TextFeatures,
    ) -> None:
        self._collector = collector
        self._committed, self._n_prompt = committed, n_prompt
        self._continuation = text[len(committed) :]
        self._features_of_text = seen
        # Limits of contexts, riders and the graft's end are those of decoding itself.
        self._drafting = Drafting(collector._parts, History(committed, n_prompt), capacity, [])
        self._max_depth = capacity - len(committed) - 1
        for shadow in collector._shadows.values():
            shadow.start(committed[-1], max(self._max_depth, 1))

    def _begin(self) -> _Fork:
        parts = self._collector._parts
        tree = parts.tree()
        tree.reset_(self._committed[-1], max(self._max_depth, 1), parts.builder.budget)
        readings = {i: Reading() for i in self._collector._shadows}
        # With room for one token only that one is decoded plainly.
        return _Fork(tree, torch.tensor([ROOT]), readings=readings, ended=self._max_depth < 1)

    def carry_out(self, calls: Sequence[int]) -> int:
        """Tokens that one schedule commits."""
        fork = self._begin()
        for index in calls:
            if fork.ended:
                break
            self._act(fork, index)
        return self._outcome(fork).n_new

    def search(self, rows: TraceRows, calls: Sequence[int]) -> int:
        """Enter the rows of all schedules, or of a beam; tokens that ``calls`` commits."""
        n, depth = len(self._collector._parts.drafters), self._collector._parts.builder.depth
        rows.begin(len(self._committed), len(self._continuation))
        root = self._begin()
        root.row = rows.add(_STOPPED, _STOPPED, 0, 1, self._outcome(root), ())
        layer, n_new = [root], 1
        for number in range(1, depth + 1):
            made: list[tuple[_Fork, int, int]] = []
            for fork in layer:
                if fork.ended:
                    continue
                rows.describe(fork.row, self._describe(fork, number))
                for index in range(n):
                    child = fork if index == n - 1 else fork.fork()
                    before = child.readings[index].widths if index in child.readings else ()
                    parent = child.row
                    self._act(child, index)
                    if child.calls[-1:] != (index,) or len(child.calls) < number:
                        continue  # another drafter had to act, whose schedule this is
                    outcome = self._outcome(child)
                    after = child.readings[index].widths if index in child.readings else ()
                    widths = after[len(before) :]
                    child.row = rows.add(parent, index, number, child.tree.n_nodes, outcome, widths)
                    made.append((child, outcome.n_new, sum(after)))
                    if child.calls == tuple(calls[:number]):
                        n_new = outcome.n_new
            layer = [fork for fork, _, _ in self._kept(made, n**depth)]
        return n_new

    def _kept(
        self, made: list[tuple[_Fork, int, int]], n_schedules: int
    ) -> list[tuple[_Fork, int, int]]:
        """All of a layer, or its beam: most tokens first, then fewest nodes read by models.

        Schedules of a single drafter always stay, so that endpoints can be compared.
        """
        if n_schedules <= MOST_SCHEDULES:
            return made
        pure = [entry for entry in made if len(set(entry[0].calls)) == 1]
        mixed = [entry for entry in made if len(set(entry[0].calls)) > 1]
        mixed.sort(key=lambda entry: (-entry[1], entry[2]))
        return pure + mixed[: max(self._collector._beam - len(pure), 0)]

    def _describe(self, fork: _Fork, number: int) -> NDArray[np.float32]:
        parts = self._collector._parts
        state = DraftState(
            layer=number,
            depth=parts.builder.depth,
            calls=fork.calls,
            n_drafters=len(parts.drafters),
            n_prompt=self._n_prompt,
            n_committed=len(self._committed),
            tree=fork.tree,
            frontier=fork.frontier,
            reached=fork.reached,
            text=self._committed,
        )
        text = self._features_of_text.follow(self._committed)
        return self._collector._features.of(state, text, fork.n_before)

    def _act(self, fork: _Fork, index: int) -> None:
        """Let a drafter act in the next layer, as ``Decoding`` does."""
        parts, drafting = self._collector._parts, self._drafting
        drafting.tree = fork.tree
        chosen = drafting.within_limit(index)
        if chosen is None:
            fork.ended = True
            return
        for i, shadow in self._collector._shadows.items():
            shadow.reading = fork.readings[i]
        fork.n_before = fork.tree.n_nodes
        touched, _, acted = drafting.visit(chosen, fork.frontier)
        if not acted:
            fork.ended = True
            return
        fork.calls = (*fork.calls, chosen)
        n_calls = len(fork.calls)
        reached, fork.frontier = drafting.next_frontier(touched, n_calls, fork.frontier)
        fork.reached = (*fork.reached, reached)
        fork.ended = not fork.frontier.shape[0] or n_calls == parts.builder.depth

    def _outcome(self, fork: _Fork) -> Outcome:
        """Prune as if drafting stopped here, and walk along the recorded continuation."""
        collector = self._collector
        parts, tree = collector._parts, fork.tree
        finish = (_STOPPED, 0)
        readings = fork.readings
        if fork.calls and collector._finishes:
            # The graft may change the tree, which other schedules still need.
            tree = copy.deepcopy(tree)
            readings = {i: reading.fork() for i, reading in readings.items()}
            for i, shadow in collector._shadows.items():
                shadow.reading = readings[i]
            self._drafting.tree = tree
            self._drafting.finish(fork.calls)
            for i, reading in readings.items():
                more = reading.widths[len(fork.readings[i].widths) :]
                if more:
                    finish = (i, sum(more))
        pruned = parts.builder.prune(tree)
        path = _walk(pruned, self._continuation)
        n_new = min(len(path) + 1, len(self._continuation))
        unread = []
        for i in range(len(parts.drafters)):
            if i not in readings or not readings[i].widths:
                unread.append(0)
                continue
            read = readings[i].read
            nodes = pruned.node[path].tolist()
            known = [node < read.shape[0] and bool(read[node]) for node in nodes]
            n_known = known.index(False) if False in known else len(known)
            unread.append(len(path) - n_known)
        return Outcome(n_new, len(pruned), finish, tuple(unread))


def _walk(tree: TokenTree, continuation: Sequence[int]) -> list[int]:
    """Nodes of the longest branch that the continuation follows, top down, without the root."""
    child = {
        (parent, token): node
        for node, (parent, token) in enumerate(
            zip(tree.parent.tolist(), tree.token.tolist(), strict=True)
        )
        if node != ROOT
    }
    path: list[int] = []
    node: int | None = ROOT
    for token in continuation:
        node = child.get((node, token))
        if node is None:
            break
        path.append(node)
    return path


def _part(top: TargetTop, first: int, last: int, k: int | None) -> TargetTop | None:
    """Rows first..last-1 as a drafter is told them; None if none asked or there are none."""
    if k is None or last <= first:
        return None
    rows = slice(first, last)
    return TargetTop(top.chosen[rows], top.tokens[rows, :k], top.logprobs[rows, :k])


def schedules(n_drafters: int, depth: int) -> Iterator[tuple[int, ...]]:
    """All schedules of up to ``depth`` layers, the shorter ones first; stopping at once is ()."""
    layer: list[tuple[int, ...]] = [()]
    yield ()
    for _ in range(depth):
        layer = [(*calls, index) for calls in layer for index in range(n_drafters)]
        yield from layer
