"""A cost-scaled target: a trained model with more blocks, which cost their time and change nothing.

Tree drafting pays where the target is dear beside its drafters, and a trained model of that size is
not always at hand. Each extra block is a copy of the one before it whose output projections are
zero: it reads its weights, fills its rows of the KV cache and adds exactly 0 to the residual
stream. So the deepened model gives the base's logits bit for bit, at the price of its depth. What
it says about speed is about a target of that price that agrees with its drafters as the base does;
it says nothing about quality.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from grow import grow_
from transformers import AutoModelForCausalLM

from treegraft.backends.hf import load_tokenizer
from treegraft.backends.sources import resolve


def deepened(model: Any, layers: int) -> Any:
    """``model`` with ``layers`` blocks, the extra ones spread evenly; ``model`` is left as it was.

    ValueError for fewer blocks than it has, and for a model whose blocks are no pre-norm blocks
    with ``self_attn.o_proj`` and ``mlp.down_proj`` (Llama, Mistral, Qwen2, Qwen3 have those).
    """
    config, before = model.config, model.config.num_hidden_layers
    if layers < before:
        raise ValueError(f"layers must be at least the model's {before}, found {layers}")
    if config.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ValueError(
            f"model_type must be llama, mistral, qwen2 or qwen3, found {config.model_type!r}: of "
            "other blocks it is not known that zero projections add nothing"
        )
    deeper = copy.deepcopy(config)
    deeper.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        deeper.layer_types = [config.layer_types[i * before // layers] for i in range(layers)]
    with torch.random.fork_rng():
        deep = type(model)(deeper).to(model.dtype).eval()
    grow_(deep, model)
    if not config.tie_word_embeddings:
        deep.lm_head.load_state_dict(model.lm_head.state_dict())
    deep.generation_config = copy.deepcopy(model.generation_config)
    return deep


def card(source: str, model: Any, deep: Any) -> dict[str, Any]:
    """What the folder is, in numbers."""
    return {
        "label": "cost-scaled",
        "base": source,
        "layers": deep.config.num_hidden_layers,
        "layers_of_base": model.config.num_hidden_layers,
        "parameters": deep.num_parameters(),
        "parameters_of_base": model.num_parameters(),
    }


def text_of(entry: dict[str, Any]) -> str:
    """CARD.md from the card."""
    return (
        f"# cost-scaled {entry['base']}\n\n"
        f"**Cost-scaled, not better.** This is {entry['base']} with {entry['layers']} blocks in "
        f"place of {entry['layers_of_base']}; the extra ones add exactly nothing, so its logits "
        f"are those of the base, bit for bit. It has {entry['parameters']:,} parameters (base: "
        f"{entry['parameters_of_base']:,}) and takes the time of a model of that size. Made by "
        "recipes/zoo/deepen.py to measure how drafting pays when the target is dearer.\n"
    )


def main(
    layers: Annotated[int, typer.Option(help="Blocks of the deepened model.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist or be empty.")],
    model: Annotated[
        str, typer.Option(help="zoo:NAME, a local folder, or a hub id.")
    ] = "zoo:target",
) -> None:
    """Write a deepened model with tokenizer and card to OUT."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise typer.BadParameter(
            f"must not exist or be empty, found {str(out)!r}", param_hint="--out"
        )
    base = AutoModelForCausalLM.from_pretrained(resolve(model), dtype="auto").eval()
    try:
        deep = deepened(base, layers)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    deep.save_pretrained(out)
    tokenizer, _ = load_tokenizer(model)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    entry = card(model, base, deep)
    (out / "card.json").write_text(json.dumps(entry, indent=2) + "\n")
    (out / "CARD.md").write_text(text_of(entry))
    print(f"{out}: {entry['layers']} blocks, {entry['parameters'] / 1e6:.1f} M parameters")


if __name__ == "__main__":
    typer.run(main)
