"""Law 7: a drafter can waste time, but never change the text, and a faulty one is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_models import hashed_model
from torch import Tensor

from treegraft.backends.reference import plain_tokens
from treegraft.config import parse_config
from treegraft.core.errors import DrafterError, TreegraftError
from treegraft.core.roles import DraftState, Scheduler, Touched, TreeBackend, TreeBuilder
from treegraft.core.sampling import Sampling
from treegraft.core.stats import StepRecord
from treegraft.core.tree import TokenTree
from treegraft.pipeline import Pipeline, build_pipeline

V = 8
PROMPT = [1, 2, 3, 1, 2]


def own(name: str, **params: Any) -> dict[str, Any]:
    return {"kind": f"adversarial_drafters:{name}", "params": params}


def pipeline(*drafters: dict[str, Any], depth: int = 3, **options: Any) -> Pipeline:
    config = {
        "target": {"model": "t"},
        "drafters": list(drafters),
        "builder": {"kind": "layered", "depth": depth, "width": V, "budget": 12},
        **options,
    }
    return build_pipeline(parse_config(config), {"t": hashed_model(V, seed=1)})


def plain(n: int, prompt: Sequence[int] = PROMPT, **sampling: Any) -> list[int]:
    model = hashed_model(V, seed=1)
    return plain_tokens(model.logits, prompt, n, Sampling(**sampling))


# --- the story ------------------------------------------------------------------------------------


def test_always_right_is_accepted_whole() -> None:
    result = pipeline(own("AlwaysRight", seed=1, vocab_size=V)).generate(PROMPT, max_new_tokens=40)
    assert result.tokens == plain(40)
    assert {step.n_new for step in result.steps} == {4}


def test_always_wrong_is_rejected_whole() -> None:
    result = pipeline(own("AlwaysWrong", seed=1, vocab_size=V)).generate(PROMPT, max_new_tokens=20)
    assert result.tokens == plain(20)
    assert {step.n_new for step in result.steps} == {1}


NASTY = {
    "duplicates": own("Scripted", paths=[[1, 2], [1, 2], [1]], times=2),
    "out of the vocabulary": own("Scripted", paths=[[V], [-1], [-7], [2**62], [1, V, 2]]),
    "empty paths": own("Scripted", paths=[[], []]),
    "no paths": own("Scripted", paths=[]),
    "deeper than the tree": own("Scripted", paths=[[i % V for i in range(200)]]),
    "NaN": own("Scripted", paths=[[1, 2], [3]], score=float("nan")),
    "likelier than certain": own("Scripted", paths=[[1, 2], [3]], score=1e30),
    "infinite": own("Scripted", paths=[[1, 2], [3]], score=float("inf")),
    "unscored": own("Scripted", paths=[[1, 2], [3]], score=-float("inf")),
    "long matches": own("Scripted", paths=[[1], [2], [3]], match=2**40),
    "everything": own("Scripted", paths=[[i] for i in range(V)], score=0.0),
    "NaN scorer": own("ScriptedScorer", paths=[[1, 2], [3]], score=float("nan")),
    "infinite scorer": own("ScriptedScorer", paths=[[1, 2], [3]], score=float("inf")),
    "unscoring scorer": own("ScriptedScorer", paths=[[1, 2], [3]], score=-float("inf")),
}


@pytest.mark.parametrize("backend", ["tensor", "reference"])
@pytest.mark.parametrize("name", NASTY)
def test_a_nasty_drafter_never_changes_the_text(name: str, backend: str) -> None:
    nasty = {**NASTY[name], "name": "nasty"}
    schedules = [["nasty"] * 3, ["nasty", "ngram", "t"], ["ngram", "nasty", "t"], ["t", "nasty"]]
    schedules.append(["nasty", "suffix", "recycle"])
    for calls in schedules:
        made = pipeline(
            {"kind": "ngram"},
            nasty,
            {"kind": "suffix"},
            {"kind": "recycle"},
            {"kind": "lm", "model": "t"},
            scheduler={"kind": "fixed", "calls": calls},
            backend={"kind": backend},
        )
        for temperature in (0.0, 1.0):
            result = made.generate(PROMPT, max_new_tokens=15, temperature=temperature)
            assert result.tokens == plain(15, temperature=temperature)


SCORE = st.floats(allow_nan=True, width=32)


@given(
    drafters=st.lists(
        st.builds(
            lambda kind, paths, score: own(kind, paths=paths, score=score),
            st.sampled_from(["Scripted", "ScriptedScorer"]),
            st.lists(st.lists(st.integers(-2, V + 1), max_size=4), max_size=5),
            SCORE,
        ),
        min_size=1,
        max_size=3,
    ),
    data=st.data(),
)
def test_no_script_of_drafters_changes_the_text(
    drafters: list[dict[str, Any]], data: st.DataObject
) -> None:
    named = [{**drafter, "name": str(i)} for i, drafter in enumerate(drafters)]
    calls = data.draw(st.lists(st.integers(0, len(named) - 1), min_size=1, max_size=3))
    made = pipeline(*named, scheduler={"kind": "fixed", "calls": calls})
    assert made.generate(PROMPT, max_new_tokens=10).tokens == plain(10)


# --- faults carry the drafter's name --------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("begin", "value", "drafter 'bad' failed in begin: ValueError: no such thing"),
        ("observe", "value", "drafter 'bad' failed in observe: ValueError: no such thing"),
        ("propose", "value", "drafter 'bad' failed in propose: ValueError: no such thing"),
        ("score", "value", "drafter 'bad' failed in score: ValueError: no such thing"),
        ("propose", "own", "drafter 'bad' failed in propose: DrafterError: out of ideas"),
        (
            "propose",
            "none",
            "drafter 'bad' failed in propose: TypeError: Proposals must be returned, "
            "found NoneType",
        ),
        (
            "propose",
            "list",
            "drafter 'bad' failed in propose: TypeError: Proposals must be returned, found list",
        ),
        (
            "propose",
            "no_column",
            "drafter 'bad' failed in propose: TreeError: proposals need at least one column of "
            "tokens, found [1, 0]; return Proposals.empty() for no path",
        ),
        (
            "propose",
            "unequal",
            "drafter 'bad' failed in propose: TreeError: proposals need tokens and logprobs of "
            "shape [1, C], found [1, 1] and [1, 2]",
        ),
        (
            "propose",
            "no_node",
            "drafter 'bad' failed in propose: TreeError: proposal positions must be nodes 0..0, "
            "found [1000000]",
        ),
        (
            "propose",
            "floats",
            "drafter 'bad' failed in propose: TreeError: proposals need tokens of type int64, "
            "found torch.float32",
        ),
        # Positions, tokens and match on a device used to pass the check and fail further on.
        (
            "propose",
            "elsewhere",
            "drafter 'bad' failed in propose: TreeError: proposals must be on the cpu, found "
            "positions on meta",
        ),
        (
            "propose",
            "scores_elsewhere",
            "drafter 'bad' failed in propose: TreeError: proposals must be on the cpu, found "
            "logprobs on meta",
        ),
        (
            "propose",
            "lists",
            "drafter 'bad' failed in propose: AttributeError: 'list' object has no attribute 'dim'",
        ),
        (
            "score",
            "none",
            "drafter 'bad' must return scores of shape [1] from score, found <class 'NoneType'>",
        ),
        ("score", "short", "drafter 'bad' must return scores of shape [1] from score, found [0]"),
    ],
)
def test_a_fault_names_the_drafter(method: str, answer: str, message: str) -> None:
    made = pipeline({**own("Faulty", method=method, answer=answer), "name": "bad"})
    with pytest.raises(DrafterError) as caught:
        made.generate(PROMPT, max_new_tokens=10)
    assert str(caught.value) == message


@pytest.mark.parametrize("method", ["begin", "observe", "propose", "score"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_pipeline_is_usable_after_a_fault(method: str, after: int) -> None:
    """The other drafters, the caches and the clock go on as if nothing had happened."""
    bad = {**own("Faulty", method=method, answer="value", after=after), "name": "bad"}
    made = pipeline(
        {"kind": "ngram"},
        {"kind": "lm", "model": "t"},
        bad,
        scheduler={"kind": "fixed", "calls": [0, 1, 2]},
    )
    for _ in range(after + 1):
        # `begin` is called once a text, the others once a step.
        texts = [PROMPT] * (after + 1)
        with pytest.raises(DrafterError):
            [made.generate(text, max_new_tokens=20) for text in texts]
    # The fault is cured: what is left is a drafter that works.
    made._parts.drafters[2]._drafter.left = 10**6  # type: ignore[attr-defined]
    result = made.generate(PROMPT, max_new_tokens=20)
    assert result.tokens == plain(20)
    assert result.statistics.total_seconds < 60


def test_a_fault_leaves_the_callers_state_as_it_was() -> None:
    made = pipeline({**own("Faulty", method="propose", answer="value"), "name": "bad"})
    with torch.enable_grad():
        with pytest.raises(DrafterError):
            made.generate(PROMPT)
        assert torch.is_grad_enabled()
    assert made._parts.watch._stages == ["host"]


# --- cancelled runs and two texts at once ---------------------------------------------------------


def test_an_interrupt_is_no_drafters_fault_and_the_pipeline_goes_on() -> None:
    made = pipeline(own("Faulty", method="propose", answer="interrupt", after=2))
    with pytest.raises(KeyboardInterrupt):
        made.generate(PROMPT, max_new_tokens=20)
    assert made._parts.watch._stages == ["host"]
    made._parts.drafters[0]._drafter.left = 10**6  # type: ignore[attr-defined]
    assert made.generate(PROMPT, max_new_tokens=20).tokens == plain(20)


def test_a_stream_that_is_left_half_way_leaves_nothing_behind() -> None:
    made = pipeline({"kind": "ngram"}, {"kind": "lm", "model": "t"}, scheduler={"kind": "always"})
    for n_chunks in (1, 2, 3):
        stream = made.stream([4, 4, 2, 1], max_new_tokens=50)
        for _ in range(n_chunks):
            next(stream)
        stream.close()
        assert made.generate(PROMPT, max_new_tokens=20).tokens == plain(20)


def test_grad_mode_is_the_callers_between_chunks() -> None:
    made = pipeline({"kind": "ngram"})
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            for _ in made.stream(PROMPT, max_new_tokens=5):
                assert torch.is_grad_enabled() is enabled


def test_two_texts_at_once_are_refused_and_the_newer_one_is_right() -> None:
    made = pipeline({"kind": "ngram"})
    first, second = made.stream(PROMPT), made.stream([3, 4], max_new_tokens=10)
    next(first)
    tokens = list(next(second).tokens)
    with pytest.raises(TreegraftError) as caught:
        next(first)
    assert str(caught.value) == (
        "this stream ended when its pipeline began another text; build a pipeline for each text "
        "that runs at the same time"
    )
    tokens += [token for chunk in second for token in chunk.tokens]
    assert tokens == plain(10, [3, 4])


# --- other roles that misbehave -------------------------------------------------------------------


class ChoosesBeyond(Scheduler):
    def __init__(self, choice: int) -> None:
        self.choice = choice

    def choose(self, state: DraftState) -> int | None:
        return self.choice

    def finish(self, record: StepRecord) -> None: ...


@pytest.mark.parametrize("choice", [-1, 1, 99])
def test_a_scheduler_that_chooses_nobody_we_have_is_refused(choice: int) -> None:
    """-1 would be the last drafter, silently."""
    scheduler = {"kind": f"{__name__}:ChoosesBeyond", "params": {"choice": choice}}
    made = pipeline({"kind": "ngram"}, scheduler=scheduler)
    with pytest.raises(TreegraftError) as caught:
        made.generate(PROMPT)
    assert str(caught.value) == (
        f"the scheduler must choose a drafter 0..0 or None, found {choice}"
    )


class DropsTheFrontier(TreeBuilder):
    depth, width, budget = 3, 2, 5

    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> Tensor:
        return torch.empty(0, dtype=torch.int64)

    def prune(self, tree: TreeBackend) -> TokenTree:
        return tree.prune(self.budget)


def test_a_builder_without_a_frontier_still_decodes() -> None:
    made = pipeline(
        {"kind": "ngram"},
        {"kind": "lm", "model": "t"},
        builder={"kind": f"{__name__}:DropsTheFrontier"},
        scheduler={"kind": "always"},
    )
    assert made.generate(PROMPT, max_new_tokens=15).tokens == plain(15)


def test_a_target_cache_that_could_not_grow_is_opened_anew() -> None:
    """Out of memory for a long text: a short one afterwards must not find a cache that is gone."""
    made = pipeline({"kind": "ngram"})
    made.generate(PROMPT, max_new_tokens=10)
    target = made.target
    opened = target.new_cache

    def fail(n_rows: int, old: Any = None) -> Any:
        raise MemoryError

    target.new_cache = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        made.generate(PROMPT, max_new_tokens=1000)
    target.new_cache = opened  # type: ignore[method-assign]
    assert made.generate(PROMPT, max_new_tokens=10).tokens == plain(10)


def test_more_paths_than_were_asked_for_are_refused_before_they_fill_the_memory() -> None:
    made = pipeline(own("Scripted", paths=[[1]] * (V + 1)) | {"name": "greedy"})
    with pytest.raises(
        DrafterError, match="drafter 'greedy' failed in propose: TreeError: at most"
    ):
        made.generate(PROMPT)
