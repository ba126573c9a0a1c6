"""Checks of table models and of tiny ones in bfloat16: verdicts, places, origins, the report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from backends.families import build
from table_models import TableModel, hashed_model, mixed_model
from toy_tokenizers import ByteTokenizer

from treegraft import ConfigError, PromptError, build_pipeline, parse_config
from treegraft.backends.hf import HFLanguageModel
from treegraft.backends.reference import plain_tokens
from treegraft.bench import check as module
from treegraft.bench.check import LAYOUT_VERSION, check_lossless
from treegraft.bench.demo import demo_configs
from treegraft.bench.prompts import default_prompts
from treegraft.core.sampling import Sampling
from treegraft.prompts import Prompt

V = 6
PROMPTS = [Prompt("a", (1, 2, 3)), Prompt("b", (3, 3))]
TARGET = hashed_model(V, seed=1, order=4)
FAULTY = "broken_verifiers:"


def config(verifier=None, **options):
    data = {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "d", "name": "near"}],
        "builder": {"kind": "layered", "depth": 3, "width": 2, "budget": 8},
        "scheduler": {"kind": "fixed", "calls": ["near", "ngram", "near"]},
        **options,
    }
    if verifier is not None:
        data["verifier"] = {"kind": FAULTY + verifier}
    return parse_config(data)


def models(target=TARGET):
    return {"t": target, "d": mixed_model(TARGET, hashed_model(V, seed=2), 0.5)}


# --- exact arithmetic -----------------------------------------------------------------------------


def test_a_check_of_table_models_passes():
    result = check_lossless(demo_configs()["mixed"], None, n_tokens=10, models={
        "zoo:target": hashed_model(5, seed=1), "zoo:small": hashed_model(5, seed=2)
    })  # fmt: skip
    assert result.passed
    assert result.report is None
    assert result.dtype == "float64"
    assert result.count("equal") == len(result.verdicts) > 4
    assert result.n_checked == 10 * len(result.verdicts)
    assert 0 < result.n_accepted < result.n_checked


def test_seeded_texts_take_the_configs_seed_and_temperature():
    made = check_lossless(
        config(sampling={"temperature": 0.5, "seed": 9, "top_k": 3}), PROMPTS, 8, models=models()
    )
    assert made.passed
    assert made.temperature == 0.5
    assert made.as_dict()["seed"] == 9
    assert check_lossless(config(), PROMPTS, 2, models=models()).temperature == 1.0


def test_a_fault_names_position_node_and_drafter():
    result = check_lossless(config("TakesTheDeepest"), PROMPTS, 12, models=models())
    assert not result.passed
    faults = [v for v in result.verdicts if v.fault is not None]
    assert {v.mode for v in faults} == {"greedy", "seeded"}
    proposers = set()
    for v in faults:
        start = PROMPTS[v.prompt == "b"].content
        fault, choice = v.fault, v.fault.choice
        assert fault.position == len(start) + fault.new
        assert v.n_tokens == fault.new + 1
        # Before the fault every token was the target's; this one is not.
        heat = 1.0 if v.mode == "seeded" else 0.0
        text = plain_tokens(TARGET.logits, start, 12, Sampling(temperature=heat))
        assert choice.expected.token == choice.first.token == text[fault.new]
        assert choice.found.token != choice.expected.token
        assert choice.gap == choice.expected.value - choice.found.value > 0
        assert choice.tolerance == 0.0
        # The node is the one that the pipeline's own chunks show.
        stream = build_pipeline(config("TakesTheDeepest"), models()).stream(
            start, temperature=heat, max_new_tokens=12
        )
        chunks = list(stream)
        assert [t for c in chunks for t in c.tokens][fault.new] == choice.found.token
        chunk = chunks[fault.origin.step]
        place = fault.new - sum(len(c.tokens) for c in chunks[: fault.origin.step])
        assert fault.origin.depth == place + 1
        if fault.origin.node is None:
            assert fault.origin.drafter is None
            assert place == len(chunk.path)
        else:
            node = chunk.path[place]
            assert (fault.origin.node, int(chunk.tree.token[node])) == (node, choice.found.token)
            assert fault.origin.parent == int(chunk.tree.parent[node])
            source = int(chunk.tree.source[node])
            assert fault.origin.drafter == ("ngram", "near")[source]
            proposers.add(fault.origin.drafter)
    assert "near" in proposers


def test_a_wrong_bonus_token_has_no_node():
    result = check_lossless(config("AlwaysZero"), PROMPTS, 12, models=models())
    faults = [v.fault for v in result.verdicts if v.fault is not None]
    assert faults
    for fault in faults:
        assert fault.choice.found.token == 0
        # One token a step is committed, each after the bare root.
        assert fault.origin == module.Origin(fault.new, None, 0, 1, None)


def test_a_target_whose_kv_rows_are_not_moved_is_a_fault():
    class Stuck(TableModel):
        def move_(self, cache, source, target):
            cache.token[target], cache.position[target] = 0, cache.position[source]

    result = check_lossless(config(), PROMPTS, 24, models=models(Stuck(TARGET.logits, V)))
    assert not result.passed


@pytest.mark.parametrize(("change", "expected", "found"), [(-1, 5, None), (1, None, 0)])
def test_a_text_that_ends_elsewhere_is_a_fault(monkeypatch, change, expected, found):
    """Too short or too long: nothing excuses it, whatever the logits say."""
    original = module._drafted

    def other_length(*arguments):
        tokens, origins, notices = original(*arguments)
        if change < 0:
            return tokens[:change], origins[:change], notices
        return [*tokens, 0], [*origins, origins[-1]], notices

    monkeypatch.setattr(module, "_drafted", other_length)
    # The last of six tokens is always 5: the target says what comes next by position alone.
    counting = TableModel(lambda text: 9.0 * torch.eye(V)[len(text) % V], V)
    result = check_lossless(config(), [Prompt("p", (0,) * V)], V, models=models(counting))
    for v in result.verdicts:
        assert v.verdict == "fault"
        assert v.fault.new == (V - 1 if change < 0 else V)
        choice = v.fault.choice
        sides = (choice.expected and choice.expected.token, choice.found and choice.found.token)
        if v.mode == "greedy":
            assert sides == (expected, found)
        assert (v.fault.origin is None) is (found is None)
        assert v.n_tokens == (V - 1 if change < 0 else V + 1)
        json.dumps(v.as_dict(), allow_nan=False)


def test_texts_end_where_the_context_does():
    target = TableModel(TARGET.logits, V, max_positions=12)
    result = check_lossless(config(), PROMPTS, 64, models=models(target))
    assert result.passed
    assert [v.n_tokens for v in result.verdicts] == [9, 9, 10, 10]


# --- rounding -------------------------------------------------------------------------------------


def twins(dtype):
    """A tiny Llama whose ids 2k and 2k + 1 always have equal logits but different embeddings."""
    model = build("llama", dtype=dtype)
    with torch.no_grad():
        head = model.lm_head.weight
        head[1:96:2] = head[0:96:2]
    return HFLanguageModel(model)


@pytest.fixture(scope="module")
def drafter():
    return HFLanguageModel(build("llama", seed=1), self_test=False)


IDS = [Prompt("p", (5, 17, 3, 8)), Prompt("q", (40,))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_constructed_tie_is_a_tie_and_what_follows_is_checked(dtype, drafter):
    made = {"t": twins(dtype), "d": drafter}
    result = check_lossless(config("TakesTheLastOfEquals"), IDS, 16, models=made)
    assert result.passed
    assert result.dtype == str(dtype).removeprefix("torch.")
    for v in result.verdicts:
        assert v.n_tokens == 16
        if v.mode == "seeded":
            continue
        # Every token but the odd one out (id 96) has a twin.
        assert v.verdict == "tie"
        assert len(v.ties) > 10
        for tie in v.ties:
            choice = tie.choice
            assert choice.found.token == choice.expected.token + 1
            assert choice.gap <= choice.tolerance
            assert choice.expected.logit == choice.found.logit
            assert choice.tolerance == pytest.approx(
                2 * torch.finfo(dtype).eps * abs(choice.first.logit), rel=0.5
            )
    assert result.n_ties == sum(len(v.ties) for v in result.verdicts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_tie_in_exact_arithmetic_is_a_fault(dtype, drafter):
    made = {"t": twins(dtype), "d": drafter}
    result = check_lossless(config("TakesTheLastOfEquals"), IDS[:1], 8, models=made)
    greedy = result.verdicts[0]
    assert greedy.verdict == "fault"
    assert greedy.fault.new == 0
    assert greedy.fault.choice.gap == pytest.approx(0.0, abs=1e-4)
    assert greedy.fault.choice.tolerance == 0.0
    assert result.as_dict()["exact"] is True


def test_a_fault_in_bfloat16_is_found_after_a_tie(drafter, monkeypatch):
    """One wrong token late in a text that has parted from plain decoding's long before."""
    original = module._drafted

    def spoiled(*arguments):
        tokens, origins, notices = original(*arguments)
        tokens[10] = (tokens[10] + 31) % 97
        return tokens, origins, notices

    monkeypatch.setattr(module, "_drafted", spoiled)
    made = {"t": twins(torch.bfloat16), "d": drafter}
    result = check_lossless(config("TakesTheLastOfEquals"), IDS, 16, models=made)
    for v in result.verdicts:
        assert v.verdict == "fault"
        assert v.fault.new == 10
        assert v.fault.choice.gap > v.fault.choice.tolerance > 0
        assert v.n_tokens == 11
        assert v.ties or v.mode == "seeded"


def test_a_broken_verifier_in_bfloat16_is_a_fault(drafter):
    made = {"t": HFLanguageModel(build("llama", dtype=torch.bfloat16)), "d": drafter}
    result = check_lossless(config("TakesTheDeepest"), IDS, 16, models=made)
    assert result.count("fault") == len(result.verdicts)
    assert {v.fault.origin.drafter for v in result.verdicts} == {"near"}


# --- prompts, input, state ------------------------------------------------------------------------


class Bytes(ByteTokenizer):
    def get_vocab(self):
        return {str(i): i for i in range(256)}


def prompts_for(tokenizer=None, n_tokens=8, **target):
    made = TableModel(TARGET.logits, **{"vocab_size": 256, **target})
    plain = build_pipeline(parse_config({"target": {"model": "t"}}), {"t": made}, tokenizer)
    prompts = default_prompts(plain, n_tokens)
    for prompt in prompts:
        plain.encode(prompt.content)
    return prompts


def test_without_a_tokenizer_prompts_are_ids_with_something_to_look_up():
    prompts = prompts_for(vocab_size=V)
    assert [len(p.content) for p in prompts] == [2, 4, 24, 96]
    assert prompts == prompts_for(vocab_size=V)
    assert all(p.content[: len(p.content) // 2] * 2 == p.content for p in prompts)


@pytest.mark.parametrize("limit", [2, 3, 9, 16, 40])
@pytest.mark.parametrize("tokenizer", [None, Bytes()])
def test_default_prompts_leave_room(limit, tokenizer):
    prompts = prompts_for(tokenizer, max_positions=limit)
    assert all(1 <= len(p.content) <= max(limit - 8, limit // 2) for p in prompts)


def test_texts_where_there_is_a_tokenizer():
    prompts = prompts_for(Bytes())
    assert all(isinstance(p.content, str) for p in prompts)


def test_a_tokenizer_that_makes_nothing_of_our_texts_gets_ids():
    class Mute(Bytes):
        def __call__(self, text, **options):
            return {"input_ids": []}

    assert prompts_for(Mute())[0].id == "2 random ids"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompts": []}, PromptError, "a check needs at least one prompt, found none"),
        ({"n_tokens": 0}, ConfigError, "a check needs at least one token per text, found 0"),
        (
            {"prompts": [*PROMPTS, Prompt("c", (1, V))]},
            PromptError,
            f"prompt 'c': prompt ids must be in 0..{V - 1}, found {V}",
        ),
        (
            {"prompts": [Prompt("c", "text")]},
            PromptError,
            "prompt 'c': a text prompt needs a tokenizer, found none",
        ),
        (
            {"config": parse_config({"target": {"model": "t"}})},
            ConfigError,
            "drafters: at least one is needed to check drafting, found none",
        ),
    ],
)
def test_what_cannot_be_checked_is_said_before_any_forward(arguments, error, message):
    target = TableModel(TARGET.logits, V)
    options = {"config": config(), "prompts": PROMPTS, "models": models(target)} | arguments
    with pytest.raises(error) as caught:
        check_lossless(**options)
    assert str(caught.value).startswith(message)
    assert target.forwards == 0


def test_the_callers_modes_random_streams_and_objects_are_left_alone():
    expected = check_lossless(config("TakesTheDeepest"), PROMPTS, 8, models=models())
    mine, prompts, given = config("TakesTheDeepest"), list(PROMPTS), models()
    before = (mine.model_dump(), list(prompts), dict(given))
    state = torch.random.get_rng_state()
    try:
        torch.set_default_device("meta")

        def on_cpu(model):
            return TableModel(lambda text: model.logits(text).to("cpu"), V)

        given = {name: on_cpu(model) for name, model in given.items()}
        before = (*before[:2], dict(given))
        found = check_lossless(mine, prompts, 8, models=given)
    finally:
        torch.set_default_device(None)
    assert found.verdicts == expected.verdicts
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (mine.model_dump(), prompts, given) == before


# --- the report -----------------------------------------------------------------------------------


def documented(page):
    """Dotted keys in the tables of docs/check.md, by table."""
    tables = re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE)
    return [
        {key for row in table.splitlines() for key in re.findall(r"`([^`]+)`", row.split("|")[1])}
        for table in tables
    ]


def keys(data, opaque):
    """Dotted keys of plain data; those of ``opaque`` are not looked into."""
    found = set()
    for key, value in data.items():
        inner = value[0] if isinstance(value, list) and value else value
        name = f"{key}[]" if isinstance(value, list) and isinstance(inner, dict) else key
        if isinstance(inner, dict) and key not in opaque:
            found |= {f"{name}.{below}" for below in keys(inner, opaque)}
        else:
            found.add(key)
    return found


def test_the_report_is_laid_out_as_documented(drafter):
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
    top, place = documented(page)
    made = {"t": twins(torch.bfloat16), "d": drafter}
    ties = check_lossless(config("TakesTheLastOfEquals"), IDS, 8, models=made).as_dict()
    faults = check_lossless(config("TakesTheDeepest"), IDS, 8, models=made).as_dict()
    opaque = {"adapter", "drafter_adapters", "config", "ties", "fault"}
    for report in (ties, faults):
        json.dumps(report, allow_nan=False)
        assert keys(report, opaque) == top
        assert report["layout"] == LAYOUT_VERSION == 1
        assert set(report["drafter_adapters"]) == {"near"}
        assert report["adapter"]["dtype"] == report["dtype"] == "bfloat16"
    candidates = {"expected", "found", "first"}
    tie, fault = ties["texts"][0]["ties"][0], faults["texts"][0]["fault"]
    for deviation in (tie, fault):
        assert keys(deviation, candidates) | {"origin"} == place
        for name in candidates:
            assert set(deviation[name]) == {"token", "logit", "value"}
    assert faults["passed"] is False
    assert ties["passed"] is True
    counts = ties["counts"]
    assert counts["texts"] == counts["equal"] + counts["tie"] + counts["fault"] == 4
    assert counts["ties"] == sum(len(text["ties"]) for text in ties["texts"]) > 0
    assert counts["tokens"] == sum(text["tokens"] for text in ties["texts"]) == 32
