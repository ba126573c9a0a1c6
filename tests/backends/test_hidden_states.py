"""Hidden states of every family: on a tree, on a text, and as a drafter is told them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends.draft_trees import layout, path_to, prefill, random_parents
from backends.families import FAMILIES, build, prompt_of
from torch import Tensor, nn

from treegraft.backends.hf import HFLanguageModel
from treegraft.config import parse_config
from treegraft.core.errors import UnsupportedModelError
from treegraft.core.language_model import extend
from treegraft.pipeline import build_pipeline

# Parts of these compute in float32 whatever the weights are (tests/backends/test_families.py).
FLOAT32_INSIDE = {"gemma2", "deepseek-v3"}


def plain_states(model: Any, text: Tensor) -> Tensor:
    """[T, d] of the bare model on a whole text, as transformers itself calls its last states."""
    with torch.no_grad():
        out = model(input_ids=text[None], use_cache=False, output_hidden_states=True)
    return out.hidden_states[-1][0]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_states_on_a_tree_are_those_of_a_plain_forward(name: str) -> None:
    bare = build(name, seed=3, dtype=torch.float64)
    model = HFLanguageModel(bare)
    dice = torch.Generator().manual_seed(2)
    parents = random_parents(12, dice)
    prefix = torch.randint(3, model.vocab_size, (13,), generator=dice)
    tokens = torch.randint(3, model.vocab_size, (12,), generator=dice)
    cache = model.new_cache(25)
    prefill(model, cache, prefix)
    logits, states = model.forward_hidden(cache, tokens, *layout(parents, 13))
    assert states.dtype == torch.float64
    assert states.shape == (12, model.hidden_size)
    allowed = 1e-6 if name in FLOAT32_INSIDE else 1e-9
    for node in range(12):
        text = torch.cat([prefix, tokens[path_to(parents, node)]])
        assert error(states[node], plain_states(bare, text)[-1]) < allowed
    # What forward says, the same bits.
    cache = model.new_cache(25)
    prefill(model, cache, prefix)
    assert torch.equal(model.forward(cache, tokens, *layout(parents, 13)), logits)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "opt", "llama4"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_is_told_the_state_behind_every_place(name: str, temperature: float) -> None:
    """Prompt, accepted nodes and bonus tokens: what a plain forward over the text has there."""
    bare = build(name, seed=3, dtype=torch.float64)
    target = HFLanguageModel(bare)
    asks = {"target_top": 0, "vocab_size": 40, "target_hidden": True}
    config = {
        "target": {"model": "t"},
        "drafters": [
            {"kind": "lm", "model": "t"},
            {"kind": "adversarial_drafters:Recorder", "params": asks},
        ],
        "builder": {"kind": "layered", "depth": 3, "width": 40, "budget": 14},
        "scheduler": {"kind": "fixed", "calls": [0, 1, 0]},
        "sampling": {"temperature": temperature},
        "stop": {"max_new_tokens": 25, "eos": []},
    }
    made = build_pipeline(parse_config(config), {"t": target})
    for prompt in (prompt_of(9), prompt_of(1)):
        result = made.generate(prompt)
        recorder = made._parts.drafters[1]._drafter  # type: ignore[attr-defined]
        told = [recorder.contexts[-1].hidden, *(c.hidden for c in recorder.commits)]
        lengths = [len(prompt) - 1, *(len(c.tokens) for c in recorder.commits)]
        assert [rows.shape[0] for rows in told] == lengths
        assert max(lengths[1:]) > 1, "some drafted node must have been accepted"
        # What takes the last token of the text behind place n - 1 is told by nobody.
        text = torch.tensor(prompt + result.tokens)[: sum(lengths)]
        assert error(torch.cat(told), plain_states(bare, text)) < 1e-9
        recorder.commits.clear()


def test_a_prompt_longer_than_a_chunk_has_all_its_states() -> None:
    model = HFLanguageModel(build("llama", dtype=torch.float64))
    text = prompt_of(23)
    states: list[Tensor] = []
    cache = model.new_cache(23)
    assert [o for o, _ in extend(model, cache, text, 0, chunk=9, states=states)] == [0, 9, 18]
    expected = plain_states(model.model, torch.tensor(text))
    assert error(torch.cat(states), expected) < 1e-9


def test_states_come_in_the_models_own_dtype() -> None:
    model = HFLanguageModel(build("llama", dtype=torch.bfloat16))
    zero = torch.zeros(1, dtype=torch.int64)
    read = (zero, zero, zero, torch.ones(1, 1, dtype=torch.bool))
    logits, states = model.forward_hidden(model.new_cache(1), *read)
    assert (logits.dtype, states.dtype) == (torch.float32, torch.bfloat16)


def test_the_model_is_left_without_a_hook() -> None:
    bare = build("llama")
    model = HFLanguageModel(bare)
    zero = torch.zeros(1, dtype=torch.int64)
    read = (zero, zero, zero, torch.ones(1, 1, dtype=torch.bool))
    model.forward_hidden(model.new_cache(1), *read)
    with pytest.raises(IndexError):
        model.forward_hidden(model.new_cache(1), zero + 10**6, *read[1:])
    assert not any(module._forward_pre_hooks for module in bare.modules())


def test_a_model_that_does_not_call_its_output_layer_hands_out_nothing() -> None:
    class Aside(nn.Linear):
        """Weights that are used without a call."""

    bare = build("llama")
    aside = Aside(*reversed(bare.lm_head.weight.shape), bias=False)
    aside.weight = bare.lm_head.weight
    bare.get_output_embeddings = lambda: aside  # type: ignore[method-assign]
    model = HFLanguageModel(bare)
    assert model.hidden_size is None
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UnsupportedModelError, match="llama hands out no hidden states"):
        model.forward_hidden(
            model.new_cache(1), zero, zero, zero, torch.ones(1, 1, dtype=torch.bool)
        )
