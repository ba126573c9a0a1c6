"""The scheduler that learns from what every drafter would have proposed, called or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import TableModel, hashed_model, mixed_model
from torch import Tensor

from treegraft.backends.reference import plain_tokens
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError, DrafterError
from treegraft.core.sampling import Sampling
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.online import Hedge, OnlineScheduler

V = 8
EARLY, LATE = hashed_model(V, seed=1, order=6), hashed_model(V, seed=2, order=6)
TURN = 140


def turning(text: Sequence[int]) -> Tensor:
    """A text that changes its nature half-way."""
    return (EARLY if len(text) < TURN else LATE).logits(text)


MODELS = {
    "t": EARLY,
    "turning": TableModel(turning, V),
    "d": mixed_model(EARLY, hashed_model(V, seed=2), 0.3),
    "same": TableModel(EARLY.logits, V, name="same"),
}


def knowing(seed: int, kind: str = "AlwaysRight", **more: Any) -> dict[str, Any]:
    params = {"seed": seed, "vocab_size": V, "order": 6}
    return {"kind": f"adversarial_drafters:{kind}", "params": params, **more}


RIGHT, WRONG = knowing(1, name="right"), knowing(1, "AlwaysWrong", name="wrong")
MODEL = {"kind": "lm", "model": "d"}


def pipeline(
    *drafters: dict[str, Any], target: str = "t", depth: int = 3, **scheduler: Any
) -> Pipeline:
    config = {
        "target": {"model": target},
        "drafters": list(drafters),
        "builder": {"kind": "layered", "depth": depth, "width": 3, "budget": 12},
        "scheduler": {"kind": "online", **scheduler},
    }
    return build_pipeline(parse_config(config), MODELS)


def calls(made: Pipeline, n: int = 60) -> list[tuple[int, ...]]:
    result = made.generate([1, 2, 3], max_new_tokens=n)
    logits = made.target.logits  # type: ignore[attr-defined]
    assert result.tokens == plain_tokens(logits, [1, 2, 3], n, Sampling())
    return [step.calls for step in result.steps]


def scheduler(made: Pipeline) -> OnlineScheduler:
    found = made.parts.scheduler
    assert isinstance(found, OnlineScheduler)
    return found


def share(steps: Sequence[tuple[int, ...]], who: int) -> float:
    """Of all calls, how many are of drafter ``who``."""
    listed = [i for step in steps for i in step]
    return listed.count(who) / max(len(listed), 1)


# --- the story ------------------------------------------------------------------------------------


def test_it_moves_to_the_drafter_that_is_right() -> None:
    costs = {"wrong": 0.1, "right": 0.1}
    made = pipeline(WRONG, RIGHT, costs=costs, target_cost=1.0, learning_rate=8.0, share=0.001)
    steps = calls(made, 160)
    # Nobody is favoured at first, and from the tenth step on nearly all is drafted by one.
    assert 0.2 < share(steps[:4], 1) < 0.8
    assert share(steps[10:-1], 1) > 0.9
    assert steps[10:-1].count((1, 1, 1)) > len(steps[10:-1]) / 2


def test_it_follows_a_text_that_changes_its_nature() -> None:
    early, late = knowing(1, name="early"), knowing(2, name="late")
    costs = {"early": 0.1, "late": 0.1}
    options = {"costs": costs, "target_cost": 1.0, "learning_rate": 8.0, "share": 0.01}
    made = pipeline(early, late, target="turning", **options)
    result = made.generate([1, 2, 3], max_new_tokens=320)
    ends = np.cumsum([step.n_new for step in result.steps]) + 3
    steps = [step.calls for step in result.steps]
    before = [calls for calls, end in zip(steps, ends, strict=True) if 60 < end < TURN]
    after = [calls for calls, end in zip(steps, ends, strict=True) if end > TURN + 60]
    assert share(before, 0) > 0.8
    assert share(after, 1) > 0.8


def test_it_stops_where_nobody_is_worth_the_time() -> None:
    dear = pipeline(RIGHT, costs={"right": 9.0}, target_cost=1.0, learning_rate=8.0, share=0.001)
    assert calls(dear, 120)[30:].count(()) > 80
    nodes = {"costs": {"right": 1e-6}, "target_cost": 1.0, "node_cost": 5.0}
    wide = pipeline(RIGHT, **nodes, learning_rate=8.0, share=0.001)
    assert calls(wide, 120)[30:].count(()) > 80
    cheap = pipeline(RIGHT, costs={"right": 0.01}, target_cost=1.0, learning_rate=8.0, share=0.001)
    assert calls(cheap, 120)[10:].count(()) < 2


def test_a_look_up_is_judged_without_ever_being_called() -> None:
    """The whole weight is on the other one, and yet it is found."""
    costs = {"wrong": 0.1, "right": 0.1}
    made = pipeline(WRONG, RIGHT, costs=costs, target_cost=1.0, share=1e-6, refresh=999)
    learned = scheduler(made)
    begun = np.array([calls[:1] == (0,) for calls in learned.schedules.calls])
    learned.hedge.weights = np.where(begun, 1.0, 1e-9)
    learned.hedge.weights /= learned.hedge.weights.sum()
    steps = calls(made, 200)
    assert {calls[0] for calls in steps[:5]} == {0}
    assert {calls[0] for calls in steps[-5:-1]} == {1}


def test_a_model_that_is_not_called_is_asked_once_in_a_while() -> None:
    """It tells nothing without a forward, so after ``refresh`` steps it gets one."""
    options = {"costs": {"ngram": 1e-3, "d": 9.0}, "target_cost": 1.0, "learning_rate": 8.0}
    made = pipeline({"kind": "ngram"}, MODEL, **options, share=0.0, refresh=10)
    steps = calls(made, 200)
    called = [i for i, step in enumerate(steps) if step[:1] == (1,)]
    assert all(b - a == 11 for a, b in zip(called[-4:], called[-3:], strict=False))


# --- what it rests on -----------------------------------------------------------------------------

GAINS = st.integers(2, 6).flatmap(
    lambda n: st.lists(
        st.lists(st.floats(0, 1, width=32), min_size=n, max_size=n), min_size=1, max_size=40
    )
)


@given(GAINS, st.floats(0.01, 8.0), st.floats(0.0, 0.5))
@settings(max_examples=40)
def test_no_expert_gains_more_than_the_weights_and_the_bound(
    rounds: list[list[float]], rate: float, dealt: float
) -> None:
    gains = np.array(rounds)
    n_rounds, n = gains.shape
    hedge = Hedge(n, rate, dealt)
    total = 0.0
    for row in gains:
        assert hedge.weights.sum() == pytest.approx(1.0)
        total += float(hedge.weights @ row)
        hedge.learn(row)
    bound = (math.log(n) - n_rounds * math.log1p(-dealt)) / rate + rate * n_rounds / 8
    assert total >= gains.sum(0).max() - bound - 1e-9


@given(GAINS, st.floats(0.01, 8.0), st.data())
@settings(max_examples=40)
def test_the_bound_holds_over_the_rounds_in_which_an_expert_is_awake(
    rounds: list[list[float]], rate: float, data: st.DataObject
) -> None:
    gains = np.array(rounds)
    n_rounds, n = gains.shape
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    awake = np.array(data.draw(st.lists(flags, min_size=n_rounds, max_size=n_rounds)))
    hedge = Hedge(n, rate, 0.0)
    regret = np.zeros(n)
    for row, here in zip(gains, awake, strict=True):
        if here.any():
            mean = float(hedge.weights[here] @ row[here] / hedge.weights[here].sum())
            regret += np.where(here, row - mean, 0.0)
        before = hedge.weights
        hedge.learn(np.where(here, row, np.nan))
        assert hedge.weights[~here] == pytest.approx(before[~here])
    bound = math.log(n) / rate + rate * awake.sum(0) / 8
    assert (regret <= bound + 1e-9).all()


# --- the law --------------------------------------------------------------------------------------


@given(
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=6),
    temperature=st.sampled_from([0.0, 1.0]),
    refresh=st.integers(1, 8),
    seconds=st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=4),
)
@settings(max_examples=10)
def test_learning_changes_no_token(
    prompt: list[int], temperature: float, refresh: int, seconds: list[float]
) -> None:
    costs = dict(zip(("ngram", "wrong", "d"), seconds, strict=False))
    options = {"costs": costs, "target_cost": seconds[-1], "refresh": refresh}
    made = pipeline({"kind": "ngram"}, WRONG, MODEL, **options)
    expected = plain_tokens(EARLY.logits, prompt, 25, Sampling(temperature=temperature))
    for _ in range(2):
        result = made.generate(prompt, max_new_tokens=25, temperature=temperature)
        assert result.tokens == expected


def test_given_costs_draw_the_same_schedules_every_time() -> None:
    options = {"costs": {"ngram": 1e-4, "d": 2e-3}, "target_cost": 1e-2, "node_cost": 1e-4}
    runs = [
        [calls(made, 40) for _ in range(2)]
        for made in (pipeline({"kind": "ngram"}, MODEL, **options) for _ in range(2))
    ]
    assert runs[0] == runs[1]
    other = pipeline({"kind": "ngram"}, MODEL, **options, seed=1)
    assert [calls(other, 40) for _ in range(2)] != runs[0]


def test_measured_costs_need_no_numbers() -> None:
    made = pipeline({"kind": "ngram"}, MODEL)
    first = calls(made)
    # A plain step to measure it, then who has told nothing yet.
    assert first[0] == ()
    assert first[1][0] == 1
    assert (scheduler(made)._seconds() > 0).all()


# --- edges ----------------------------------------------------------------------------------------


def test_a_drafter_that_does_not_tell_is_refused_by_name() -> None:
    config = parse_config(
        {
            "target": {"model": "t"},
            "drafters": [{"kind": "ngram"}, {"kind": "my_lab:QuietDrafter", "name": "mine"}],
            "scheduler": {"kind": "online"},
        }
    )
    with pytest.raises(ConfigError) as caught:
        build_pipeline(config, MODELS)
    assert str(caught.value) == (
        "scheduler.kind 'online' learns from what drafters would have proposed, and 'mine' "
        "(my_lab:QuietDrafter) does not tell: define offers, or take another scheduler"
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("value", "ValueError: no such thing"),
        ("list", "TypeError: a mapping of places to paths must be returned, found list"),
    ],
)
def test_a_drafter_that_fails_to_tell_is_named(answer: str, message: str) -> None:
    params = {"method": "offers", "answer": answer, "after": 2}
    faulty = {"kind": "adversarial_drafters:Faulty", "name": "mine", "params": params}
    made = pipeline(faulty, costs={"mine": 1.0}, target_cost=1.0)
    with pytest.raises(DrafterError) as caught:
        made.generate([1, 2, 3], max_new_tokens=30)
    assert str(caught.value) == f"drafter 'mine' failed in offers: {message}"
    assert made.parts.watch._stages == ["host"]


def test_no_drafters_and_no_layers_are_plain_decoding() -> None:
    assert set(calls(pipeline())) == {()}
    assert set(calls(pipeline(MODEL, depth=0))) == {()}


def test_a_drafter_past_its_limit_does_not_hold_up_the_others() -> None:
    short = TableModel(EARLY.logits, V, name="short", max_positions=6)
    costs = {"ngram": 1e-3, "short": 1e-3}
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "short"}],
        "scheduler": {"kind": "online", "costs": costs, "target_cost": 1.0},
    }
    made = build_pipeline(parse_config(config), {**MODELS, "short": short})
    result = made.generate([1, 2, 3] * 4, max_new_tokens=60)
    assert result.tokens == plain_tokens(EARLY.logits, [1, 2, 3] * 4, 60, Sampling())
    assert {i for step in result.steps for i in step.calls} == {0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": {"x": 1.0}}, "scheduler.costs names drafter 'x', found drafters ['ngram']"),
        ({"costs": {"ngram": True}}, "scheduler.costs.ngram: Input should be a valid number"),
        ({"node_cost": 0.1}, "scheduler.node_cost needs scheduler.target_cost, found 0.1 without"),
        ({"share": 1.0}, "scheduler.share: Input should be less than 1"),
        ({"learning_rate": 0}, "scheduler.learning_rate: Input should be greater than 0"),
        ({"refresh": 0}, "scheduler.refresh: Input should be greater than or equal to 1"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(
            {
                "target": {"model": "t"},
                "drafters": [{"kind": "ngram"}],
                "scheduler": {"kind": "online", **options},
            }
        )
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
