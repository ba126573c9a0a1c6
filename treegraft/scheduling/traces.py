"""Folders of schedule traces: one safetensors file per prompt, and a header in JSON.

Shapes: S steps, R rows, E described rows, F features, K drafters, n tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from treegraft import __version__
from treegraft.core.errors import ScheduleError
from treegraft.pipeline import Pipeline
from treegraft.policies.features import FEATURES_VERSION
from treegraft.scheduling.collect import Collector, PromptTrace
from treegraft.signature import difference, signature

__all__ = ["ARRAYS", "FORMAT", "VERSION", "TraceFolder", "Traces", "pipeline_signature"]

FORMAT, VERSION = "treegraft-schedule-trace", 1
_HEADER = "trace.json"

ARRAYS: dict[str, str] = {
    "position": "int32 [S], committed tokens when the step began",
    "n_left": "int32 [S], tokens of the text that were still to come",
    "step": "int32 [R], the row's step",
    "parent": "int32 [R], the row that this one continues by a layer; -1 for a step's first row",
    "action": "int8 [R], drafter that acted in the last layer; -1 for a step's first row",
    "layer": "int8 [R], layers carried out",
    "n_new": "int16 [R], tokens that the step commits if drafting stops here",
    "n_tree": "int16 [R], nodes that the target then reads, root included",
    "n_nodes": "int16 [R], nodes of the working tree",
    "widths": "int16 [R, 2], nodes in the forwards of the last layer's model (0: none)",
    "finish": "int16 [R, 2], drafter that the graft's last work calls (-1: none), and its nodes",
    "unread": "int8 [R, K], accepted nodes that a drafter which acted has not read",
    "described": "int32 [E], rows that have features, which are those that can be continued",
    "features": "float32 [E, F], before the next layer, in the order of the header's features",
    "text": "int32 [n], the recorded continuation of the prompt",
    "top_tokens": "int32 [n, k], the target's likeliest tokens at each of its places",
    "top_logprobs": "float16 [n, k], log p of these, in nats",
}
"""Names of the arrays of a prompt's file and what they hold. Rows number within the file."""


def pipeline_signature(pipeline: Pipeline) -> dict[str, Any]:
    """``signature`` of a pipeline that is built."""
    return signature(pipeline.config, pipeline.models)


def trace_header(
    pipeline: Pipeline, collector: Collector, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What a folder of traces says about itself; ``settings`` are those of the collection."""
    config = pipeline.config
    return {
        "format": FORMAT,
        "version": VERSION,
        "created_by": __version__,
        "signature": pipeline_signature(pipeline),
        "features_version": FEATURES_VERSION,
        "features": list(collector.feature_names),
        "sampling": config.sampling.model_dump(mode="json"),
        "stop": config.stop.model_dump(mode="json"),
        "settings": dict(settings),
    }


class TraceFolder:
    """A folder that is being filled, or was; files appear in it whole or not at all."""

    def __init__(self, path: str | Path, header: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.header = header

    @staticmethod
    def open(path: str | Path) -> TraceFolder:
        """A folder that is there; ScheduleError if it is none of ours."""
        folder = Path(path)
        file = folder / _HEADER
        try:
            header = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ScheduleError(
                f"traces {str(path)!r}: no {_HEADER}; make traces with: treegraft schedule collect"
            ) from None
        except OSError as error:
            raise ScheduleError(f"traces {str(path)!r} cannot be read: {error.strerror}") from None
        except ValueError:
            raise ScheduleError(f"traces {str(path)!r}: {_HEADER} is no valid JSON") from None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ScheduleError(f"traces {str(path)!r}: {_HEADER} does not say {FORMAT!r}")
        if header.get("version") != VERSION or header.get("features_version") != FEATURES_VERSION:
            raise ScheduleError(
                f"traces {str(path)!r} have version {header.get('version')} with features "
                f"{header.get('features_version')}, this treegraft reads {VERSION} with "
                f"{FEATURES_VERSION}; collect them again"
            )
        return TraceFolder(folder, header)

    @staticmethod
    def begin(path: str | Path, header: Mapping[str, Any]) -> TraceFolder:
        """Open a folder to fill; one that is there must have been begun with the same header."""
        folder = Path(path)
        if (folder / _HEADER).exists():
            found = TraceFolder.open(folder)
            wrong = difference(found.header, json.loads(json.dumps(dict(header))))
            if wrong is not None:
                raise ScheduleError(
                    f"--out {str(path)!r} holds traces made otherwise: {wrong}; name another folder"
                )
            return found
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ScheduleError(
                f"--out must be a new folder or one of traces, found {str(path)!r}, neither"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / _HEADER, json.dumps(dict(header), indent=1).encode())
        except OSError as error:
            raise ScheduleError(
                f"--out {str(path)!r} cannot be written: {error.strerror}"
            ) from None
        return TraceFolder(folder, header)

    def file(self, key: str) -> Path:
        """Where the trace of a prompt lies."""
        return self.path / f"{key[:32]}.safetensors"

    def __contains__(self, key: str) -> bool:
        return self.file(key).is_file()

    def add(self, trace: PromptTrace) -> None:
        """Write the trace of a prompt."""
        metadata = {
            "key": trace.key,
            "id": trace.id,
            "kind": trace.kind or "",
            "n_prompt": str(trace.n_prompt),
            "n_new": str(trace.n_new),
        }
        file = self.file(trace.key)
        arrays = {name: np.ascontiguousarray(a) for name, a in trace.arrays.items()}
        try:
            _write(file, save(arrays, metadata))
        except OSError as error:
            raise ScheduleError(
                f"trace {str(file)!r} cannot be written: {error.strerror}"
            ) from None

    def files(self) -> list[Path]:
        """Files of traces, by name."""
        return sorted(self.path.glob("*.safetensors"))

    def read(self) -> Iterator[PromptTrace]:
        """The traces, in the order of their keys."""
        for file in self.files():
            yield self._read(file)

    def _read(self, file: Path) -> PromptTrace:
        try:
            with safe_open(str(file), "numpy") as held:
                arrays = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
                said = held.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise ScheduleError(f"trace {str(file)!r} cannot be read: {error}") from None
        missing = [name for name in ARRAYS if name not in arrays]
        missing += [name for name in ("key", "id", "n_prompt", "n_new") if name not in said]
        if missing:
            raise ScheduleError(f"trace {str(file)!r} lacks {missing[0]}; delete it, collect again")
        n_features = len(self.header["features"])
        if arrays["features"].shape[1:] != (n_features,):
            raise ScheduleError(
                f"trace {str(file)!r} must have {n_features} features, found "
                f"{list(arrays['features'].shape)}; delete it and collect again"
            )
        if not np.isfinite(arrays["features"]).all():
            names = np.array(self.header["features"])
            broken = names[~np.isfinite(arrays["features"]).all(0)]
            raise ScheduleError(
                f"trace {str(file)!r} has features that are not finite, found {broken[0]}; delete "
                "it and collect again"
            )
        return PromptTrace(
            said["key"],
            said["id"],
            said.get("kind") or None,
            int(said["n_prompt"]),
            int(said["n_new"]),
            arrays,
        )


@dataclass(frozen=True, slots=True)
class Traces:
    """The rows of several prompts together; row and step numbers run through all of them.

    Attributes
    ----------
    header : of the folder. prompts : without their arrays. prompt : int32 [S], prompt of each step.
    arrays : as in ``ARRAYS``, without the text's own.
    digest : SHA-256 over the keys of the prompts and their rows.
    """

    header: Mapping[str, Any]
    prompts: tuple[PromptTrace, ...]
    prompt: NDArray[np.int32]
    arrays: dict[str, NDArray[Any]]
    digest: str

    @staticmethod
    def load(path: str | Path) -> Traces:
        """All traces of a folder; ScheduleError if it holds no step."""
        folder = TraceFolder.open(path)
        traces = [trace for trace in folder.read() if trace.n_steps]
        if not traces:
            raise ScheduleError(f"traces {str(path)!r} hold no step to learn from")
        return Traces.join(folder.header, traces)

    @staticmethod
    def join(header: Mapping[str, Any], traces: Sequence[PromptTrace]) -> Traces:
        """Put traces of one folder together."""
        digest = hashlib.sha256()
        parts: dict[str, list[NDArray[Any]]] = {}
        n_rows = n_steps = 0
        owners: list[NDArray[np.int32]] = []
        for number, trace in enumerate(traces):
            arrays = trace.arrays
            shift = {"step": n_steps, "described": n_rows}
            for name in ARRAYS:
                if name.startswith("top_") or name == "text":
                    continue
                values = arrays[name]
                digest.update(f"{trace.key} {name}".encode())
                digest.update(np.ascontiguousarray(values).tobytes())
                if name in shift:
                    values = values + shift[name]
                elif name == "parent":
                    values = np.where(values >= 0, values + n_rows, -1)
                parts.setdefault(name, []).append(values)
            owners.append(np.full(trace.n_steps, number, dtype=np.int32))
            n_steps += trace.n_steps
            n_rows += arrays["step"].shape[0]
        bare = tuple(PromptTrace(t.key, t.id, t.kind, t.n_prompt, t.n_new, {}) for t in traces)
        joined = {name: np.concatenate(values) for name, values in parts.items()}
        return Traces(header, bare, np.concatenate(owners), joined, digest.hexdigest())

    @property
    def n_steps(self) -> int:
        """Steps from which schedules were evaluated."""
        return int(self.prompt.shape[0])

    @property
    def n_drafters(self) -> int:
        """Drafters of the pipeline (K)."""
        return int(self.arrays["unread"].shape[1])


def _write(file: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    os.replace(partial, file)
