"""Random draft trees for the adapter's tests, and their paths read one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treegraft.core.language_model import LanguageModel


def random_parents(n: int, dice: torch.Generator) -> list[int]:
    """Parents of ``n`` nodes, each before its children; node 0 is its own parent."""
    return [0] + [int(torch.randint(0, i, (1,), generator=dice)) for i in range(1, n)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to ``node``."""
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


def layout(parents: list[int], n_kv: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows int64 [n], positions int64 [n] and visible bool [n, n_kv + n] of a tree after a text."""
    n = len(parents)
    own = torch.zeros(n, n, dtype=torch.bool)
    for node in range(n):
        own[node, path_to(parents, node)] = True
    visible = torch.cat([torch.ones(n, n_kv, dtype=torch.bool), own], dim=1)
    return n_kv + torch.arange(n), n_kv + own.sum(1) - 1, visible


def prefill(model: LanguageModel, cache: Any, text: Tensor, start: int = 0) -> Tensor:
    """Read ``text`` int64 [T] causally after ``start`` rows; its logits [T, V]."""
    places = start + torch.arange(len(text))
    visible = torch.arange(start + len(text)) <= places[:, None]
    return model.forward(cache, text, places, places, visible)


def plain_logits(hf_model: Any, text: Tensor) -> Tensor:
    """Logits [T, V] of the bare model on a whole text, with no help from the adapter."""
    with torch.no_grad():
        return hf_model(input_ids=text[None], use_cache=False).logits[0]


def tree_and_path_logits(
    model: Any, n_prefix: int, parents: list[int], dice: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Logits [n, V] of a random tree after a random text, and of each node's path alone."""
    n = len(parents)
    prefix = torch.randint(0, model.vocab_size, (n_prefix,), generator=dice)
    tokens = torch.randint(0, model.vocab_size, (n,), generator=dice)
    cache = model.new_cache(n_prefix + n)
    prefill(model, cache, prefix)
    on_tree = model.forward(cache, tokens, *layout(parents, n_prefix))
    leaves = [node for node in range(n) if node not in parents[node + 1 :]]
    on_paths = torch.empty_like(on_tree)
    for leaf in leaves:
        path = path_to(parents, leaf)
        logits = plain_logits(model.model, torch.cat([prefix, tokens[path]]))
        on_paths[path] = logits[n_prefix:].to(on_paths.dtype)
    return on_tree, on_paths


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())
