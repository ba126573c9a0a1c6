"""The pipeline as a graph: what is in it, how it prints, and which graphs are refused."""

from __future__ import annotations

from typing import Any

import networkx as nx
import pytest
from table_models import hashed_model

from treegraft.composition import as_mermaid, as_tree, check_composition, component_graph
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError
from treegraft.pipeline import build_pipeline

CONFIG: dict[str, Any] = {
    "target": {"model": "zoo:target"},
    "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "zoo:small"}],
    "scheduler": {"kind": "fixed", "calls": ["ngram", "small"]},
    "sampling": {"temperature": 0.8},
}


def graph(**options: Any) -> nx.DiGraph:
    """Nothing is loaded: the models that CONFIG names need not exist."""
    return component_graph(parse_config({**CONFIG, **options}))


def test_components_carry_role_kind_and_options() -> None:
    nodes = graph().nodes
    assert {name: (data["role"], data["kind"]) for name, data in nodes(data=True)} == {
        "target": ("target", "lm"),
        "drafter:ngram": ("drafter", "ngram"),
        "drafter:small": ("drafter", "lm"),
        "builder": ("builder", "layered"),
        "graft": ("graft", "treegraft"),
        "scheduler": ("scheduler", "fixed"),
        "verifier": ("verifier", "walk"),
        "tree": ("tree", "tensor"),
        "sampling": ("sampling", "keyed noise"),
        "commit": ("commit", "stop rules"),
    }
    assert nodes["builder"]["options"] == {
        "depth": 5,
        "width": 10,
        "budget": 63,
        "budget_limit": None,
        "budget_costs": None,
    }
    assert nodes["graft"]["options"]["lookback"] == 5
    # How models are loaded stands with the models; the tree has nothing but its kind.
    loading = {"dtype": "float32", "device": "cpu", "attention": "auto"}
    loading |= {"compile": "off", "compiler": None, "buckets": None, "panels": False}
    assert nodes["target"]["options"] == {"model": "zoo:target"} | loading
    assert nodes["drafter:small"]["options"].items() >= loading.items()
    assert not nodes["drafter:ngram"]["options"].keys() & loading.keys()
    assert nodes["tree"]["options"] == {}
    assert [nodes[f"drafter:{name}"]["scoring"] for name in ("ngram", "small")] == [False, True]


def test_edges_say_what_flows() -> None:
    edges = {(a, b): data["flow"] for a, b, data in graph().edges(data=True)}
    assert edges["drafter:small", "graft"] == "Proposals"
    assert edges["builder", "target"] == "TokenTree"
    assert edges["verifier", "commit"] == "Verdict"
    assert edges["commit", "drafter:ngram"] == "Commit"
    assert {b for a, b in edges if a == "scheduler"} == {"drafter:ngram", "drafter:small"}
    assert edges["tree", "drafter:ngram"] == edges["tree", "drafter:small"] == "nodes and paths"
    assert edges["builder", "graft"] == "frontier"
    # Only look-ups ask for what the target made of the text.
    assert edges["target", "drafter:ngram"] == "TargetTop"
    assert ("target", "drafter:small") not in edges


def test_only_feedback_closes_circles() -> None:
    whole = graph()
    assert not nx.is_directed_acyclic_graph(whole)
    forward = [(a, b) for a, b, back in whole.edges(data="feedback") if not back]
    assert nx.is_directed_acyclic_graph(nx.DiGraph(forward))
    # Within a step data goes from the scheduler to the commit.
    assert nx.has_path(nx.DiGraph(forward), "scheduler", "commit")


def test_plain_decoding_has_nothing_that_drafts() -> None:
    plain = graph(drafters=[], scheduler={"kind": "never"})
    assert set(plain.nodes) == {"target", "verifier", "sampling", "commit"}
    assert set(plain.edges) == {
        ("target", "verifier"),
        ("verifier", "commit"),
        ("sampling", "verifier"),
    }


def test_a_pipeline_hands_out_its_graph() -> None:
    config = parse_config({"target": {"model": "t"}, "drafters": [{"kind": "ngram"}]})
    made = build_pipeline(config, {"t": hashed_model(8, seed=1)})
    assert nx.utils.graphs_equal(made.graph(), component_graph(config))


def test_a_graph_prints_as_a_tree() -> None:
    assert as_tree(graph(drafters=[], scheduler={"kind": "never"})) == (
        "pipeline\n"
        "├─ target: lm(model='zoo:target', dtype='float32', device='cpu', attention='auto', "
        "compile='off', compiler=None, buckets=None, panels=False)\n"
        "│  └─> verifier: logits of every node\n"
        "├─ verifier: walk()\n"
        "│  └─> commit: Verdict\n"
        "├─ sampling: keyed noise(temperature=0.8, top_k=None, top_p=None, min_p=None, "
        "repetition_penalty=1.0, seed=0)\n"
        "│  └─> verifier: TargetDistribution\n"
        "└─ commit: stop rules(max_new_tokens=128, min_new_tokens=0, eos=None, strings=[])"
    )
    lines = as_tree(graph()).splitlines()
    assert "├─ tree: tensor()" in lines
    assert "├─ scheduler: fixed(calls=['ngram', 'small'])" in lines
    assert "│  └─> scheduler: frontier of the next layer (next layer or step)" in lines
    # The last component's stem ends; each of its lines is still drawn.
    assert lines[-1] == "   └─> scheduler: StepRecord (next layer or step)"


def test_a_graph_prints_as_mermaid() -> None:
    assert as_mermaid(graph(drafters=[], scheduler={"kind": "never"})) == (
        "flowchart LR\n"
        '    n0["target<br/>lm"]\n'
        '    n1["verifier<br/>walk"]\n'
        '    n2["sampling<br/>keyed noise"]\n'
        '    n3["commit<br/>stop rules"]\n'
        '    n0 -->|"logits of every node"| n1\n'
        '    n1 -->|"Verdict"| n3\n'
        '    n2 -->|"TargetDistribution"| n1'
    )
    assert any("-.->" in line and "StepRecord" in line for line in as_mermaid(graph()).splitlines())


def test_a_missing_part_is_named() -> None:
    for role in ("target", "builder", "graft", "scheduler", "verifier", "tree", "sampling"):
        broken = graph()
        broken.remove_node(role)
        with pytest.raises(ConfigError) as caught:
            check_composition(broken)
        assert str(caught.value) == f"a pipeline needs exactly one {role}, found 0"


def test_a_part_that_is_filled_twice_is_named() -> None:
    broken = graph()
    broken.add_node("second", role="verifier", kind="walk", options={})
    with pytest.raises(ConfigError, match=r"^a pipeline needs exactly one verifier, found 2$"):
        check_composition(broken)


def test_a_circle_within_a_step_is_named() -> None:
    broken = graph()
    broken.add_edge("verifier", "builder", flow="its verdict", feedback=False)
    with pytest.raises(ConfigError) as caught:
        check_composition(broken)
    message = str(caught.value)
    assert message.startswith("components hand data in a circle: ")
    assert {"builder", "target", "verifier"} == set(message.split(": ")[1].split(" -> "))
