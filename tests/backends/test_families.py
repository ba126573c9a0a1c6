"""Every family of the matrix: tree logits equal path logits, in each dtype and attention it has."""

from __future__ import annotations

import pytest
import torch
from backends.draft_trees import random_parents, relative_error, tree_and_path_logits
from backends.families import CHUNK, FAMILIES, WINDOW, build

from treegraft.backends.hf import HFLanguageModel

ALL = sorted(FAMILIES)
# float32 parts of these families bound what float64 weights can show: softmax of eager attention
# (gemma2) and the router (deepseek).
FLOAT32_INSIDE = {"gemma2", "deepseek-v3"}
WINDOWED = {
    "mistral": [("sliding_attention", 3, WINDOW)],
    "gemma2": [("full_attention", 1, None), ("sliding_attention", 2, WINDOW)],
    "gemma3": [("full_attention", 1, None), ("sliding_attention", 2, WINDOW)],
    "gpt-oss": [("full_attention", 1, None), ("sliding_attention", 2, WINDOW)],
    "smollm3": [("full_attention", 1, None), ("sliding_attention", 2, WINDOW)],
    "cohere2": [("full_attention", 1, None), ("sliding_attention", 2, WINDOW)],
    "llama4": [("full_attention", 1, None), ("chunked_attention", 3, CHUNK)],
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ALL)
def test_tree_logits_equal_path_logits(name: str, attention: str) -> None:
    if attention == "sdpa" and not type(build(name))._supports_sdpa:
        pytest.skip(f"{name} has no sdpa attention in this version of transformers")
    model = HFLanguageModel(build(name, attention=attention))
    assert model.report.attention == attention
    dice = torch.Generator().manual_seed(1)
    for n_prefix in (1, 11, 17):  # from below a window to well past it
        parents = random_parents(14, dice)
        tree, paths = tree_and_path_logits(model, n_prefix, parents, dice)
        # Weights drawn this wide amplify rounding: 3e-5 was seen, depending on the threads. A wrong
        # mask or position errs by 1e-1; what is between, the test in float64 sees.
        assert relative_error(tree, paths) < 1e-4


@pytest.mark.parametrize("name", ALL)
def test_float64_leaves_no_room_for_a_small_mistake(name: str) -> None:
    model = HFLanguageModel(build(name, seed=3, dtype=torch.float64))
    dice = torch.Generator().manual_seed(2)
    tree, paths = tree_and_path_logits(model, 13, random_parents(12, dice), dice)
    assert tree.dtype == torch.float64
    assert relative_error(tree, paths) < (1e-6 if name in FLOAT32_INSIDE else 1e-9)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loads_and_passes_its_self_test(name: str, dtype: torch.dtype) -> None:
    model = HFLanguageModel(build(name, dtype=dtype))
    assert model.report.self_test_error is not None
    cache = model.new_cache(4)
    zero = torch.zeros(1, dtype=torch.int64)
    logits = model.forward(cache, zero, zero, zero, torch.ones(1, 1, dtype=torch.bool))
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("name", ALL)
def test_a_causal_mask_in_place_of_the_tree_is_seen(name: str) -> None:
    """The probe can fail: what the tests above compare does depend on the mask."""
    model = HFLanguageModel(build(name))
    cache = model.new_cache(24)
    dice = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, model.vocab_size, (16,), generator=dice)
    places = torch.arange(16)
    causal = places <= places[:, None]
    alone = causal.clone()
    alone[15, 10:15] = False  # the last token follows the tenth
    positions = places.clone()
    positions[15] = 10
    by_mask = model.forward(cache, tokens, places, positions, alone)[15]
    by_rows = model.forward(cache, tokens, places, places, causal)[15]
    assert (by_mask - by_rows).abs().max() > 0.01 * by_rows.abs().max()


@pytest.mark.parametrize("name", sorted(WINDOWED))
def test_layer_types_and_windows_are_reported(name: str) -> None:
    report = HFLanguageModel(build(name)).report
    assert [(r.kind, r.layers, r.window) for r in report.reaches] == WINDOWED[name]
    assert report.mask_form == ("tensor" if len(report.reaches) == 1 else "per layer type")


def test_all_families_share_one_vocabulary() -> None:
    widths = {HFLanguageModel(make(), self_test=False).vocab_size for make in FAMILIES.values()}
    assert len(widths) == 1
