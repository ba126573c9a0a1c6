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


def test_compare_on_the_shipped_prompts_above_temperature_0(treegraft, write):
    """zoo:prompts are of each kind in turn, as in the demo; one seed gives all arms one text."""
    target = "target: {model: 'zoo:target'}\n"
    files = [write("plain.yaml", target), write("n.yaml", target + "drafters: [{kind: ngram}]\n")]
    options = ["--limit", 3, "-n", 5, "--temperature", 0.8, "--seed", 3]
    result = treegraft("compare", *files, "--prompts", "zoo:prompts", *options, "--json")
    assert result.code == 0
    assert result.json["kinds"].keys() == {"code", "docstring", "edit"}
    for figures in result.json["configs"].values():
        assert figures["config"]["sampling"]["temperature"] == 0.8
        assert figures["config"]["sampling"]["seed"] == 3
        assert figures["identical"] is True


def test_compare_takes_variants_of_one_base(treegraft, configs, prompts, write):
    base = "\n  ".join(["base:", *configs["never"].read_text().splitlines()])
    file = write("many.yaml", base + "\nvariants:\n  first: {}\n  second: {graft: {kind: union}}\n")
    ask = ("--prompts", prompts, "-n", 4, "--json")
    data = treegraft("compare", file, *ask).json
    assert list(data["configs"]) == ["first", "second"]
    assert all(figures["identical"] for figures in data["configs"].values())
    kinds = [figures["config"]["graft"]["kind"] for figures in data["configs"].values()]
    assert kinds == ["treegraft", "union"]
    data = treegraft("compare", configs["plain"], file, *ask).json
    assert list(data["configs"]) == ["plain", "many:first", "many:second"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("variants: {}", "must hold the mappings base and variants alone, found variants"),
        (
            "{base: {target: {model: m}}, variants: {a: {}}, stop: {}}",
            "must hold the mappings base and variants alone, found base, variants, stop",
        ),
        (
            "{base: {target: {model: m}}, variants: []}",
            "variants must map names to options, found []",
        ),
        (
            "{base: {target: {model: m}}, variants: {a: 3}}",
            "variants.a: a mapping of options is needed, found 3",
        ),
        (
            "{base: {target: {model: m}}, variants: {a: {graft: {kind: x}}}}",
            "variants.a: graft: kind must be one of ",
        ),
        (
            "{base: {target: {model: m}}, variants: {a: }}",
            "compare needs at least two configs, found 1",
        ),
    ],
)
def test_variants_that_are_wrong_are_refused_in_one_line(treegraft, prompts, write, text, message):
    result = treegraft("compare", write("many.yaml", text), "--prompts", prompts)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1


def test_the_ablation_names_every_switch_and_graft():
    """Its variants are sound, differ from one another, and leave out no graft of ours."""
    from pathlib import Path

    from treegraft.components import ROLES
    from treegraft.config import load_variants

    variants = load_variants(Path(__file__).parents[2] / "examples" / "ablation.yaml")
    assert {config.graft.kind for config in variants.values()} == set(ROLES["graft"].builtin)
    first = next(iter(variants.values()))
    switched = {
        option
        for config in variants.values()
        if config.graft.kind == "treegraft"
        for option, value in config.graft
        if value != getattr(first.graft, option)
    }
    assert switched == set(type(first.graft).model_fields) - {"kind"}
    assert len({config.model_dump_json() for config in variants.values()}) == len(variants)


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
