"""The distilled scheduler: a small network per layer that weighs every drafter against stopping.

Shapes: D layers, F features, H hidden units, K drafters; action 0 stops, action i + 1 is drafter i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from treegraft.core.roles import DraftState, Scheduler
from treegraft.core.stats import StepRecord
from treegraft.policies.features import StateFeatures, TextFeatures

__all__ = ["Decider", "ValueConfig", "ValueNetwork", "ValueScheduler"]

Floats = NDArray[np.float32]


class ValueConfig(BaseModel):
    """What schedules of these drafters were worth on other texts, distilled into a network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["value"] = "value"
    artefact: str = Field(
        min_length=1,
        description="Folder that treegraft schedule fit has written for these drafters and this "
        "tree, or zoo:scheduler, which ships.",
    )


@final
@dataclass(frozen=True, slots=True)
class ValueNetwork:
    """Margins of the actions before each layer: tokens - rate * seconds, less their mean.

    A multilayer perceptron of its own for every layer, with two hidden layers of rectified units;
    the inputs' means and deviations are folded into the first weights.

    Attributes
    ----------
    w1 : float32 [D, F, H]. b1 : float32 [D, H]. w2 : float32 [D, H, H]. b2 : float32 [D, H].
    w3 : float32 [D, H, K + 1]. b3 : float32 [D, K + 1].
    """

    w1: Floats
    b1: Floats
    w2: Floats
    b2: Floats
    w3: Floats
    b3: Floats

    def margins(self, layer: int, features: Floats) -> Floats:
        """float32 [..., K + 1] for ``features`` float32 [..., F] before ``layer``, from 1."""
        i = layer - 1
        # In place: for one row the calls take longer than what they reckon.
        hidden: Floats = np.dot(features, self.w1[i])
        hidden += self.b1[i]
        hidden = np.dot(np.maximum(hidden, _ZERO, out=hidden), self.w2[i])
        hidden += self.b2[i]
        margins: Floats = np.dot(np.maximum(hidden, _ZERO, out=hidden), self.w3[i])
        margins += self.b3[i]
        return margins


_ZERO = np.float32(0.0)


@final
class Decider:
    """``ValueNetwork.margins`` of one row at a time, in as few calls as can be.

    A decision comes right after a forward, which has gone through the caches: every call into numpy
    then takes several times what it reckons for. So biases are rows of the weights, with an input
    and a hidden unit that are always 1, and all results have their place.
    """

    def __init__(self, network: ValueNetwork) -> None:
        depth, n_features, hidden = network.w1.shape
        self._pack = Struct(f"{n_features + 1}f").pack_into
        self._buffer = bytearray(4 * (n_features + 1))
        self._x = np.frombuffer(self._buffer, dtype=np.float32)
        self._first, self._second, self._zeros = np.zeros((3, hidden + 1), dtype=np.float32)
        self._margins = np.zeros(network.w3.shape[2], dtype=np.float32)
        self._layers: list[tuple[Floats, Floats, Floats]] = []
        for i in range(depth):
            w1 = _with_bias(network.w1[i], network.b1[i], True)
            w2 = _with_bias(network.w2[i], network.b2[i], True)
            self._layers.append((w1, w2, _with_bias(network.w3[i], network.b3[i], False)))

    def best(self, layer: int, features: Sequence[float]) -> int:
        """The action with the highest margin before ``layer``, from 1; the first one on ties.

        ``features`` float [F].
        """
        w1, w2, w3 = self._layers[layer - 1]
        first, second, zeros, margins = self._first, self._second, self._zeros, self._margins
        self._pack(self._buffer, 0, *features, 1.0)
        self._x.dot(w1, first)
        np.maximum(first, zeros, out=first)
        first.dot(w2, second)
        np.maximum(second, zeros, out=second)
        second.dot(w3, margins)
        found = margins.tolist()
        return found.index(max(found))


def _with_bias(weights: Floats, bias: Floats, hidden: bool) -> Floats:
    """float32 [n + 1, m]: the bias as last row; if ``hidden`` [n + 1, m + 1], a 1 goes through."""
    rows, columns = weights.shape
    found = np.zeros((rows + 1, columns + hidden), dtype=np.float32)
    found[:rows, :columns] = weights
    found[rows, :columns] = bias
    if hidden:
        found[rows, columns] = 1.0
    return found


@final
class ValueScheduler(Scheduler):
    """Takes the action with the highest margin; the earlier one on ties, stopping first."""

    def __init__(self, config: ValueConfig, network: ValueNetwork, features: StateFeatures) -> None:
        del config
        self._decider = Decider(network)
        self._features = features
        self._text = TextFeatures()
        self._n_before = self._n_nodes = 0

    def choose(self, state: DraftState) -> int | None:
        self._n_before = 0 if state.layer == 1 else self._n_nodes
        self._n_nodes = state.tree.n_nodes
        text = self._text.follow(state.text)
        features = self._features.values(state, text, self._n_before)
        action = self._decider.best(state.layer, features)
        return action - 1 if action else None

    def finish(self, record: StepRecord) -> None:
        """Nothing to learn."""
