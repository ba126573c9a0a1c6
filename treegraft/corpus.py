"""Turns files of text into documents, and documents into a datastore."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from treegraft.backends.datastore import DatastoreHeader, SourceFile
from treegraft.backends.datastore_writer import DatastoreWriter
from treegraft.backends.vocabulary import fingerprint
from treegraft.core.errors import DatastoreError, PromptError
from treegraft.prompts import check_text, parse_json

__all__ = ["FIELDS", "CorpusFile", "build_datastore", "find_files"]

Document = str | tuple[int, ...]
"""Text, or token ids."""

FIELDS = ("turns", "prompt", "text", "ids")
"""Keys of a JSON line that hold a document, as in files of prompts; the first that is there."""
_PIECE = 2**18
"""Characters of a long text that are tokenised at a time; pieces end with a line."""
_BATCH = 2**20
"""Characters that are handed to the tokenizer together, so that it can use several cores."""


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """A file of the corpus.

    Attributes
    ----------
    path : as it was given, or found below a folder that was given.
    given : True if it was named itself. Such a file must be readable; one that was found in a
        folder is left out if it is not text.
    """

    path: Path
    given: bool


def find_files(paths: Sequence[str | Path], include: Sequence[str] = ()) -> list[CorpusFile]:
    """The files that ``paths`` name, each once, in a fixed order.

    Folders are searched with all below them, by name; what is hidden (``.git``) and links to
    folders are passed over. ``include``: of a folder only files whose name fits one of these
    patterns (``*.py``). DatastoreError if a path leads nowhere or nothing is found.
    """
    found: dict[str, CorpusFile] = {}
    for given in paths:
        path = Path(given).expanduser()
        # os.path and not Path, which raises for a name that is too long or may not be looked at.
        if os.path.isdir(path):
            for file in _below(path):
                if not include or any(fnmatchcase(file.name, pattern) for pattern in include):
                    found.setdefault(os.path.realpath(file), CorpusFile(file, given=False))
        elif os.path.exists(path):
            found.setdefault(os.path.realpath(path), CorpusFile(path, given=True))
        else:
            raise DatastoreError(f"corpus {str(given)!r}: no such file or folder")
    if not found:
        what = f"file like {', '.join(include)}" if include else "file"
        raise DatastoreError(f"corpus: no {what} in {', '.join(map(repr, map(str, paths)))}")
    return list(found.values())


def _below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DatastoreError(f"corpus {error.filename!r} cannot be read: {error.strerror}")

    for here, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(here, name)
            # Not sockets, pipes and links that lead nowhere.
            if not name.startswith(".") and path.is_file():
                yield path


def build_datastore(
    files: Sequence[CorpusFile],
    out: str | Path,
    tokenizer: Any,
    source: str | None = None,
    fields: Sequence[str] = FIELDS,
    force: bool = False,
    on_bytes: Callable[[int], None] | None = None,
    on_skip: Callable[[str], None] | None = None,
) -> DatastoreHeader:
    """Tokenise ``files`` and write them to the folder ``out`` as a datastore.

    A file is one document, taken as it stands but for a byte order mark. A ``.jsonl`` file holds
    one JSON object per line with one of ``fields``: text is a document, a list of texts (turns) is
    as many, and token ids (``ids``) are one. Special tokens are not added.

    Parameters
    ----------
    tokenizer : of the target, as transformers has them.
    source : the model that it belongs to, for the header.
    force : replace a datastore that is there.
    on_bytes : called with the number of bytes that were read since the last call.
    on_skip : called with one line for each file of a folder that is left out because it is no text.

    Raises
    ------
    DatastoreError : naming the file (and line), or what is wrong with ``out`` (before reading).
    """
    n_ids = 1 + max(tokenizer.get_vocab().values(), default=-1)
    kept: list[tuple[str, str, int]] = []
    with DatastoreWriter(out, n_ids, source, fingerprint(tokenizer), force) as writer:
        feed = _Feed(tokenizer, writer)
        for file in files:
            try:
                raw, documents = _read(file.path, fields)
            except DatastoreError as error:
                if file.given:
                    raise
                if on_skip is not None:
                    on_skip(str(error))
                continue
            kept.append((str(file.path), hashlib.sha256(raw).hexdigest(), len(raw)))
            feed.begin(str(file.path))
            n_units, n_done, n_told = sum(map(len, documents)), 0, 0
            for document in documents:
                for piece, ends in _pieces(document):
                    feed.add(piece, ends)
                    n_done += len(piece)
                    # Of the file, as much as the pieces are of its documents.
                    n_read = len(raw) * n_done // max(1, n_units)
                    if on_bytes is not None:
                        on_bytes(n_read - n_told)
                    n_told = n_read
        feed.flush()
        return writer.finish(
            [SourceFile(*entry, *counts) for entry, counts in zip(kept, feed.counts, strict=True)]
        )


class _Feed:
    """Tokenises pieces in batches and hands them to the writer, with counts for each file."""

    def __init__(self, tokenizer: Any, writer: DatastoreWriter) -> None:
        self._tokenizer = tokenizer
        self._writer = writer
        self._files: list[str] = []
        self._waiting: list[tuple[int, Document, bool]] = []
        self._n_waiting = 0
        self.counts: list[list[int]] = []
        """Documents and tokens of each file."""

    def begin(self, file: str) -> None:
        self._files.append(file)
        self.counts.append([0, 0])

    def add(self, piece: Document, ends: bool) -> None:
        self._waiting.append((len(self._files) - 1, piece, ends))
        self._n_waiting += len(piece)
        if self._n_waiting >= _BATCH:
            self.flush()

    def flush(self) -> None:
        texts = [piece for _, piece, _ in self._waiting if isinstance(piece, str)]
        ids = iter(self._ids(texts))
        for file, piece, ends in self._waiting:
            n_documents, n_tokens = self._writer.n_documents, self._writer.n_tokens
            try:
                self._writer.add(next(ids) if isinstance(piece, str) else piece, ends)
            except DatastoreError as error:
                raise DatastoreError(f"corpus {self._files[file]!r}: {error}") from None
            self.counts[file][0] += self._writer.n_documents - n_documents
            self.counts[file][1] += self._writer.n_tokens - n_tokens
        self._waiting.clear()
        self._n_waiting = 0

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        # verbose: a text longer than the model's context is no fault here.
        encoded = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids


def _pieces(document: Document) -> Iterator[tuple[Document, bool]]:
    """The parts in which a document is tokenised, and whether it ends with each."""
    start = 0
    while isinstance(document, str) and len(document) - start > _PIECE:
        end = document.find("\n", start + _PIECE) + 1
        if not 0 < end < len(document):
            break
        yield document[start:end], False
        start = end
    yield document[start:], True


def _read(path: Path, fields: Sequence[str]) -> tuple[bytes, list[Document]]:
    """The bytes of a file and the documents that they hold; DatastoreError names file and line."""
    name = f"corpus {str(path)!r}"
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise DatastoreError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DatastoreError(f"{name} is not a text file in UTF-8") from None
    if "\0" in text:
        raise DatastoreError(f"{name} is not a text file: it holds NUL characters")
    if path.suffix.lower() != ".jsonl":
        return raw, [text] if text else []
    documents: list[Document] = []
    # Only "\n" ends a line of JSON; splitlines would also cut at what strings may hold raw.
    for n, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{name} line {n}"
            try:
                documents += _documents(parse_json(line, where), fields, where)
            except PromptError as error:
                raise DatastoreError(str(error)) from None
    return raw, documents


def _documents(entry: Any, fields: Sequence[str], where: str) -> list[Document]:
    if not isinstance(entry, dict):
        raise DatastoreError(f"{where}: an object is needed, found {type(entry).__name__}")
    field = next((field for field in fields if field in entry), None)
    if field is None:
        raise DatastoreError(
            f"{where}: one of the keys {', '.join(fields)} is needed, found "
            f"{', '.join(map(str, entry)) or 'none'}"
        )
    content = entry[field]
    if isinstance(content, str):
        return [check_text(content, f"{where}: {field}")]
    if isinstance(content, list) and all(isinstance(text, str) for text in content):
        return [check_text(text, f"{where}: {field}") for text in content]
    if isinstance(content, list) and all(type(i) is int and i >= 0 for i in content):
        return [tuple(content)]
    raise DatastoreError(
        f"{where}: {field} must be text, a list of texts, or a list of token ids from 0, found "
        f"{type(content).__name__}"
    )
