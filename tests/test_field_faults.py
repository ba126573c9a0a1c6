"""Faults that public trackers of speculative decoding are full of, one test each, by symptom.

``ELSEWHERE`` names the tests of the symptoms that are proved beside the part they are about.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from drawn_configs import hf_room
from table_models import TableModel, hashed_model
from torch import Tensor

from treegraft.backends.reference import plain_tokens
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError, PolicyError
from treegraft.core.language_model import LanguageModel
from treegraft.core.roles import Commit, Context, Drafter, TreeBackend, Verifier
from treegraft.core.sampling import Sampling, TargetDistribution
from treegraft.core.tree import Proposals, TokenTree, Verdict
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.verifiers import WalkConfig, WalkVerifier

V = 9
PROMPT = [1, 2, 3, 1, 2]

ELSEWHERE = {
    "EOS inside the accepted path": ("test_stops", "test_eos_inside_an_accepted_path"),
    "several EOS ids": ("test_stops", "test_the_first_of_several_eos_ids_ends_the_text"),
    "max_new_tokens overshoot": ("test_stops", "test_max_new_tokens_inside_an_accepted_path"),
    "KV overflow near the limit": (
        "test_pipeline",
        "test_every_length_up_to_the_context_limit",
    ),
    "the last token of the context is lost": (
        "test_hf_generate",
        "test_the_whole_context_is_used",
    ),
    "the drafter's context is shorter than the target's": (
        "test_pipeline",
        "test_a_drafter_past_its_context_hands_over_to_the_cheaper_one",
    ),
    "drafter KV wrong after a full or partial accept": (
        "policies.test_lm_drafter",
        "test_incremental_scores_of_a_llama_equal_fresh_forwards",
    ),
    "acceptance below 100 % when the target drafts for itself": (
        "test_hf_generate",
        "test_a_target_drafting_for_itself_is_always_accepted",
    ),
    "a run that raises half-way spoils the next": (
        "test_every_configuration",
        "test_a_run_that_ends_half_way_leaves_the_pipeline_as_new",
    ),
    "a cancelled stream spoils the next": (
        "test_adversarial_drafters",
        "test_a_stream_that_is_left_half_way_leaves_nothing_behind",
    ),
    "an interrupt in a drafter spoils the next run": (
        "test_adversarial_drafters",
        "test_an_interrupt_is_no_drafters_fault_and_the_pipeline_goes_on",
    ),
}


@pytest.mark.parametrize("symptom", ELSEWHERE)
def test_every_symptom_has_its_test(symptom: str) -> None:
    module, name = ELSEWHERE[symptom]
    assert callable(getattr(importlib.import_module(module), name))


# --- the pipelines --------------------------------------------------------------------------------


@cache
def target(kind: str) -> tuple[LanguageModel, Callable[[Sequence[int]], Tensor]]:
    """A target, and its logits after a whole text by itself."""
    if kind == "table":
        model = hashed_model(V, seed=1, order=6)
        return model, model.logits
    room = hf_room(kind)
    return room.models["target"], room.after


def pipeline(kind: str, *drafters: dict[str, Any], **options: Any) -> Pipeline:
    config = {
        "target": {"model": "t"},
        "drafters": list(drafters),
        "builder": {"kind": "layered", "depth": 3, "width": 4, "budget": 30},
        **options,
    }
    return build_pipeline(parse_config(config), {"t": target(kind)[0]})


def own(name: str, **params: Any) -> dict[str, Any]:
    return {"kind": f"test_field_faults:{name}", "params": params}


def plain(kind: str, n: int, **sampling: Any) -> list[int]:
    return plain_tokens(target(kind)[1], PROMPT, n, Sampling(**sampling))


class RightFor(Drafter):
    """Among wrong branches hangs a path that is right for ``n_right`` tokens out of ``length``."""

    def __init__(self, kind: str, n_right: int, length: int, temperature: float) -> None:
        self.after = target(kind)[1]
        self.n_right, self.length, self.temperature = n_right, length, temperature

    def begin(self, context: Context) -> None:
        self.text = list(context.tokens)

    def observe(self, commit: Commit) -> None:
        self.text += commit.tokens

    def propose(self, tree: TreeBackend, positions: Tensor, width: int) -> Proposals:
        sampling = Sampling(temperature=self.temperature, seed=3)
        right = plain_tokens(self.after, self.text, self.length, sampling)
        path = [*right[: self.n_right], *((token + 1) % V for token in right[self.n_right :])]
        first = right[0]
        wrong = [[(first + 1) % V, *right[1:]], [(first + 2) % V] * self.length]
        paths = [wrong[0], path, wrong[1]]
        return Proposals.of_paths([0] * 3, paths, [[-0.5] * self.length] * 3)


# --- the symptoms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["table", "llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("n_right", [0, 1, 2, 3, 4])
def test_output_differs_from_greedy_after_a_partial_accept(
    kind: str, temperature: float, n_right: int
) -> None:
    """The accepted nodes lie between wrong branches, so that their KV rows must move."""
    params = {"kind": kind, "n_right": n_right, "length": 4, "temperature": temperature}
    made = pipeline(
        kind,
        own("RightFor", **params),
        scheduler={"kind": "fixed", "calls": [0]},
        sampling={"temperature": temperature, "seed": 3},
    )
    result = made.generate(PROMPT, max_new_tokens=23)
    assert result.tokens == plain(kind, 23, temperature=temperature, seed=3)
    assert {step.n_path for step in result.steps[:-1]} == {n_right}


@pytest.mark.parametrize("score", [-1e-4, -30.0, float("nan")])
def test_q_of_a_deterministic_draft_is_taken_as_soft(score: float) -> None:
    """Whatever a look-up claims for its token, the token comes as often as the target says.

    Accepting it with min(1, p / q) and drawing from p again after a rejection, as if the draft had
    been drawn from q, would give it 0.51 instead of 0.3 for a claim near 1.
    """
    p = torch.tensor([0.5, 0.3, 0.2])
    model = TableModel(lambda text: p.log(), 3)
    config = {
        "target": {"model": "t"},
        "drafters": [
            {"kind": "adversarial_drafters:Scripted", "params": {"paths": [[1, 1]], "score": score}}
        ],
        "sampling": {"temperature": 1.0},
        "stop": {"max_new_tokens": 2},
    }
    made = build_pipeline(parse_config(config), {"t": model})
    n, shares = 300, torch.zeros(3)
    accepted = 0
    for seed in range(n):
        result = made.generate([0], seed=seed)
        sampling = Sampling(temperature=1.0, seed=seed)
        assert result.tokens == plain_tokens(model.logits, [0], 2, sampling)
        shares[result.tokens[0]] += 1 / n
        accepted += sum(result.statistics.accepted)
    torch.testing.assert_close(shares, p, rtol=0, atol=4 * (0.25 / n) ** 0.5)
    assert accepted > 0.2 * n, "the draft must be the target's token now and then"


def test_penalties_are_counted_on_another_branchs_path() -> None:
    """The target likes 0, then 1, then 2; each said once is penalised below the others.

    The side branches hold 1, 2 and 4: counted at a node of the right path, they would turn it.
    """
    liked = torch.tensor([4.0, 3.9, 3.8, 3.7, 3.6])
    model = TableModel(lambda text: liked, 5)
    paths = [[1, 4], [2, 1], [0, 1, 2, 4], [4, 2]]
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "adversarial_drafters:Scripted", "params": {"paths": paths}}],
        "builder": {"kind": "layered", "depth": 1, "width": 4, "budget": 30},
        "sampling": {"repetition_penalty": 1.5},
    }
    made = build_pipeline(parse_config(config), {"t": model})
    result = made.generate([3], max_new_tokens=12)
    assert result.tokens[:4] == [0, 1, 2, 4]
    assert result.steps[0].n_path == 4
    assert result.tokens == plain_tokens(model.logits, [3], 12, Sampling(repetition_penalty=1.5))


@pytest.mark.parametrize("kind", ["table", "llama"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "seed": 5},
        {"temperature": 0.0, "top_k": 2, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 5e-324},
        {"temperature": 1e-30, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 100.0, "top_k": 1, "min_p": 1.0},
        {"temperature": 1.0, "top_p": 5e-324},
        {"temperature": 1.0, "min_p": 1.0},
    ],
    ids=str,
)
def test_a_setting_that_leaves_one_token_is_not_greedy(kind: str, sampling: dict[str, Any]) -> None:
    drafters = ({"kind": "ngram"}, {"kind": "lm", "model": "t"})
    for listed in ((), drafters):
        made = pipeline(kind, *listed, sampling=sampling, scheduler={"kind": "always"})
        assert made.generate(PROMPT, max_new_tokens=20).tokens == plain(kind, 20)


def test_a_temperature_of_none_is_taken_for_a_number() -> None:
    for act in (
        lambda: pipeline("table", sampling={"temperature": None}),
        lambda: pipeline("table").stream(PROMPT, temperature=None),
    ):
        with pytest.raises(ConfigError) as caught:
            act()
        assert str(caught.value) == (
            "sampling.temperature: Input should be a valid number, found None"
        )


class Breaks(Verifier):
    """Walks, and raises in its third verdict."""

    def __init__(self) -> None:
        self.walk, self.left = WalkVerifier(WalkConfig()), 2

    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        self.left -= 1
        verdict = self.walk.verdict(tree, target)
        if self.left == -1:
            raise ArithmeticError("no verdict")
        return verdict


@pytest.mark.parametrize("kind", ["table", "llama", "gemma3"])
def test_a_verifier_that_raises_half_way_spoils_the_next_run(kind: str) -> None:
    """Target and drafter hold rows of a tree that was never committed."""
    drafters = ({"kind": "ngram"}, {"kind": "lm", "model": "t"})
    made = pipeline(
        kind, *drafters, verifier=own("Breaks"), scheduler={"kind": "fixed", "calls": [0, 1, 1]}
    )
    with pytest.raises(PolicyError) as caught:
        made.generate([4, 4, 2, 8, 8, 1, 0], max_new_tokens=20)
    assert str(caught.value) == ("verifier 'Breaks' failed in verdict: ArithmeticError: no verdict")
    assert made.generate(PROMPT, max_new_tokens=20).tokens == plain(kind, 20)


@pytest.mark.parametrize("kind", ["table", "llama", "gemma3"])
def test_an_interrupt_in_the_targets_forward_spoils_the_next_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C lands anywhere: here after the rows were written and before anyone was told."""
    model = target(kind)[0]
    forward, left = model.forward, 4

    def interrupted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal left
        left -= 1
        logits = forward(*args, **kwargs)
        if left == 0:
            raise KeyboardInterrupt
        return logits

    made = pipeline(kind, {"kind": "lm", "model": "t"}, scheduler={"kind": "always"})
    monkeypatch.setattr(model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.generate([4, 4, 2, 8, 8, 1, 0], max_new_tokens=20)
    assert made.generate(PROMPT, max_new_tokens=20).tokens == plain(kind, 20)
