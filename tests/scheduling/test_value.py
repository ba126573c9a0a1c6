"""The value of schedules: backward induction and the fixed point against brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treegraft.scheduling.value import STOP, Problem


def trie(n_steps, n_drafters, depth, tokens, seconds, gone=frozenset()):
    """All schedules of every step; ``tokens(step, calls)``; ``gone`` are calls nobody can make."""
    step, parent, action, layer, gain, time = [], [], [], [], [], []
    for s in range(n_steps):
        row_of = {}
        for number in range(depth + 1):
            for calls in product(range(n_drafters), repeat=number):
                if any((s, calls[:i]) in gone for i in range(1, number + 1)):
                    continue
                row_of[calls] = len(step)
                step.append(s)
                parent.append(row_of[calls[:-1]] if calls else -1)
                action.append(calls[-1] if calls else STOP)
                layer.append(number)
                gain.append(tokens(s, calls))
                time.append(seconds(s, calls))
    columns = (step, parent, action, layer)
    return Problem(*map(np.array, columns), np.array(gain), np.array(time, dtype=float), n_drafters)


def paths(problem):
    """Row -> its calls."""
    known = {}
    for row in range(len(problem.step)):
        above = int(problem.parent[row])
        known[row] = () if above < 0 else (*known[above], int(problem.action[row]))
    return known


def test_an_easy_text_is_drafted_far_and_a_hard_one_not_at_all():
    # Step 0 accepts whatever is drafted, step 1 nothing. A layer takes half a forward's time.
    problem = trie(
        2, 1, 3, lambda s, calls: 1 + (len(calls) if s == 0 else 0), lambda s, c: 1 + len(c) / 2
    )
    calls, rate = problem.best_fixed()
    # 1 layer for both: (2 + 1) tokens in 3 seconds; 3 layers: (4 + 1) in 5. No better than none.
    assert (calls, rate) == ((), 1.0)
    oracle = problem.solve()
    assert problem.layer[oracle.ends].tolist() == [3, 0]
    assert oracle.rate == pytest.approx((4 + 1) / (2.5 + 1))
    # Who cannot tell the two apart does what is best for both.
    blind = problem.solve(groups=problem.layer)
    assert blind.rate == rate


def test_few_steps_of_each_text_do_not_make_drafting_look_worse_than_it_is():
    """A ratio of few steps comes out high on average where tokens vary; the estimate does not."""
    dice = np.random.default_rng(0)
    n_texts, n_steps, few = 300, 200, 4
    # Steps commit 1 or 8 tokens, in each text another share of them; each takes a second.
    share = dice.uniform(0.1, 0.6, n_texts)
    tokens = np.where(dice.random((n_texts, n_steps)) < share[:, None], 8, 1)

    def problem(kept):
        n = kept.size
        return Problem(
            np.arange(n), np.full(n, -1), np.full(n, STOP), np.zeros(n), kept.ravel(),
            np.ones(n), 1,
            text=np.repeat(np.arange(n_texts), kept.shape[1]), lengths=np.full(n_texts, 100),
        )  # fmt: skip

    whole = problem(tokens)
    truth = whole.rate(whole.roots)
    assert whole.estimate(whole.roots) == pytest.approx(truth, rel=1e-2)
    plain, corrected = [], []
    for first in range(0, n_steps, few):
        part = problem(tokens[:, first : first + few])
        plain.append(part.rate(part.roots))
        corrected.append(part.estimate(part.roots))
    assert np.mean(plain) < 0.93 * truth
    assert abs(np.mean(corrected) - truth) < 0.25 * abs(np.mean(plain) - truth)


def test_where_nothing_varies_the_estimate_is_the_rate():
    for n_steps in (1, 3):
        problem = trie(n_steps, 1, 2, lambda s, c: 1 + 2 * len(c), lambda s, c: 1 + len(c) / 2)
        ends = problem.fixed((0, 0))
        assert problem.estimate(ends) == pytest.approx(problem.rate(ends))
        assert problem.estimate(ends) == pytest.approx(5 / 2)


def every_policy(problem, groups):
    """All maps from groups to actions."""
    names = np.unique(groups)
    for chosen in product(range(STOP, problem.n_drafters), repeat=len(names)):
        by_name = dict(zip(names.tolist(), chosen, strict=True))
        yield np.array([by_name[g] for g in groups.tolist()])


@st.composite
def problems(draw):
    n_steps = draw(st.integers(1, 3))
    n_drafters = draw(st.integers(1, 2))
    depth = draw(st.integers(1, 2))
    dice = np.random.default_rng(draw(st.integers(0, 2**32)))
    rolled = {}

    def tokens(s, calls):
        return int(dice.integers(1, 6))

    def seconds(s, calls):
        above = rolled.get((s, calls[:-1]), 0.0) if calls else 0.0
        rolled[s, calls] = above + float(dice.integers(1, 8)) / 4
        return rolled[s, calls]

    every = [(s, c) for s in range(n_steps) for n in range(1, depth + 1)
             for c in product(range(n_drafters), repeat=n)]  # fmt: skip
    gone = draw(st.sets(st.sampled_from(every), max_size=2))
    problem = trie(n_steps, n_drafters, depth, tokens, seconds, frozenset(gone))
    # Steps that look alike at first may be told apart later, never the other way round.
    looks = draw(st.lists(st.integers(0, 1), min_size=n_steps, max_size=n_steps))
    later = draw(st.lists(st.integers(0, 1), min_size=n_steps, max_size=n_steps))
    known = paths(problem)
    labels = [
        (known[r], looks[s], later[s] if known[r] else 0)
        for r, s in enumerate(problem.step.tolist())
    ]
    names = {label: i for i, label in enumerate(sorted(set(labels)))}
    return problem, np.array([names[label] for label in labels])


@given(problems())
@settings(max_examples=60)
def test_no_policy_beats_the_fixed_point(case):
    problem, groups = case
    found = problem.solve(groups)
    inner = problem.layer < problem.depth
    best = 0.0
    # Groups of the last layer decide nothing.
    deciding = np.where(inner, groups, -1)
    for actions in every_policy(problem, deciding):
        best = max(best, problem.rate(problem.follow(actions)))
    assert found.rate == pytest.approx(best)
    assert found.rate == problem.rate(problem.follow(found.actions))


@given(problems())
@settings(max_examples=60)
def test_the_oracle_is_the_best_of_all_choices_of_a_row_per_step(case):
    problem, _ = case
    rows = [np.flatnonzero(problem.step == s) for s in np.unique(problem.step)]
    best = max(problem.rate(np.array(ends)) for ends in product(*rows))
    assert problem.solve().rate == pytest.approx(best)


@given(problems())
@settings(max_examples=60)
def test_the_fixed_point_is_no_slower_than_any_fixed_schedule(case):
    problem, groups = case
    found = problem.solve(groups)
    for calls in problem.schedules():
        assert found.rate >= problem.rate(problem.fixed(calls)) * (1 - 1e-12)
    assert problem.best_fixed()[1] <= problem.solve().rate * (1 + 1e-12)


@given(problems(), st.lists(st.integers(0, 1), min_size=3, max_size=3), st.integers(1, 9))
@settings(max_examples=60)
def test_texts_of_their_own_length_are_solved_as_well(case, texts, length):
    """The oracle is the best choice of rows, and who sees less is no slower than any schedule."""
    problem, groups = case
    n_steps = len(problem.roots)
    columns = (problem.step, problem.parent, problem.action, problem.layer)
    several = Problem(
        *columns,
        problem.tokens,
        problem.seconds,
        problem.n_drafters,
        text=np.array(texts[:n_steps]),
        lengths=np.array([float(length), 4.0]),
    )
    rows = [np.flatnonzero(several.step == s) for s in np.unique(several.step)]
    best = max(several.rate(np.array(ends)) for ends in product(*rows))
    assert several.solve().rate == pytest.approx(best)
    found = several.solve(groups)
    for calls in several.schedules():
        assert found.rate >= several.rate(several.fixed(calls)) * (1 - 1e-12)
    assert found.rate == several.rate(several.follow(found.actions))


def test_a_slow_text_counts_by_its_length_and_not_by_its_steps():
    # Two steps of either text were evaluated; both are ten tokens long.
    problem = Problem(
        np.arange(4), np.full(4, -1), np.full(4, STOP), np.zeros(4, dtype=int),
        np.array([1, 1, 4, 4]), np.ones(4), 1,
        text=np.array([0, 0, 1, 1]), lengths=np.array([10.0, 10.0]),
    )  # fmt: skip
    # Ten seconds and two and a half.
    assert problem.rate(problem.roots) == pytest.approx(20 / 12.5)
    assert problem.prices(problem.roots).tolist() == pytest.approx([1.0, 4.0])


def test_who_forgets_what_was_seen_is_refused():
    problem = trie(2, 1, 2, lambda s, c: 1, lambda s, c: 1.0 + len(c))
    forgetful = np.where(problem.layer == 0, problem.step, 2 + problem.layer)
    with pytest.raises(ValueError, match="groups must tell apart what was told apart"):
        problem.solve(forgetful)
    with pytest.raises(ValueError, match="first layer from later"):
        problem.solve(np.zeros_like(problem.layer))


def test_a_beam_names_no_schedule_that_it_has_not_tried_everywhere():
    gone = {(1, (0,))}
    tried = trie(2, 2, 1, lambda s, c: 9 if c == (0,) else 1, lambda s, c: 1.0, gone)
    beam = Problem(
        tried.step, tried.parent, tried.action, tried.layer, tried.tokens, tried.seconds, 2, False
    )
    assert tried.best_fixed()[0] == (0,)
    assert beam.best_fixed()[0] != (0,)
