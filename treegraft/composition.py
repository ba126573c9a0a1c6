"""The pipeline as a graph of components: data that can be printed and checked, nothing loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import networkx as nx
from pydantic import BaseModel

from treegraft.components import component_class
from treegraft.config import CustomConfig, PipelineConfig
from treegraft.core.errors import ConfigError
from treegraft.core.roles import Drafter, Scheduler, ScoringDrafter

# Who hands what to whom: (from role, to role, what flows, in which direction of time). Feedback
# reaches the next layer or the next step, so it is no part of the order within a layer.
_FLOWS: tuple[tuple[str, str, str, bool], ...] = (
    ("target", "verifier", "logits of every node", False),
    ("scheduler", "drafter", "whose turn it is", False),
    ("drafter", "graft", "Proposals", False),
    ("graft", "tree", "add, rescore, select", False),
    ("graft", "builder", "Touched", False),
    ("tree", "builder", "nodes and scores", False),
    ("builder", "target", "TokenTree", False),
    ("verifier", "commit", "Verdict", False),
    ("sampling", "verifier", "TargetDistribution", False),
    ("tree", "drafter", "nodes and paths", True),
    ("builder", "graft", "frontier", True),
    ("builder", "scheduler", "frontier of the next layer", True),
    ("target", "drafter", "TargetTop", True),
    ("target", "drafter", "hidden states", True),
    ("commit", "drafter", "Commit", True),
    ("commit", "scheduler", "StepRecord", True),
)
_SINGLE = ("builder", "graft", "scheduler", "verifier")


def component_graph(config: PipelineConfig) -> nx.DiGraph:
    """Compose the graph of a config and check it.

    Nodes carry ``role``, ``kind`` and ``options`` (a dict); edges carry ``flow`` (what is handed
    over) and ``feedback`` (True if it reaches the next layer or step). ConfigError if a role is not
    filled, a class does not fit its role, or the flow within a layer has a cycle.
    """
    graph = nx.DiGraph()
    # How models are loaded; which tree they work on is the tree's own kind.
    loading = config.backend.model_dump(exclude={"kind"})
    target = config.target.model_dump() | loading
    graph.add_node("target", role="target", kind="lm", options=target)
    for name, drafter in zip(config.drafter_names, config.drafters, strict=True):
        found = component_class("drafter", drafter)
        _add(graph, "drafter", f"drafter:{name}", drafter)
        node = graph.nodes[f"drafter:{name}"]
        node["scoring"] = issubclass(found, ScoringDrafter)
        node["asks"] = {
            "TargetTop": getattr(found, "target_top", None) is not None,
            "hidden states": getattr(found, "target_hidden", False),
        }
        if drafter.kind == "lm":
            node["options"] |= loading
    for role in _SINGLE:
        # Plain decoding drafts nothing: only the verifier has work.
        if config.drafters or role == "verifier":
            component_class(role, getattr(config, role))
            _add(graph, role, role, getattr(config, role))
    for name in config.ride_along:
        if graph.nodes[f"drafter:{name}"]["scoring"]:
            raise ConfigError(f"ride_along takes drafters that do not score, found {name!r}")
    _check_offers(config)
    if config.drafters:
        calibration = config.calibration.model_dump()
        online = {} if calibration["kind"] == "none" else {"calibration": calibration}
        graph.add_node("tree", role="tree", kind=config.backend.kind, options=online)
    sampling = config.sampling.model_dump(exclude={"processors"})
    if config.sampling.processors is not None:
        sampling |= config.sampling.processors.settings
    kind = "greedy" if config.sampling.temperature == 0 else "keyed noise"
    graph.add_node("sampling", role="sampling", kind=kind, options=sampling)
    graph.add_node("commit", role="commit", kind="stop rules", options=config.stop.model_dump())
    for source, sink, flow, feedback in _FLOWS:
        for a in _of_role(graph, source):
            for b in _of_role(graph, sink):
                if not graph.nodes[b].get("asks", {}).get(flow, True):
                    continue
                if graph.has_edge(a, b):
                    flow = f"{graph.edges[a, b]['flow']}, {flow}"
                graph.add_edge(a, b, flow=flow, feedback=feedback)
    check_composition(graph)
    return graph


def _check_offers(config: PipelineConfig) -> None:
    """ConfigError where a scheduler would learn from drafters that never tell what they offer."""
    scheduler: type[Scheduler] = component_class("scheduler", config.scheduler)
    if not config.drafters or not scheduler.asks_offers:
        return
    for name, drafter in zip(config.drafter_names, config.drafters, strict=True):
        found: type[Drafter] = component_class("drafter", drafter)
        if found.offers is Drafter.offers:
            raise ConfigError(
                f"scheduler.kind {config.scheduler.kind!r} learns from what drafters would have "
                f"proposed, and {name!r} ({drafter.kind}) does not tell: define offers, or take "
                "another scheduler"
            )


def _add(graph: nx.DiGraph, role: str, name: str, config: BaseModel) -> None:
    options = config.model_dump(exclude={"kind", "name"})
    if isinstance(config, CustomConfig):
        options = dict(config.params)
    graph.add_node(name, role=role, kind=config.kind, options=options)  # type: ignore[attr-defined]


def _of_role(graph: nx.DiGraph, role: str) -> Iterator[str]:
    return (name for name, data in list(graph.nodes(data=True)) if data["role"] == role)


def check_composition(graph: nx.DiGraph) -> None:
    """ConfigError if a role is unfilled or doubly filled, or data would flow in a circle."""
    drafts = any(_of_role(graph, "drafter"))
    needed = ["target", "verifier", "sampling", "commit"]
    needed += ["builder", "graft", "scheduler", "tree"] if drafts else []
    for role in needed:
        n_found = len(list(_of_role(graph, role)))
        if n_found != 1:
            raise ConfigError(f"a pipeline needs exactly one {role}, found {n_found}")
    forward = nx.DiGraph((a, b) for a, b, feedback in graph.edges(data="feedback") if not feedback)
    if not nx.is_directed_acyclic_graph(forward):
        circle = " -> ".join(a for a, _ in nx.find_cycle(forward))
        raise ConfigError(f"components hand data in a circle: {circle}")


def as_tree(graph: nx.DiGraph) -> str:
    """Plain text: each component with its kind and options, and what it hands to whom."""
    lines = ["pipeline"]
    names = list(graph.nodes)
    for i, name in enumerate(names):
        last = i == len(names) - 1
        data = graph.nodes[name]
        options = ", ".join(f"{k}={_short(v)}" for k, v in data["options"].items())
        lines.append(f"{'└─' if last else '├─'} {name}: {data['kind']}({options})")
        edges = list(graph.out_edges(name, data=True))
        for j, (_, sink, edge) in enumerate(edges):
            stem, knot = "   " if last else "│  ", "└─" if j == len(edges) - 1 else "├─"
            when = " (next layer or step)" if edge["feedback"] else ""
            lines.append(f"{stem}{knot}> {sink}: {edge['flow']}{when}")
    return "\n".join(lines)


def as_mermaid(graph: nx.DiGraph) -> str:
    """The same as a Mermaid flowchart; dashed arrows reach the next layer or step."""
    number = {name: f"n{i}" for i, name in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    for name, data in graph.nodes(data=True):
        lines.append(f'    {number[name]}["{name}<br/>{data["kind"]}"]')
    for a, b, edge in graph.edges(data=True):
        arrow = "-.->" if edge["feedback"] else "-->"
        lines.append(f'    {number[a]} {arrow}|"{edge["flow"]}"| {number[b]}')
    return "\n".join(lines)


def _short(value: Any) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
