"""Distils what schedules were worth into a network that sees only the state before a layer.

Backward induction with what can be seen: from the last layer to the first a network is fitted to
the margins of the actions, where what follows a layer is worth what the networks of later layers
make of it, on this very text. So nothing is learned from a clairvoyant's luck, and the rate is that
of the policy itself, iterated to its fixed point (``value``).

Shapes: S steps, R rows, E described rows, F features, H hidden units, K drafters, D layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from treegraft import __version__
from treegraft.backends.artefact import Artefact
from treegraft.backends.cost import TARGET, CostModel
from treegraft.core.errors import ScheduleError
from treegraft.policies.features import FEATURES_VERSION
from treegraft.policies.value import ValueNetwork
from treegraft.scheduling.ceiling import SHRINK, CeilingSettings, boost, centred
from treegraft.scheduling.economy import problem_of
from treegraft.scheduling.traces import Traces
from treegraft.scheduling.value import STOP, Problem

__all__ = ["SPLITS", "FitSettings", "Fitted", "fit", "policy_actions", "split_of"]

SPLITS = ("train", "validation", "test")
_SHARES = (70, 15, 15)
_SMALLEST_BATCH, _LARGEST_BATCH = 32, 512


def split_of(key: str) -> str:
    """Which split a prompt is in, by its ``prompt_key`` alone: 70, 15 and 15 of a hundred."""
    number = int(key[:8], 16) % 100
    if number < _SHARES[0]:
        return SPLITS[0]
    return SPLITS[1] if number < _SHARES[0] + _SHARES[1] else SPLITS[2]


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How the networks are trained.

    Attributes
    ----------
    hidden : units of each of the two hidden layers. rounds : times the rate is taken anew.
    epochs : most passes over the training rows. patience : passes without a better validation loss
        after which training ends. rate, decay : of AdamW. seed : of weights and order.
    """

    hidden: int = 64
    rounds: int = 3
    epochs: int = 40
    patience: int = 5
    rate: float = 2e-3
    decay: float = 1e-2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Fitted:
    """A scheduler, ready to be written, and what it is worth.

    Attributes
    ----------
    artefact : with the metrics in its header.
    metrics : by split: steps, tokens per second (``Problem.estimate``) under the cost model of
        ``plain`` (no drafting), ``never`` (cheapest drafter in every layer), ``always`` (dearest),
        ``best_fixed`` (found on the training split), ``value`` and ``oracle``; and
        ``oracle_share``, how much of the oracle's gain over the better endpoint ``value`` keeps.
        With a ceiling: ``ceiling``, what boosted trees reach on the same features, and
        ``ceiling_share`` likewise, in each split by trees that did not see the prompt; and the same
        of ``all`` prompts together, where ``value`` is left out, as it has seen most of them, and
        ``ceiling_of_half`` is by trees that half as many prompts taught.
    best_fixed : drafters by name, layer by layer.
    """

    artefact: Artefact
    metrics: dict[str, dict[str, float]]
    best_fixed: tuple[str, ...]


def fit(
    traces: Traces,
    costs: CostModel,
    settings: FitSettings | None = None,
    on_layer: Callable[[object], None] | None = None,
    ceiling: CeilingSettings | None = None,
) -> Fitted:
    """Fit a scheduler to traces under a cost model.

    ScheduleError if a split is empty. The same traces, costs and settings give the same artefact.
    ``ceiling`` : also find what boosted trees reach on the features (``ceiling``); ConfigError
    without scikit-learn.
    ``on_layer`` : called after each layer of each round, for progress.
    """
    settings = settings or FitSettings()
    splits = np.array([SPLITS.index(split_of(prompt.key)) for prompt in traces.prompts])
    split = splits[traces.prompt]
    for number, name in enumerate(SPLITS):
        if not (split == number).any():
            raise ScheduleError(
                f"the {name} split is empty: of {len(traces.prompts)} prompts none falls into it; "
                "collect more prompts"
            )
    problem = problem_of(traces, costs)
    # What is learned pays for its decisions; fixed schedules and the oracle do not.
    decided = problem_of(traces, costs, decided=True)
    parts = [problem.restrict(split == number) for number in range(len(SPLITS))]
    calls, rate = parts[0].best_fixed()
    rows, features = traces.arrays["described"], traces.arrays["features"]
    learner = _Learner(decided, rows, features, split[problem.step], settings)
    ends = decided.fixed(calls)
    for _ in range(settings.rounds):
        ends = decided.follow(learner.induce(ends, on_layer))
        # Of the training split: the others are there to judge.
        reached = decided.rate(ends[split == 0])
        settled = reached <= rate * (1 + 1e-4)
        rate = reached
        if settled:
            break
    network = learner.network()
    metrics = {
        name: _metrics(part, calls, problem_ends)
        for name, part, problem_ends in _of_splits(decided, parts, split, network, rows, features)
    }
    if ceiling is not None:
        found = decided.follow(boost(traces, decided, ceiling, on_layer).actions)
        for number, name in enumerate(SPLITS):
            metrics[name] |= _shares(metrics[name], decided.estimate(found[split == number]))
        whole = _rates(problem, calls)
        metrics["all"] = whole | _shares(whole, decided.estimate(found))
        fewer = boost(traces, decided, replace(ceiling, share=0.5 * ceiling.share), on_layer)
        metrics["all"]["ceiling_of_half"] = decided.estimate(decided.follow(fewer.actions))
    names = list(traces.header["signature"]["drafters"])
    best_fixed = tuple(names[i] for i in calls)
    header: dict[str, Any] = {
        "created_by": __version__,
        # Of cost-scaled costs: the dearer target's.
        "signature": dict(traces.header["signature"])
        | {"target": costs.models.get(TARGET, traces.header["signature"]["target"])},
        "cost_scaled": costs.scaled,
        "features_version": FEATURES_VERSION,
        "features": list(traces.header["features"]),
        "depth": problem_depth(traces),
        "hidden": settings.hidden,
        "rate": rate,
        "best_fixed": list(best_fixed),
        "statistics": learner.statistics(),
        "metrics": metrics,
        "settings": {key: getattr(settings, key) for key in FitSettings.__slots__},
        "data": {
            "sha256": traces.digest,
            "fitted_on": [
                prompt.key[:16] for prompt in traces.prompts if split_of(prompt.key) != SPLITS[2]
            ],
            "prompts": len(traces.prompts),
            "steps": traces.n_steps,
            "rows": int(problem.step.shape[0]),
            "sampling": traces.header["sampling"],
            "collection": traces.header["settings"],
        },
        "costs": costs.as_dict(),
    }
    if ceiling is not None:
        header["ceiling"] = asdict(ceiling) | {"scikit-learn": version("scikit-learn")}
    arrays = {name: getattr(network, name) for name in ValueNetwork.__slots__}
    return Fitted(Artefact(header, arrays), metrics, best_fixed)


def problem_depth(traces: Traces) -> int:
    """Layers that a schedule can have: those of the features."""
    layers = [
        int(name.split("_")[1]) for name in traces.header["features"] if name.startswith("layer_")
    ]
    return 1 + max(layers, default=0)


def policy_actions(
    network: ValueNetwork,
    problem: Problem,
    rows: NDArray[np.integer],
    features: NDArray[np.float32],
) -> NDArray[np.int64]:
    """int64 [R]: what the scheduler does in each row; STOP in those that have no features."""
    actions = np.full(problem.step.shape[0], STOP, dtype=np.int64)
    layer = problem.layer[rows]
    for number in range(network.w1.shape[0]):
        mine = layer == number
        if mine.any():
            actions[rows[mine]] = network.margins(number + 1, features[mine]).argmax(1) - 1
    return actions


def _of_splits(
    problem: Problem,
    parts: list[Problem],
    split: NDArray[np.integer],
    network: ValueNetwork,
    rows: NDArray[np.integer],
    features: NDArray[np.float32],
) -> Any:
    ends = problem.follow(policy_actions(network, problem, rows, features))
    for number, name in enumerate(SPLITS):
        yield name, parts[number], (problem, ends[split == number])


def _metrics(
    part: Problem, calls: tuple[int, ...], value: tuple[Problem, NDArray[np.int64]]
) -> dict[str, float]:
    rates = _rates(part, calls)
    reached = value[0].estimate(value[1])
    return rates | {"value": reached, "oracle_share": _share(rates, reached)}


def _rates(part: Problem, calls: tuple[int, ...]) -> dict[str, float]:
    """Of the schedules that need no learning."""
    depth = part.depth
    return {
        "steps": float(part.roots.shape[0]),
        "plain": part.estimate(part.roots),
        "never": part.estimate(part.fixed((0,) * depth)),
        "always": part.estimate(part.fixed((part.n_drafters - 1,) * depth)),
        "best_fixed": part.estimate(part.fixed(calls)),
        "oracle": part.estimate(part.solve().ends),
    }


def _share(rates: Mapping[str, float], reached: float) -> float:
    """Of the oracle's gain over the better endpoint, what ``reached`` tokens per second keep."""
    endpoint = max(rates["never"], rates["always"])
    gain = rates["oracle"] - endpoint
    return (reached - endpoint) / gain if gain > 0 else 1.0


def _shares(rates: Mapping[str, float], ceiling: float) -> dict[str, float]:
    return {"ceiling": ceiling, "ceiling_share": _share(rates, ceiling)}


@final
class _Learner:
    """The networks of all layers and the backward pass through them."""

    def __init__(
        self,
        problem: Problem,
        rows: NDArray[np.integer],
        features: NDArray[np.float32],
        split: NDArray[np.integer],
        settings: FitSettings,
    ) -> None:
        self._problem, self._settings = problem, settings
        self._n_drafters = problem.n_drafters
        n_layers = int(problem.layer[rows].max(initial=0)) + 1
        self._layers: list[_Layer] = []
        for number in range(n_layers):
            mine = problem.layer[rows] == number
            self._layers.append(
                _Layer(rows[mine], features[mine], split[rows[mine]], number, settings)
            )

    def induce(
        self, ends: NDArray[np.int64], on_layer: Callable[[object], None] | None
    ) -> NDArray[np.int64]:
        """Fit the layers from the last to the first; what the policy does in each row.

        ``ends`` int64 [S] : where steps stopped so far, which says what a second is worth.
        """
        problem = self._problem
        value = problem.gains(ends, SHRINK)
        actions = np.full(value.shape[0], STOP, dtype=np.int64)
        for layer in reversed(self._layers):
            worth, able = problem.options(layer.rows, value)
            layer.train(worth, able)
            chosen = layer.margins().argmax(1)
            actions[layer.rows] = chosen - 1
            value[layer.rows] = worth[np.arange(worth.shape[0]), chosen]
            if on_layer is not None:
                on_layer(layer)
        return actions

    def network(self) -> ValueNetwork:
        """All layers as one artefact's arrays."""
        folded = [layer.folded() for layer in self._layers]
        return ValueNetwork(*(np.stack(column) for column in zip(*folded, strict=True)))

    def statistics(self) -> list[dict[str, list[float]]]:
        """Mean and deviation of every feature, by layer."""
        return [
            {"mean": layer.mean.tolist(), "deviation": layer.deviation.tolist()}
            for layer in self._layers
        ]


@final
class _Layer:
    """The network of one layer."""

    def __init__(
        self,
        rows: NDArray[np.integer],
        features: NDArray[np.float32],
        split: NDArray[np.integer],
        number: int,
        settings: FitSettings,
    ) -> None:
        self.rows = rows.astype(np.int64)
        self._split, self._number, self._settings = split, number, settings
        known = features[split == 0].astype(np.float64)
        self.mean = known.mean(0)
        self.deviation = known.std(0)
        # What does not vary says nothing, and must not be blown up where it does.
        scale = np.where(self.deviation > 1e-6, 1 / np.maximum(self.deviation, 1e-6), 0.0)
        self._scale = scale
        self._x = torch.from_numpy(((features - self.mean) * scale).astype(np.float32))
        self._weights: list[torch.Tensor] = []

    def train(self, worth: NDArray[np.float64], able: NDArray[np.bool_]) -> None:
        """Fit margins to ``worth`` float [n, K + 1] of the actions, where they are ``able``."""
        s = self._settings
        mask = torch.from_numpy(able.astype(np.float32))
        target = torch.from_numpy(centred(worth, able).astype(np.float32))
        fitted, held = (torch.from_numpy(np.flatnonzero(self._split == i)) for i in (0, 1))
        spread = float(target[fitted].std()) or 1.0
        target = target / spread
        dice = torch.Generator().manual_seed(s.seed * 1000 + self._number)
        if not self._weights:
            self._weights = _weights(self._x.shape[1], s.hidden, worth.shape[1], dice)
        weights = [weight.clone().requires_grad_() for weight in self._weights]
        optimiser = torch.optim.AdamW(weights, lr=s.rate, weight_decay=s.decay)
        # Few rows still make many updates.
        batch = min(max(fitted.shape[0] // 16, _SMALLEST_BATCH), _LARGEST_BATCH)
        best, patience = float("inf"), 0
        kept = [weight.detach().clone() for weight in weights]
        for _ in range(s.epochs):
            order = fitted[torch.randperm(fitted.shape[0], generator=dice)]
            for first in range(0, order.shape[0], batch):
                part = order[first : first + batch]
                loss = _loss(_forward(weights, self._x[part]), target[part], mask[part])
                optimiser.zero_grad()
                torch.autograd.backward(loss)
                optimiser.step()
            with torch.no_grad():
                now = float(_loss(_forward(weights, self._x[held]), target[held], mask[held]))
            if now < best - 1e-5:
                best, patience = now, 0
                kept = [weight.detach().clone() for weight in weights]
            else:
                patience += 1
                if patience > s.patience:
                    break
        self._weights = kept

    def margins(self) -> NDArray[np.float32]:
        """float32 [n, K + 1] of all rows, up to a scale."""
        with torch.no_grad():
            found: NDArray[np.float32] = _forward(self._weights, self._x).numpy()
        return found

    def folded(self) -> tuple[NDArray[np.float32], ...]:
        """Weights for features as they are, as in ``ValueNetwork``."""
        w1, b1, w2, b2, w3, b3 = (weight.numpy().astype(np.float64) for weight in self._weights)
        b1 = b1 - (self.mean * self._scale) @ w1
        w1 = w1 * self._scale[:, None]
        return tuple(weight.astype(np.float32) for weight in (w1, b1, w2, b2, w3, b3))


def _weights(
    n_features: int, hidden: int, n_actions: int, dice: torch.Generator
) -> list[torch.Tensor]:
    """He initialisation; the last layer starts small, so that all margins start near 0."""
    sizes = [(n_features, hidden), (hidden, hidden), (hidden, n_actions)]
    found: list[torch.Tensor] = []
    for i, (n_in, n_out) in enumerate(sizes):
        gain = (2 / n_in) ** 0.5 if i < 2 else 0.1 / n_in**0.5
        found += [torch.randn(n_in, n_out, generator=dice) * gain, torch.zeros(n_out)]
    return found


def _forward(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    w1, b1, w2, b2, w3, b3 = weights
    hidden = torch.relu(x @ w1 + b1)
    return torch.relu(hidden @ w2 + b2) @ w3 + b3


def _loss(margins: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (((margins - target) * mask) ** 2).sum() / mask.sum()
