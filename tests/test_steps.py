"""What a stream shows of each step, and verdicts that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from table_models import hashed_model, mixed_model
from torch import Tensor

from treegraft import (
    Drafter,
    GraftPolicy,
    TokenTree,
    Touched,
    TreeBackend,
    Verdict,
    Verifier,
    build_pipeline,
    parse_config,
)
from treegraft.core.errors import PolicyError
from treegraft.core.sampling import TargetDistribution
from treegraft.pipeline import Pipeline

V = 8
TARGET = hashed_model(V, seed=1, order=6)
MODELS = {"t": TARGET, "d": mixed_model(TARGET, hashed_model(V, seed=2), 0.3)}


def pipeline(verifier: dict[str, Any] | None = None) -> Pipeline:
    config: dict[str, Any] = {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "d"}],
        "builder": {"kind": "layered", "depth": 3, "width": 2, "budget": 8},
        "scheduler": {"kind": "always"},
    }
    if verifier is not None:
        config["verifier"] = verifier
    return build_pipeline(parse_config(config), models=MODELS)


@pytest.mark.parametrize("n_tokens", [1, 2, 40])
def test_a_chunk_shows_the_tree_and_the_path_that_was_committed(n_tokens: int) -> None:
    text = [1, 2, 3]
    n_nodes = 0
    for chunk in pipeline().stream(text, max_new_tokens=n_tokens):
        tree, path = chunk.tree, list(chunk.path)
        tree.check()
        assert len(tree) == chunk.step.n_tree
        assert int(tree.token[0]) == text[-1]
        assert tree.token[path].tolist() == chunk.tokens[: len(path)]
        assert tree.parent[path].tolist() == [0, *path][: len(path)]
        assert len(chunk.tokens) <= len(path) + 1
        assert chunk.step.accepted == tuple((tree.source[path] == i).sum() for i in (0, 1))
        text += chunk.tokens
        n_nodes += len(path)
    assert len(text) == 3 + n_tokens
    assert n_nodes > 0 or n_tokens < 40


@pytest.mark.parametrize("backend", ["tensor", "reference"])
def test_an_accepted_token_is_credited_to_all_who_proposed_it(backend: str) -> None:
    """What one drafter alone knew is what its being there was worth."""
    known = {"seed": 1, "vocab_size": V, "order": 6}
    right, wrong = (
        {"kind": f"adversarial_drafters:Always{name}", "name": name, "params": known}
        for name in ("Right", "Wrong")
    )
    twin = {**right, "name": "Twin"}
    shape = {"builder": {"kind": "layered", "depth": 3, "width": V, "budget": 40}}
    for drafters, calls, expected in (
        ((right, wrong), (0, 1), {"Right": (1, 1, 1), "Wrong": (0, 0, 0)}),
        ((right, twin), (0, 1), {"Right": (1, 1, 0), "Twin": (1, 0, 0)}),
        ((right, twin), (1, 0), {"Right": (1, 0, 0), "Twin": (1, 1, 0)}),
    ):
        config = {
            "target": {"model": "t"},
            "drafters": list(drafters),
            "scheduler": {"kind": "fixed", "calls": list(calls)},
            "backend": {"kind": backend},
            # Everyone drafts at the root, so that they can have the same ideas.
            "graft": {"kind": "test_steps:AtTheRoot"},
            **shape,
        }
        made = build_pipeline(parse_config(config), models=MODELS)
        for chunk in made.stream([1, 2, 3], max_new_tokens=20):
            if not chunk.layers:
                continue
            for i, name in enumerate(made.drafter_names):
                proposed, accepted, alone = expected[name]
                assert chunk.step.proposed[i] == (proposed if name != "Wrong" else V - 1)
                assert chunk.step.accepted[i] == accepted
                assert chunk.step.accepted_alone[i] == alone


def test_a_chunk_shows_what_was_decided_in_each_layer() -> None:
    chunks = list(pipeline().stream([1, 2, 3], max_new_tokens=20))
    for chunk in chunks:
        assert tuple(layer.drafter for layer in chunk.layers) == chunk.step.calls
        assert tuple(layer.seconds for layer in chunk.layers) == chunk.step.visit_seconds
        n_nodes = 1
        for layer in chunk.layers:
            assert layer.chosen == layer.drafter == 1
            assert int(layer.frontier.max()) < n_nodes <= layer.n_nodes
            assert int(layer.touched.max()) < layer.n_nodes
            n_nodes = layer.n_nodes
        assert sum(chunk.step.drafted) == n_nodes - 1
    assert [len(chunk.layers) for chunk in chunks[:-1]] == [3] * (len(chunks) - 1)


def test_a_decision_to_stop_is_shown() -> None:
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "d"}],
        "builder": {"kind": "layered", "depth": 3, "width": 2, "budget": 8},
        "scheduler": {"kind": "fixed", "calls": ["d"]},
    }
    made = build_pipeline(parse_config(config), models=MODELS)
    first = next(iter(made.stream([1, 2, 3], max_new_tokens=20)))
    assert [layer.drafter for layer in first.layers] == [1, None]
    assert first.layers[1].chosen is None
    assert first.step.calls == (1,)
    assert len(first.step.visit_seconds) == 1


class AtTheRoot(GraftPolicy):
    """Everyone hangs its paths under the root."""

    def visit(
        self, tree: TreeBackend, drafter: Drafter, index: int, frontier: Tensor, width: int
    ) -> Touched:
        proposals = drafter.propose(tree, torch.tensor([0]), width)
        return Touched(tree.add_(proposals, index, overwrite=False)[:, 0], proposals.match)


def test_the_tree_of_a_chunk_stays_as_it_was() -> None:
    """Later steps write to the working tree, and not to what was handed out."""
    chunks = []
    copies = []
    for chunk in pipeline().stream([1, 2, 3], max_new_tokens=20):
        chunks.append(chunk)
        copies.append(chunk.tree.token.clone())
    assert len(chunks) > 3
    for chunk, copy in zip(chunks, copies, strict=True):
        assert torch.equal(chunk.tree.token, copy)
        chunk.tree.check()


class Says(Verifier):
    """Gives this path, with the tokens of the path and then ``more``."""

    def __init__(self, path: list[int], more: list[int], first: int | None = None) -> None:
        self.path, self.more, self.first = path, more, first

    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Verdict:
        tokens = [int(tree.token[node]) for node in self.path if 0 <= node < len(tree)]
        if self.first is not None:
            tokens[0] = self.first
        return Verdict(tuple(self.path), (*tokens, *self.more))


class SaysNothing(Verifier):
    def verdict(self, tree: TokenTree, target: TargetDistribution) -> Any:
        return None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"path": [], "more": []}, "tokens must be those of path [] and one more, found []"),
        ({"path": [], "more": [1, 2]}, "tokens must be those of path [] and one more, found [1"),
        ({"path": [1], "more": []}, "tokens must be those of path [1] and one more, found ["),
        ({"path": [1], "more": [0], "first": -5}, "tokens must be those of path [1] and one more"),
        ({"path": [99], "more": [0]}, "path must lead down from the root, found [99] in [0, "),
        ({"path": [-1], "more": [0]}, "path must lead down from the root, found [-1] in [0, "),
        ({"path": [0], "more": [0]}, "path must lead down from the root, found [0] in [0, "),
        ({"path": [1, 1], "more": [0]}, "path must lead down from the root, found [1, 1] in [0"),
        ({"path": [], "more": [V]}, f"tokens must be in 0..{V - 1}, found {V}"),
        ({"path": [], "more": [-1]}, f"tokens must be in 0..{V - 1}, found -1"),
    ],
)
def test_a_verdict_that_is_no_path_ends_the_run_in_one_line(
    params: dict[str, Any], message: str
) -> None:
    """One without a token would run forever; others break the KV cache or end in a traceback."""
    made = pipeline({"kind": "test_steps:Says", "params": params})
    with pytest.raises(PolicyError) as caught:
        made.generate([1, 2, 3], max_new_tokens=8)
    start = "verifier 'Says' failed in verdict: ValueError: "
    assert str(caught.value).startswith(start + message)
    assert "\n" not in str(caught.value)


def test_a_verdict_of_another_type_ends_the_run_in_one_line() -> None:
    with pytest.raises(PolicyError, match="verifier 'SaysNothing' failed in verdict: "):
        pipeline({"kind": "test_steps:SaysNothing"}).generate([1, 2, 3], max_new_tokens=8)
