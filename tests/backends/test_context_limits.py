"""Where the context ends: the target's, a drafter's, and the rows of their KV caches.

A learned table of positions (gpt2, opt) fails on the first position past its end, so that with
these a single forward too far is an IndexError and no wrong token. For all families the positions
of every forward are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from backends.drafted_text import drafter_kv_error, lm_drafters, pipelines
from backends.families import FAMILIES, build, near_copy, prompt_of, shorten_
from backends.teacher_forcing import misses

from treegraft.backends.hf import HFLanguageModel
from treegraft.core.errors import PromptError
from treegraft.pipeline import Pipeline

LIMIT = 28
LEARNED = ["gpt2", "opt"]
QUICK = [*LEARNED, "gemma3"]
REST = sorted(set(FAMILIES) - set(QUICK))
EACH = QUICK + [pytest.param(name, marks=pytest.mark.slow) for name in REST]
WIDE = {"kind": "layered", "depth": 6, "width": 4, "budget": 30}
LENGTHS = (1, LIMIT - 3, LIMIT - 2, LIMIT - 1)


@pytest.fixture
def furthest(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Per model name the furthest position that any forward asked for."""
    seen: dict[str, int] = {}
    forward = HFLanguageModel.forward

    def looking(
        self: HFLanguageModel,
        cache: Any,
        tokens: Any,
        rows: Any,
        positions: Any,
        *rest: Any,
        **o: Any,
    ) -> Any:
        seen[self.name] = max(seen.get(self.name, 0), int(positions.max()))
        return forward(self, cache, tokens, rows, positions, *rest, **o)

    monkeypatch.setattr(HFLanguageModel, "forward", looking)
    yield seen


def limited(
    name: str, limit: int, drafter_limits: dict[str, int], calls: list[str], n_new: int = 200
) -> tuple[Pipeline, Pipeline]:
    """Plain and drafted decoding of a family; near copies of the target with limits of their own."""
    drafters = {which: shorten_(near_copy(name), end) for which, end in drafter_limits.items()}
    return pipelines(shorten_(build(name), limit), drafters, calls, n_new, WIDE)


# --- the target's limit ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", EACH)
def test_drafting_shrinks_to_the_end_of_the_context(name: str, furthest: dict[str, int]) -> None:
    """The same tokens and the same end as plain decoding; no forward past the last position."""
    plain, drafted = limited(name, LIMIT, {"near": LIMIT}, ["near", "ngram", "near", "near"])
    for n_prompt in LENGTHS:
        for temperature in (0.0, 1.0):
            prompt = prompt_of(n_prompt)
            expected = plain.generate(prompt, temperature=temperature)
            furthest.clear()
            result = drafted.generate(prompt, temperature=temperature)
            assert result.tokens == expected.tokens
            assert result.finish_reason == expected.finish_reason == "context_limit"
            assert n_prompt + len(result.tokens) == LIMIT
            assert result.notices == ()
            # The last token of a full context is not read.
            assert max(furthest.values()) <= LIMIT - 2
            assert misses(drafted.target.model, prompt, result.tokens, temperature, 5) == []
    drafted_at_all = drafted.generate(prompt_of(LIMIT - 3)).steps[0]
    assert drafted_at_all.n_tree > 1, "two tokens of room leave room for a draft of one"
    assert drafted.generate(prompt_of(LIMIT - 1)).steps[0].n_tree == 1


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("n_prompt", [LIMIT, LIMIT + 1, 3 * LIMIT])
def test_a_prompt_without_room_is_refused_before_any_forward(
    name: str, n_prompt: int, furthest: dict[str, int]
) -> None:
    _, drafted = limited(name, LIMIT, {"near": LIMIT}, ["near"])
    furthest.clear()
    with pytest.raises(PromptError) as caught:
        drafted.stream(prompt_of(n_prompt))
    assert str(caught.value) == (
        f"the prompt has {n_prompt} tokens, the context of 'target' ends at {LIMIT}; at most "
        f"{LIMIT - 1} leave room for a new one"
    )
    assert furthest == {}


@pytest.mark.parametrize("name", LEARNED)
def test_max_new_tokens_at_and_past_the_end_of_the_context(name: str) -> None:
    plain, drafted = limited(name, LIMIT, {"near": LIMIT}, ["near", "near", "near"])
    for n_new, reason in ((9, "length"), (10, "length"), (11, "context_limit")):
        result = drafted.generate(prompt_of(18), max_new_tokens=n_new)
        assert result.tokens == plain.generate(prompt_of(18), max_new_tokens=n_new).tokens
        assert (len(result.tokens), result.finish_reason) == (min(n_new, 10), reason)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 8])
def test_a_model_of_very_few_positions_is_read_within_them(
    name: str, limit: int, furthest: dict[str, int]
) -> None:
    """The self-test's own tree, too, must fit into the table."""
    plain, drafted = limited(name, limit, {"near": limit}, ["near", "ngram", "near"])
    assert max(furthest.values()) <= limit - 1
    skipped = ["self-test" in note for note in drafted.target.report.notes]
    assert skipped == ([True] if limit < 5 else [])
    for n_prompt in range(1, limit):
        result = drafted.generate(prompt_of(n_prompt))
        assert result.tokens == plain.generate(prompt_of(n_prompt)).tokens
        assert n_prompt + len(result.tokens) == limit


# --- a drafter's limit ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", EACH)
def test_a_drafter_with_a_shorter_context_is_dropped_there_with_one_notice(
    name: str, furthest: dict[str, int]
) -> None:
    """Prompts well within its limit, at it, just past it and far past it."""
    short, limit = 14, 34
    plain, drafted = limited(
        name, limit, {"short": short, "near": limit}, ["short", "ngram", "near", "short"]
    )
    notice = (
        f"drafter 'short' is left out where text and draft tree pass its context limit of {short} "
        "tokens"
    )
    for n_prompt in (3, short, short + 1, limit - 1):
        prompt = prompt_of(n_prompt)
        for temperature in (0.0, 1.0):
            furthest.clear()
            result = drafted.generate(prompt, temperature=temperature)
            assert furthest.get("short", 0) <= short - 1
            assert result.tokens == plain.generate(prompt, temperature=temperature).tokens
            assert result.finish_reason == "context_limit"
            assert result.notices == (() if n_prompt == limit - 1 else (notice,))
            calls = result.statistics.calls
            # Up to its limit it drafts; a text that begins past it never reaches its model.
            assert (calls[1] > 0) == (n_prompt <= short)
            assert ("short" in furthest) == (n_prompt <= short)
            if n_prompt == 3:
                assert calls[2] > 0, "the others go on"
                assert sum(step.n_path for step in result.steps[-12:]) > 0
            assert drafter_kv_error(lm_drafters(drafted)["near"]) < 5e-3


@pytest.mark.parametrize("name", LEARNED)
def test_a_drafter_with_a_longer_context_ends_with_the_target(
    name: str, furthest: dict[str, int]
) -> None:
    plain, drafted = limited(name, LIMIT, {"near": 400}, ["near", "near", "ngram", "near"])
    for n_prompt in (1, LIMIT - 2):
        result = drafted.generate(prompt_of(n_prompt))
        assert result.tokens == plain.generate(prompt_of(n_prompt)).tokens
        assert (result.finish_reason, result.notices) == ("context_limit", ())
        assert furthest["near"] <= LIMIT - 2


def test_every_drafter_past_its_limit_leaves_plain_decoding_and_a_notice_each() -> None:
    plain, drafted = limited("gpt2", 40, {"one": 12, "two": 16}, ["two", "one", "two"])
    result = drafted.generate(prompt_of(5))
    assert result.tokens == plain.generate(prompt_of(5)).tokens
    assert [notice.split("'")[1] for notice in result.notices] == ["one", "two"]
    # The look-ups have no limit and take over.
    assert set(result.steps[-2].calls) <= {0}
    again = drafted.generate(prompt_of(5))
    assert again.notices == result.notices, "each text says it anew"


# --- rows of the KV caches ------------------------------------------------------------------------


@pytest.mark.parametrize("name", EACH)
def test_caches_grow_from_text_to_text_and_serve_a_short_one_after_a_long_one(name: str) -> None:
    near = near_copy(name)
    plain, drafted = pipelines(build(name), {"near": near}, ["near", "ngram", "near"], 12)
    rows = []
    for n_prompt in (3, 60, 2, 130, 9):
        prompt = prompt_of(n_prompt)
        result = drafted.generate(prompt)
        assert result.tokens == plain.generate(prompt).tokens, n_prompt
        rows.append((drafted._cache.rows, lm_drafters(drafted)["near"]._n_rows))
        assert drafter_kv_error(lm_drafters(drafted)["near"]) < 5e-3
    for held in zip(*rows, strict=True):
        assert list(held) == sorted(held)
        assert held[0] < held[1] == held[2] < held[3] == held[4]


@pytest.mark.parametrize("name", EACH)
def test_a_tree_larger_than_the_drafters_cache_grows_it_within_a_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short text opens few rows; the tree that is drafted needs more, and the content is kept."""
    grown: list[tuple[str, int]] = []
    opened = HFLanguageModel.new_cache

    def noting(self: HFLanguageModel, n_rows: int, old: Any = None) -> Any:
        if old is not None:
            grown.append((self.name, n_rows))
        return opened(self, n_rows, old)

    monkeypatch.setattr(HFLanguageModel, "new_cache", noting)
    builder = {"kind": "layered", "depth": 9, "width": 12, "budget": 60}
    plain, drafted = pipelines(build(name), {"near": near_copy(name)}, ["near"] * 9, 14, builder)
    for n_prompt in (2, 12):
        prompt = prompt_of(n_prompt)
        for temperature in (0.0, 1.0):
            result = drafted.generate(prompt, temperature=temperature)
            assert result.tokens == plain.generate(prompt, temperature=temperature).tokens
            assert sum(step.n_path for step in result.steps) > 0
            assert drafter_kv_error(lm_drafters(drafted)["near"]) < 5e-3
    assert [which for which, _ in grown] == ["near"] * len(grown)
    assert len(grown) >= 1
