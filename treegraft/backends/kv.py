"""The KV slab: a transformers cache that writes keys and values at rows of the caller's choice.

transformers' own caches append, or crop a suffix; a draft tree needs "write node i to row r" and
"keep rows 0, 2 and 5". Here a row is only a place: which rows a query may attend to is said by the
mask of each forward, and which position a row's token holds is kept beside it. Full length is
stored for every layer, sliding ones too, so that a rejected branch never costs an evicted row.

Shapes (docs/shapes.md): n queries of this forward, K kv span, S cache rows, L layers, H kv heads,
d head size. The batch is one text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from treegraft.core.errors import CapacityError

__all__ = ["KVSlab", "SlabLayer", "SlotShape"]


_SPAN_STEP = 16  # rows; see KVSlab.aim_


class SlotShape(NamedTuple):
    """What one layer stores per row, for its keys or for its values: H heads of d numbers."""

    heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device


class _Aim:
    """Where the forward in progress writes and how far it reads; shared by all layers of a slab."""

    __slots__ = ("past", "rows", "span")

    def __init__(self) -> None:
        self.rows: Tensor = torch.empty(0, dtype=torch.int64)
        self.span = 0
        self.past: int | Tensor = 0


class SlabLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, [1, H, S, d] each, written at the rows of the slab's aim.

    Head count and head size are taken from the first write, unless the slab was laid out before.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, n_rows: int, aim: _Aim) -> None:
        super().__init__()
        self.n_rows = n_rows
        self.aim = aim
        self.read: tuple[Tensor, Tensor] | None = None  # the first rows, [1, H, span, d] each

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Open the layer for keys [1, H, n, d] and values [1, H, n, d'] of these sizes."""
        # Zeros, not empty: an unwritten row is masked, but 0 * NaN is NaN.
        # https://github.com/pytorch/pytorch/issues/101967
        self.keys = key_states.new_zeros(1, key_states.shape[1], self.n_rows, key_states.shape[3])
        self.values = value_states.new_zeros(
            1, value_states.shape[1], self.n_rows, value_states.shape[3]
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys [1, H, n, d] and values [1, H, n, d'] to the rows; return the rows in reach.

        The extra arguments that some versions of transformers hand over are not needed.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values, aim = self.keys, self.values, self.aim
        assert keys is not None
        assert values is not None
        rows = aim.rows
        if rows.device != keys.device:
            rows = rows.to(keys.device, non_blocking=True)
        keys.index_copy_(2, rows, key_states)
        values.index_copy_(2, rows, value_states)
        if self.read is None:
            self.read = (keys[:, :, : aim.span], values[:, :, : aim.span])
        return self.read

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Span and offset of the keys, for models that ask before they look at the mask."""
        return self.aim.span, 0

    def get_seq_length(self) -> int:
        """What a model that counts tokens itself must add to ``arange(n)`` to get positions."""
        return self.aim.past  # type: ignore[return-value]

    def get_max_length(self) -> int:
        """Rows of the layer; asked for by transformers 5.16 and later."""
        return self.n_rows

    def get_max_cache_shape(self) -> int:
        """Rows of the layer; the name of transformers up to 5.12."""
        return self.n_rows


class KVSlab(Cache):  # type: ignore[misc]
    """The keys and values of one text, S rows for every layer of one model.

    Parameters
    ----------
    n_layers : layers of the model (L).
    n_rows : rows of the slab (S).
    layout : per layer the shapes of its keys and values, as ``layout()`` of an earlier slab of the
        same model returned them. Slots of equal shape then share one tensor [m, 1, H, S, d], for
        most models a single one with m = 2 L, so that a move is one gather and one scatter. Without
        it each layer opens its own tensors at its first write.
    positions_device : where to keep the position of each row, or None to keep none. Needed for
        models with windows, which reach back by position and not by row.
    past_per_query : answer ``get_seq_length`` with int64 [n], ``positions - arange(n)``, for models
        that derive positions from it although position ids were given.
    n_spare : rows behind the S (which then are a multiple of 16) that a forward may write and none
        reads: where the queries that pad a forward leave their keys.

    Attributes
    ----------
    positions : int64, at least [S], position of the token in each row; 0 in rows never written.
    first_spare : number of the first spare row.
    stored, slots : keys and values, [1, H, S, d] each, of the layers that were laid out, and their
        numbers: 2 l for the keys of layer l, 2 l + 1 for its values.
    graphs : what was captured on this slab's addresses; for graphs.py.
    """

    def __init__(
        self,
        n_layers: int,
        n_rows: int,
        layout: tuple[tuple[SlotShape, SlotShape] | None, ...] | None = None,
        positions_device: torch.device | None = None,
        past_per_query: bool = False,
        n_spare: int = 0,
    ) -> None:
        self._aim = _Aim()
        self.first_spare = _round_up(n_rows)
        self._n_stored = self.first_spare + n_spare
        self._slab_layers = [SlabLayer(self._n_stored, self._aim) for _ in range(n_layers)]
        super().__init__(layers=self._slab_layers)
        self.n_rows = n_rows
        self.stored: list[Tensor] = []
        self.slots: tuple[int, ...] = ()
        self.graphs: dict[Any, Any] = {}
        self.past_per_query = past_per_query
        self.positions: Tensor | None = None
        self._blocks: list[tuple[Tensor, list[int]]] = []  # tensor, and the slots it holds
        self._device: torch.device | None = None  # of the first layer, once it is known
        # Normal tensors, so that a slab opened in inference mode can be written out of it.
        with torch.inference_mode(False):
            if positions_device is not None:
                self.positions = torch.zeros(
                    self._n_stored, dtype=torch.int64, device=positions_device
                )
            if layout is not None:
                self._lay_out(layout)

    @classmethod
    def over(
        cls,
        n_layers: int,
        stored: Mapping[int, Tensor],
        rows: Tensor,
        span: int,
        past: Tensor,
        positions: Tensor | None = None,
    ) -> KVSlab:
        """A slab over keys and values that exist, aimed at ``rows`` for one forward.

        Parameters
        ----------
        stored : tensor [1, H, S, d] by slot. rows : int64 [n], to be written. span : rows that are
        handed out (K). past : int64 [n], see ``past_per_query``. positions : int64, of the rows.
        """
        slab = cls(n_layers, n_rows=1)
        slab.positions = positions
        slab._aim.rows, slab._aim.span, slab._aim.past = rows, span, past
        for slot, tensor in stored.items():
            slab._open(slot, tensor)
        return slab

    def _open(self, slot: int, tensor: Tensor) -> None:
        layer = self._slab_layers[slot // 2]
        setattr(layer, "values" if slot % 2 else "keys", tensor)
        layer.is_initialized = True

    def _lay_out(self, layout: tuple[tuple[SlotShape, SlotShape] | None, ...]) -> None:
        groups: dict[SlotShape, list[int]] = {}
        for index, shapes in enumerate(layout):
            for which, shape in enumerate(shapes or ()):
                groups.setdefault(shape, []).append(2 * index + which)
        for shape, slots in groups.items():
            block = torch.zeros(
                (len(slots), 1, shape.heads, self._n_stored, shape.head_size),
                dtype=shape.dtype,
                device=shape.device,
            )
            self._blocks.append((block, slots))
            self._device = self._device or shape.device
            for slot, part in zip(slots, block.unbind(0), strict=True):
                self._open(slot, part)
        opened = {
            2 * index + which: tensor
            for index, layer in enumerate(self._slab_layers)
            for which, tensor in enumerate((layer.keys, layer.values))
            if tensor is not None
        }
        self.slots, self.stored = tuple(opened), list(opened.values())

    def layout(self) -> tuple[tuple[SlotShape, SlotShape] | None, ...]:
        """Shapes of each layer's keys and values; None for a layer that was never written."""
        return tuple(
            None
            if layer.keys is None or layer.values is None
            else (_slot_shape(layer.keys), _slot_shape(layer.values))
            for layer in self._slab_layers
        )

    def aim_(self, rows: Tensor, positions: Tensor, span: int) -> int:
        """Say where the next forward writes and how far it reads; to be called before each.

        Parameters
        ----------
        rows : int64 [n], distinct rows below ``span``.
        positions : int64 [n], positions of the tokens that go there.
        span : how many rows the forward may see (K), at most S.

        Returns
        -------
        How many rows the layers will hand out: K rounded up to a multiple of 16. The mask must hide
        the rest. A span that stays the same for some steps saves cutting 2 L views per forward, and
        the kernels of scaled_dot_product_attention copy a mask whose last axis is no multiple of 8
        (https://github.com/pytorch/pytorch/pull/114173).
        """
        self.note_(rows, positions, span)
        n = rows.shape[0]
        aim = self._aim
        # Once per forward, not once per layer; a layer on another device moves them itself.
        aim.rows = rows if self._device is None else rows.to(self._device, non_blocking=True)
        aim.past = span - n
        if self.past_per_query:
            aim.past = positions - torch.arange(n, device=positions.device)
        reach = _round_up(span)
        if reach != aim.span:
            aim.span = reach
            self._cut_views()
        return reach

    def note_(self, rows: Tensor, positions: Tensor, span: int) -> None:
        """Check where a forward writes and how far it reads, and keep the rows' positions.

        All that ``aim_`` does for a forward that is handed ``stored`` and cuts its own views.
        """
        if span > self.n_rows:
            raise CapacityError(
                f"the KV cache has {self.n_rows} rows and {span} are asked for: "
                "open it for more rows, or decode fewer tokens"
            )
        if rows.device.type == "cpu":  # on an accelerator a look would wait for it
            listed = rows.tolist()
            beyond = bool(listed) and max(listed) >= span
            if beyond and self.first_spare < self._n_stored:
                inside = [row for row in listed if row < self.first_spare or row >= self._n_stored]
                beyond = bool(inside) and max(inside) >= span
            if not listed or min(listed) < 0 or beyond:
                raise CapacityError(
                    f"a forward writes rows {listed[:8]} and reads the first {span}: "
                    "every row written must be among those read"
                )
        if self.positions is not None:
            self.positions.index_copy_(0, rows.to(self.positions.device), positions)

    @property
    def destination(self) -> Tensor:
        """int64 [n]: the rows that the next forward writes, on the device of the first layer."""
        return self._aim.rows

    @destination.setter
    def destination(self, rows: Tensor) -> None:
        self._aim.rows = rows

    def _cut_views(self) -> None:
        for layer in self._slab_layers:
            layer.read = None  # a layer that is not open yet cuts its own at the first write
        # One call per block cuts the views of all its layers.
        read: dict[int, Tensor] = {}
        for block, slots in self._blocks:
            read.update(zip(slots, block.narrow(3, 0, self._aim.span).unbind(0), strict=True))
        for slot in range(0, 2 * len(self._slab_layers), 2):
            if slot in read:
                self._slab_layers[slot // 2].read = (read[slot], read[slot + 1])

    def move_(self, source: Tensor, target: Tensor) -> None:
        """Copy rows ``source`` int64 [m] to rows ``target`` int64 [m], all reads before any write.

        Rows that stay in place are left out where the row numbers are known on the host.
        """
        if source.device.type == "cpu" and target.device.type == "cpu":
            old, new = source.tolist(), target.tolist()
            moved = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
            if not moved:
                return
            if len(moved) != len(old):
                source, target = (torch.tensor(column) for column in zip(*moved, strict=True))
            named = [row for pair in moved for row in pair]
            if max(named) >= self.n_rows or min(named) < 0:
                raise CapacityError(
                    f"the KV cache has {self.n_rows} rows and a move names row {max(named)}: "
                    "rows are 0 to the number of rows less one"
                )
        for store, axis in self._stores():
            to = target.to(store.device, non_blocking=True)
            kept = store.index_select(axis, source.to(store.device, non_blocking=True))
            store.index_copy_(axis, to, kept)

    def take_over_(self, old: KVSlab) -> None:
        """Copy the rows of ``old``, a slab of the same model with at most as many rows."""
        if not self._blocks:
            for layer, theirs in zip(self._slab_layers, old._slab_layers, strict=True):
                if theirs.keys is not None and theirs.values is not None:
                    layer.lazy_initialization(theirs.keys, theirs.values)
        n_rows = old.first_spare  # what padding wrote behind them is nobody's
        for (store, axis), (held, _) in zip(self._stores(), old._stores(), strict=True):
            store.narrow(axis, 0, n_rows).copy_(held.narrow(axis, 0, n_rows))

    def _stores(self) -> list[tuple[Tensor, int]]:
        """Every tensor with rows in it, and its row axis."""
        stores: list[tuple[Tensor, int]] = [(block, 3) for block, _ in self._blocks]
        if not stores:
            for layer in self._slab_layers:
                stores += [(t, 2) for t in (layer.keys, layer.values) if t is not None]
        if self.positions is not None:
            stores.append((self.positions, 0))
        return stores


def _slot_shape(stored: Tensor) -> SlotShape:
    return SlotShape(stored.shape[1], stored.shape[3], stored.dtype, stored.device)


def _round_up(span: int) -> int:
    return -(-span // _SPAN_STEP) * _SPAN_STEP
