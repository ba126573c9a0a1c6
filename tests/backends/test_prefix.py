"""``NAME[:N]``: the first layers of a model draft for it, on its own weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends.families import VOCAB, build, prompt_of
from table_models import hashed_model

from treegraft.backends.hf import HFLanguageModel, load_model
from treegraft.backends.prefix import first_layers
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError, UnsupportedModelError
from treegraft.pipeline import build_pipeline


def config(*drafters: str, **backend: Any) -> Any:
    return parse_config(
        {
            "target": {"model": "target"},
            "drafters": [{"kind": "lm", "model": name} for name in drafters],
            "builder": {"kind": "layered", "depth": 3, "width": 3, "budget": 8},
            "scheduler": {"kind": "always"} if drafters else {"kind": "never"},
            "stop": {"eos": []},
            "backend": {"dtype": "float64", **backend},
        }
    )


def test_the_targets_first_layers_draft_for_it_and_no_token_changes() -> None:
    # Later layers that add little, as they do in a trained model.
    model = build("llama", dtype=torch.float64, num_hidden_layers=4)
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
    models = {"target": HFLanguageModel(model)}
    drafted = build_pipeline(config("target[:2]"), models=models)
    expected = build_pipeline(config(), models=models).generate(prompt_of(9), max_new_tokens=40)
    found = drafted.generate(prompt_of(9), max_new_tokens=40)
    assert found.tokens == expected.tokens
    assert len(found.steps) < len(expected.steps)
    assert drafted.config.drafter_names == ("target-2",)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma3", "qwen3"])
def test_it_is_the_model_with_fewer_layers_and_shares_every_weight(name: str) -> None:
    model = build(name, dtype=torch.float64)
    n_all = model.config.get_text_config().num_hidden_layers
    short = first_layers(model, 1, "m[:1]")
    weights = dict(model.named_parameters())
    shared = dict(short.named_parameters())
    assert 0 < len(shared) < len(weights)
    assert all(weights[each].data_ptr() == tensor.data_ptr() for each, tensor in shared.items())
    alone = build(name, dtype=torch.float64, **_one_layer(name))
    alone.load_state_dict({each: weights[each] for each in dict(alone.named_parameters())}, False)
    ids = torch.arange(2, 14)[None] % VOCAB
    with torch.no_grad():
        assert torch.equal(short(ids, use_cache=False).logits, alone(ids, use_cache=False).logits)
    # The model is as it was.
    assert model.config.get_text_config().num_hidden_layers == n_all
    assert dict(model.named_parameters()).keys() == weights.keys()
    HFLanguageModel(short)  # its self-test reads a tree


def _one_layer(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"num_hidden_layers": 1}
    layer_types = getattr(build(name).config.get_text_config(), "layer_types", None)
    return settings | ({"layer_types": layer_types[:1]} if layer_types else {})


def test_a_prefix_of_a_checkpoint_is_loaded_by_its_name() -> None:
    model = load_model("zoo:small[:1]", self_test=False)
    assert model.report.n_layers == 1
    pipeline = build_pipeline(
        parse_config(
            {
                "target": {"model": "zoo:small"},
                "drafters": [{"kind": "lm", "model": "zoo:small[:1]"}],
            }
        )
    )
    target, near = pipeline.models["zoo:small"], pipeline.models["zoo:small[:1]"]
    assert target.model.lm_head.weight.data_ptr() == near.model.lm_head.weight.data_ptr()  # type: ignore[attr-defined]
    assert pipeline.generate("def f(", max_new_tokens=4).tokens


@pytest.mark.parametrize("n", [0, 2, 7])
def test_a_number_of_layers_that_makes_no_prefix_is_refused_in_one_line(n: int) -> None:
    models = {"target": HFLanguageModel(build("llama", dtype=torch.float64, num_hidden_layers=2))}
    with pytest.raises(ConfigError, match=rf"target\[:{n}\].*first N") as fault:
        build_pipeline(config(f"target[:{n}]"), models=models)
    assert "\n" not in str(fault.value)


def test_layers_that_cannot_be_told_and_models_of_ones_own_are_refused() -> None:
    model = build("llama", num_hidden_layers=2)
    model.other = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    with pytest.raises(UnsupportedModelError, match="2 of its modules may be its 2 layers"):
        first_layers(model, 1, "m[:1]")
    with pytest.raises(ConfigError, match="only of models of transformers"):
        build_pipeline(config("target[:1]"), models={"target": hashed_model(8, 1)})
