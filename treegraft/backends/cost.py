"""What a forward costs here: measured seconds by width and context, and where they hold.

A cost model is measured, never assumed, and it belongs to one machine: it is kept with device,
element type, threads, library versions and the models' identities, and refused where one differs.

Shapes: n nodes of a forward, R rows that are asked about.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from treegraft.backends.identity import model_identity
from treegraft.core.errors import ScheduleError
from treegraft.core.language_model import LanguageModel, extend

__all__ = [
    "FORMAT",
    "VERSION",
    "CostModel",
    "Curve",
    "HostCosts",
    "clock_of",
    "elsewhere",
    "environment",
    "load_costs",
    "measure_curves",
    "save_costs",
]

FORMAT, VERSION = "treegraft-costs", 1
TARGET = "target"
"""Name of the target's curve; those of drafters are ``drafter:NAME``."""
DRAFTER = "drafter:"

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one forward on a grid, linear in between and beyond the last points.

    Attributes
    ----------
    widths : nodes of the forward, rising. contexts : tokens of KV before it, rising.
    seconds : by context, then by width. scale : how much longer a forward takes in decoding than
        in the measurement, where nothing else is in the caches. turn : seconds that
        a drafter's forward takes more in a layer after one of another drafter or the target, as
        that has gone through the caches.
    """

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    scale: float = 1.0
    turn: float = 0.0

    def at(self, width: ArrayLike, context: ArrayLike) -> Floats:
        """float64 [R]: seconds of forwards over ``width`` nodes [R] after ``context`` tokens [R].

        A width of 0 is no forward and takes no time.
        """
        n, length = np.broadcast_arrays(
            np.asarray(width, dtype=np.float64), np.asarray(context, dtype=np.float64)
        )
        table = np.array(self.seconds)
        low, share = _between(self.contexts, length)
        high = np.minimum(low + 1, len(self.contexts) - 1)
        left, along = _between(self.widths, n)
        right = np.minimum(left + 1, len(self.widths) - 1)
        short = table[low, left] + along * (table[low, right] - table[low, left])
        long = table[high, left] + along * (table[high, right] - table[high, left])
        found: Floats = self.scale * (short + share * (long - short))
        # Beyond the grid a falling line could cross zero.
        found = np.maximum(found, self.scale * 0.5 * table.min())
        return np.where(n > 0, found, 0.0)


def _between(grid: Sequence[int], values: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Index of the grid point below each value, and how far it is on the way to the next."""
    points = np.array(grid, dtype=np.float64)
    if points.shape[0] == 1:
        return np.zeros(values.shape, dtype=np.int64), np.zeros(values.shape)
    low = np.clip(np.searchsorted(points, values, side="right") - 1, 0, points.shape[0] - 2)
    share = (values - points[low]) / (points[low + 1] - points[low])
    # Shorter contexts than the first are taken for it.
    return low, np.maximum(share, 0.0)


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of a step that are in no forward.

    Attributes
    ----------
    step : of every step. node : of each node that the target reads. drafted : of each node of the
        working tree. visit : of a layer by the drafter that acts, riders included. turn : what that
        takes more after a layer of another drafter, and in a step's first layer. follow, decision :
        what ``value`` takes to read a step's new text, and before each layer; 0 where that was
        not measured.
    """

    step: float
    node: float
    drafted: float
    visit: dict[str, float]
    turn: dict[str, float] = field(default_factory=dict)
    follow: float = 0.0
    decision: float = 0.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts the seconds of a decoding step.

    Attributes
    ----------
    environment : where it holds, see ``environment``. models : identity of the model of each curve.
    curves : of the target and of each drafter that is a model. host : the rest of the step.
    checked : predicted over measured seconds per step, on steps that nothing was fitted to; None
        if that was not done.
    target_scale, texts_of : of a cost-scaled model: how much dearer the target's forwards are taken
        to be than they were measured; the identity of another target whose texts these costs are
        put to, as the measured one gives the same texts (recipes/zoo/deepen.py).
    """

    environment: dict[str, Any]
    models: dict[str, str]
    curves: dict[str, Curve]
    host: HostCosts
    checked: float | None = None
    target_scale: float = 1.0
    texts_of: str | None = None

    def with_target_scale(self, factor: float) -> CostModel:
        """The same with a target whose forwards take ``factor`` times as long (cost-scaled)."""
        target = self.curves[TARGET]
        curves = {**self.curves, TARGET: replace(target, scale=target.scale * factor)}
        return replace(self, curves=curves, target_scale=self.target_scale * factor)

    def for_texts_of(self, identity: str) -> CostModel:
        """The same for the texts of another target, which is the measured one at another price.

        ScheduleError if it is the measured one itself.
        """
        if self.models.get(TARGET) == identity:
            raise ScheduleError(
                "cost-scaled costs are of another target than the traces, found the same "
                f"({identity}); leave --cost-scaled out"
            )
        return replace(self, texts_of=identity)

    @property
    def scaled(self) -> str | None:
        """In words what makes these costs cost-scaled; None where nothing does."""
        found = []
        if self.texts_of is not None:
            found.append(f"forwards of target {self.models.get(TARGET)}, texts of {self.texts_of}")
        if self.target_scale != 1.0:
            found.append(f"target forwards times {self.target_scale:g}")
        return "; ".join(found) or None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as it stands in the file."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @staticmethod
    def of(data: Mapping[str, Any]) -> CostModel:
        """From ``as_dict``; KeyError or TypeError if something is missing."""
        curves = {
            name: Curve(
                tuple(curve["widths"]),
                tuple(curve["contexts"]),
                tuple(map(tuple, curve["seconds"])),
                float(curve["scale"]),
                float(curve.get("turn", 0.0)),
            )
            for name, curve in data["curves"].items()
        }
        host = HostCosts(**data["host"])
        return CostModel(
            dict(data["environment"]),
            dict(data["models"]),
            curves,
            host,
            data["checked"],
            data.get("target_scale", 1.0),
            data.get("texts_of"),
        )


def environment(dtype: str, device: str, **more: Any) -> dict[str, Any]:
    """Everything outside the models that a forward's time depends on, as plain data."""
    kind = torch.device(device).type
    name = torch.cuda.get_device_name(device) if kind == "cuda" else _processor()
    return {
        "device": kind,
        "device_name": name,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        **more,
    }


def elsewhere(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """In which things that decide costs two ``environment`` differ; None if in none.

    Versions of libraries are left out: what they change is small.
    """
    pairs: list[tuple[str, Any, Any]] = [(k, there.get(k), here.get(k)) for k in _DECISIVE]
    one, other = (_told(side, "backend") or {} for side in (there, here))
    pairs += [(key, one.get(key), other.get(key)) for key in ("compile", "panels")]
    found = [f"{key} {a} there, {b} here" for key, a, b in pairs if a != b]
    return "; ".join(found) if found else None


_BEFORE: dict[str, Any] = {"temperature": 0.0, "backend": {"panels": False}}
"""What costs were measured with that do not say it, as it came later."""
_DECISIVE = ("device", "device_name", "dtype", "threads")


def _told(environment: Mapping[str, Any], key: str) -> Any:
    """What an environment says, or was where it does not say it."""
    before, told = _BEFORE.get(key), environment.get(key)
    if isinstance(before, dict) and isinstance(told, dict):
        return before | told
    return before if told is None else told


def _processor() -> str:
    """The CPU's model name where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def clock_of(device: str) -> Callable[[], float]:
    """The clock that costs are measured by, in seconds.

    Wall time; with one thread on a CPU the time that the process worked, which is the same on an
    idle machine, and on a busy one leaves out what others took in between.
    """
    alone = torch.device(device).type == "cpu" and torch.get_num_threads() == 1
    return process_time if alone else perf_counter


def measure_curves(
    models: Mapping[str, LanguageModel],
    widths: Mapping[str, Sequence[int]],
    contexts: Sequence[int],
    repeats: int = 7,
    on_round: Callable[[object], None] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, Curve]:
    """Time forwards of every model over chains of every width after every context.

    Rounds are interleaved over models, widths and contexts, so that a busy moment of the machine
    falls on all of them. Each point is the median of its rounds, and no width is cheaper than a
    smaller one. A context that does not fit into a model is cut for it.

    Parameters
    ----------
    models, widths : by the names of the curves. repeats : rounds, after one that does not count.
    on_round : called after each round, for progress. clock : in seconds, see ``clock_of``.
    """
    taken: dict[tuple[str, int, int], list[float]] = {}
    kept: dict[str, list[int]] = {name: [] for name in models}
    opened: list[tuple[str, int, Any]] = []
    with torch.no_grad():
        for name, model in models.items():
            most = max(widths[name])
            for context in contexts:
                limit = model.max_positions
                length = context if limit is None else max(1, min(context, limit - most))
                if length in kept[name]:
                    continue
                kept[name].append(length)
                cache = model.new_cache(length + most)
                text = [i % model.vocab_size for i in range(length)]
                for _ in extend(model, cache, text, 0, last_only=True):
                    pass
                opened.append((name, length, cache))
        for number in range(repeats + 1):
            for name, length, cache in opened:
                for width in widths[name]:
                    seconds = _time(models[name], cache, length, width, clock)
                    if number:
                        taken.setdefault((name, length, width), []).append(seconds)
            if on_round is not None:
                on_round(number)
    return {
        name: Curve(
            tuple(widths[name]),
            tuple(kept[name]),
            tuple(
                _never_falling([median(taken[name, c, w]) for w in widths[name]])
                for c in kept[name]
            ),
        )
        for name in models
    }


def _never_falling(values: Sequence[float]) -> tuple[float, ...]:
    """The nearest row that never falls (isotonic regression): more nodes are never cheaper."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, n = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / n:
            more, count = blocks.pop()
            total, n = total + more, n + count
        blocks.append((total, n))
    return tuple(total / n for total, n in blocks for _ in range(n))


def _time(
    model: LanguageModel, cache: Any, length: int, width: int, clock: Callable[[], float]
) -> float:
    """Seconds of one forward over a chain of ``width`` nodes, its logits read on the host."""
    tokens = torch.arange(width) % model.vocab_size
    places = torch.arange(length, length + width)
    visible = torch.arange(length + width)[None, :] <= places[:, None]
    start = clock()
    logits = model.forward(cache, tokens, places, places, visible)
    # Waits for a device that runs behind the host.
    float(logits[-1, 0])
    return clock() - start


def save_costs(costs: CostModel, path: str | Path) -> None:
    """Write a cost model, whole or not at all."""
    file = Path(path)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(costs.as_dict(), indent=1), encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        raise ScheduleError(f"costs {str(path)!r} cannot be written: {error.strerror}") from None


def load_costs(
    path: str | Path,
    models: Mapping[str, LanguageModel] | None = None,
    here: Mapping[str, Any] | None = None,
) -> CostModel:
    """Read a cost model; ScheduleError if it is none, or was measured on something else.

    ``models`` by the names of the curves and ``here``, an ``environment``, are what it must fit;
    left out, it is not asked.
    """
    again = "measure again with: treegraft schedule calibrate"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ScheduleError(
            f"costs {str(path)!r} cannot be read: {error.strerror}; {again}"
        ) from None
    except ValueError:
        raise ScheduleError(f"costs {str(path)!r} is no valid JSON; {again}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ScheduleError(f"costs {str(path)!r} does not say {FORMAT!r}; {again}")
    if data.get("version") != VERSION:
        raise ScheduleError(
            f"costs {str(path)!r} has version {data.get('version')!r}, this treegraft reads "
            f"{VERSION}; {again}"
        )
    try:
        costs = CostModel.of(data)
    except (KeyError, TypeError, ValueError):
        raise ScheduleError(f"costs {str(path)!r} is damaged; {again}") from None
    for name, model in (models or {}).items():
        identity = model_identity(model)
        if costs.models.get(name) != identity:
            found = costs.models.get(name, "no such model")
            raise ScheduleError(
                f"costs {str(path)!r} were measured for another {name} ({found}), found "
                f"{identity}; {again}"
            )
    for key in here or {}:
        there, value = _told(costs.environment, key), _told(here or {}, key)
        if there != value:
            raise ScheduleError(
                f"costs {str(path)!r} were measured with {key} {there!r}, found {value!r}; {again}"
            )
    return costs
