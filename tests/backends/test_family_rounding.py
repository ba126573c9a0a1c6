"""The matrix in half precision: a token that is not the target's first choice must be a tie.

First the rule itself on a model whose two best tokens are made to tie, then every family. What is
judged is every token of a drafted text, given the text before it, by the bare model's forward.
"""

from __future__ import annotations

import pytest
import torch
from backends.drafted_text import pipelines, rows_moved
from backends.families import FAMILIES, SEEDS, VOCAB, build, near_copy, prompt_of
from backends.teacher_forcing import Place, misses
from transformers import PreTrainedModel

ALL = sorted(FAMILIES)
HALF = [torch.bfloat16, torch.float16]
SHORT = [5, 17, 3]


# --- the rule -------------------------------------------------------------------------------------


def tied(dtype: torch.dtype, nudge: float = 0.0) -> tuple[PreTrainedModel, int, int]:
    """A llama whose second choice after SHORT gets the weights of the first, times 1 + nudge."""
    model = build("llama", dtype=dtype)
    with torch.no_grad():
        first, second = model(input_ids=torch.tensor([SHORT])).logits[0, -1].topk(2).indices
        model.lm_head.weight[second] = model.lm_head.weight[first] * (1.0 + nudge)
    return model, int(first), int(second)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_models_own_text_has_no_misses_and_any_other_token_is_one(temperature: float) -> None:
    model = build("llama", dtype=torch.bfloat16)
    plain, _ = pipelines(model, {}, ["ngram"], 12)
    own = plain.generate(SHORT, temperature=temperature).tokens
    assert all(p.is_tie for p in misses(model, SHORT, own, temperature, seed=5))
    for position in (0, 7, 11):
        wrong = [*own]
        wrong[position] = (own[position] + 1) % VOCAB
        found = misses(model, SHORT, wrong[: position + 1], temperature, seed=5)
        assert [p.position for p in found if not p.is_tie] == [position]


@pytest.mark.parametrize("dtype", HALF)
def test_a_gap_within_rounding_is_a_tie_and_a_larger_one_a_fault(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for nudge, is_tie in ((-eps, True), (-8 * eps, False)):
        model, first, second = tied(dtype, nudge)
        (place,) = misses(model, SHORT, [second])
        assert isinstance(place, Place)
        assert (place.token, place.first, place.is_tie) == (second, first, is_tie)


def test_in_float32_nothing_is_a_tie() -> None:
    model, _, second = tied(torch.float32, -2e-6)
    (place,) = misses(model, SHORT, [second])
    assert not place.is_tie
    assert place.gap < 1e-4


def test_the_noise_of_another_seed_is_seen() -> None:
    model = build("llama", dtype=torch.bfloat16)
    plain, _ = pipelines(model, {}, ["ngram"], 24)
    tokens = plain.generate(SHORT, temperature=1.0, seed=6).tokens
    assert any(not p.is_tie for p in misses(model, SHORT, tokens, 1.0, seed=5))


# --- the families ---------------------------------------------------------------------------------


def check_half(name: str, dtype: torch.dtype, lengths: tuple[int, ...], n_new: int) -> list[Place]:
    """Decode greedily and seeded, drafted; the ties, after no fault was found."""
    model = build(name, SEEDS[name], dtype)
    near = near_copy(name, SEEDS[name], dtype)
    plain, drafted = pipelines(model, {"near": near}, ["near", "ngram", "near"], n_new)
    ties: list[Place] = []
    n_accepted = n_steps = 0
    with rows_moved() as moved:
        for length in lengths:
            prompt = prompt_of(length)
            for temperature in (0.0, 1.0):
                result = drafted.generate(prompt, temperature=temperature)
                found = misses(model, prompt, result.tokens, temperature, seed=5)
                faults = [place for place in found if not place.is_tie]
                assert faults == [], (name, dtype, length, temperature)
                ties += found
                if not found:
                    # No place was in doubt but for exact ties, so that plain decoding may differ
                    # only at one: its own text has to pass the same judge.
                    own = plain.generate(prompt, temperature=temperature).tokens
                    judged = misses(model, prompt, own, temperature, seed=5)
                    assert all(place.is_tie for place in judged)
                n_accepted += sum(step.n_path for step in result.steps)
                n_steps += len(result.steps)
    assert moved["target"] > 0
    assert moved["near"] > 0
    assert 0 < n_accepted < 3 * n_steps, "some drafts must be accepted, and not all"
    return ties


@pytest.mark.parametrize("name", ALL)
def test_bfloat16_differs_only_at_ties(name: str, record_property: pytest.RecordProperty) -> None:
    length = (12, 1, 2, 40)[ALL.index(name) % 4]
    ties = check_half(name, torch.bfloat16, (length,), n_new=16)
    record_property("ties", len(ties))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_bfloat16_differs_only_at_ties_at_length(
    name: str, record_property: pytest.RecordProperty
) -> None:
    ties = check_half(name, torch.bfloat16, (2, 200), n_new=128)
    record_property("ties", len(ties))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_float16_differs_only_at_ties(name: str, record_property: pytest.RecordProperty) -> None:
    ties = check_half(name, torch.float16, (12,), n_new=96)
    record_property("ties", len(ties))
