"""The dry run of scripts/gpu_check.py: every section runs or says why it cannot."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import typer

import treegraft

SCRIPT = Path(treegraft.__file__).parents[1] / "scripts" / "gpu_check.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="scripts are not installed")


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def run(script, capsys, **options):
    settings = {"dry_run": True, "minutes": 5.0, "backend": None, "device": "cuda"}
    script.main(**settings | options, as_json=True)
    return json.loads(capsys.readouterr().out)


def test_the_dry_run_goes_through_every_section(script, capsys, monkeypatch):
    monkeypatch.setattr(script, "TREES", {8: (1, 7), 16: (3, 5)})
    monkeypatch.setattr(script, "ACCEPTANCES", (0.8,))
    rows = run(script, capsys)["rows"]
    by_section = {row["section"]: row for row in rows}
    assert list(by_section) == ["equality", "verify", "speed", "syncs", "graphs"]
    assert {row["state"] for row in rows} == {"ok", "not available: no CUDA device"}
    equality = [row for row in rows if row["section"] == "equality"]
    assert [row["values"]["dtype"] for row in equality] == ["float32", "bfloat16"]
    verify = [row for row in rows if row["section"] == "verify"]
    assert [row["values"]["n"] for row in verify] == 2 * [1, 8, 16, 32, 64]
    speed = [row["figure"] for row in rows if row["section"] == "speed"]
    assert len(speed) == 4
    assert all("equal" in figure for figure in speed)


def test_what_goes_wrong_in_a_section_is_a_row_and_an_exit_code(script, capsys, monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(script, "verify_cost", broken)
    monkeypatch.setattr(script, "plain_against_tree", lambda *_: None)
    monkeypatch.setattr(script, "equality", lambda plan: None)
    with pytest.raises(typer.Exit) as caught:
        run(script, capsys)
    assert caught.value.exit_code == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert "FAILED: RuntimeError: no kernel for this" in {row["state"] for row in rows}
    assert rows[-1]["case"] == "8B", "the next size is measured all the same"


def test_a_wrong_token_is_a_fault(script, capsys, monkeypatch):
    monkeypatch.setattr(script, "equality", lambda plan: None)
    monkeypatch.setattr(script, "verify_cost", lambda *_: None)
    monkeypatch.setattr(script, "TREES", {8: (1, 7)})
    monkeypatch.setattr(script, "first_difference", lambda expected, found: 2)
    with pytest.raises(typer.Exit):
        run(script, capsys)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert "FAULT" in {row["state"] for row in rows if row["section"] == "speed"}


def test_no_section_begins_after_the_time(script, capsys):
    rows = run(script, capsys, minutes=0.0)["rows"]
    assert {row["state"] for row in rows} == {"skipped: time is up"}


def test_without_a_gpu_only_the_dry_run_runs(script, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(typer.BadParameter, match="--dry-run runs on the CPU"):
        run(script, capsys, dry_run=False)


def test_backend_options_are_read_as_what_they_say(script):
    options = [script._option(t) for t in ("compile=on", "buckets=true", "level=3")]
    assert options == [("compile", "on"), ("buckets", True), ("level", 3)]
    with pytest.raises(typer.BadParameter, match="OPTION=VALUE, found 'compile'"):
        script._option("compile")


def test_captures_and_replays_are_counted_and_torch_is_left_alone(script, monkeypatch):
    class Graph:
        def replay(self):
            return "replayed"

        def capture_end(self):
            return "captured"

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    replay = Graph.replay
    with script.counted_graphs() as counts:
        graph = Graph()
        assert graph.capture_end() == "captured"
        assert [graph.replay() for _ in range(3)] == ["replayed"] * 3
    assert counts == {"captures": 1, "replays": 3}
    assert Graph.replay is replay
