"""A deep model from a shallow one: every block is followed by copies that at first change nothing.

Most of a short run's compute buys what a shallow model learns as well. The copies' output
projections start at zero, so the deep model begins exactly where the shallow one stands and puts
its extra depth to use as training goes on.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM


@torch.no_grad()
def grow_(deep: LlamaForCausalLM, shallow: LlamaForCausalLM) -> None:
    """Set ``deep``'s weights from ``shallow`` (same width; the depth must be a multiple)."""
    times, rest = divmod(deep.config.num_hidden_layers, shallow.config.num_hidden_layers)
    if rest or deep.config.hidden_size != shallow.config.hidden_size:
        raise ValueError(
            "expected equal widths and a depth that is a multiple of the shallow model's"
        )
    deep.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(shallow.model.norm.state_dict())
    for index, block in enumerate(deep.model.layers):
        block.load_state_dict(shallow.model.layers[index // times].state_dict())
        if index % times:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
