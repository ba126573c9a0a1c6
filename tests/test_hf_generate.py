"""Our tokens are those of transformers' own ``generate``; the caller's things stay untouched."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from treegraft.backends.hf import HFLanguageModel
from treegraft.config import parse_config
from treegraft.core.errors import DrafterError
from treegraft.core.stats import Generation
from treegraft.pipeline import Pipeline, build_pipeline

V = 40
PROMPTS = ([3], [5, 1, 7], [2, 9, 2, 9, 2, 9, 4] * 4)


def tiny_llama(seed: int, layers: int = 2, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """Weights drawn wide, so that the text does not fall into a loop at once."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["fp64", "fp32"])
def target(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return tiny_llama(0, dtype=request.param)


@pytest.fixture(scope="module")
def near(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A drafter that agrees with the target often: the same weights with a little noise."""
    model = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator).to(weight)
    return model


def drafting(target: PreTrainedModel, near: PreTrainedModel, **options: Any) -> Pipeline:
    config = {
        "target": {"model": "target"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "near"}],
        "builder": {"kind": "layered", "depth": 4, "width": 4, "budget": 20},
        "scheduler": {"kind": "fixed", "calls": ["near", "ngram", "near"]},
        "stop": {"max_new_tokens": 40},
        **options,
    }
    models = {"target": HFLanguageModel(target), "near": HFLanguageModel(near)}
    return build_pipeline(parse_config(config), models)


def by_transformers(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **options}
    with torch.no_grad():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


# --- the story ------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_generate(
    target: LlamaForCausalLM, near: LlamaForCausalLM
) -> None:
    made = drafting(target, near)
    accepted = 0
    for prompt in PROMPTS:
        result = made.generate(prompt)
        assert result.tokens == by_transformers(target, prompt)
        accepted += sum(step.n_path for step in result.steps)
    assert accepted > 20, "nothing was accepted, so nothing was proved"


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty(
    target: LlamaForCausalLM, near: LlamaForCausalLM, penalty: float
) -> None:
    made = drafting(target, near, sampling={"repetition_penalty": penalty})
    for prompt in PROMPTS:
        expected = by_transformers(target, prompt, repetition_penalty=penalty)
        assert made.generate(prompt).tokens == expected
    assert any(by_transformers(target, p) != made.generate(p).tokens for p in PROMPTS)


def test_one_or_several_eos_ids(target: LlamaForCausalLM, near: LlamaForCausalLM) -> None:
    made = drafting(target, near)
    for prompt in PROMPTS:
        free = by_transformers(target, prompt)
        for eos in ([free[7]], [free[11], free[5]], [free[0]], [V - 1], list(range(V))):
            expected = by_transformers(target, prompt, eos_token_id=eos)
            assert made.generate(prompt, eos=eos).tokens == expected


def test_min_new_tokens(target: LlamaForCausalLM, near: LlamaForCausalLM) -> None:
    made = drafting(target, near)
    for prompt in PROMPTS:
        eos = by_transformers(target, prompt)[2:6]
        for n in (1, 4, 9, 40):
            expected = by_transformers(target, prompt, eos_token_id=eos, min_new_tokens=n)
            assert made.generate(prompt, eos=eos, min_new_tokens=n).tokens == expected


def test_max_new_tokens(target: LlamaForCausalLM, near: LlamaForCausalLM) -> None:
    made = drafting(target, near)
    for n in (1, 2, 3, 7):
        expected = by_transformers(target, PROMPTS[1], max_new_tokens=n)
        assert made.generate(PROMPTS[1], max_new_tokens=n).tokens == expected


def test_eos_of_the_models_own_settings(target: LlamaForCausalLM, near: LlamaForCausalLM) -> None:
    own = copy.deepcopy(target)
    free = by_transformers(target, PROMPTS[1])
    for eos in (free[6], [free[6], free[9]]):
        own.generation_config.eos_token_id = eos
        result = drafting(own, near).generate(PROMPTS[1])
        assert result.tokens == by_transformers(own, PROMPTS[1])
        assert result.finish_reason == "eos"


def test_everything_at_once(target: LlamaForCausalLM, near: LlamaForCausalLM) -> None:
    made = drafting(target, near)
    for prompt in PROMPTS:
        eos = by_transformers(target, prompt)[3:6]
        options = {"repetition_penalty": 1.2, "min_new_tokens": 8}
        expected = by_transformers(target, prompt, eos_token_id=eos, **options)
        assert made.generate(prompt, eos=eos, **options).tokens == expected


def test_seeded_sampling_is_the_same_with_and_without_drafting(
    target: LlamaForCausalLM, near: LlamaForCausalLM
) -> None:
    sampling = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    made = drafting(target, near, sampling=sampling)
    plain = drafting(target, near, sampling=sampling, drafters=[], scheduler={"kind": "never"})
    for seed in range(4):
        drafted = made.generate(PROMPTS[2], seed=seed)
        assert drafted.tokens == plain.generate(PROMPTS[2], seed=seed).tokens


def test_a_target_drafting_for_itself_is_always_accepted(target: LlamaForCausalLM) -> None:
    config = {
        "target": {"model": "target"},
        "drafters": [{"kind": "lm", "model": "target", "name": "self"}],
        "builder": {"kind": "layered", "depth": 4, "width": 1, "budget": 4},
        "graft": {"kind": "treegraft", "lookback": 0},
        "stop": {"max_new_tokens": 40},
    }
    made = build_pipeline(parse_config(config), {"target": HFLanguageModel(target)})
    result = made.generate(PROMPTS[1])
    assert {step.n_new for step in result.steps} == {5}
    assert result.tokens == by_transformers(target, PROMPTS[1])


def test_the_whole_context_is_used(target: LlamaForCausalLM, near: LlamaForCausalLM) -> None:
    prompt = [i % V for i in range(120)]
    result: Generation = drafting(target, near).generate(prompt)
    assert result.tokens == by_transformers(target, prompt, max_new_tokens=8)
    assert result.finish_reason == "context_limit"


# --- the caller's things --------------------------------------------------------------------------


def state(*models: PreTrainedModel) -> dict[str, Any]:
    """What a caller would not want to find changed."""
    return {
        "torch stream": torch.random.get_rng_state().tolist(),
        "numpy stream": str(np.random.get_state()),
        "python stream": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "training": [[module.training for module in model.modules()] for model in models],
        "requires grad": [[w.requires_grad for w in model.parameters()] for model in models],
        "config": [model.config.to_dict() for model in models],
        "generation": [model.generation_config.to_dict() for model in models],
        "attention": [model.config._attn_implementation for model in models],
        "weights": [sum(float(w.detach().double().sum()) for w in m.parameters()) for m in models],
    }


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_callers_state_is_left_alone(grad: bool, training: bool) -> None:
    target, near = tiny_llama(0).train(training), tiny_llama(1, layers=1)
    target.model.layers[1].eval()  # flags that differ within one model
    before = state(target, near)
    with torch.set_grad_enabled(grad):
        entered = torch.is_grad_enabled()
        made = drafting(target, near, sampling={"temperature": 1.0})
        made.generate(PROMPTS[1])
        stream = made.stream(PROMPTS[2])
        next(stream)
        stream.close()
        assert torch.is_grad_enabled() is entered
    assert state(target, near) == before


def test_the_callers_state_is_left_alone_by_a_failure() -> None:
    target, near = tiny_llama(0).train(), tiny_llama(1, layers=1)
    before = state(target, near)
    faulty = {"method": "propose", "answer": "value", "after": 2}
    made = drafting(
        target,
        near,
        drafters=[
            {"kind": "lm", "model": "near"},
            {"kind": "adversarial_drafters:Faulty", "params": faulty, "name": "bad"},
        ],
        scheduler={"kind": "fixed", "calls": ["near", "bad"]},
    )
    with pytest.raises(DrafterError):
        made.generate(PROMPTS[1])
    assert state(target, near) == before


def test_a_config_and_a_prompt_are_not_written_to() -> None:
    target, near = tiny_llama(0), tiny_llama(1, layers=1)
    made = drafting(target, near)
    config, prompt, eos = made.config.model_dump(), [5, 1, 7], [V - 1]
    made.generate(prompt, eos=eos, max_new_tokens=5)
    assert made.config.model_dump() == config
    assert (prompt, eos) == ([5, 1, 7], [V - 1])
