"""A datastore on disk: the tokens of a corpus and their suffix array, both memory-mapped.

A folder of three files. ``tokens.npy`` holds the ids of all documents, each followed by the
separator ``vocab_size``; big-endian, so that comparing bytes compares tokens, and in 2 bytes where
that suffices, else 4. ``suffixes.npy`` (uint32) holds their places in suffix order.
``datastore.json`` is the header. Nothing depends on the time or the machine: the same corpus and
tokenizer give the same bytes.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from treegraft.core.corpus_index import CorpusIndex
from treegraft.core.errors import DatastoreError, UnsupportedModelError

__all__ = [
    "Datastore",
    "DatastoreHeader",
    "SourceFile",
    "check_tokenizer",
    "open_datastore",
]

FORMAT = "treegraft-datastore"
VERSION = 1
ORDER = 32
"""Tokens by which suffixes are sorted, hence the longest match."""

HEADER, TOKENS, SUFFIXES = "datastore.json", "tokens.npy", "suffixes.npy"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the corpus: its path as it was given, what it held, and its SHA-256 in hex."""

    path: str
    sha256: str
    n_bytes: int
    n_documents: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class DatastoreHeader:
    """What a datastore says about itself.

    Attributes
    ----------
    version, order : of the format; suffixes are sorted by ``order`` tokens.
    vocab_size : ids are 0..vocab_size-1; the separator of documents is vocab_size.
    tokenizer : the model whose tokenizer made the ids, as it was named; None if unknown.
    vocabulary : ``vocabulary.fingerprint`` of that tokenizer; None if there was none.
    n_documents, n_tokens : of the corpus, separators not counted.
    created_by : the treegraft that built it.
    files : where the documents came from.
    """

    version: int
    order: int
    vocab_size: int
    tokenizer: str | None
    vocabulary: str | None
    n_documents: int
    n_tokens: int
    created_by: str
    files: tuple[SourceFile, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as it stands in the file."""
        return {"format": FORMAT, **asdict(self)}


@final
class Datastore(CorpusIndex):
    """An open datastore. Oracle: a search of the documents one by one (tests)."""

    def __init__(
        self, header: DatastoreHeader, tokens: NDArray[Any], suffixes: NDArray[np.uint32]
    ) -> None:
        self.header = header
        self.vocab_size = header.vocab_size
        self.order = header.order
        # A view of class ndarray: indexing a memmap costs ten times as much.
        self._tokens = np.asarray(tokens)
        self._suffixes = np.asarray(suffixes)
        self._bytes = self._tokens.view(np.uint8).data
        self._places = self._suffixes.data

    def locate(self, tokens: Sequence[int]) -> range:
        if not 1 <= len(tokens) <= self.order:
            raise ValueError(f"1 to {self.order} tokens can be located, found {len(tokens)}")
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            return range(0)
        sought = np.array(tokens, dtype=self._tokens.dtype).tobytes()
        content, places = self._bytes, self._places
        size, n_bytes, n = self._tokens.itemsize, len(sought), len(places)

        def beginning(place: int) -> bytes:
            start = place * size
            return content[start : start + n_bytes].tobytes()

        low = bisect_left(places, sought, key=beginning)
        if low == n or beginning(places[low]) != sought:
            return range(0)
        # Most sequences are rare, so the end is looked for near the start.
        step = 1
        while low + step < n and beginning(places[low + step]) == sought:
            step *= 2
        end = min(low + step, n)
        return range(low, bisect_right(places, sought, low + step // 2, end, key=beginning))

    def following(self, ranks: NDArray[np.int64], skip: int, length: int) -> NDArray[np.int64]:
        starts = self._suffixes[ranks].astype(np.int64) + skip
        # The last token is a separator, so what would lie beyond it is cut with it.
        places = np.minimum(starts[:, None] + np.arange(length), self._tokens.shape[0] - 1)
        rows: NDArray[np.int64] = self._tokens[places].astype(np.int64)
        rows[np.logical_or.accumulate(rows == self.vocab_size, axis=1)] = -1
        return rows


def open_datastore(path: str | Path) -> Datastore:
    """Map a datastore into memory; what it holds is read when it is asked for.

    Raises DatastoreError if there is none, if it was written in another format or version, or if a
    file is missing, truncated or not what the header says.
    """
    folder = Path(path).expanduser()
    header = _read_header(folder, str(path))
    n = header.n_tokens + header.n_documents
    tokens = _load(folder, TOKENS, str(path), (n,), token_type(header.vocab_size))
    suffixes = _load(folder, SUFFIXES, str(path), (n,), np.dtype(np.uint32))
    if n == 0 or tokens[-1] != header.vocab_size:
        raise DatastoreError(
            f"datastore {str(path)!r} is damaged: {TOKENS} does not end with a separator; build "
            "it again"
        )
    return Datastore(header, tokens, suffixes)


def _read_header(folder: Path, name: str) -> DatastoreHeader:
    hint = "make one with: treegraft datastore build"
    try:
        raw = (folder / HEADER).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        what = f"the folder has no {HEADER}" if folder.is_dir() else "no such folder"
        raise DatastoreError(f"datastore {name!r}: {what}; {hint}") from None
    except OSError as error:
        raise DatastoreError(f"datastore {name!r} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a path that no file can have
        raise DatastoreError(f"datastore {name!r} cannot be read: {error}") from None
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        raise DatastoreError(f"datastore {name!r}: {HEADER} is no valid JSON; {hint}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise DatastoreError(f"datastore {name!r}: {HEADER} does not say {FORMAT!r}; {hint}")
    if data.get("version") != VERSION:
        raise DatastoreError(
            f"datastore {name!r} has format version {data.get('version')!r}, this treegraft reads "
            f"{VERSION}; build it again"
        )
    try:
        files = tuple(SourceFile(**entry) for entry in data["files"])
        known = {field.name: data[field.name] for field in fields(DatastoreHeader)}
        header = DatastoreHeader(**(known | {"files": files}))
        counts = (header.order, header.vocab_size, header.n_documents, header.n_tokens)
        texts = (header.tokenizer or "", header.vocabulary or "", header.created_by)
        # type and not isinstance: true is an int.
        sound = all(type(count) is int for count in counts) and all(
            isinstance(text, str) for text in texts
        )
        if not sound or header.order < 1 or header.vocab_size < 1 or min(counts) < 0:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise DatastoreError(
            f"datastore {name!r} is damaged: {HEADER} lacks what version {VERSION} has; build it "
            "again"
        ) from None
    return header


def _load(
    folder: Path, file: str, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(folder / file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DatastoreError(
            f"datastore {name!r} is damaged: {file} is missing; build it again"
        ) from None
    except OSError as error:
        raise DatastoreError(
            f"datastore {name!r}: {file} cannot be read: {error.strerror or error}"
        ) from None
    except (ValueError, EOFError):  # numpy's, for a file that ends early or is no array
        raise DatastoreError(
            f"datastore {name!r} is damaged: {file} is truncated or no array; build it again"
        ) from None
    if array.shape != shape or array.dtype != dtype:
        raise DatastoreError(
            f"datastore {name!r} is damaged: {file} should hold {dtype} {list(shape)}, found "
            f"{array.dtype} {list(array.shape)}; build it again"
        )
    return array


def token_type(vocab_size: int) -> np.dtype[Any]:
    """Big-endian, and wide enough for the separator."""
    return np.dtype(">u2" if vocab_size < 2**16 else ">u4")


def check_tokenizer(
    header: DatastoreHeader, path: str, target: str, vocabulary: str | None, vocab_size: int | None
) -> None:
    """UnsupportedModelError unless the ids of the datastore mean what the target's mean.

    Parameters
    ----------
    path, target : how the two are called in the message.
    vocabulary : ``vocabulary.fingerprint`` of the target's tokenizer, or None if it has none.
    vocab_size : width of the target's logits, asked where fingerprints cannot be compared; None if
        it is not known yet.
    """
    built = "" if header.tokenizer is None else f" of {header.tokenizer!r}"
    if header.vocabulary is not None and vocabulary is not None:
        if header.vocabulary != vocabulary:
            raise UnsupportedModelError(
                f"datastore {path!r} was built with the tokenizer{built} ({header.vocab_size} ids) "
                f"and target {target!r} has another one; build it again with --target {target}"
            )
    elif vocab_size is not None and vocab_size != header.vocab_size:
        raise UnsupportedModelError(
            f"datastore {path!r} has {header.vocab_size} token ids and target {target!r} has "
            f"{vocab_size}, and without both tokenizers nothing says that they mean the same; use "
            "a datastore with the target's vocabulary"
        )
