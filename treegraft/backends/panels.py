"""Panels: weights of linear layers laid out for products with few queries.

Such a product reads every weight once and takes as long as that does. The kernels of a BLAS go
through a matrix in blocks, for which a processor fetches little ahead, and pack it first, which
pays for many queries only. A panel is 16 outputs, a vector register, with all their inputs one
after the other: code that is made for it reads memory from front to back
(docs/decisions/0009-panels.md).

Shapes: n queries, I inputs and O outputs of a layer, P panels of 16 outputs.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

__all__ = ["Panels"]

_WIDTH = 16
_HUGE = 2 << 20
"""Bytes of a huge page: in small ones a processor looks up an address for every 4 KB it reads."""


@final
class Panels(nn.Module):
    """Second copies of the float32 weights of a model's linear layers, in panels [P, I, 16].

    The last panel is filled up with zeros. All of them lie in one piece of memory.

    Parameters
    ----------
    model : on the CPU; it is left as it is.

    Attributes
    ----------
    fits : whether every layer is still there with the sizes that it had.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._of = (model,)  # in a tuple, so that it is not a part of this module
        self._names = [name for name, module in model.named_modules() if _counts(module)]
        self._layers = tuple(_linear(model, name) for name in self._names)
        sizes = [_sizes(layer) for layer in self._layers]
        # Tensors that were made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            memory = _memory(sum(p * i * w for p, i, w in sizes))
            first = 0
            for number, (p, i, w) in enumerate(sizes):
                held = memory[first : first + p * i * w].view(p, i, w)
                self.register_buffer(f"panels_{number}", held)
                first += held.numel()
        self.fits = True
        self.follow()

    @property
    def n_bytes(self) -> int:
        """Of all panels."""
        return sum(panels.numel() * panels.element_size() for panels in self.buffers())

    def find(self) -> None:
        """Look for the layers again, after modules of the model were replaced."""
        model = self._of[0]
        try:
            self._layers = tuple(_linear(model, name) for name in self._names)
            sizes = [_sizes(layer) for layer in self._layers]
            self.fits = sizes == [tuple(panels.shape) for panels in self.buffers()]
        except (AttributeError, TypeError):
            self.fits = False

    def follow(self) -> None:
        """Copy the weights again, all of them.

        Not all changes are counted by torch (through ``.data``, numpy, in inference mode), and to
        compare every weight takes longer than to copy it.
        """
        if not self.fits:
            return
        with torch.inference_mode(False), torch.no_grad():
            for layer, panels in zip(self._layers, self.buffers(), strict=True):
                weight = layer.weight
                n_out, n_in = weight.shape
                whole = n_out // _WIDTH
                panels[:whole].copy_(
                    weight[: whole * _WIDTH].view(whole, _WIDTH, n_in).transpose(1, 2)
                )
                if whole < panels.shape[0]:
                    panels[whole].zero_()
                    panels[whole, :, : n_out % _WIDTH].copy_(weight[whole * _WIDTH :].t())

    def products(self, n: int, most: int) -> TorchFunctionMode:
        """A context in which the layers multiply by panels, where they are given n queries.

        To be compiled: as it stands this is slow.

        Parameters
        ----------
        n : queries of the forward, maybe symbolic. most : what n is at most.
        """
        pairs = zip(self._layers, self.buffers(), strict=True)
        return _Products({id(layer.weight): held for layer, held in pairs}, n, most)


class _Products(TorchFunctionMode):
    def __init__(self, held: dict[int, Tensor], n: int, most: int) -> None:
        super().__init__()
        self._held = held
        self._n = n
        self._most = most

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            given, weight, bias = _of_linear(*args, **kwargs)
            panels = self._held.get(id(weight))
            # Some layers read something else, such as all rows of a cache.
            if panels is not None and self._is_queries(given):
                return _product(given, panels, weight.shape[0], bias, self._most)
        found = func(*args, **kwargs)
        # A row of a table that lies [in, out] would be read anew wherever its sum is needed.
        return _written(found) if func is nn.functional.embedding else found

    def _is_queries(self, given: Tensor) -> bool:
        """Whether a tensor is known to be [n, I] or [1, n, I]."""
        alone = given.dim() == 2 or (
            given.dim() == 3 and statically_known_true(given.shape[0] == 1)
        )
        return alone and statically_known_true(given.shape[-2] == self._n)


def _of_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments of torch's ``linear``, by its names for them."""
    return input, weight, bias


def _product(given: Tensor, panels: Tensor, n_out: int, bias: Tensor | None, most: int) -> Tensor:
    """float32 [..., O] for queries [..., I], n in all and at most ``most``.

    Every query has a sum of its own, so that all of them are formed in one loop over a panel.
    There are always ``most``: those past n repeat the last query and are cut off.
    """
    n_in = panels.shape[1]
    flat = _written(given.reshape(-1, n_in))
    n = flat.shape[0]
    rows = []
    for query in range(most):
        place = torch.sym_min(query, n - 1) if query else 0  # type: ignore[no-untyped-call]
        row = torch.as_strided(flat, (n_in,), (1,), n_in * place)
        rows.append((row[None, :, None] * panels).sum(1).view(1, -1))
    out = torch.cat(rows)[:n, :n_out] if most > 1 else rows[0][:, :n_out]
    if bias is not None:
        out = out + bias
    return out.view(*given.shape[:-1], n_out)


def _written(given: Tensor) -> Tensor:
    """``given``, which Inductor writes to memory as there is a view of it by strides.

    It would else compute it anew in each of the loops that read it.
    """
    given = given.contiguous()
    return torch.as_strided(given, given.shape, given.stride())


def _counts(module: nn.Module) -> bool:
    """Whether a module is a linear layer that is worth panels."""
    return (
        type(module) is nn.Linear
        and module.weight.dtype is torch.float32
        and module.weight.device.type == "cpu"
        and min(module.weight.shape) >= _WIDTH
    )


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear) or not _counts(module):
        raise TypeError(f"{name} is no linear layer of float32 weights any more")
    return module


def _sizes(layer: nn.Linear) -> tuple[int, int, int]:
    n_out, n_in = layer.weight.shape
    return -(-n_out // _WIDTH), n_in, _WIDTH


def _memory(n: int) -> Tensor:
    """float32 [n], in huge pages where the system has them for the asking."""
    if not n or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(n)
    pages = mmap.mmap(-1, 4 * n + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel may be built without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.float32)  # keeps the pages
    first = -memory.data_ptr() % _HUGE // 4
    return memory[first : first + n]
