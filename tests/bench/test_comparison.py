"""Comparisons on table models: order, ratios, equality."""

from __future__ import annotations

import pytest
from table_models import hashed_model

from treegraft import ConfigError, TreegraftError, parse_config
from treegraft.bench.comparison import (
    Comparison,
    Run,
    build_pipelines,
    check_comparable,
    compare,
    first_difference,
)
from treegraft.bench.demo import demo_configs
from treegraft.core.stats import Generation, StepRecord
from treegraft.prompts import Prompt

PROMPTS = [Prompt("a", (1, 2, 3), "x"), Prompt("b", (3, 3), "y"), Prompt("c", (2, 1), "x")]


@pytest.fixture
def models():
    return {"zoo:target": hashed_model(5, seed=1), "zoo:small": hashed_model(5, seed=2)}


@pytest.fixture
def pipelines(models):
    configs = demo_configs(max_new_tokens=6)
    del configs["learned"]  # of the zoo's own models alone
    return build_pipelines(configs, models=models)


def generation(tokens, seconds, drafters=()):
    n = len(drafters)
    step = StepRecord(len(tokens), 0, 1, (), *[(0,) * n] * 5, {"target": seconds})
    return Generation(list(tokens), None, "length", 1, tuple(drafters), [step])


def comparison(*speeds, tokens=(1, 2)):
    """A run per pair of seconds: plain and drafted, two new tokens each."""
    runs = [
        Run(Prompt(str(i), "x"), 0, {"p": generation((1, 2), p), "d": generation(tokens, d)})
        for i, (p, d) in enumerate(speeds)
    ]
    return Comparison(("p", "d"), tuple(runs))


def test_every_arm_decodes_every_prompt_alike(pipelines):
    result = compare(pipelines, PROMPTS, repeat=2)
    assert result.n_prompts == 3
    assert len(result.runs) == 6
    assert result.identical
    assert result.kinds == {"x": 2, "y": 1}
    for summary in result.summaries():
        assert summary.identical
        assert summary.statistics.new_tokens == 6 * 6
        assert sum(summary.seconds.values()) == pytest.approx(summary.statistics.total_seconds)
        data = summary.as_dict("ratio_to_plain")
        assert data["new_tokens"] == 36
        assert {"target", "drafters", "tree", "verify", "host"} <= set(data["seconds"])


def test_arms_take_turns_at_every_place(pipelines):
    order = []
    for name, pipeline in pipelines.items():
        original = pipeline.generate

        def noted(*args, _name=name, _original=original, **kwargs):
            order.append(_name)
            return _original(*args, **kwargs)

        pipeline.generate = noted
    compare(pipelines, PROMPTS + PROMPTS[:1])
    rounds = [order[i : i + 4] for i in range(4, len(order), 4)]
    assert len(rounds) == 4
    for place in range(4):
        assert {each[place] for each in rounds} == set(pipelines)


def test_ratios_are_prompt_by_prompt_and_in_total():
    ratio = comparison((1.0, 0.5), (1.0, 1.0), (4.0, 1.0)).ratio("d")
    assert ratio.total == pytest.approx(6.0 / 2.5)
    assert ratio.median == pytest.approx(2.0)
    assert ratio.low == pytest.approx(1.2)
    assert ratio.high == pytest.approx(3.6)
    assert comparison((1.0, 2.0)).ratio("p").total == 1.0


def test_differences_are_found_where_they_begin():
    found = comparison((1.0, 1.0), tokens=(1, 3)).differences("d")
    assert [(d.prompt, d.position, d.expected, d.found) for d in found] == [("0", 1, 2, 3)]
    shorter = comparison((1.0, 1.0), tokens=(1,)).differences("d")
    assert [(d.position, d.expected, d.found) for d in shorter] == [(1, 2, None)]
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([], [1]) == 0


def test_time_runs_out_after_whole_prompts(pipelines):
    result = compare(pipelines, PROMPTS, max_seconds=0.0)
    assert result.n_prompts == 1


def test_a_comparison_needs_a_prompt(pipelines):
    with pytest.raises(TreegraftError, match="at least one prompt"):
        compare(pipelines, [])


def test_configs_must_ask_for_one_text():
    plain = parse_config({"target": {"model": "m"}})
    other = parse_config({"target": {"model": "n"}})
    longer = parse_config({"target": {"model": "m"}, "stop": {"max_new_tokens": 5}})
    check_comparable({"a": plain, "b": plain})
    with pytest.raises(ConfigError, match=r"target\.model is 'm' in a and 'n' in b"):
        check_comparable({"a": plain, "b": other})
    with pytest.raises(ConfigError, match=r"stop\.max_new_tokens is 128 in a and 5 in b"):
        check_comparable({"a": plain, "b": longer})


def test_models_are_loaded_once(pipelines, models):
    assert all(pipeline.target is models["zoo:target"] for pipeline in pipelines.values())


def test_texts_that_only_share_a_law_are_not_held_against_each_other(models):
    """A chain of draws decodes other tokens than plain sampling, and that is no difference."""
    pipelines = build_pipelines(demo_configs(1.0, max_new_tokens=12), models=models)
    result = compare(pipelines, PROMPTS)
    assert set(pipelines) - set(demo_configs()) == {"drawn"}
    assert result.same_law == {"drawn"}
    assert result.identical
    plain, drawn = (
        [run.generations[arm].tokens for run in result.runs] for arm in ("plain", "drawn")
    )
    assert plain != drawn
    summary = result.summary("drawn")
    assert summary.identical is None
    assert summary.as_dict("ratio_to_plain")["identical"] is None
    assert result.summary("never").identical is True
    # Against a baseline that draws, nobody's tokens are to be expected.
    turned = compare({"drawn": pipelines["drawn"], "plain": pipelines["plain"]}, PROMPTS)
    assert turned.same_law == {"plain"}
