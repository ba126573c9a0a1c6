"""The ``treegraft`` command."""

from treegraft.cli.app import main, run

__all__ = ["main", "run"]
