"""What ends a text: inside an accepted path it must end as plain decoding would."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import TableModel
from torch import Tensor
from toy_tokenizers import ByteTokenizer, PieceTokenizer

from treegraft.config import parse_config
from treegraft.core.errors import ConfigError
from treegraft.core.stats import Generation
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.text import StopStrings, TextStream

V = 8


def counting_model() -> TableModel:
    """Says the next number, modulo V."""
    return TableModel(
        lambda text: torch.nn.functional.one_hot(torch.tensor((text[-1] + 1) % V), V) * 9.0, V
    )


def counting(**stop: Any) -> Pipeline:
    """A target that counts and drafts for itself: all of a path of 5 is accepted in every step."""
    config = parse_config(
        {
            "target": {"model": "t"},
            "drafters": [{"kind": "lm", "model": "t"}],
            "builder": {"kind": "layered", "depth": 5, "width": 2, "budget": 30},
            "graft": {"kind": "treegraft", "lookback": 0},
            "stop": {"max_new_tokens": 100, **stop},
        }
    )
    return build_pipeline(config, {"t": counting_model()}, PieceTokenizer("abcdefgh"))


def end(result: Generation) -> tuple[list[int], str]:
    return result.tokens, result.finish_reason


# --- the story: a step accepts 1 2 3 4 5 and adds 6 -----------------------------------------------


def test_without_a_stop_the_whole_path_is_committed() -> None:
    first = next(counting().stream([0]))
    assert first.tokens == [1, 2, 3, 4, 5, 6]
    assert first.text == "bcdefg"


def test_eos_inside_an_accepted_path() -> None:
    result = counting(eos=[3]).generate([0])
    assert end(result) == ([1, 2, 3], "eos")
    assert result.text == "bcd"
    assert (result.steps[0].n_new, result.steps[0].n_path) == (3, 5)
    assert result.steps[0].accepted == (3,)


def test_the_first_of_several_eos_ids_ends_the_text() -> None:
    assert end(counting(eos=[5, 2, 7]).generate([0])) == ([1, 2], "eos")


def test_eos_as_the_bonus_token_and_as_the_first() -> None:
    assert end(counting(eos=[6]).generate([0])) == ([1, 2, 3, 4, 5, 6], "eos")
    assert end(counting(eos=[1]).generate([0])) == ([1], "eos")


def test_max_new_tokens_inside_an_accepted_path() -> None:
    for n in range(1, 15):
        assert end(counting(max_new_tokens=n).generate([0])) == (
            [(i + 1) % V for i in range(n)],
            "length",
        )


def test_an_eos_at_the_last_allowed_token_is_an_eos() -> None:
    assert end(counting(max_new_tokens=3, eos=[3]).generate([0])) == ([1, 2, 3], "eos")


def test_min_new_tokens_masks_eos_along_the_path() -> None:
    """3 is masked while fewer than 5 tokens stand: the target takes the next likeliest, 0."""
    result = counting(eos=[3], min_new_tokens=5, max_new_tokens=12).generate([0])
    assert end(result) == ([1, 2, 0, 1, 2, 3], "eos")


def test_min_new_tokens_where_every_token_is_an_end_is_refused() -> None:
    """All logits would be masked, and the text end at once with whatever id comes first."""
    with pytest.raises(ConfigError) as caught:
        counting(eos=list(range(V)), min_new_tokens=2).stream([0])
    assert str(caught.value) == (
        "stop.min_new_tokens must be 0 where stop.eos holds every id, found 2"
    )
    assert end(counting(eos=list(range(V))).generate([0])) == ([1], "eos")


def test_a_stop_string_inside_an_accepted_path() -> None:
    result = counting(strings=["de"]).generate([0])
    assert end(result) == ([1, 2, 3, 4], "stop_string")
    assert result.text == "bcde"


def test_a_stop_string_across_two_steps() -> None:
    assert end(counting(strings=["fgh"]).generate([0])) == ([1, 2, 3, 4, 5, 6, 7], "stop_string")


def test_the_prompt_is_no_part_of_a_stop_string() -> None:
    assert end(counting(strings=["ab"], max_new_tokens=7).generate([0]))[1] == "length"
    assert end(counting(strings=["bc"]).generate([0, 1])) == (
        [2, 3, 4, 5, 6, 7, 0, 1, 2],
        "stop_string",
    )


def test_eos_comes_before_a_stop_string_that_it_completes() -> None:
    assert end(counting(strings=["cd"], eos=[3]).generate([0])) == ([1, 2, 3], "eos")


def test_a_special_token_can_be_a_stop_string() -> None:
    made = counting(strings=["<3>"])
    made.tokenizer = PieceTokenizer(["a", "b", "c", "", "e", "f", "g", "h"])
    result = made.generate([0])
    assert end(result) == ([1, 2, 3], "stop_string")
    assert result.text == "bc"


# --- stop strings and streams, token by token -----------------------------------------------------


@given(
    text=st.text("aé€😀b ", max_size=20),
    strings=st.lists(st.text("aé€😀b ", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=100)
def test_a_stop_string_ends_with_the_byte_that_completes_it(text: str, strings: list[str]) -> None:
    tokens = list(text.encode())
    stops = StopStrings(strings, ByteTokenizer())
    found = next((i for i, token in enumerate(tokens) if stops.completes(token)), None)
    first = min((text.find(s) + len(s) for s in strings if s in text), default=None)
    expected = None if first is None else len(text[:first].encode()) - 1
    assert found == expected


def test_a_stop_string_is_found_far_into_a_long_text() -> None:
    stops = StopStrings(["END"], ByteTokenizer())
    assert not any(stops.completes(token) for token in b"EN " * 500)
    assert [stops.completes(token) for token in b"END"] == [False, False, True]


@given(text=st.text("aé€😀 \ufffd", max_size=20), cuts=st.lists(st.integers(0, 60), max_size=8))
@settings(max_examples=100)
def test_a_stream_never_emits_half_a_character(text: str, cuts: list[int]) -> None:
    tokens = list(text.encode())
    borders = sorted({0, len(tokens), *(c for c in cuts if c < len(tokens))})
    stream = TextStream(ByteTokenizer())
    emitted = ""
    for start, stop in pairwise(borders):
        emitted += stream.push(tokens[start:stop])
        assert text.startswith(emitted)
    assert emitted + stream.flush() == text


def test_bytes_that_never_become_a_character_come_with_the_flush() -> None:
    stream = TextStream(ByteTokenizer())
    assert stream.push(list("a€".encode()[:-1])) == ""
    assert stream.flush() == "a\ufffd"
    assert stream.flush() == ""


def test_a_text_that_ends_inside_a_character_is_streamed_to_its_end() -> None:
    """The target recites; the text is cut after every number of bytes, in and between steps."""
    poem = list("aé€😀é€b".encode())

    def recite(text: Sequence[int]) -> Tensor:
        said = poem[(len(text) - 1) % len(poem)]
        return torch.nn.functional.one_hot(torch.tensor(said), 256) * 9.0

    config = parse_config(
        {
            "target": {"model": "t"},
            "drafters": [{"kind": "lm", "model": "t"}],
            "builder": {"kind": "layered", "depth": 3, "width": 1, "budget": 3},
            "graft": {"kind": "treegraft", "lookback": 0},
        }
    )
    made = build_pipeline(config, {"t": TableModel(recite, 256)}, ByteTokenizer())
    for n in range(1, len(poem) + 1):
        chunks = list(made.stream([0], max_new_tokens=n))
        last = chunks[-1].generation
        assert last is not None
        assert "".join(chunk.text or "" for chunk in chunks) == last.text
        assert last.text == bytes(poem[:n]).decode(errors="replace")


@pytest.mark.parametrize("strings", [["bc"], ["h"], ["ha"], ["defg", "fgh"]])
def test_a_stream_ends_with_the_text_of_the_result(strings: list[str]) -> None:
    chunks = list(counting(strings=strings).stream([0]))
    last = chunks[-1].generation
    assert last is not None
    assert all(chunk.generation is None for chunk in chunks[:-1])
    assert "".join(chunk.text or "" for chunk in chunks) == last.text
    assert [token for chunk in chunks for token in chunk.tokens] == last.tokens


def test_bytes_that_are_no_text_do_not_hold_a_stream_back_for_ever() -> None:
    class Bytes:
        n_decoded = 0

        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            self.n_decoded += len(token_ids)
            return bytes(token_ids).decode(errors="replace")

    tokenizer = Bytes()
    stream = TextStream(tokenizer)
    pieces = [stream.push([0xFF]) for _ in range(400)]
    assert "".join(pieces) + stream.flush() == "\ufffd" * 400
    assert tokenizer.n_decoded < 400 * 20
