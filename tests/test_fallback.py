"""Falling back to plain decoding: what given times decide, and that no token depends on it."""

from __future__ import annotations

from typing import Any

import pytest
from table_models import hashed_model

from treegraft import decoding
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError
from treegraft.fallback import Fallback
from treegraft.pipeline import Pipeline, build_pipeline

PROMPT = [1, 2, 3, 1, 2]


def modes(fallback: Fallback, n: int, drafted: tuple[int, float], plain: float) -> str:
    """``n`` steps, "d" or "p" each; a drafted one brings (tokens, seconds), a plain one takes."""
    seen = ""
    for _ in range(n):
        if fallback.drafts():
            seen += "d"
            fallback.finish(*drafted)
        else:
            seen += "p"
            fallback.finish(1, plain)
    return seen


def test_drafting_that_pays_goes_on_and_plain_steps_are_timed_now_and_then() -> None:
    fallback = Fallback()
    seen = modes(fallback, 400, drafted=(3, 1.5), plain=1.0)
    assert seen.startswith("ppp" + "d" * 128 + "ppp" + "d" * 128 + "ppp")
    assert fallback.drafted_rate == pytest.approx(2.0)
    assert fallback.plain_rate == pytest.approx(1.0)


def test_drafting_that_does_not_pay_pauses_for_longer_each_time_and_is_tried_again() -> None:
    seen = modes(Fallback(), 600, drafted=(1, 1.5), plain=1.0)
    trial = "d" * 8
    pauses = ["p" * n for n in (32, 64, 128, 256)]
    assert seen.startswith("ppp" + trial + trial.join(pauses[:3]) + trial)


def test_what_did_not_pay_in_one_place_is_taken_up_where_it_pays() -> None:
    fallback = Fallback()
    assert modes(fallback, 3 + 8 + 31, drafted=(1, 1.5), plain=1.0).endswith("p" * 31)
    seen = modes(fallback, 60, drafted=(4, 1.5), plain=1.0)
    assert seen == "p" + "d" * 59
    # And the next pause is short again.
    assert modes(fallback, 60, drafted=(1, 9.0), plain=1.0).count("p") >= 32


def test_the_first_plain_step_of_a_row_is_cold_and_not_counted() -> None:
    fallback = Fallback()
    for seconds in (50.0, 1.0, 1.2):
        fallback.finish(1, seconds)
    assert fallback.plain_rate == pytest.approx(1 / 1.1)


# --- in a pipeline --------------------------------------------------------------------------------


def pipeline(**changes: Any) -> Pipeline:
    models = {"target": hashed_model(13, 1), "near": hashed_model(13, 2)}
    config = {
        "target": {"model": "target"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "near"}],
        "builder": {"kind": "layered", "depth": 3, "width": 2, "budget": 6},
        "scheduler": {"kind": "always"},
        **changes,
    }
    return build_pipeline(parse_config(config), models=models)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes a second, whatever it brings."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(decoding, "perf_counter", lambda: float(next(ticks)))


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_those_of_plain_decoding_through_pauses_and_trials(temperature: float) -> None:
    sampling = {"temperature": temperature, "seed": 5}
    options = {"sampling": sampling, "stop": {"max_new_tokens": 150}}
    expected = pipeline(drafters=[], **options).generate(PROMPT)
    found = pipeline(fallback="auto", **options).generate(PROMPT)
    assert found.tokens == expected.tokens
    plain = [not step.calls for step in found.steps]
    assert plain[:4] == [True, True, True, False]
    assert any(notice.startswith("drafting did not pay after ") for notice in found.notices) == (
        sum(plain) > 9
    )


@pytest.mark.usefixtures("clock")
def test_what_was_learned_is_kept_for_the_next_text() -> None:
    made = pipeline(fallback="auto", drafters=[{"kind": "ngram", "min_n": 9, "max_n": 9}])
    first = made.generate(PROMPT, max_new_tokens=20)
    # A step of one token in a second: as fast as a plain one, and no faster.
    assert [bool(step.calls) for step in first.steps[:11]] == [False] * 3 + [True] * 8
    second = made.generate(PROMPT[::-1], max_new_tokens=5)
    # Drafted from the first step on, until there is room for one token only.
    assert [bool(step.calls) for step in second.steps] == [True] * 4 + [False]
    assert pipeline().generate(PROMPT, max_new_tokens=5).steps[0].calls


def test_a_text_that_depends_on_its_draft_has_no_fallback() -> None:
    """Its tokens would depend on the clock."""
    drawn = {"kind": "lm", "model": "near", "children": "sample"}
    options = {"drafters": [drawn], "verifier": {"kind": "ledger"}, "fallback": "auto"}
    with pytest.raises(ConfigError, match=r"would depend on the clock: set verifier.kind to walk"):
        pipeline(sampling={"temperature": 0.5}, **options)
    made = pipeline(**options)
    with pytest.raises(ConfigError, match=r"fallback 'auto' needs a verifier"):
        made.generate(PROMPT, temperature=0.5)
