"""Tiny random models of every family in the matrix, made from configs: no downloads.

Weights are drawn wide (initializer_range 0.6, embeddings untied where the family can) so that
logits differ by position and by path; windows and chunks are shorter than the tests' texts. All
families share the vocabulary, so any of them drafts for any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 97
POSITIONS = 512
WINDOW = 6
CHUNK = 8

_SLIDING_FULL = ["sliding_attention", "full_attention", "sliding_attention"]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}

# Seeds whose models write, from the prompts of ``prompt_of``, texts that wander, and in which the
# first choice leads by more than rounding: what is equal in float32 here is so on any machine.
SEEDS = {
    "llama": 1,
    "qwen2": 11,
    "qwen3": 0,
    "mistral": 0,
    "mixtral": 2,
    "qwen3-moe": 9,
    "gemma2": 0,
    "gemma3": 2,
    "phi3": 4,
    "olmo2": 10,
    "gpt2": 3,
    "gpt-neox": 7,
    "opt": 3,
    "falcon": 4,
    "gpt-oss": 0,
    "smollm3": 0,
    "granite": 0,
    "cohere2": 1,
    "llama4": 2,
    "deepseek-v3": 1,
}

# Family -> (transformers model type, what differs from _COMMON).
_RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 4, **_EXPERTS}),
    "gemma2": (
        "gemma2",
        {
            "layer_types": _SLIDING_FULL,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 20.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"layer_types": _SLIDING_FULL, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {}),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.6}),
    "falcon": ("falcon", {"alibi": False, "new_decoder_architecture": False, "multi_query": True}),
    "gpt-oss": (
        "gpt_oss",
        {
            "layer_types": _SLIDING_FULL,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": POSITIONS // 4,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "smollm3": (
        "smollm3",
        {
            "layer_types": _SLIDING_FULL,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "no_rope_layers": [1, 1, 0],
        },
    ),
    "granite": ("granite", {"logits_scaling": 1.0}),
    "cohere2": (
        "cohere2",
        {"layer_types": _SLIDING_FULL, "sliding_window": WINDOW, "logit_scale": 1.0},
    ),
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "moe_layers": None,
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": CHUNK,
            # Queries of the layers without rotary embedding grow with their position: a step per
            # four positions, where real models take one per 8192.
            "attn_temperature_tuning": True,
            "floor_scale": 4,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "head_dim": 4,
        },
    ),
}


def config(name: str, **changes: Any) -> Any:
    """The tiny config of a family, with ``changes``."""
    kind, differences = _RECIPES[name]
    options = {**_COMMON, **differences, **changes}
    accepted = _accepted(kind)
    return AutoConfig.for_model(kind, **{k: v for k, v in options.items() if k in accepted})


def build(
    name: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """A random model of a family: same name, seed and dtype, same weights.

    ``attention`` is ``sdpa`` or ``eager``, or None for what transformers picks.
    """
    return from_config(config(name, **changes), seed, dtype, attention)


def from_config(
    chosen: Any,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
) -> PreTrainedModel:
    """A random causal LM of this config, drawn in float32 so that dtypes differ by rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(chosen, attn_implementation=attention)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                # Families start their router biases, sinks and such at zero or one: move them off.
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif "sinks" in parameter_name:
                    parameter.normal_()
    return _cast(model, dtype)


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped product has no float64 kernel
    return model.to(dtype).eval()


def _accepted(kind: str) -> set[str]:
    """Options of a config class, by its own and transformers' common names."""
    made = AutoConfig.for_model(kind)
    names = set(inspect.signature(type(made).__init__).parameters) | set(vars(made))
    names |= set(getattr(made, "attribute_map", {}))
    return names | {"tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}


def near_copy(
    name: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    noise: float = 0.03,
    **changes: Any,
) -> PreTrainedModel:
    """``build`` of the same arguments with a little noise on its weights.

    A drafter that is right now and then: at ``noise`` 0.03 of a weight's spread about half of its
    first guesses are the target's tokens.
    """
    model = build(name, seed, **changes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(11)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise * parameter.std())
    return _cast(model, dtype)


def shorten_(model: PreTrainedModel, n_positions: int) -> PreTrainedModel:
    """Let a model address ``n_positions`` only; a learned table is cut, the rest stays as it was."""
    decoder = model.get_decoder()
    # opt's table begins with two rows that no position uses.
    for name, n_rows in (("wpe", n_positions), ("embed_positions", n_positions + 2)):
        table = getattr(decoder, name, None)
        if table is not None:
            table.weight = torch.nn.Parameter(table.weight.detach()[:n_rows].clone())
    model.config.max_position_embeddings = n_positions
    return model


def prompt_of(length: int) -> list[int]:
    """A random prompt without the ids that configs call special; one for each length."""
    dice = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCAB, (length,), generator=dice).tolist()


def varied(tokens: Sequence[int], n_different: int = 5) -> bool:
    """Whether the second half of a text is no short loop."""
    return len(set(tokens[len(tokens) // 2 :])) >= n_different


def _builder(name: str) -> Callable[[], PreTrainedModel]:
    return lambda: build(name)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {name: _builder(name) for name in _RECIPES}
