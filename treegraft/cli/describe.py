"""``describe``, ``components`` and ``schema``: what there is, with nothing loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treegraft.cli.options import Json
from treegraft.cli.output import print_json

if TYPE_CHECKING:
    from pydantic import BaseModel


def describe(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file of the pipeline.")],
    tree: Annotated[bool, typer.Option("--tree", help="Only the tree.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Only the Mermaid diagram.")] = False,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="The config with every default, as YAML.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a config and draw its components.

    Prints the pipeline as a tree and as a Mermaid diagram; nothing is loaded.
    """
    import yaml

    from treegraft.composition import as_mermaid, as_tree, component_graph
    from treegraft.config import load_config

    loaded = load_config(config)
    graph = component_graph(loaded)
    data = loaded.model_dump(mode="json")
    if as_json:
        nodes = [{"name": name} | attributes for name, attributes in graph.nodes(data=True)]
        edges = [{"from": a, "to": b} | attributes for a, b, attributes in graph.edges(data=True)]
        print_json({"config": data, "nodes": nodes, "edges": edges})
        return
    parts = []
    if tree or not (mermaid or resolved):
        parts.append(as_tree(graph))
    if mermaid or not (tree or resolved):
        parts.append(as_mermaid(graph))
    if resolved:
        parts.append(yaml.safe_dump(data, sort_keys=False).rstrip())
    print("\n\n".join(parts))


def components(as_json: Json = False) -> None:
    """List everything that can be swapped.

    Roles, their kinds, and every option with its default, bounds and meaning.
    """
    data = _components()
    if as_json:
        print_json(data)
        return
    blocks = []
    for role, entry in data["roles"].items():
        blocks.append(f"{role}: built-ins, or package.module:Class (a treegraft.{entry['base']})")
        for kind, described in entry["kinds"].items():
            blocks.append(f"  {kind}: {described['description']}")
            blocks += [f"      {line}" for line in _option_lines(described["options"])]
        blocks.append("")
    for name, described in data["settings"].items():
        blocks.append(f"{name}: {described['description']}")
        blocks += [f"  {line}" for line in _option_lines(described["options"])]
        blocks.append("")
    print("\n".join(blocks).rstrip())


def schema(as_json: Json = False) -> None:
    """Print the JSON schema of a config."""
    del as_json  # the schema is JSON in either case
    from treegraft.config import PipelineConfig

    print_json(PipelineConfig.model_json_schema())


def _components() -> dict[str, Any]:
    from treegraft.components import ROLES
    from treegraft.config import (
        BackendConfig,
        ProcessorsConfig,
        SamplingConfig,
        StopConfig,
        TargetConfig,
    )
    from treegraft.policies.calibration import CalibrationConfig

    settings: dict[str, type[BaseModel]] = {
        "target": TargetConfig,
        "calibration": CalibrationConfig,
        "sampling": SamplingConfig,
        "sampling.processors": ProcessorsConfig,
        "stop": StopConfig,
        "backend": BackendConfig,
    }
    return {
        "roles": {
            name: {
                "base": role.base.__name__,
                "kinds": {kind: _described(config) for kind, (config, _) in role.builtin.items()},
            }
            for name, role in ROLES.items()
        },
        "settings": {name: _described(config) for name, config in settings.items()},
    }


_BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "minLength": "length >=",
    "minItems": "length >=",
    "pattern": "like",
}


def _described(config: type[BaseModel]) -> dict[str, Any]:
    found = config.model_json_schema()
    required = found.get("required", [])
    options = {}
    for name, field in found["properties"].items():
        if name == "kind" and "const" in field:
            continue
        # An optional field is a choice of null and the type that carries the bounds.
        choice = field.get("anyOf") or field.get("oneOf") or [field]
        forms = [form for form in choice if form.get("type") != "null"]
        options[name] = {
            "type": " or ".join(_type(form) for form in forms),
            "required": name in required,
            "default": field.get("default"),
            "bounds": {key: form[key] for form in forms for key in _BOUNDS if key in form},
            "description": field.get("description", ""),
        }
    return {"description": (config.__doc__ or "").strip().splitlines()[0], "options": options}


def _type(form: dict[str, Any]) -> str:
    if "enum" in form:
        return " | ".join(map(str, form["enum"]))
    if form.get("type") == "array":
        items = form.get("items", {})
        kinds = " or ".join(_type(item) for item in items.get("anyOf", [items]))
        return f"list of {kinds}" if kinds else "list"
    if "$ref" in form:
        return "mapping"
    return str(form.get("const", form.get("type", "value")))


def _option_lines(options: dict[str, Any]) -> list[str]:
    lines = []
    for name, option in options.items():
        bounds = ", ".join(f"{_BOUNDS[key]} {value}" for key, value in option["bounds"].items())
        default = "required" if option["required"] else f"default {_shown(option['default'])}"
        facts = ", ".join(part for part in (option["type"], bounds, default) if part)
        lines.append(f"{name} ({facts}): {option['description']}")
    return lines


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
