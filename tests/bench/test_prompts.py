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
        (
            "p.jsonl",
            '{"turns": []}',
            "line 1: turns must be a list of strings, found an empty list",
        ),
        ("p.jsonl", '{"turns": "a"}', "line 1: turns must be a list of strings, found text"),
        ("p.jsonl", '{"turns": [1]}', "line 1: turns must be text, found a number"),
        ("p.jsonl", '{"text": null}', "line 1: text must be text, found null"),
        ("p.jsonl", '{"text": ""}', "line 1: text is empty"),
        ("p.jsonl", '{"ids": [1, -1]}', "line 1: ids must be a list of whole numbers from 0"),
        ("p.jsonl", '{"ids": [' + "9" * 5000 + "]}", "line 1: a number in the JSON has too many"),
        ("p.jsonl", "\n" + "[" * 100_000, "line 2: JSON is nested too deeply"),
        ("p.json", "[" * 100_000, "p.json: JSON is nested too deeply"),
        (
            "p.jsonl",
            '{"text": "a\\ud800b", "id": "x"}',
            "line 1: prompt 'x' must be text in UTF-8, found '\\ud800' at character 1",
        ),
        ("p.jsonl", '{"text": "a", "id": "\\ud800"}', "line 1: id must be text in UTF-8, found"),
        ("p.jsonl", '{"text": "a", "kind": "\\ud800"}', "line 1: kind must be text in UTF-8"),
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
    with pytest.raises(PromptError, match=r"^prompts 'a.x00b' cannot be read: embedded null byte$"):
        read_prompts("a\0b")


def test_a_line_separator_inside_a_string_ends_no_line(write):
    """U+2028 and its like are valid in JSON as they are."""
    text = "a\u2028b\x85c\u2029d"
    assert read_prompts(write("p.jsonl", f'{{"text": "{text}"}}\r\n{{"text": "e"}}\r\n')) == [
        Prompt("1", text),
        Prompt("2", "e"),
    ]


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    for name, text in (("p.jsonl", '{"text": "a"}'), ("p.json", '[{"text": "a"}]'), ("1.txt", "a")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert read_prompts(tmp_path / name) == [Prompt("1", "a")]


def test_a_suffix_counts_in_either_case(write):
    assert read_prompts(write("P.JSONL", '{"text": "a"}\n{"text": "b"}\n')) == [
        Prompt("1", "a"),
        Prompt("2", "b"),
    ]
    assert read_prompts(write("P.Json", '[{"text": "a"}]')) == [Prompt("1", "a")]


def test_line_ends_of_a_text_are_its_own(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r")
    assert read_prompts(tmp_path / "a.txt") == [Prompt("a", "one\r\ntwo\r")]


def test_null_is_no_id(write):
    lines = ('{"id": null, "text": "a"}', '{"id": null, "question_id": 0, "text": "b"}')
    prompts = read_prompts(write("p.jsonl", "\n".join(lines)))
    assert [prompt.id for prompt in prompts] == ["1", "0"]


def test_ids_on_the_command_line():
    assert parse_ids("1, 2 3") == (1, 2, 3)
    with pytest.raises(PromptError, match="found '-1'"):
        parse_ids("1 -1")
    with pytest.raises(PromptError, match="found one of 5000 digits"):
        parse_ids("1 " + "9" * 5000)


def test_kinds_take_turns():
    prompts = [Prompt(f"{kind}{i}", "x", kind) for kind in "ab" for i in range(3)]
    assert [p.id for p in take_turns(prompts)] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [p.id for p in take_turns(prompts, per_kind=1)] == ["a0", "b0"]
