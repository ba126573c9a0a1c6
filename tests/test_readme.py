"""What the README promises: its commands, its config, its policy of one's own, its links."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from table_models import hashed_model, mixed_model

from treegraft.backends.reference import plain_tokens
from treegraft.composition import component_graph
from treegraft.config import parse_config
from treegraft.core.sampling import Sampling
from treegraft.pipeline import build_pipeline

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_readme_starts_with_the_two_commands_that_ci_runs() -> None:
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv ")]
    assert len(commands) == 2
    assert blocks("bash")[0].splitlines() == commands
    assert commands[0].endswith("treegraft demo")
    assert commands[1].endswith("-m pytest")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "'^python3 -m venv ' README.md" in script


def test_the_config_that_is_explained_is_valid() -> None:
    config = parse_config(yaml.safe_load(blocks("yaml")[0]))
    assert config.drafter_names == ("ngram", "small")
    component_graph(config)


def test_the_policy_of_ones_own_runs_and_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = next(block for block in blocks("python") if "class FrontierGraft" in block)
    assert len(source.splitlines()) <= 30
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "my_lab" / "grafts.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    # Another test's module of this name may be loaded, and this one must not stay behind for it.
    for name in ("my_lab", "my_lab.grafts"):
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.delitem(sys.modules, name)
    graft = yaml.safe_load(blocks("yaml")[1])["graft"]
    target = hashed_model(30, seed=1)
    drafter = mixed_model(target, hashed_model(30, seed=2), share=0.3)
    config = parse_config(
        {
            "target": {"model": "target"},
            "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "drafter"}],
            "builder": {"kind": "layered", "depth": 3, "width": 3, "budget": 12},
            "graft": graft,
            "scheduler": {"kind": "fixed", "calls": ["drafter", "ngram", "drafter"]},
            "stop": {"max_new_tokens": 40},
        }
    )
    pipeline = build_pipeline(config, models={"target": target, "drafter": drafter})
    result = pipeline.generate([1, 2, 3])
    assert result.tokens == plain_tokens(target.logits, [1, 2, 3], 40, Sampling())
    assert result.statistics.mean_accepted_length > 1.5


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    for page in (ROOT / "docs").rglob("*.md"):
        inside = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8"))
        links += [str((page.parent / link).relative_to(ROOT)) for link in inside]
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_files_that_the_readme_names_exist() -> None:
    named = re.findall(r"(?:-c |compare )?(examples/[\w.]+|docs/[\w./]+)", README)
    assert [name for name in named if not (ROOT / name).exists()] == []
