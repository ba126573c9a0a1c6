"""Panels: a second copy of linear weights for forwards over few nodes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from backends.draft_trees import tree_and_path_logits
from backends.families import build, prompt_of
from torch import nn

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


def test_a_change_in_place_through_data_or_of_the_memory_is_followed() -> None:
    layer = nn.Linear(16, 16)
    owner = Panels(nn.Sequential(layer))
    (panels,) = owner.buffers()
    address = panels.data_ptr()
    with torch.no_grad():
        layer.weight[3, 5] = 7.0  # torch counts it
    owner.follow()
    assert panels[0, 5, 3] == 7.0
    layer.weight.data.mul_(2.0)  # nobody counts it
    owner.follow()
    assert panels[0, 5, 3] == 14.0
    layer.weight.data = layer.weight.data + 1.0
    owner.follow()
    assert panels[0, 5, 3] == 15.0
    assert panels.data_ptr() == address


def test_weights_of_inference_mode_are_followed_too() -> None:
    with torch.inference_mode():
        layer = nn.Linear(16, 16)
        owner = Panels(nn.Sequential(layer))
        layer.weight.add_(1.0)
        owner.follow()
        (panels,) = owner.buffers()
        assert torch.equal(weights_of(panels, 16), layer.weight)


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
        for change in ("in place", "through data", "other memory"):
            with torch.no_grad():
                if change == "in place":
                    layer.weight.mul_(-1.5)
                elif change == "through data":
                    layer.weight.data.mul_(2.0)
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
