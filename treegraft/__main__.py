"""``python -m treegraft`` is ``treegraft``."""

from treegraft.cli import main

main()
