"""Files of a learned scheduler: a folder with weights in safetensors and a header in JSON."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from treegraft.core.errors import ScheduleError

__all__ = ["FORMAT", "VERSION", "Artefact", "read_artefact", "write_artefact"]

FORMAT, VERSION = "treegraft-scheduler", 1
_HEADER, _WEIGHTS = "scheduler.json", "weights.safetensors"


@dataclass(frozen=True, slots=True)
class Artefact:
    """What ``treegraft schedule fit`` writes; docs/scheduling.md lists the header's keys.

    ``arrays`` : float32, the fields of ``policies.value.ValueNetwork``.
    """

    header: dict[str, Any]
    arrays: dict[str, NDArray[np.float32]]


def write_artefact(artefact: Artefact, path: str | Path) -> None:
    """Write a folder that is whole or not there; one that is there is replaced.

    ScheduleError if something else stands there, or it cannot be written.
    """
    folder = Path(path)
    if folder.exists() and not (folder / _HEADER).is_file():
        raise ScheduleError(
            f"--out must be new or a scheduler's folder, found {str(path)!r}, which is neither"
        )
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    old = folder.with_name(f"{folder.name}.{os.getpid()}.replaced")
    header = {"format": FORMAT, "version": VERSION, **artefact.header}
    try:
        partial.mkdir(parents=True)
        (partial / _WEIGHTS).write_bytes(save(artefact.arrays))
        (partial / _HEADER).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            os.replace(folder, old)
        os.replace(partial, folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ScheduleError(
            f"scheduler {str(path)!r} cannot be written: {error.strerror}"
        ) from None


def read_artefact(path: str | Path) -> Artefact:
    """Read a folder, or ``zoo:NAME``; ScheduleError if it is none, or of another version."""
    again = "make one with: treegraft schedule fit"
    folder = _folder(str(path))
    try:
        header = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ScheduleError(
                f"scheduler {str(path)!r}: {_HEADER} does not say {FORMAT!r}; {again}"
            )
        if header.get("version") != VERSION:
            raise ScheduleError(
                f"scheduler {str(path)!r} has version {header.get('version')!r}, this treegraft "
                f"reads {VERSION}; fit it again"
            )
        arrays = load_file(folder / _WEIGHTS)
    except OSError as error:
        raise ScheduleError(
            f"scheduler {str(path)!r} cannot be read: {error.strerror or error}; {again}"
        ) from None
    except (ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ScheduleError(f"scheduler {str(path)!r} is damaged: {reason}; {again}") from None
    return Artefact(header, _checked(header, arrays, str(path)))


def _folder(path: str) -> Path:
    if path.startswith("zoo:"):
        from treegraft.zoo.catalog import zoo_scheduler

        return zoo_scheduler(path)
    return Path(path).expanduser()


def _checked(
    header: Mapping[str, Any], arrays: dict[str, NDArray[np.float32]], name: str
) -> dict[str, NDArray[np.float32]]:
    """The weights; ScheduleError unless shapes fit the header and all are numbers."""
    try:
        n_features, depth = len(header["features"]), int(header["depth"])
        n_actions, hidden = 1 + len(header["signature"]["drafters"]), int(header["hidden"])
    except (KeyError, TypeError, ValueError):
        raise ScheduleError(f"scheduler {name!r} is damaged: {_HEADER} lacks keys") from None
    shapes = {
        "w1": (depth, n_features, hidden),
        "b1": (depth, hidden),
        "w2": (depth, hidden, hidden),
        "b2": (depth, hidden),
        "w3": (depth, hidden, n_actions),
        "b3": (depth, n_actions),
    }
    for key, shape in shapes.items():
        found = arrays.get(key)
        if found is None or found.shape != shape or not np.isfinite(found).all():
            what = "nothing" if found is None else list(found.shape)
            raise ScheduleError(
                f"scheduler {name!r} is damaged: {key} must hold finite numbers of shape "
                f"{list(shape)}, found {what}"
            )
    return {key: arrays[key] for key in shapes}
