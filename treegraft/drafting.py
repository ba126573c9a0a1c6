"""The drafting of one step: a tree grown layer by layer, then pruned to what the target reads.

Shapes: k nodes of a frontier, N nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from treegraft.core.errors import PolicyError, TreeError
from treegraft.core.offers import Offers
from treegraft.core.roles import DraftState, ScoringDrafter, Touched, TreeBackend
from treegraft.core.sampling import History
from treegraft.core.tree import ROOT, TokenTree
from treegraft.parts import Parts, named


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of drafting. Nodes are numbered as in the working tree (``TokenTree.node``).

    Attributes
    ----------
    chosen : the drafter that the scheduler chose; None to stop.
    drafter : the drafter that acted: a cheaper one where the chosen one's context had ended, None
        if nobody did, and the layer is then the last.
    riders : drafters that rode along, in their order.
    frontier : int64 [k], where it could draft.
    touched : int64 [m], the children that it and the riders made or touched; repeats and -1 as in
        ``Touched``.
    n_nodes : nodes of the working tree after it.
    seconds : wall time of the visits, drafters and graft policy.
    """

    chosen: int | None
    drafter: int | None
    riders: tuple[int, ...]
    frontier: Tensor
    touched: Tensor
    n_nodes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Draft:
    """A pruned tree and how it came about.

    Attributes
    ----------
    tree : what the target is to read.
    layers : what was decided before each layer and what came of it; empty where nothing could be
        drafted, and the working tree then holds nothing of this step.
    side_calls, drafted, proposed, reused : as in StepRecord.
    """

    tree: TokenTree
    layers: tuple[Layer, ...]
    side_calls: tuple[int, ...]
    drafted: tuple[int, ...]
    proposed: tuple[int, ...]
    reused: int = 0

    @property
    def calls(self) -> tuple[int, ...]:
        """The drafter of each layer in which one acted."""
        return tuple(layer.drafter for layer in self.layers if layer.drafter is not None)

    @property
    def visit_seconds(self) -> tuple[float, ...]:
        """Wall time of each of ``calls``."""
        return tuple(layer.seconds for layer in self.layers if layer.drafter is not None)


@dataclass(slots=True)
class Drafting:
    """Drafts the steps of one text, whose longest length is ``capacity``.

    ``notices`` gets a line where a drafter's context ends. ``tree`` is the working tree; whoever
    evaluates schedules offline (scheduling/) hands in one tree after the other.
    """

    parts: Parts
    history: History
    capacity: int
    notices: list[str]
    # Node of the working tree that holds the bonus token: the next tree's root.
    _left: int | None = None
    tree: TreeBackend = field(init=False)

    def __post_init__(self) -> None:
        self.tree = self.parts.tree()

    def plain(self) -> Draft:
        """No draft: the target reads the last token alone."""
        self._left = None
        nothing = (0,) * len(self.parts.drafters)
        return Draft(TokenTree.root_only(self.history.tokens[-1]), (), nothing, nothing, nothing)

    def draft(self) -> Draft:
        """Grow a tree layer by layer and prune it; plain decoding gets the bare root."""
        parts, text, tree = self.parts, self.history.tokens, self.tree
        # The bonus token follows the deepest node, and both must fit.
        max_depth = self.capacity - len(text) - 1
        n = len(parts.drafters)
        if not parts.drafters or max_depth < 1:
            return self.plain()
        with parts.watch.stage("tree"):
            if self._left is None:
                tree.reset_(text[-1], max_depth, parts.builder.budget)
            else:
                tree.reroot_(self._left, max_depth, parts.builder.budget)
                self._left = None
            reused = tree.n_nodes - 1
            began = perf_counter()
            layers = self._grow()
            side_calls = [i for layer in layers for i in layer.riders]
            calls = [layer.drafter for layer in layers if layer.drafter is not None]
            if calls:
                side_calls += self.finish(calls)
            with named("builder", parts.builder, "drafted"):
                parts.builder.drafted(perf_counter() - began, len(text))
            with named("builder", parts.builder, "prune"):
                pruned = parts.builder.prune(tree)
            self._check(pruned, max_depth)
            return Draft(
                tree=pruned,
                layers=tuple(layers),
                side_calls=count(side_calls, n),
                drafted=count(tree.lists().source, n),
                proposed=_count_bits(tree.lists().proposers, n),
                reused=reused,
            )

    def offers(self, path: Sequence[int]) -> list[Offers | None]:
        """What each drafter would have proposed along the last draft's verified path.

        ``path`` as in ``Commit``; called before the drafters observe it. Behind nodes that a
        builder has numbered in its own way nothing is asked.
        """
        parent, nodes = self.tree.lists().parent, [ROOT]
        for node in path:
            if not 0 < node < len(parent) or parent[node] != nodes[-1]:
                break
            nodes.append(node)
        width = self.parts.builder.width
        return [drafter.offers(self.tree, nodes, width) for drafter in self.parts.drafters]

    def committed(self, path: Sequence[int], tokens: Sequence[int], more: bool) -> None:
        """The last draft was verified: working-tree nodes and tokens as in ``Commit``.

        ``more`` says whether another step follows.
        """
        with self.parts.watch.stage("tree"):
            self.tree.learn_(path, tokens)
            if self.parts.leftover and more:
                self._left = self._find(path[-1] if path else ROOT, tokens[-1])

    def _find(self, node: int, token: int) -> int | None:
        """The child of a working-tree node that holds ``token``; None if drawn trees may not be."""
        if self.tree.n_drawn:
            return None
        lists = self.tree.lists()
        for child in range(node + 1, len(lists.token)):
            if lists.token[child] == token and lists.parent[child] == node and lists.alive[child]:
                return child
        return None

    def _grow(self) -> list[Layer]:
        parts, tree = self.parts, self.tree
        layers: list[Layer] = []
        calls: list[int] = []
        n_reached: list[int] = []
        frontier = _root()
        for number in range(1, parts.builder.depth + 1):
            chosen, index = self._choose(number, calls, frontier, n_reached)
            if index is None:
                nothing = frontier.new_empty(0)
                layers.append(Layer(chosen, None, (), frontier, nothing, tree.n_nodes, 0.0))
                break
            began = perf_counter()
            touched, riders, acted = self.visit(index, frontier)
            seconds = perf_counter() - began
            who = index if acted else None
            layers.append(
                Layer(chosen, who, riders, frontier, touched.nodes, tree.n_nodes, seconds)
            )
            if not acted:
                break
            calls.append(index)
            reached, frontier = self.next_frontier(touched, number, frontier)
            n_reached.append(reached)
            if not frontier.shape[0]:
                break
        return layers

    def next_frontier(self, touched: Touched, layer: int, frontier: Tensor) -> tuple[int, Tensor]:
        """How many children ``layer`` hands on, and int64 [k] where the next one drafts.

        Empty if there is no next layer.
        """
        parts = self.parts
        with named("builder", parts.builder, "frontier"):
            reached = parts.builder.frontier(self.tree, touched, layer)
            if reached is None:
                return 0, frontier.new_empty(0)
            # A layer that found nothing leaves the frontier to the next drafter.
            return reached.shape[0], self._living(reached if reached.shape[0] else frontier)

    def _living(self, frontier: Tensor) -> Tensor:
        """``frontier`` without the nodes that a graft has taken out; the root if none is left."""
        alive = self.tree.lists().alive
        living = [alive[node] for node in frontier.tolist()]
        if all(living):
            return frontier
        return frontier[torch.tensor(living)] if any(living) else _root()

    def _choose(
        self, layer: int, calls: Sequence[int], frontier: Tensor, reached: Sequence[int]
    ) -> tuple[int | None, int | None]:
        """The drafter that the scheduler chooses for ``layer``, and the one that can act."""
        parts = self.parts
        with parts.watch.stage("scheduler"):
            state = DraftState(
                layer=layer,
                depth=parts.builder.depth,
                calls=tuple(calls),
                n_drafters=len(parts.drafters),
                n_prompt=self.history.n_prompt,
                n_committed=len(self.history.tokens),
                tree=self.tree,
                frontier=frontier,
                reached=tuple(reached),
                text=self.history.tokens,
            )
            with named("scheduler", parts.scheduler, "choose"):
                chosen = parts.scheduler.choose(state)
            return chosen, self.within_limit(chosen)

    def visit(self, index: int, frontier: Tensor) -> tuple[Touched, tuple[int, ...], bool]:
        """One layer: drafter ``index``, before it the riders if it scores.

        Also who they were, and whether ``index`` acted: riders may take the room that it had left.
        """
        parts, tree = self.parts, self.tree
        scores = isinstance(parts.drafters[index], ScoringDrafter)
        riders = tuple(i for i in parts.riders if scores and self._has_room(i))
        visits: list[Touched] = []
        for i in (*riders, index):
            if i == index and self.within_limit(index) != index:
                return Touched(frontier, torch.zeros_like(frontier)), riders, False
            where = self._living(frontier) if visits else frontier
            with named("graft", parts.graft, "visit"):
                visits.append(
                    parts.graft.visit(tree, parts.drafters[i], i, where, parts.builder.width)
                )
        if not riders:
            return visits[0], (), True
        nodes = torch.cat([visit.nodes for visit in visits])
        # A model has scored them all: the frontier ranks them by that, not by what they matched.
        return Touched(nodes, torch.zeros_like(nodes)), riders, True

    def finish(self, calls: Sequence[int]) -> Sequence[int]:
        """Let the graft act on the whole tree; numbers of the drafters that it called."""
        parts = self.parts
        able = {i: d for i, d in enumerate(parts.drafters) if self._has_room(i)}
        with named("graft", parts.graft, "finish"):
            called = parts.graft.finish(
                self.tree, able, tuple(calls), parts.builder.width, parts.builder.budget
            )
        if not isinstance(called, Sequence) or any(i not in able for i in called):
            raise PolicyError(
                f"the graft's finish must return numbers of the drafters that it called, of "
                f"{sorted(able)}, found {called!r}"
            )
        return called

    def _check(self, tree: TokenTree, max_depth: int) -> None:
        """TreeError if what is to be verified is no tree over the committed text.

        Grafts and builders may be anybody's; with this they can waste time but change no token.
        """
        if self.parts.foreign:
            tree.check()
        lists = tree.lists()
        root, last = lists.token[ROOT], self.history.tokens[-1]
        if root != last:
            raise TreeError(f"the draft tree's root must hold the last token {last}, found {root}")
        budget, deepest = self.parts.builder.budget, max(lists.depth)
        if len(tree) > budget + 1:
            raise TreeError(f"the builder's budget is {budget} nodes, found {len(tree) - 1} pruned")
        if deepest > max_depth:
            raise TreeError(f"the text has room for a depth of {max_depth}, found {deepest}")
        n_drawn = self.tree.n_drawn
        n_slots = 0 if tree.ledger is None else sum(row >= 0 for row in tree.ledger.row.tolist())
        if self.parts.verifier.needs_ledger and n_slots != n_drawn:
            raise TreeError(
                f"the pruned tree's ledger must hold all {n_drawn} draws, found {n_slots}; prune "
                "with the tree's own prune"
            )

    def within_limit(self, index: int | None) -> int | None:
        """The chosen drafter, or the next cheaper one whose context still has room."""
        n = len(self.parts.drafters)
        if index is not None and (type(index) is not int or not 0 <= index < n):
            raise PolicyError(
                f"the scheduler must choose a drafter 0..{n - 1} or None, found {index!r}"
            )
        while index is not None:
            if self._has_room(index):
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

    def _has_room(self, index: int) -> bool:
        """Whether text and tree lie within the context of a drafter."""
        limit = self.parts.drafters[index].limit
        return limit is None or len(self.history.tokens) + max(self.tree.lists().depth) <= limit


def _root() -> Tensor:
    """The frontier of a tree that is its root."""
    return torch.from_numpy(np.array([ROOT], dtype=np.int64))


def count(numbers: Sequence[int], n_drafters: int) -> tuple[int, ...]:
    """How often each drafter occurs in ``numbers``."""
    return tuple(numbers.count(i) for i in range(n_drafters))


def _count_bits(proposers: Sequence[int], n_drafters: int) -> tuple[int, ...]:
    return tuple(sum(held >> i & 1 for held in proposers) for i in range(n_drafters))
