"""Whether drafting paid: said from the run's own speed and a few plain forwards."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from table_models import hashed_model

from treegraft.bench.worth import gain_over_plain
from treegraft.config import parse_config
from treegraft.pipeline import Pipeline, build_pipeline


def pipeline(n_drafters: int = 1) -> Pipeline:
    config = {"target": {"model": "t"}, "drafters": [{"kind": "ngram"}] * n_drafters}
    return build_pipeline(parse_config(config), models={"t": hashed_model(7, 1)})


def test_a_slow_drafter_does_not_pay_and_a_free_one_that_is_right_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = pipeline()
    target = type(made.target)
    forward = target.forward

    def slow(self, *arguments, **options):
        time.sleep(0.002)
        return forward(self, *arguments, **options)

    monkeypatch.setattr(target, "forward", slow)
    text = made.generate([1, 2, 1], max_new_tokens=60)
    gain = gain_over_plain(made, text.statistics, 63)
    # A step reads one forward and brings at least one token.
    assert gain is not None
    assert 0.3 < gain < 1.2 * text.statistics.mean_accepted_length
    slow_drafter = text.statistics.seconds | {"drafter:ngram": 100.0}
    slower = gain_over_plain(made, replace(text.statistics, seconds=slow_drafter), 63)
    assert slower is not None
    assert slower < 0.1


def test_nothing_is_said_without_drafters_or_after_a_few_steps() -> None:
    made = pipeline(0)
    assert gain_over_plain(made, made.generate([1], max_new_tokens=40).statistics, 41) is None
    made = pipeline()
    assert gain_over_plain(made, made.generate([1], max_new_tokens=5).statistics, 6) is None
