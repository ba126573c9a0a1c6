"""The trace: what a reader of docs/trace.md can rely on."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import hashed_model, mixed_model
from toy_tokenizers import PieceTokenizer

from treegraft import TraceWriter, build_pipeline, parse_config
from treegraft.core.errors import ConfigError, PromptError
from treegraft.pipeline import Pipeline

V = 8
TARGET = hashed_model(V, seed=1, order=6)
MODELS = {"t": TARGET, "d": mixed_model(TARGET, hashed_model(V, seed=2), 0.3)}
DOCS = Path(__file__).parent.parent / "docs" / "trace.md"


def pipeline(**options: Any) -> Pipeline:
    config: dict[str, Any] = {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "d"}],
        "builder": {"kind": "layered", "depth": 3, "width": 2, "budget": 6},
        "scheduler": {"kind": "fixed", "calls": ["ngram", "d"]},
        "stop": {"max_new_tokens": 20},
    }
    tokenizer = PieceTokenizer(("a", "b", "ab", "c", " ", "", "ba", "é"))
    return build_pipeline(parse_config(config | options), MODELS, tokenizer)


def strict(text: str) -> list[dict[str, Any]]:
    """The lines of a trace; NaN and Infinity, which Python's reader would take, are refused."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert text.endswith("\n")
    assert text.isascii()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def traced(made: Pipeline, prompt: list[int], **options: Any) -> tuple[list[Any], list[Any]]:
    file = io.StringIO()
    chunks = list(TraceWriter(made, file).stream(prompt, "x", **options))
    return strict(file.getvalue()), chunks


# --- the story ------------------------------------------------------------------------------------


def test_a_trace_tells_the_whole_run() -> None:
    made = pipeline()
    (header, *lines), chunks = traced(made, [1, 2, 3, 1, 2])
    assert (header["trace"], header["version"]) == ("treegraft", 1)
    assert header["drafters"] == ["ngram", "d"]
    assert header["shape"] == {"depth": 3, "width": 2, "budget": 6}
    assert parse_config(header["config"]) == made.config
    assert len(lines) == len(chunks)
    assert lines[0]["prompt"] == [1, 2, 3, 1, 2]
    text = list(lines[0]["prompt"])
    for number, (line, chunk) in enumerate(zip(lines, chunks, strict=True)):
        assert (line["text"], line["id"], line["step"]) == (0, "x", number)
        assert line["n_text"] == len(text)
        tree, verdict = line["tree"], line["verdict"]
        assert tree["token"][0] == text[-1]
        # The verdict can be read off: the path down the columns, then the bonus token.
        above = 0
        for node, token in zip(verdict["path"], verdict["tokens"], strict=False):
            assert tree["parent"][node] == above
            assert tree["token"][node] == token
            above = node
        assert verdict["tokens"][len(verdict["path"]) :] in ([verdict["bonus"]], [])
        assert line["seconds"] == chunk.step.seconds
        assert line["budget"] == 6 >= len(tree["token"]) - 1
        assert line["counts"]["accepted"] == dict(
            zip(["ngram", "d"], chunk.step.accepted, strict=True)
        )
        # Who acted where, in numbers of the working tree.
        n_nodes = 1
        for layer in line["layers"]:
            assert set(layer["frontier"]) <= set(range(n_nodes))
            n_nodes = layer["n_nodes"]
            assert set(layer["touched"]) <= set(range(1, n_nodes))
        assert set(tree["node"]) <= set(range(n_nodes))
        text += verdict["tokens"]
    assert text[5:] == chunks[-1].generation.tokens
    assert [layer["drafter"] for layer in lines[0]["layers"]] == [0, 1, None]
    assert "".join(line["decoded"] for line in lines) == chunks[-1].generation.text
    assert lines[-1]["finish_reason"] == "length"
    assert not any("finish_reason" in line for line in lines[:-1])


def test_nobody_and_unscored_are_null() -> None:
    scripted = {
        "kind": "adversarial_drafters:Scripted",
        "name": "s",
        "params": {"paths": [[1, 2]], "score": -math.inf},
    }
    made = pipeline(drafters=[{"kind": "ngram"}, scripted], scheduler={"kind": "always"})
    (_, line, *_), chunks = traced(made, [1, 2, 3])
    assert chunks[0].tree.logprob[1] == -math.inf
    tree = line["tree"]
    assert tree["logprob"][:2] == [0.0, None]
    assert tree["source"][:2] == [None, 1]
    assert tree["scorer"][:2] == [None, None]
    assert tree["proposers"][:2] == [[], [1]]


def test_several_texts_share_a_file() -> None:
    file = io.StringIO()
    writer = TraceWriter(pipeline(), file)
    for name in ("first", None):
        list(writer.stream([1, 2, 3], name, max_new_tokens=4))
    _, *lines = strict(file.getvalue())
    assert {(line["text"], line["id"]) for line in lines} == {(0, "first"), (1, None)}
    assert next(line["step"] for line in lines if line["text"] == 1) == 0


def test_options_of_the_call_are_in_the_trace() -> None:
    def nothing(ids: Any, scores: Any) -> Any:
        return scores

    (header, first, *rest), _ = traced(
        pipeline(), [1, 2, 3], seed=7, temperature=0.5, logits_processor=[nothing]
    )
    assert header["config"]["sampling"]["seed"] == 0
    assert first["overrides"]["sampling"]["seed"] == 7
    assert first["overrides"]["sampling"]["temperature"] == 0.5
    assert first["overrides"]["stop"]["max_new_tokens"] == 20
    assert first["processors"] == ["nothing"]
    assert not any("overrides" in line or "prompt" in line for line in rest)


def test_plain_decoding_has_a_trace_of_roots() -> None:
    (header, *lines), _ = traced(pipeline(drafters=[], scheduler={"kind": "never"}), [1, 2])
    assert header["drafters"] == []
    assert all(line["layers"] == [] and line["tree"]["node"] == [0] for line in lines)
    assert all(line["counts"]["drafted"] == {} for line in lines)


# --- the properties -------------------------------------------------------------------------------


@given(
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=8),
    temperature=st.sampled_from([0.0, 1.0]),
    calls=st.lists(st.integers(0, 1), min_size=1, max_size=3),
    backend=st.sampled_from(["tensor", "reference"]),
)
@settings(max_examples=25)
def test_tracing_changes_no_token(
    prompt: list[int], temperature: float, calls: list[int], backend: str
) -> None:
    made = pipeline(
        scheduler={"kind": "fixed", "calls": calls},
        sampling={"temperature": temperature},
        backend={"kind": backend},
    )
    expected = made.generate(prompt).tokens
    (_, *lines), chunks = traced(made, prompt)
    assert chunks[-1].generation.tokens == expected
    assert [token for line in lines for token in line["verdict"]["tokens"]] == expected


def test_a_line_is_there_before_its_tokens_are_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with path.open("w", encoding="utf-8") as file:
        stream = TraceWriter(pipeline(), file).stream([1, 2, 3])
        for n in range(1, 4):
            chunk = next(stream)
            # Through another handle: it is on its way to the disk, and not in a buffer of ours.
            lines = strict(path.read_text(encoding="utf-8"))
            assert len(lines) == 1 + n
            assert lines[-1]["verdict"]["tokens"] == chunk.tokens


def test_a_run_that_breaks_leaves_whole_lines() -> None:
    file = io.StringIO()
    bad = {"kind": "adversarial_drafters:Faulty", "name": "bad"}
    params = {"method": "propose", "answer": "interrupt", "after": 4}
    made = pipeline(drafters=[{**bad, "params": params}], scheduler={"kind": "always"})
    with pytest.raises(KeyboardInterrupt):
        list(TraceWriter(made, file).stream([1, 2, 3]))
    header, *lines = strict(file.getvalue())
    assert header["drafters"] == ["bad"]
    assert 1 <= len(lines) < 20


# --- edges ----------------------------------------------------------------------------------------


def test_a_config_that_json_cannot_say_is_still_traced() -> None:
    """Numbers of YAML may be .inf and .nan, and params of one's own class anything at all."""
    scripted = {
        "kind": "adversarial_drafters:Scripted",
        "params": {"paths": [[1]], "score": math.nan},
    }
    (header, *_), _ = traced(pipeline(drafters=[scripted], scheduler={"kind": "never"}), [1, 2])
    assert header["config"]["drafters"][0]["params"]["score"] == "NaN"
    scripted["params"] = {"paths": [[1]], "score": -math.inf, "match": True}
    (header, *_), _ = traced(pipeline(drafters=[scripted], scheduler={"kind": "never"}), [1, 2])
    assert header["config"]["drafters"][0]["params"]["score"] == "-Infinity"


def test_a_wrong_call_writes_no_step() -> None:
    file = io.StringIO()
    writer = TraceWriter(pipeline(), file)
    with pytest.raises(PromptError):
        writer.stream([])
    with pytest.raises(ConfigError):
        writer.stream([1], no_such_option=1)
    assert len(strict(file.getvalue())) == 1


def test_the_layout_is_the_documented_one() -> None:
    """Every key is in docs/trace.md, and every key that it names exists."""
    keyed = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", DOCS.read_text(encoding="utf-8"), re.M)
    documented = {key for keys in keyed for key in re.findall(r"`(\w+)`", keys)}

    def nothing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    (header, *lines), _ = traced(pipeline(), [1, 2, 3], seed=1, logits_processor=[nothing])
    found = {*header}
    for line in lines:
        found |= {*line, *line["tree"]}
        for layer in line["layers"]:
            found |= {*layer}
    assert found == documented
