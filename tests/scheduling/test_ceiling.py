"""What boosted trees make of the features: between the best fixed schedule and the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from treegraft.core.errors import ConfigError
from treegraft.scheduling import ceiling
from treegraft.scheduling.ceiling import BoostedPolicy, CeilingSettings, boost, centred, fold_of
from treegraft.scheduling.collect import PromptTrace
from treegraft.scheduling.traces import Traces
from treegraft.scheduling.value import Problem

QUICK = CeilingSettings(folds=3, rounds=2, trees=20, smallest=5)


def made(n_prompts=60, informed=True, seed=0):
    """Traces of one drafter and one layer: its three nodes are accepted in every other step.

    The first feature says in which, if ``informed``; the second is noise.
    """
    dice = np.random.default_rng(seed)
    prompts, step, parent, layer, tokens, features, described = [], [], [], [], [], [], []
    owner = []
    for p in range(n_prompts):
        key = f"{int(dice.integers(2**62)):016x}" * 4
        prompts.append(PromptTrace(key, f"p{p}", None, 4, 20, {}))
        for _ in range(4):
            easy = float(dice.integers(2))
            root = len(step)
            described.append(root)
            features.append([easy if informed else dice.random(), dice.random()])
            step += [len(owner)] * 2
            parent += [-1, root]
            layer += [0, 1]
            tokens += [1, 1 + 3 * easy]
            owner.append(p)
    a = {
        "step": np.array(step, dtype=np.int32),
        "parent": np.array(parent, dtype=np.int32),
        "layer": np.array(layer, dtype=np.int8),
        "action": np.array([-1, 0] * (len(step) // 2), dtype=np.int8),
        "described": np.array(described, dtype=np.int32),
        "features": np.array(features, dtype=np.float32),
    }
    traces = Traces({}, tuple(prompts), np.array(owner, dtype=np.int32), a, "")
    problem = Problem(
        a["step"], a["parent"], a["action"], a["layer"], np.array(tokens),
        np.where(a["layer"] == 1, 2.0, 1.0), 1,
        text=traces.prompt, lengths=np.full(n_prompts, 20),
    )  # fmt: skip
    return traces, problem


def test_what_the_features_show_is_found_and_what_they_do_not_show_is_not():
    pytest.importorskip("sklearn")
    shown, hidden = (made(informed=informed) for informed in (True, False))
    rates = {}
    for name, (traces, problem) in {"shown": shown, "hidden": hidden}.items():
        reached = problem.rate(problem.follow(boost(traces, problem, QUICK).actions))
        rates[name] = (problem.best_fixed()[1], reached, problem.solve().rate)
    fixed, reached, oracle = rates["shown"]
    assert reached == pytest.approx(oracle)
    assert reached > 1.1 * fixed
    # Trees that had seen the text would find luck here too.
    fixed, reached, oracle = rates["hidden"]
    assert reached < 1.03 * fixed
    assert oracle > 1.1 * fixed


def test_no_prompt_is_decided_on_by_trees_that_saw_it():
    """Rows of one prompt may say anything; what is done there does not change."""
    pytest.importorskip("sklearn")
    traces, problem = made(seed=3)
    calm = boost(traces, problem, QUICK).actions
    mine = fold_of(traces.prompts[0].key, QUICK.folds)
    fold = np.array([fold_of(p.key, QUICK.folds) for p in traces.prompts])[traces.prompt]
    rows = fold[problem.step] == mine
    # The others' prices change too, so only one round is comparable.
    one = CeilingSettings(folds=3, rounds=1, trees=20, smallest=5)
    calm = boost(traces, problem, one).actions
    odd = Problem(
        problem.step, problem.parent, problem.action, problem.layer,
        np.where(rows, 9.0 - problem.tokens, problem.tokens), problem.seconds, 1,
        text=traces.prompt, lengths=problem.lengths,
    )  # fmt: skip
    changed = boost(traces, odd, one).actions
    np.testing.assert_array_equal(changed[rows], calm[rows])
    assert (changed[~rows] != calm[~rows]).any()


def test_the_same_traces_give_the_same_trees_which_decide_on_other_texts_too():
    pytest.importorskip("sklearn")
    traces, problem = made(seed=1)
    policy = boost(traces, problem, QUICK)
    np.testing.assert_array_equal(policy.actions, boost(traces, problem, QUICK).actions)
    other, there = made(20, seed=9)
    actions = policy.decide(there, other.arrays["described"], other.arrays["features"])
    assert there.rate(there.follow(actions)) == pytest.approx(there.solve().rate)
    assert isinstance(policy, BoostedPolicy)


def test_fewer_prompts_teach_less_and_are_judged_on_all():
    pytest.importorskip("sklearn")
    traces, problem = made(seed=5)
    rates = {}
    for share in (0.1, 1.0):
        settings = CeilingSettings(folds=3, rounds=1, trees=20, smallest=30, share=share)
        rates[share] = problem.rate(problem.follow(boost(traces, problem, settings).actions))
    # A tenth of the prompts have too few steps to part.
    assert rates[0.1] < 1.03 * problem.best_fixed()[1] < rates[1.0]


def test_a_fold_is_no_split():
    keys = [f"{i:08x}{i // 300 * 7919:08x}" + "0" * 48 for i in range(0, 100 * 300, 300)]
    assert {fold_of(key, 5) for key in keys} == set(range(5))
    assert len({int(key[:8], 16) % 100 for key in keys}) == 1


def test_margins_are_over_what_can_be_done():
    worth = np.array([[1.0, 3.0, 7.0], [2.0, 9.0, 4.0]])
    able = np.array([[True, True, True], [True, False, True]])
    found = centred(worth, able)
    np.testing.assert_allclose(found[0], worth[0] - worth[0].mean())
    np.testing.assert_allclose(found[1], [-1.0, 0.0, 1.0])


def test_without_scikit_learn_it_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(ceiling, "find_spec", lambda name: None)
    traces, problem = made(5)
    with pytest.raises(ConfigError, match=r"not installed; get treegraft\[ceiling\]$"):
        boost(traces, problem)
