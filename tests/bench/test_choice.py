"""When rounding may decide between two tokens: stories, the rule as a property, then the edges."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_models import TableModel, hashed_model

from treegraft.bench import choice as module
from treegraft.bench.choice import arithmetic_type, choice_between, rounding_units
from treegraft.core.sampling import Noise, Sampling, process

EPS = torch.finfo(torch.bfloat16).eps


def saying(logits):
    """A target with these logits at every place."""
    return TableModel(lambda text: torch.tensor(logits), len(logits))


@pytest.fixture
def bfloat16(monkeypatch):
    """Every target counts as one whose sums round like bfloat16."""
    monkeypatch.setattr(module, "arithmetic_type", lambda model: torch.bfloat16)


def between(logits, expected, found, **sampling):
    return choice_between(saying(logits), (1, 0), 1, expected, found, Sampling(**sampling))


def test_the_targets_choice_is_that_of_its_logits():
    target = hashed_model(5, seed=1)
    choice = choice_between(target, (1, 2, 3), 2, 4, None, Sampling())
    logits = target.logits((1, 2, 3))
    assert choice.first.token == int(logits.argmax())
    assert choice.first.logit == choice.first.value == float(logits.max())
    assert choice.expected.token == 4
    assert choice.expected.logit == float(logits[4])
    assert choice.found is None
    assert choice.gap == math.inf
    assert choice.tolerance == 0.0
    assert not choice.is_tie


def test_a_sampled_choice_compares_logits_with_noise():
    target = hashed_model(5, seed=1)
    sampling = Sampling(temperature=0.5, seed=3)
    choice = choice_between(target, (1, 2, 3), 2, 4, 0, sampling)
    logits = target.logits((1, 2, 3))
    values = (logits - logits.max()) / 0.5 + Noise(3, 5).at(3).float()
    assert choice.first.token == int(values.argmax())
    assert choice.expected.value == pytest.approx(float(values[4]))
    assert choice.expected.logit == float(logits[4])


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(
    ("second", "found", "is_tie"),
    [(7.99, 1, True), (7.99, 2, False), (7.0, 1, False)],
    ids=["close", "far below the close", "far"],
)
def test_a_tie_is_a_choice_within_rounding(second, found, is_tie):
    choice = between([8.0, second, -5.0], 0, found)
    assert choice.is_tie is is_tie
    assert choice.tolerance == pytest.approx(2 * EPS * 8.0)


@pytest.mark.usefixtures("bfloat16")
def test_three_tokens_may_tie():
    logits = [5.0, 5.0, 5.0, 0.0]
    assert between(logits, 0, 2).is_tie
    # Plain decoding itself need not have met the first choice of the causal forward.
    assert between(logits, 1, 2).is_tie
    assert not between(logits, 0, 3).is_tie
    assert not between(logits, 0, None).is_tie
    assert not between(logits, None, 0).is_tie


@pytest.mark.parametrize("logits", [[5.0, 5.0, 0.0], [5.0, 5.0 - 1e-7, 0.0]])
def test_exact_arithmetic_never_ties(logits):
    choice = between(logits, 0, 1)
    assert choice.gap < 1e-6
    assert choice.tolerance == 0.0
    assert not choice.is_tie


LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=6)


@given(logits=LOGITS, data=st.data(), temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_without_filters_a_tie_is_a_gap_within_the_tolerance(logits, data, temperature):
    token = st.integers(0, len(logits) - 1)
    expected, found = data.draw(token), data.draw(token)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "arithmetic_type", lambda model: torch.bfloat16)
        choice = between(logits, expected, found, temperature=temperature, seed=5)
    # At the very edge the sums round too.
    if abs(choice.gap - choice.tolerance) > 1e-4:
        assert choice.is_tie is (choice.gap <= choice.tolerance)


# Many within rounding of each other, and some that are not.
CLOSE = st.tuples(st.sampled_from([7.0, 8.0, 8.0]), st.integers(-4, 4)).map(
    lambda pair: pair[0] + pair[1] * 0.03
)


@given(
    logits=st.lists(CLOSE | st.floats(-30, 30, width=32), min_size=3, max_size=6),
    sampling=st.sampled_from(
        [
            {"top_k": 1},
            {"top_k": 2},
            {"top_p": 0.5},
            {"top_p": 0.9},
            {"min_p": 0.3},
            {"repetition_penalty": 1.3},
            {"repetition_penalty": 0.7},
        ]
    ),
    temperature=st.sampled_from([0.7, 1.0]),
    seed=st.integers(0, 50),
    data=st.data(),
)
def test_what_logits_within_rounding_would_choose_is_a_tie(
    logits, sampling, temperature, seed, data
):
    """Under any one filter: move logits by rounding, and what they choose is excused."""
    settings = Sampling(temperature=temperature, seed=seed, **sampling)
    signs = data.draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=len(logits), max_size=6))
    raw = torch.tensor(logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "arithmetic_type", lambda model: torch.bfloat16)
        probe = between(logits, 0, 0, temperature=temperature, seed=seed, **sampling)
        # A little less than what is excused, so that float32 rounding decides nothing.
        size = 0.95 * EPS * max(abs(probe.first.logit), float(raw.abs().median()))
        moved = raw + size * torch.tensor(signs[: len(logits)])
        history = module.History([1, 0], 1)
        values = process(moved, settings, history) + Noise(seed, len(logits)).at(2).float()
        chosen = int(values.argmax())
        first = probe.first.token
        choice = between(logits, first, chosen, temperature=temperature, seed=seed, **sampling)
    assert choice.is_tie or chosen == first


@pytest.mark.usefixtures("bfloat16")
def test_a_token_at_the_edge_of_a_filter_ties_though_it_is_excluded():
    """top-k keeps one of two equal logits; noise would prefer the other one."""
    logits = [9.0, 8.99, -20.0]
    noise = Noise(seed=0, vocab_size=3)
    seed = next(s for s in range(50) if (n := Noise(s, 3).at(2))[1] > n[0] + 1.0)
    choice = between(logits, 0, 1, temperature=1.0, top_k=1, seed=seed)
    assert choice.found.value == -math.inf
    assert choice.gap == math.inf
    assert choice.is_tie
    # JSON has no infinity.
    data = json.loads(json.dumps(choice.as_dict(), allow_nan=False))
    assert data["gap"] is data["found"]["value"] is None
    assert data["found"]["logit"] == pytest.approx(8.99)
    far = between([9.0, 5.0, -20.0], 0, 1, temperature=1.0, top_k=1, seed=seed)
    assert not far.is_tie
    assert noise.seed == 0


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(
    ("logits", "is_tie"),
    [
        ([0.0, -0.01, -20.0, -20.0, -20.0], True),
        ([0.0, -0.01, -0.001, -0.002, -0.01], False),
        ([9.0, -math.inf, -math.inf, -math.inf, -math.inf], False),
        ([9.0, -1e30, -1e30, 0.0, 0.0], False),
        ([math.nan] * 5, False),
        ([-math.inf] * 5, False),
    ],
    ids=["large beside", "all small", "masked rows", "huge rows", "nan", "nothing left"],
)
def test_the_magnitude_is_of_real_logits(logits, is_tie):
    choice = between(logits, 0, 1)
    assert choice.is_tie is is_tie
    json.dumps(choice.as_dict(), allow_nan=False)


def test_units_grow_with_the_root_of_the_layers(monkeypatch):
    for layers, units in ((1, 2.0), (4, 2.0), (16, 4.0), (64, 8.0)):
        report = SimpleNamespace(n_layers=layers)
        monkeypatch.setattr(module, "adapter_report", lambda model, report=report: report)
        assert rounding_units(hashed_model(3, seed=0)) == units


def test_the_callers_modes_and_random_streams_change_nothing_and_stay():
    expected = between([3.0, 1.0, 2.0], 0, 1, temperature=1.0)
    state = torch.random.get_rng_state()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        found = choice_between(
            TableModel(lambda text: torch.tensor([3.0, 1.0, 2.0], device="cpu"), 3),
            (1, 0),
            1,
            0,
            1,
            Sampling(temperature=1.0),
        )
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert found == expected
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("device", "dtype", "precision", "expected"),
    [
        ("cuda", torch.float32, "none", torch.float32),
        ("cuda:1", torch.float32, "ieee", torch.float32),
        ("cuda", torch.float32, "tf32", torch.float16),
        ("cuda", torch.float64, "tf32", torch.float64),
        ("cuda", torch.bfloat16, "tf32", torch.bfloat16),
        ("cpu", torch.float32, "tf32", torch.float32),
    ],
)
def test_float32_on_cuda_is_exact_only_without_tf32(
    monkeypatch, device, dtype, precision, expected
):

    target = hashed_model(3, seed=0)
    monkeypatch.setattr(target, "device", torch.device(device), raising=False)
    monkeypatch.setattr(module, "adapter_report", lambda model: SimpleNamespace(dtype=dtype))
    matmul = SimpleNamespace(fp32_precision=precision)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    assert arithmetic_type(target) is expected


def test_older_switches_for_tf32_are_seen():
    """Only the newer switch is read; it must take in what the older ones set."""
    for switch in (
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('high')",
        "torch.backends.fp32_precision = 'tf32'",
    ):
        # In a process of its own: torch refuses to mix older and newer switches.
        code = f"import torch; {switch}; print(torch.backends.cuda.matmul.fp32_precision)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert done.stdout.split() == [b"tf32"], switch
