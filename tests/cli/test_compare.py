"""``compare``: what it says when all is well, and that it can fail."""

from __future__ import annotations

import pytest

FAULTY = "verifier: {kind: 'faulty_verifier:AcceptsTheFirstChild'}\n"


@pytest.fixture
def configs(zoo, write):
    """Files of plain decoding, two ways of drafting, and a verifier that breaks the law."""
    target = f"target: {{model: {zoo.target}}}\nstop: {{max_new_tokens: 12}}\n"
    drafted = (
        f"drafters: [{{kind: ngram}}, {{kind: lm, model: {zoo.small}}}]\n"
        "builder: {kind: layered, width: 3, budget: 12}\n"
    )
    return {
        "plain": write("plain.yaml", target),
        "never": write("never.yaml", target + drafted),
        "always": write("always.yaml", target + drafted + "scheduler: {kind: always}\n"),
        "faulty": write("faulty.yaml", target + drafted + FAULTY + "scheduler: {kind: always}\n"),
        "sampled": write("sampled.yaml", target + "sampling: {temperature: 0.5}\n"),
    }


@pytest.fixture
def prompts(write):
    return write("p.json", '[{"prompt": "one two", "kind": "count"}, {"text": "The", "id": "x"}]')


def test_compare_reports_ratios_and_equality(treegraft, configs, prompts):
    files = [configs[name] for name in ("plain", "never", "always")]
    result = treegraft("compare", *files, "--prompts", prompts, "--repeat", 2, "--json")
    assert result.code == 0
    data = result.json
    assert (data["prompts"], data["repeat"], data["baseline"]) == (2, 2, "plain")
    assert list(data["configs"]) == ["plain", "never", "always"]
    for name, figures in data["configs"].items():
        assert figures["identical"] is True
        assert figures["new_tokens"] == 2 * 2 * 12
        assert figures["ratio_low"] <= figures["ratio_median"] <= figures["ratio_high"]
        assert set(figures["seconds"]) >= {"target", "drafters", "tree", "verify", "host"}
        assert figures["config"]["target"] == data["configs"]["plain"]["config"]["target"]
        assert name == "plain" or set(figures["drafters"]) == {"ngram", "small"}
    base = data["configs"]["plain"]
    assert base["ratio_to_first"] == 1.0
    always = data["configs"]["always"]
    assert always["ratio_to_first"] == pytest.approx(
        always["tokens_per_second"] / base["tokens_per_second"]
    )
    assert set(data["kinds"]) == {"count"}


def test_compare_prints_a_table(treegraft, configs, prompts):
    files = [configs["plain"], configs["never"]]
    result = treegraft("compare", *files, "--prompts", prompts, "-n", 4)
    assert result.code == 0
    assert "identical" in result.out
    assert "x plain" in result.out


def test_compare_fails_when_tokens_differ(treegraft, configs, prompts):
    result = treegraft(
        "compare", configs["plain"], configs["faulty"], "--prompts", prompts, "--json"
    )
    assert result.code == 1
    figures = result.json["configs"]["faulty"]
    assert figures["identical"] is False
    assert figures["fault"] is True
    first = figures["differences"][0]
    assert first["expected"] != first["found"]
    printed = treegraft("compare", configs["plain"], configs["faulty"], "--prompts", prompts)
    assert printed.code == 1
    assert "DIFFER in 2 texts" in printed.out
    assert "faulty: prompt 1, new token" in printed.err


def test_compare_refuses_configs_that_ask_for_other_texts(treegraft, configs, prompts):
    result = treegraft("compare", configs["plain"], configs["sampled"], "--prompts", prompts)
    assert result.code == 2
    assert result.err == (
        "error: configs must share target, sampling and stop: sampling.temperature is 0.0 in "
        "plain and 0.5 in sampled\n"
    )
