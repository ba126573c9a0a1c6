"""Prompt files: every form that is read, and the one line for every form that is not."""

from __future__ import annotations

import pytest

from treegraft import PromptError
from treegraft.prompts import Prompt, parse_ids, read_prompts, take_turns


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write_file


def test_a_text_file_is_one_prompt(write):
    assert read_prompts(write("a.txt", "two\nlines\n")) == [Prompt("a", "two\nlines\n")]
    assert read_prompts(write("b.py", "x = 1")) == [Prompt("b", "x = 1")]


def test_json_lines_in_every_form(write):
    file = write(
        "p.jsonl",
        '{"question_id": 81, "category": "writing", "turns": ["first", "second"]}\n'
        '{"id": "b", "kind": "code", "prompt": "def"}\n'
        "\n"
        '{"text": "plain", "category": ""}\n'
        '{"ids": [1, 2]}',
    )
    assert read_prompts(file) == [
        Prompt("81", "first", "writing"),
        Prompt("b", "def", "code"),
        Prompt("4", "plain"),
        Prompt("5", (1, 2)),
    ]
    assert len(read_prompts(file, limit=2)) == 2


def test_a_json_list(write):
    assert read_prompts(write("p.json", '[{"prompt": "a"}, {"text": "b"}]')) == [
        Prompt("1", "a"),
        Prompt("2", "b"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"text": "a"}\n{"text"', "p.jsonl line 2: no valid JSON"),
        ("p.jsonl", '{"a": 1}', "line 1: one of the keys turns, prompt, text, ids is needed, "),
        ("p.jsonl", "{}", "found none"),
        ("p.jsonl", "[]", "line 1: an object is needed, found a list"),
        ("p.jsonl", '{"turns": []}', "line 1: turns must be a list of strings, found a list"),
        ("p.jsonl", '{"turns": "a"}', "line 1: turns must be a list of strings, found text"),
        ("p.jsonl", '{"turns": [1]}', "line 1: turns must be text, found a number"),
        ("p.jsonl", '{"text": null}', "line 1: text must be text, found null"),
        ("p.jsonl", '{"text": ""}', "line 1: text is empty"),
        ("p.jsonl", '{"ids": [1, -1]}', "line 1: ids must be a list of whole numbers from 0"),
        ("p.jsonl", "\n", "holds no prompt"),
        ("p.txt", "", "holds no prompt"),
        ("p.json", "{}", "p.json: a list of prompts is needed, found an object"),
        ("p.json", '[{"text": "a"}, 3]', "p.json entry 2: an object is needed, found a number"),
    ],
)
def test_faults_are_named_with_their_line(write, name, text, message):
    with pytest.raises(PromptError) as error:
        read_prompts(write(name, text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="is not a text file in UTF-8"):
        read_prompts(tmp_path / "b.txt")
    with pytest.raises(PromptError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(PromptError, match="cannot be read: Is a directory"):
        read_prompts(tmp_path)


def test_ids_on_the_command_line():
    assert parse_ids("1, 2 3") == (1, 2, 3)
    with pytest.raises(PromptError, match="found '-1'"):
        parse_ids("1 -1")


def test_kinds_take_turns():
    prompts = [Prompt(f"{kind}{i}", "x", kind) for kind in "ab" for i in range(3)]
    assert [p.id for p in take_turns(prompts)] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [p.id for p in take_turns(prompts, per_kind=1)] == ["a0", "b0"]
