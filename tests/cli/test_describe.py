"""``describe``, ``components`` and ``schema``: nothing is loaded, everything is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from treegraft import parse_config
from treegraft.config import load_variants

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").glob("*.yaml"))
EXAMPLES = [file for file in FILES if load_variants(file) is None]
MANY = [file for file in FILES if file not in EXAMPLES]  # for compare


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_sound(treegraft, monkeypatch, example):
    monkeypatch.syspath_prepend(str(ROOT))
    result = treegraft("describe", "-c", example)
    assert result.code == 0, result.err
    assert result.out.startswith("pipeline\n")
    assert "flowchart LR" in result.out


@pytest.mark.parametrize("example", MANY, ids=lambda path: path.stem)
def test_every_example_of_many_configs_is_sound(example):
    variants = load_variants(example)
    assert len({config.model_dump_json() for config in variants.values()}) == len(variants)
    drafters = [config.drafters for config in variants.values() if config.drafters]
    assert all(same == drafters[0] for same in drafters)


def test_there_is_an_example_for_every_role(treegraft):
    assert {path.stem for path in EXAMPLES} >= {
        *("zoo", "plain", "never", "always", "mixed", "sampled", "own_policy", "paper"),
        "calibrated",
    }
    data = yaml.safe_load((ROOT / "examples" / "zoo.yaml").read_text())
    assert set(data) == set(treegraft("schema").json["properties"])


def test_forms_of_the_description(treegraft):
    file = ROOT / "examples" / "mixed.yaml"
    tree = treegraft("describe", "-c", file, "--tree").out
    mermaid = treegraft("describe", "-c", file, "--mermaid").out
    assert "flowchart" not in tree
    assert mermaid.startswith("flowchart LR\n")
    assert treegraft("describe", "-c", file).out == tree + "\n" + mermaid
    data = treegraft("describe", "-c", file, "--json").json
    assert {node["role"] for node in data["nodes"]} >= {"target", "drafter", "scheduler"}
    assert {"from", "to", "flow", "feedback"} == set(data["edges"][0])
    assert data["config"]["builder"]["depth"] == 4


def test_a_resolved_config_is_a_config(treegraft):
    file = ROOT / "examples" / "sampled.yaml"
    text = treegraft("describe", "-c", file, "--resolved").out
    original = parse_config(yaml.safe_load(file.read_text()))
    assert parse_config(yaml.safe_load(text)) == original


def test_a_class_that_is_not_there_is_named(treegraft, write):
    file = write(
        "c.yaml", "target: {model: m}\ndrafters: [{kind: ngram}]\ngraft: {kind: 'nowhere:C'}\n"
    )
    result = treegraft("describe", "-c", file)
    assert result.code == 2
    assert "graft.kind 'nowhere:C' cannot be imported" in result.err


def test_components_list_every_option(treegraft):
    data = treegraft("components", "--json").json
    assert list(data["roles"]) == ["drafter", "builder", "graft", "scheduler", "verifier"]
    budget = data["roles"]["builder"]["kinds"]["layered"]["options"]["budget"]
    assert budget["default"] == 63
    assert budget["bounds"] == {"minimum": 0, "maximum": 1023}
    assert budget["description"]
    assert budget["type"] == "integer or auto"
    assert data["roles"]["drafter"]["kinds"]["lm"]["options"]["model"]["required"] is True
    assert data["settings"]["backend"]["options"]["kind"]["type"] == "tensor | reference"
    printed = treegraft("components").out
    assert "budget (integer or auto, >= 0, <= 1023, default 63): " in printed
    assert "top_p (number, > 0.0, <= 1.0, default null): " in printed


def test_the_schema_is_that_of_the_config(treegraft):
    assert treegraft("schema").json == treegraft("schema", "--json").json
    assert "drafters" in treegraft("schema").json["properties"]
