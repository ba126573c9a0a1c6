"""Comparison with peers, on fake workers: they claim times and tokens, fail, hang, differ."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from treegraft import ConfigError, PromptError, TreegraftError
from treegraft.bench.lineup import Arm, line_up
from treegraft.bench.peer_report import PeerSettings
from treegraft.bench.peers import compare_peers
from treegraft.bench.shipped import our_configs, shipped_config, shipped_endpoints
from treegraft.prompts import Prompt

FAKE = Path(__file__).with_name("fake_worker.py")
PROMPTS = [Prompt("a", (1, 2, 3), "x"), Prompt("b", (3, 3), "y"), Prompt("c", (2, 1), "x")]
SETTINGS = PeerSettings("zoo:target", "zoo:small", max_new_tokens=4, answer_seconds=20.0)
PLAIN, OURS = Arm("plain", "treegraft", "plain"), Arm("ours", "treegraft", "ours")
HF = Arm("hf_plain", "transformers", "generate")
LOOKUP = Arm("hf_lookup", "transformers", "lookup")
OTHER = Arm("economize_lookup", "economize", "lookup")
ARMS = (PLAIN, OURS, HF, LOOKUP, OTHER)
SPEEDS = {
    "treegraft": {"plain": {"seconds": 1.0}, "ours": {"seconds": 0.5}},
    "transformers": {"generate": {"seconds": 2.0}, "lookup": {"seconds": 0.8}},
    "economize": {"lookup": {"seconds": 1.6}},
}


@pytest.fixture
def bench(tmp_path):
    """Compare fakes of the given behaviours by family; their requests lie in ``bench.log``."""
    log = tmp_path / "log.jsonl"

    def run(behaviours=None, arms=ARMS, settings=SETTINGS, **options):
        told = {family: dict(SPEEDS[family]) for family in SPEEDS}
        for family, changes in (behaviours or {}).items():
            told[family] |= changes
        commands = {f: [sys.executable, str(FAKE), str(log), json.dumps(told[f])] for f in told}
        try:
            return compare_peers(arms, PROMPTS, settings, commands, **options)
        finally:
            run.log = [json.loads(line) for line in log.read_text().splitlines()]
            for pid in {entry["pid"] for entry in run.log}:
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)

    return run


def changed(**options):
    names = PeerSettings.__dataclass_fields__
    return PeerSettings(**{name: getattr(SETTINGS, name) for name in names} | options)


def test_everyone_decodes_every_prompt_and_ratios_follow(bench):
    result = bench()
    assert result.finished == tuple(arm.name for arm in ARMS)
    assert result.n_rounds == 3
    ratios = {name: ratio.median for name, ratio in result.ratios.items()}
    assert ratios == pytest.approx(
        {"ours/plain": 2.0, "ours/hf_best": 1.6, "ours/peers_best": 3.2, "plain/hf_plain": 2.0}
    )
    assert (result.best("hf"), result.best("peers")) == ("hf_lookup", "economize_lookup")
    assert result.physical_limit_share == pytest.approx(0.75)
    assert not result.failed
    assert not result.absent
    assert not result.faulty


def test_the_report_holds_what_is_promised(bench):
    data = json.loads(json.dumps(bench().as_dict()))
    assert set(data["ratios"]) == {
        "ours/plain",
        "ours/hf_best",
        "ours/peers_best",
        "plain/hf_plain",
    }
    for ratio in data["ratios"].values():
        assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert data["physical_limit_share"] == pytest.approx(0.75)
    assert len(data["runs"]) == len(ARMS) * len(PROMPTS)
    first = data["runs"][0]
    assert (first["prompt"], first["kind"], first["arm"]) == ("a", "x", "plain")
    assert (first["new_tokens"], first["seconds"], first["identical"]) == (4, 1.0, True)
    assert set(data["warm_up_seconds"]) == {arm.name for arm in ARMS}
    assert data["versions"]["economize"] == {"fake": "1"}


def test_time_worked_is_compared_beside_wall_time_where_it_is_known(bench):
    worked = {"plain": {"seconds": 1.0, "cpu": 0.9}, "ours": {"seconds": 0.5, "cpu": 0.3}}
    ratios = bench({"treegraft": worked}).cpu_ratios
    assert ratios["ours/plain"].median == pytest.approx(3.0)
    assert ratios["plain/hf_plain"] is None


def test_arms_take_turns_and_each_comes_first(bench):
    bench(settings=changed(profile_rounds=0))
    timed = [entry["name"] for entry in bench.log if entry["op"] == "run"][2 * len(ARMS) :]
    rounds = [timed[i : i + len(ARMS)] for i in range(0, len(timed), len(ARMS))]
    order = [arm.method for arm in ARMS]
    assert rounds == [order[i:] + order[:i] for i in range(3)]


def test_warm_up_is_decoded_but_not_counted(bench):
    result = bench()
    asked = [entry for entry in bench.log if entry["name"] == "generate"]
    assert len(asked) == 2 + len(PROMPTS)
    assert len([run for run in result.runs if run.arm == "hf_plain"]) == len(PROMPTS)


def test_a_peer_that_fails_is_listed_and_the_others_go_on(bench):
    result = bench({"transformers": {"lookup": {"act": "fail"}}})
    assert result.failed == {"hf_lookup": "ValueError: cannot do that"}
    assert "hf_lookup" not in result.finished
    assert result.best("hf") == "hf_plain"
    assert result.ratios["ours/hf_best"].median == pytest.approx(4.0)


def test_a_peer_that_hangs_is_ended(bench):
    hanging = {"economize": {"lookup": {"act": "hang"}}}
    result = bench(hanging, settings=changed(answer_seconds=4.0))
    assert result.failed == {"economize_lookup": "no answer within 4 seconds"}
    assert result.ratios["ours/peers_best"] is None
    assert result.ratios["ours/plain"].median == pytest.approx(2.0)


def test_a_peer_that_dies_says_why_and_takes_its_family_along(bench):
    result = bench({"transformers": {"generate": {"act": "die"}}})
    assert result.failed["hf_plain"] == "ended with exit code 3: the model did not fit"
    assert result.failed["hf_lookup"].startswith("its process ended with hf_plain")
    assert result.best("hf") is None
    assert result.ratios["plain/hf_plain"] is None


def test_a_peer_that_writes_what_is_no_answer_is_ended(bench):
    result = bench({"economize": {"lookup": {"act": "babble"}}})
    assert "'Loading weights: 100%', which is no answer" in result.failed["economize_lookup"]


def test_a_peer_without_a_new_token_has_failed(bench):
    result = bench({"economize": {"lookup": {"tokens": []}}})
    assert "no new token" in result.failed["economize_lookup"]


def test_a_peer_that_differs_is_shown_as_differing(bench):
    result = bench({"economize": {"lookup": {"tokens": [6, 0, 1, 1]}}})
    assert result.n_different("economize_lookup") == 3
    run = next(run for run in result.runs if run.arm == "economize_lookup")
    assert (run.difference, run.as_dict()["identical"]) == (3, False)
    assert not result.faulty, "a peer's tokens are its own affair"


@pytest.mark.parametrize(("dtype", "faulty"), [("float32", ["ours"]), ("bfloat16", [])])
def test_ours_that_differs_is_a_fault_where_no_rounding_excuses_it(bench, dtype, faulty):
    result = bench({"treegraft": {"ours": {"tokens": [1]}}}, settings=changed(dtype=dtype))
    assert result.faulty == faulty


def test_sampled_tokens_are_compared_only_where_they_can_be(bench):
    seeded = Arm("ours", "treegraft", "ours", same_tokens=True)
    drawn = Arm("always", "treegraft", "ours")
    odd = {"treegraft": {"ours": {"tokens": [1]}}, "transformers": {"generate": {"tokens": [1]}}}
    result = bench(odd, (PLAIN, seeded, drawn, HF), changed(temperature=0.8))
    assert [result.n_different(name) for name in ("ours", "always", "hf_plain")] == [3, None, None]
    assert result.faulty == ["ours"]
    assert all(run.as_dict()["identical"] is None for run in result.runs if run.arm == "hf_plain")


def test_the_sweep_takes_the_fastest_setting(bench):
    candidates = tuple({"n": n} for n in (1, 4, 2))
    tuned = Arm("economize_lookup", "economize", "lookup", candidates)
    told = {"economize": {"lookup": {"seconds": 1.6, "speed_by": "n"}}}
    result = bench(told, (PLAIN, OURS, tuned))
    assert result.chosen["economize_lookup"] == {"n": 4}
    swept = [(row["options"]["n"], row["tokens_per_second"]) for row in result.sweeps[tuned.name]]
    assert swept == [(1, pytest.approx(2.5)), (4, pytest.approx(10.0)), (2, pytest.approx(5.0))]
    assert result.total_speed("economize_lookup") == pytest.approx(10.0)


@pytest.mark.parametrize("required", [(), ("economize",)])
def test_a_package_that_is_not_there_is_absent_unless_it_was_asked_for(bench, required):
    told = {"economize": {"open": {"act": "fail", "missing": "economize"}}}
    result = bench(told, required=required)
    assert ("economize" in result.absent) is not required.__contains__("economize")
    assert ("economize_lookup" in result.failed) is required.__contains__("economize")


def test_a_peer_that_lacks_another_module_has_failed(bench):
    result = bench({"economize": {"open": {"act": "fail", "missing": "triton"}}})
    assert result.failed == {"economize_lookup": "ValueError: cannot do that"}
    assert not result.absent


@pytest.mark.parametrize("act", ["fail", "die"])
def test_without_a_baseline_there_is_no_comparison(bench, act):
    with pytest.raises(TreegraftError, match="plain failed: "):
        bench({"treegraft": {"plain": {"act": act}}})


def test_no_round_begins_after_the_time_is_up(bench):
    result = bench(settings=changed(max_seconds=0.0))
    assert (result.n_rounds, result.n_offered) == (1, 3)


def test_a_program_that_is_not_there_is_a_failure_of_that_peer(tmp_path):
    commands = {"treegraft": [sys.executable, str(FAKE), str(tmp_path / "log"), "{}"]}
    commands["economize"] = [str(tmp_path / "no-python")]
    result = compare_peers((PLAIN, OTHER), PROMPTS, SETTINGS, commands)
    assert "cannot be run: No such file or directory" in result.failed["economize_lookup"]


def test_what_cannot_be_compared_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="arms must hold 'plain', found \\['ours'\\]"):
        compare_peers((OURS,), PROMPTS, SETTINGS)
    with pytest.raises(PromptError, match="at least one prompt"):
        compare_peers(ARMS, [], SETTINGS)


def test_ours_and_the_endpoints_come_from_the_shipped_files():
    configs = our_configs(shipped_config(0.8), shipped_endpoints(), None, None)
    assert list(configs) == ["plain", "never", "always", "ours"]
    endpoints, ours = ("ngram", "small"), ("small",)
    assert [c.drafter_names for c in configs.values()] == [(), endpoints, endpoints, ours]
    assert configs["never"].scheduler.kind == "never"
    assert configs["ours"].verifier.kind == "ledger"
    assert configs["always"].verifier.kind == "walk"


def test_another_drafter_takes_the_place_and_name_of_the_dearest_model():
    configs = our_configs(shipped_config(0.0, True), shipped_endpoints(), "zoo:medium", "zoo:small")
    assert {config.target.model for config in configs.values()} == {"zoo:medium"}
    other = our_configs(shipped_config(0.0, True), shipped_endpoints(), None, "zoo:medium")["ours"]
    assert other.drafter_names == ("recycle", "suffix", "small")
    assert other.drafters[2].model == "zoo:medium"
    # The learned schedule holds for the models that it was fitted on.
    assert (shipped_config().scheduler.kind, other.scheduler.kind) == ("value", "fixed")


def test_every_arm_of_the_line_up_has_its_own_name():
    arms = line_up(our_configs(shipped_config(), shipped_endpoints(), None, None))
    names = [arm.name for arm in arms]
    assert len(set(names)) == len(names)
    assert names[:4] == ["plain", "never", "always", "ours"]
    assert all(arm.same_tokens for arm in arms[:4])
