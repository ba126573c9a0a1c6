"""Programs: what the forwards of a model are compiled to.

A program stands for a model's forward. It is made by trial forwards, one for each kind, and never
while a text is decoded.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, cast, final

import torch
from torch import Tensor

from treegraft.backends.hf import HFLanguageModel
from treegraft.backends.kv import KVSlab

__all__ = [
    "MANY",
    "ONE",
    "PROMPT",
    "Compiler",
    "Kind",
    "NoProgramError",
    "Program",
    "TracedProgram",
]

Compiler = Literal["aot", "inductor", "aot_eager", "eager"]


class NoProgramError(Exception):
    """No program was made for a forward like this one. Raised before the forward begins."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Forwards that share a program. Each is itself alone: every forward is looked up by its kind.

    Attributes
    ----------
    name : in reports. most : queries (n) at most; None: no limit. last_only : the last query's
        logits alone.
    """

    name: str
    most: int | None = None
    last_only: bool = False


ONE = Kind("one query", 1)
MANY = Kind("several queries")
PROMPT = Kind("prompt", last_only=True)


class Program(ABC):
    """The compiled forwards of one model.

    The methods that run one take what ``LanguageModel.forward`` takes.

    Attributes
    ----------
    kinds : what programs are made for, those for fewer queries first; a forward belongs to the
        first that it fits.
    minds_inference_mode : whether what was made outside of it does not fit in it.
    """

    kinds: tuple[Kind, ...] = (ONE, MANY)
    minds_inference_mode = False

    def kind(self, n: int, last_only: bool) -> Kind | None:
        """That of a forward over ``n`` queries; None if there is none."""
        for kind in self.kinds:
            if kind.last_only == last_only and (kind.most is None or n <= kind.most):
                return kind
        return None

    @abstractmethod
    def trial(
        self,
        cache: KVSlab,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Tensor:
        """Logits [n, V]; makes a program if there is none for such a forward yet."""

    @abstractmethod
    def __call__(
        self,
        cache: KVSlab,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Tensor:
        """Logits [n, V]; NoProgramError where a program would have to be made."""

    @abstractmethod
    def ready(
        self,
        cache: KVSlab,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Callable[[], Any]:
        """The forward alone, with all that it needs at hand."""

    def renew(self) -> None:  # noqa: B027 (most programs have nothing to do)
        """See weights that were given other memory. Called when a text begins."""


@final
class TracedProgram(Program):
    """By torch.compile, with a program of dynamo's per kind of forward.

    Parameters
    ----------
    model : what is compiled. compiler : torch.compile's backend.
    """

    minds_inference_mode = True

    def __init__(self, model: HFLanguageModel, compiler: Any) -> None:
        self._model = model
        # Every program belongs to a code object, and the limit on programs per code object would
        # be shared by all models of a process.
        self._read = cast(
            Callable[..., Tensor],
            torch.compile(
                _own_code(_read),
                fullgraph=True,
                dynamic=True,
                backend=compiler,
                options={"guard_filter_fn": _that_vary},
            ),
        )

    def trial(self, *given: Any, **options: Any) -> Tensor:
        """Logits [n, V]: see Program.trial."""
        # Scoped: the caller's own setting stands.
        with torch._dynamo.config.patch(recompile_limit=16, fail_on_recompile_limit_hit=True):
            return self._model.read(
                lambda arguments: self._read(self._model.model, arguments), *given, **options
            )

    def __call__(self, *given: Any, **options: Any) -> Tensor:
        """Logits [n, V]: see Program."""
        return self._model.read(self.run, *given, **options)

    def ready(self, *given: Any, **options: Any) -> Callable[[], Any]:
        """The forward alone: see Program.ready."""
        return self._model.ready(self.run, *given, **options)

    def run(self, arguments: dict[str, Any]) -> Tensor:
        """Logits [1, n, V] for the arguments of the model's own forward."""
        try:
            # Only for this call, and no program is made in it.
            with torch.compiler.set_stance("fail_on_recompile"):
                return self._read(self._model.model, arguments)
        except RuntimeError as error:
            if "fail_on_recompile" not in str(error):
                raise
            raise NoProgramError from error


def _read(model: Any, arguments: dict[str, Any]) -> Tensor:
    logits: Tensor = model(**arguments).logits
    return logits


def _that_vary(guards: Sequence[Any]) -> list[bool]:
    """Which guards of a program are looked at in every call: those on what differs between calls.

    The others, a thousand for four layers, say that modules, code and cache are as they were when
    the program was made, and took a seventh of a forward to find that out again.
    """
    return [
        guard.guard_type == "SHAPE_ENV"
        or (guard.guard_type == "TENSOR_MATCH" and _ARGUMENT.fullmatch(guard.name) is not None)
        for guard in guards
    ]


# Tensors given anew in every call, also in a dict of masks; not those of the cache.
_ARGUMENT = re.compile(r"(L\[['\"])?arguments(['\"]\])?(\[['\"]\w+['\"]\])+")

_numbers = itertools.count()


def _own_code(function: Callable[..., Tensor]) -> FunctionType:
    plain = cast(FunctionType, function)
    code = plain.__code__.replace(co_name=f"{plain.__name__}_{next(_numbers)}")
    return FunctionType(code, plain.__globals__, code.co_name)
