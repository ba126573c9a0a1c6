"""What a learned scheduler sees is what its definition says, however it is computed."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treegraft.backends.reference import ReferenceTree
from treegraft.backends.tensor_tree import TensorTree
from treegraft.core.roles import DraftState
from treegraft.core.tree import Proposals
from treegraft.policies.features import LOOKBACK, StateFeatures, TextFeatures


def predicted(text):
    """Token, length and share by definition: all earlier occurrences of every end of the text."""
    for length in range(min(16, len(text) - 1), 0, -1):
        end = text[-length:]
        after = [text[i + length] for i in range(len(text) - length) if text[i : i + length] == end]
        if after:
            counts = Counter(after)
            most = max(counts.values())
            token = next(t for t in reversed(after) if counts[t] == most)
            return token, length, most / len(after)
    return -1, 0, 0.0


def by_definition(text, n_prompt):
    fast = slow = run = 0.0
    for end in range(max(n_prompt - 64, 0) + 1, len(text)):
        hit = float(predicted(text[:end])[0] == text[end])
        fast += (hit - fast) / 4
        slow += (hit - slow) / 16
        run = min(run + 1, 16) if hit else 0.0
    _, length, share = predicted(text)
    return math.log1p(length), share, fast, slow, run / 16


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=120),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=6),
    st.integers(0, 40),
)
def test_the_text_is_described_as_the_definition_says(prompt, steps, period):
    if period:
        prompt = (prompt[:period] * len(prompt))[: len(prompt)]
    features, text = TextFeatures(), list(prompt)
    assert features.follow(text) == pytest.approx(by_definition(text, len(prompt)))
    for new in steps:
        text.extend(new)
        assert features.follow(text) == pytest.approx(by_definition(text, len(prompt)))


def test_another_text_starts_anew():
    features = TextFeatures()
    features.follow([1, 2, 3] * 9)
    assert features.follow([4, 5]) == TextFeatures().follow([4, 5])


def test_a_long_text_of_one_token_follows_no_more_than_its_latest_places():
    features, text = TextFeatures(), [7] * 5000
    features.follow(text)
    assert len(features._runs) == 256
    assert features.values == pytest.approx((math.log1p(16), 1.0, 1.0, 1.0, 1.0), abs=0.02)


def grown(tree_class, dead):
    """A tree of three layers with ties, unscored nodes and, if ``dead``, some taken out."""
    tree = tree_class(50)
    tree.reset_(1, 8, 16)
    dice = np.random.default_rng(4)
    front = torch.tensor([0])
    for layer in range(3):
        at = front.repeat_interleave(3)
        tokens = torch.from_numpy(dice.permutation(50)[: len(at)])[:, None]
        scores = torch.from_numpy(np.log(dice.choice([0.1, 0.3, 0.5], size=(len(at), 1))))
        if layer == 2:
            scores[0] = -torch.inf
        match = torch.ones(len(at), dtype=torch.int64)
        paths = tree.add_(Proposals(at, tokens, scores.float(), match), layer % 2, True)
        front = paths[:, 0][:4]
    if dead:
        others = [node for node in range(13, tree.n_nodes) if node not in front.tolist()]
        tree.keep_(torch.tensor([n for n in range(tree.n_nodes) if n not in others[:4]]))
    return tree, front


@pytest.mark.parametrize("tree_class", [TensorTree, ReferenceTree])
@pytest.mark.parametrize("dead", [False, True])
def test_the_tree_is_described_as_the_definition_says(tree_class, dead):
    tree, front = grown(tree_class, dead)
    assert bool(tree.alive.all()) is not dead
    state = DraftState(
        layer=4, depth=5, calls=(0, 1, 0), n_drafters=2, n_prompt=9, n_committed=12,
        tree=tree, frontier=front, reached=(3, 4, 4), text=[1] * 12,
    )  # fmt: skip
    n_before, width, budget = 13, 3, 6
    features = StateFeatures(2, 5, width, budget)
    found = dict(zip(features.names, features.of(state, (0.0,) * 5, n_before), strict=True))
    level, logprob = tree.depth.double(), tree.logprob.double()
    best = tree.best(width, int(level[front].min()) - LOOKBACK, int(level[front].max()))
    at = level[front].mean()
    chance = logprob[1:][tree.alive[1:]].exp().sort(descending=True).values[:budget]
    in_front = torch.isin(best, front)
    expected = {
        "layer": 3 / 5,
        "depth": at / 5,
        "leaves": tree.leaf[front].double().mean(),
        "debt": max(float(at - level[best].mean()), 0.0) / 5,
        "older": (best < n_before).double().mean(),
        "overlap": in_front.double().mean(),
        "best_mean": logprob[best].clamp(min=-20).mean(),
        "best_first": logprob[front].max().clamp(min=-20),
        "frontier_mass": logprob[front].exp().sum(),
        "unscored": torch.isinf(logprob[front]).double().mean(),
        "log_frontier": math.log1p(len(front)),
        "log_nodes": math.log(tree.n_nodes),
        "expected": chance.sum(),
        "idle": 0.0,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-5), name
