"""The schedulers that learn nothing: never, always, fixed, priority."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from table_models import hashed_model

from treegraft.backends.tensor_tree import TensorTree
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError
from treegraft.core.roles import DraftState, Scheduler
from treegraft.core.stats import StepRecord
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.schedulers import (
    AlwaysConfig,
    AlwaysScheduler,
    BudgetedConfig,
    BudgetedScheduler,
    FixedScheduler,
    NeverConfig,
    NeverScheduler,
    PriorityConfig,
    PriorityScheduler,
)


def choices(
    scheduler: Scheduler, n_drafters: int, depth: int, reached: tuple[int, ...] = ()
) -> list[int | None]:
    """What is chosen in each layer, as the decoding asks for it; ``reached`` as in DraftState."""
    tree = TensorTree(4)
    tree.reset_(0, 9)
    chosen: list[int | None] = []
    for layer in range(1, depth + 1):
        calls = tuple(i for i in chosen if i is not None)
        frontier = torch.tensor([0])
        before = reached[: layer - 1]
        state = DraftState(layer, depth, calls, n_drafters, 3, 5, tree, frontier, before)
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


def test_budgeted_calls_the_dearest_first_and_not_more_often_than_told() -> None:
    assert choices(BudgetedScheduler(BudgetedConfig(calls=2)), 3, 4) == [2, 2, 0, 0]
    assert choices(BudgetedScheduler(BudgetedConfig(calls=0)), 3, 2) == [0, 0]


def test_budgeted_measures_how_many_visits_a_target_forward_is_worth() -> None:
    scheduler = BudgetedScheduler(BudgetedConfig())
    assert choices(scheduler, 2, 4) == [1, 1, 1, 1]
    step = StepRecord(1, 0, 5, (1, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0), {"target": 0.02})
    scheduler.finish(replace(step, visit_seconds=(0.009, 0.5)))
    assert choices(scheduler, 2, 4) == [1, 1, 0, 0]
    for _ in range(3):
        scheduler.finish(replace(step, visit_seconds=(0.03, 0.1)))
    assert choices(scheduler, 2, 4) == [0, 0, 0, 0]


def test_the_first_with_something_to_propose_drafts_the_step() -> None:
    scheduler = PriorityScheduler(PriorityConfig())
    assert choices(scheduler, 3, 4, reached=(3, 2, 2)) == [0, 0, 0, 0]
    assert choices(scheduler, 3, 4, reached=(0, 2, 2)) == [0, 1, 1, 1]
    assert choices(scheduler, 3, 4, reached=(0, 0, 2)) == [0, 1, 2, 2]
    # Nobody has anything, or the one that had finds no more: that is the end of the draft.
    assert choices(scheduler, 2, 4, reached=(0, 0, 0)) == [0, 1, None, None]
    assert choices(scheduler, 3, 3, reached=(2, 0)) == [0, 0, None]


def test_the_next_one_may_take_over() -> None:
    scheduler = PriorityScheduler(PriorityConfig(hand_over=True))
    assert choices(scheduler, 3, 4, reached=(2, 0, 1)) == [0, 0, 1, 1]
    assert choices(scheduler, 2, 5, reached=(2, 0, 1, 0)) == [0, 0, 1, 1, None]


def silent_then_right(**options: Any) -> Pipeline:
    """A drafter that never says anything, and one that is always right."""
    model = hashed_model(8, seed=1, order=6)
    known = {"seed": 1, "vocab_size": 8, "order": 6}
    config = {
        "target": {"model": "t"},
        "drafters": [
            {"kind": "adversarial_drafters:Scripted", "name": "silent", "params": {"paths": []}},
            {"kind": "adversarial_drafters:AlwaysRight", "name": "right", "params": known},
        ],
        "builder": {"kind": "layered", "depth": 3, "width": 2, "budget": 8},
        "scheduler": {"kind": "priority", **options},
    }
    return build_pipeline(parse_config(config), {"t": model})


@pytest.mark.parametrize("hand_over", [False, True])
def test_priority_passes_over_a_drafter_that_has_nothing(hand_over: bool) -> None:
    result = silent_then_right(hand_over=hand_over).generate([1, 2, 3], max_new_tokens=12)
    # A layer to find out, and two in which the other one drafts.
    assert {step.calls for step in result.steps[:-1]} == {(0, 1, 1)}
    assert [step.n_new for step in result.steps] == [3] * 4


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
