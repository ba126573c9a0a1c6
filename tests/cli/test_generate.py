"""``treegraft generate``: the same text whatever drafts, in every form of input and output."""

from __future__ import annotations

import io
import json

import pytest

TREE = ("--width", "3", "--budget", "12")


@pytest.fixture
def plain(zoo, treegraft):
    """What the target says alone."""

    def text(*arguments):
        return treegraft("generate", "--target", zoo.target, *arguments)

    return text


def test_drafted_text_is_the_targets_own(zoo, treegraft, plain):
    drafters = ("--drafter", "ngram", "--drafter", zoo.small, *TREE)
    ask = ("-p", "one two three", "-n", 24)
    alone = plain(*ask)
    drafted = treegraft("generate", "--target", zoo.target, *drafters, *ask)
    assert alone.code == drafted.code == 0
    assert drafted.out == alone.out != "\n"


def test_two_drafters_take_turns_by_default_and_it_says_so(zoo, treegraft):
    result = treegraft(
        *("generate", "--target", zoo.target, "--drafter", "ngram", "--drafter", zoo.small),
        *("-p", "one two", "-n", 4, "--depth", 3, "--json"),
    )
    assert result.json["config"]["scheduler"] == {
        "kind": "fixed",
        "calls": ["ngram", "small", "ngram"],
    }
    assert "scheduler: fixed:ngram,small,ngram " in result.err


def test_a_seeded_run_does_not_depend_on_the_drafters(zoo, treegraft, plain):
    ask = ("-p", "The dog", "-n", 16, "--temperature", 1, "--seed", 5, "--top-k", 20)
    drafted = treegraft(
        *("generate", "--target", zoo.target, "--drafter", zoo.small, *TREE),
        *ask,
    )
    assert drafted.out == plain(*ask).out


def test_streamed_text_is_the_whole_text(plain):
    ask = ("-p", "one two three", "-n", 24)
    assert plain(*ask, "--stream").out == plain(*ask).out


def test_streamed_json_is_a_line_a_step_and_the_result(plain):
    lines = plain("-p", "one two", "-n", 6, "--json", "--stream").out.splitlines()
    *steps, result = map(json.loads, lines)
    assert len(steps) == 6
    tokens = [token for step in steps for token in step["tokens"]]
    assert tokens == result["results"][0]["tokens"]
    assert "".join(step["text"] for step in steps) == result["results"][0]["text"]


def test_json_result_holds_config_tokens_and_statistics(zoo, treegraft):
    result = treegraft(
        *("generate", "--target", zoo.target, "--drafter", "ngram", "-p", "one two", "-n", 5),
        "--json",
    )
    assert result.code == 0
    assert set(result.json) == {"config", "results", "statistics"}
    (entry,) = result.json["results"]
    assert len(entry["tokens"]) == 5
    assert entry["finish_reason"] == "length"
    assert entry["statistics"]["new_tokens"] == 5
    assert result.json["config"]["drafters"][0]["max_n"] == 3


def test_ids_need_no_tokenizer(zoo, treegraft):
    ask = ("-p", "5 6,7", "--ids", "-n", 4)
    bare = treegraft("generate", "--target", zoo.bare, *ask)
    assert bare.code == 0
    assert len(bare.out.split()) == 4
    assert bare.out == treegraft("generate", "--target", zoo.target, *ask).out
    assert (
        bare.out.strip()
        == treegraft("generate", "--target", zoo.bare, *ask, "--stream").out.strip()
    )


def test_prompt_comes_from_stdin(plain, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one two three"))
    assert plain("-p", "-", "-n", 4).out == plain("-p", "one two three", "-n", 4).out


def test_prompt_files_are_read_and_limited(plain, write):
    file = write("p.jsonl", '{"turns": ["one"], "question_id": 7}\n\n{"text": "two", "id": "b"}\n')
    both = plain("--prompts", file, "-n", 3, "--json").json["results"]
    assert [entry["id"] for entry in both] == ["7", "b"]
    assert len(plain("--prompts", file, "--limit", 1, "-n", 3, "--json").json["results"]) == 1
    printed = plain("--prompts", file, "-n", 3)
    assert printed.err == "--- 7\n--- b\n"


def test_a_stop_string_ends_the_text(plain):
    text = plain("-p", "one two", "-n", 24).out
    stop = text[3:5]
    stopped = plain("-p", "one two", "-n", 24, "--stop", stop, "--json").json["results"][0]
    assert stopped["finish_reason"] == "stop_string"
    assert stop in stopped["text"]
    assert len(stopped["text"]) < len(text)


def test_chat_puts_the_prompt_into_the_template(zoo, treegraft):
    ask = ("-n", 4)
    chat = treegraft("generate", "--target", zoo.chatty, "-p", "one", "--chat", *ask)
    assert chat.code == 0
    by_hand = treegraft("generate", "--target", zoo.chatty, "-p", "<user>one<assistant>", *ask)
    assert chat.out == by_hand.out


def test_options_override_a_config_file(zoo, treegraft, write):
    file = write(
        "c.yaml",
        f"target: {{model: {zoo.target}}}\n"
        f"drafters: [{{kind: ngram}}, {{kind: lm, model: {zoo.small}}}]\n"
        "builder: {kind: layered, width: 3, budget: 12}\n"
        "scheduler: {kind: fixed, calls: [ngram, small]}\n"
        "stop: {max_new_tokens: 9}\n",
    )
    ask = ("generate", "-c", file, "-p", "one two", "--json")
    assert len(treegraft(*ask).json["results"][0]["tokens"]) == 9
    config = treegraft(*ask, "-n", 3, "--budget", 5, "--drafter", "ngram").json["config"]
    assert config["stop"]["max_new_tokens"] == 3
    assert config["builder"].items() >= {"depth": 5, "width": 3, "budget": 5}.items()
    assert [drafter["kind"] for drafter in config["drafters"]] == ["ngram"]
    assert config["scheduler"] == {"kind": "never"}


def test_depth_cuts_the_calls_of_a_file_and_says_so(zoo, treegraft, write):
    file = write(
        "c.yaml",
        f"target: {{model: {zoo.target}}}\n"
        f"drafters: [{{kind: ngram}}, {{kind: lm, model: {zoo.small}}}]\n"
        "scheduler: {kind: fixed, calls: [ngram, small, ngram]}\n",
    )
    ask = ("generate", "-c", file, "-p", "one two", "-n", 2, "--json")
    cut = treegraft(*ask, "--depth", 2)
    assert cut.json["config"]["scheduler"] == {"kind": "fixed", "calls": ["ngram", "small"]}
    assert cut.json["config"]["builder"]["depth"] == 2
    assert cut.err == (
        "scheduler: fixed:ngram,small (the file's calls cut to --depth 2; set it with "
        "--scheduler)\n"
    )
    assert treegraft(*ask, "--depth", 0).json["config"]["scheduler"] == {"kind": "never"}
    assert treegraft(*ask, "--depth", 3).err == ""
    longer = treegraft(*ask, "--depth", 4)
    assert len(longer.json["config"]["scheduler"]["calls"]) == 3
    assert longer.err == (
        "--depth 4: the file's scheduler.calls end after 3 layers; set it with --scheduler\n"
    )
    chosen = treegraft(*ask, "--depth", 2, "--scheduler", "always")
    assert (chosen.json["config"]["scheduler"], chosen.err) == ({"kind": "always"}, "")


def test_line_ends_of_stdin_are_its_own(plain, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(b"one\r\ntwo"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", stdin)
    assert plain("-p", "-", "-n", 2).out == plain("-p", "one\r\ntwo", "-n", 2).out


def test_statistics_are_printed_with_their_definitions(zoo, treegraft):
    result = treegraft(
        *("generate", "--target", zoo.target, "--drafter", "ngram", "-p", "one", "-n", 4),
        "--stats",
    )
    assert "new tokens per target call, the bonus token included" in result.err
    assert "ngram" in result.err


def test_a_drafter_may_be_named_like_a_stage(zoo, treegraft):
    """The target as its own drafter is called ``target``, as is the target's stage."""
    result = treegraft(
        *("generate", "--target", zoo.target, "--drafter", zoo.target, *TREE),
        *("-p", "one", "-n", 12, "--json"),
    )
    statistics = result.json["statistics"]
    assert statistics["target_calls"] < 12
    assert {"target", "drafter:target", "forward:target"} <= set(statistics["seconds"])


# --- the trace ------------------------------------------------------------------------------------


def read_trace(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_trace_has_a_line_a_step_and_changes_no_output(zoo, treegraft, tmp_path, write):
    prompts = write("p.jsonl", '{"id": "a", "prompt": "one two"}\n{"id": "b", "prompt": "dog"}\n')
    ask = ("generate", "--target", zoo.target, "--drafter", "ngram", "--drafter", zoo.small, *TREE)
    ask = (*ask, "--prompts", prompts, "-n", 8)
    path = tmp_path / "run.jsonl"
    path.write_text("an older trace, longer than nothing\n" * 99)
    plain, traced = treegraft(*ask), treegraft(*ask, "--trace", path)
    assert (traced.code, traced.out) == (0, plain.out)
    header, *lines = read_trace(path)
    assert header["trace"] == "treegraft"
    assert header["drafters"] == ["ngram", "small"]
    assert [line["id"] for line in lines if line["step"] == 0] == ["a", "b"]
    assert sum(len(line["verdict"]["tokens"]) for line in lines) == 16
    streamed = treegraft(*ask, "--trace", path, "--stream", "--json")
    *steps, result = map(json.loads, streamed.out.splitlines())
    assert [step["tokens"] for step in steps] == [
        line["verdict"]["tokens"] for line in read_trace(path)[1:]
    ]
    assert result["config"] == read_trace(path)[0]["config"]


def test_a_run_that_never_begins_leaves_an_older_trace_alone(zoo, treegraft, tmp_path):
    path = tmp_path / "run.jsonl"
    for older in (None, "an older trace\n"):
        if older is not None:
            path.write_text(older)
        result = treegraft("generate", "--target", zoo.bare, "-p", "text", "--trace", path)
        assert result.code == 2
        assert "tokenizer" in result.err
        assert path.exists() == (older is not None)
        assert older is None or path.read_text() == older


def test_a_trace_that_cannot_be_written_is_one_line(zoo, treegraft, tmp_path, write):
    config = write("c.yaml", f"target: {{model: {zoo.target!r}}}\n")
    prompts = write("p.txt", "one two")
    ask = ("generate", "-c", config, "--prompts", prompts, "--trace")
    for path, message in (
        (tmp_path / "no" / "where", "cannot be written: No such file or directory"),
        (tmp_path, "cannot be written: Is a directory"),
        ("-", "--trace needs a file, found '-'"),
        (config, "is a file that this command reads"),
        (prompts, "is a file that this command reads"),
    ):
        result = treegraft(*ask, path)
        assert result.code == 2
        assert message in result.err
        assert len(result.err.strip().splitlines()) == 1
    assert prompts.read_text() == "one two"
    full = treegraft(*ask, "/dev/full")
    assert full.code == 1
    assert "--trace '/dev/full' cannot be written: No space left on device" in full.err
