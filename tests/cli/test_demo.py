"""``treegraft demo``, on the shipped models where they are built and on tiny ones anywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from treegraft.bench import demo
from treegraft.zoo import ZooPrompt, catalog

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny_catalog(zoo, monkeypatch):
    """The zoo's catalog with tiny models in the place of the shipped ones."""
    prompts = [ZooPrompt(f"{k}-{i}", k, f"{k} {i}") for k in ("code", "prose") for i in "123"]
    paths = {"target": Path(zoo.target), "small": Path(zoo.small)}
    monkeypatch.setattr(catalog, "zoo_path", paths.__getitem__)
    monkeypatch.setattr(catalog, "zoo_prompts", lambda: prompts)
    # The learned schedule holds for the models that it was fitted on.
    fixed = {"scheduler": {"kind": "fixed", "calls": ["recycle", "small"]}}
    monkeypatch.setattr(demo, "DEMO_LEARNED", demo.DEMO_LEARNED | fixed)
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.usefixtures("tiny_catalog")
def test_json_is_all_that_is_on_stdout(treegraft):
    result = treegraft("demo", "--json", "--prompts-per-kind", 2, "-n", 8)
    assert result.code == 0
    data = result.json
    assert data["prompts"] == 4
    assert list(data["configs"]) == ["plain", "never", "always", "mixed", "learned"]
    plain = data["configs"]["plain"]
    for figures in data["configs"].values():
        assert figures["identical"] is True
        assert figures["new_tokens"] == 4 * 8
        assert figures["mean_accepted_length"] == pytest.approx(32 / figures["target_calls"])
        assert figures["ratio_to_plain"] == pytest.approx(
            figures["tokens_per_second"] / plain["tokens_per_second"]
        )
        assert set(figures["seconds"]) >= {"target", "drafters", "tree", "verify", "host"}
        total = sum(figures["seconds"].values())
        assert figures["tokens_per_second"] == pytest.approx(32 / total)
    assert plain["seconds"]["drafters"] == 0
    mixed = data["configs"]["mixed"]["drafters"]
    assert mixed["ngram"]["calls"] > 0
    assert mixed["small"]["seconds"] > 0
    assert {kind: entry["prompts"] for kind, entry in data["kinds"].items()} == {
        "code": 2,
        "prose": 2,
    }


@pytest.mark.usefixtures("tiny_catalog")
def test_text_output_streams_and_says_what_was_found(treegraft):
    result = treegraft("demo", "--prompts-per-kind", 1, "-n", 6, "--temperature", 0.8)
    assert result.code == 0
    assert result.out.startswith("A completion, drafted by ngram and small:\ndef is_palindrome")
    assert "Ratio to plain by kind of prompt" in result.out
    assert "All 36 drafted tokens are identical to plain decoding" in result.out


@pytest.mark.usefixtures("tiny_catalog")
def test_a_token_that_differs_fails_the_demo(treegraft, monkeypatch):
    faulty = {"verifier": {"kind": "faulty_verifier:AcceptsTheFirstChild"}}
    monkeypatch.setattr(demo, "DEMO_SETTINGS", demo.DEMO_SETTINGS | faulty)
    result = treegraft("demo", "--prompts-per-kind", 1, "-n", 6)
    assert result.code == 1
    assert "always differs from plain: prompt code-1, new token" in result.err
    assert "All " not in result.out


@pytest.mark.usefixtures("tiny_catalog")
def test_texts_shrink_to_fit_the_time(treegraft, monkeypatch):
    monkeypatch.setattr(demo, "_MOST_TOKENS", 20)
    data = treegraft("demo", "--json", "--prompts-per-kind", 1).json
    assert 16 <= data["settings"]["max_new_tokens"] <= 20


@pytest.mark.usefixtures("tiny_catalog")
@pytest.mark.parametrize(
    "example",
    [
        *("never", "always", "mixed", "zoo", "own_policy", "calibrated", "four_drafters"),
    ],
)
def test_examples_decode_what_plain_decoding_does(treegraft, monkeypatch, example):
    monkeypatch.syspath_prepend(str(ROOT))
    ask = ("-p", "one two three, one", "-n", 10)
    plain = treegraft("generate", "-c", ROOT / "examples" / "plain.yaml", *ask)
    drafted = treegraft("generate", "-c", ROOT / "examples" / f"{example}.yaml", *ask)
    assert drafted.code == 0, drafted.err
    assert drafted.out == plain.out


def test_the_shipped_models_draft_the_same_tokens(treegraft):
    result = treegraft("demo", "--json", "--prompts-per-kind", 2, "-n", 16)
    assert result.code == 0
    data = json.loads(result.out)
    # A machine that is busy with other work may not get through all of them in a minute.
    assert data["settings"]["prompts_offered"] >= 12
    assert data["prompts"] >= 1
    assert len(data["kinds"]) >= min(3, data["prompts"])
    assert all(figures["identical"] for figures in data["configs"].values())


@pytest.mark.usefixtures("tiny_catalog")
def test_compiled_forwards_are_a_choice_and_a_wrong_one_is_named(treegraft):
    result = treegraft("demo", "--compile", "maybe")
    assert result.code == 2
    assert "--compile must be off, on or auto, found 'maybe'" in result.err


def test_the_readme_prompt_runs(treegraft):
    result = treegraft(
        *("generate", "-c", ROOT / "examples" / "zoo.yaml", "-p", "def parse_args(", "-n", 24)
    )
    assert result.code == 0
    assert re.search(r"\w", result.out)
