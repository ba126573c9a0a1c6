"""Schedules evaluated offline commit, read and cost what decoding with them does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from table_models import hashed_model, mixed_model

from treegraft.backends.tensor_tree import TensorTree
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError
from treegraft.core.roles import DraftState, Scheduler
from treegraft.pipeline import build_pipeline
from treegraft.policies.features import StateFeatures, TextFeatures
from treegraft.policies.value import ValueConfig, ValueNetwork, ValueScheduler
from treegraft.scheduling.collect import Collector, schedules
from treegraft.scheduling.collectable import check_collectable
from treegraft.scheduling.value import Problem

PROMPT = [1, 2, 3, 1, 2, 3, 4, 1, 2, 3]


def models():
    target = hashed_model(9, 1)
    small = mixed_model(target, hashed_model(9, 2), 0.35)
    return {"target": target, "small": small}


def config(**rooms):
    return parse_config(
        {
            "target": {"model": "target"},
            "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "small", "read_ahead": 3}],
            "builder": {"kind": "layered", "depth": 3, "width": 2, "budget": 5},
            "stop": {"max_new_tokens": 24},
            **rooms,
        }
    )


class Script(Scheduler):
    """Plays one schedule in the first step of a text and none in the others; keeps the states."""

    def __init__(self, calls, features):
        self.calls, self.features = calls, features
        self.text, self.seen, self.first, self.record = TextFeatures(), [], True, None

    def choose(self, state):
        if not self.first:
            return None
        before = self.n_nodes if state.layer > 1 else 0
        self.n_nodes = state.tree.n_nodes
        self.seen.append(self.features.of(state, self.text.follow(state.text), before))
        return self.calls[state.layer - 1] if state.layer <= len(self.calls) else None

    def finish(self, record):
        if self.first:
            self.first, self.record = False, record


VARIANTS = {
    "greedy": {},
    "seeded": {"sampling": {"temperature": 0.9, "seed": 3}},
    "ride along": {"ride_along": ["ngram"], "graft": {"kind": "treegraft", "reach": "any"}},
    "rescored once": {"graft": {"kind": "treegraft", "rescore": "once"}},
    "best first": {"builder": {"kind": "best_first", "depth": 3, "width": 2, "budget": 5}},
    "swapped": {"graft": {"kind": "budget_swap", "swap": 2}},
    "replaced": {"graft": {"kind": "replace"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_schedule_does_offline_what_it_does_in_decoding(variant):
    """Tokens, target nodes, working nodes, model forwards and features of a first step."""
    settings = config(**VARIANTS[variant])
    trace = Collector(build_pipeline(settings, models()), every=1).collect(PROMPT, "p")
    arrays = trace.arrays
    first = np.flatnonzero(arrays["step"] == 0)
    assert arrays["position"][0] == len(PROMPT)
    calls_of = {0: ()}
    for row in first[1:]:
        calls_of[row] = (*calls_of[arrays["parent"][row]], int(arrays["action"][row]))
    features = StateFeatures(2, 3, 2, 5)
    described = dict(zip(arrays["described"].tolist(), arrays["features"], strict=True))
    for row, calls in calls_of.items():
        held = models()
        script = Script(calls, features)
        pipeline = build_pipeline(settings, held).with_scheduler(script)
        # One token less than the room makes the first step the whole text's first.
        tokens = pipeline.generate(PROMPT).tokens
        assert tokens == arrays["text"].tolist()
        record = script.record
        assert record.calls == calls
        assert record.n_new == arrays["n_new"][row]
        assert record.n_tree == arrays["n_tree"][row]
        widths = sum(int(arrays["widths"][r].sum()) for r in lineage(arrays, row))
        widths += int(arrays["finish"][row, 1])
        # The text before the root is read with the model's first nodes.
        read_text = len(PROMPT) - 1 if widths else 0
        model = Script(calls, features)
        held = models()
        stepped = build_pipeline(settings, held).with_scheduler(model)
        for _ in stepped.stream(PROMPT):
            break
        assert held["small"].reads == widths + read_text
        if row in described:
            np.testing.assert_allclose(script.seen[len(calls)], described[row], rtol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_a_network_says_the_text_stays(variant):
    settings = config(**VARIANTS[variant])
    plain = build_pipeline(
        config(**VARIANTS[variant] | {"drafters": [], "ride_along": []}), models()
    )
    expected = plain.generate(PROMPT).tokens
    features = StateFeatures(2, 3, 2, 5)
    seen = set()
    for seed in range(8):
        dice = np.random.default_rng(seed)
        shapes = [(3, len(features.names), 8), (3, 8), (3, 8, 8), (3, 8), (3, 8, 3), (3, 3)]
        network = ValueNetwork(*(dice.normal(size=s).astype(np.float32) for s in shapes))
        scheduler = ValueScheduler(ValueConfig(artefact="drawn"), network, features)
        generation = build_pipeline(settings, models()).with_scheduler(scheduler).generate(PROMPT)
        assert generation.tokens == expected
        seen |= {step.calls for step in generation.steps}
    # The networks did differ in what they said.
    assert len(seen) > 1


def lineage(arrays, row):
    while row >= 0:
        yield row
        row = arrays["parent"][row]


def test_later_steps_are_those_of_the_text():
    trace = Collector(build_pipeline(config(), models()), every=1).collect(PROMPT, "p", "code")
    arrays = trace.arrays
    assert (trace.n_prompt, trace.n_new, trace.kind) == (len(PROMPT), 24, "code")
    assert (arrays["position"] + arrays["n_left"] == len(PROMPT) + 24).all()
    assert (np.diff(arrays["position"]) >= 1).all()
    assert (arrays["n_new"] <= arrays["n_left"][arrays["step"]]).all()
    problem = Problem(
        *(arrays[n] for n in ("step", "parent", "action", "layer", "n_new")),
        np.ones(len(arrays["step"])),
        2,
    )
    # All schedules of three layers from every step that has room for them.
    assert set(problem.schedules()) == set(schedules(2, 3))
    # What is drafted further is never accepted less.
    below = np.flatnonzero(arrays["action"] == 0)
    assert arrays["n_new"][below].mean() >= 1
    roomy = arrays["n_left"][arrays["step"]] > 2
    assert np.bincount(arrays["step"][roomy]).max() == 15
    assert arrays["top_tokens"].shape == (24, 8)
    assert (arrays["top_tokens"][:, 0] == arrays["text"]).all()


def test_a_beam_keeps_the_endpoints():
    settings = config(builder={"kind": "layered", "depth": 8, "width": 2, "budget": 5})
    collector = Collector(build_pipeline(settings, models()), every=4, beam=4)
    arrays = collector.collect(PROMPT, "p").arrays
    problem = Problem(
        *(arrays[n] for n in ("step", "parent", "action", "layer", "n_new")),
        np.ones(len(arrays["step"])),
        2,
        complete=False,
    )
    tried = problem.schedules()
    assert {(0,) * 8, (1,) * 8} <= set(tried)
    by_layer = np.bincount(arrays["layer"][arrays["step"] == 0])
    assert by_layer.max() == 8
    # Endpoints alone can be compared in every step.
    assert problem.best_fixed()[0] is not None


def test_collecting_twice_gives_the_same_rows():
    collector = Collector(build_pipeline(config(), models()), every=2)
    first, _, again = (collector.collect(p, "p") for p in (PROMPT, [4, 4, 4], PROMPT))
    for name, values in first.arrays.items():
        np.testing.assert_array_equal(values, again.arrays[name], err_msg=name)


def test_a_text_of_one_token_has_no_step():
    target = models()["target"]
    first = int(target.logits(PROMPT).argmax())
    settings = config(stop={"max_new_tokens": 24, "eos": [first]})
    trace = Collector(build_pipeline(settings, models())).collect(PROMPT, "p")
    assert (trace.n_new, trace.n_steps) == (1, 0)
    assert trace.arrays["features"].shape == (0, len(StateFeatures(2, 3, 2, 5).names))


@pytest.mark.parametrize(
    ("rooms", "said"),
    [
        ({"drafters": []}, "schedules need drafters, found none"),
        ({"verifier": {"kind": "ledger"}}, "under verifier.kind 'walk'.*found 'ledger'"),
        ({"leftover": True}, "leftover must be false .* found true"),
        ({"calibration": {"kind": "online"}}, "calibration.kind must be 'none' .* found 'online'"),
        (
            {"drafters": [{"kind": "suffix", "store_tokens": 99}]},
            r"\(store_tokens: 0\) .* found 99 of 'suffix'",
        ),
        (
            {"drafters": [{"kind": "ngram"}, {"kind": "head", "model": "h", "name": "eagle"}]},
            "the target's hidden states .* found 'eagle': traces do not keep them",
        ),
        (
            {
                "drafters": [{"kind": "lm", "model": "small", "children": "sample"}],
                "sampling": {"temperature": 0.5},
            },
            "children: topk.* found 'small', which draws",
        ),
    ],
)
def test_what_cannot_be_read_off_a_text_is_refused(rooms, said):
    with pytest.raises(ConfigError, match=said):
        check_collectable(config(**rooms))


@pytest.mark.parametrize("layer", [1, 2])
def test_a_bare_root_has_the_features_that_are_said_to_be_its_own(layer):
    tree = TensorTree(9)
    tree.reset_(3, 4)
    calls, reached = ((), ()) if layer == 1 else ((0,), (0,))
    state = DraftState(layer, 3, calls, 2, 4, 6, tree, torch.tensor([0]), reached)
    features = StateFeatures(2, 3, 2, 5)
    found = dict(zip(features.names, features.of(state, (0.0,) * 5, layer - 1), strict=True))
    names = features.names[features.names.index("depth") : features.names.index("idle")]
    for name, value in zip(names, features.of_tree(state, layer - 1), strict=True):
        assert found[name] == pytest.approx(value), name
    assert found["idle"] == float(layer == 2)


def test_text_features_tell_a_repeating_text_from_a_new_one():
    features = TextFeatures()
    text = [5, 6, 7]
    new = features.follow(text)
    assert new[0] == 0.0
    text += [5, 6, 7, 5, 6, 7]
    length, share, fast, slow, run = features.follow(text)
    assert length == pytest.approx(np.log1p(6))
    assert share == 1.0
    assert fast > slow > 0.2
    assert run == pytest.approx(5 / 16)
    # Another list is another text, whatever it begins with.
    assert features.follow([5, 6, 7]) == new
