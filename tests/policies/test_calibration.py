"""Calibrated scores: what is learned from verified steps, and what never depends on it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_models import hashed_model, mixed_model

from treegraft.backends.reference import ReferenceTree, plain_tokens
from treegraft.backends.tensor_tree import TensorTree
from treegraft.config import parse_config
from treegraft.core.sampling import Sampling
from treegraft.core.stats import Generation
from treegraft.core.tree import ROOT, Proposals
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.calibrated_tree import CalibratedTree
from treegraft.policies.calibration import (
    KNOTS,
    UNSCORED_PRIOR,
    Calibration,
    CalibrationConfig,
    Outcomes,
    isotonic,
)

V = 8
NONE = -math.inf
ONLINE = CalibrationConfig(kind="online")


def calibration(n_drafters: int = 2, **options: Any) -> Calibration:
    return Calibration(CalibrationConfig(kind="online", **options), n_drafters)


def mapped(made: Calibration, raw: list[float], drafter: int = 0, group: int = 0) -> list[float]:
    scores = np.array(raw, dtype=np.float32)
    value, _ = made.apply(drafter, np.full(len(raw), group), scores, scored=False)
    return value.tolist()


def observe(made: Calibration, raw: float, accepted: int, n: int, drafter: int = 0) -> None:
    """``n`` verified tokens with this score, ``accepted`` of which were taken."""
    scores = np.full(n, raw, dtype=np.float32)
    _, place = made.apply(drafter, np.zeros(n, dtype=np.int64), scores, scored=False)
    made.learn(np.full(n, drafter), place, np.arange(n) < accepted)


def one_path(tree: CalibratedTree, tokens: list[int], scores: list[float], match: int = 0) -> Any:
    return tree.add_(Proposals.of_paths([ROOT], [tokens], [scores], [match]), 0, False)


# --- the story ------------------------------------------------------------------------------------


def test_before_anything_was_seen_a_score_stays_as_it_is() -> None:
    raw = [-0.01, -0.7, -2.0, -9.0, -12.0, -20.0]
    assert mapped(calibration(), raw) == pytest.approx(raw, abs=1e-6)
    # And a token without one gets a score at last.
    assert mapped(calibration(), [NONE, math.nan]) == pytest.approx([math.log(UNSCORED_PRIOR)] * 2)


def test_a_boastful_drafter_is_brought_down_to_its_record() -> None:
    made = calibration()
    observe(made, -0.01, accepted=100, n=1000)
    (value,) = mapped(made, [-0.01])
    # Not all the way: what it would say less boldly has no record yet, and may not score higher.
    assert 0.1 < math.exp(value) < 0.15
    # The other drafter's word is as good as before.
    assert mapped(made, [-0.01], drafter=1) == pytest.approx([-0.01], abs=1e-6)


def test_more_observations_count_for_more_than_the_prior() -> None:
    chances = []
    for n in (0, 8, 800):
        made = calibration(strength=8)
        observe(made, NONE, accepted=n, n=n)
        chances.append(math.exp(mapped(made, [NONE])[0]))
    assert chances[0] == pytest.approx(UNSCORED_PRIOR)
    # As many observations as the prior counts for, seen by the drafter's mean and by the group's.
    pooled = (8 + 8 * UNSCORED_PRIOR) / 16
    assert chances[1] == pytest.approx((8 + 8 * pooled) / 16)
    assert chances[2] > 0.98


@pytest.mark.parametrize("kind", [TensorTree, ReferenceTree])
def test_deep_tokens_of_a_look_up_get_a_score(kind: Any) -> None:
    tree = CalibratedTree(kind(V), calibration())
    tree.reset_(0, 9)
    one_path(tree, [1, 2, 3], [-0.7, NONE, NONE])
    chance = math.log(UNSCORED_PRIOR)
    assert tree.logprob.tolist() == pytest.approx([0, -0.7, -0.7 + chance, -0.7 + 2 * chance])
    assert tree.scorer.tolist() == [-1, 0, 0, 0]
    # Who scores every token and gives none means that it cannot come.
    tree.rescore_(torch.tensor([0.0, -1.0, NONE, -1.0]), 1)
    assert tree.logprob.tolist() == pytest.approx([0, -1, NONE, NONE])


@pytest.mark.parametrize("kind", [TensorTree, ReferenceTree])
def test_a_step_teaches_about_every_node_whose_parent_was_kept(kind: Any) -> None:
    seen: list[Outcomes] = []
    made = Calibration(ONLINE, 2, observer=seen.append)
    tree = CalibratedTree(kind(V), made)
    tree.reset_(0, 9)
    #        root
    #      1      4          1 and 2 are accepted, 5 is the bonus token; 4 and 3 are put to the test
    #     2 3     5          and fail; the node under 4 and that under 3 never come up.
    #       6
    paths = Proposals.of_paths(
        [0, 0, 0], [[1, 2], [1, 3, 6], [4, 5]], [[-0.5, NONE], [-0.5, -2.0, -1.0], [-3.0, -0.1]]
    )
    tree.add_(paths, 0, overwrite=False)
    tree.rescore_(torch.full((tree.n_nodes,), -0.25), 1)
    numbers = {tuple(tree.path(node)): node for node in range(tree.n_nodes)}
    tree.learn_([numbers[(1,)], numbers[(1, 2)]], [1, 2, 5])
    (outcomes,) = seen
    found = sorted(
        zip(
            outcomes.drafter.tolist(),
            outcomes.raw.tolist(),
            outcomes.accepted.tolist(),
            strict=True,
        )
    )
    fourfold = [(1, -0.25, True), (1, -0.25, True), (1, -0.25, False), (1, -0.25, False)]
    first = [(0, -3.0, False), (0, -2.0, False), (0, -0.5, True), (0, NONE, True)]
    assert found == sorted([*first, *fourfold])
    # Half of what drafter 1 called likely was taken.
    assert math.exp(mapped(made, [-0.25], drafter=1)[0]) < math.exp(-0.25)
    # A step is learned from once.
    tree.learn_([numbers[(1,)]], [1, 2])
    assert len(seen) == 1


def test_the_longest_match_is_no_longer_first_but_part_of_the_score() -> None:
    tree = CalibratedTree(TensorTree(V), calibration())
    tree.reset_(0, 9)
    one_path(tree, [1], [-3.0], match=5)
    one_path(tree, [2], [-0.5], match=1)
    assert tree.rank(torch.tensor([1, 2]), torch.tensor([5, 1]), 2).tolist() == [2, 1]


def test_the_length_of_the_match_is_learned() -> None:
    made = calibration(1)
    for _ in range(60):
        tree = CalibratedTree(TensorTree(V), made)
        tree.reset_(0, 9)
        one_path(tree, [1], [NONE], match=4)
        one_path(tree, [2], [NONE], match=1)
        tree.learn_([1], [1, 3])
    tree.reset_(0, 9)
    one_path(tree, [3], [NONE], match=4)
    one_path(tree, [4], [NONE], match=1)
    long, short = tree.logprob.exp().tolist()[1:]
    assert long > 0.85
    assert short < 0.15


# --- laws of the map ------------------------------------------------------------------------------

OBSERVED = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 71), st.floats(-15, 0), st.booleans()), max_size=60
)
RAW = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(OBSERVED, st.lists(RAW, min_size=1, max_size=12), st.integers(0, 71), st.booleans())
def test_calibrated_scores_rise_with_raw_ones_and_never_pass_certainty(
    observed: list[Any], raw: list[float], group: int, scored: bool
) -> None:
    made = calibration(strength=1.0)
    for drafter, where, score, accepted in observed:
        _, place = made.apply(drafter, np.array([where]), np.float32([score]), scored=True)
        made.learn(np.array([drafter]), place, np.array([accepted]))
    given_scores = np.array(raw, dtype=np.float32)
    value, place = made.apply(0, np.full(len(raw), group), given_scores, scored)
    # One group for all scores goes a shorter way.
    value_of_one, place_of_one = made.apply(0, group, given_scores, scored)
    assert place_of_one.tolist() == place.tolist()
    assert value_of_one == pytest.approx(value, abs=1e-6)
    assert not np.isnan(value).any()
    assert (value <= 0).all()
    known = np.isfinite(given_scores) | (given_scores == np.inf)
    order = np.argsort(given_scores[known], kind="stable")
    assert (np.diff(value[known][order]) >= 0).all()
    assert (np.diff(value_of_one[known][order]) >= 0).all()
    assert np.isneginf(value[~known]).all() == (scored or known.all())
    assert ((place >= 0) == (known | (not scored))).all()


@given(st.data(), st.integers(1, 7), st.integers(1, 3))
def test_isotonic_regression_is_the_nearest_rising_sequence(
    data: st.DataObject, n: int, rows: int
) -> None:
    """Pool-adjacent-violators, row by row, is the oracle."""
    floats = st.lists(st.floats(0, 1), min_size=n, max_size=n)
    weights = st.lists(st.floats(0.5, 100), min_size=n, max_size=n)
    value = np.array([data.draw(floats) for _ in range(rows)])
    weight = np.array([data.draw(weights) for _ in range(rows)])
    found = isotonic(value, weight)
    assert (np.diff(found, axis=1) >= 0).all()
    for row in range(rows):
        blocks: list[list[float]] = []  # mean, weight, length
        for v, w in zip(value[row], weight[row], strict=True):
            blocks.append([v, w, 1])
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                (v1, w1, n1), (v2, w2, n2) = blocks[-2:]
                blocks[-2:] = [[(v1 * w1 + v2 * w2) / (w1 + w2), w1 + w2, n1 + n2]]
        pooled = [v for v, _, length in blocks for _ in range(int(length))]
        assert found[row] == pytest.approx(pooled, abs=1e-9)


def test_long_records_stay_chances() -> None:
    """A sum of a million observations leaves little of a chance of one in a billion."""
    made = calibration(1, strength=1e-6)
    for raw, accepted in ((-0.01, True), (-0.7, True), (-9.0, False), (NONE, False)):
        for _ in range(20):
            observe(made, raw, accepted=50_000 * accepted, n=50_000)
    raw = [-15.0, -9.0, -3.0, -0.7, -0.01, 0.0, NONE]
    value = np.array(mapped(made, raw))
    assert np.isfinite(value).all()
    assert (value <= 0).all()
    assert (np.diff(value[:-1]) >= 0).all()
    assert value[1] < -10 < -0.1 < value[3]


def test_the_knots_rise_and_are_scores() -> None:
    assert (np.diff(KNOTS) > 0).all()
    assert (KNOTS < 0).all()


# --- never a token --------------------------------------------------------------------------------

TARGET = hashed_model(V, seed=1, order=6)
MODELS = {"t": TARGET, "d": mixed_model(TARGET, hashed_model(V, seed=2), 0.3)}


def pipeline(**options: Any) -> Pipeline:
    config: dict[str, Any] = {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram", "length": 6}, {"kind": "lm", "model": "d"}],
        "builder": {"kind": "layered", "depth": 3, "width": 3, "budget": 8},
        "scheduler": {"kind": "fixed", "calls": ["ngram", "d", "ngram"]},
        "calibration": {"kind": "online"},
    }
    return build_pipeline(parse_config(config | options), MODELS)


def counts(result: Generation) -> list[Any]:
    return [(s.n_new, s.n_tree, s.drafted, s.kept, s.accepted) for s in result.steps]


@given(
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=6),
    temperature=st.sampled_from([0.0, 1.0]),
    calls=st.lists(st.integers(0, 1), min_size=1, max_size=3),
    strength=st.sampled_from([0.1, 8.0]),
)
@settings(max_examples=20)
def test_calibration_changes_no_token(
    prompt: list[int], temperature: float, calls: list[int], strength: float
) -> None:
    made = pipeline(
        scheduler={"kind": "fixed", "calls": calls},
        calibration={"kind": "online", "strength": strength},
    )
    expected = plain_tokens(TARGET.logits, prompt, 25, Sampling(temperature=temperature))
    for _ in range(2):  # the second time it knows the text
        result = made.generate(prompt, max_new_tokens=25, temperature=temperature)
        assert result.tokens == expected


def test_both_trees_learn_the_same() -> None:
    runs = []
    for kind in ("tensor", "reference"):
        made = pipeline(backend={"kind": kind})
        runs.append([counts(made.generate([1, 2, 3, 1, 2], max_new_tokens=40)) for _ in range(2)])
    assert runs[0] == runs[1]


def test_what_was_learned_is_kept_or_not() -> None:
    """With scope text every text is drafted as the first one was."""
    prompt = [1, 2, 3, 1, 2, 3, 1]
    for scope, same in (("text", True), ("pipeline", False)):
        made = pipeline(calibration={"kind": "online", "scope": scope})
        first, *later = (counts(made.generate(prompt, max_new_tokens=60)) for _ in range(4))
        assert all(run == first for run in later) == same
    assert pipeline(calibration={"kind": "none"}).calibration is None


def test_drawn_children_may_be_calibrated_too() -> None:
    """Scores do not touch what the ledger holds; greedy tokens are the target's as ever."""
    made = pipeline(
        drafters=[{"kind": "ngram"}, {"kind": "lm", "model": "d", "children": "sample"}],
        verifier={"kind": "ledger"},
    )
    drawn = made.generate([1, 2, 3], max_new_tokens=30, temperature=1.0, seed=3)
    assert len(drawn.tokens) == 30
    greedy = made.generate([1, 2, 3], max_new_tokens=30)
    assert greedy.tokens == plain_tokens(TARGET.logits, [1, 2, 3], 30, Sampling())


def test_a_step_that_failed_teaches_nothing() -> None:
    seen: list[Outcomes] = []
    bad = {"kind": "adversarial_drafters:Faulty", "name": "bad"}
    params = {"method": "propose", "answer": "interrupt", "after": 0}
    made = pipeline(
        drafters=[{"kind": "ngram"}, {**bad, "params": params}],
        scheduler={"kind": "fixed", "calls": ["ngram", "bad"]},
    )
    assert made.calibration is not None
    made.calibration.observer = seen.append
    with pytest.raises(KeyboardInterrupt):
        made.generate([1, 2, 1, 2, 1], max_new_tokens=9)
    assert seen == []


def test_a_builder_that_numbers_nodes_in_its_own_way_does_no_harm() -> None:
    tree = CalibratedTree(TensorTree(V), calibration())
    for path in ([7], [-3], [10**9], [2, 1], [0]):
        tree.reset_(0, 9)
        one_path(tree, [1, 2], [-0.5, -0.5])
        tree.learn_(path, [1, 2])
