"""Panels: a second copy of linear weights for forwards over few nodes."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from backends.draft_trees import tree_and_path_logits
from backends.families import build, prompt_of
from torch import nn

from treegraft.backends.graph_report import ForwardChoice
from treegraft.backends.graphs import CompiledModel, GraphPlan
from treegraft.backends.hf import HFLanguageModel
from treegraft.backends.panels import Panels
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError
from treegraft.core.language_model import ForwardCounts
from treegraft.pipeline import build_pipeline

FORK = [0, 0, 0, 1, 2, 2, 3]
NEAR = 2e-4
PLAN = GraphPlan(compiler="aot", n_nodes=5, panels=True)
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights_of(panels: torch.Tensor, n_out: int) -> torch.Tensor:
    """[P, I, 16] as [O, I] again."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:n_out]


# The copy.


def test_a_panel_holds_sixteen_outputs_one_input_after_the_other() -> None:
    layer = nn.Linear(20, 32, bias=False)
    (panels,) = Panels(nn.Sequential(layer)).buffers()
    assert panels.shape == (2, 20, 16)
    assert torch.equal(panels[1, 7], layer.weight[16:, 7])


@pytest.mark.parametrize("n_out", [16, 17, 31, 40])
def test_a_last_panel_that_is_not_full_is_filled_up_with_zeros(n_out: int) -> None:
    layer = nn.Linear(18, n_out)
    (panels,) = Panels(nn.Sequential(layer)).buffers()
    assert torch.equal(weights_of(panels, n_out), layer.weight)
    assert not weights_of(panels, panels.shape[0] * 16)[n_out:].any()


def test_layers_of_another_type_size_or_kind_have_none() -> None:
    class Own(nn.Linear):
        pass

    layers = [nn.Linear(16, 15), nn.Linear(16, 16, dtype=torch.float64), Own(16, 16)]
    panels = Panels(nn.Sequential(*layers, nn.Embedding(16, 16)))
    assert panels.n_bytes == 0


def test_every_change_is_followed_also_those_that_nobody_counts() -> None:
    layer = nn.Linear(16, 40)
    owner = Panels(nn.Sequential(layer))
    (panels,) = owner.buffers()
    address = panels.data_ptr()

    def followed() -> bool:
        owner.follow()
        return torch.equal(weights_of(panels, 40), layer.weight)

    with torch.no_grad():
        layer.weight[3, 5] = 7.0  # torch counts it
    assert followed()
    layer.weight.data[7] = torch.randn(16)
    assert followed()
    layer.weight.detach().numpy()[39] = 3.0
    assert followed()
    layer.weight.data.copy_(layer.weight.data.flip(0))
    assert followed()
    layer.weight.data = layer.weight.data + 1.0
    assert followed()
    assert panels.data_ptr() == address


def test_panels_made_in_inference_mode_could_not_be_written_outside_of_it() -> None:
    layer = nn.Linear(16, 16)
    with torch.inference_mode():
        owner = Panels(nn.Sequential(layer))
        given = nn.Linear(16, 16)
        other = Panels(nn.Sequential(given))
        given.weight[5] += 1.0
        other.follow()
        assert torch.equal(weights_of(next(other.buffers()), 16), given.weight)
    layer.weight.data.mul_(1.5)
    owner.follow()
    assert torch.equal(weights_of(next(owner.buffers()), 16), layer.weight)


def test_a_kernel_without_huge_pages_ended_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    layer = nn.Linear(16, 16)
    (panels,) = Panels(nn.Sequential(layer)).buffers()
    assert torch.equal(weights_of(panels, 16), layer.weight)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    (panels,) = Panels(nn.Sequential(layer)).buffers()
    assert torch.equal(weights_of(panels, 16), layer.weight)


# The products.


@pytest.mark.parametrize(("n", "most"), [(1, 1), (1, 8), (2, 8), (5, 8), (8, 8)])
@pytest.mark.parametrize("n_out", [16, 21])
def test_products_are_those_of_the_layer(n: int, most: int, n_out: int) -> None:
    layer = nn.Linear(24, n_out)
    for given in (torch.randn(n, 24), torch.randn(1, n, 24)):
        with Panels(nn.Sequential(layer)).products(n, most):
            found = layer(given)
        assert found.shape == (*given.shape[:-1], n_out)
        assert torch.allclose(found, layer(given), atol=1e-5)


def test_the_bias_of_a_layer_was_added_where_the_call_had_none_or_another() -> None:
    layer, given = nn.Linear(16, 16), torch.randn(3, 16)
    other = torch.randn(16)
    calls = [
        lambda: nn.functional.linear(given, layer.weight),
        lambda: nn.functional.linear(given, layer.weight, other),
        lambda: nn.functional.linear(input=given, weight=layer.weight, bias=other),
    ]
    for call in calls:
        with Panels(nn.Sequential(layer)).products(3, 8):
            found = call()
        assert torch.allclose(found, call(), atol=1e-5)


@pytest.mark.parametrize("shape", [(9, 16), (2, 3, 16), (1, 3, 4, 16), (1, 9, 16)])
def test_what_is_not_one_row_a_query_was_cut_to_eight_rows(shape: tuple[int, ...]) -> None:
    layer, given = nn.Linear(16, 16), torch.randn(shape)
    with Panels(nn.Sequential(layer)).products(3, 8):
        found = layer(given)
    assert torch.equal(found, layer(given))


def test_a_replaced_layer_is_found_and_one_of_another_size_is_not_taken_for_it() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    owner = Panels(model)
    model[0] = nn.Linear(16, 16)
    owner.find()
    owner.follow()
    assert owner.fits
    assert torch.equal(weights_of(next(owner.buffers()), 16), model[0].weight)
    for other in (nn.Linear(16, 32), nn.Linear(16, 16, dtype=torch.float64), nn.ReLU()):
        model[0] = other
        owner.find()
        owner.follow()
        assert not owner.fits


def test_the_model_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    owner = Panels(model)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert [*dict(owner.named_parameters())] == []


# Compiled forwards on it.


@pytest.fixture(scope="module")
def model() -> HFLanguageModel:
    # With biases, and a vocabulary that fills no panel; its output layer is its embedding.
    model = build("qwen2", num_hidden_layers=1, tie_word_embeddings=True)
    return HFLanguageModel(model, name="tiny")


@pytest.fixture(scope="module")
def compiled(
    model: HFLanguageModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CompiledModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEGRAFT_CACHE_DIR", str(tmp_path_factory.mktemp("libraries")))
        yield CompiledModel(model, PLAN)


@compiles
def test_a_tree_is_read_as_the_model_reads_it_whatever_its_size(
    model: HFLanguageModel, compiled: CompiledModel
) -> None:
    assert [c.kind for c in compiled.graphs.choices] == [
        "one query",
        "up to 8 queries",
        "several queries",
        "prompt",
    ]
    assert compiled.graphs.panels > 0
    assert "panels" in str(compiled.graphs)
    outside = compiled.forward_counts.outside
    for n in (1, 2, 3, 7, 8, 9, 12):
        found, _ = tree_and_path_logits(compiled, 6, FORK[: max(n - 1, 1)] + [0] * (n - 8), dice(n))
        expected, _ = tree_and_path_logits(model, 6, FORK[: max(n - 1, 1)] + [0] * (n - 8), dice(n))
        assert torch.allclose(found, expected, rtol=0, atol=NEAR)
    assert compiled.forward_counts.outside == outside


@compiles
def test_weights_that_change_between_texts_are_read_anew(
    model: HFLanguageModel, compiled: CompiledModel
) -> None:
    layer = model.model.model.layers[0].mlp.down_proj
    held = layer.weight.detach().clone()
    try:
        for change in ("in place", "uncounted", "other memory"):
            with torch.no_grad():
                if change == "in place":
                    layer.weight.mul_(-1.5)
                elif change == "uncounted":
                    layer.weight.data[5:9] *= 2.0
                else:
                    layer.weight.data = layer.weight.data / 3.0
            found, _ = tree_and_path_logits(compiled, 5, FORK, dice())
            expected, _ = tree_and_path_logits(model, 5, FORK, dice())
            assert torch.allclose(found, expected, rtol=0, atol=NEAR), change
    finally:
        layer.weight.data = held


@compiles
def test_tokens_are_those_of_plain_decoding_and_nothing_runs_outside(
    model: HFLanguageModel, compiled: CompiledModel
) -> None:
    data = {
        "target": {"model": "target"},
        "drafters": [{"kind": "recycle"}, {"kind": "lm", "model": "drafter"}],
        "builder": {"kind": "layered", "depth": 3, "width": 2, "budget": 7},
        "scheduler": {"kind": "always"},
        "stop": {"eos": []},
    }
    models = {"target": compiled, "drafter": compiled}
    tree = build_pipeline(parse_config(data), models=models)
    plain = build_pipeline(parse_config(data | {"drafters": []}), models={"target": model})
    options = {"max_new_tokens": 24}
    generation = tree.generate(prompt_of(6), **options)
    assert generation.tokens == plain.generate(prompt_of(6), **options).tokens
    assert all(
        counts == ForwardCounts(compiled=counts.compiled) for counts in generation.forwards.values()
    )


@compiles
@pytest.mark.slow
def test_a_model_without_float32_weights_says_that_it_has_no_panels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TREEGRAFT_CACHE_DIR", str(tmp_path))
    other = HFLanguageModel(build("llama", num_hidden_layers=1, dtype=torch.float64), name="other")
    graphs = CompiledModel(other, PLAN).graphs
    assert graphs.panels == 0
    assert "no panels" in str(graphs)


@pytest.mark.parametrize(
    ("backend", "named"),
    [
        ({}, "backend.compile on or auto, found off"),
        ({"compile": "on", "compiler": "inductor"}, "backend.compiler None or aot, found inductor"),
        ({"compile": "on", "device": "cuda"}, "backend.device cpu, found cuda"),
        ({"compile": "on", "dtype": "bfloat16"}, "backend.dtype float32 or auto, found bfloat16"),
        ({"compile": "on", "buckets": True}, "backend.buckets False, found True"),
    ],
)
def test_settings_under_which_nothing_would_read_panels_are_refused(
    backend: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_config({"target": {"model": "m"}, "backend": backend | {"panels": True}})


@compiles
@pytest.mark.slow
def test_a_family_with_a_layer_over_all_rows_of_its_cache_could_not_be_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TREEGRAFT_CACHE_DIR", str(tmp_path))
    model = HFLanguageModel(build("deepseek-v3", num_hidden_layers=1), name="deepseek")
    made = CompiledModel(model, PLAN)
    for parents in (FORK[:1], FORK):
        found, _ = tree_and_path_logits(made, 6, parents, dice())
        expected, _ = tree_and_path_logits(model, 6, parents, dice())
        assert torch.allclose(found, expected, rtol=0, atol=NEAR)
    assert made.forward_counts.outside == 0


@compiles
def test_panels_that_no_chosen_forward_reads_are_let_go_of(
    model: HFLanguageModel, compiled: CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        CompiledModel, "_time", lambda _, kind, *__: ForwardChoice(kind.name, 1, 1.0, 2.0, False)
    )
    graphs = CompiledModel(model, replace(PLAN, mode="auto")).graphs
    assert graphs.panels == 0
    assert "eager forwards are faster" in str(graphs)
