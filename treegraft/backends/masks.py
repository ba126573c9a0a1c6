"""Masks: which cache rows each query of a tree sees, as the models of transformers take it.

Shapes (docs/shapes.md): n queries of this forward, K kv span.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from treegraft.backends.adapter import CHUNKED, AdapterReport

__all__ = ["TreeMasks"]


@final
class TreeMasks:
    """Additive masks of one model: one, or one per layer type where windows differ.

    Parameters
    ----------
    report : what was decided about the model. device : where it is.

    Attributes
    ----------
    windowed : whether a layer reaches back by position, so that rows' positions are needed.
    """

    def __init__(self, report: AdapterReport, device: torch.device) -> None:
        self._reaches = report.reaches
        self._one_per_type = report.mask_form != "tensor"
        self.windowed = any(reach.window is not None for reach in report.reaches)
        # The lowest finite number and not -inf: minus infinity less itself is NaN.
        self._lowest = torch.finfo(report.dtype).min
        self._dtype, self._device = report.dtype, device
        self._values = self._new_values()
        # numpy's type of the mask, where numpy can build it.
        kinds = {torch.float32: np.float32, torch.float64: np.float64}
        self._host_dtype = kinds.get(report.dtype) if device.type == "cpu" else None

    def __call__(
        self, row_positions: Tensor | None, positions: Tensor, visible: Tensor, span: int
    ) -> Any:
        """Additive masks [1, 1, n, span], one tensor or one per layer type.

        Additive also for sdpa, which else would turn a bool mask into this one in every layer.

        Parameters
        ----------
        row_positions : int64, at least [K], of the rows; may be None without windows.
        positions : int64 [n], of the queries. visible : bool [n, K]. span : K or more, the rows
        that the cache hands out.
        """
        if not self.windowed:
            return self._additive(visible, span)
        n_seen = visible.shape[1]
        masks: dict[str, Tensor] = {}
        full: Tensor | None = None
        for reach in self._reaches:
            window = reach.window
            # Traced code has to hold for spans on both sides of the window.
            short = window is not None and not torch.compiler.is_exporting() and n_seen <= window
            if window is None or short:
                full = self._additive(visible, span) if full is None else full
                masks[reach.kind] = full
                continue
            assert row_positions is not None
            theirs, own = row_positions[:n_seen], positions[:, None]
            if reach.kind == CHUNKED:
                near = theirs // window == own // window
            else:
                near = theirs > own - window
            masks[reach.kind] = self._additive(visible & near, span)
        return masks if self._one_per_type else masks[self._reaches[0].kind]

    def _additive(self, seen: Tensor, span: int) -> Tensor:
        """Bool [n, K] to 0 where True, lowest where False and in the columns K..span."""
        n, n_seen = seen.shape
        if self._host_dtype is not None and not torch.compiler.is_exporting():
            # Right after a forward every call of torch is a cold one; numpy's are shorter.
            lowest = np.full((1, 1, n, span), self._lowest, self._host_dtype)
            np.copyto(lowest[0, 0, :, :n_seen], 0, where=seen.numpy())
            return torch.from_numpy(lowest)
        # Traced code would hold tensors from outside for weights.
        exporting = torch.compiler.is_exporting()
        added = torch.where(seen, *(self._new_values() if exporting else self._values))
        if n_seen != span:
            added = torch.nn.functional.pad(added, (0, span - n_seen), value=self._lowest)
        return added.expand(1, 1, -1, -1)

    def _new_values(self) -> tuple[Tensor, Tensor]:
        """What a row adds that is seen, and one that is not."""
        shown = torch.zeros((), dtype=self._dtype, device=self._device)
        return shown, torch.full_like(shown, self._lowest)
