"""Faults that speculative decoding is known for and that lie in a model's cache or mask.

Each test is named for what a user would see. Float64 where rounding could hide a small mistake.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends.drafted_text import (
    drafter_kv_error,
    lm_drafters,
    pipelines,
    rows_moved,
    target_kv_error,
)
from backends.families import FAMILIES, SEEDS, VOCAB, build, near_copy, prompt_of
from backends.teacher_forcing import misses
from torch import Tensor

from treegraft.backends.hf import HFLanguageModel
from treegraft.backends.masks import TreeMasks
from treegraft.config import parse_config
from treegraft.core.language_model import LanguageModel
from treegraft.pipeline import build_pipeline

ALL = sorted(FAMILIES)
QUICK = ["mistral", "gemma3", "llama4", "gpt2"]
# Routers and eager softmax compute in float32 whatever the weights are.
TOLERANCE = dict.fromkeys(["deepseek-v3", "gemma2", "gpt-oss", "llama4"], 1e-5)


@pytest.mark.parametrize("name", ALL)
def test_acceptance_is_whole_when_the_target_drafts_for_itself(name: str) -> None:
    """Anything less means that a drafter's cache, positions or mask differ from the target's."""
    config = {
        "target": {"model": "target"},
        "drafters": [{"kind": "lm", "model": "target", "name": "self"}],
        "builder": {"kind": "layered", "depth": 4, "width": 1, "budget": 4},
        "graft": {"kind": "treegraft", "lookback": 0},
        "stop": {"max_new_tokens": 30, "eos": []},
    }
    model = HFLanguageModel(build(name, SEEDS[name]), self_test=False)
    made = build_pipeline(parse_config(config), {"target": model})
    result = made.generate(prompt_of(12))
    assert [step.n_new for step in result.steps] == [5] * 6
    assert misses(model.model, prompt_of(12), result.tokens) == []


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in ALL if n not in QUICK)]
)
def test_caches_after_full_partial_and_no_accept_are_those_of_a_prefill(name: str) -> None:
    """Sliding-window rollback included: what was rejected is gone, what was accepted is whole.

    Looked at after every step, in the target and in the drafter, in texts longer than a window.
    """
    model = build(name, SEEDS[name], torch.float64)
    near = near_copy(name, SEEDS[name], torch.float64, noise=0.1)
    _, drafted = pipelines(model, {"near": near}, ["near", "ngram", "near"], 24)
    tolerance = TOLERANCE.get(name, 1e-9)
    paths = []
    for length, temperature in ((1, 0.0), (12, 1.0)):
        text = prompt_of(length)
        with rows_moved() as moved:
            for chunk in drafted.stream(text, temperature=temperature):
                if chunk.generation is None:
                    text = text + chunk.tokens
                    paths.append(chunk.step.n_path)
                    assert target_kv_error(drafted, text[:-1]) <= tolerance
                    (drafter,) = lm_drafters(drafted).values()
                    assert drafter._text == text
                    assert drafter._n_kv < len(text)
                    assert drafter_kv_error(drafter) <= tolerance
        assert moved["target"] > 0
    assert min(paths) == 0
    assert max(paths) >= 2
    assert 1 in paths, "of a path of two or more a part"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(("target_rows", "drafter_rows"), [(104, VOCAB), (VOCAB, 104), (104, 128)])
def test_padded_vocabulary_rows_change_nothing(
    name: str, target_rows: int, drafter_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices padded to different sizes; the padding's random logits win now and then."""
    monkeypatch.setattr("treegraft.loading.Loader.check_vocabularies", lambda *_: None)
    model, near = build(name), near_copy(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for matrix, n_rows in ((model, target_rows), (near, drafter_rows)):
            if n_rows != VOCAB:
                matrix.resize_token_embeddings(n_rows, mean_resizing=False)
    plain, drafted = pipelines(model, {"near": near}, ["near", "ngram", "near"], 40)
    assert drafted.target.vocab_size == target_rows
    tokens: list[int] = []
    for temperature in (0.0, 1.0):
        result = drafted.generate(prompt_of(12), temperature=temperature)
        assert result.tokens == plain.generate(prompt_of(12), temperature=temperature).tokens
        assert misses(model, prompt_of(12), result.tokens, temperature, seed=5) == []
        assert result.statistics.accepted[1] > 0
        tokens += result.tokens
    assert (max(tokens) >= VOCAB) == (target_rows > VOCAB)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_no_row_of_a_mask_is_fully_hidden(
    name: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the narrowest windows there are; a row that sees nothing averages over everything."""
    rows_seen: list[Tensor] = []
    additive = TreeMasks._additive

    def looking(self: HFLanguageModel, seen: Tensor, span: int) -> Any:
        rows_seen.append(seen.sum(1))
        return additive(self, seen, span)

    monkeypatch.setattr(TreeMasks, "_additive", looking)
    key = "attention_chunk_size" if name == "llama4" else "sliding_window"
    model, near = (make(name, dtype=torch.float64, **{key: window}) for make in (build, near_copy))
    plain, drafted = pipelines(model, {"near": near}, ["near", "ngram", "near"], 30)
    for temperature in (0.0, 1.0):
        result = drafted.generate(prompt_of(12), temperature=temperature)
        assert result.tokens == plain.generate(prompt_of(12), temperature=temperature).tokens
        assert misses(model, prompt_of(12), result.tokens, temperature, seed=5) == []
    assert min(int(seen.min()) for seen in rows_seen) == 1


def test_what_a_rejected_branch_left_in_unused_rows_is_never_read() -> None:
    """Rows past the text hold old branches: their content, NaN included, must not matter."""
    model = build("gemma3", SEEDS["gemma3"])
    plain, drafted = pipelines(
        model, {"near": near_copy("gemma3", SEEDS["gemma3"])}, ["near", "ngram", "near"], 24
    )
    text, found = prompt_of(12), []
    for chunk in drafted.stream(text):
        found += chunk.tokens
        # Large and finite: infinity or NaN times a weight of 0 would be NaN.
        spoil(drafted.target, drafted._cache.content, len(text) + len(found) - 1)
    assert found == plain.generate(text).tokens


def spoil(model: LanguageModel, cache: Any, first: int) -> None:
    """Fill the rows from ``first`` on with what no model would write."""
    for layer in cache.layers:
        for store in (layer.keys, layer.values):
            store[:, :, first:] = 1e3
