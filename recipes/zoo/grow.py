"""A deep model from a shallow one: blocks are followed by copies that at first change nothing.

Most of a short run's compute buys what a shallow model learns as well. The copies' output
projections start at zero, so the deep model begins exactly where the shallow one stands and puts
its extra depth to use as training goes on.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM


def depth_of(weights: dict[str, Tensor]) -> int:
    """Number of layers that a state dict of the family holds."""
    return 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))


@torch.no_grad()
def grow_(deep: LlamaForCausalLM, shallow: LlamaForCausalLM) -> None:
    """Set ``deep``'s weights from ``shallow`` (same width, at most as deep); the copies are spread
    evenly over the depth.
    """
    after, before = deep.config.num_hidden_layers, shallow.config.num_hidden_layers
    if after < before or deep.config.hidden_size != shallow.config.hidden_size:
        raise ValueError("expected equal widths and a depth not below the shallow model's")
    deep.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(shallow.model.norm.state_dict())
    last = -1
    for index, block in enumerate(deep.model.layers):
        source = index * before // after
        block.load_state_dict(shallow.model.layers[source].state_dict())
        if source == last:
            silence_(block)
        last = source


@torch.no_grad()
def silence_(block: torch.nn.Module) -> None:
    """Set a block's output projections to zero: it then adds exactly nothing to the stream."""
    for projection in (block.self_attn.o_proj, block.mlp.down_proj):
        for parameter in projection.parameters():
            parameter.zero_()
