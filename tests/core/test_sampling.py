"""The target's processed distribution and the keyed noise.

Each setting is compared with the processor of transformers that has the same name there.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from treegraft.core.sampling import (
    History,
    Noise,
    Sampling,
    TargetDistribution,
    keyed_gumbel,
    keyed_top,
    keyed_uniform,
    process,
)
from treegraft.core.tree import TokenTree

# --- the story ------------------------------------------------------------------------------------


def distribution(logits: Tensor, sampling: Sampling, text: list[int]) -> TargetDistribution:
    noise = Noise(sampling.seed, logits.shape[-1])
    tree = TokenTree.root_only(text[-1])
    return TargetDistribution(logits[None], tree, sampling, History(text, len(text)), noise)


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    assert distribution(logits, Sampling(), [0]).token(0) == 1


def test_the_first_of_equal_tokens_is_taken() -> None:
    assert distribution(torch.tensor([0.0, 3.0, 3.0]), Sampling(), [0]).token(0) == 1


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.zeros(50)
    draws = {
        (seed, n): distribution(logits, Sampling(temperature=1.0, seed=seed), [0] * n).token(0)
        for seed in (0, 1)
        for n in range(1, 9)
    }
    for (seed, n), token in draws.items():
        again = distribution(logits, Sampling(temperature=1.0, seed=seed), [7] * n).token(0)
        assert again == token
    assert len(set(draws.values())) > 8


def test_a_node_draws_with_the_noise_of_its_own_place() -> None:
    """Depth counts from the end of the committed text, whatever the node's number."""
    tree = TokenTree(
        token=torch.tensor([0, 1, 2, 3]),
        parent=torch.tensor([0, 0, 0, 2]),
        depth=torch.tensor([0, 1, 1, 2]),
        logprob=torch.zeros(4),
        source=torch.zeros(4, dtype=torch.int64),
        scorer=torch.zeros(4, dtype=torch.int64),
        proposers=torch.ones(4, dtype=torch.int64),
        ancestors=torch.ones(4, 4, dtype=torch.bool),
        node=torch.arange(4),
    )
    sampling = Sampling(temperature=1.0, seed=3)
    target = TargetDistribution(
        torch.zeros(4, 50), tree, sampling, History([0] * 5, 5), Noise(3, 50)
    )
    for node, place in enumerate([5, 6, 6, 7]):
        assert target.token(node) == int(keyed_gumbel(3, place, 50).argmax())


# --- the noise ------------------------------------------------------------------------------------


def test_noise_values_are_pinned() -> None:
    """A seed means the same text for ever: a changed stream must fail here."""
    for (seed, position), values in PINNED.items():
        # The raw stream is exact on every machine, the logarithm up to its last bit.
        assert keyed_gumbel(seed, position, 4).tolist() == pytest.approx(values, abs=1e-13)


PINNED = {
    (0, 0): [-1.49545161157695, -0.3511371183614868, -0.7859067841514997, 0.5586754626449686],
    (7, 123): [-1.7891579077012925, 1.0975680227388143, -0.004798747994799332, 0.03703506328928524],
    (2**64 - 1, 10**6): [
        0.2990004010130628,
        -0.26698514089289827,
        -0.8798331255709985,
        2.134640664247466,
    ],
}


def test_noise_of_a_larger_vocabulary_starts_the_same() -> None:
    assert torch.equal(keyed_gumbel(5, 9, 300)[:7], keyed_gumbel(5, 9, 7))


def test_positions_and_seeds_do_not_share_noise() -> None:
    seen = {
        value
        for seed in (0, 1, 2**32, 2**63)
        for position in (0, 1, 2, 2**31)
        for value in keyed_gumbel(seed, position, 64).tolist()
    }
    assert len(seen) == 4 * 4 * 64


def test_noise_is_finite_at_both_ends_of_the_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    """53 bits and a half round to 1, whose noise is infinite."""

    class Ends:
        def __init__(self, **key: int) -> None:
            del key

        def random_raw(self, n: int) -> np.ndarray:
            del n
            return np.array([0, 2**64 - 1], dtype=np.uint64)

    monkeypatch.setattr(np.random, "Philox", Ends)
    assert torch.isfinite(keyed_gumbel(0, 0, 2)).all()


def test_noise_follows_the_gumbel_law() -> None:
    """Kolmogorov-Smirnov at 0.1 %, on 20,000 values of one stream and one value of each stream."""
    one = keyed_gumbel(11, 3, 20_000)
    many = torch.cat([keyed_gumbel(11, position, 1) for position in range(20_000)])
    for values in (one, many):
        n = len(values)
        cdf = torch.exp(-torch.exp(-values.sort().values))
        steps = torch.arange(n + 1) / n
        distance = max(float((cdf - steps[:-1]).max()), float((steps[1:] - cdf).max()))
        assert distance * math.sqrt(n) < 1.95


def test_draws_follow_the_target_law() -> None:
    """Chi-square with 4 degrees of freedom, 0.1 % quantile 18.47."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    n = 8000
    counts = torch.zeros(5)
    noise = Noise(1, 5)
    for position in range(n):
        counts[int((logits.double() + noise.at(position)).argmax())] += 1
    expected = logits.softmax(-1) * n
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.47


SCORE = st.one_of(st.floats(-60.0, 0.0), st.just(-float("inf")), st.just(0.0))


@given(
    scores=st.lists(SCORE, min_size=1, max_size=60),
    seed=st.integers(0, 2**63),
    k=st.integers(1, 4),
    single=st.booleans(),
)
def test_the_highest_of_scores_and_noise_are_found_without_all_of_the_noise(
    scores: list[float], seed: int, k: int, single: bool
) -> None:
    row = np.array(scores, dtype=np.float32 if single else np.float64)
    noise = keyed_gumbel(seed, 7, len(scores)).numpy().astype(row.dtype)
    k = min(k, len(scores))
    expected = np.argsort(-(row + noise), kind="stable")[:k]
    assert keyed_top(row, k, seed, 7).tolist() == expected.tolist()
    if k == 1:
        assert Noise(seed, len(scores)).token(7, torch.from_numpy(row)) == expected[0]


def test_a_nan_among_scores_is_the_highest_as_for_torch() -> None:
    row = np.array([0.5, float("nan"), 2.0])
    assert Noise(3, 3).token(1, torch.from_numpy(row)) == int(torch.from_numpy(row).argmax()) == 1


def test_noise_is_that_of_a_fresh_generator_at_any_place() -> None:
    """One generator is sent from place to place: nothing of an earlier draw may be left in it."""
    for n in (1, 3, 4, 9):
        for seed, position, stream, number in ((0, 0, 0, 0), (2**64 - 1, 2**40, 5, 2**24 - 1)):
            fresh = np.random.Philox(key=seed | stream << 64, counter=position << 64 | number << 40)
            expected = ((fresh.random_raw(n) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
            assert keyed_uniform(seed, position, n, stream, number).tolist() == expected.tolist()


# --- each setting against transformers ------------------------------------------------------------

LOGIT = st.one_of(
    st.floats(-8, 8, allow_nan=False),
    st.sampled_from([0.0, 1.0, -1.0, 30.0, -30.0, 1e4, -1e4]),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Sampling, list[int], list[int], int]:
    """Logits, settings, prompt, path in the tree, and how much of the text is prompt."""
    vocab = draw(st.integers(1, 12))
    logits = torch.tensor(
        draw(st.lists(LOGIT, min_size=vocab, max_size=vocab)), dtype=torch.float64
    )
    ids = st.integers(0, vocab - 1)
    text = draw(st.lists(ids, min_size=1, max_size=6))
    path = draw(st.lists(ids, max_size=3))
    eos = tuple(draw(st.lists(ids, max_size=max(0, min(3, vocab - 1)), unique=True)))
    sampling = Sampling(
        temperature=draw(st.sampled_from([1.0, 0.5, 2.0, 1e-3, 1e-6, 100.0])),
        top_k=draw(st.sampled_from([None, 1, 2, 3, vocab, 50])),
        top_p=draw(st.sampled_from([None, 1e-6, 0.3, 0.5, 0.9, 1.0])),
        min_p=draw(st.sampled_from([None, 0.0, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7, 10.0])),
        min_new_tokens=draw(st.integers(0, 8)),
        eos=eos,
    )
    return logits, sampling, text, path, draw(st.integers(1, len(text)))


def by_transformers(
    logits: Tensor, sampling: Sampling, text: list[int], path: list[int], n_prompt: int
) -> Tensor:
    """The same through the processors of ``generate``, in its order."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_new_tokens and sampling.eos:
        processors.append(
            MinNewTokensLengthLogitsProcessor(
                n_prompt, sampling.min_new_tokens, list(sampling.eos), device="cpu"
            )
        )
    if sampling.temperature not in (0.0, 1.0):
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.temperature != 0.0:
        if sampling.top_k is not None:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None and sampling.top_p < 1.0:
            processors.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p is not None:
            processors.append(MinPLogitsWarper(sampling.min_p))
    result: Tensor = processors(torch.tensor([text + path]), logits[None].clone())[0]
    return result


def check_against_transformers(case: tuple[Tensor, Sampling, list[int], list[int], int]) -> None:
    logits, sampling, text, path, n_prompt = case
    assume_no_border(case)
    before = logits.clone()
    ours = process(logits, sampling, History(list(text), n_prompt), path)
    theirs = by_transformers(logits, sampling, text, path, n_prompt)
    assert torch.equal(logits, before), "process must leave the logits as they are"
    assert bool(torch.isfinite(ours).any())
    # Which of equal tokens top-p drops is nobody's promise, how many is.
    kept, expected = ours.softmax(-1), theirs.softmax(-1)
    assert int((kept > 0).sum()) == int((expected > 0).sum())
    torch.testing.assert_close(kept.sort().values, expected.sort().values, rtol=1e-6, atol=1e-12)
    if sampling.top_p in (None, 1.0):
        torch.testing.assert_close(kept, expected, rtol=1e-6, atol=1e-12)


def assume_no_border(case: tuple[Tensor, Sampling, list[int], list[int], int]) -> None:
    """Set aside logits that stand on a border up to rounding: mass on 1-p, or a ratio on min-p."""
    logits, sampling, text, path, n_prompt = case
    if sampling.top_p is None and not sampling.min_p:
        return
    without = Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        min_new_tokens=sampling.min_new_tokens,
        eos=sampling.eos,
    )
    shares = process(logits, without, History(list(text), n_prompt), path).softmax(-1)
    if sampling.top_p is not None:
        mass = shares.sort().values.cumsum(-1)
        assume(float((mass - (1 - sampling.top_p)).abs().min()) > 1e-9)
    if sampling.min_p:
        ratio = shares / shares.max()
        on_border = (ratio - sampling.min_p).abs() < 1e-9
        assume(not bool((on_border & (ratio < 1)).any()))


@given(cases())
@settings(max_examples=200)
def test_all_settings_together_equal_transformers(
    case: tuple[Tensor, Sampling, list[int], list[int], int],
) -> None:
    check_against_transformers(case)


@pytest.mark.slow
@given(cases())
@settings(settings.get_profile("thorough"), max_examples=2000)
def test_all_settings_together_equal_transformers_thoroughly(
    case: tuple[Tensor, Sampling, list[int], list[int], int],
) -> None:
    check_against_transformers(case)


RANDOM = torch.randn(40, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, repetition_penalty=1.7),
        Sampling(temperature=1.0, min_new_tokens=3, eos=(2, 5)),
        Sampling(temperature=0.3),
        Sampling(temperature=1.0, top_k=7),
        Sampling(temperature=1.0, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.1),
    ],
    ids=["repetition_penalty", "min_new_tokens", "temperature", "top_k", "top_p", "min_p"],
)
def test_each_setting_alone_equals_transformers(sampling: Sampling) -> None:
    text, path = [2, 3, 4], [9]
    ours = process(RANDOM, sampling, History(text, 3), path).softmax(-1)
    theirs = by_transformers(RANDOM, sampling, text, path, 3).softmax(-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    # And it does something: a comparison of two no-ops would prove nothing.
    assert not torch.allclose(ours, RANDOM.softmax(-1))


# --- edges ----------------------------------------------------------------------------------------


def test_a_tiny_temperature_stays_finite_and_greedy() -> None:
    logits = torch.tensor([5.0, 5.1, -1e4])
    warm = process(logits, Sampling(temperature=1e-30), History([0], 1))
    assert not bool(warm.isnan().any())
    assert distribution(logits, Sampling(temperature=1e-30), [0]).token(0) == 1


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-50, 1e-320])
@pytest.mark.parametrize("top_p", [None, 0.5])
def test_a_temperature_below_what_float32_holds_is_greedy(
    temperature: float, top_p: float | None
) -> None:
    for seed in range(5):
        sampling = Sampling(temperature=temperature, top_p=top_p, min_p=0.1, seed=seed)
        assert distribution(torch.tensor([5.0, 5.1, 0.0]), sampling, [0]).token(0) == 1


def test_top_k_of_one_is_greedy_with_any_seed() -> None:
    for seed in range(20):
        sampling = Sampling(temperature=2.0, top_k=1, seed=seed)
        assert distribution(torch.tensor([0.0, 0.1, -2.0]), sampling, [0]).token(0) == 1


def test_top_k_keeps_ties_of_the_last() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 0.0])
    kept = process(logits, Sampling(temperature=1.0, top_k=2), History([0], 1))
    assert torch.isfinite(kept).tolist() == [True, True, True, False]


def test_top_k_tells_close_logits_apart() -> None:
    """Less the maximum, the two small ones are equal in floating point; as they are, not."""
    logits = torch.tensor([0.0, 1e-20, 1.0])
    kept = process(logits, Sampling(temperature=1.0, top_k=2), History([0], 1))
    assert torch.isfinite(kept).tolist() == [False, True, True]


def test_a_tiny_top_p_keeps_one_token() -> None:
    kept = process(torch.zeros(6), Sampling(temperature=1.0, top_p=1e-9), History([0], 1))
    assert int(torch.isfinite(kept).sum()) == 1


def test_warpers_are_off_at_temperature_zero() -> None:
    sampling = Sampling(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0)
    assert torch.equal(process(RANDOM, sampling, History([0], 1)), RANDOM)


def test_a_penalty_counts_the_prompt_the_text_and_the_path_once() -> None:
    history = History([0], 1)
    sampling = Sampling(repetition_penalty=2.0)
    logits = torch.tensor([4.0, 4.0, -4.0, 4.0])
    assert process(logits, sampling, history).tolist() == [2.0, 4.0, -4.0, 4.0]
    assert process(logits, sampling, history, [2, 2]).tolist() == [2.0, 4.0, -8.0, 4.0]
    assert process(logits, sampling, history).tolist() == [2.0, 4.0, -4.0, 4.0]
    history.extend([1, 1, 0])
    assert process(logits, sampling, history).tolist() == [2.0, 2.0, -4.0, 4.0]


def test_min_new_tokens_counts_along_the_path() -> None:
    sampling = Sampling(min_new_tokens=3, eos=(1,))
    history = History([0, 0], 1)  # one new token
    logits = torch.tensor([0.0, 9.0])
    assert process(logits, sampling, history, [0]).tolist() == [0.0, -math.inf]
    assert process(logits, sampling, history, [0, 0]).tolist() == [0.0, 9.0]
