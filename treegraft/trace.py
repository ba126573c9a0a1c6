"""The trace of a run: one line of JSON per step, so that a draft tree can be looked at afterwards.

Layout: docs/trace.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from pydantic import BaseModel
from torch import Tensor

from treegraft import __version__
from treegraft.config import override
from treegraft.core.stats import NODE_COUNTS
from treegraft.core.tree import TokenTree
from treegraft.drafting import Layer
from treegraft.pipeline import Chunk, LogitsProcessor, Pipeline

__all__ = ["TRACE_VERSION", "TraceWriter"]

TRACE_VERSION = 1
"""Of the layout in docs/trace.md; it grows when a key goes or changes meaning."""


class TraceWriter:
    """Decodes with a pipeline and writes what each step drafted, decided and took.

    The header is written at once, and each step's line before its chunk is handed on; a line is
    flushed as a whole, so that whatever ends the run leaves whole lines.

    Parameters
    ----------
    pipeline : what decodes. file : text file open for writing; the caller closes it.
    """

    def __init__(self, pipeline: Pipeline, file: TextIO) -> None:
        self._pipeline = pipeline
        self._file = file
        self._n_texts = 0
        shape = {name: getattr(pipeline.builder, name) for name in ("depth", "width", "budget")}
        self._write(
            {
                "trace": "treegraft",
                "version": TRACE_VERSION,
                "treegraft": __version__,
                "drafters": list(pipeline.drafter_names),
                "shape": shape,
                "config": _plain(pipeline.config),
            }
        )

    def stream(
        self,
        prompt: str | Sequence[int],
        name: str | None = None,
        *,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None = None,
        **overrides: Any,
    ) -> Iterator[Chunk]:
        """``Pipeline.stream``, traced; ``name`` stands in the lines as the text's id."""
        pipeline = self._pipeline
        chunks = pipeline.stream(
            prompt,
            logits_processor=logits_processor,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            **overrides,
        )
        begin: dict[str, Any] = {"prompt": pipeline.encode(prompt)}
        if overrides:
            config = override(pipeline.config, overrides)
            begin["overrides"] = {
                room: _plain(getattr(config, room)) for room in ("sampling", "stop")
            }
        own = [*(logits_processor or ()), prefix_allowed_tokens_fn]
        names = [getattr(p, "__name__", type(p).__name__) for p in own if p is not None]
        if names:
            begin["processors"] = names
        number = self._n_texts
        self._n_texts += 1
        return self._follow(chunks, {"text": number, "id": name}, begin)

    def _follow(
        self, chunks: Iterator[Chunk], of_text: dict[str, Any], begin: dict[str, Any]
    ) -> Iterator[Chunk]:
        n_text = len(begin["prompt"])
        for step, chunk in enumerate(chunks):
            line = of_text | {"step": step, "n_text": n_text} | (begin if step == 0 else {})
            self._write(line | self._step(chunk))
            n_text += len(chunk.tokens)
            yield chunk

    def _step(self, chunk: Chunk) -> dict[str, Any]:
        record, names = chunk.step, self._pipeline.drafter_names
        path = list(chunk.path)
        bonus = chunk.tokens[len(path)] if len(chunk.tokens) > len(path) else None
        generation = chunk.generation
        end = {}
        if generation is not None:
            end = {
                "finish_reason": generation.finish_reason,
                "notices": list(generation.notices),
                "prefill_seconds": generation.prefill,
            }
        return {
            "budget": self._pipeline.builder.budget,
            "layers": [_layer(layer) for layer in chunk.layers],
            "tree": _tree(chunk.tree, len(names)),
            "verdict": {"path": path, "tokens": chunk.tokens, "bonus": bonus},
            "counts": {
                count: dict(zip(names, getattr(record, count), strict=True))
                for count in NODE_COUNTS
            },
            "seconds": record.seconds,
            "decoded": chunk.text,
            **end,
        }

    def _write(self, line: dict[str, Any]) -> None:
        # ASCII, so that no encoding and no half of a surrogate pair can get in the way.
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


def _layer(layer: Layer) -> dict[str, Any]:
    touched = dict.fromkeys(node for node in layer.touched.tolist() if node >= 0)
    return {
        "chosen": layer.chosen,
        "drafter": layer.drafter,
        "riders": list(layer.riders),
        "frontier": layer.frontier.tolist(),
        "touched": list(touched),
        "n_nodes": layer.n_nodes,
        "seconds": layer.seconds,
    }


def _tree(tree: TokenTree, n_drafters: int) -> dict[str, list[Any]]:
    """Columns of the verified tree; what JSON cannot say (-inf) and nobody (-1) become null."""
    proposers = tree.proposers.tolist()
    return {
        "node": tree.node.tolist(),
        "token": tree.token.tolist(),
        "parent": tree.parent.tolist(),
        "depth": tree.depth.tolist(),
        "logprob": [value if math.isfinite(value) else None for value in tree.logprob.tolist()],
        "source": [i if i >= 0 else None for i in tree.source.tolist()],
        "scorer": [i if i >= 0 else None for i in tree.scorer.tolist()],
        "proposers": [[i for i in range(n_drafters) if held >> i & 1] for held in proposers],
    }


def _plain(value: Any) -> Any:
    """What JSON can say: numbers that are not finite by their names, unknown objects as text."""
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    if isinstance(value, Mapping):
        return {str(key): _plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(held) for held in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, str | int | float) else str(value)
