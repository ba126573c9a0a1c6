"""The scheduler that reckons: who is worth a call, by what was measured or given."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import hashed_model, mixed_model

from treegraft.backends.reference import plain_tokens
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError
from treegraft.core.sampling import Sampling
from treegraft.pipeline import Pipeline, build_pipeline

V = 8
TARGET = hashed_model(V, seed=1, order=6)
MODELS = {"t": TARGET, "d": mixed_model(TARGET, hashed_model(V, seed=2), 0.3)}
KNOWN = {"seed": 1, "vocab_size": V, "order": 6}
RIGHT = {"kind": "adversarial_drafters:AlwaysRight", "name": "right", "params": KNOWN}
WRONG = {"kind": "adversarial_drafters:AlwaysWrong", "name": "wrong", "params": KNOWN}
SILENT = {"kind": "adversarial_drafters:Scripted", "name": "silent", "params": {"paths": []}}
MODEL = {"kind": "lm", "model": "d"}


def pipeline(*drafters: dict[str, Any], depth: int = 3, **scheduler: Any) -> Pipeline:
    config = {
        "target": {"model": "t"},
        "drafters": list(drafters),
        "builder": {"kind": "layered", "depth": depth, "width": 3, "budget": 12},
        "scheduler": {"kind": "cost_aware", **scheduler},
        "calibration": {"kind": "online", "strength": 1.0},
    }
    return build_pipeline(parse_config(config), MODELS)


def calls(made: Pipeline, n: int = 60) -> list[tuple[int, ...]]:
    result = made.generate([1, 2, 3], max_new_tokens=n)
    assert result.tokens == plain_tokens(TARGET.logits, [1, 2, 3], n, Sampling())
    return [step.calls for step in result.steps]


# --- the story ------------------------------------------------------------------------------------


def test_who_is_worth_it_is_called_and_who_is_not_is_dropped() -> None:
    costs = {"wrong": 0.1, "right": 0.1}
    made = pipeline(WRONG, RIGHT, costs=costs, target_cost=1.0, trials=2, retry_after=999)
    first, *later = calls(made, 80)
    # Both are tried twice, in turns; as the record of the one that is never right sinks, the other
    # is all that is called.
    assert first == (0, 1, 0)
    assert later[0][0] == 1
    assert set(later[8:-1]) == {(1, 1, 1)}
    assert len(later) > 12


def test_who_is_too_dear_for_what_he_knows_is_not_called() -> None:
    made = pipeline(RIGHT, costs={"right": 9.0}, target_cost=1.0, trials=1, retry_after=10)
    made_calls = calls(made)
    assert made_calls[0] == (0,)
    # Nothing is drafted, but for one more try after every ten steps.
    tried = [step for step, called in enumerate(made_calls) if called]
    assert tried == list(range(0, len(made_calls), 11))
    cheap = pipeline(RIGHT, costs={"right": 0.01}, target_cost=1.0, trials=1)
    assert set(calls(cheap)[1:-1]) == {(0, 0, 0)}


def test_nodes_may_cost_too_much_to_verify() -> None:
    """The drafters are nearly free; what three nodes of one bring is not worth their forward."""
    costs = {"wrong": 1e-6}
    free = pipeline(WRONG, costs=costs, target_cost=1.0, trials=1)
    dear = pipeline(WRONG, costs=costs, target_cost=1.0, node_cost=10.0, trials=1)
    assert sum(map(len, calls(dear))) < sum(map(len, calls(free)))


def test_nobody_is_asked_again_where_he_found_nothing() -> None:
    costs = {"silent": 1e-6, "right": 1e-3}
    made = pipeline(SILENT, RIGHT, costs=costs, target_cost=1.0, trials=4)
    for called in calls(made)[:-1]:
        assert all(not a == b == 0 for a, b in pairwise(called))


def test_measured_costs_need_no_numbers() -> None:
    made = pipeline({"kind": "ngram"}, MODEL)
    for _ in range(2):
        assert any(calls(made))
    costs = made._parts.scheduler._costs  # type: ignore[attr-defined]
    assert all((costs.visit(i) or 0) > 0 for i in range(2))
    nodes = costs.forward(range(1, 14)).tolist()
    assert nodes == sorted(nodes)
    assert nodes[0] > 0


def test_given_costs_make_the_same_schedule_every_time() -> None:
    options = {"costs": {"ngram": 1e-4, "d": 2e-3}, "target_cost": 1e-2, "node_cost": 1e-4}
    runs = [
        [calls(made) for _ in range(3)]
        for made in (pipeline({"kind": "ngram"}, MODEL, **options) for _ in range(2))
    ]
    assert runs[0] == runs[1]
    assert len({called for run in runs[0] for called in run}) > 1


# --- the law --------------------------------------------------------------------------------------


@given(
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=6),
    temperature=st.sampled_from([0.0, 1.0]),
    trials=st.integers(1, 5),
    retry_after=st.integers(1, 8),
    seconds=st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=4),
)
@settings(max_examples=15)
def test_reckoning_changes_no_token(
    prompt: list[int], temperature: float, trials: int, retry_after: int, seconds: list[float]
) -> None:
    costs = dict(zip(("ngram", "wrong", "d"), seconds, strict=False))
    made = pipeline(
        *({"kind": "ngram"}, WRONG, MODEL),
        **{"trials": trials, "retry_after": retry_after, "costs": costs},
        target_cost=seconds[-1],
    )
    expected = plain_tokens(TARGET.logits, prompt, 25, Sampling(temperature=temperature))
    for _ in range(2):
        result = made.generate(prompt, max_new_tokens=25, temperature=temperature)
        assert result.tokens == expected


# --- edges ----------------------------------------------------------------------------------------


def test_a_drafter_past_its_limit_does_not_hold_up_the_others() -> None:
    short = MODELS["d"].__class__(TARGET.logits, V, name="short", max_positions=6)
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "short"}],
        "scheduler": {
            "kind": "cost_aware",
            "costs": {"ngram": 1e-3, "short": 1e-3},
            "target_cost": 1.0,
        },
        "calibration": {"kind": "online"},
    }
    made = build_pipeline(parse_config(config), {**MODELS, "short": short})
    result = made.generate([1, 2, 3] * 4, max_new_tokens=30)
    assert result.tokens == plain_tokens(TARGET.logits, [1, 2, 3] * 4, 30, Sampling())
    assert set(chain.from_iterable(step.calls for step in result.steps)) == {0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"calibration": {"kind": "none"}},
            "scheduler cost_aware reckons with chances of acceptance: set calibration.kind to "
            "'online', found 'none'",
        ),
        ({"costs": {"x": 1.0}}, "scheduler.costs names drafter 'x', found drafters ['ngram']"),
        ({"costs": {"ngram": -1.0}}, "scheduler.costs.ngram: Input should be greater than 0"),
        ({"costs": {"ngram": True}}, "scheduler.costs.ngram: Input should be a valid number"),
        ({"costs": {"ngram": float("inf")}}, "scheduler.costs.ngram: Input should be a finite"),
        ({"target_cost": 0}, "scheduler.target_cost: Input should be greater than 0"),
        ({"node_cost": 0.1}, "scheduler.node_cost needs scheduler.target_cost, found 0.1 without"),
        ({"trials": 0}, "scheduler.trials: Input should be greater than or equal to 1"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], message: str) -> None:
    calibration = options.pop("calibration", {"kind": "online"})
    with pytest.raises(ConfigError) as caught:
        parse_config(
            {
                "target": {"model": "t"},
                "drafters": [{"kind": "ngram"}],
                "calibration": calibration,
                "scheduler": {"kind": "cost_aware", **options},
            }
        )
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
