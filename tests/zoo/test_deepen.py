"""Cost-scaled targets: dearer, and in every bit of their logits the same."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from typer import BadParameter

import treegraft
from treegraft.zoo import zoo_path

RECIPES = Path(treegraft.__file__).parents[1] / "recipes" / "zoo"
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 2}
pytestmark = pytest.mark.skipif(not RECIPES.is_dir(), reason="recipes are not installed")


@pytest.fixture
def deepen(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.delitem(sys.modules, "grow", raising=False)
    return importlib.import_module("deepen")


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def tiny(tied=True, biased=False):
    torch.manual_seed(1)
    config = LlamaConfig(
        num_hidden_layers=3,
        tie_word_embeddings=tied,
        attention_bias=biased,
        mlp_bias=biased,
        **SHAPE,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("layers", [3, 4, 7, 12])
@pytest.mark.parametrize(("tied", "biased"), [(True, False), (False, False), (True, True)])
def test_a_deepened_model_gives_the_same_logits_to_the_last_bit(deepen, layers, tied, biased):
    model = tiny(tied, biased)
    deep = deepen.deepened(model, layers)
    ids = torch.arange(20)[None] % 50
    assert deep.config.num_hidden_layers == len(deep.model.layers) == layers
    assert model.config.num_hidden_layers == 3
    assert torch.equal(logits(deep, ids), logits(model, ids))


def test_the_extra_blocks_are_no_empty_ones(deepen):
    deep = deepen.deepened(tiny(), 6)
    for block in deep.model.layers:
        assert block.self_attn.q_proj.weight.count_nonzero() > 0
        assert block.mlp.up_proj.weight.count_nonzero() > 0


def test_layer_types_are_spread_with_the_blocks(deepen):
    kinds = ["sliding_attention", "full_attention"]
    windows = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 4}
    config = Qwen2Config(num_hidden_layers=2, **windows, **SHAPE)
    model = Qwen2ForCausalLM(config).eval()
    deep = deepen.deepened(model, 5)
    assert deep.config.layer_types == [kinds[i * 2 // 5] for i in range(5)]
    ids = torch.arange(20)[None] % 50
    assert torch.equal(logits(deep, ids), logits(model, ids))


def test_a_folder_is_written_that_is_labelled_and_can_be_a_target(deepen, tmp_path):
    out = tmp_path / "deep"
    deepen.main(layers=5, out=out, model="zoo:small")
    entry = json.loads((out / "card.json").read_text())
    assert entry["label"] == "cost-scaled"
    assert (entry["layers"], entry["layers_of_base"]) == (5, 2)
    assert entry["parameters"] > entry["parameters_of_base"]
    assert "Cost-scaled, not better" in (out / "CARD.md").read_text()
    ids = torch.arange(30)[None]
    base = AutoModelForCausalLM.from_pretrained(zoo_path("small"), dtype=torch.float32)
    deep = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(logits(deep, ids), logits(base, ids))
    texts = [
        treegraft.build_pipeline(treegraft.parse_config({"target": {"model": source}})).generate(
            "def f(x):\n", max_new_tokens=12
        )
        for source in (str(out), "zoo:small")
    ]
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].text == texts[1].text


def test_what_cannot_be_deepened_is_refused(deepen, tmp_path):
    with pytest.raises(ValueError, match="at least the model's 3, found 2"):
        deepen.deepened(tiny(), 2)
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50))
    with pytest.raises(ValueError, match="llama, mistral, qwen2 or qwen3, found 'gpt2'"):
        deepen.deepened(other, 2)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadParameter, match="must not exist or be empty"):
        deepen.main(layers=5, out=tmp_path, model="zoo:small")
