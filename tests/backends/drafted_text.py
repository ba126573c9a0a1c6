"""Pipelines over models of the matrix, and what to look at in them afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from backends.draft_trees import prefill
from transformers import PreTrainedModel

from treegraft.backends.hf import HFLanguageModel
from treegraft.config import parse_config
from treegraft.pipeline import Pipeline, build_pipeline

LAYERED = {"kind": "layered", "depth": 4, "width": 4, "budget": 20}


def pipelines(
    target: PreTrainedModel,
    drafters: dict[str, PreTrainedModel],
    calls: Sequence[str],
    n_new: int,
    builder: dict[str, Any] = LAYERED,
) -> tuple[Pipeline, Pipeline]:
    """Plain decoding, and drafting by look-ups and ``drafters`` as ``calls`` says, cheapest first."""
    models = {"target": HFLanguageModel(target, name="target")}
    for name, model in drafters.items():
        models[name] = HFLanguageModel(model, name=name, self_test=False)
    config: dict[str, Any] = {
        "target": {"model": "target"},
        "builder": builder,
        "sampling": {"seed": 5},
        "stop": {"max_new_tokens": n_new, "eos": []},
    }
    drafting = {
        "drafters": [{"kind": "ngram"}, *({"kind": "lm", "model": name} for name in drafters)],
        "scheduler": {"kind": "fixed", "calls": list(calls)},
    }
    plain = build_pipeline(parse_config(config), models)
    return plain, build_pipeline(parse_config(config | drafting), models)


def by_transformers(model: PreTrainedModel, prompt: Sequence[int], n_new: int) -> list[int]:
    """Greedy tokens of ``generate`` with transformers' own cache; no id ends the text."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n_new,
            do_sample=False,
            pad_token_id=0,
        )
    return text[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@contextmanager
def rows_moved() -> Iterator[Counter[str]]:
    """Counts, by the model's name, the KV rows that commits moved in here."""
    moved: Counter[str] = Counter()
    move = HFLanguageModel.move_

    def counting(self: HFLanguageModel, cache: Any, source: Any, target: Any) -> None:
        moved[self.name] += len(source)
        move(self, cache, source, target)

    HFLanguageModel.move_ = counting  # type: ignore[method-assign]
    try:
        yield moved
    finally:
        HFLanguageModel.move_ = move  # type: ignore[method-assign]


def lm_drafters(pipeline: Pipeline) -> dict[str, Any]:
    """The ``LmDrafter``s of a pipeline by name, without the guard around them."""
    guarded = zip(pipeline.drafter_names, pipeline._parts.drafters, strict=True)
    inner = {name: drafter._drafter for name, drafter in guarded}  # type: ignore[attr-defined]
    return {name: drafter for name, drafter in inner.items() if hasattr(drafter, "_model")}


def kv_error(model: HFLanguageModel, cache: Any, text: Sequence[int]) -> float:
    """How far the first rows of ``cache`` are from a causal prefill of ``text``, which they hold.

    Largest difference over keys and values of all layers, relative to the layer's largest.
    """
    fresh = model.new_cache(len(text))
    prefill(model, fresh, torch.tensor(list(text)))
    if cache.positions is not None:
        assert cache.positions[: len(text)].tolist() == list(range(len(text)))
    errors = []
    for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            a, b = a[:, :, : len(text)], b[:, :, : len(text)]
            errors.append(float((a - b).abs().max() / b.abs().max()))
    return max(errors)


def drafter_kv_error(drafter: Any) -> float:
    """``kv_error`` of what an ``LmDrafter`` has read of the text; 0 if nothing."""
    text = drafter._text[: drafter._n_kv]
    return kv_error(drafter._model._model, drafter._cache, text) if text else 0.0


def target_kv_error(pipeline: Pipeline, text: Sequence[int]) -> float:
    """``kv_error`` of the target: ``text`` without the last token, which it has not read."""
    assert isinstance(pipeline.target, HFLanguageModel)
    return kv_error(pipeline.target, pipeline._cache.content, text)
