"""The distilled scheduler: a small network per layer that weighs every drafter against stopping.

Shapes: D layers, F features, H hidden units, K drafters; action 0 stops, action i + 1 is drafter i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from treegraft.core.roles import DraftState, Scheduler
from treegraft.core.stats import StepRecord
from treegraft.policies.features import StateFeatures, TextFeatures

__all__ = ["ValueConfig", "ValueNetwork", "ValueScheduler"]

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
class ValueScheduler(Scheduler):
    """Takes the action with the highest margin; the earlier one on ties, stopping first."""

    def __init__(self, config: ValueConfig, network: ValueNetwork, features: StateFeatures) -> None:
        del config
        self._network = network
        self._features = features
        self._text = TextFeatures()
        self._n_before = self._n_nodes = 0

    def choose(self, state: DraftState) -> int | None:
        self._n_before = 0 if state.layer == 1 else self._n_nodes
        self._n_nodes = state.tree.n_nodes
        text = self._text.follow(state.text)
        features = self._features.of(state, text, self._n_before)
        action = int(self._network.margins(state.layer, features).argmax())
        return action - 1 if action else None

    def finish(self, record: StepRecord) -> None:
        """Nothing to learn."""
