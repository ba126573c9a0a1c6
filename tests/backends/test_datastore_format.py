"""Datastores on disk: written whole or not at all, opened as they are or refused in one line."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from listed_corpus import ListedCorpus

from treegraft.backends import datastore_writer as module
from treegraft.backends.datastore import (
    Datastore,
    SourceFile,
    check_tokenizer,
    open_datastore,
)
from treegraft.backends.datastore_writer import DatastoreWriter
from treegraft.backends.vocabulary import fingerprint
from treegraft.core.errors import DatastoreError, UnsupportedModelError

V = 9


def made(
    out: Path, documents: Iterable[Sequence[int]], vocab_size: int = V, **options: Any
) -> Datastore:
    with DatastoreWriter(out, vocab_size, **options) as writer:
        for document in documents:
            writer.add(document)
        writer.finish()
    return open_datastore(out)


def continuations(store: Datastore, tokens: Sequence[int], length: int) -> list[list[int]]:
    ranks = store.locate(tokens)
    rows = store.following(np.array(ranks, dtype=np.int64), len(tokens), length).tolist()
    return sorted([token for token in row if token >= 0] for row in rows)


# --- the story ------------------------------------------------------------------------------------


def test_what_was_written_is_found(tmp_path: Path) -> None:
    store = made(tmp_path / "s", [[1, 2, 3, 4], [0, 2, 3, 5, 6]])
    assert continuations(store, [2, 3], 2) == [[4], [5, 6]]
    assert continuations(store, [7], 2) == []
    assert (store.header.n_documents, store.header.n_tokens) == (2, 9)


def test_no_match_and_no_continuation_crosses_a_document(tmp_path: Path) -> None:
    store = made(tmp_path / "s", [[1, 2], [3, 4]])
    assert continuations(store, [2], 3) == [[]]
    assert continuations(store, [2, 3], 1) == []
    assert continuations(store, [V], 1) == [], "the separator is no token"


# --- the property ---------------------------------------------------------------------------------


@given(
    documents=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=6
    ),
    queries=st.lists(st.lists(st.integers(-1, 4), min_size=1, max_size=6), max_size=8),
    vocab_size=st.sampled_from([4, 2**16 - 1, 2**16, 150_000]),
    length=st.integers(1, 5),
)
def test_it_finds_what_a_search_of_every_suffix_finds(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    queries: list[list[int]],
    vocab_size: int,
    length: int,
) -> None:
    top = vocab_size - 4  # ids that need every byte
    documents = [[token + top for token in document] for document in documents]
    store = made(tmp_path_factory.mktemp("stores") / "s", documents, vocab_size)
    oracle = ListedCorpus(documents, vocab_size)
    assert oracle.order == store.order
    for query in queries:
        tokens = [token + top for token in query]
        assert store.locate(tokens) == oracle.locate(tokens)
        ranks = np.array(store.locate(tokens), dtype=np.int64)
        for skip in (0, len(tokens)):
            expected = oracle.following(ranks, skip, length)
            assert store.following(ranks, skip, length).tolist() == expected.tolist()


@pytest.mark.parametrize("n_copies", [1, 2, 3, 7, 8, 9, 33])
def test_every_occurrence_is_counted(tmp_path: Path, n_copies: int) -> None:
    """The end of a range is looked for in growing steps: none may be stepped over."""
    store = made(tmp_path / "s", [[1, 2, 3]] * n_copies + [[1, 2, 4]] * 2 + [[0]])
    assert len(store.locate([1, 2, 3])) == n_copies
    assert len(store.locate([1, 2])) == n_copies + 2
    assert len(store.locate([4])) == 2


def test_the_same_corpus_gives_the_same_bytes(tmp_path: Path) -> None:
    documents = [[1, 2, 3] * 5, [2, 3]]
    for name in "ab":
        made(tmp_path / name, documents, tokenizer="m", vocabulary="f")
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert sorted(f.name for f in (tmp_path / "a").iterdir()) == [
        "datastore.json",
        "suffixes.npy",
        "tokens.npy",
    ]


def test_the_header_comes_back_as_it_was_written(tmp_path: Path) -> None:
    file = SourceFile("a/ä.txt", "00ff", 12, 1, 3)
    with DatastoreWriter(tmp_path / "s", V, "zoo:target", "abc") as writer:
        writer.add([1, 2], ends=False)
        writer.add([3])
        written = writer.finish([file])
    assert open_datastore(tmp_path / "s").header == written
    assert written.files == (file,)
    assert (written.n_documents, written.n_tokens, written.tokenizer) == (1, 3, "zoo:target")
    assert written.created_by.startswith("treegraft ")


# --- whole or not at all --------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, fault: type[BaseException]) -> None:
    def documents() -> Iterator[list[int]]:
        yield [1]
        raise fault

    with pytest.raises(fault):
        made(tmp_path / "s", documents())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["suffix_array", "_save", "_sync"])
@pytest.mark.parametrize("force", [False, True])
def test_a_build_that_fails_late_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, force: bool
) -> None:
    if force:
        made(tmp_path / "s", [[5, 6]])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, step, full)
    with pytest.raises((DatastoreError, OSError), match="No space left"):
        made(tmp_path / "s", [[1, 2]], force=force)
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == (["s"] if force else [])
    if force:
        assert continuations(open_datastore(tmp_path / "s"), [5], 1) == [[6]]


def test_an_old_store_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "s", [[5, 6]])
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "s", [[1, 2]], force=True)
    assert [file.name for file in tmp_path.iterdir()] == ["s"]
    assert continuations(open_datastore(tmp_path / "s"), [5], 1) == [[6]]


def test_nothing_stands_under_the_name_while_it_is_built(tmp_path: Path) -> None:
    with DatastoreWriter(tmp_path / "s", V) as writer:
        writer.add([1])
        assert not (tmp_path / "s").exists()
        writer.finish()
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_a_store_that_is_in_use_survives_its_replacement(tmp_path: Path) -> None:
    old = made(tmp_path / "s", [[1, 2]])
    new = made(tmp_path / "s", [[1, 3]], force=True)
    assert continuations(old, [1], 1) == [[2]]
    assert continuations(new, [1], 1) == [[3]]
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_a_store_that_is_there_needs_force(tmp_path: Path) -> None:
    made(tmp_path / "s", [[1, 2]])
    with pytest.raises(DatastoreError, match=r"'.*s' is there already; replace it with --force"):
        made(tmp_path / "s", [[1, 3]])
    assert continuations(open_datastore(tmp_path / "s"), [1], 1) == [[2]]


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_datastore_is_never_replaced(tmp_path: Path, force: bool) -> None:
    made(tmp_path / "mixed", [[1]])
    (tmp_path / "mixed" / "thesis.tex").write_text("years of work")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("a")
    (tmp_path / "file").write_text("a")
    for name in ("mixed", "other", "file"):
        with pytest.raises(DatastoreError, match="is no datastore, or not only one; name another"):
            made(tmp_path / name, [[1, 2]], force=force)
    assert (tmp_path / "mixed" / "thesis.tex").read_text() == "years of work"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "mixed", "other"]


def test_an_empty_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    assert continuations(made(tmp_path / "s", [[1, 2]]), [1], 1) == [[2]]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatastoreError, match=r"the folder '.*no' does not exist"):
        made(tmp_path / "no" / "s", [[1]])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(DatastoreError, match="cannot be written: Permission denied"):
        made(tmp_path / "s", [[1]])


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_an_empty_corpus_is_no_datastore(tmp_path: Path, documents: list[list[int]]) -> None:
    with pytest.raises(DatastoreError, match="the corpus is empty"):
        made(tmp_path / "s", documents)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("token", [-1, V, 2**40])
def test_ids_beyond_the_vocabulary_are_named(tmp_path: Path, token: int) -> None:
    with pytest.raises(DatastoreError, match=f"token ids must be in 0..{V - 1}, found {token}"):
        made(tmp_path / "s", [[1, token]])


# --- opened as it is or refused -------------------------------------------------------------------


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        header = json.loads((folder / "datastore.json").read_text())
        header.update(changes)
        header = {key: value for key, value in header.items() if value is not ...}
        (folder / "datastore.json").write_text(json.dumps(header))

    return edit


def cut(file: str, n_bytes: int) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / file).write_bytes((folder / file).read_bytes()[:n_bytes])

    return edit


def replaced(file: str, array: Any) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / file, array)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "newer": (edited(version=2), "has format version 2, this treegraft reads 1; build it again"),
    "unversioned": (edited(version=...), "has format version None, this treegraft reads 1"),
    "something else": (edited(format="x"), "datastore.json does not say 'treegraft-datastore'"),
    "a key short": (edited(n_tokens=...), "is damaged: datastore.json lacks what version 1 has"),
    "true for a number": (edited(n_tokens=True), "is damaged: datastore.json lacks"),
    "files of another form": (edited(files=[{"path": "a"}]), "is damaged: datastore.json lacks"),
    "negative": (edited(n_documents=-1), "is damaged: datastore.json lacks"),
    "no JSON": (cut("datastore.json", 20), "datastore.json is no valid JSON"),
    "no header": (lambda f: (f / "datastore.json").unlink(), "the folder has no datastore.json"),
    "no tokens": (lambda f: (f / "tokens.npy").unlink(), "is damaged: tokens.npy is missing"),
    "cut tokens": (cut("tokens.npy", -1), "is damaged: tokens.npy is truncated or no array"),
    "cut suffixes": (cut("suffixes.npy", 131), "is damaged: suffixes.npy is truncated or no array"),
    "empty suffixes": (cut("suffixes.npy", 0), "is damaged: suffixes.npy is truncated or no array"),
    "no array": (cut("tokens.npy", 3), "is damaged: tokens.npy is truncated or no array"),
    "other count": (edited(n_tokens=7), "tokens.npy should hold >u2 [9], found >u2 [5]"),
    "other width": (edited(vocab_size=70_000), "tokens.npy should hold >u4 [5], found >u2 [5]"),
    "other type": (
        replaced("suffixes.npy", np.zeros(5, dtype=np.int64)),
        "suffixes.npy should hold uint32 [5], found int64 [5]",
    ),
    "no separator": (edited(vocab_size=8), "tokens.npy does not end with a separator"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_store_is_refused(tmp_path: Path, name: str) -> None:
    made(tmp_path / "s", [[1, 2], [3]])
    damage, message = DAMAGE[name]
    damage(tmp_path / "s")
    with pytest.raises(DatastoreError) as caught:
        open_datastore(tmp_path / "s")
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"datastore {str(tmp_path / 's')!r}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/where", "'no/where': no such folder; make one with: treegraft datastore build"),
        ("x" * 300, "cannot be read: File name too long"),
        ("a\0b", "cannot be read: embedded null byte"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises(DatastoreError) as caught:
        open_datastore(path)
    assert message in str(caught.value)


# --- whose ids ------------------------------------------------------------------------------------


class Vocabulary:
    def __init__(self, *tokens: str) -> None:
        self._ids = {token: i for i, token in enumerate(tokens)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def test_a_store_of_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    ours, theirs = fingerprint(Vocabulary("a", "b")), fingerprint(Vocabulary("b", "a"))
    header = made(tmp_path / "s", [[1]], 2, tokenizer="zoo:small", vocabulary=theirs).header
    check_tokenizer(header, "s", "m", theirs, 99)
    with pytest.raises(UnsupportedModelError) as caught:
        check_tokenizer(header, "s", "m", ours, None)
    assert str(caught.value) == (
        "datastore 's' was built with the tokenizer of 'zoo:small' (2 ids) and target 'm' has "
        "another one; build it again with --target m"
    )


def test_without_two_tokenizers_widths_must_be_equal(tmp_path: Path) -> None:
    header = made(tmp_path / "s", [[1]]).header
    check_tokenizer(header, "s", "m", None, V)
    check_tokenizer(header, "s", "m", fingerprint(Vocabulary("a")), None)
    for vocabulary in (None, fingerprint(Vocabulary("a"))):
        with pytest.raises(
            UnsupportedModelError, match=f"'s' has {V} token ids and target 'm' has"
        ):
            check_tokenizer(header, "s", "m", vocabulary, V + 1)


def test_a_fingerprint_is_of_tokens_and_ids() -> None:
    prints = {fingerprint(Vocabulary(*tokens)) for tokens in ("ab", "ba", "abc", "a")}
    assert len(prints) == 4
    assert fingerprint(Vocabulary("ä", "b")) == fingerprint(Vocabulary("ä", "b"))
