"""Where output goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = [
    "OutputError",
    "ReaderLeft",
    "Ticker",
    "checked_output",
    "line_file",
    "note",
    "print_json",
    "progress",
    "stderr",
    "stdout",
    "working",
]

_WIDTH = 110
"""Columns where there is no terminal to ask."""


class OutputError(Exception):
    """stdout or stderr cannot take what is written; one line says why."""


class ReaderLeft(OutputError):
    """Whoever read our output has left, as ``head`` does."""


class _Checked:
    """A stream whose errors are ``OutputError``.

    As errors of the system, typer and rich would each end the process in their own way, and
    nothing would tell them from the errors of a file that is read.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._failure: OutputError | None = None

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._stream, attribute)

    def write(self, text: str) -> int:
        with self._named():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._named():
            self._stream.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        # Once failed it stays failed: typer tries streams out and swallows what they raise.
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except OSError as error:
            self._silence()
            if isinstance(error, BrokenPipeError):
                self._failure = ReaderLeft(f"the reader of {self._name} has left")
            else:
                self._failure = OutputError(f"{self._name} cannot be written: {error.strerror}")
            raise self._failure from None
        except UnicodeEncodeError as error:
            raise OutputError(
                f"{self._name} in {error.encoding} cannot hold {error.object[error.start]!a}; "
                "set PYTHONIOENCODING=utf-8"
            ) from None

    def _silence(self) -> None:
        """Let what is still in the buffer go nowhere, or Python would complain on exit."""
        with suppress(OSError, ValueError):  # a stream without a file has no buffer to lose
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def checked_output() -> Iterator[None]:
    """Inside, writing to stdout and stderr raises ``OutputError`` where it fails."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Checked(out, "stdout"), _Checked(err, "stderr")
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = out, err


@contextmanager
def line_file(path: Path, option: str, inputs: Sequence[Path | None]) -> Iterator[TextIO]:
    """A text file to write to, checked at once and emptied by the first ``truncate``.

    Until then it is left as it was, so that a command that fails before it has anything to write
    costs nobody an older file; one that would be new is then removed. ``option`` is how the user
    named it; ``inputs`` are files that the command reads. ConfigError if it is one of them or
    cannot be written.
    """
    from treegraft.core.errors import ConfigError

    if str(path) == "-":
        raise ConfigError(f"{option} needs a file, found '-'")
    old = path.exists()
    for source in inputs:
        if old and source is not None and source.exists() and path.samefile(source):
            raise ConfigError(f"{option} {str(path)!r} is a file that this command reads")
    try:
        file = path.open("a", encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} {str(path)!r} cannot be written: {why}") from None
    try:
        with file:
            yield cast(TextIO, _Checked(file, f"{option} {str(path)!r}"))
    finally:
        if not old and path.is_file() and not path.stat().st_size:
            path.unlink()


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

    def piece(self, name: str, done: int, total: int) -> None:
        """``done`` of ``total`` pieces of compiling ``name`` are done."""
        label = f"compiling {name}" if done < total else "loading models"
        known = total if done < total else None
        self._bar.update(self._task, description=label, completed=done, total=known)


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
def loading(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while models are loaded, of unknown length until one is compiled.

    Yields what ``build_pipeline`` takes as ``on_compile``.
    """
    with progress(label, None) as tick:
        yield tick.piece


@contextmanager
def working(label: str) -> Iterator[Callable[[str], None]]:
    """Say on a terminal what is going on while nothing can be counted; yields what changes it."""
    console = stderr()
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(label) as status:
        yield lambda text: status.update(escape(text))
