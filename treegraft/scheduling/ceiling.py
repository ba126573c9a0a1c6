"""The best that any function of the state features reaches, as boosted trees find it.

Between the best fixed schedule and the oracle lie what the features show and what nothing shows
before the text is there. To tell the two apart gradient-boosted trees (scikit-learn) take the
place of the networks of ``fit``: the same features, the same targets, the same backward induction.
They are cross-validated by prompt: every prompt is decided on by trees that did not see it. So
nothing is learned by heart, and the figure is one that a scheduler with these features and this
many prompts can be asked for. It is an estimate: more prompts or another learner may find more.

Shapes: S steps, R rows, E described rows, F features, K drafters.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from treegraft.core.errors import ConfigError
from treegraft.scheduling.traces import Traces
from treegraft.scheduling.value import STOP, Problem

__all__ = [
    "SHRINK",
    "BoostedPolicy",
    "CeilingSettings",
    "boost",
    "centred",
    "check_installed",
    "fold_of",
]

SHRINK = 4.0
"""Average steps that are added to a text's own when what a second is worth there is taken."""


@dataclass(frozen=True, slots=True)
class CeilingSettings:
    """How the trees are grown.

    Attributes
    ----------
    folds : parts of the prompts, each decided on by what the others taught. rounds : times the
        rate is taken anew. trees, leaves, rate, smallest : of scikit-learn's
        ``HistGradientBoostingRegressor``: ``max_iter``, ``max_leaf_nodes``, ``learning_rate`` and
        ``min_samples_leaf``. Small trees: what schedules save is mostly noise.
    share : of the prompts that teach, how many do; less than all says what more would bring.
    """

    folds: int = 5
    rounds: int = 3
    trees: int = 60
    leaves: int = 4
    rate: float = 0.08
    smallest: int = 30
    share: float = 1.0


def check_installed() -> None:
    """ConfigError in one line where scikit-learn is not there."""
    if find_spec("sklearn") is None:
        raise ConfigError(
            "--ceiling needs scikit-learn, which is not installed; get treegraft[ceiling]"
        )


def fold_of(key: str, folds: int) -> int:
    """Which part a prompt is in, by its ``prompt_key``; independent of its split."""
    return int(key[8:16], 16) % folds


@final
class BoostedPolicy:
    """What the trees do, for the texts they were grown on and for others.

    Attributes
    ----------
    actions : int64 [R] of the traces, each row decided on by trees that did not see its prompt.
    settings : that the trees were grown with.
    """

    def __init__(
        self,
        actions: NDArray[np.int64],
        settings: CeilingSettings,
        trees: dict[int, list[list[Any]]],
    ) -> None:
        self.actions, self.settings = actions, settings
        self._trees = trees

    def decide(
        self, problem: Problem, rows: NDArray[np.integer], features: NDArray[np.float32]
    ) -> NDArray[np.int64]:
        """int64 [R]: actions in texts that none of the trees saw, by the mean over the folds.

        ``rows`` int [E], ``features`` float32 [E, F] : as in traces.
        """
        actions = np.full(problem.step.shape[0], STOP, dtype=np.int64)
        layer = problem.layer[rows]
        for number, by_fold in self._trees.items():
            mine = layer == number
            if mine.any():
                found = sum(_margins(trees, features[mine]) for trees in by_fold)
                actions[rows[mine]] = np.asarray(found).argmax(1) - 1
        return actions


def boost(
    traces: Traces,
    problem: Problem,
    settings: CeilingSettings | None = None,
    on_layer: Callable[[object], None] | None = None,
) -> BoostedPolicy:
    """Grow trees for every layer, from the last to the first, as ``fit`` trains networks.

    ConfigError where scikit-learn is not installed. The same traces and settings give the same
    policy. ``problem`` : of the traces, under some cost model. ``on_layer`` : called after each
    layer of each round, for progress.
    """
    check_installed()
    settings = settings or CeilingSettings()
    regressor: Any = importlib.import_module("sklearn.ensemble").HistGradientBoostingRegressor
    by_prompt = np.array([fold_of(prompt.key, settings.folds) for prompt in traces.prompts])
    by_step = np.zeros(int(problem.step.max(initial=-1)) + 1, dtype=np.int64)
    by_step[problem.step[problem.roots]] = by_prompt[traces.prompt]
    fold = by_step[problem.step]
    teaching = np.array([int(p.key[16:24], 16) / 16**8 < settings.share for p in traces.prompts])
    teaches = teaching[problem.text]
    described, features = traces.arrays["described"], traces.arrays["features"]
    calls, _ = problem.best_fixed()
    ends = problem.fixed(calls)
    grown: dict[int, list[list[Any]]] = {}
    actions = np.full(problem.step.shape[0], STOP, dtype=np.int64)
    for _ in range(settings.rounds):
        value = problem.gains(ends, SHRINK)
        actions = np.full(value.shape[0], STOP, dtype=np.int64)
        for number in range(problem.depth - 1, -1, -1):
            mine = problem.layer[described] == number
            rows = described[mine].astype(np.int64)
            x = features[mine]
            worth, able = problem.options(rows, value)
            target = centred(worth, able)
            found = np.zeros(worth.shape)
            grown[number] = []
            for part in range(settings.folds):
                out = fold[rows] == part
                trees = [
                    _grown(regressor, settings, x, target[:, i], able[:, i] & ~out & teaches[rows])
                    for i in range(worth.shape[1])
                ]
                grown[number].append(trees)
                if out.any():
                    found[out] = _margins(trees, x[out])
            chosen = found.argmax(1)
            actions[rows] = chosen - 1
            value[rows] = worth[np.arange(rows.shape[0]), chosen]
            if on_layer is not None:
                on_layer(number)
        ends = problem.follow(actions)
    return BoostedPolicy(actions, settings, grown)


def centred(worth: NDArray[np.float64], able: NDArray[np.bool_]) -> NDArray[np.float64]:
    """float64 [n, K + 1]: margins of the actions, ``worth`` less its mean over those ``able``."""
    mean = (worth * able).sum(1, keepdims=True) / able.sum(1, keepdims=True)
    found: NDArray[np.float64] = (worth - mean) * able
    return found


def _grown(
    regressor: Any,
    settings: CeilingSettings,
    x: NDArray[np.float32],
    target: NDArray[np.float64],
    used: NDArray[np.bool_],
) -> Any:
    """Trees for one action, or None where it was never able."""
    if not used.any():
        return None
    trees = regressor(
        max_iter=settings.trees,
        max_leaf_nodes=settings.leaves,
        learning_rate=settings.rate,
        min_samples_leaf=settings.smallest,
        early_stopping=False,
        random_state=0,
    )
    return trees.fit(x[used], target[used])


def _margins(trees: Sequence[Any], x: NDArray[np.float32]) -> NDArray[np.float64]:
    """float64 [n, K + 1]; an action that was never able is never the best."""
    columns = [np.full(x.shape[0], -np.inf) if each is None else each.predict(x) for each in trees]
    return np.stack(columns, axis=1)
