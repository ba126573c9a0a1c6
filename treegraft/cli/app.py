"""The command line: commands, and what becomes of their errors.

Exit codes: 0 done; 1 a check failed, or the output cannot be written (one line on stderr); 2 a
user's mistake (one line on stderr); 130 interrupted; 141 the reader of the output left early, as
``head`` does.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from treegraft import __version__
from treegraft.cli.bench import bench
from treegraft.cli.check import check
from treegraft.cli.compare import compare
from treegraft.cli.datastore import datastore
from treegraft.cli.demo import demo
from treegraft.cli.describe import components, describe, schema
from treegraft.cli.generate import generate
from treegraft.cli.output import OutputError, ReaderLeft, checked_output
from treegraft.cli.schedule import schedule
from treegraft.core.errors import TreegraftError

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name="treegraft",
    help="Decode faster and change nothing: several drafters grow one draft tree, one forward of "
    "the target verifies it.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _command in (demo, generate, compare, check, describe, components, schema):
    app.command()(_command)
app.add_typer(datastore, name="datastore")
app.add_typer(schedule, name="schedule")
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Decode faster and change nothing: several drafters grow one draft tree."""
    if version:
        print(__version__)
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())


# Command-line mistakes as typer raises them. Newer typers bring their own copy of click and export
# only this leaf of it, so the class that all of them share is found as its root.
_Mistake: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of the process) and return its exit code."""
    try:
        with checked_output():
            code = app(
                args=None if arguments is None else list(arguments),
                prog_name="treegraft",
                standalone_mode=False,
            )
    except TreegraftError as error:
        return _failed(str(error), 2)
    except _Mistake as error:
        return _failed(_with_value(error.format_message(), arguments), 2)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except ReaderLeft:
        return 141
    except OutputError as error:
        return _failed(str(error), 1)
    return code if isinstance(code, int) else 0


def _with_value(message: str, arguments: Sequence[str] | None) -> str:
    """The message with the value that the user gave to the option it names, unless it says so."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    head, found_colon, _ = message.partition(":")
    names = re.findall(r"'(-[^']+)'", head) if found_colon else []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        found = value if equals else following
        if name in names and repr(found) not in message:
            return f"{message}, found {found!r}"
    return message


def _failed(message: str, code: int) -> int:
    with suppress(OSError):  # nobody may be there to read it
        print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def main() -> None:
    """Entry point of the ``treegraft`` command."""
    # One's own classes are found where the command is run, as with ``python -m``; last in line, so
    # that no file there takes the place of an installed module.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    sys.exit(run())
