"""The import law (docs/): who may import whom, by reading the sources, and what an import costs.

Imports inside functions count as well: they hide a dependency, they don't remove it.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import treegraft

ROOT = Path(treegraft.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

# Room -> the rooms it may import from, besides itself. A room is a package or a module.
LAW: dict[str, set[str]] = {
    "core": set(),
    "text": set(),
    "policies": {"core"},
    "backends": {"core"},
    "fallback": set(),
    "parts": {"core", "fallback"},
    "drafting": {"core", "parts"},
    "decoding": {"core", "parts", "drafting"},
    "prompts": {"core", "zoo"},
    "zoo": {"core"},
    "corpus": {"core", "backends", "prompts"},
    "config": {"core", "policies"},
    "components": {"core", "policies", "config"},
    "composition": {"core", "config", "components"},
    "loading": {"core", "backends", "config"},
    "pipeline": {
        "core", "backends", "policies", "config", "components", "composition", "fallback", "parts",
        "drafting", "decoding", "loading", "builder", "scheduler", "text",
    },
    "signature": {"core", "backends", "config"},
    "builder": {"core", "backends", "policies", "config"},
    "scheduler": {"core", "backends", "policies", "config", "components", "signature"},
}  # fmt: skip
ON_TOP = {"scheduling", "bench", "cli", "trace", "__main__", "__init__"}
"""Rooms that may import everything; nobody below imports them."""

# The zoo's files are found by name like any model's.
EXCEPTIONS = {
    ("treegraft.backends.sources", "treegraft.zoo.catalog"),
    ("treegraft.backends.artefact", "treegraft.zoo.catalog"),
}

# Room -> what it may import from outside the standard library.
OUTSIDE: dict[str, set[str]] = {
    "core": {"torch", "numpy"},
    "text": set(),
    "policies": {"torch", "numpy", "pydantic"},
    "backends": {"torch", "numpy"},
    "fallback": set(),
    "parts": set(),
    "drafting": {"torch", "numpy"},
    "decoding": {"torch", "numpy"},
    "signature": {"pydantic", "pydantic_core"},
    "scheduler": {"numpy"},
    "builder": {"numpy"},
    "prompts": set(),
    "corpus": set(),
    "config": {"pydantic", "yaml"},
    "components": {"pydantic"},
    "composition": {"pydantic", "networkx"},
    "loading": set(),
    "pipeline": {"torch", "networkx"},
}
OUTSIDE_OF_MODULE = {
    "treegraft.backends.reference": {"networkx"},
    "treegraft.backends.artefact": {"safetensors"},
    "treegraft.backends.kv": {"transformers"},
    "treegraft.backends.head": {"transformers", "safetensors"},
    "treegraft.backends.hf": {"transformers"},
    "treegraft.backends.processors": {"transformers"},
}


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def for_type_checkers_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not for_type_checkers_only(child):
            yield child
            yield from statements(child)


def imports(module: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(imported module, imported names) of every import statement."""
    for node in statements(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; name the module"
            names = tuple(alias.name for alias in node.names)
            whole = [name for name in names if f"{node.module}.{name}" in MODULES]
            yield from ((f"{node.module}.{name}", ()) for name in whole)
            if len(whole) < len(names):
                yield str(node.module), names


def inner(module: str) -> set[str]:
    return {name for name, _ in imports(module) if name.split(".")[0] == "treegraft"}


def outer(module: str) -> set[str]:
    tops = {name.split(".")[0] for name, _ in imports(module)}
    return tops - {"treegraft"} - set(sys.stdlib_module_names)


def test_every_module_stands_in_a_known_room() -> None:
    assert {room(module) for module in MODULES} <= set(LAW) | ON_TOP


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) in LAW])
def test_a_module_imports_only_rooms_that_it_may(module: str) -> None:
    allowed = LAW[room(module)] | {room(module)}
    wrong = {
        name
        for name in inner(module)
        if room(name) not in allowed and (module, name) not in EXCEPTIONS
    }
    assert not wrong, f"{module} must not import {sorted(wrong)}"


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) in OUTSIDE])
def test_a_module_imports_only_packages_that_it_may(module: str) -> None:
    allowed = OUTSIDE[room(module)] | OUTSIDE_OF_MODULE.get(module, set())
    wrong = outer(module) - allowed
    assert not wrong, f"{module} must not import {sorted(wrong)}"


def test_the_config_takes_config_classes_from_the_policies_and_nothing_else() -> None:
    taken = [
        name
        for module, names in imports("treegraft.config.pipeline")
        if room(module) == "policies"
        for name in names
    ]
    assert taken
    assert all(name.endswith("Config") for name in taken)


def test_imports_have_no_cycle() -> None:
    graph = nx.DiGraph(
        (module, name) for module in MODULES for name in inner(module) if name in MODULES
    )
    cycles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert cycles == []


def test_the_law_is_checked_against_real_edges() -> None:
    """The walk sees what is there: imports at the top, in functions, and of submodules."""
    assert "treegraft.core.roles" in inner("treegraft.pipeline")
    assert "treegraft.backends.hf" in inner("treegraft.loading")
    assert outer("treegraft.backends.reference") == {"networkx", "numpy", "torch"}


PROBE = """
import json, logging, random, sys, time, warnings
before = (len(warnings.filters), logging.root.handlers[:], random.getstate(), sys.path[:])
started = time.perf_counter()
import treegraft
seconds = time.perf_counter() - started
after = (len(warnings.filters), logging.root.handlers[:], random.getstate(), sys.path[:])
heavy = sorted({"torch", "transformers", "numpy", "networkx", "pydantic"} & set(sys.modules))
print(json.dumps([seconds, heavy, before == after, sorted(treegraft.__all__)]))
"""


def test_import_treegraft_is_quick_and_changes_nothing() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    assert found.stderr == ""
    seconds, heavy, unchanged, names = json.loads(found.stdout)
    assert seconds < 1.0
    assert heavy == []
    assert unchanged
    assert "build_pipeline" in names


CONFIG_PROBE = """
import sys
import torch
state = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
         torch.random.get_rng_state().sum().item(), torch.get_float32_matmul_precision())
import treegraft.pipeline
assert state == (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
                 torch.random.get_rng_state().sum().item(), torch.get_float32_matmul_precision())
assert "transformers" not in sys.modules
assert not torch.cuda.is_initialized()
"""


def test_the_pipeline_module_neither_needs_transformers_nor_touches_torch() -> None:
    subprocess.run([sys.executable, "-c", CONFIG_PROBE], check=True, cwd=ROOT.parent)


def test_every_public_name_is_found_in_its_home() -> None:
    for name in treegraft.__all__:
        assert getattr(treegraft, name).__name__ == name
    assert set(treegraft.__all__) <= set(dir(treegraft))
    with pytest.raises(AttributeError, match="module 'treegraft' has no attribute 'nothing'"):
        treegraft.nothing  # noqa: B018


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "py.typed").is_file()
