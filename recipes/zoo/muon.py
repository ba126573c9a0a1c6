"""Muon over stacks of equally shaped matrices.

The same rule as ``torch.optim.Muon``, but the orthogonalisation runs on all matrices of one shape
at once: for a narrow model its many small products, one matrix at a time, cost as much as the
training step itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Coefficients of the quintic iteration (Jordan et al., 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalised(stack: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of ``stack`` (M, rows, columns) with rows <= columns,
    approximately.
    """
    a, b, c = COEFFICIENTS
    x = stack / (stack.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Momentum (Nesterov) whose update is orthogonalised; for 2-D hidden matrices only."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                buffer = state["momentum"].lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(buffer, group["momentum"])
                wide = update if update.shape[0] <= update.shape[1] else update.mT
                shapes.setdefault((wide.shape[0], wide.shape[1]), []).append((param, wide))
            for pairs in shapes.values():
                for (param, _), update in zip(
                    pairs, orthogonalised(torch.stack([u for _, u in pairs])), strict=True
                ):
                    rows, columns = param.shape
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    turned = update if rows <= columns else update.mT
                    param.add_(turned, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
