"""Writes a datastore: whole, or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from treegraft.backends.datastore import (
    HEADER,
    ORDER,
    SUFFIXES,
    TOKENS,
    VERSION,
    DatastoreHeader,
    SourceFile,
    token_type,
)
from treegraft.backends.suffix_array import suffix_array
from treegraft.core.errors import DatastoreError

__all__ = ["DatastoreWriter"]

_MOST = 2**32 - 1


@final
class DatastoreWriter:
    """Writes a datastore beside its place and moves it there when it is finished.

    Used as a context manager: what leaves it unfinished, an interrupt too, leaves nothing under
    the final name, and what stood there before as it was.

    Parameters
    ----------
    out : the folder to make. One that is not empty is replaced only with ``force``, and only if
        it holds a datastore.
    vocab_size : number of token ids.
    tokenizer, vocabulary : see ``DatastoreHeader``.

    Raises
    ------
    DatastoreError : on entering, if ``out`` cannot be written; later for ids out of range, an
        empty corpus, or a file system that refuses.
    """

    def __init__(
        self,
        out: str | Path,
        vocab_size: int,
        tokenizer: str | None = None,
        vocabulary: str | None = None,
        force: bool = False,
    ) -> None:
        self._name = str(out)
        self._out = Path(os.path.realpath(Path(out).expanduser()))
        self._force = force
        self._vocab_size = vocab_size
        self._origin = (tokenizer, vocabulary)
        self._type = token_type(vocab_size)
        self._separator = np.array([vocab_size], dtype=self._type)
        self._parts: list[NDArray[Any]] = []
        self._open = False
        self._n_documents = 0
        self._n_tokens = 0
        mark = f"{self._out.name}.{secrets.token_hex(4)}"
        self._stage = self._out.with_name(f".{mark}.partial")
        self._aside = self._out.with_name(f".{mark}.replaced")

    def __enter__(self) -> Self:
        self._check_place()
        if self._vocab_size < 1:
            raise DatastoreError(f"a datastore needs token ids, found {self._vocab_size}")
        try:
            self._stage.mkdir()
        except OSError as error:
            raise self._unwritable(error) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._stage, ignore_errors=True)

    @property
    def n_tokens(self) -> int:
        """Tokens taken so far, separators not counted."""
        return self._n_tokens

    @property
    def n_documents(self) -> int:
        """Documents ended so far."""
        return self._n_documents

    def add(self, tokens: Sequence[int], ends: bool = True) -> None:
        """Append ids to the current document, which ``ends`` with them or goes on.

        A document that ends without any token is none.
        """
        if len(tokens):
            ids = np.asarray(tokens, dtype=np.int64)
            if ids.min() < 0 or ids.max() >= self._vocab_size:
                wrong = ids[(ids < 0) | (ids >= self._vocab_size)][0]
                raise DatastoreError(
                    f"token ids must be in 0..{self._vocab_size - 1}, found {wrong}"
                )
            self._parts.append(ids.astype(self._type))
            self._n_tokens += ids.shape[0]
            self._open = True
        if ends and self._open:
            self._parts.append(self._separator)
            self._n_documents += 1
            self._open = False
        if self._n_tokens + self._n_documents > _MOST:
            raise DatastoreError(
                f"a datastore holds at most {_MOST} tokens; build several from parts of the corpus"
            )

    def finish(self, files: Sequence[SourceFile] = ()) -> DatastoreHeader:
        """Sort, write, and move the datastore to its place."""
        self.add((), ends=True)
        if not self._n_documents:
            raise DatastoreError("the corpus is empty: no file holds a token")
        # Without the type numpy makes the result native.
        tokens = np.concatenate(self._parts, dtype=self._type)
        self._parts.clear()
        header = DatastoreHeader(
            VERSION,
            ORDER,
            self._vocab_size,
            *self._origin,
            self._n_documents,
            self._n_tokens,
            f"treegraft {_version()}",
            tuple(files),
        )
        suffixes = suffix_array(tokens.astype(np.uint32), ORDER).astype(np.uint32)
        try:
            _save(self._stage / TOKENS, tokens)
            _save(self._stage / SUFFIXES, suffixes)
            with (self._stage / HEADER).open("w", encoding="utf-8") as file:
                json.dump(header.as_dict(), file, indent=1)
                file.write("\n")
                _sync(file)
            self._move()
        except OSError as error:
            raise self._unwritable(error) from None
        return header

    def _move(self) -> None:
        # Again: it may have changed while the corpus was read.
        self._check_place()
        if not _is_datastore(self._out):
            self._stage.rename(self._out)  # over an empty folder, or over nothing
            return
        # No system call that Python has replaces a folder that is not empty.
        try:
            self._out.rename(self._aside)
            self._stage.rename(self._out)
        except BaseException:
            if self._aside.exists() and not self._out.exists():
                self._aside.rename(self._out)
            raise
        shutil.rmtree(self._aside, ignore_errors=True)

    def _check_place(self) -> None:
        if not os.path.isdir(self._out.parent):
            raise DatastoreError(
                f"datastore {self._name!r} cannot be written: the folder "
                f"{str(self._out.parent)!r} does not exist"
            )
        try:
            free = not os.path.lexists(self._out) or _is_empty(self._out)
            replaceable = free or _is_datastore(self._out)
        except OSError as error:
            raise self._unwritable(error) from None
        if not replaceable:
            raise DatastoreError(
                f"{self._name!r} is there already and is no datastore, or not only one; name "
                "another folder"
            )
        if not free and not self._force:
            raise DatastoreError(
                f"datastore {self._name!r} is there already; replace it with --force"
            )

    def _unwritable(self, error: OSError) -> DatastoreError:
        return DatastoreError(
            f"datastore {self._name!r} cannot be written: {error.strerror or error}"
        )


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _is_datastore(folder: Path) -> bool:
    """Whether it holds a datastore and nothing that would be lost with it."""
    if not (folder / HEADER).is_file():
        return False
    return {file.name for file in folder.iterdir()} <= {HEADER, TOKENS, SUFFIXES}


def _save(path: Path, array: NDArray[Any]) -> None:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)
        _sync(file)


def _sync(file: Any) -> None:
    """To the disk, so that the name never stands for less than the whole after a power cut."""
    file.flush()
    with suppress(OSError):  # some file systems cannot
        os.fsync(file.fileno())


def _version() -> str:
    try:
        return version("treegraft")
    except PackageNotFoundError:  # run from its sources
        return "unknown"
