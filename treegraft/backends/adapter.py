"""What the adapter decides about a model before its first forward, and whom it refuses.

Everything is decided by looking at the model and its config, not at version numbers: the keyword of
the cache, the form of the mask, the windows, the furthest position. A model that cannot be read on
a tree is refused here by name, with what to do instead; what cannot be seen from outside is left to
the self-test (selftest.py).
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from treegraft.core.errors import UnsupportedModelError

__all__ = ["AdapterReport", "Reach", "decide", "label_of", "refuse_config"]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

# A model without growing state, which the refusals propose.
_ELSEWHERE = (
    "use a model whose every layer is softmax attention over a KV cache "
    "(llama, qwen3, mistral, gemma3, gpt-oss, ...)"
)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back the layers of one type look.

    Attributes
    ----------
    kind : ``full_attention``, ``sliding_attention`` or ``chunked_attention``.
    layers : how many layers are of this type.
    window : positions seen back, own included (sliding), or positions per chunk (chunked).
    """

    kind: str
    layers: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What the adapter decided at load; ``treegraft check`` prints it.

    Attributes
    ----------
    model_type : transformers' name of the architecture.
    attention : attention implementation, ``sdpa`` or ``eager``.
    mask_form : ``tensor`` (one mask for all layers) or ``per layer type`` (a dict of masks).
    cache_keyword : under which name the forward takes the cache.
    reaches : layer types, with how many layers have each and their windows.
    dtype : of the weights, which the keys and values and the mask follow.
    n_layers : layers that hold keys and values (L).
    vocab_size : width of the logits (V), padding rows of the embedding included.
    max_positions : positions that the model can address exactly, or None if it does not say.
    logits_to_keep : whether the forward can leave out the logits of all but the last query.
    cache_position : whether the forward asks for ``cache_position`` (old models).
    positions_from_cache : whether a layer computes positions from the cache length, so that the
        cache has to answer with the tree's positions.
    self_test_error : largest difference of tree and path logits found at load, relative to their
        spread, or None if no self-test ran.
    notes : limits that a user should know, one sentence each.
    """

    model_type: str
    attention: str
    mask_form: str
    cache_keyword: str
    reaches: tuple[Reach, ...]
    dtype: torch.dtype
    n_layers: int
    vocab_size: int
    max_positions: int | None
    logits_to_keep: bool
    cache_position: bool
    positions_from_cache: bool
    self_test_error: float | None = None
    notes: tuple[str, ...] = ()


def refuse_config(config: Any, name: str) -> None:
    """Raise UnsupportedModelError if the config alone shows that a tree cannot be verified.

    ``config`` is a transformers config; no weights are needed, so a checkpoint can be refused
    before it is read.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    label = label_of(name, kind)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{label} is an encoder-decoder: a draft tree needs a decoder-only model; "
            "use a causal language model"
        )
    text = config.get_text_config(decoder=True)
    foreign = _state_layers(text)
    if foreign:
        raise UnsupportedModelError(
            f"{label} has layers of type {', '.join(foreign)}, whose state is more than a key and "
            f"a value per token and cannot branch with a draft tree; {_ELSEWHERE}"
        )
    if _uses_alibi(text):
        raise UnsupportedModelError(
            f"{label} uses ALiBi: its attention biases count cache rows, and siblings of a "
            "draft tree share a position but not a row; use a model with rotary or learned "
            "positions"
        )
    local = [t for t in getattr(text, "attention_layers", None) or () if t == "local"]
    if local:
        raise UnsupportedModelError(
            f"{label} has {len(local)} layers of local attention whose window counts cache "
            f"rows inside the model, where a mask cannot reach; {_ELSEWHERE}"
        )
    if getattr(text, "use_bidirectional_attention", None) in (True, "all") or not getattr(
        text, "is_causal", True
    ):
        raise UnsupportedModelError(
            f"{label} attends in both directions: a draft tree needs causal attention; "
            "use a causal language model"
        )


def decide(model: Any, name: str) -> AdapterReport:
    """Look at a loaded causal LM and say how to call it, or raise UnsupportedModelError.

    ``model`` is a transformers model with a language-model head; nothing about it is changed.
    """
    config = model.config
    kind = getattr(config, "model_type", type(model).__name__)
    label = label_of(name, kind)
    refuse_config(config, name)
    text = config.get_text_config(decoder=True)
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{label} keeps a recurrent state, which cannot branch with a draft tree; {_ELSEWHERE}"
        )
    attention = getattr(text, "_attn_implementation", None) or "eager"
    if attention not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"{label} was loaded with attention {attention!r}, which takes no mask per "
            "query and key: load it with attn_implementation='sdpa' or 'eager'"
        )
    parameters = _forward_parameters(model)
    keyword = next((k for k in ("cache", "past_key_values") if k in parameters), None)
    if keyword is None:
        raise UnsupportedModelError(
            f"{label} takes no KV cache: its forward has neither 'cache' nor "
            f"'past_key_values'; {_ELSEWHERE}"
        )
    if "position_ids" not in parameters:
        raise UnsupportedModelError(
            f"{label} takes no position_ids: positions in a draft tree are depths, which "
            "it would count by rows; use a model with rotary or learned positions"
        )
    embedding = model.get_input_embeddings()
    if embedding is None or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{label} has no language-model head: load it with AutoModelForCausalLM"
        )
    max_positions, notes = _furthest_position(model, text)
    one_per_type, reaches = _reaches(model, text)
    weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return AdapterReport(
        model_type=kind,
        attention=attention,
        mask_form="per layer type" if one_per_type else "tensor",
        cache_keyword=keyword,
        reaches=reaches,
        dtype=embedding.weight.dtype if embedding.weight.is_floating_point() else weights,
        n_layers=int(text.num_hidden_layers),
        vocab_size=_logits_width(model, text),
        max_positions=max_positions,
        logits_to_keep="logits_to_keep" in parameters,
        cache_position="cache_position" in parameters,
        positions_from_cache=bool(getattr(text, "attn_temperature_tuning", False)),
        notes=notes,
    )


def label_of(name: str, kind: str) -> str:
    """The model in a message: its name, and its architecture if the name does not say it."""
    return name if name == kind else f"{name} ({kind})"


def _forward_parameters(model: Any) -> set[str]:
    """Names in the signature of the forward, looking through wrappers that set ``__wrapped__``."""
    return set(inspect.signature(model.forward).parameters)


def _logits_width(model: Any, text: Any) -> int:
    weight = getattr(model.get_output_embeddings(), "weight", None)
    # Packed weights of a quantised head do not have the shape of the matrix they stand for.
    if weight is not None and weight.is_floating_point() and weight.dim() == 2:
        return int(weight.shape[0])
    return int(text.vocab_size)


def _state_layers(text: Any) -> list[str]:
    """Types of layers that are no softmax attention over a KV cache, as the config names them."""
    named: list[str] = []
    for key in ("layer_types", "layers_block_type", "block_types", "layers_types"):
        try:
            named += [t for t in getattr(text, key, None) or () if isinstance(t, str)]
        except (AttributeError, TypeError, ValueError):
            continue
    known = {FULL, SLIDING, CHUNKED, "attention", "full", "sliding", "dense", "sparse"}
    return sorted(set(named) - known)


def _uses_alibi(text: Any) -> bool:
    nested = getattr(text, "attn_config", None)
    flags = (getattr(text, "alibi", False), getattr(nested, "alibi", False))
    # bloom has no flag: it knows no other positions.
    return any(flags) or getattr(text, "model_type", "") == "bloom"


def _reaches(model: Any, text: Any) -> tuple[bool, tuple[Reach, ...]]:
    """Whether the masks go in as a dict, and how far each type of layer looks back.

    The rule is transformers' own (masking_utils.create_masks_for_generate): layer types in the
    config mean one mask per type, otherwise a window in the config holds for every layer. Layers
    that all reach equally far share one mask, which every model takes.
    """
    n_layers = int(text.num_hidden_layers)
    window = getattr(text, "sliding_window", None)
    chunk = getattr(text, "attention_chunk_size", None)
    types = getattr(text, "layer_types", None)
    if types is not None:
        windows = {FULL: None, SLIDING: window, CHUNKED: chunk}
        counts = Counter(types)
        reaches = tuple(
            Reach(kind, counts[kind], windows[kind]) for kind in windows if kind in counts
        )
        return len(reaches) > 1, reaches
    if window is not None and _makes(model, "create_sliding_window_causal_mask"):
        return False, (Reach(SLIDING, n_layers, int(window)),)
    if chunk is not None and _makes(model, "create_chunked_causal_mask"):
        return False, (Reach(CHUNKED, n_layers, int(chunk)),)
    return False, (Reach(FULL, n_layers),)


def _decoder_modules(model: Any) -> list[Any]:
    """Python modules that define the classes of the model and its decoder, subclasses first."""
    decoders = (model, model.get_decoder() if hasattr(model, "get_decoder") else model)
    names = [c.__module__ for d in decoders for c in type(d).__mro__]
    return [sys.modules[n] for n in dict.fromkeys(names) if ".models." in n and n in sys.modules]


def _makes(model: Any, function: str) -> bool:
    """Whether the modelling code has this mask function at hand: it cannot apply a window else."""
    return any(hasattr(module, function) for module in _decoder_modules(model))


def _furthest_position(model: Any, text: Any) -> tuple[int | None, tuple[str, ...]]:
    """Positions that are exact, and a note if that is fewer than the config promises.

    Frequencies of ``dynamic`` and ``longrope`` rotary embeddings switch for the whole forward once
    its largest position passes the length of the original training, while cached keys keep the old
    ones: the logits of a node would depend on how deep its siblings are. Below that length they
    are constant. (transformers modeling_rope_utils.dynamic_rope_update)
    """
    limit = getattr(text, "max_position_embeddings", None)
    limit = int(limit) if limit else None
    notes: list[str] = []
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        if types is None:
            continue
        for layer_type, kind in types.items() if isinstance(types, dict) else [(None, types)]:
            if not isinstance(kind, str) or ("dynamic" not in kind and kind != "longrope"):
                continue
            original = _original_length(module, layer_type)
            if limit is None or original < limit:
                limit = original
            notes.append(
                f"rotary embedding {kind!r} is exact up to its original length of {original} "
                "positions; longer texts are refused"
            )
    return limit, tuple(dict.fromkeys(notes))


def _original_length(module: Any, layer_type: str | None) -> int:
    config = module.config
    parameters = getattr(config, "rope_parameters", None) or {}
    if layer_type is not None:
        parameters = parameters.get(layer_type) or {}
    found = [
        parameters.get("original_max_position_embeddings"),
        getattr(config, "original_max_position_embeddings", None),
        getattr(module, "original_max_seq_len", None),
    ]
    # ``original_max_seq_len`` is the extended length for longrope, so the smallest one counts.
    return min(int(length) for length in found if length)
