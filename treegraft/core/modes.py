"""The modes of torch that a step runs in, whatever the caller's are."""

from __future__ import annotations

from types import TracebackType

import torch

__all__ = ["OwnModes"]


class OwnModes:
    """No gradients, and small tensors on the host whatever the caller's default device is.

    Held around each step and never across a yield, where the modes are the caller's. A class and
    not a generator, as a step begins with it.
    """

    __slots__ = ("_device", "_gradients")

    def __enter__(self) -> None:
        self._device: torch.device | None = None
        # As a context a device slows every call down, so it is entered only where it matters; and
        # an empty tensor tells the default device sooner than torch's own question for it.
        if not torch.empty(0).is_cpu:
            self._device = torch.device("cpu")
            self._device.__enter__()
        self._gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        torch.set_grad_enabled(self._gradients)
        if self._device is not None:
            self._device.__exit__(kind, error, trace)
