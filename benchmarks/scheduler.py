"""Seconds of a decision of the ``value`` scheduler: its features, and its network.

Trees are those of real steps of the zoo, decoded with the demo's drafters; the network has random
weights, whose values cost what any cost. Prints medians in microseconds for one core.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Annotated

import numpy as np
import torch
import typer

from treegraft.bench.demo import DEMO_SETTINGS, demo_prompts
from treegraft.config import parse_config
from treegraft.core.roles import DraftState, Scheduler
from treegraft.core.stats import StepRecord
from treegraft.pipeline import build_pipeline
from treegraft.policies.features import StateFeatures, TextFeatures
from treegraft.policies.value import Decider, ValueNetwork


class Timed(Scheduler):
    """Always the last drafter; times what a decision would have taken."""

    def __init__(self, features: StateFeatures, network: ValueNetwork) -> None:
        self._features, self._decider = features, Decider(network)
        self._text = TextFeatures()
        self.seconds: dict[str, list[float]] = {"text": [], "features": [], "network": []}

    def choose(self, state: DraftState) -> int | None:
        began = perf_counter()
        text = self._text.follow(state.text)
        read = perf_counter()
        features = self._features.values(state, text, 0)
        described = perf_counter()
        self._decider.best(state.layer, features)
        decided = perf_counter()
        if state.layer == 1:
            self.seconds["text"].append(read - began)
        self.seconds["features"].append(described - read)
        self.seconds["network"].append(decided - described)
        return state.n_drafters - 1

    def finish(self, record: StepRecord) -> None:
        """Nothing to learn."""


def main(
    depth: Annotated[int, typer.Option(help="Layers.")] = 5,
    width: Annotated[int, typer.Option(help="Positions per layer.")] = 2,
    budget: Annotated[int, typer.Option(help="Nodes that are verified.")] = 10,
    hidden: Annotated[int, typer.Option(help="Hidden units.")] = 64,
) -> None:
    """Print medians in microseconds."""
    torch.set_num_threads(1)
    tree = {"kind": "layered", "depth": depth, "width": width, "budget": budget}
    pipeline = build_pipeline(parse_config(DEMO_SETTINGS | {"builder": tree}))
    features = StateFeatures(2, depth, width, budget)
    dice = np.random.default_rng(0)
    shapes = [
        (depth, len(features.names), hidden), (depth, hidden),
        (depth, hidden, hidden), (depth, hidden),
        (depth, hidden, 3), (depth, 3),
    ]  # fmt: skip
    network = ValueNetwork(*(dice.normal(size=s).astype(np.float32) for s in shapes))
    timed = Timed(features, network)
    pipeline = pipeline.with_scheduler(timed)
    for prompt in demo_prompts(1):
        pipeline.generate(prompt.content, max_new_tokens=48)
    for name, seconds in timed.seconds.items():
        print(f"{name:10} {1e6 * median(seconds):7.1f} us ({len(seconds)} times)")


if __name__ == "__main__":
    typer.run(main)
