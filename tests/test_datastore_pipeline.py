"""A datastore in a pipeline: the tokens are the target's, and a store that does not fit is refused.

The corpus is text of the target itself (all is accepted) or foreign (nothing is).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_models import TableModel, hashed_model, mixed_model

from treegraft.backends.datastore_writer import DatastoreWriter
from treegraft.backends.reference import plain_tokens
from treegraft.backends.vocabulary import fingerprint
from treegraft.bench.comparison import build_pipelines
from treegraft.config import parse_config
from treegraft.core.errors import DatastoreError, UnsupportedModelError
from treegraft.core.sampling import Sampling
from treegraft.pipeline import Pipeline, build_pipeline

V = 40
TARGET = hashed_model(V, seed=1, order=3)
NEAR = mixed_model(TARGET, hashed_model(V, seed=2), 0.3)
PROMPT = [1, 2, 3]


def plain(n: int, prompt: Sequence[int] = PROMPT, **sampling: Any) -> list[int]:
    return plain_tokens(lambda text: TARGET.logits(text).float(), prompt, n, Sampling(**sampling))


def store(folder: Path, documents: Sequence[Sequence[int]], **origin: Any) -> str:
    with DatastoreWriter(folder, origin.pop("vocab_size", V), **origin) as writer:
        for document in documents:
            writer.add(document)
        writer.finish()
    return str(folder)


def pipeline(path: str, *others: dict[str, Any], tokenizer: Any = None, **options: Any) -> Pipeline:
    drafter = {"kind": "datastore", "path": path, **options.pop("drafter", {})}
    config = {"target": {"model": "t"}, "drafters": [drafter, *others], **options}
    models = {"t": TARGET, "near": NEAR}
    return build_pipeline(parse_config(config), models=models, tokenizer=tokenizer)


# --- the story ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
def test_a_text_that_is_in_the_store_is_accepted_whole(
    tmp_path: Path, sampling: dict[str, Any]
) -> None:
    text = plain(60, **sampling)
    made = pipeline(
        store(tmp_path / "s", [PROMPT + text]), drafter={"length": 9}, sampling=sampling
    )
    result = made.generate(PROMPT, max_new_tokens=60)
    assert result.tokens == text
    assert all(step.n_new >= 10 for step in result.steps[:-1])
    assert result.statistics.target_calls <= 6


def test_a_tokenizer_that_cannot_list_its_tokens_is_no_reason_to_fail(tmp_path: Path) -> None:
    """It ended in an AttributeError; the width of the logits is still compared."""

    class Decoder:
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            return " ".join(map(str, token_ids))

    path = store(tmp_path / "s", [PROMPT + plain(20)])
    near = {"kind": "lm", "model": "near"}
    made = pipeline(path, near, tokenizer=Decoder())
    assert made.generate(PROMPT, max_new_tokens=20).tokens == plain(20)
    other = store(tmp_path / "t", [[1, 2]], vocab_size=V + 1)
    with pytest.raises(UnsupportedModelError, match="41"):
        pipeline(other, tokenizer=Decoder())


def test_a_store_of_something_else_proposes_nothing(tmp_path: Path) -> None:
    text = plain(40)
    pairs = set(zip([*PROMPT, *text], [*PROMPT[1:], *text], strict=False))
    foreign = [[a, b] for a in range(V) for b in range(V) if (a, b) not in pairs]
    made = pipeline(store(tmp_path / "s", foreign), drafter={"min_n": 2})
    result = made.generate(PROMPT, max_new_tokens=40)
    assert result.tokens == text
    assert result.statistics.drafted == (0,)
    assert result.statistics.target_calls == 40


# --- the law --------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 1.0]),
    backend=st.sampled_from(["tensor", "reference"]),
    noise=st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=8), max_size=6),
    calls=st.lists(st.sampled_from(["datastore", "ngram", "near"]), min_size=1, max_size=4),
    length=st.integers(1, 12),
    min_n=st.integers(1, 3),
)
def test_the_tokens_are_those_of_plain_decoding(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    temperature: float,
    backend: str,
    noise: list[list[int]],
    calls: list[str],
    length: int,
    min_n: int,
) -> None:
    sampling = {"temperature": temperature, "seed": seed}
    text = plain(25, **sampling)
    documents = [*noise, text[5:20], PROMPT + text[:4] + text[9:]]
    made = pipeline(
        store(tmp_path_factory.mktemp("stores") / "s", documents),
        {"kind": "ngram"},
        {"kind": "lm", "model": "near"},
        drafter={"length": length, "min_n": min_n},
        builder={"kind": "layered", "depth": 4, "width": 3, "budget": 14},
        scheduler={"kind": "fixed", "calls": calls},
        sampling=sampling,
        backend={"kind": backend},
    )
    assert made.generate(PROMPT, max_new_tokens=25).tokens == text


# --- what does not fit ----------------------------------------------------------------------------


class Words:
    """A tokenizer as far as it is asked here."""

    def __init__(self, first: int = 0) -> None:
        self._ids = {f"w{(i + first) % V}": i for i in range(V)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids


class Unloaded(TableModel):
    """A target that must not be asked for anything."""

    def new_cache(self, n_rows: int, old: Any = None) -> Any:
        raise AssertionError("weights were used")


def test_a_store_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    origin = {"tokenizer": "other", "vocabulary": fingerprint(Words())}
    path = store(tmp_path / "s", [[1, 2]], **origin)
    pipeline(path, tokenizer=Words())
    with pytest.raises(UnsupportedModelError, match=r"tokenizer of 'other' .* has another one"):
        pipeline(path, tokenizer=Words(first=1))


def test_a_store_is_refused_before_any_weight_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its tokenizer or its files, whatever of the two is wrong."""
    from treegraft.backends import hf

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(hf, "load_model", load)
    path = store(tmp_path / "s", [[1, 2]], vocabulary=fingerprint(Words()), tokenizer="toy")
    for folder, error, message in (
        (path, UnsupportedModelError, "was built with the tokenizer of 'toy' (40 ids) and target"),
        (str(tmp_path / "no"), DatastoreError, "no such folder"),
    ):
        drafter = {"kind": "datastore", "path": folder}
        config = parse_config({"target": {"model": "zoo:small"}, "drafters": [drafter]})
        with pytest.raises(error) as caught:
            build_pipeline(config)
        assert message in str(caught.value)


def test_without_a_tokenizer_the_width_decides(tmp_path: Path) -> None:
    path = store(tmp_path / "s", [[1, 2]], vocab_size=V - 1)
    with pytest.raises(
        UnsupportedModelError, match=f"has {V - 1} token ids and target 't' has {V}"
    ):
        pipeline(path)


def test_pipelines_that_are_compared_share_a_store(tmp_path: Path) -> None:
    path = store(tmp_path / "s", [PROMPT + plain(20)])
    drafter = {"kind": "datastore", "path": path}
    configs = {
        name: parse_config({"target": {"model": "t"}, "drafters": [drafter], **options})
        for name, options in {"a": {}, "b": {"builder": {"kind": "layered", "depth": 2}}}.items()
    }
    made = build_pipelines(configs, {"t": TARGET})
    # Both have begun a text of their own in it.
    streams = [made[name].stream(prompt, max_new_tokens=20) for name, prompt in
               (("a", PROMPT), ("b", [5, 6]))]  # fmt: skip
    texts: list[list[int]] = [[], []]
    for _ in range(20):
        for stream, text in zip(streams, texts, strict=True):
            text += next(stream).tokens if len(text) < 20 else []
    assert texts == [plain(20), plain(20, [5, 6])]
