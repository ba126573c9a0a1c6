"""Grafts and builders of one's own can waste time or end in one clear line, but change no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from backends.families import build
from table_models import hashed_model
from torch import Tensor

from treegraft.backends.hf import HFLanguageModel
from treegraft.backends.reference import plain_tokens
from treegraft.config import parse_config
from treegraft.core.errors import PolicyError, TreegraftError
from treegraft.core.roles import Drafter, DraftState, GraftPolicy, Scheduler, Touched, TreeBackend
from treegraft.core.roles import TreeBuilder as Builder
from treegraft.core.sampling import Sampling
from treegraft.core.stats import StepRecord
from treegraft.core.tree import TokenTree
from treegraft.pipeline import Pipeline, build_pipeline

V = 8
PROMPT = [1, 2, 3, 1, 2]


def own(name: str, **params: Any) -> dict[str, Any]:
    return {"kind": f"test_untrusted_parts:{name}", "params": params}


def pipeline(**options: Any) -> Pipeline:
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "lm", "model": "t", "name": "self"}],
        "builder": {"kind": "layered", "depth": 3, "width": 2, "budget": 6},
        "stop": {"max_new_tokens": 12},
        **options,
    }
    return build_pipeline(parse_config(config), {"t": hashed_model(V, seed=1)})


class Tampering(GraftPolicy):
    """Visits nothing and does ``deed`` to the tree instead."""

    def __init__(self, deed: str) -> None:
        self.deed = deed

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Tensor, width: int
    ) -> Touched:
        if self.deed == "reset":
            tree.reset_(5, 10)
        elif self.deed == "write":
            token: Any = tree.lists().token
            token[0] = 7 - token[0]
        elif self.deed == "raise":
            raise KeyError("nothing")
        proposals = drafter.propose(tree, frontier, width)
        return Touched(tree.add_(proposals, index, overwrite=True)[:, 0], proposals.match)


class Careless(Builder):
    """Prunes to a tree that breaks ``law``."""

    depth, width, budget = 3, 2, 6

    def __init__(self, law: str) -> None:
        self.law = law

    def frontier(self, tree: TreeBackend, touched: Touched, layer: int) -> Tensor:
        return tree.rank(touched.nodes, touched.match, self.width)

    def prune(self, tree: TreeBackend) -> TokenTree:
        pruned = tree.prune(self.budget)
        n = len(pruned)
        if self.law == "root":
            return TokenTree.root_only(int(1 - pruned.token[0]) % V)
        if self.law == "ancestors":
            return replace(pruned, ancestors=torch.ones(n, n, dtype=torch.bool).tril())
        if self.law == "parent":
            return replace(pruned, parent=torch.zeros(n, dtype=torch.int64))
        if self.law == "in place":
            pruned.lists()  # what is kept of the columns must not hide what is then done to them
            pruned.depth[1:] += 1
            return pruned
        if self.law == "siblings":
            return replace(pruned, token=torch.full((n,), int(pruned.token[0])))
        if self.law == "budget":
            return tree.prune(100)
        raise KeyError(self.law)


class Odd(Scheduler):
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def choose(self, state: DraftState) -> int | None:
        if self.answer == "raise":
            raise KeyError("nothing")
        return self.answer

    def finish(self, record: StepRecord) -> None:
        if self.answer is None:
            raise KeyError("no lesson")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {
                "graft": own("Tampering", deed="reset"),
                "builder": {"kind": "layered", "depth": 1, "width": 2, "budget": 6},
            },
            "the draft tree's root must hold the last token 2, found 5",
        ),
        (
            {"graft": own("Tampering", deed="write")},
            "the draft tree's root must hold the last token 2, found ",
        ),
        (
            {"graft": own("Tampering", deed="raise")},
            "graft 'Tampering' failed in visit: KeyError: 'nothing'",
        ),
        (
            {"builder": own("Careless", law="root")},
            "the draft tree's root must hold the last token 2, found 7",
        ),
        (
            {"builder": own("Careless", law="ancestors")},
            "draft tree breaks the law: ancestors are the path to the root",
        ),
        (
            {"builder": own("Careless", law="parent")},
            "draft tree breaks the law: depth[i] = depth[parent[i]] + 1",
        ),
        (
            {"builder": own("Careless", law="in place")},
            "draft tree breaks the law: depth[i] = depth[parent[i]] + 1",
        ),
        (
            {"builder": own("Careless", law="siblings")},
            "draft tree breaks the law: siblings have different tokens",
        ),
        ({"builder": own("Careless", law="budget")}, "the builder's budget is 6 nodes, found "),
        (
            {"builder": own("Careless", law="raise")},
            "builder 'Careless' failed in prune: KeyError: 'raise'",
        ),
        (
            {"scheduler": own("Odd", answer="self")},
            "the scheduler must choose a drafter 0..0 or None, found 'self'",
        ),
        (
            {"scheduler": own("Odd", answer=0.0)},
            "the scheduler must choose a drafter 0..0 or None, found 0.0",
        ),
        (
            {"scheduler": own("Odd", answer=False)},
            "the scheduler must choose a drafter 0..0 or None, found False",
        ),
        (
            {"scheduler": own("Odd", answer="raise")},
            "scheduler 'Odd' failed in choose: KeyError: 'nothing'",
        ),
        (
            {"scheduler": own("Odd", answer=None)},
            "scheduler 'Odd' failed in finish: KeyError: 'no lesson'",
        ),
    ],
)
def test_a_part_that_breaks_the_tree_is_stopped_in_one_line(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TreegraftError) as caught:
        pipeline(**options).generate(PROMPT)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_policys_own_fault_is_a_policy_error() -> None:
    with pytest.raises(PolicyError):
        pipeline(graft=own("Tampering", deed="raise")).generate(PROMPT)


# --- numbers that are none ------------------------------------------------------------------------


class Poison(Drafter):
    """Proposes ``token`` under every position, as long as ``active``."""

    active = True

    def __init__(self, token: int) -> None:
        self.token = token

    def begin(self, context: Any) -> None:
        pass

    def observe(self, commit: Any) -> None:
        pass

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Any:
        from treegraft.core.tree import Proposals

        n = positions.shape[0] if Poison.active else 0
        return Proposals.of_paths(positions.tolist()[:n], [[self.token]] * n, [[-0.5]] * n)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_draft_whose_keys_are_nan_changes_no_token_then_or_later(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedding row that was never trained may hold anything, and a masked NaN is still NaN."""
    model = build("llama")
    sound = HFLanguageModel(build("llama"))
    with torch.no_grad():
        model.get_input_embeddings().weight[96] = float("nan")
    broken = HFLanguageModel(model)
    config = {
        "target": {"model": "target"},
        "drafters": [
            {"kind": "test_untrusted_parts:Poison", "params": {"token": 96}},
            {"kind": "lm", "model": "drafter"},
        ],
        "scheduler": {"kind": "fixed", "calls": [0] if role == "target" else [0, 1, 1]},
        "stop": {"max_new_tokens": 12, "eos": []},
    }
    models = {"target": sound, "drafter": broken}
    if role == "target":
        models = {"target": broken, "drafter": sound}
    made = build_pipeline(parse_config(config), models=models)

    def expected(prompt: list[int]) -> list[int]:
        def logits(text: Any) -> Tensor:
            with torch.no_grad():
                return sound.model(input_ids=torch.tensor([list(text)])).logits[0, -1]

        return plain_tokens(logits, prompt, 12, Sampling())

    monkeypatch.setattr(Poison, "active", True)
    first = made.generate([5, 17, 3])
    assert first.tokens == expected([5, 17, 3])
    if role == "target":
        assert first.notices == (
            "a draft made target 'llama' give NaN; such steps are decoded without it",
        )
    monkeypatch.setattr(Poison, "active", False)
    second = made.generate([8, 40])
    assert second.tokens == expected([8, 40])
    if role == "drafter":
        assert second.statistics.accepted[1] > 0, "a drafter must recover from a NaN"


def test_a_prompt_that_is_nan_does_not_spoil_the_next_text() -> None:
    model = build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[96] = float("nan")
    config = parse_config({"target": {"model": "t"}, "stop": {"max_new_tokens": 8, "eos": []}})
    used = build_pipeline(config, models={"t": HFLanguageModel(model)})
    fresh = build_pipeline(config, models={"t": HFLanguageModel(model)})
    assert used.generate([5, 96, 7, 8, 9]).notices == ("target 'llama' gives NaN for this text",)
    assert used.generate([1, 3]).tokens == fresh.generate([1, 3]).tokens


# --- the process around ---------------------------------------------------------------------------


def llamas() -> Pipeline:
    models = {"t": HFLanguageModel(build("llama")), "d": HFLanguageModel(build("llama", seed=1))}
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "d"}],
        "scheduler": {"kind": "fixed", "calls": [0, 1, 0, 1]},
        "stop": {"max_new_tokens": 8, "eos": []},
    }
    return build_pipeline(parse_config(config), models=models)


def test_a_pipeline_first_used_in_inference_mode_works_outside() -> None:
    made, expected = llamas(), llamas().generate([5, 6, 5]).tokens
    with torch.inference_mode():
        assert made.generate([5, 6, 5]).tokens == expected
    assert made.generate([5, 6, 5]).tokens == expected


def test_autocast_around_the_call_changes_nothing() -> None:
    expected = llamas().generate([5, 6, 5]).tokens
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert llamas().generate([5, 6, 5]).tokens == expected


def test_the_callers_default_dtype_and_device_change_nothing() -> None:
    made, expected = llamas(), llamas().generate([5, 6, 5]).tokens
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        assert made.generate([5, 6, 5]).tokens == expected
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_time_spent_in_finish_and_in_detokenising_is_the_runs() -> None:
    """Seconds of all stages add up to the wall time that the run took."""
    from time import perf_counter

    made = pipeline(scheduler=own("Slow"))
    start = perf_counter()
    statistics = made.generate(PROMPT).statistics
    wall = perf_counter() - start
    assert statistics.seconds["scheduler"] > 0.01 * statistics.target_calls
    assert 0.8 * wall < statistics.total_seconds <= wall


class Slow(Scheduler):
    def choose(self, state: DraftState) -> int | None:
        return 0

    def finish(self, record: StepRecord) -> None:
        from time import sleep

        sleep(0.01)
