"""``treegraft schedule``: from prompts to a scheduler that is held to account, and its errors."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
import yaml

from treegraft.scheduling.fit import split_of

CONFIG = """
target: {{model: "{target}"}}
drafters: [{{kind: ngram}}, {{kind: lm, model: "{small}", name: small}}]
builder: {{kind: layered, depth: 2, width: 2, budget: 5}}
stop: {{max_new_tokens: 10}}
"""


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory):
    """Enough prompts that no split is empty."""
    file = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    lines = [{"id": f"w{i}", "ids": [i % 7, 3, 40 + i, 5, 3, 40 + i]} for i in range(20)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.fixture
def config(zoo, write):
    return write("c.yaml", CONFIG.format(target=zoo.target, small=zoo.small))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return tmp_path_factory.mktemp("schedule")


@pytest.fixture
def made(treegraft, config, prompt_file, workshop):
    """Traces and costs, made once; nobody writes to them."""
    traces, costs = workshop / "traces", workshop / "costs.json"
    if costs.exists():
        return traces, costs
    ask = ("schedule", "collect", "-c", config, "--prompts", prompt_file, "--every", 3)
    result = treegraft(*ask, "-o", traces)
    assert result.code == 0, result.err
    assert f"{traces}: " in result.out
    assert "steps of 20 prompts" in result.out
    result = treegraft(
        "schedule", "calibrate", "-c", config, "-o", costs, "--repeats", 1, "--limit", 2,
        "--prompts", prompt_file, "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert result.json["predicted_over_measured"] > 0
    assert set(result.json["stages"]) == {"step", "rest", "target", "drafter:small"}
    return traces, costs


def test_the_whole_way_to_a_scheduler(treegraft, made, config, prompt_file, tmp_path):
    traces, costs = made
    again = treegraft(
        "schedule", "collect", "-c", config, "--prompts", prompt_file, "--every", 3, "-o", traces
    )
    assert "20 of 20 prompts are there already" in again.err
    ask = ("schedule", "fit", traces, "--costs", costs, "--epochs", 2, "-o", tmp_path / "s")
    fitted = treegraft(*ask)
    assert fitted.code == 0, fitted.err
    for word in ("never", "always", "best_fixed", "value", "oracle", "best fixed schedule:"):
        assert word in fitted.out
    assert "ceiling: left out" in fitted.out
    assert set(treegraft(*ask, "--json").json["splits"]) == {"train", "validation", "test"}
    evaluate = ("schedule", "evaluate", "-c", config, tmp_path / "s", "--prompts", prompt_file)
    result = treegraft(*evaluate, "--repeat", 1, "--every", 2, "--json")
    assert result.code == 0, result.err
    assert set(result.json["suites"]) == {"words"}
    figures = result.json["suites"]["words"]
    assert figures["identical"] is True
    assert figures["oracle_to_better_endpoint"] >= 0.99
    assert figures["value_to_paper_endpoint"] > 0
    assert set(result.json["mean"]) == set(figures)
    assert 0 < result.json["scheduler_share_of_step"] < 1
    assert result.json["prompts"] + len(result.json["left_out"]) == 20
    assert f"left out {len(result.json['left_out'])} prompts" in result.err
    held = json.loads(costs.read_text())
    held["environment"]["torch"] = "1.0"
    (tmp_path / "old.json").write_text(json.dumps(held))
    stale = treegraft(*evaluate, "--costs", tmp_path / "old.json")
    assert stale.code == 2
    assert "were measured with torch '1.0', found" in stale.err
    shown = treegraft(*evaluate, "--repeat", 1, "--no-paper", "--costs", costs)
    assert "value over the better endpoint" in shown.out
    assert "decisions take" in shown.out
    generated = treegraft(
        "generate", "-c", config, "--scheduler", f"value:{tmp_path / 's'}", "--ids", "-p", "1,2,3",
        "--json",
    )  # fmt: skip
    assert generated.code == 0, generated.err
    other = treegraft(
        "generate", "-c", config, "--depth", 3, "--scheduler", f"value:{tmp_path / 's'}", "--ids",
        "-p", "1,2,3",
    )  # fmt: skip
    assert other.code == 2
    assert other.err == (
        f"error: scheduler.artefact {str(tmp_path / 's')!r} was made for another pipeline: "
        "builder.depth is 2 there and 3 here\n"
    )


def test_the_ceiling_and_a_temperature(treegraft, made, config, prompt_file, tmp_path):
    """What the features could show, in both tables; and texts of another sampling."""
    pytest.importorskip("sklearn")
    traces, costs = made
    ask = ("schedule", "fit", traces, "--costs", costs, "--epochs", 1, "-o", tmp_path / "s")
    shown = treegraft(*ask, "--ceiling", "--target-scale", 3)
    assert shown.out.startswith("cost-scaled: target forwards times 3\n")
    assert "ceiling: boosted trees on the same features" in shown.out
    splits = json.loads((tmp_path / "s" / "scheduler.json").read_text())["metrics"]
    assert set(splits) == {"train", "validation", "test", "all"}
    assert all(figures["ceiling"] <= figures["oracle"] for figures in splits.values())
    evaluate = (
        "schedule", "evaluate", "-c", config, tmp_path / "s", "--prompts", prompt_file, "--repeat",
        1, "--no-paper", "--temperature", 0.8, "--seed", 3, "--max-new-tokens", 5,
    )  # fmt: skip
    result = treegraft(*evaluate, "--ceiling", traces, "--json")
    assert result.code == 0, result.err
    assert "another sampling (temperature 0.0 there, 0.8 here)" in result.err
    assert result.json["sampling"]["temperature"] == 0.8
    assert result.json["cost_scaled"] == "target forwards times 3"
    figures = result.json["suites"]["words"]
    assert figures["identical"] is True
    assert 0 < figures["ceiling_to_better_endpoint"] <= figures["oracle_to_better_endpoint"]
    assert figures["value_to_plain"] > 0
    assert figures["value_to_paper_endpoint"] is None
    assert "cost-scaled: target forwards times 3" in treegraft(*evaluate).out


def test_a_deepened_targets_costs_are_taken_only_where_they_are_said_to_be(
    treegraft, made, config, zoo, tmp_path
):
    traces, costs = made
    fit = ("schedule", "fit", traces, "--epochs", 1, "-o", tmp_path / "s")
    own = treegraft(*fit, "--costs", costs, "--cost-scaled")
    assert own.code == 2
    assert "are of another target than the traces, found the same" in own.err
    held = json.loads(costs.read_text())
    held["models"]["target"] = "f00d"
    (tmp_path / "deep.json").write_text(json.dumps(held))
    plain = treegraft(*fit, "--costs", tmp_path / "deep.json")
    assert plain.code == 2
    assert "measured for another target (f00d) than the traces'" in plain.err
    assert not (tmp_path / "s").exists()
    scaled = treegraft(*fit, "--costs", tmp_path / "deep.json", "--cost-scaled")
    assert scaled.code == 0, scaled.err
    assert scaled.out.startswith("cost-scaled: forwards of target f00d, texts of ")
    other = treegraft(
        "generate", "-c", config, "--scheduler", f"value:{tmp_path / 's'}", "--ids", "-p", "1,2,3"
    )
    assert other.code == 2
    assert "made for another pipeline: target is 'f00d' there" in other.err


def test_a_scheduler_is_not_judged_by_what_it_was_fitted_on(treegraft, made, config, tmp_path):
    traces, costs = made
    fit = ("schedule", "fit", traces, "--costs", costs, "--epochs", 1, "-o", tmp_path / "s")
    assert treegraft(*fit).code == 0
    header = json.loads((tmp_path / "s" / "scheduler.json").read_text())
    known = header["data"]["fitted_on"]
    assert known
    assert all(split_of(key) != "test" for key in known)
    # The prompt of a trace that is no test, by its tokens.
    file = tmp_path / "seen.jsonl"
    lines = [{"ids": [i % 7, 3, 40 + i, 5, 3, 40 + i]} for i in range(20)]
    from treegraft.scheduling.collect import prompt_key

    seen = [line for line in lines if prompt_key(line["ids"])[:16] in known]
    file.write_text("\n".join(map(json.dumps, seen)))
    result = treegraft("schedule", "evaluate", "-c", config, tmp_path / "s", "--prompts", file)
    assert result.code == 2
    assert f"the scheduler was fitted on all {len(seen)} prompts" in result.err


def test_texts_that_end_at_once_are_skipped_by_name(treegraft, config, write, tmp_path):
    file = write("p.jsonl", '{"ids": [1, 2], "id": "short"}\n{"ids": [3, 4], "id": "too"}')
    data = yaml.safe_load(config.read_text()) | {"stop": {"max_new_tokens": 1}}
    config.write_text(yaml.safe_dump(data))
    result = treegraft("schedule", "collect", "-c", config, "--prompts", file, "-o", tmp_path / "t")
    assert result.code == 0, result.err
    assert "skipped prompt 'short': its text ends at once, nothing to schedule" in result.err
    empty = treegraft(
        "schedule", "fit", tmp_path / "t", "--costs", tmp_path / "c.json", "-o", tmp_path / "s"
    )
    assert empty.code == 2
    assert "hold no step to learn from" in empty.err
    assert not (tmp_path / "s").exists()


def test_suites_that_end_at_once_and_traces_of_another_tree_are_named(
    treegraft, made, config, prompt_file, tmp_path
):
    traces, costs = made
    fit = ("schedule", "fit", traces, "--costs", costs, "--epochs", 1, "-o", tmp_path / "s")
    assert treegraft(*fit).code == 0
    evaluate = ("schedule", "evaluate", "-c", config, tmp_path / "s", "--prompts", prompt_file)
    result = treegraft(*evaluate, "--no-paper", "--max-new-tokens", 1)
    assert result.code == 2
    assert result.err.endswith(
        "error: the texts of suite 'words' end at once: nothing to schedule\n"
    )
    pytest.importorskip("sklearn")
    other = shutil.copytree(traces, tmp_path / "t")
    header = json.loads((other / "trace.json").read_text())
    header["signature"]["builder"]["width"] = 9
    (other / "trace.json").write_text(json.dumps(header))
    result = treegraft(*evaluate, "--no-paper", "--ceiling", other)
    assert result.code == 2
    assert result.err.endswith(
        "error: --ceiling: traces of another pipeline than the scheduler's: builder.width is 2 "
        "there and 9 here\n"
    )


@pytest.mark.parametrize("command", ["calibrate", "collect"])
def test_a_head_has_no_costs_and_no_traces_and_is_named(treegraft, config, command, tmp_path):
    data = yaml.safe_load(config.read_text())
    data["drafters"].append({"kind": "head", "model": "nowhere", "name": "eagle"})
    config.write_text(yaml.safe_dump(data))
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"ids": [1, 2]}')
    words = ("schedule", command, "-c", config, "--prompts", prompts, "-o", tmp_path / "out")
    result = treegraft(*words)
    assert result.code == 2
    assert "must not ask for the target's hidden states" in result.err
    assert "found 'eagle'" in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("collect -c {c} -o {t}", "--prompts FILE is needed, found none"),
        ("fit {t} --costs {t}/c.json -o {t}/s", "no trace.json; make traces with"),
        ("evaluate -c {c} {t}/s", "cannot be read"),
        ("evaluate -c {c} {t}/s --plot x.txt", "--plot must end in .png, .svg or .pdf"),
        ("collect -c {c} --prompts {c} -o {t}/s --every 0", "--every"),
    ],
)
def test_mistakes_are_one_line(treegraft, config, tmp_path, arguments, said):
    words = [word.format(c=config, t=tmp_path) for word in arguments.split()]
    result = treegraft("schedule", *words)
    assert result.code == 2
    assert said in result.err
    assert result.err.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is not None, reason="it is installed")
def test_the_ceiling_is_an_extra(treegraft, config, tmp_path):
    for words in (("fit", tmp_path, "--costs", "c.json", "-o", tmp_path / "s", "--ceiling"),):
        result = treegraft("schedule", *words)
        assert result.code == 2
        assert "get treegraft[ceiling]" in result.err


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_ray_is_an_extra(treegraft, config, prompt_file, tmp_path):
    result = treegraft(
        "schedule", "collect", "-c", config, "--prompts", prompt_file, "-o", tmp_path / "t",
        "--ray", "auto",
    )  # fmt: skip
    assert result.code == 2
    assert "install treegraft[ray]" in result.err


def test_the_group_shows_its_commands(treegraft):
    out = treegraft("schedule").out
    for name in ("calibrate", "collect", "fit", "evaluate"):
        assert name in out
