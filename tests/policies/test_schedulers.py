"""The schedulers without state: never, always, fixed."""

from __future__ import annotations

import pytest
import torch

from treegraft.backends.tensor_tree import TensorTree
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError
from treegraft.core.roles import DraftState, Scheduler
from treegraft.policies.schedulers import (
    AlwaysConfig,
    AlwaysScheduler,
    FixedScheduler,
    NeverConfig,
    NeverScheduler,
)


def choices(scheduler: Scheduler, n_drafters: int, depth: int) -> list[int | None]:
    """What is chosen in each layer, as the decoding asks for it."""
    tree = TensorTree(4)
    tree.reset_(0, 9)
    chosen: list[int | None] = []
    for layer in range(1, depth + 1):
        calls = tuple(i for i in chosen if i is not None)
        frontier = torch.tensor([0])
        state = DraftState(layer, depth, calls, n_drafters, 3, 5, tree, frontier)
        chosen.append(scheduler.choose(state))
    return chosen


def test_never_calls_the_cheapest() -> None:
    assert choices(NeverScheduler(NeverConfig()), n_drafters=3, depth=4) == [0, 0, 0, 0]


def test_always_calls_the_dearest() -> None:
    assert choices(AlwaysScheduler(AlwaysConfig()), n_drafters=3, depth=4) == [2, 2, 2, 2]


def test_with_one_drafter_never_and_always_are_the_same() -> None:
    assert choices(NeverScheduler(NeverConfig()), 1, 2) == [0, 0]
    assert choices(AlwaysScheduler(AlwaysConfig()), 1, 2) == [0, 0]


def test_fixed_follows_its_list_and_then_stops() -> None:
    assert choices(FixedScheduler((0, 2, 1)), n_drafters=3, depth=5) == [0, 2, 1, None, None]


def fixed(*calls: str | int, depth: int = 5) -> tuple[int, ...]:
    return parse_config(
        {
            "target": {"model": "t"},
            "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "zoo:small"}],
            "builder": {"kind": "layered", "depth": depth},
            "scheduler": {"kind": "fixed", "calls": list(calls)},
        }
    ).fixed_calls


def test_fixed_takes_names_and_numbers() -> None:
    assert fixed("ngram", "small", 0, 1) == (0, 1, 0, 1)


def test_fixed_refuses_what_does_not_exist() -> None:
    with pytest.raises(ConfigError) as caught:
        fixed("ngram", "large")
    assert str(caught.value) == (
        "scheduler.calls names drafter 'large', found drafters ['ngram', 'small']"
    )
    with pytest.raises(ConfigError, match=r"names drafter 2, found drafters \['ngram', 'small'\]"):
        fixed(2)


def test_fixed_refuses_more_layers_than_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        fixed(0, 0, 0, depth=2)
    assert str(caught.value) == (
        "scheduler.calls must have at most builder.depth = 2 layers, found 3"
    )
