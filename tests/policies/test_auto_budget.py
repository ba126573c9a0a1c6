"""The budget of each step: as many nodes as bring the most expected tokens per second."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import hashed_model, mixed_model

from treegraft.backends.cost import CostModel, Curve, HostCosts, environment, save_costs
from treegraft.backends.identity import model_identity
from treegraft.backends.reference import ReferenceTree, plain_tokens
from treegraft.backends.tensor_tree import TensorTree
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError, ScheduleError
from treegraft.core.roles import TreeBackend
from treegraft.core.sampling import Sampling
from treegraft.core.tree import Proposals
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.budget import AutoBudgetBuilder, expected_tokens, first_peak
from treegraft.policies.builders import LayeredBuilder, LayeredConfig
from treegraft.scheduling.collectable import check_collectable

V = 8
TARGET = hashed_model(V, seed=1, order=6)
MODELS = {"t": TARGET, "d": mixed_model(TARGET, hashed_model(V, seed=2), 0.3)}


def builder(limit: int, target: float, node: float, drafting: float = 0.0) -> AutoBudgetBuilder:
    inner = LayeredBuilder(LayeredConfig(budget="auto", budget_limit=limit))
    return AutoBudgetBuilder(inner, lambda n, text, drafted: target + node * (n - 1.0), drafting)


def grown(kind: type[TreeBackend], chances: list[tuple[int, float]]) -> TreeBackend:
    """A tree of nodes given as parent and chance given the parent, numbered from 1."""
    tree = kind(64)  # type: ignore[call-arg]
    tree.reset_(0, 64)
    for token, (parent, chance) in enumerate(chances):
        logprob = [[float(np.log(chance))]]
        tree.add_(Proposals.of_paths([parent], [[token]], logprob), 0, overwrite=True)
    return tree


# --- the story ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TensorTree, ReferenceTree])
def test_nodes_are_verified_while_they_pay(kind: type[TreeBackend]) -> None:
    """A chain of sure tokens, then guesses, under costs at which the guesses don't pay."""
    tree = grown(kind, [(0, 0.9), (1, 0.9), (2, 0.9), (3, 0.3), (4, 0.3)])
    # 1 + 0.9 + 0.81 + 0.73 tokens in 1.3 seconds; the next node brings 0.22 in 0.1.
    assert builder(9, target=1.0, node=0.1).size(tree) == 3
    assert builder(9, target=1.0, node=0.05).size(tree) == 4
    assert builder(9, target=1.0, node=0.0).size(tree) == 5
    assert builder(9, target=1.0, node=2.0).size(tree) == 0
    assert builder(2, target=1.0, node=0.0).size(tree) == 2
    # Drafting that has cost much is to be made the most of.
    assert builder(9, target=1.0, node=0.1, drafting=1.0).size(tree) == 4
    pruned = builder(9, target=1.0, node=0.1).prune(tree)
    assert pruned.node.tolist() == [0, 1, 2, 3]


def test_of_brothers_one_is_accepted_at_most() -> None:
    """Three children that each claim to be sure bring one token together."""
    tokens = expected_tokens(
        np.array([1.0, 1.0, 1.0, 0.9, 0.9]), np.array([0, 0, 0, 1, 2]), np.array([1, 2, 3, 4])
    )
    assert tokens.tolist() == pytest.approx([1.0, 2.0, 2.0, 2.9, 2.9])


# --- properties -----------------------------------------------------------------------------------

CHANCES = st.lists(
    st.tuples(st.floats(0.0, 1.0), st.floats(0.01, 1.0)), min_size=1, max_size=20
).map(lambda drawn: [(int(share * i), chance) for i, (share, chance) in enumerate(drawn)])


@given(CHANCES, st.floats(1e-3, 10.0), st.floats(0.0, 1.0), st.integers(0, 24))
@settings(max_examples=60)
def test_the_budget_is_the_first_peak_and_the_best_one(
    chances: list[tuple[int, float]], target: float, node: float, limit: int
) -> None:
    """By brute force; with a linear T(n) no later prefix has a higher rate either."""
    tree = grown(TensorTree, chances)
    size = builder(limit, target, node).size(tree)
    best = tree.best(limit + 1, 0, 99).tolist()
    order = [n for n in best if n]
    chance, parent = np.exp(tree.logprob.double().numpy()), tree.parent.tolist()
    rates = []
    for n in range(len(order) + 1):
        kept = order[:n]
        # From the leaves up: what a node's children bring together is at most its own.
        gain = {0: 1.0} | {i: 0.0 for i in kept}
        left = {0: 1.0}
        for i in kept:
            gain[i] = min(float(chance[i]), left[parent[i]])
            left[parent[i]] -= gain[i]
            left[i] = gain[i]
        rates.append(sum(gain.values()) / (target + node * n))
    assert 0 <= size <= min(limit, len(order))
    assert all(b >= a - 1e-9 for a, b in pairwise(rates[: size + 1]))
    assert size == len(order) or rates[size + 1] <= rates[size] + 1e-9
    gains = np.diff([rate * (target + node * n) for n, rate in enumerate(rates)])
    if (np.diff(gains) <= 1e-12).all():
        assert rates[size] == pytest.approx(max(rates))


@given(CHANCES, st.floats(1e-3, 10.0), st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2))
def test_it_grows_where_nodes_are_cheaper(
    chances: list[tuple[int, float]], target: float, nodes: list[float]
) -> None:
    tree = grown(TensorTree, chances)
    cheap, dear = sorted(nodes)
    assert builder(20, target, cheap).size(tree) >= builder(20, target, dear).size(tree)


@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=1, max_size=12))
def test_the_first_peak_is_the_end_of_the_first_rise(pairs: list[tuple[float, float]]) -> None:
    tokens, seconds = (np.array(column) for column in zip(*pairs, strict=True))
    peak = first_peak(tokens, seconds)
    rate = (tokens / seconds).tolist()
    expected = 0
    while expected + 1 < len(rate) and rate[expected + 1] >= rate[expected]:
        expected += 1
    assert peak == expected


# --- in a pipeline --------------------------------------------------------------------------------


def config(costs: Any = None, calibration: str = "online", **more: Any) -> dict[str, Any]:
    auto = {"kind": "layered", "depth": 3, "width": 3, "budget": "auto", "budget_limit": 12}
    return {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "d"}],
        "builder": {**auto, "budget_costs": costs},
        "scheduler": {"kind": "always"},
        "calibration": {"kind": calibration},
        **more,
    }


def made(costs: Any = None, **more: Any) -> Pipeline:
    return build_pipeline(parse_config(config(costs, **more)), MODELS)


def sizes(pipeline: Pipeline, n: int = 60) -> list[int]:
    result = pipeline.generate([1, 2, 3], max_new_tokens=n)
    assert result.tokens == plain_tokens(TARGET.logits, [1, 2, 3], n, Sampling())
    return [step.n_tree - 1 for step in result.steps]


def test_a_cheaper_node_makes_larger_trees_and_changes_no_token() -> None:
    means = [np.mean(sizes(made({"target": 1.0, "node": node}))) for node in (0.0, 0.05, 0.3, 3.0)]
    assert means == sorted(means, reverse=True)
    assert means[0] > 8
    assert means[-1] == 0
    # Within one run they differ from step to step.
    assert len(set(sizes(made({"target": 1.0, "node": 0.1})))) > 2


def test_given_costs_verify_the_same_every_time() -> None:
    costs = {"target": 1.0, "node": 0.1, "drafting": 0.2}
    assert sizes(made(costs)) == sizes(made(costs))
    reference = made(costs, backend={"kind": "reference"})
    assert sizes(made(costs)) == sizes(reference)


def test_measured_costs_try_every_size_first() -> None:
    pipeline = made()
    found = sizes(pipeline, 90)
    assert found[:5] == [12, 7, 3, 1, 0]
    assert found[5:10] == [12, 7, 3, 1, 0]
    assert max(found) <= 12
    costs = pipeline.parts.builder._measured  # type: ignore[attr-defined]
    seconds = costs.forward(np.arange(1, 14)).tolist()
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_a_cost_model_file_is_reckoned_with(tmp_path: Path) -> None:
    def file(node: float, model: str = "") -> str:
        path = tmp_path / f"costs-{node}-{model}.json"
        backend = parse_config(config()).backend.model_dump(mode="json")
        here = environment(backend.pop("dtype"), backend.pop("device"), backend=backend)
        curve = Curve((1, 13), (4, 64), ((1.0, 1.0 + 12 * node),) * 2)
        identity = {"target": model or model_identity(TARGET)}
        host = HostCosts(0.01, 0.0, 0.0, {})
        save_costs(CostModel(here, identity, {"target": curve}, host), path)
        return str(path)

    assert np.mean(sizes(made(file(0.001)))) > np.mean(sizes(made(file(0.3))))
    with pytest.raises(ScheduleError, match="were measured for another target"):
        made(file(0.1, "other"))
    with pytest.raises(ScheduleError, match="cannot be read"):
        made(str(tmp_path / "none.json"))


def test_what_was_drawn_is_verified_whatever_it_costs() -> None:
    drawing = {"kind": "lm", "model": "d", "children": "sample"}
    pipeline = made({"target": 1e-3, "node": 1.0}, drafters=[drawing], verifier={"kind": "ledger"})
    result = pipeline.generate([1, 2, 3], max_new_tokens=30, temperature=1.0, seed=3)
    assert max(step.n_tree for step in result.steps) > 4
    greedy = pipeline.generate([1, 2, 3], max_new_tokens=30)
    assert {step.n_tree for step in greedy.steps} == {1}


# --- edges ----------------------------------------------------------------------------------------


def test_schedules_are_not_evaluated_offline_with_it() -> None:
    """Nor can they be, as scores that are learned would depend on earlier schedules."""
    with pytest.raises(ConfigError, match=r"calibration\.kind must be 'none' to evaluate"):
        check_collectable(parse_config(config()))


def test_the_slab_has_room_for_the_limit() -> None:
    pipeline = made({"target": 1.0})
    assert pipeline.builder.budget == 12
    unlimited = parse_config({**config(), "builder": {"kind": "best_first", "budget": "auto"}})
    assert build_pipeline(unlimited, MODELS).builder.budget == 63


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (
            {"budget": "auto"},
            "builder.budget 'auto' reckons with chances of acceptance: set calibration.kind to "
            "'online', found 'none'",
        ),
        (
            {"budget": 8, "budget_limit": 9},
            "builder: budget_limit is for budget 'auto', found 9 with budget 8",
        ),
        (
            {"budget_costs": "costs.json"},
            "builder: budget_costs is for budget 'auto', found 'costs.json' with budget 63",
        ),
        (
            {"budget": 1024},
            "builder.budget: Input should be less than or equal to 1023, found 1024",
        ),
        (
            {"budget": "0x"},
            "builder.budget: it must be a number of nodes, 0 to 1023, or 'auto', found '0x'",
        ),
        ({"budget": True}, "builder.budget must be a number, found True"),
        (
            {"budget": "auto", "budget_costs": {"target": 0.0}},
            "builder.budget_costs",
        ),
    ],
)
def test_wrong_budgets_are_one_line(builder: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(
            {
                "target": {"model": "t"},
                "drafters": [{"kind": "ngram"}],
                "builder": {"kind": "layered", **builder},
            }
        )
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
