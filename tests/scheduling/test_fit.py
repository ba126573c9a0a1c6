"""From traces and costs to a scheduler: it learns what can be seen, and is refused elsewhere."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from table_models import hashed_model, looping_model, mixed_model

from treegraft.backends.artefact import read_artefact, write_artefact
from treegraft.backends.cost import CostModel, Curve, HostCosts, environment
from treegraft.config import parse_config
from treegraft.core.errors import ScheduleError
from treegraft.pipeline import build_pipeline
from treegraft.policies.features import StateFeatures
from treegraft.policies.value import Decider, ValueNetwork
from treegraft.prompts import Prompt
from treegraft.scheduling.ceiling import CeilingSettings
from treegraft.scheduling.collection import Collection
from treegraft.scheduling.economy import decision_seconds, problem_of, row_seconds
from treegraft.scheduling.fit import FitSettings, fit, policy_actions, split_of
from treegraft.scheduling.traces import ARRAYS, TraceFolder, Traces

QUICK = FitSettings(epochs=30, patience=30, rounds=2)


def flat(seconds):
    return Curve((1, 64), (8,), ((seconds, seconds),))


COSTS = CostModel(
    {},
    {},
    {"target": flat(10e-3), "drafter:small": flat(3e-3)},
    HostCosts(0.5e-3, 0.0, 0.0, {"ngram": 0.1e-3, "small": 0.3e-3}),
)


def models():
    """A target that loops over six tokens in some texts and wanders in others."""
    wander, loop = hashed_model(12, 1, order=6), looping_model((1, 2, 3, 4, 5, 6), 12)
    target = hashed_model(12, 1, order=6)

    def logits(text):
        return loop.logits(text) if text[0] == 0 else wander.logits(text)

    target.logits = logits
    return {"target": target, "small": mixed_model(wander, hashed_model(12, 2, order=6), 0.2)}


def config(**rooms):
    return parse_config(
        {
            "target": {"model": "target"},
            "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "small"}],
            "builder": {"kind": "layered", "depth": 2, "width": 2, "budget": 6},
            "stop": {"max_new_tokens": 16},
            **rooms,
        }
    )


PROMPTS = [
    Prompt(f"p{i}", (i % 2, *np.random.default_rng(i).integers(1, 12, 7).tolist()), "ab"[i % 2])
    for i in range(36)
]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces") / "t"
    pipeline = build_pipeline(config(), models())
    Collection(config(), folder, every=1, pipeline=pipeline).run(PROMPTS)
    return folder


@pytest.fixture(scope="module")
def fitted(traces):
    return fit(Traces.load(traces), COSTS, QUICK)


def test_the_scheduler_looks_up_where_the_text_repeats_and_beats_what_is_blind(traces, fitted):
    train, test = fitted.metrics["train"], fitted.metrics["test"]
    assert train["best_fixed"] >= max(train["never"], train["always"])
    # Kinds are mixed otherwise in the test split, which a schedule for all cannot know.
    assert test["value"] > 1.05 * test["best_fixed"]
    for metrics in (train, test):
        assert metrics["oracle"] >= metrics["value"]
        assert metrics["oracle"] >= metrics["best_fixed"]


def test_decoding_with_it_follows_the_kinds_of_text(fitted, tmp_path):
    write_artefact(fitted.artefact, tmp_path / "s")
    learned = config(scheduler={"kind": "value", "artefact": str(tmp_path / "s")})
    pipeline, plain = (build_pipeline(c, models()) for c in (learned, config(drafters=[])))
    calls = {}
    for kind, first in (("loops", 0), ("wanders", 1)):
        prompt = [first, 3, 9, 4, 7, 7, 2]
        generation = pipeline.generate(prompt, max_new_tokens=40)
        assert generation.tokens == plain.generate(prompt, max_new_tokens=40).tokens
        calls[kind] = generation.statistics.calls
    share = {kind: small / max(ngram + small, 1) for kind, (ngram, small) in calls.items()}
    assert share["loops"] + 0.1 < share["wanders"]


def test_the_same_data_gives_the_same_artefact(traces, fitted):
    again = fit(Traces.load(traces), COSTS, QUICK)
    assert again.artefact.header == fitted.artefact.header
    for name, values in fitted.artefact.arrays.items():
        np.testing.assert_array_equal(values, again.artefact.arrays[name])
    other = fit(Traces.load(traces), COSTS, replace(QUICK, seed=1))
    assert any((other.artefact.arrays[n] != v).any() for n, v in fitted.artefact.arrays.items())


def test_seconds_of_a_row_are_those_of_its_layers_and_its_end(traces):
    loaded = Traces.load(traces)
    a, seconds = loaded.arrays, row_seconds(loaded, COSTS)
    for row in np.random.default_rng(0).integers(len(seconds), size=60).tolist():
        expected, above = 10e-3 + 0.5e-3, row
        while a["parent"][above] >= 0:
            drafter = int(a["action"][above])
            expected += (0.1e-3, 0.3e-3)[drafter]
            expected += 3e-3 * np.count_nonzero(a["widths"][above])
            above = int(a["parent"][above])
        assert seconds[row] == pytest.approx(expected)


def test_a_layer_after_another_drafters_finds_cold_caches_and_one_after_its_own_does_not(traces):
    """Costs that took them for equal had four visits in a row 13 % too dear."""
    loaded = Traces.load(traces)
    a = loaded.arrays
    cold = replace(COSTS.curves["drafter:small"], turn=2e-3)
    host = replace(COSTS.host, turn={"ngram": 0.5e-3, "small": 3e-3})
    costs = replace(COSTS, curves=COSTS.curves | {"drafter:small": cold}, host=host)
    more = row_seconds(loaded, costs) - row_seconds(loaded, COSTS)
    seen = set()
    for row in range(len(more)):
        expected, n_turns, above = 0.0, 0, row
        while (upper := int(a["parent"][above])) >= 0:
            if a["action"][above] != a["action"][upper]:
                n_turns += 1
                reads = a["action"][above] == 1 and a["widths"][above].any()
                expected += (0.5e-3, 3e-3)[a["action"][above]] + (2e-3 if reads else 0.0)
            above = upper
        assert more[row] == pytest.approx(expected)
        seen.add(n_turns)
    assert seen == {0, 1, 2}


def test_a_step_pays_for_the_decision_to_stop_where_it_could_have_gone_on(traces):
    loaded = Traces.load(traces)
    costs = replace(COSTS, host=replace(COSTS.host, follow=100.0, decision=1.0))
    seconds = decision_seconds(loaded, costs)
    described = set(loaded.arrays["described"].tolist())
    seen = set()
    for row, layer in enumerate(loaded.arrays["layer"].tolist()):
        assert seconds[row] == 100.0 + layer + (row in described)
        seen.add((layer, row in described))
    # The last layer leaves nothing to decide.
    assert {(0, True), (1, True), (2, False)} <= seen
    assert not decision_seconds(loaded, COSTS).any()


def test_decisions_are_charged_to_who_takes_them_alone(traces, fitted):
    """Predictions left them out, and promised more than decoding brought."""
    dear = replace(COSTS, host=replace(COSTS.host, follow=1e-3, decision=2e-3))
    paying = fit(Traces.load(traces), dear, QUICK).metrics
    for name, metrics in fitted.metrics.items():
        assert paying[name]["value"] < metrics["value"]
        for free in ("plain", "never", "always", "oracle"):
            assert paying[name][free] == metrics[free]


def test_a_dear_target_is_worth_more_drafting(traces):
    loaded = Traces.load(traces)
    depth = []
    for factor in (0.05, 1.0, 50.0):
        problem = problem_of(loaded, COSTS.with_target_scale(factor))
        depth.append(problem.layer[problem.solve().ends].mean())
    assert depth[0] < depth[1] <= depth[2]


def test_folded_weights_do_what_training_did(traces, fitted):
    """The network on raw features decides as the metrics of the fit say."""
    loaded = Traces.load(traces)
    problem = problem_of(loaded, COSTS)
    network = ValueNetwork(**fitted.artefact.arrays)
    actions = policy_actions(
        network, problem, loaded.arrays["described"], loaded.arrays["features"]
    )
    split = np.array([split_of(prompt.key) for prompt in loaded.prompts])[loaded.prompt]
    ends = problem.follow(actions)
    for name, metrics in fitted.metrics.items():
        assert problem.estimate(ends[split == name]) == pytest.approx(metrics["value"])


def test_traces_are_written_once_and_read_whole(traces, tmp_path):
    pipeline = build_pipeline(config(), models())
    collection = Collection(config(), traces, every=1, pipeline=pipeline)
    assert collection.missing(PROMPTS) == []
    loaded = Traces.load(traces)
    assert not list(traces.glob("*.partial"))
    assert set(loaded.arrays) == {n for n in ARRAYS if not n.startswith(("top_", "text"))}
    a = loaded.arrays
    assert (a["parent"][a["layer"] > 0] < np.flatnonzero(a["layer"] > 0)).all()
    assert (a["step"][a["parent"][a["layer"] > 0]] == a["step"][a["layer"] > 0]).all()
    assert (np.bincount(a["step"]) > 0).all()


def copied(folder, to):
    shutil.copytree(folder, to)
    return to


def test_a_folder_of_other_traces_is_not_gone_on_with(traces, tmp_path):
    held = models()
    pipeline = build_pipeline(config(), held)
    with pytest.raises(ScheduleError, match=r"made otherwise: settings.every is 1 there and 2"):
        Collection(config(), traces, every=2, pipeline=pipeline)
    wider = config(builder={"kind": "layered", "depth": 2, "width": 3, "budget": 6})
    pipeline = build_pipeline(wider, held)
    with pytest.raises(ScheduleError, match=r"signature.builder.width is 2 there and 3 here"):
        Collection(wider, traces, every=1, pipeline=pipeline)
    other = models() | {"target": hashed_model(12, 7, order=6)}
    with pytest.raises(ScheduleError, match=r"signature.target is '\w+' there and '\w+' here"):
        Collection(config(), traces, every=1, pipeline=build_pipeline(config(), other))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "note.txt").write_text("mine")
    with pytest.raises(ScheduleError, match="must be a new folder or one of traces"):
        Collection(config(), tmp_path / "x", pipeline=build_pipeline(config(), held))


def test_damaged_traces_are_named(traces, tmp_path):
    broken = copied(traces, tmp_path / "a")
    next(broken.glob("*.safetensors")).write_bytes(b"nothing")
    with pytest.raises(ScheduleError, match="cannot be read"):
        Traces.load(broken)
    foreign = copied(traces, tmp_path / "b")
    header = json.loads((foreign / "trace.json").read_text())
    (foreign / "trace.json").write_text(json.dumps(header | {"version": 9}))
    with pytest.raises(ScheduleError, match=r"have version 9 .* collect them again"):
        Traces.load(foreign)
    with pytest.raises(ScheduleError, match=r"no trace\.json; make traces with"):
        Traces.load(tmp_path)


def test_features_that_are_no_numbers_are_named(traces, tmp_path):
    broken = copied(traces, tmp_path / "t")
    folder = TraceFolder.open(broken)
    trace = next(t for t in folder.read() if t.n_steps)
    features = trace.arrays["features"].copy()
    features[0, 3] = np.nan
    folder.add(replace(trace, arrays=trace.arrays | {"features": features}))
    with pytest.raises(ScheduleError, match="not finite, found match_share"):
        Traces.load(broken)


def test_an_empty_split_is_named(traces):
    folder = TraceFolder.open(traces)
    few = [t for t in folder.read() if t.n_steps and split_of(t.key) == "train"][:3]
    with pytest.raises(ScheduleError, match="validation split is empty: of 3 prompts"):
        fit(Traces.join(folder.header, few), COSTS, QUICK)


def test_costs_of_other_drafters_are_refused(traces):
    other = replace(COSTS, host=replace(COSTS.host, visit={"ngram": 0.1}))
    with pytest.raises(ScheduleError, match="knows drafters ngram, the traces are of ngram, small"):
        fit(Traces.load(traces), other, QUICK)


def test_costs_of_another_model_are_refused_for_traces(traces):
    other = replace(COSTS, models={"drafter:small": "abc"})
    with pytest.raises(ScheduleError, match=r"measured for another drafter:small \(abc\) than"):
        fit(Traces.load(traces), other, QUICK)


@pytest.mark.parametrize(
    ("rooms", "said"),
    [
        (
            {"builder": {"kind": "layered", "depth": 3, "width": 2, "budget": 6}},
            "builder.depth is 2",
        ),
        (
            {"builder": {"kind": "layered", "depth": 2, "width": 4, "budget": 6}},
            "builder.width is 2",
        ),
        ({"drafters": [{"kind": "ngram"}]}, "drafters are ngram, small there and ngram here"),
        (
            {"drafters": [{"kind": "ngram", "max_n": 5}, {"kind": "lm", "model": "small"}]},
            "drafters.ngram.max_n is 3 there and 5 here",
        ),
        ({"leftover": True}, "leftover is False there and True here"),
        ({"ride_along": ["ngram"]}, "ride_along is"),
    ],
)
def test_a_scheduler_of_another_pipeline_is_refused(fitted, tmp_path, rooms, said):
    write_artefact(fitted.artefact, tmp_path / "s")
    learned = config(scheduler={"kind": "value", "artefact": str(tmp_path / "s")}, **rooms)
    with pytest.raises(ScheduleError, match=said) as caught:
        build_pipeline(learned, models())
    assert "\n" not in str(caught.value)


def test_a_scheduler_for_another_model_or_of_other_features_is_refused(fitted, tmp_path):
    write_artefact(fitted.artefact, tmp_path / "s")
    learned = config(scheduler={"kind": "value", "artefact": str(tmp_path / "s")})
    held = models()
    held["small"] = hashed_model(12, 5)
    with pytest.raises(ScheduleError, match=r"drafters.small.model is '\w+' there"):
        build_pipeline(learned, held)
    names = ["mood", *fitted.artefact.header["features"][1:]]
    odd = replace(fitted.artefact, header=fitted.artefact.header | {"features": names})
    write_artefact(odd, tmp_path / "s")
    with pytest.raises(ScheduleError, match="other features: 'mood' there and 'log_prompt' here"):
        build_pipeline(learned, models())
    older = replace(fitted.artefact, header=fitted.artefact.header | {"features_version": 0})
    write_artefact(older, tmp_path / "s")
    with pytest.raises(ScheduleError, match="features of version 0"):
        build_pipeline(learned, models())


def test_an_option_that_came_later_stales_no_scheduler_while_it_has_its_default(fitted, tmp_path):
    """Else every new option of a drafter would have made all artefacts useless."""
    made_for = copy.deepcopy(fitted.artefact.header["signature"])
    del made_for["drafters"]["ngram"]["max_n"], made_for["builder"]["width"]
    older = replace(fitted.artefact, header=fitted.artefact.header | {"signature": made_for})
    write_artefact(older, tmp_path / "s")
    value = {"kind": "value", "artefact": str(tmp_path / "s")}
    wide = {"kind": "layered", "depth": 2, "width": 10, "budget": 6}  # the default
    build_pipeline(config(scheduler=value, builder=wide), models())
    with pytest.raises(ScheduleError, match=r"builder.width is 10 there and 2 here"):
        build_pipeline(config(scheduler=value), models())
    other = [{"kind": "ngram", "max_n": 5}, {"kind": "lm", "model": "small"}]
    with pytest.raises(ScheduleError, match=r"ngram.max_n is 3 there and 5 here"):
        build_pipeline(config(scheduler=value, builder=wide, drafters=other), models())
    # What a part no longer has is a difference.
    gone = copy.deepcopy(fitted.artefact.header["signature"])
    gone["graft"]["mood"] = 1
    write_artefact(
        replace(fitted.artefact, header=fitted.artefact.header | {"signature": gone}),
        tmp_path / "s",
    )
    with pytest.raises(ScheduleError, match=r"graft.mood is 1 there and None here"):
        build_pipeline(config(scheduler=value), models())


def test_a_pipeline_says_once_that_its_scheduler_knows_the_costs_of_another_machine(
    fitted, tmp_path
):
    value = {"kind": "value", "artefact": str(tmp_path / "s")}
    learned = config(scheduler=value)
    backend = learned.backend.model_dump(mode="json")
    here = environment(backend.pop("dtype"), backend.pop("device"), backend=backend)

    def notices(**changes):
        costs = replace(COSTS, environment=here | changes)
        header = fitted.artefact.header | {"costs": costs.as_dict()}
        write_artefact(replace(fitted.artefact, header=header), tmp_path / "s")
        return build_pipeline(learned, models()).notices

    assert notices() == ()
    assert notices(torch="1.0") == ()
    (said,) = notices(device_name="abacus", threads=96)
    assert "device_name abacus there" in said
    assert "threads 96 there" in said
    assert "\n" not in said
    (said,) = notices(backend={"compile": "on"})
    assert "compile on there, off here" in said
    (said,) = notices(backend=backend | {"panels": True})
    assert "panels True there, False here" in said
    assert build_pipeline(config(), models()).notices == ()


def test_a_pipeline_says_that_its_scheduler_was_fitted_for_another_temperature(fitted, tmp_path):
    """A notice and no refusal: tokens do not depend on it."""
    value = {"kind": "value", "artefact": str(tmp_path / "s")}
    settings = config(scheduler=value)
    backend = settings.backend.model_dump(mode="json")
    here = environment(backend.pop("dtype"), backend.pop("device"), backend=backend)
    costs = replace(COSTS, environment=here).as_dict()
    header = fitted.artefact.header | {"costs": costs}
    assert header["data"]["sampling"]["temperature"] == 0.0
    write_artefact(replace(fitted.artefact, header=header), tmp_path / "s")
    assert build_pipeline(settings, models()).notices == ()
    # Without a temperature neither seed nor top_k changes a token.
    for greedy in ({"seed": 5}, {"top_k": 3}):
        assert build_pipeline(config(scheduler=value, sampling=greedy), models()).notices == ()
    warm = config(scheduler=value, sampling={"temperature": 0.8, "top_k": 3})
    pipeline = build_pipeline(warm, models())
    (said,) = pipeline.notices
    assert "another sampling (temperature 0.0 there, 0.8 here; top_k None there, 3 here)" in said
    assert "\n" not in said
    plain = build_pipeline(config(drafters=[], sampling={"temperature": 0.8, "top_k": 3}), models())
    assert pipeline.generate([1, 2, 3]).tokens == plain.generate([1, 2, 3]).tokens


def test_a_seeded_collection_gives_every_text_its_own_noise(tmp_path):
    """Else a scheduler could learn by heart at which place one seed draws what is unlikely."""
    warm = config(sampling={"temperature": 1.5, "seed": 4})
    held = models()
    # Every text has the same law, whatever stands in it.
    row = hashed_model(12, 3).logits([1])
    held["target"].logits = lambda text: row
    pipeline = build_pipeline(warm, held)
    collection = Collection(warm, tmp_path / "t", every=1, pipeline=pipeline)
    collection.run([Prompt(f"p{i}", (1, 2, 3, i), None) for i in range(4)])
    folder = TraceFolder.open(tmp_path / "t")
    texts = {tuple(trace.arrays["text"].tolist()) for trace in folder.read()}
    assert len(texts) == 4
    assert folder.header["settings"]["noise"] == "by prompt"
    assert folder.header["sampling"]["seed"] == 4
    # Under one seed they would all have been this one.
    alike = {tuple(pipeline.generate([1, 2, 3, i]).tokens) for i in range(4)}
    assert len(alike) == 1


def test_costs_of_a_dearer_target_with_the_same_texts_make_a_scheduler_for_that_one(
    traces, tmp_path
):
    loaded = Traces.load(traces)
    own = loaded.header["signature"]["target"]
    dear = replace(COSTS, models={"target": "f00d"}).with_target_scale(4.0)
    with pytest.raises(ScheduleError, match=r"measured for another target \(f00d\)"):
        fit(loaded, dear, QUICK)
    scaled = dear.for_texts_of(own)
    assert CostModel.of(scaled.as_dict()) == scaled
    header = fit(loaded, scaled, QUICK).artefact.header
    assert header["signature"]["target"] == "f00d"
    words = f"forwards of target f00d, texts of {own}; target forwards times 4"
    assert header["cost_scaled"] == words
    with pytest.raises(ScheduleError, match="of another target than the traces, found the same"):
        replace(COSTS, models={"target": own}).for_texts_of(own)


def test_the_ceiling_stands_beside_best_fixed_and_oracle(traces, fitted):
    pytest.importorskip("sklearn")
    found = fit(Traces.load(traces), COSTS, QUICK, ceiling=CeilingSettings(folds=3, trees=20))
    assert set(found.metrics) == {"train", "validation", "test", "all"}
    for name, metrics in found.metrics.items():
        assert metrics["plain"] <= metrics["ceiling"] <= metrics["oracle"], name
        assert metrics["ceiling_share"] <= 1.0
    assert found.metrics["all"]["ceiling"] > found.metrics["all"]["best_fixed"]
    # It says something about the features, and changes nothing about the networks.
    for name, values in fitted.artefact.arrays.items():
        np.testing.assert_array_equal(values, found.artefact.arrays[name])
    assert found.artefact.header["ceiling"]["folds"] == 3


def test_damaged_schedulers_are_named(fitted, tmp_path):
    with pytest.raises(ScheduleError, match=r"cannot be read.*make one with"):
        read_artefact(tmp_path / "none")
    arrays = fitted.artefact.arrays | {"b3": fitted.artefact.arrays["b3"][:1]}
    write_artefact(replace(fitted.artefact, arrays=arrays), tmp_path / "s")
    with pytest.raises(ScheduleError, match=r"b3 must hold finite numbers of shape \[2, 3\]"):
        read_artefact(tmp_path / "s")
    holed = fitted.artefact.arrays["w2"].copy()
    holed[0, 0, 0] = np.nan
    write_artefact(
        replace(fitted.artefact, arrays=fitted.artefact.arrays | {"w2": holed}), tmp_path / "s"
    )
    with pytest.raises(ScheduleError, match="w2 must hold finite numbers"):
        read_artefact(tmp_path / "s")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ScheduleError, match="must be new or a scheduler's folder"):
        write_artefact(fitted.artefact, tmp_path / "mine")
    assert not list(tmp_path.glob("*.partial"))


def test_margins_are_those_of_the_layers_own_network():
    features = StateFeatures(2, 3, 2, 5)
    dice = np.random.default_rng(0)
    n, h = len(features.names), 7
    shapes = [(3, n, h), (3, h), (3, h, h), (3, h), (3, h, 3), (3, 3)]
    network = ValueNetwork(*(dice.normal(size=s).astype(np.float32) for s in shapes))
    x = dice.normal(size=n).astype(np.float32)
    hidden = np.maximum(x @ network.w1[1] + network.b1[1], 0)
    hidden = np.maximum(hidden @ network.w2[1] + network.b2[1], 0)
    expected = hidden @ network.w3[1] + network.b3[1]
    np.testing.assert_allclose(network.margins(2, x), expected, rtol=1e-5)
    np.testing.assert_allclose(network.margins(2, np.stack([x, x]))[1], expected, rtol=1e-5)


def test_a_decision_is_the_network_s_whatever_was_decided_before():
    features = StateFeatures(3, 4, 2, 5)
    dice = np.random.default_rng(1)
    n, h = len(features.names), 9
    shapes = [(4, n, h), (4, h), (4, h, h), (4, h), (4, h, 4), (4, 4)]
    network = ValueNetwork(*(dice.normal(size=s).astype(np.float32) for s in shapes))
    decider = Decider(network)
    chosen = set()
    for _ in range(200):
        layer, x = int(dice.integers(1, 5)), dice.normal(size=n).astype(np.float32)
        best = decider.best(layer, tuple(x.tolist()))
        assert best == network.margins(layer, x).argmax()
        chosen.add(best)
    assert chosen == {0, 1, 2, 3}
    # Equal margins: the earlier action, stopping first.
    level = ValueNetwork(*(np.zeros(s, dtype=np.float32) for s in shapes))
    assert Decider(level).best(1, (1.0,) * n) == 0


def test_the_documentation_lists_every_array_of_a_trace():
    page = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text(encoding="utf-8")
    for name, text in ARRAYS.items():
        assert f"| `{name}` | {text} |" in page
