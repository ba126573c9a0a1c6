"""Every family of the matrix decodes losslessly in float32, as target and as drafter.

Oracles: transformers' own cached ``generate`` (greedy), the model's own causal forward over the
whole text (every token, greedy and seeded), and our plain decoding. The default run takes one
prompt length per family; the rest is marked slow. Windows and chunks are shorter than the texts.
"""

from __future__ import annotations

import pytest
from backends.drafted_text import (
    by_transformers,
    drafter_kv_error,
    lm_drafters,
    pipelines,
    rows_moved,
    target_kv_error,
)
from backends.families import FAMILIES, SEEDS, build, near_copy, prompt_of, varied
from backends.teacher_forcing import misses

from treegraft.core.stats import Generation

ALL = sorted(FAMILIES)
LENGTHS = (1, 2, 12, 200)
TEMPERATURES = (0.0, 1.0)
# Wide weights amplify rounding: up to 1e-4 was seen; a row of another token errs by 1.
KV_TOLERANCE = 5e-3


def following(name: str, places: int = 1) -> str:
    """Another family, so that each drafts for another one."""
    return ALL[(ALL.index(name) + places) % len(ALL)]


def partly_accepted(results: list[Generation], n_layers: int) -> bool:
    """Whether some steps took a part of their path and not all of it, one of them several nodes.

    A path may be as long as there are layers; the last step of a text is cut short by its end.
    """
    paths = [step.n_path for result in results for step in result.steps[:-1]]
    parts = [n for n in paths if 0 < n < n_layers]
    return len(parts) > 1 and max(parts) > 1


def check_family(name: str, lengths: tuple[int, ...], n_new: int, stranger: str) -> None:
    """``name`` as target, with look-ups, a near copy and a model of another family as drafters."""
    model = build(name, SEEDS[name])
    plain, drafted = pipelines(
        model,
        {"stranger": build(stranger, SEEDS[stranger]), "near": near_copy(name, SEEDS[name])},
        ["near", "stranger", "ngram", "near"],
        n_new,
    )
    results = []
    with rows_moved() as moved:
        for length in lengths:
            prompt = prompt_of(length)
            for temperature in TEMPERATURES:
                expected = plain.generate(prompt, temperature=temperature).tokens
                result = drafted.generate(prompt, temperature=temperature)
                where = (name, stranger, length, temperature)
                assert result.tokens == expected, where
                assert misses(model, prompt, result.tokens, temperature, seed=5) == [], where
                if temperature == 0.0:
                    assert result.tokens == by_transformers(model, prompt, n_new), where
                assert len(result.tokens) == n_new
                assert varied(result.tokens), f"{where} fell into a loop, which proves little"
                results.append(result)
                held = (prompt + result.tokens)[: -result.steps[-1].n_new]
                assert target_kv_error(drafted, held[:-1]) < KV_TOLERANCE, where
                for drafter in lm_drafters(drafted).values():
                    assert drafter_kv_error(drafter) < KV_TOLERANCE, where
    assert partly_accepted(results, n_layers=4)
    assert sum(result.statistics.accepted[2] for result in results) > 0
    assert all(moved[which] > 0 for which in ("target", "near", "stranger")), moved


@pytest.mark.parametrize("name", ALL)
def test_family_decodes_what_the_model_alone_says(name: str) -> None:
    length = LENGTHS[ALL.index(name) % len(LENGTHS)]
    check_family(name, (length,), n_new=32, stranger=following(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_family_decodes_what_the_model_alone_says_at_every_length(name: str) -> None:
    check_family(name, LENGTHS, n_new=128, stranger=following(name, 7))


def check_all_drafters(name: str, length: int, n_new: int, temperature: float) -> list[int]:
    """All families draft for ``name`` in one tree; how many nodes of each were accepted."""
    model = build(name, SEEDS[name])
    plain, drafted = pipelines(
        model,
        {family: build(family, seed=20) for family in ALL} | {"near": near_copy(name, SEEDS[name])},
        ["near", *ALL, "near"],
        n_new,
        {"kind": "layered", "depth": len(ALL) + 2, "width": 3, "budget": 40},
    )
    prompt = prompt_of(length)
    with rows_moved() as moved:
        result = drafted.generate(prompt, temperature=temperature)
    assert result.tokens == plain.generate(prompt, temperature=temperature).tokens
    assert misses(model, prompt, result.tokens, temperature, seed=5) == []
    assert partly_accepted([result], n_layers=len(ALL) + 2)
    for family, drafter in lm_drafters(drafted).items():
        assert drafter_kv_error(drafter) < KV_TOLERANCE, family
        assert moved[family] > 0, family
    assert min(result.statistics.drafted[1:]) > 0
    return list(result.statistics.accepted)


def test_any_family_drafts_for_any_other() -> None:
    check_all_drafters("llama", 12, n_new=24, temperature=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_any_family_drafts_for_any_other_at_length(name: str) -> None:
    """All pairs of families, the text twice: greedy after a short, seeded after a long prompt."""
    greedy = check_all_drafters(name, 2, n_new=128, temperature=0.0)
    seeded = check_all_drafters(name, 200, n_new=128, temperature=1.0)
    taken = [a + b for a, b in zip(greedy, seeded, strict=True)]
    assert sum(n > 0 for n in taken[1:-1]) > len(ALL) // 2, "strangers must be right at times"
