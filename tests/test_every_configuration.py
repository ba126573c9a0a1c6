"""Law 1 over the whole space of configurations: drafting changes the time, never the tokens.

The oracle decodes token by token without any of our parts (``drawn_configs.plain_end``). Beside the
tokens each run is checked for what it counted, what it said, and what it left behind.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from drawn_configs import HF_ROOMS, PARTS, PIECES, Case, Room, cases, plain_end, table_rooms
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from table_models import TableModel, hashed_model
from toy_tokenizers import PieceTokenizer

from treegraft.components import ROLES
from treegraft.config import parse_config
from treegraft.core.errors import PromptError, TreegraftError
from treegraft.core.roles import ScoringDrafter
from treegraft.core.stats import NODE_COUNTS, Generation, Statistics
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.drafters.lm import LmDrafter

THOROUGH = settings.get_profile("thorough")


def pipeline(case: Case, **changes: Any) -> Pipeline:
    config = parse_config({**case.config, **changes})
    models = {**case.room.models, **case.room.heads}
    return build_pipeline(config, models, PieceTokenizer(PIECES))


def counts(result: Generation) -> list[Any]:
    """Everything of the steps but the seconds."""
    return [
        [step.n_new, step.n_path, step.n_tree, step.calls]
        + [getattr(step, name) for name in NODE_COUNTS]
        for step in result.steps
    ]


# --- the story ------------------------------------------------------------------------------------


def test_a_full_house_says_what_the_target_says() -> None:
    """Six drafters of all sorts in one tree, greedy and seeded, on both backends."""
    target = hashed_model(8, seed=1, order=2)
    room = Room(8, {"target": target, "far": hashed_model(8, seed=3)}, target.logits, (1, 2))
    known = {"seed": 1, "vocab_size": 8}
    drafters = [
        {"kind": "ngram"},
        {"kind": "adversarial_drafters:AlwaysWrong", "params": known},
        {"kind": "adversarial_drafters:Scripted", "params": {"paths": [[1, 9, 2], [], [-1]]}},
        {"kind": "lm", "model": "far"},
        {"kind": "adversarial_drafters:AlwaysRight", "params": known},
        {"kind": "lm", "model": "target", "name": "self"},
    ]
    for temperature in (0.0, 1.0):
        for backend in ("tensor", "reference"):
            config = {
                "target": {"model": "target"},
                "drafters": drafters,
                "builder": {"kind": "layered", "depth": 6, "width": 3, "budget": 12},
                "scheduler": {"kind": "fixed", "calls": [1, 0, 2, 5, 3, 4]},
                "verifier": {"kind": "walk"},
                "sampling": {"temperature": temperature, "seed": 2},
                "stop": {"max_new_tokens": 40, "min_new_tokens": 0, "eos": None, "strings": []},
                "backend": {"kind": backend},
            }
            result = check(Case(config, room, [1, 2, 3, 1, 2]))
            assert result.statistics.mean_accepted_length > 1.5
            calls = result.statistics.calls
            # Where one token is left to produce, nothing is drafted.
            assert len(set(calls)) == 1
            assert len(result.steps) - 1 <= calls[0] <= len(result.steps)


# --- the laws of one run --------------------------------------------------------------------------


def check(case: Case) -> Generation:
    """All laws; returns the run."""
    given_config, prompt = copy.deepcopy(case.config), list(case.prompt)
    made = pipeline(case)
    result = streamed(made, case.prompt)
    tokens, reason = plain_end(case)
    if case.exact:
        assert result.tokens == tokens
        assert result.finish_reason == reason
        bare = pipeline(case, drafters=[], ride_along=[], scheduler={"kind": "never"}).generate(
            case.prompt
        )
        assert (bare.tokens, bare.finish_reason) == (tokens, reason)
        assert all(step.n_new == step.n_tree == 1 for step in bare.steps)
    check_records(case, result)
    check_calls(case, result)
    check_caches(case, made, result)
    # Another text in between, and settings that come with the call: nothing is left of either.
    other = [(token + 1) % case.room.vocab for token in case.prompt[::-1]]
    between = made.generate(other, max_new_tokens=9, min_new_tokens=0, temperature=0.7, seed=9)
    check_caches(replace(case, prompt=other), made, between)
    again = made.generate(case.prompt, **case.config["sampling"], **case.config["stop"])
    # Parts that keep something of earlier texts draft otherwise, and no token may depend on it.
    if case.exact or not case.remembers:
        assert again.tokens == result.tokens
        assert again.text == result.text
    if not case.remembers:
        assert again.notices == result.notices
        assert counts(again) == counts(result)
    check_caches(case, made, again)
    assert (case.config, case.prompt) == (given_config, prompt)
    return result


def streamed(made: Pipeline, prompt: list[int]) -> Generation:
    """The whole of a stream, whose chunks add up to its result."""
    chunks = list(made.stream(prompt))
    result = chunks[-1].generation
    assert result is not None
    assert all(chunk.generation is None for chunk in chunks[:-1])
    assert [token for chunk in chunks for token in chunk.tokens] == result.tokens
    assert "".join(chunk.text or "" for chunk in chunks) == result.text
    assert [chunk.step for chunk in chunks] == result.steps
    assert [len(chunk.tokens) for chunk in chunks] == [step.n_new for step in result.steps]
    return result


def check_records(case: Case, result: Generation) -> None:
    """What was counted adds up, in each step and over the run."""
    n_drafters, builder = len(case.config["drafters"]), case.config["builder"]
    budget = builder.get("params", builder).get("budget", 63)
    if budget == "auto":
        budget = builder["budget_limit"]
    room = case.config["stop"]["max_new_tokens"]
    if case.room.limit is not None:
        room = min(room, case.room.limit - len(case.prompt))
    assert result.n_prompt == len(case.prompt)
    for step in result.steps[:-1]:
        assert step.n_new == step.n_path + 1
    for step in result.steps:
        # Nothing is drafted that could not be committed.
        assert step.n_path + 1 <= room
        room -= step.n_new
        assert 1 <= step.n_new <= step.n_path + 1 <= step.n_tree <= budget + 1
        assert sum(step.kept) == step.n_tree - 1
        assert len(step.drafted) == len(step.kept) == len(step.accepted) == n_drafters
        for accepted, kept, drafted in zip(step.accepted, step.kept, step.drafted, strict=True):
            assert accepted <= kept <= drafted
        for drafted, proposed in zip(step.drafted, step.proposed, strict=True):
            assert drafted <= proposed <= sum(step.drafted)
        for alone, accepted in zip(step.accepted_alone, step.accepted, strict=True):
            assert alone <= accepted
        assert len(step.visit_seconds) == len(step.calls)
        assert tuple(step.path_sources.count(i) for i in range(n_drafters)) == step.accepted
        # A stop cuts the path where it cuts the tokens.
        assert sum(step.accepted) == min(step.n_path, step.n_new)
        assert all(seconds >= 0 for seconds in step.seconds.values())
    assert room >= 0
    statistics = Statistics.of([result])
    assert statistics.new_tokens == len(result.tokens)
    assert statistics.target_calls == len(result.steps)
    for name in NODE_COUNTS:
        columns = zip(*(getattr(step, name) for step in result.steps), strict=True)
        assert list(getattr(statistics, name)) == [sum(column) for column in columns]
    called = [i for step in result.steps for i in step.calls]
    assert list(statistics.calls) == [called.count(i) for i in range(n_drafters)]
    assert sum(map(sum, statistics.calls_by_layer)) == len(called)
    reached = statistics.acceptance_by_depth
    assert list(reached) == sorted(reached, reverse=True)
    assert all(0 < share <= 1 for share in reached)
    assert set(statistics.as_dict()["calls"]) == set(result.drafters)


def check_calls(case: Case, result: Generation) -> None:
    """Who acted is whom the scheduler wanted, or a cheaper one where that one's context ended."""
    drafters, names = case.config["drafters"], list(result.drafters)
    networks = {**case.room.models, **case.room.heads}
    limits = [networks[d["model"]].max_positions if "model" in d else None for d in drafters]
    passed: set[int] = set()
    n_text = len(case.prompt)
    for step in result.steps:
        wanted = wanted_calls(case, len(step.calls))
        for called, choice in zip(step.calls, wanted or step.calls, strict=True):
            limit = limits[called]
            assert limit is None or n_text <= limit
            # Whoever stands between the wanted one and the one called has a limit.
            assert called <= choice
            assert all(limits[i] is not None for i in range(called + 1, choice + 1))
            passed |= set(range(called + 1, choice + 1))
        n_text += step.n_new
    told = [
        f"drafter {name!r} is left out where text and draft tree pass its context limit of "
        f"{limit} tokens"
        for name, limit in zip(names, limits, strict=True)
    ]
    assert len(set(result.notices)) == len(result.notices)
    # When drafting pauses depends on the clock.
    said = {n for n in result.notices if not n.startswith("drafting did not pay after ")}
    assert said <= {told[i] for i, limit in enumerate(limits) if limit is not None}
    assert {told[i] for i in passed} <= set(result.notices)


def wanted_calls(case: Case, n_layers: int) -> list[int] | None:
    """The first layers of the schedule, or None where it depends on the tree."""
    scheduler, n_drafters = case.config["scheduler"], len(case.config["drafters"])
    if scheduler["kind"] == "never":
        return [0] * n_layers
    if scheduler["kind"] == "always":
        return [n_drafters - 1] * n_layers
    if scheduler["kind"] == "budgeted":
        most = scheduler["calls"]
        return [n_drafters - 1 if layer < most else 0 for layer in range(n_layers)]
    if scheduler["kind"] == "fixed":
        assert n_layers <= len(scheduler["calls"])
        # By number, or by a name: d and the number.
        return [int(str(call).removeprefix("d")) for call in scheduler["calls"][:n_layers]]
    return None


def check_caches(case: Case, made: Pipeline, result: Generation) -> None:
    """Law 6: rows of the text are those of a causal prefill. The last step's are not moved."""
    if not isinstance(made.target, TableModel):
        return
    text = (case.prompt + result.tokens)[: -result.steps[-1].n_new]
    n_kv = len(text) - 1
    caches = [(made._cache.content, n_kv)]
    for guarded in made._parts.drafters:
        drafter = guarded._drafter  # type: ignore[attr-defined]
        if isinstance(drafter, LmDrafter):
            assert drafter._text == text
            caches.append((drafter._cache, drafter._n_kv))
    for cache, n in caches:
        # A drafter may have read the root already, and has not read what it was not called for.
        assert n <= len(text)
        assert cache.token[:n].tolist() == text[:n]  # type: ignore[attr-defined]
        assert cache.position[:n].tolist() == list(range(n))  # type: ignore[attr-defined]


def check_or_refused(case: Case) -> None:
    for role in ("builder", "graft", "scheduler"):
        event(f"{role}: {case.config[role]['kind']}")
    event(f"drafters: {len(case.config['drafters'])}")
    if case.refused:
        with pytest.raises(PromptError):
            pipeline(case).stream(case.prompt)
        event("the prompt is refused")
        return
    result = check(case)
    event(f"end: {result.finish_reason}")


# --- the properties -------------------------------------------------------------------------------


@given(cases(table_rooms()))
@settings(max_examples=120)
def test_tokens_are_those_of_plain_decoding(case: Case) -> None:
    check_or_refused(case)


@given(cases(HF_ROOMS))
@settings(max_examples=15)
def test_tokens_are_those_of_a_model_of_transformers_alone(case: Case) -> None:
    check_or_refused(case)


@given(cases(table_rooms()))
@settings(max_examples=40)
def test_both_trees_grow_the_same(case: Case) -> None:
    """Not only the tokens: every step drafts, keeps and accepts the same nodes."""
    assume(not case.refused)
    tensor, reference = (
        # A fallback would go by the clock.
        pipeline(case, backend={"kind": kind}, fallback="off").generate(case.prompt)
        for kind in ("tensor", "reference")
    )
    assert tensor.tokens == reference.tokens
    assert counts(tensor) == counts(reference)


@pytest.mark.slow
@given(cases(table_rooms()))
@settings(THOROUGH, max_examples=2500)
def test_tokens_are_those_of_plain_decoding_thoroughly(case: Case) -> None:
    check_or_refused(case)


@pytest.mark.slow
@given(cases(HF_ROOMS))
@settings(THOROUGH, max_examples=200)
def test_tokens_are_those_of_a_model_of_transformers_alone_thoroughly(case: Case) -> None:
    check_or_refused(case)


# --- runs that end half-way -----------------------------------------------------------------------

ERRORS = st.sampled_from([KeyboardInterrupt, MemoryError, ValueError])


@contextmanager
def wrapped(part: Any, method: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    setattr(part, method, wrap(getattr(part, method)))
    try:
        yield
    finally:
        delattr(part, method)


def breaking(error: type[BaseException], after: int, late: bool) -> Callable[[Any], Any]:
    """Raises in call number ``after``, before the call does its work or after (``late``)."""

    def wrap(inner: Any) -> Any:
        calls = count()

        def call(*args: Any, **kwargs: Any) -> Any:
            here = next(calls) == after
            if here and not late:
                raise error("half-way")
            answer = inner(*args, **kwargs)
            if here:
                raise error("half-way")
            return answer

        return call

    return wrap


def places(made: Pipeline, room: Room) -> list[tuple[Any, str]]:
    """Where a run may break off: every method that the loop calls on a part."""
    parts = made._parts
    found: list[tuple[Any, str]] = [
        (parts.builder, "frontier"),
        (parts.builder, "prune"),
        (parts.graft, "visit"),
        (parts.scheduler, "choose"),
        (parts.scheduler, "finish"),
        (parts.verifier, "verdict"),
        (made.tokenizer, "decode"),
    ]
    for guarded in parts.drafters:
        drafter = guarded._drafter  # type: ignore[attr-defined]
        found += [(drafter, method) for method in ("begin", "observe", "propose")]
        if isinstance(drafter, ScoringDrafter):
            found.append((drafter, "score"))
    for name in sorted(room.models):
        found += [(room.models[name], method) for method in ("new_cache", "forward", "move_")]
    for name in sorted(room.heads):
        found += [(room.heads[name], method) for method in ("new_cache", "forward")]
    return found


def reached(made: Pipeline, case: Case) -> list[tuple[int, str, int]]:
    """Number and method of the places that a run comes to, and how often it does."""
    listed, calls = places(made, case.room), Counter[int]()

    def tally(i: int) -> Callable[[Any], Any]:
        def wrap(inner: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls[i] += 1
                return inner(*args, **kwargs)

            return call

        return wrap

    with ExitStack() as stack:
        for i, (part, method) in enumerate(listed):
            stack.enter_context(wrapped(part, method, tally(i)))
        made.generate(case.prompt)
    return [(i, listed[i][1], n) for i, n in sorted(calls.items())]


def check_half_way(case: Case, data: st.DataObject) -> None:
    assume(not case.refused and case.exact)
    tokens, reason = plain_end(case)
    fresh = pipeline(case).generate(case.prompt)
    made = pipeline(case)
    # Broken off in its first run, or later, when caches are open already.
    listed = reached(pipeline(case) if data.draw(st.booleans()) else made, case)
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.sampled_from([False, False, False, True])):
            stream = made.stream(case.prompt)
            for _ in range(data.draw(st.integers(1, len(fresh.steps)))):
                # Parts that go by measured time may take fewer steps than before.
                if next(stream, None) is None:
                    assert case.remembers
            stream.close()  # type: ignore[attr-defined]
            event("it was closed")
        else:
            number, method, n_calls = data.draw(st.sampled_from(listed))
            part = places(made, case.room)[number][0]
            after = data.draw(st.integers(0, n_calls - 1))
            error, late = data.draw(ERRORS), data.draw(st.booleans())
            with wrapped(part, method, breaking(error, after, late)):
                try:
                    made.generate(case.prompt)
                    outcome = "and went on"
                except (TreegraftError, error):
                    outcome = "and ended the run"
            event(f"{method} raised {outcome}")
        assert made._parts.watch._stages == ["host"]
    result = made.generate(case.prompt)
    assert (result.tokens, result.finish_reason) == (tokens, reason)
    if not case.remembers:
        assert (counts(result), result.notices) == (counts(fresh), fresh.notices)
    check_caches(case, made, result)


@given(cases(table_rooms()), st.data())
@settings(max_examples=50)
def test_a_run_that_ends_half_way_leaves_the_pipeline_as_new(
    case: Case, data: st.DataObject
) -> None:
    check_half_way(case, data)


@pytest.mark.slow
@given(cases(table_rooms()), st.data())
@settings(THOROUGH, max_examples=1000)
def test_a_run_that_ends_half_way_leaves_the_pipeline_as_new_thoroughly(
    case: Case, data: st.DataObject
) -> None:
    check_half_way(case, data)


# --- what is drawn --------------------------------------------------------------------------------


@pytest.mark.parametrize("role", sorted(ROLES))
def test_every_built_in_kind_is_drawn(role: str) -> None:
    """A kind that is not in ``drawn_configs.PARTS`` would go unproved."""
    # A learned scheduler is made for one pipeline: tests/scheduling draws its weights.
    assert set(ROLES[role].builtin) - {"value"} <= set(PARTS[role])
