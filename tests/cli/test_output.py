"""Results go to stdout even while a progress bar is drawn on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from treegraft.cli import output


def test_a_progress_bar_leaves_stdout_alone(monkeypatch, capsys):
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=80)
    monkeypatch.setattr(output, "stderr", lambda: console)
    with output.working("loading"):
        pass
    with output.progress("decoding", 2) as tick:
        print("result")
        tick()
    with output.progress("decoding", None) as tick:
        tick("anything a callback hands over")
    assert capsys.readouterr().out == "result\n"
    assert "decoding" in terminal.getvalue()


def test_no_bar_without_a_terminal(capsys):
    with output.progress("decoding", 1) as tick, output.working("loading"):
        tick()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
