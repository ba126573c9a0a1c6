"""The KV slab: writes at rows, moves, and equality with a fresh causal prefill."""

from __future__ import annotations

import pytest
import torch
from backends.draft_trees import layout, path_to, prefill, random_parents
from backends.families import build
from hypothesis import given
from hypothesis import strategies as st

from treegraft.backends.hf import HFLanguageModel
from treegraft.backends.kv import KVSlab, SlotShape
from treegraft.core.errors import CapacityError

CPU = torch.device("cpu")
SHAPE = SlotShape(heads=2, head_size=3, dtype=torch.float64, device=CPU)


def rows_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def write(slab: KVSlab, rows: torch.Tensor, span: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Write rows whose every number is the row's own; return what each layer hands out."""
    slab.aim_(rows, rows, span)
    states = rows.double()[None, None, :, None].expand(1, 2, len(rows), 3)
    return [slab.update(states, -states, index) for index in range(len(slab))]


def test_rows_are_written_where_they_are_asked_and_read_back_in_order() -> None:
    for layout_known in (None, ((SHAPE, SHAPE),) * 2):
        slab = KVSlab(2, 20, layout=layout_known)
        write(slab, rows_of(0, 1, 2), 3)
        for keys, values in write(slab, rows_of(5, 3), 6):
            assert keys[0, 0, :6, 0].tolist() == [0, 1, 2, 3, 0, 5]
            assert torch.equal(values, -keys)
            assert keys.shape == (1, 2, 16, 3)  # the span, rounded up for the kernels


def test_a_move_reads_every_source_before_it_writes() -> None:
    slab = KVSlab(2, 8, layout=((SHAPE, SHAPE),) * 2, positions_device=CPU)
    write(slab, torch.arange(6), 6)
    slab.move_(rows_of(0, 3, 5, 1), rows_of(0, 1, 2, 3))
    assert slab.layers[1].keys[0, 1, :6, 2].tolist() == [0, 3, 5, 1, 4, 5]
    assert slab.layers[0].values[0, 0, :6, 0].tolist() == [0, -3, -5, -1, -4, -5]
    assert slab.positions is not None
    assert slab.positions[:6].tolist() == [0, 3, 5, 1, 4, 5]


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), unique_by=lambda m: m[1]))
def test_a_move_equals_indexing(moves: list[tuple[int, int]]) -> None:
    for layout_known in (None, ((SHAPE, SHAPE),)):
        slab = KVSlab(1, 12, layout=layout_known)
        write(slab, torch.arange(12), 12)
        expected = slab.layers[0].keys.clone()
        source, target = (rows_of(*(m[i] for m in moves)) for i in (0, 1))
        expected[:, :, target] = expected[:, :, source]
        slab.move_(source, target)
        assert torch.equal(slab.layers[0].keys, expected)


def test_layers_of_different_shapes_keep_their_own() -> None:
    odd = SlotShape(heads=1, head_size=5, dtype=torch.float64, device=CPU)
    slab = KVSlab(3, 4, layout=((SHAPE, odd), None, (SHAPE, SHAPE)))
    assert slab.layout() == ((SHAPE, odd), None, (SHAPE, SHAPE))
    slab.aim_(rows_of(1), rows_of(1), 2)
    ones = torch.ones(1, 2, 1, 5, dtype=torch.float64)
    keys, values = slab.update(ones[..., :3], ones[:, :1], 0)
    assert (keys.shape[-1], values.shape[-1]) == (3, 5)
    slab.move_(rows_of(1), rows_of(0))
    assert slab.layers[0].values[0, 0, :2].sum() == 2 * 5


def test_layers_of_one_shape_share_one_tensor() -> None:
    slab = KVSlab(3, 4, layout=((SHAPE, SHAPE),) * 3)
    stores = {layer.keys.untyped_storage().data_ptr() for layer in slab.layers}
    stores |= {layer.values.untyped_storage().data_ptr() for layer in slab.layers}
    assert len(stores) == 1


@pytest.mark.parametrize(("rows", "span"), [((0, 9), 10), ((4,), 3), ((-1,), 3), ((), 3)], ids=str)
def test_rows_out_of_reach_are_refused(rows: tuple[int, ...], span: int) -> None:
    slab = KVSlab(1, 8)
    with pytest.raises(CapacityError, match="rows"):
        slab.aim_(rows_of(*rows), rows_of(*rows), span)


def test_a_move_out_of_the_slab_is_refused() -> None:
    slab = KVSlab(1, 8, layout=((SHAPE, SHAPE),))
    with pytest.raises(CapacityError, match="names row 8"):
        slab.move_(rows_of(3, 8), rows_of(1, 2))


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "gpt2", "deepseek-v3"])
def test_kv_after_steps_equals_a_fresh_prefill(name: str) -> None:
    """Law 6 of the design: nothing of a rejected branch stays, whatever was moved."""
    model = HFLanguageModel(build(name, dtype=torch.float64))
    dice = torch.Generator().manual_seed(5)
    text = torch.randint(0, model.vocab_size, (4,), generator=dice)
    cache = model.new_cache(64)
    prefill(model, cache, text)
    for _ in range(6):
        parents = random_parents(7, dice)
        tokens = torch.randint(0, model.vocab_size, (7,), generator=dice)
        model.forward(cache, tokens, *layout(parents, len(text)))
        path = path_to(parents, int(torch.randint(0, 7, (1,), generator=dice)))
        kept = torch.tensor(path)
        model.move_(cache, len(text) + kept, len(text) + torch.arange(len(path)))
        text = torch.cat([text, tokens[kept]])
    fresh = model.new_cache(64)
    prefill(model, fresh, text)
    tolerance = 1e-6 if name == "deepseek-v3" else 1e-9  # its router is float32 in any dtype
    for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            a, b = a[:, :, : len(text)], b[:, :, : len(text)]
            assert (a - b).abs().max() <= tolerance * b.abs().max()
    following = torch.randint(0, model.vocab_size, (3,), generator=dice)
    after, expected = (prefill(model, c, following, len(text)) for c in (cache, fresh))
    assert (after - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3"])
def test_a_larger_cache_goes_on_where_the_smaller_one_ended(name: str) -> None:
    model = HFLanguageModel(build(name, dtype=torch.float64))
    text = torch.randint(0, model.vocab_size, (30,), generator=torch.Generator().manual_seed(6))
    small = model.new_cache(20)
    prefill(model, small, text[:20])
    grown = model.new_cache(41, small)
    logits = prefill(model, grown, text[20:], 20)
    expected = prefill(model, model.new_cache(30), text)[20:]
    tolerance = 1e-6 if name == "deepseek-v3" else 1e-9
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
    with pytest.raises(CapacityError, match="has 41 rows"):
        prefill(model, grown, text[:12], 30)


def test_a_cache_opened_in_inference_mode_can_be_written_out_of_it() -> None:
    model = HFLanguageModel(build("gemma3"))
    with torch.inference_mode():
        cache = model.new_cache(8)
    logits = prefill(model, cache, torch.arange(8))
    model.move_(cache, rows_of(5), rows_of(2))
    assert not logits.is_inference()
