"""``datastore build`` and ``info``, and a command line that drafts from one."""

from __future__ import annotations

import pytest

from treegraft.backends import datastore_writer as format_


@pytest.fixture
def texts(write):
    return write("a.txt", "one two three, one two three, one two three"), write(
        "b.jsonl", '{"prompt": "The quick brown fox"}\n{"turns": ["jumps", "over"]}\n'
    )


@pytest.fixture
def store(zoo, treegraft, texts, tmp_path):
    result = treegraft(
        "datastore", "build", *texts, "--target", zoo.target, "--out", tmp_path / "s"
    )
    assert result.code == 0, result.err
    assert result.err == ""
    return tmp_path / "s"


def test_build_then_draft_changes_no_token(zoo, treegraft, store):
    ask = ("generate", "--target", zoo.target, "-p", "one two", "-n", 12, "--json")
    plain = treegraft(*ask).json
    drafted = treegraft(*ask, "--drafter", f"datastore:{store}")
    assert drafted.code == 0, drafted.err
    assert drafted.json["results"][0]["tokens"] == plain["results"][0]["tokens"]
    assert drafted.json["config"]["drafters"][0]["path"] == str(store)
    assert drafted.json["results"][0]["statistics"]["drafted"]["datastore"] > 0


def test_build_and_info_say_what_there_is(zoo, treegraft, store, texts):
    info = treegraft("datastore", "info", store)
    assert info.code == 0
    assert info.out.startswith(f"{store}: ")
    assert " tokens in 4 documents of 2 files\n" in info.out
    assert f"tokenizer   {zoo.target}, " in info.out
    assert str(texts[1]) not in info.out
    assert f"3 documents {6:>10}" not in info.out
    listed = treegraft("datastore", "info", store, "--files").out
    assert str(texts[0]) in listed
    assert str(texts[1]) in listed
    data = treegraft("datastore", "info", store, "--json").json
    assert (data["format"], data["version"], data["n_documents"]) == ("treegraft-datastore", 1, 4)
    assert [file["n_documents"] for file in data["files"]] == [1, 3]
    assert data["n_bytes"] == sum(file.stat().st_size for file in store.iterdir())


def test_building_twice_needs_force(zoo, treegraft, store, texts):
    again = ("datastore", "build", texts[1], "--tokenizer", zoo.target, "--out", store)
    result = treegraft(*again)
    assert result.code == 2
    assert result.err == (
        f"error: datastore {str(store)!r} is there already; replace it with --force\n"
    )
    result = treegraft(*again, "--force", "--json")
    assert result.code == 0
    assert result.json["n_documents"] == 3
    assert result.json["skipped"] == []


def test_what_is_left_out_of_a_folder_is_said(zoo, treegraft, texts, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "c.py").write_text("pass\n")
    ask = ("datastore", "build", tmp_path, "--target", zoo.target, "--out", tmp_path / "s")
    result = treegraft(*ask)
    assert result.code == 0
    assert result.out.endswith("documents of 3 files\n")
    assert "left out 1 of 4 files: corpus " in result.err
    assert "picture.png' is not a text file in UTF-8\n" in result.err
    result = treegraft(*ask, "--include", "*.py", "--force", "--json")
    assert result.json["n_documents"] == 1
    assert result.err == ""


def test_a_field_can_be_named(zoo, treegraft, write, tmp_path):
    file = write("a.jsonl", '{"content": "one two", "text": "three"}\n')
    ask = ("datastore", "build", file, "--target", zoo.target, "--out", tmp_path / "s", "--json")
    assert treegraft(*ask, "--field", "content").code == 0
    result = treegraft(*ask, "--force", "--field", "body")
    assert result.code == 2
    assert "line 1: one of the keys body is needed, found content, text" in result.err


def test_an_interrupt_leaves_nothing(zoo, treegraft, texts, tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(format_, "suffix_array", interrupted)
    before = sorted(tmp_path.iterdir())
    result = treegraft(
        *("datastore", "build", *texts, "--target", zoo.target, "--out", tmp_path / "s")
    )
    assert result.code == 130
    assert sorted(tmp_path.iterdir()) == before


def test_a_store_of_another_tokenizer_is_one_line(zoo, treegraft, texts, tmp_path):
    store = tmp_path / "s"
    treegraft("datastore", "build", *texts, "--target", "zoo:small", "--out", store)
    result = treegraft(
        *("generate", "--target", zoo.target, "--drafter", f"datastore:{store}", "-p", "one")
    )
    assert result.code == 2
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert f"datastore {str(store)!r} was built with the tokenizer of 'zoo:small' (4096 " in (
        result.err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("datastore build no.txt --target zoo:small --out s", "corpus 'no.txt': no such file or"),
        ("datastore build {a} --target /no --out s", "model '/no': no such folder"),
        ("datastore build {a} --target {bare} --out s", "--target '{bare}' has no tokenizer: "),
        ("datastore build {a} --target {target} --out no/s", "the folder '"),
        ("datastore build {a} --target {target}", "Missing option"),
        ("datastore build {a} --out s", "Missing option"),
        ("datastore build --target m --out s", "Missing argument"),
        ("datastore info no", "datastore 'no': no such folder; make one with: treegraft datastore"),
        ("datastore bild", "No such command 'bild'"),
        (
            "generate --target m --drafter datastore -p x",
            "--drafter datastore needs a folder: datastore:DIR, made by treegraft datastore build",
        ),
        (
            "generate --target {target} --drafter datastore:no -p x",
            "datastore 'no': no such folder; make one with: treegraft datastore build",
        ),
    ],
)
def test_mistakes_are_one_line(zoo, treegraft, texts, arguments, message):
    names = {"a": texts[0], "bare": zoo.bare, "target": zoo.target}
    result = treegraft(*arguments.format(**names).split())
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message.format(**names) in result.err


def test_the_group_alone_prints_its_help(treegraft):
    result = treegraft("datastore")
    assert result.code == 0
    assert "build" in result.out
    assert "info" in result.out
