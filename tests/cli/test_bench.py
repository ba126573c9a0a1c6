"""``bench peers`` and ``bench profile`` on tiny models, with transformers as the peer."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def prompts(write):
    return write(
        "p.json", '[{"prompt": "one two three, one two", "kind": "count"}, {"text": "The"}]'
    )


def test_peers_measures_ours_beside_transformers(treegraft, zoo, prompts):
    arms = [f"--arm={name}" for name in ("never", "ours", "hf_plain", "hf_assisted", "hf_lookup")]
    models = ["--target", zoo.target, "--drafter", zoo.small, "--threads", 1]
    arms.append("--compile=off")
    command = ["bench", "peers", *models, "--prompts", prompts, "-n", 8, *arms, "--json"]
    result = treegraft(*command)
    assert result.code == 0, result.err
    data = result.json
    assert list(data["arms"]) == ["plain", "never", "ours", "hf_plain", "hf_assisted", "hf_lookup"]
    assert all(figures["texts_that_differ"] == 0 for figures in data["arms"].values())
    assert data["failed"] == data["absent"] == {}
    assert data["ratios"]["ours/hf_best"]["median"] > 0.0
    assert data["ratios"]["ours/peers_best"] is None
    assert data["physical_limit_share"] > 0.0
    assert data["threads"] == 1
    assert set(data["versions"]) == {"treegraft", "transformers"}
    assert {run["new_tokens"] for run in data["runs"]} == {8}


def test_peers_prints_tables_and_who_is_not_installed(treegraft, zoo, prompts):
    arms = ["--arm=ours", "--arm=flashspec_lookup", "--temperature", 0.7, "--compile=off"]
    models = ["--target", zoo.target, "--drafter", zoo.small, "--threads", 1]
    result = treegraft("bench", "peers", *models, "--prompts", prompts, "-n", 4, *arms)
    assert result.code == 0, result.err
    assert ": temperature 0.7, 2 prompts" in result.out
    assert "ours/plain" in result.out
    assert "share of physical limit" in result.out
    assert "not compared" in result.out
    assert "flashspec" in result.out


def test_full_length_texts_go_on_past_end_tokens(treegraft, zoo, prompts, write):
    config = write("c.yaml", f"target: {{model: {zoo.target}}}\nstop: {{eos: [5]}}\n")
    command = ["bench", "peers", "-c", config, "--prompts", prompts, "-n", 3, "--arm=plain"]
    data = treegraft(*command, "--threads", 1, "--full-length", "--json").json
    assert data["settings"]["eos"] == []
    assert {run["new_tokens"] for run in data["runs"]} == {3}


def test_profile_prints_stages_forwards_and_the_share(treegraft, zoo, prompts):
    models = ["--target", zoo.target, "--drafter", "ngram", "--drafter", zoo.small]
    options = ["--prompts", prompts, "-n", 8]
    result = treegraft("bench", "profile", *models, *options)
    assert result.code == 0, result.err
    for word in ("verify", "forward:small", "bare, ms", "share of the physical limit"):
        assert word in result.out
    data = treegraft("bench", "profile", *models, *options, "--json").json
    assert data["new_tokens"] == 16
    assert data["forwards"]["target"]["per_step"] == 1.0
    assert data["config"]["target"]["model"] == zoo.target


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--arm nobody", "--arm must be one of plain, never, always, ours, hf_plain"),
        ("--peer-python vllm=python", "--peer-python must be NAME=PATH with NAME of transformers"),
        ("--peer-python economize=/no/where", "'/no/where' is no program that can be run"),
        ("--limit 2", "--limit 2 needs --prompts FILE, found none"),
        ("--dtype auto", "backend.dtype must be named"),
        ("--target /no/where", "model '/no/where': no such folder"),
        ("-n 2100", "must have 1 to 2048 tokens with 2100 new ones"),
        ("-c {top_k}", "sampling.top_k must be left out here"),
        ("-c {strings}", "stop.strings must be left out here"),
        ("-c {lookups} --drafter zoo:small", "the config has no drafter of kind lm to replace"),
    ],
)
def test_mistakes_are_named_before_anything_starts(treegraft, write, arguments, message):
    target = "target: {model: 'zoo:target'}\n"
    files = {
        "top_k": write("top_k.yaml", target + "sampling: {temperature: 1.0, top_k: 5}\n"),
        "strings": write("strings.yaml", target + "stop: {strings: [x]}\n"),
        "lookups": write("lookups.yaml", target + "drafters: [{kind: ngram}]\n"),
    }
    result = treegraft("bench", "peers", *arguments.format(**files).split())
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_foreign_tokenizer_needs_prompts(treegraft, zoo):
    for command in ("peers", "profile"):
        result = treegraft("bench", command, "--target", zoo.target)
        assert result.code == 2
        assert "--prompts FILE is needed" in result.err


def test_a_peer_with_an_interpreter_that_fails_is_listed(treegraft, zoo, prompts, tmp_path):
    broken = tmp_path / "python"
    broken.write_text(f"#!{sys.executable}\nraise SystemExit('no torch here')\n")
    broken.chmod(0o755)
    models = ["--target", zoo.target, "--drafter", zoo.small, "--arm=economize_lookup"]
    options = ["--prompts", prompts, "-n", 4, "--peer-python", f"economize={broken}", "--json"]
    options.append("--compile=off")
    result = treegraft("bench", "peers", *models, *options)
    assert result.code == 0, result.err
    assert result.json["failed"] == {"economize_lookup": "ended with exit code 1: no torch here"}
