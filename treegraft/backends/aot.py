"""Forwards compiled ahead of time: torch.export, then Inductor's code without Python around it.

What is compiled is all of ``LanguageModel.forward``, the mask included. Against torch.compile's
Inductor this saves the look-up of a program in every call and a line of Python per kernel, and a
second process loads in milliseconds what the first one made.

Shapes (docs/shapes.md): n queries of this forward, K kv span, S cache rows, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import Dim

from treegraft.backends.hf import HFLanguageModel, logits_of
from treegraft.backends.kv import KVSlab
from treegraft.backends.library import Library, StateWatch, kept, library_key
from treegraft.backends.panels import Panels
from treegraft.backends.programs import MANY, ONE, PROMPT, Kind, NoProgramError, Program

__all__ = ["AotProgram"]

_FEW = Kind("up to 8 queries", 8)
"""Of products by panels: one loop forms the sums of all queries, and takes as long for fewer."""
_SETTINGS = {
    "aot_inductor.package_constants_in_so": False,
    # Weights of up to eight numbers would else be written into the code.
    "always_keep_tensor_constants": True,
}
# Each query of a product has a buffer of its own: one piece of memory for all of them, and sums
# that are rounded once for a product and its sum.
_FOR_PANELS = {"memory_planning": True, "cpp.enable_floating_point_contract_flag": "fast"}
_SIZES = (2, 3, 5, 8, 9, 16, 17, 31, 64, 127, 256, 512)
_SPANS = (2, 3, 7, 16, 33, 64, 80, 256, 401, 1024, 4096, 8191, 32768)


@final
class AotProgram(Program):
    """By torch.export and Inductor, with a library per kind of forward.

    Parameters
    ----------
    model : what is compiled. panels : whether forwards over up to 8 queries read float32 weights in
        panels (panels.py), a second copy of them.

    Attributes
    ----------
    panel_bytes : of that copy.
    """

    def __init__(self, model: HFLanguageModel, panels: bool = False) -> None:
        self._model = model
        self._libraries: dict[Kind, Library] = {}
        self._panels = Panels(model.model) if panels and model.device.type == "cpu" else None
        self.panel_bytes = 0 if self._panels is None else self._panels.n_bytes
        if not self.panel_bytes:
            self._panels = None
        self.kinds = (ONE, MANY, PROMPT) if self._panels is None else (ONE, _FEW, MANY, PROMPT)
        self._state = StateWatch(model.model)

    def trial(
        self,
        cache: KVSlab,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Tensor:
        """Logits [n, V]: see Program.trial."""
        kind = self.kind(tokens.shape[0], last_only)
        if kind is not None and kind not in self._libraries:
            given = _flat(cache, tokens, rows, positions, visible)
            self._libraries[kind] = self._made(kind, cache.slots, given)
        return self(cache, tokens, rows, positions, visible, last_only)

    def __call__(self, *given: Any, **options: Any) -> Tensor:
        """Logits [n, V]: see Program."""
        logits: Tensor = self.ready(*given, **options)()[0]
        return logits

    def ready(
        self,
        cache: KVSlab,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Callable[[], Any]:
        """The forward alone: see Program.ready."""
        library = self._fitting(tokens, visible, last_only)
        cache.note_(rows, positions, visible.shape[1])
        given = _flat(cache, tokens, rows, positions, visible)
        return lambda: library.run(given)  # which empties the list: for one call

    def drop_panels(self) -> None:
        """Let go of the panels, where no forward that reads them was chosen."""
        self._panels, self.panel_bytes = None, 0
        self._libraries = {k: v for k, v in self._libraries.items() if k.most is None}

    def renew(self) -> None:
        """See weights that were given other memory: see Program.renew."""
        if self._state.changed():
            if self._panels is not None:
                self._panels.find()
            for library in self._libraries.values():
                library.bind()
            self._state.look()
        if self._panels is not None:
            self._panels.follow()

    def _fitting(self, tokens: Tensor, visible: Tensor, last_only: bool) -> Library:
        kind = self.kind(tokens.shape[0], last_only)
        library = None if kind is None else self._libraries.get(kind)
        # A span of one is taken for a size that is spread over others.
        if library is None or not library.fits or visible.shape[1] < 2:
            raise NoProgramError
        panels = self._panels
        if panels is not None and not panels.fits and kind is not None and kind.most is not None:
            raise NoProgramError
        return library

    def _made(self, kind: Kind, slots: tuple[int, ...], given: list[Tensor]) -> Library:
        windowed = self._model.masks.windowed
        panels = None if kind.most is None else self._panels
        form = _Form(self._model.report.n_layers, slots, kind.most, kind.last_only, windowed)
        forward = _Forward(self._model, form, panels)

        def make(path: str) -> None:
            # A tensor of inference mode cannot be traced.
            with torch.inference_mode(False), self._model.steady():
                exported = torch.export.export(
                    forward,
                    tuple(each.clone() for each in given),
                    dynamic_shapes=(form.sizes(),),
                    strict=False,
                )
                _check_guards(exported, form)
                torch._inductor.aoti_compile_and_package(
                    exported,
                    package_path=path,
                    inductor_configs=_SETTINGS if panels is None else _SETTINGS | _FOR_PANELS,
                )

        return kept(library_key(forward, form), forward, make)[0]


def _flat(
    cache: KVSlab, tokens: Tensor, rows: Tensor, positions: Tensor, visible: Tensor
) -> list[Tensor]:
    if cache.positions is None:
        return [tokens, rows, positions, visible, *cache.stored]
    return [tokens, rows, positions, visible, cache.positions, *cache.stored]


@dataclass(frozen=True)
class _Form:
    """What a library is made for.

    Attributes
    ----------
    n_layers : L. slots : of the slab, which are open. most : queries (n) at most, and at least two
        unless it is one; None: no limit.
    last_only : the last query's logits alone. windowed : the rows' positions are an input too.
    """

    n_layers: int
    slots: tuple[int, ...]
    most: int | None
    last_only: bool
    windowed: bool

    def sizes(self) -> tuple[dict[int, Any], ...]:
        """What varies in each tensor of ``_flat``."""
        one = self.most == 1
        n = None if one else Dim("n", min=2, max=self.most)
        span, rows = Dim("K", min=2), Dim("S", min=2)
        queries = {} if one else {0: n}
        visible = {1: span} if one else {0: n, 1: span}
        positions = [{0: rows}] * self.windowed
        return (queries, queries, queries, visible, *positions, *[{2: rows}] * len(self.slots))

    def shapes(self, n: int, span: int, n_rows: int) -> list[tuple[int | None, ...]]:
        """Sizes of the tensors of ``_flat``; None where they do not vary."""
        positions = [(n_rows,)] * self.windowed
        stored = [(1, None, n_rows, None)] * len(self.slots)
        return [(n,), (n,), (n,), (n, span), *positions, *stored]


class _Forward(nn.Module):
    """``LanguageModel.forward`` on a list of tensors."""

    def __init__(self, model: HFLanguageModel, form: _Form, panels: Panels | None) -> None:
        super().__init__()
        self.model = model.model  # its weights are this module's
        self.panels = panels
        self._language_model = model
        self._form = form

    def forward(self, *flat: Tensor) -> Tensor:
        """Logits [n, V] for ``_flat``."""
        form = self._form
        tokens, rows, positions, visible, *rest = flat
        row_positions = rest.pop(0) if form.windowed else None
        span = visible.shape[1]
        slab = KVSlab.over(
            form.n_layers,
            dict(zip(form.slots, rest, strict=True)),
            rows=rows,
            span=span,
            # The right count for every model that adds to it: see KVSlab.past_per_query.
            past=positions - torch.arange(positions.shape[0], device=positions.device),
            positions=row_positions,
        )
        model, last_only = self._language_model, form.last_only
        arguments = model.arguments(slab, tokens, rows, positions, visible, span, last_only)
        n, panels = tokens.shape[0], self.panels
        with nullcontext() if panels is None else panels.products(n, form.most or 1):
            return logits_of(model.call(arguments), last_only)


class _Sized:
    """Stands for a tensor of which only the sizes matter."""

    def __init__(self, shape: tuple[int | None, ...]) -> None:
        self._shape = shape

    def size(self) -> tuple[int | None, ...]:
        return self._shape


def _check_guards(exported: Any, form: _Form) -> None:
    """RuntimeError unless what was assumed of sizes holds for every forward of this kind.

    Native code does not look at its arguments' sizes again.
    """
    for n in (1,) if form.most == 1 else _SIZES:
        if n > (form.most or n):
            break
        for span in _SPANS:
            # No span is all rows: see CompiledModel.new_cache.
            shapes = form.shapes(n, span, span + 16)
            given = {"L": {"flat": [_Sized(shape) for shape in shapes]}}
            for guard in exported._guards_code:
                if not eval(guard, given):
                    raise RuntimeError(f"the forward was made for sizes with {guard}")
