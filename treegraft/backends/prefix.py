"""The first layers of a model as a model of their own, on the same weights.

Self-speculative decoding drafts with a prefix of the target's layers and the target's own output
layer (LayerSkip, arXiv 2404.16710). Nothing is copied but the containers on the way to the layers.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from treegraft.core.errors import ConfigError, UnsupportedModelError

__all__ = ["first_layers"]


def first_layers(model: nn.Module, n_layers: int, name: str) -> nn.Module:
    """A causal LM of transformers with the first ``n_layers`` of ``model``, which is left as it is.

    ConfigError unless 1 <= ``n_layers`` < layers of the model; UnsupportedModelError where the
    layers cannot be told from other modules. ``name`` is what messages call it.
    """
    config: Any = copy.deepcopy(model.config)
    settings = config.get_text_config()
    n_all = int(settings.num_hidden_layers)
    if not 1 <= n_layers < n_all:
        raise ConfigError(
            f"model {name!r}: it has {n_all} layers, and NAME[:N] takes the first N of 1 to "
            f"{n_all - 1}"
        )
    stacks = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == n_all
    ]
    if len(stacks) != 1:
        raise UnsupportedModelError(
            f"model {name!r}: {len(stacks)} of its modules may be its {n_all} layers, so that the "
            "first of them cannot be taken"
        )
    settings.num_hidden_layers = n_layers
    if getattr(settings, "layer_types", None) is not None:
        settings.layer_types = settings.layer_types[:n_layers]
    *containers, last = stacks[0].split(".")
    root = container = _shallow(model, config, settings)
    for part in containers:
        inner = _shallow(container.get_submodule(part), config, settings)
        container._modules[part] = inner
        container = inner
    layers = container.get_submodule(last)
    assert isinstance(layers, nn.ModuleList)
    container._modules[last] = nn.ModuleList(list(layers)[:n_layers])
    return root


def _shallow(module: nn.Module, config: Any, settings: Any) -> nn.Module:
    """The module with a table of modules of its own, and the new configuration."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    own = getattr(module, "config", None)
    if own is not None:
        is_whole = type(own) is type(config)
        made.config = config if is_whole else settings
    return made
