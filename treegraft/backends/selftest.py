"""The self-test at load: a small tree through the adapter against its paths through the bare model.

The reference is the model's own forward on whole texts, without a cache, a mask or positions from
us, so it tests mask, positions, windows, cache rows and move together. It cannot see a window
longer than its short text: what the model does there is decided by its config (adapter.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from treegraft.backends.adapter import CHUNKED, SLIDING, AdapterReport
from treegraft.core.language_model import LanguageModel

__all__ = ["N_POSITIONS", "allowed_error", "relative_error", "tree_error"]

# Breadth first, so that most nodes stand right after a row they must not see: a model that ignores
# the mask or counts positions by rows errs on five of the seven nodes.
_PARENT = (0, 0, 0, 1, 2, 1, 3)
_DEPTH = (0, 1, 1, 2, 2, 2, 3)
_KEPT = (0, 2, 4)  # the path that is committed, with two more nodes after it
N_POSITIONS = 1 + max(_DEPTH) + 1
"""Positions that the test needs: one token of text, and the tree under it."""

_LONG_WINDOW = 32  # positions; longer windows are not filled by the test's text


def tree_error(
    model: LanguageModel, plain: Callable[[Tensor], Tensor], report: AdapterReport
) -> float:
    """Difference of tree logits and path logits, relative to the spread of the logits.

    Parameters
    ----------
    model : the adapter under test.
    plain : the bare model: tokens int64 [B, T] to logits [B, T, V], causal and without a cache.
    report : what the adapter decided; windows and dtype are read.

    Returns
    -------
    The largest difference over nodes of largest |difference| / standard deviation, for float32 and
    float64. For narrower types the median over nodes of the root-mean-square difference / standard
    deviation: in a mixture of experts one rounding may flip an expert at one node.
    """
    n_prefix = _prefix_length(report)
    # Own generator: the caller's random state is not touched.
    dice = torch.Generator().manual_seed(20240)
    n_tokens = n_prefix + len(_PARENT) + 2
    tokens = torch.randint(0, model.vocab_size, (n_tokens,), generator=dice)
    if model.vocab_size >= n_tokens:  # siblings differ
        tokens = torch.randperm(model.vocab_size, generator=dice)[:n_tokens]
    prefix, nodes, after = tokens[:n_prefix], tokens[n_prefix:-2], tokens[-2:]

    cache = model.new_cache(n_prefix + len(_PARENT) + 2)
    places = torch.arange(n_prefix)
    causal = places[None, :] <= places[:, None]
    model.forward(cache, prefix, places, places, causal, last_only=True)

    ancestors = torch.eye(len(_PARENT), dtype=torch.bool)
    for node in range(1, len(_PARENT)):
        ancestors[node] |= ancestors[_PARENT[node]]
    visible = torch.cat([torch.ones(len(_PARENT), n_prefix, dtype=torch.bool), ancestors], 1)
    rows = n_prefix + torch.arange(len(_PARENT))
    depth = torch.tensor(_DEPTH)
    on_tree = model.forward(cache, nodes, rows, n_prefix + depth, visible)

    # Commit a path that is no prefix of the rows, then two siblings, written in reverse order.
    kept = torch.tensor(_KEPT)
    n_kept = n_prefix + len(kept)
    model.move_(cache, n_prefix + kept, n_prefix + torch.arange(len(kept)))
    rows = torch.tensor([n_kept + 1, n_kept])
    visible = torch.cat(
        [torch.ones(2, n_kept, dtype=torch.bool), torch.eye(2, dtype=torch.bool).flip(0)], 1
    )
    after_commit = model.forward(cache, after, rows, torch.full((2,), n_kept), visible)

    paths = [_path(node) for node in range(len(_PARENT))]
    leaves = [5, 6]
    texts = [torch.cat([prefix, nodes[list(paths[leaf])]]) for leaf in leaves]
    texts += [torch.cat([prefix, nodes[kept], token[None]]) for token in after]
    width = max(len(text) for text in texts)
    # Padded on the right with any token: causal logits before it do not change.
    batch = torch.stack([torch.cat([t, t[:1].expand(width - len(t))]) for t in texts])
    reference = plain(batch).to(on_tree.device, on_tree.dtype)

    # Which text each node's path is in: the committed one, else that of the first leaf it leads to.
    home = [
        2 if set(path) <= set(_KEPT) else int(paths[leaves[0]][: len(path)] != path)
        for path in paths
    ]
    expected = torch.stack(
        [reference[home[node], n_prefix + _DEPTH[node]] for node in range(len(_PARENT))]
        + [reference[2, n_kept], reference[3, n_kept]]
    )
    found = torch.cat([on_tree, after_commit])
    return relative_error(found, expected, report.dtype)


def allowed_error(report: AdapterReport, device: torch.device) -> float:
    """Largest error of a sound model, in the units of ``tree_error``."""
    if report.dtype == torch.float64:
        # Routers and eager softmax compute in float32 whatever the weights are.
        return 1e-5
    if report.dtype == torch.float32:
        return 1e-4 if _float32_is_exact(device) else 3e-2
    return 4e-2 if report.dtype == torch.float16 else 8e-2


def _float32_is_exact(device: torch.device) -> bool:
    """Whether a float32 product keeps float32's digits: TF32 and its like keep ten bits.

    Tried and not asked: torch has several settings for it, old and new, that exclude each other.
    """
    dice = torch.Generator().manual_seed(20241)
    left = torch.randn(256, 256, generator=dice)
    exact = left.double() @ left.double()
    found = (left.to(device) @ left.to(device)).double().cpu()
    return bool((found - exact).abs().max() < 1e-3)


def relative_error(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Error of [m, V] logits per node, reduced as ``tree_error`` says; NaN counts as infinite."""
    found, expected = found.double(), expected.double()
    # The second term keeps constant logits from dividing rounding errors by nothing.
    spread = expected.std(dim=-1) + 1e-3 * expected.abs().amax(dim=-1) + 1e-30
    difference = found - expected
    if dtype in (torch.float32, torch.float64):
        error = (difference.abs().amax(dim=-1) / spread).max()
    else:
        error = (difference.square().mean(dim=-1).sqrt() / spread).median()
    return float(error.nan_to_num(nan=float("inf")))


def _path(node: int) -> Sequence[int]:
    path = [node]
    while path[0] != 0:
        path.insert(0, _PARENT[path[0]])
    return path


def _prefix_length(report: AdapterReport) -> int:
    """Short, but past every short window, and with the tree across a chunk's border."""
    length = 5
    for reach in report.reaches:
        if reach.window is not None and reach.window <= _LONG_WINDOW:
            if reach.kind == SLIDING:
                length = max(length, reach.window + 3)
            elif reach.kind == CHUNKED:
                length = max(length, 2 * reach.window - 2)
    if report.max_positions is not None:
        length = min(length, report.max_positions - max(_DEPTH) - 1)
    return max(length, 1)
