"""Comparisons on table models: order, ratios, equality; and the verdicts of a check."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from table_models import hashed_model

from treegraft import ConfigError, TreegraftError, parse_config
from treegraft.bench.check import arithmetic_type, check_lossless, choice_between
from treegraft.bench.comparison import (
    Comparison,
    Run,
    build_pipelines,
    check_comparable,
    compare,
    first_difference,
)
from treegraft.bench.demo import demo_configs
from treegraft.core.sampling import Sampling
from treegraft.core.stats import Generation, StepRecord
from treegraft.prompts import Prompt

PROMPTS = [Prompt("a", (1, 2, 3), "x"), Prompt("b", (3, 3), "y"), Prompt("c", (2, 1), "x")]


@pytest.fixture
def models():
    return {"zoo:target": hashed_model(5, seed=1), "zoo:small": hashed_model(5, seed=2)}


@pytest.fixture
def pipelines(models):
    return build_pipelines(demo_configs(max_new_tokens=6), models=models)


def generation(tokens, seconds, drafters=()):
    n = len(drafters)
    step = StepRecord(len(tokens), 0, 1, (), (0,) * n, (0,) * n, (0,) * n, {"target": seconds})
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


def test_a_check_of_table_models_passes(models):
    config = demo_configs()["mixed"]
    result = check_lossless(config, None, n_tokens=10, models=models)
    assert result.passed
    assert result.report is None
    assert result.count("equal") == len(result.verdicts) > 4
    assert result.as_dict()["faults"] == 0


def test_a_fault_is_found_in_greedy_and_in_seeded_runs(models, monkeypatch):
    config = demo_configs()["mixed"]
    wrong = "faulty_bench_verifier:AlwaysZero"
    verifier = parse_config(
        {"target": {"model": "m"}, "drafters": [{"kind": "ngram"}], "verifier": {"kind": wrong}}
    ).verifier
    result = check_lossless(
        config.model_copy(update={"verifier": verifier}), PROMPTS, n_tokens=12, models=models
    )
    assert not result.passed
    faults = [v for v in result.verdicts if v.verdict == "fault"]
    assert {v.mode for v in faults} == {"greedy", "seeded"}
    for fault in faults:
        assert fault.found == 0
        assert fault.choice is not None
        # The causal forward agrees with plain decoding about what comes here.
        assert fault.choice.first == fault.expected
        assert fault.choice.best == fault.choice.expected > fault.choice.found
        assert fault.as_dict()["choice"]["gap"] == fault.choice.gap


def test_the_targets_choice_is_that_of_its_logits(models):
    target = models["zoo:target"]
    choice = choice_between(target, (1, 2), (3,), (4, None), Sampling())
    logits = target.logits((1, 2, 3))
    assert choice.first == int(logits.argmax())
    assert (choice.best, choice.expected) == (float(logits.max()), float(logits[4]))
    assert choice.gap == math.inf
    assert choice.as_dict()["found"] is choice.as_dict()["gap"] is None
    assert choice.tie_within == 0.0


@pytest.fixture
def judged(monkeypatch):
    """Judge texts of a target with these logits at every place, in bfloat16."""
    from treegraft.bench import check

    def judge(logits, expected, found):
        target = hashed_model(len(logits), seed=0)
        target.logits = lambda text: torch.tensor(logits)
        monkeypatch.setattr(check, "arithmetic_type", lambda model: torch.bfloat16)
        return check._judge(target, "p", "greedy", (1,), expected, found, Sampling())

    return judge


@pytest.mark.parametrize(
    ("second", "found", "verdict"),
    [(7.99, 1, "tie"), (7.99, 2, "fault"), (7.0, 1, "fault")],
    ids=["close", "far below the close", "far"],
)
def test_a_tie_is_a_choice_within_rounding(judged, second, found, verdict):
    assert judged([8.0, second, -5.0], (0,), (found,)).verdict == verdict


def test_three_tokens_may_tie(judged):
    verdict = judged([5.0, 5.0, 5.0, 0.0], (0,), (2,))
    assert verdict.verdict == "tie"
    assert (verdict.choice.best, verdict.choice.expected, verdict.choice.found) == (5.0, 5.0, 5.0)
    # Plain decoding itself need not have met the first choice of the causal forward.
    assert judged([5.0, 5.0, 5.0, 0.0], (1,), (2,)).verdict == "tie"
    assert judged([5.0, 5.0, 5.0, 0.0], (0,), (3,)).verdict == "fault"
    assert judged([5.0, 5.0, 5.0, 0.0], (0,), ()).verdict == "fault"


def test_tokens_after_a_difference_do_not_count_as_compared(judged):
    logits = [8.0, 7.99, -5.0]
    assert judged(logits, (0, 0, 0, 0), (0, 1, 0, 0)).n_tokens == 2
    assert judged(logits, (0, 0, 0, 0), (0, 0, 0, 0)).n_tokens == 4


@pytest.mark.parametrize(
    ("device", "dtype", "precision", "expected"),
    [
        ("cuda", torch.float32, "none", torch.float32),
        ("cuda:1", torch.float32, "ieee", torch.float32),
        ("cuda", torch.float32, "tf32", torch.float16),
        ("cuda", torch.float64, "tf32", torch.float64),
        ("cuda", torch.bfloat16, "tf32", torch.bfloat16),
        ("cpu", torch.float32, "tf32", torch.float32),
    ],
)
def test_float32_on_cuda_is_exact_only_without_tf32(
    monkeypatch, device, dtype, precision, expected
):
    from treegraft.bench import check

    target = hashed_model(3, seed=0)
    monkeypatch.setattr(target, "device", torch.device(device), raising=False)
    monkeypatch.setattr(check, "_report", lambda model: SimpleNamespace(dtype=dtype))
    matmul = SimpleNamespace(fp32_precision=precision)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    assert arithmetic_type(target) is expected


def test_older_switches_for_tf32_are_seen():
    """Only the newer switch is read; it must take in what the older ones set."""
    for switch in (
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('high')",
        "torch.backends.fp32_precision = 'tf32'",
    ):
        # In a process of its own: torch refuses to mix older and newer switches.
        code = f"import torch; {switch}; print(torch.backends.cuda.matmul.fp32_precision)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert done.stdout.split() == [b"tf32"], switch
