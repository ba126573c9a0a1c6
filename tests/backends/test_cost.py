"""Cost curves: what lies between the measured points, and whose measurements are taken."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_models import hashed_model

from treegraft.backends.cost import (
    CostModel,
    Curve,
    HostCosts,
    clock_of,
    environment,
    load_costs,
    measure_curves,
    save_costs,
)
from treegraft.backends.identity import model_identity
from treegraft.core.errors import ScheduleError


def test_a_curve_is_linear_between_its_points():
    curve = Curve((1, 3, 7), (10, 110), ((1.0, 2.0, 6.0), (3.0, 4.0, 8.0)))
    assert curve.at(1, 10) == 1.0
    assert curve.at(2, 10) == 1.5
    assert curve.at(5, 60) == pytest.approx(5.0)
    assert curve.at(11, 10) == pytest.approx(10.0)
    assert curve.at(1, 210) == pytest.approx(5.0)
    # No forward takes no time; a shorter context than was measured is no cheaper.
    assert curve.at([0, 1], 3).tolist() == [0.0, 1.0]
    assert Curve((4,), (9,), ((2.0,),), scale=1.5).at([1, 4, 9], 100).tolist() == [3.0] * 3


@given(
    st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=6),
    st.integers(1, 500),
    st.integers(1, 4000),
)
def test_no_forward_is_free(seconds, width, context):
    curve = Curve(tuple(range(1, len(seconds) + 1)), (1, 50), (tuple(seconds), tuple(seconds)))
    assert float(curve.at(width, context)) > 0


def test_on_one_thread_of_a_cpu_what_others_took_is_no_cost():
    """A machine that was busy while costs were measured gave the target three times its price."""
    threads = torch.get_num_threads()
    held_up = hashed_model(5, 1)
    forward = held_up.forward

    def interrupted(*arguments, **more):
        time.sleep(0.05)
        return forward(*arguments, **more)

    held_up.forward = interrupted
    try:
        torch.set_num_threads(1)
        clock = clock_of("cpu")
        (row,) = measure_curves({"t": held_up}, {"t": (1, 4)}, (8,), 3, None, clock)["t"].seconds
        assert 0 < max(row) < 0.05
        torch.set_num_threads(2)
        assert clock_of("cpu") is time.perf_counter
    finally:
        torch.set_num_threads(threads)
    assert clock_of("cuda:0") is time.perf_counter


def test_measured_curves_never_fall_and_fit_the_context_limit():
    models = {"target": hashed_model(5, 1), "drafter:d": hashed_model(5, 2)}
    models["drafter:d"].max_positions = 24
    rounds = []
    curves = measure_curves(
        models, {"target": (1, 4), "drafter:d": (1, 8)}, (4, 16, 64), 2, rounds.append
    )
    assert curves["target"].contexts == (4, 16, 64)
    # 64 is cut to 16, which is there already.
    assert curves["drafter:d"].contexts == (4, 16)
    assert len(rounds) == 3
    for curve in curves.values():
        for row in curve.seconds:
            assert 0 < row[0] <= row[1]


def made(**more):
    target = hashed_model(5, 1)
    here = environment("float32", "cpu", **more)
    costs = CostModel(
        here,
        {"target": model_identity(target)},
        {"target": Curve((1, 2), (8,), ((1e-3, 2e-3),), 1.25)},
        HostCosts(1e-3, 0.0, 1e-5, {"ngram": 1e-4}),
        0.97,
    )
    return costs, target, here


def test_costs_come_back_from_their_file(tmp_path):
    costs, target, here = made(backend={"kind": "tensor"})
    save_costs(costs, tmp_path / "new" / "costs.json")
    assert load_costs(tmp_path / "new" / "costs.json", {"target": target}, here) == costs
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["costs.json"]
    doubled = costs.with_target_scale(2.0)
    assert doubled.curves["target"].at(1, 8) == pytest.approx(2 * 1.25e-3)
    assert costs.curves["target"].scale == 1.25


@pytest.mark.parametrize("key", ["torch", "transformers", "threads", "device_name", "dtype"])
def test_costs_measured_elsewhere_are_refused_by_what_differs(tmp_path, key):
    costs, target, here = made()
    save_costs(costs, tmp_path / "c.json")
    with pytest.raises(ScheduleError, match=f"were measured with {key} .* found 'other'"):
        load_costs(tmp_path / "c.json", {"target": target}, here | {key: "other"})


def test_costs_from_before_an_option_of_the_backend_were_refused_for_lack_of_it(tmp_path):
    costs, target, here = made(backend={"compile": "on"})
    save_costs(costs, tmp_path / "c.json")
    now = {"compile": "on", "panels": False}
    assert load_costs(tmp_path / "c.json", {"target": target}, here | {"backend": now}) == costs
    with pytest.raises(ScheduleError, match="were measured with backend"):
        load_costs(
            tmp_path / "c.json", {"target": target}, here | {"backend": now | {"panels": True}}
        )


def test_costs_of_another_model_are_refused(tmp_path):
    costs, _, _ = made()
    save_costs(costs, tmp_path / "c.json")
    other = hashed_model(6, 4)
    with pytest.raises(ScheduleError, match="measured for another target"):
        load_costs(tmp_path / "c.json", {"target": other})
    with pytest.raises(ScheduleError, match="measured for another drafter:small"):
        load_costs(tmp_path / "c.json", {"drafter:small": other})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no valid JSON"),
        ("[]", "does not say 'treegraft-costs'"),
        ('{"format": "treegraft-costs", "version": 7}', "has version 7, this treegraft reads 1"),
        ('{"format": "treegraft-costs", "version": 1}', "is damaged"),
    ],
)
def test_a_file_that_is_no_cost_model_is_named(tmp_path, text, said):
    file = tmp_path / "c.json"
    file.write_text(text)
    with pytest.raises(ScheduleError, match=f"{said}.*; measure again with"):
        load_costs(file)
    with pytest.raises(ScheduleError, match="cannot be read"):
        load_costs(tmp_path / "none.json")


def test_identity_is_of_the_weights_and_not_of_the_place(tmp_path):
    costs, _, _ = made()
    assert json.loads(json.dumps(costs.as_dict()))["models"]["target"] == costs.models["target"]
    assert model_identity(hashed_model(5, 1)) == model_identity(hashed_model(5, 1))
    assert model_identity(hashed_model(5, 1)) != model_identity(hashed_model(6, 1))
    assert np.isfinite(costs.checked)
