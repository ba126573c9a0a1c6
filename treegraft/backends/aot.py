"""Forwards compiled ahead of time: torch.export, then Inductor's code without Python around it.

Against torch.compile's Inductor this saves the look-up of a program in every call and a line of
Python per kernel, and a second process loads in milliseconds what the first one made.

Shapes (docs/shapes.md): n queries of this forward, K kv span, S cache rows, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import Dim

from treegraft.backends.kv import KVSlab
from treegraft.backends.library import Library, kept, library_key
from treegraft.backends.programs import NoProgramError, Program, read

__all__ = ["AotProgram"]

_SIZES = (2, 3, 5, 8, 9, 16, 17, 31, 64, 127, 256, 512)
_SPANS = (16, 32, 48, 80, 256, 400, 1024, 4096, 8192, 32768)


@final
class AotProgram(Program):
    """By torch.export and Inductor, with a library per kind of forward.

    Parameters
    ----------
    model : a causal LM of transformers. keyword : under which it takes the cache.
    """

    reads_prompts = True

    def __init__(self, model: nn.Module, keyword: str) -> None:
        self._model = model
        self._keyword = keyword
        # By whether it is one query, and the last query's logits alone.
        self._forms: dict[tuple[bool, bool], _Form] = {}
        self._libraries: dict[tuple[bool, bool], Library] = {}

    def trial(self, arguments: dict[str, Any]) -> Tensor:
        """Logits [1, n, V]: see Program.trial."""
        kind = _kind(arguments)
        if kind not in self._libraries:
            self._make(arguments, kind)
        return self(arguments)

    def __call__(self, arguments: dict[str, Any]) -> Tensor:
        """Logits [1, n, V]: see Program."""
        kind = _kind(arguments)
        form = self._forms.get(kind)
        if form is None or arguments.keys() != form.keys or not self._libraries[kind].fits:
            raise NoProgramError
        return self._libraries[kind].run(form.flat(arguments))[0]

    def renew(self) -> None:
        """See weights that were given other memory: see Program.renew."""
        for library in self._libraries.values():
            library.bind()

    def _make(self, arguments: dict[str, Any], kind: tuple[bool, bool]) -> None:
        one = kind[0]
        form = _Form.of(arguments, self._keyword)
        forward = _Forward(self._model, form)

        def make(path: str) -> None:
            # A tensor of inference mode cannot be traced.
            with torch.inference_mode(False), torch.no_grad():
                given = tuple(each.clone() for each in form.flat(arguments))
                exported = torch.export.export(
                    forward, given, dynamic_shapes=(form.sizes(one),), strict=False
                )
                _check_guards(exported, form, one)
                torch._inductor.aoti_compile_and_package(
                    exported,
                    package_path=path,
                    inductor_configs={"aot_inductor.package_constants_in_so": False},
                )

        key = library_key(forward, (one, form))
        self._libraries[kind], _ = kept(key, forward, make)
        self._forms[kind] = form


def _kind(arguments: dict[str, Any]) -> tuple[bool, bool]:
    return arguments["input_ids"].shape[1] == 1, "logits_to_keep" in arguments


@dataclass(frozen=True)
class _Form:
    """How the arguments of a forward are laid out as a list of tensors.

    Attributes
    ----------
    keys : of the arguments. tensors : those that are one tensor each. masks : layer types of the
        masks, None for a single one. others : settings. keyword : of the cache.
    n_layers : L. slots : of the slab, which are open.
    """

    # Not in the repr, which names a library: a set has another order in every process.
    keys: frozenset[str] = field(repr=False)
    tensors: tuple[str, ...]
    masks: tuple[str, ...] | None
    others: tuple[tuple[str, Any], ...]
    keyword: str
    n_layers: int
    slots: tuple[int, ...]

    @classmethod
    def of(cls, arguments: dict[str, Any], keyword: str) -> _Form:
        slab, mask = arguments[keyword], arguments["attention_mask"]
        tensors = [k for k, v in arguments.items() if isinstance(v, Tensor) and v is not mask]
        others = [
            (k, v)
            for k, v in arguments.items()
            if not isinstance(v, Tensor) and k not in (keyword, "attention_mask")
        ]
        return cls(
            keys=frozenset(arguments),
            tensors=tuple(tensors),
            masks=None if isinstance(mask, Tensor) else tuple(mask),
            others=tuple(others),
            keyword=keyword,
            n_layers=len(slab.layers),
            slots=slab.slots,
        )

    def flat(self, arguments: dict[str, Any]) -> list[Tensor]:
        """Rows, masks, the other tensors, then keys and values [1, H, S, d] of the layers."""
        slab, mask = arguments[self.keyword], arguments["attention_mask"]
        masks = (mask,) if self.masks is None else [mask[kind] for kind in self.masks]
        return [slab.destination, *masks, *(arguments[k] for k in self.tensors), *slab.stored]

    def sizes(self, one: bool) -> tuple[dict[int, Any], ...]:
        """What varies in each tensor of ``flat``."""
        n, span, rows = Dim("n", min=2), Dim("K"), Dim("S")
        queries = {} if one else {0: n}
        mask = {3: span} if one else {2: n, 3: span}
        others = [{} if one else {0 if name == "cache_position" else 1: n} for name in self.tensors]
        masks = [mask] * (1 if self.masks is None else len(self.masks))
        return (queries, *masks, *others, *[{2: rows}] * len(self.slots))

    def arguments(self, flat: Sequence[Tensor]) -> dict[str, Any]:
        """The arguments again, with a cache over the keys and values that are given."""
        n_masks = 1 if self.masks is None else len(self.masks)
        rows, masks = flat[0], flat[1 : 1 + n_masks]
        end = 1 + n_masks + len(self.tensors)
        named = dict(zip(self.tensors, flat[1 + n_masks : end], strict=True))
        positions = named["position_ids"][0]
        slab = KVSlab.over(
            self.n_layers,
            dict(zip(self.slots, flat[end:], strict=True)),
            rows=rows,
            span=masks[0].shape[-1],
            # The right count for every model that adds to it: see KVSlab.past_per_query.
            past=positions - torch.arange(positions.shape[0], device=positions.device),
        )
        mask = masks[0] if self.masks is None else dict(zip(self.masks, masks, strict=True))
        return {**dict(self.others), **named, "attention_mask": mask, self.keyword: slab}


class _Forward(nn.Module):
    """A model's forward on a list of tensors."""

    def __init__(self, model: nn.Module, form: _Form) -> None:
        super().__init__()
        self.model = model
        self._form = form

    def forward(self, *flat: Tensor) -> Tensor:
        """Logits [1, n, V] for ``_Form.flat``."""
        return read(self.model, self._form.arguments(flat))


class _Sized:
    """Stands for a tensor of which only the sizes matter."""

    def __init__(self, shape: tuple[int | None, ...]) -> None:
        self._shape = shape

    def size(self) -> tuple[int | None, ...]:
        return self._shape


def _check_guards(exported: Any, form: _Form, one: bool) -> None:
    """RuntimeError unless what was assumed of sizes holds for every forward of this kind.

    Native code does not look at its arguments' sizes again.
    """
    guards = exported._guards_code
    sizes = [1] if one else _SIZES
    n_masks = 1 if form.masks is None else len(form.masks)
    for n in sizes:
        for span in _SPANS:
            shapes: list[tuple[int | None, ...]] = [(n,), *[(1, 1, n, span)] * n_masks]
            shapes += [(n,) if name == "cache_position" else (1, n) for name in form.tensors]
            # No span is all rows: see CompiledModel.new_cache.
            shapes += [(1, None, span + 16, None)] * len(form.slots)
            given = {"L": {"flat": [_Sized(shape) for shape in shapes]}}
            for guard in guards:
                if not eval(guard, given):
                    raise RuntimeError(f"the forward was made for sizes with {guard}")
