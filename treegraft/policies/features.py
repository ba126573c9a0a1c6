"""What a learned scheduler sees: numbers of the text and of the tree before a layer.

Offline collection and decoding compute them by this one file, so that a scheduler decides on what
it was fitted on. Nothing here depends on who drafted the text so far: a scheduler that acts
differently from the one that made the traces sees features of the same law.

Shapes: F features, K drafters, D layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from treegraft.core.roles import DraftState

__all__ = ["FEATURES_VERSION", "LOOKBACK", "StateFeatures", "TextFeatures"]

FEATURES_VERSION = 1
"""Raised whenever a feature changes its meaning; artefacts of another version are refused."""
LOOKBACK = 5
"""Layers above the frontier within which the best nodes are looked at, as in the paper."""
_LONGEST = 16
_JUDGED = 64
"""Tokens of a text that is new over which its hits are counted."""
_MOST_PLACES = 256
"""Latest places of a token from which contexts are followed."""
_FLOOR = -20.0
_MOST_NOTED = 4096
"""Schedules of which the features are kept."""
_NOTHING = (-1, 0, 0.0)
"""What is predicted behind a token that is new: no token, of a context of none."""
_TEXT = ("match", "match_share", "hit_fast", "hit_slow", "hit_run")


@final
class TextFeatures:
    """How well the text repeats itself, followed token by token.

    Before each token the longest earlier occurrence of the text's end (up to 16 tokens) predicts
    what was most frequent behind it. ``match`` is log(1 + length) of that occurrence now,
    ``match_share`` the share of its most frequent continuation, ``hit_fast`` and ``hit_slow``
    running means (over about 4 and 16 tokens) of whether the prediction was right, ``hit_run`` for
    how many tokens in a row it was (of at most 16). Contexts are followed at the latest 256 places
    of a token, so that a token costs no more in a long text.
    """

    def __init__(self) -> None:
        self._text: Sequence[int] | None = None
        self._n_read = 0
        self.values: tuple[float, ...] = (0.0,) * len(_TEXT)

    def follow(self, text: Sequence[int]) -> tuple[float, ...]:
        """The five features of ``text``; a list that only grows is read once."""
        if text is not self._text or len(text) < self._n_read:
            self._text = text
            self._n_read = 0
            # Token -> where it stands; and how long a context ends there that the text ends on too.
            self._places: dict[int, list[int]] = {}
            self._runs: dict[int, int] = {}
            self._predicted = _NOTHING
            self._fast = self._slow = 0.0
            self._run = 0
        if self._n_read < len(text):
            # Of a long prompt only the end is judged: what lies further back has no weight left.
            judged = max(len(text) - _JUDGED, 0)
            if self._n_read < judged - _LONGEST:
                self._note_places(text, judged - _LONGEST)
            for token in text[self._n_read :]:
                self._note(token, self._n_read > judged)
            token, length, share = self._predicted
            self.values = (
                math.log1p(length),
                share,
                self._fast,
                self._slow,
                self._run / _LONGEST,
            )
        return self.values

    def _note_places(self, text: Sequence[int], end: int) -> None:
        """Read up to ``end`` without following contexts, which no later one reaches back to."""
        places = self._places
        for place in range(self._n_read, end):
            places.setdefault(text[place], []).append(place)
        self._runs = {}
        self._n_read = end

    def _note(self, token: int, judge: bool) -> None:
        if judge:
            if token == self._predicted[0]:
                self._fast += (1.0 - self._fast) / 4
                self._slow += (1.0 - self._slow) / 16
                self._run = min(self._run + 1, _LONGEST)
            else:
                self._fast -= self._fast / 4
                self._slow -= self._slow / 16
                self._run = 0
        places = self._places.get(token)
        if places is None:
            self._places[token] = [self._n_read]
            self._runs, self._predicted = {}, _NOTHING
        else:
            before = self._runs
            latest = places if len(places) <= _MOST_PLACES else places[-_MOST_PLACES:]
            if before:
                self._runs = {p: before.get(p - 1, 0) + 1 for p in latest}
            else:
                self._runs = dict.fromkeys(latest, 1)
            self._predicted = self._predict()
            places.append(self._n_read)
        self._n_read += 1

    def _predict(self) -> tuple[int, int, float]:
        """The most frequent continuation (the latest one on ties), and of how long a context; its
        share among all continuations of that context.
        """
        runs, text = self._runs, self._text
        assert text is not None
        longest = min(max(runs.values()), _LONGEST)
        if len(runs) == 1:
            (place,) = runs
            return text[place + 1], longest, 1.0
        after = [text[place + 1] for place, length in runs.items() if length >= longest]
        if len(after) == 1:
            return after[0], longest, 1.0
        counts: dict[int, int] = {}
        for token in reversed(after):
            counts[token] = counts.get(token, 0) + 1
        best = max(counts, key=counts.__getitem__)
        return best, longest, counts[best] / len(after)


@final
class StateFeatures:
    """The features of a ``DraftState`` as float32 [F], in the order of ``names``.

    From the paper (method.md section 2): ``log_prompt``; ``layer``; share of the layers that each
    drafter acted in (``calls_i``) and one bit per earlier layer and drafter (``layer_l_by_i``);
    mean ``depth`` of the frontier; share of its nodes that are leaves; ``debt``: how much shallower
    the W best nodes within the lookback lie than the frontier; share of those W that are ``older``
    than the last layer; their ``overlap`` with the frontier; their mean logprob (``best_mean``).
    Times of forwards are constants of an artefact, which is made for one cost model.

    Ours: ``log_text``; what ``TextFeatures`` says; ``best_first``: logprob of the best frontier
    node; ``frontier_mass``: sum of the frontier's path probabilities; ``unscored``: share of the
    frontier that nobody scored; ``log_frontier`` and ``log_nodes``; ``expected``: sum of the path
    probabilities of the B best nodes, which is the accepted length if scores are true; ``idle``:
    whether the last layer found nothing.

    Parameters
    ----------
    n_drafters, depth, width, budget : of the pipeline. depth is at least 1.
    """

    def __init__(self, n_drafters: int, depth: int, width: int, budget: int) -> None:
        self._shape = (n_drafters, depth)
        self._width, self._budget = width, budget
        self._calls: dict[tuple[int, ...], tuple[float, ...]] = {}
        drafters, layers = range(n_drafters), range(1, depth)
        self.names: tuple[str, ...] = (
            "log_prompt",
            "log_text",
            *_TEXT,
            "layer",
            "depth",
            "leaves",
            "debt",
            "older",
            "overlap",
            "best_mean",
            "best_first",
            "frontier_mass",
            "unscored",
            "log_frontier",
            "log_nodes",
            "expected",
            "idle",
            *(f"calls_{i}" for i in drafters),
            *(f"layer_{layer}_by_{i}" for layer in layers for i in drafters),
        )

    def of(self, state: DraftState, text: Sequence[float], n_before: int) -> NDArray[np.float32]:
        """``values`` as float32 [F]."""
        return np.array(self.values(state, text, n_before), dtype=np.float32)

    def values(self, state: DraftState, text: Sequence[float], n_before: int) -> tuple[float, ...]:
        """Features before a layer.

        Parameters
        ----------
        text : of ``TextFeatures`` for the committed text.
        n_before : nodes of the working tree before the last layer; 0 before the first.
        """
        calls = state.calls
        return (
            math.log1p(state.n_prompt),
            math.log1p(state.n_committed),
            *text,
            (state.layer - 1) / self._shape[1],
            # Most steps' first decision, and always the same.
            *(_ROOT_ONLY if state.tree.n_nodes == 1 else self.of_tree(state, n_before)),
            1.0 if state.reached and not state.reached[-1] else 0.0,
            *(self._calls.get(calls) or self._note(calls)),
        )

    def _note(self, calls: tuple[int, ...]) -> tuple[float, ...]:
        """The features from ``calls_0`` on, which few schedules make."""
        n_drafters, depth = self._shape
        n_calls = [0.0] * n_drafters
        bits = [0.0] * (n_drafters * (depth - 1))
        for layer, index in enumerate(calls):
            n_calls[index] += 1 / depth
            bits[layer * n_drafters + index] = 1.0
        if len(self._calls) >= _MOST_NOTED:
            self._calls.clear()
        found = self._calls[calls] = (*n_calls, *bits)
        return found

    def of_tree(self, state: DraftState, n_before: int) -> tuple[float, ...]:
        """The features from ``depth`` to ``expected``."""
        # Some dozen numbers: plain Python on lists is quicker than numpy's calls, which right after
        # a forward take several microseconds each.
        depth, width = self._shape[1], self._width
        lists = state.tree.lists()
        level, above, alive = lists.depth, lists.parent, lists.alive
        logprob = [*lists.logprob]
        frontier = state.frontier.tolist()
        n_frontier = len(frontier)
        order = sorted(range(len(level)), key=logprob.__getitem__, reverse=True)  # stable
        if not all(alive):
            # Nodes that a graft has taken out are not verified, and hang under nobody.
            order = [node for node in order if alive[node]]
            above = [parent if alive[node] else -1 for node, parent in enumerate(above)]
        at = [level[node] for node in frontier]
        lowest, highest = min(at) - LOOKBACK, max(at)
        mean_depth = sum(at) / n_frontier
        inner = set(above[1:])
        n_leaves = n_unscored = 0
        first, mass = _FLOOR, 0.0
        for node in frontier:
            score = logprob[node]
            if node not in inner and alive[node]:
                n_leaves += 1
            if score > -math.inf:
                mass += math.exp(score)
                first = max(first, score)
            else:
                n_unscored += 1
        n_best = n_old = n_inside = levels = 0
        total = 0.0
        for node in order:
            if lowest <= level[node] <= highest:
                n_best += 1
                levels += level[node]
                n_old += node < n_before
                n_inside += node in frontier
                total += max(logprob[node], _FLOOR)
                if n_best == width:
                    break
        n_best = max(n_best, 1)
        if state.layer == 1:
            n_old = n_best
        return (
            mean_depth / depth,
            n_leaves / n_frontier,
            max(mean_depth - levels / n_best, 0.0) / depth,
            n_old / n_best,
            n_inside / n_best,
            total / n_best,
            first,
            mass,
            n_unscored / n_frontier,
            math.log1p(n_frontier),
            math.log(len(level)),
            # The root, which is sure, comes first.
            sum([math.exp(logprob[node]) for node in order[1 : self._budget + 1]]),
        )


_ROOT_ONLY = (0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, math.log1p(1), 0.0, 0.0)
"""``StateFeatures.of_tree`` of a tree that is its root."""
