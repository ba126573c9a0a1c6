"""``treegraft datastore``: build a store of one's own texts to draft from, and look at one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treegraft.cli.options import Json
from treegraft.cli.output import note, print_json, progress

if TYPE_CHECKING:
    from treegraft.backends.datastore import DatastoreHeader

__all__ = ["datastore"]

datastore = typer.Typer(
    help="Build a datastore of texts to draft from, or look at one.",
    add_completion=False,
    rich_markup_mode=None,
)

_MIB = 2**20


@datastore.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """Build a datastore of texts to draft from, or look at one."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@datastore.command()
def build(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES...",
            help="Text files, .jsonl files, or folders, searched with all below them.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str,
        typer.Option(
            "--target",
            "--tokenizer",
            help="Model whose tokenizer is used: zoo:NAME, a local folder, or a hub id. It must be "
            "the target that will be drafted for.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the datastore.")],
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="Of folders only names like this (*.py); repeat for more."),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            help="Key of a .jsonl line that holds the text; default turns, prompt, text or ids.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a datastore that is there.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn texts into a datastore to draft from.

    A file is one document; a line of .jsonl holds one (several with turns). Nothing stands under
    --out until all is done.
    """
    from treegraft.backends.hf import load_tokenizer
    from treegraft.core.errors import ConfigError
    from treegraft.corpus import FIELDS, build_datastore, find_files

    found = find_files(files, include or ())
    tokenizer, why = load_tokenizer(target)
    if tokenizer is None:
        raise ConfigError(f"--target {target!r} has no tokenizer: {why}")
    n_bytes = sum(file.path.stat().st_size for file in found)
    skipped: list[str] = []
    with progress("building (MiB)", 1 + n_bytes // _MIB) as tick:
        n_read = 0

        def on_bytes(n: int) -> None:
            nonlocal n_read
            for _ in range((n_read + n) // _MIB - n_read // _MIB):
                tick()
            n_read += n

        header = build_datastore(
            found,
            out,
            tokenizer,
            target,
            fields=field or FIELDS,
            force=force,
            on_bytes=on_bytes,
            on_skip=skipped.append,
        )
    if skipped:
        more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
        note(f"left out {len(skipped)} of {len(found)} files: {skipped[0]}{more}")
    if as_json:
        print_json({"path": str(out), **header.as_dict(), "skipped": skipped})
    else:
        print(_sentence(out, header))


@datastore.command()
def info(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the datastore.")],
    files: Annotated[
        bool, typer.Option("--files", help="List the files it was built from.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what a datastore holds, after checking that it can be used."""
    from treegraft.backends.datastore import open_datastore

    header = open_datastore(path).header
    n_bytes = sum(file.stat().st_size for file in path.expanduser().iterdir())
    if as_json:
        print_json({"path": str(path), "n_bytes": n_bytes, **header.as_dict()})
        return
    print(_sentence(path, header))
    print(f"  tokenizer   {header.tokenizer or 'unknown'}, {header.vocab_size} ids")
    print(f"  vocabulary  {header.vocabulary or 'unknown'} (SHA-256)")
    print(f"  matches     up to {header.order} tokens")
    print(f"  size        {n_bytes / _MIB:.1f} MiB")
    print(f"  written by  {header.created_by}, format version {header.version}")
    if files:
        for file in header.files:
            print(
                f"  {file.sha256[:12]}  {file.n_documents:>8} documents "
                f"{file.n_tokens:>10} tokens  {file.path}"
            )


def _sentence(path: Path, header: DatastoreHeader) -> str:
    return (
        f"{path}: {header.n_tokens} tokens in {header.n_documents} documents of "
        f"{len(header.files)} files"
    )
