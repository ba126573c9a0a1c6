"""Texts decoded again by every schedule, without a forward, and held against real decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import hashed_model, mixed_model

from treegraft.config import parse_config
from treegraft.core.offers import Hindsight, Offers
from treegraft.core.roles import DraftState, Scheduler
from treegraft.core.stats import Generation, StepRecord
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.replay import PATIENCE, Habits, OfferLog, Replay, Schedules

V = 6
TARGET = hashed_model(V, seed=1, order=2)
MODELS = {
    "t": TARGET,
    "near": mixed_model(TARGET, hashed_model(V, seed=2), 0.4),
    "far": mixed_model(TARGET, hashed_model(V, seed=3), 0.7),
}


def habits(n: int, recovers: bool = False) -> Habits:
    return Habits(np.full(n, recovers), False, np.zeros(n, dtype=np.bool_))


def told(text: list[int], n_new: int, *offers: Offers | None) -> Hindsight:
    return Hindsight(text, n_new, offers)


# --- the story ------------------------------------------------------------------------------------


def test_a_text_is_decoded_again_by_every_schedule() -> None:
    """Drafter 0 knows one token at every place; drafter 1 is right where the other is not."""
    schedules = Schedules(2, 2)
    assert schedules.calls == ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
    text = [9, 5, 6, 5, 6, 5]
    log, replay = OfferLog(2), Replay(schedules, habits(2))
    zero = {j: [[5], [7]] for j in range(5)}
    one = {j: [[6]] for j in range(5)}
    assert log.follow(told(text, 5, zero, one))
    replay.forget(log.begin)
    steps = replay.steps(log, 1)
    # From the first token on: 5 by the one, then 6 by the other; the end of the text is not known.
    assert steps.length[0].tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert steps.length[1].tolist() == [0, 0, 1, 0, 0, 2, 1]
    assert steps.state[4].tolist() == [0, 0, 0, 1, 1, 0, 0]
    share = replay.advance(log)
    # Without a layer every token is a step; with [0] the step from 5 on has two tokens.
    assert share[:, 0].tolist() == [1.0] * len(share)
    assert share[0, [1, 4]] == pytest.approx([1 / 2, 1 / 3])
    assert share[0, 2] == pytest.approx(1.0)


def test_a_path_that_outlasts_the_text_is_judged_when_there_is_more() -> None:
    schedules = Schedules(1, 1)
    log, replay = OfferLog(1), Replay(schedules, habits(1))
    text = [9, 1, 2]
    log.follow(told(text, 2, {0: [[1, 2, 3, 4]], 1: [[8]]}))
    assert replay.steps(log, 1).state[0].tolist() == [0, 1]
    text += [3, 7]
    assert not log.follow(told(text, 2, {0: [], 1: []}))
    assert replay.steps(log, 1).length[:, 1].tolist() == [3, 0, 0, 0]


def test_who_recovers_takes_up_the_path_that_others_have_left() -> None:
    text = [9, 1, 2, 3]
    for recovers, expected in ((False, 0), (True, 1)):
        log = OfferLog(2)
        replay = Replay(Schedules(2, 2), Habits(np.array([False, recovers]), False, np.ones(2) > 0))
        log.follow(told(text, 3, {0: [[8]]}, {0: [[4], [1]], 1: [[2]]}))
        number = replay._schedules.calls.index((0, 1))
        assert replay.steps(log, 1).length[0, number] == expected
        # Who finds nothing leaves the place to the next.
        log = OfferLog(2)
        log.follow(told(text, 3, {0: []}, {0: [[4], [1]], 1: [[2]]}))
        assert replay.steps(log, 1).length[0, number] == 1


def test_what_is_never_told_puts_schedules_to_sleep() -> None:
    text = [9, *[1] * 40]
    log, replay = OfferLog(2), Replay(Schedules(2, 1), habits(2))
    log.follow(told(text, 40, {j: [[2]] for j in range(40)}, None))
    replay.forget(log.begin)
    share = replay.advance(log)
    # Waited for as long as there may be news, and then no longer.
    assert share.shape[0] == 40 - PATIENCE
    assert np.isnan(share[:, 2]).all()
    assert (share[:, :2] == 1.0).all()
    # News of the last places: they are judged like any other.
    text += [1]
    log.follow(told(text, 1, {0: [[2]]}, {j: [[1]] for j in range(-PATIENCE, 1)}))
    share = replay.advance(log)
    assert (share[:-1, 2] == 0.5).all()


def test_what_trees_lose_is_learned() -> None:
    """Real steps never get deeper than one token, whatever is said."""
    text = [9, *[1] * 60]
    log, replay = OfferLog(1), Replay(Schedules(1, 3), habits(1))
    log.follow(told(text, 60, {j: [[1]] for j in range(60)}))
    assert replay.steps(log, 1).expected[0].tolist() == [0, 1, 2, 3]
    for place in range(1, 50):
        assert replay.compare(log, place, (0, 0, 0), 1)
    expected = replay.steps(log, 1).expected[0]
    assert expected[1] == 1.0
    assert expected[3] < 1.2
    # What is not known yet teaches nothing.
    assert not replay.compare(log, 60, (0, 0, 0), 1)


# --- the law: real decoding -----------------------------------------------------------------------


class Listening(Scheduler):
    """A fixed schedule that keeps what it is told."""

    asks_offers = True

    def __init__(self, calls: tuple[int, ...], n_drafters: int) -> None:
        self.calls, self.log = calls, OfferLog(n_drafters)

    def choose(self, state: DraftState) -> int | None:
        return self.calls[state.layer - 1] if state.layer <= len(self.calls) else None

    def hindsight(self, hindsight: Hindsight) -> None:
        self.log.follow(hindsight)

    def finish(self, record: StepRecord) -> None:
        """Nothing to learn."""


def listened(
    made: Pipeline, calls: tuple[int, ...], prompt: list[int]
) -> tuple[Generation, OfferLog]:
    listening = Listening(calls, len(made.parts.drafters))
    return made.with_scheduler(listening).generate(prompt, max_new_tokens=24), listening.log


def pipeline(drafters: list[dict[str, Any]], **more: Any) -> Pipeline:
    config = {
        "target": {"model": "t"},
        "drafters": drafters,
        # Wide enough that nothing is cut off.
        "builder": {"kind": "layered", "depth": 3, "width": 12, "budget": 400},
        "graft": {"kind": "union"},
        **more,
    }
    return build_pipeline(parse_config(config), MODELS)


DRAFTERS = st.sampled_from(
    [
        {"kind": "recycle", "k": 2},
        {"kind": "ngram", "max_n": 2, "length": 1},
        {"kind": "ngram", "max_n": 2, "length": 3},
        {"kind": "suffix", "length": 4},
    ]
)


@given(
    st.lists(DRAFTERS, min_size=1, max_size=3),
    st.lists(st.integers(0, 2), max_size=3),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=12),
)
@settings(max_examples=15)
def test_replayed_steps_are_the_steps_of_real_decoding(
    drafters: list[dict[str, Any]], calls: list[int], prompt: list[int]
) -> None:
    """Where neither width nor budget cuts anything off, under a graft that goes nowhere else."""
    named = [{**drafter, "name": f"d{i}"} for i, drafter in enumerate(drafters)]
    made = pipeline(named)
    schedule = tuple(i % len(named) for i in calls)
    result, log = listened(made, schedule, prompt)
    replay = Replay(Schedules(len(named), 3), habits(len(named)))
    place = log.begin
    steps = replay.steps(log, place)
    number = replay._schedules.calls.index(schedule)
    for step in result.steps[:-1]:
        if not steps.state[place - log.begin, number]:
            length = steps.length[place - log.begin, number]
            assert length <= step.n_path
            # Who finds nothing under one node may lead astray under another.
            silent = log.held(place).silent[:, : length + 1]
            assert length == step.n_path or silent.any()
            path = replay.path(log, place, schedule)
            assert path is not None
            assert len(path) == length
        place += step.n_new
    assert not schedule or (steps.state[:, number] == 0).any()


def test_models_are_told_of_without_a_forward() -> None:
    """Asking changes neither what is drafted nor how much a model reads."""
    drafters = [{"kind": "recycle", "k": 2}, {"kind": "lm", "model": "near"}]
    graft = {"graft": {"kind": "treegraft"}}
    for calls in ((1, 0, 1), (0, 1), (1,), (1, 1, 1)):
        fixed = {"scheduler": {"kind": "fixed", "calls": list(calls)}}
        quiet = pipeline(drafters, **graft, **fixed)
        MODELS["near"].reads = 0
        expected = quiet.generate([1, 2], max_new_tokens=24)
        reads = MODELS["near"].reads
        MODELS["near"].reads = 0
        found, log = listened(pipeline(drafters, **graft), calls, [1, 2])
        assert MODELS["near"].reads == reads
        assert [step.calls for step in found.steps] == [step.calls for step in expected.steps]
        assert [step.drafted for step in found.steps] == [step.drafted for step in expected.steps]
        # Called in every step, it has told of every place but the last ones.
        assert (log.held(log.begin).run[1, :-4] >= 0).all()


def test_a_model_tells_late_of_what_it_read_late() -> None:
    """Called in one step of six, it knows the tokens in between; they are its likeliest ones."""
    made = pipeline([{"kind": "recycle", "k": 2}, {"kind": "lm", "model": "far"}])

    class Rare(Listening):
        n = 0

        def choose(self, state: DraftState) -> int | None:
            self.n += state.layer == 1
            return 1 if state.layer == 1 and self.n % 6 == 0 else None

    rare = Rare((), 2)
    result = made.with_scheduler(rare).generate([1, 2], max_new_tokens=40)
    text = [1, 2, *result.tokens]
    run = rare.log.held(2).run[1]
    known = np.flatnonzero(run >= 0)
    assert known.shape[0] > 25
    first = rare.log.held(2).first[1]
    for place in known + 2:
        likeliest = int(MODELS["far"].logits(text[:place]).argmax())
        assert first[place - 2] == (likeliest == text[place])


# --- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_drafters", "depth", "n"),
    [(2, 4, 31), (1, 64, 65), (2, 12, 1 + 2 * 12 + 2 * 66), (3, 64, 1 + 3 * 64), (2, 0, 1)],
)
def test_there_are_never_too_many_schedules(n_drafters: int, depth: int, n: int) -> None:
    schedules = Schedules(n_drafters, depth)
    assert len(schedules) == len(set(schedules.calls)) == n
    known = set(schedules.calls)
    assert all(calls[:-1] in known for calls in known if calls)
    amounts = np.arange(1.0, n_drafters + 1)
    assert schedules.summed(amounts, amounts).tolist() == [
        sum(i + 1 for i in calls) for calls in schedules.calls
    ]


def test_another_text_begins_anew() -> None:
    log = OfferLog(1)
    first, second = [1, 2, 3], [1, 2, 3]
    assert log.follow(told(first, 1, {0: [[3]]}))
    assert log.follow(told(second, 1, {0: [[4]]}))
    assert log.held(log.begin).run.tolist() == [[0]]
    second += list(range(600))
    assert not log.follow(told(second, 600))
    assert log.held(log.begin).run[0].tolist() == [0] + [-1] * 600
