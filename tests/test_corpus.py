"""From files to documents to a datastore: what counts as a document, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from treegraft import corpus
from treegraft.backends.datastore import Datastore, open_datastore
from treegraft.core.errors import DatastoreError
from treegraft.corpus import build_datastore, find_files


class Bytes:
    """A tokenizer of bytes, called as those of transformers are; notes what it is given."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def get_vocab(self) -> dict[str, int]:
        return {f"<{i}>": i for i in range(256)}

    def __call__(
        self, texts: Sequence[str], add_special_tokens: bool = True, **_: Any
    ) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        self.batches.append(list(texts))
        return {"input_ids": [list(text.encode()) for text in texts]}


def built(tmp_path: Path, *paths: Path, tokenizer: Any = None, **options: Any) -> Datastore:
    include = options.pop("include", ())
    build_datastore(
        find_files(paths, include), tmp_path / "s", tokenizer or Bytes(), "toy", **options
    )
    return open_datastore(tmp_path / "s")


def documents(store: Datastore) -> list[str]:
    """The documents of a store in their order."""
    tokens = store._tokens.tolist()
    texts, current = [], bytearray()
    for token in tokens:
        if token == store.vocab_size:
            texts.append(current.decode())
            current = bytearray()
        else:
            current.append(token)
    return texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def lines(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


# --- the story ------------------------------------------------------------------------------------


def test_a_file_is_a_document_and_a_line_of_json_holds_some(tmp_path: Path, folder: Path) -> None:
    (folder / "a.txt").write_bytes("\ufeffone\r\ntwö\n".encode())
    talk = lines(
        folder / "b.JSONL",
        {"text": "three"},
        {"prompt": "four"},
        {"turns": ["five", "six"]},
        {"ids": [55, 56]},
    )
    store = built(tmp_path, folder / "a.txt", talk)
    assert documents(store) == ["one\r\ntwö\n", "three", "four", "five", "six", "78"]
    first, second = store.header.files
    assert (first.path, first.n_documents, first.n_tokens) == (str(folder / "a.txt"), 1, 10)
    assert (second.n_documents, second.n_tokens, second.n_bytes) == (5, 18, talk.stat().st_size)
    assert second.sha256 == hashlib.sha256(talk.read_bytes()).hexdigest()
    assert (store.header.tokenizer, store.vocab_size) == ("toy", 256)


def test_a_folder_is_searched_by_name(tmp_path: Path, folder: Path) -> None:
    for name in ("b.py", "a.py", "deep/c.py", "notes.md", ".hidden.py", ".git/d.py", "x.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (folder / "loop").symlink_to(folder)
    (folder / "gone").symlink_to(folder / "nowhere")
    assert documents(built(tmp_path, folder)) == ["a.py", "b.py", "notes.md", "x.json", "deep/c.py"]
    some = built(tmp_path, folder, include=["*.md", "?.py"], force=True)
    assert documents(some) == ["a.py", "b.py", "notes.md", "deep/c.py"]


def test_a_file_named_twice_counts_once(tmp_path: Path, folder: Path) -> None:
    (folder / "a").write_text("x")
    (folder / "same").symlink_to(folder / "a")
    assert documents(built(tmp_path, folder / "a", folder, folder / "same")) == ["x"]


def test_one_field_may_be_named(tmp_path: Path, folder: Path) -> None:
    file = lines(folder / "a.jsonl", {"text": "no", "content": "yes"})
    assert documents(built(tmp_path, file, fields=["content"])) == ["yes"]


# --- long texts and many --------------------------------------------------------------------------


def test_a_long_text_is_tokenised_in_pieces_and_stays_one_document(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_PIECE", 10)
    monkeypatch.setattr(corpus, "_BATCH", 25)
    text = "".join(f"line {i}\n" for i in range(9)) + "a last line that has no end" * 2
    (folder / "a").write_text(text)
    (folder / "b").write_text("short")
    (folder / "c").write_text("")
    tokenizer = Bytes()
    read: list[int] = []
    store = built(tmp_path, folder, tokenizer=tokenizer, on_bytes=read.append)
    assert documents(store) == [text, "short"]
    assert len(tokenizer.batches) > 2
    pieces = [piece for batch in tokenizer.batches for piece in batch]
    assert pieces[0] == "line 0\nline 1\n"
    assert "".join(pieces) == text + "short"
    assert sum(read) == len(text) + len("short")
    assert [(file.n_documents, file.n_tokens) for file in store.header.files] == [
        (1, len(text)),
        (1, 5),
        (0, 0),
    ]


# --- what is refused ------------------------------------------------------------------------------

REFUSED: dict[str, tuple[bytes, str]] = {
    "latin.txt": ("ä".encode("latin-1"), "is not a text file in UTF-8"),
    "nul.txt": (b"a\0b", "is not a text file: it holds NUL characters"),
    "broken.jsonl": (b'{"text": "a"}\n{"text"\n', "line 2: no valid JSON"),
    "list.jsonl": (b"[1]", "line 1: an object is needed, found list"),
    "keys.jsonl": (b'{"a": 1, "b": 2}', "one of the keys turns, prompt, text, ids is needed, "),
    "number.jsonl": (b'{"text": 3}', "text must be text, a list of texts, or a list of token ids"),
    "negative.jsonl": (b'{"ids": [1, -2]}', "ids must be text, a list of texts, or a list of"),
    "half.jsonl": (b'{"text": "a\\ud83d"}', "text must be text in UTF-8, found '\\ud83d' at"),
    "beyond.jsonl": (b'{"ids": [1, 256]}', "token ids must be in 0..255, found 256"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_corpus_is_named(tmp_path: Path, folder: Path, name: str) -> None:
    content, message = REFUSED[name]
    (folder / name).write_bytes(content)
    with pytest.raises(DatastoreError) as caught:
        built(tmp_path, folder / name)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"corpus {str(folder / name)!r}")
    assert not (tmp_path / "s").exists()


def test_in_a_folder_what_is_no_text_is_left_out_and_told(tmp_path: Path, folder: Path) -> None:
    for name in ("latin.txt", "nul.txt", "broken.jsonl"):
        (folder / name).write_bytes(REFUSED[name][0])
    (folder / "good.txt").write_text("good")
    told: list[str] = []
    assert documents(built(tmp_path, folder, on_skip=told.append)) == ["good"]
    assert [line.split("'")[1].rpartition("/")[2] for line in told] == [
        "broken.jsonl",
        "latin.txt",
        "nul.txt",
    ]


@pytest.mark.parametrize("name", ["no.txt", "x" * 300])
def test_a_path_that_leads_nowhere_is_named(folder: Path, name: str) -> None:
    with pytest.raises(DatastoreError, match=r"corpus '.*': no such file or folder"):
        find_files([folder / name])


def test_a_folder_without_files_is_named(folder: Path) -> None:
    with pytest.raises(DatastoreError, match=r"corpus: no file in '.*in'"):
        find_files([folder])
    (folder / "a.txt").write_text("a")
    with pytest.raises(DatastoreError, match=r"corpus: no file like \*\.py in '.*in'"):
        find_files([folder], ["*.py"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "a").chmod(0)
    with pytest.raises(DatastoreError, match=r"a' cannot be read: Permission denied"):
        built(tmp_path, folder / "a")


def test_a_corpus_of_empty_files_is_empty(tmp_path: Path, folder: Path) -> None:
    (folder / "a").write_text("")
    lines(folder / "b.jsonl", {"text": ""}, {"turns": []})
    with pytest.raises(DatastoreError, match="the corpus is empty: no file holds a token"):
        built(tmp_path, folder)
    assert not (tmp_path / "s").exists()
