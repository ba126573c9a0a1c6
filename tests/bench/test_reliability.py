"""Predicted against observed acceptance, by hand and on a pipeline."""

from __future__ import annotations

import numpy as np
import pytest
from table_models import hashed_model, mixed_model

from treegraft.bench.reliability import Bucket, measure_reliability, reliability_of
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError, TreegraftError
from treegraft.pipeline import build_pipeline
from treegraft.prompts import Prompt

V = 8
TARGET = hashed_model(V, seed=1, order=6)
MODELS = {"t": TARGET, "d": mixed_model(TARGET, hashed_model(V, seed=2), 0.3)}


def pipeline(kind="online", scheduler=("ngram", "d", "ngram")):
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram", "length": 6}, {"kind": "lm", "model": "d"}],
        "builder": {"kind": "layered", "depth": 3, "width": 3, "budget": 9},
        "scheduler": {"kind": "fixed", "calls": list(scheduler)},
        "calibration": {"kind": kind},
    }
    return build_pipeline(parse_config(config), MODELS)


def test_two_buckets_by_hand():
    predicted = np.array([0.05, 0.0, 0.95, 1.0])
    accepted = np.array([False, True, True, True])
    found = reliability_of(predicted, accepted)
    low, high = found.buckets
    assert low == Bucket(0.0, 0.1, 2, pytest.approx(0.025), 0.5)
    assert high == Bucket(0.9, 1.0, 2, pytest.approx(0.975), 1.0)
    assert found.n == 4
    assert found.brier == pytest.approx((0.05**2 + 1 + 0.05**2) / 4)
    assert found.ece == pytest.approx((2 * 0.475 + 2 * 0.025) / 4)


def test_calibration_makes_scores_more_reliable():
    """The drafters' scores are off by design: greedy tokens are surer than any model says."""
    made = pipeline()
    prompts = [Prompt(str(i), (1, 2, 3, i), None) for i in range(8)]
    texts = []
    ngram, model = measure_reliability(
        made, prompts, on_text=lambda: texts.append(1), max_new_tokens=60
    )
    assert len(texts) == 8
    assert (ngram.drafter, model.drafter) == ("ngram", "d")
    assert ngram.n_unscored > 0 == model.n_unscored
    for judged in (ngram, model):
        assert judged.before.n == judged.after.n > 50
        assert judged.after.brier < judged.before.brier
        assert judged.after.ece < 0.5 * judged.before.ece
    assert ngram.scored_before.n == ngram.before.n - ngram.n_unscored
    assert made.calibration.observer is None


def test_a_drafter_that_was_never_called_has_no_record():
    ngram, model = measure_reliability(
        pipeline(scheduler=["ngram"]), [Prompt("a", (1, 2, 1, 2), None)], max_new_tokens=8
    )
    assert ngram.before.n > 0
    assert (model.before.n, model.before.buckets, model.before.ece) == (0, (), 0.0)


def test_there_must_be_something_to_judge():
    with pytest.raises(ConfigError, match=r"needs calibration.kind 'online', found 'none'"):
        measure_reliability(pipeline("none"), [Prompt("a", (1,), None)])
    with pytest.raises(TreegraftError, match="at least one prompt, found none"):
        measure_reliability(pipeline(), [])


def test_an_observer_is_given_back_after_a_failure():
    made = pipeline()
    seen = []
    made.calibration.observer = seen.append
    with pytest.raises(TreegraftError):
        measure_reliability(made, [Prompt("a", (), None)])
    assert made.calibration.observer == seen.append
