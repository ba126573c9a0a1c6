"""Where output goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Ticker", "note", "print_json", "progress", "stderr", "stdout", "working"]

_WIDTH = 110
"""Columns where there is no terminal to ask."""


def stdout() -> Console:
    """For results. Made per call, because tests and users redirect ``sys.stdout``."""
    return _console(False)


def stderr() -> Console:
    """For progress, notes and errors."""
    return _console(True)


def _console(to_stderr: bool) -> Console:
    stream = sys.stderr if to_stderr else sys.stdout
    width = None if stream.isatty() else _WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def note(text: str) -> None:
    """One remark on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    """A result on stdout, as one JSON document."""
    json.dump(data, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


class Ticker:
    """Counts finished pieces of long work on a progress bar."""

    def __init__(self, bar: Progress, label: str, total: int | None) -> None:
        self._bar = bar
        self._task = bar.add_task(label, total=total)

    def __call__(self, _: object = None) -> None:
        """One more piece is done; takes and ignores what callbacks hand over."""
        self._bar.advance(self._task)


@contextmanager
def progress(label: str, total: int | None, shown: bool = True) -> Iterator[Ticker]:
    """A progress bar on stderr while the work inside runs; none if stderr is no terminal.

    ``total`` : pieces of work, or None if their number is not known. ``shown`` : False where the
    work itself writes to the terminal.
    """
    console = stderr()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
        # Or results would follow the bar to stderr.
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        yield Ticker(bar, label, total)


@contextmanager
def working(label: str) -> Iterator[None]:
    """Say on a terminal what is going on while nothing can be counted."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status(label):
        yield
