"""Buckets: forwards padded to fixed shapes, and on a GPU one CUDA graph for each.

Shapes (docs/shapes.md): n queries of a forward, N queries of its bucket, K kv span, S cache rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from treegraft.backends.kv import KVSlab

__all__ = ["BUCKETS", "ROWS_STEP", "CudaGraphs", "bucket_of", "pad"]

BUCKETS = (1, 8, 16, 32, 64, 128, 256)
"""Numbers of queries (N) that a padded forward has."""
FIRST_SPAN = 256
"""Rows; the spans of padded forwards are this and its doubles, and S."""
ROWS_STEP = 64
"""S of a padded slab is a multiple."""


def bucket_of(n: int, span: int, n_rows: int) -> tuple[int, int] | None:
    """N and K of the padded forward that takes ``n`` queries and ``span`` of S rows; None if none.

    K is S where the next power of two is longer.
    """
    n_queries = next((size for size in BUCKETS if size >= n), None)
    if n_queries is None or span > n_rows:
        return None
    reach = FIRST_SPAN
    while reach < span:
        reach *= 2
    return n_queries, min(reach, n_rows)


def pad(
    cache: KVSlab,
    tokens: Tensor,
    rows: Tensor,
    positions: Tensor,
    visible: Tensor,
    bucket: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of ``forward`` for N queries and K rows; the first n logits are the same.

    A padding query reads id 0 at position 0, writes to a spare row of the cache, which nobody
    reads, and sees row 0 alone: a row of nothing but masked columns may be NaN.
    """
    n, span = visible.shape
    n_queries, reach = bucket
    seen = visible.new_zeros(n_queries, reach)
    seen[:n, :span] = visible
    if n == n_queries:
        return tokens, rows, positions, seen
    seen[n:, 0] = True
    nothing = tokens.new_zeros(n_queries - n)
    spare = torch.arange(cache.first_spare, cache.first_spare + len(nothing), device=rows.device)
    return (
        torch.cat([tokens, nothing]),
        torch.cat([rows, spare]),
        torch.cat([positions, nothing.to(positions.device)]),
        seen,
    )


class CudaGraphs:
    """One CUDA graph per slab and bucket, all in one memory pool.

    A graph reads and writes fixed addresses: its arguments are copied into the tensors that it was
    captured with, and its logits are copied out before the next replay can write over them. It
    lives as long as the slab whose rows it writes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def run(
        self,
        call: Callable[[dict[str, Any]], Tensor],
        arguments: dict[str, Any],
        bucket: tuple[int, int],
        slab: KVSlab,
    ) -> Tensor:
        """Logits [1, N, V] of ``call(arguments)``, replayed from the second time on."""
        held = slab.graphs.get(bucket)
        if held is None:
            held = slab.graphs[bucket] = self._captured(call, arguments, slab)
        graph, static, rows, logits = held
        for name, value in arguments.items():
            _copy(static[name], value)
        if slab.destination is not rows:
            rows.copy_(slab.destination)
            slab.destination = rows
        graph.replay()
        return cast(Tensor, logits.clone())

    def _captured(
        self, call: Callable[[dict[str, Any]], Tensor], arguments: dict[str, Any], slab: KVSlab
    ) -> tuple[Any, dict[str, Any], Tensor, Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        static = {name: _clone(value) for name, value in arguments.items()}
        rows = slab.destination = slab.destination.clone()
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        # Writing the same keys to the same rows again changes nothing.
        with torch.cuda.stream(side):
            for _ in range(2):
                call(static)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = call(static)
        return graph, static, rows, logits


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):  # one mask per layer type
        return {key: _clone(inner) for key, inner in value.items()}
    return value


def _copy(into: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        into.copy_(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _copy(into[key], inner)
