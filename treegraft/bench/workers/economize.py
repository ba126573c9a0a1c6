"""The package economize (0.3): draft model, look-up, and both, through its ``decode``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, final

import economize
import torch
from economize.techniques.draft_model import DraftModelConfig
from economize.techniques.hybrid import HybridConfig
from economize.techniques.lookup import LookupConfig
from transformers import AutoModelForCausalLM

from treegraft.bench.workers.serving import Family, Setup, Task

__all__ = ["FAMILY"]


@final
class EconomizeFamily(Family):
    """Methods: ``draft_model``, ``lookup``, ``hybrid``; options are those of its DecodeConfig."""

    def open(self, setup: Setup) -> Mapping[str, Any]:
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        self._setup = setup
        self._models: dict[str, Any] = {}
        names = ("economize", "torch", "transformers")
        return {"versions": {name: version(name) for name in names}}

    def _model(self, method: str) -> Any:
        """The target with one technique attached; each has a target of its own."""
        if method not in self._models:
            drafter = self._setup.drafter
            if method != "lookup" and drafter is None:
                raise ValueError(f"{method} needs a drafter that is a model, found none")
            if method == "lookup":
                technique = LookupConfig()
            else:
                technique = DraftModelConfig(model=drafter)
                if method == "hybrid":
                    technique = HybridConfig(fallback=technique)
            dtype = getattr(torch, self._setup.dtype)
            base = AutoModelForCausalLM.from_pretrained(self._setup.target, dtype=dtype)
            self._models[method] = economize.apply(base.to(self._setup.device).eval(), technique)
        return self._models[method]

    def prepare(self, method: str, options: Mapping[str, Any], task: Task) -> Callable[[], Any]:
        if method not in ("draft_model", "lookup", "hybrid"):
            raise ValueError(f"unknown method {method!r}")
        model = self._model(method)
        ids = torch.tensor(task.ids, device=self._setup.device)
        selector, settings = None, dict(options)
        if task.temperature > 0.0:
            selector = economize.TopPSampler(temperature=task.temperature, seed=task.seed)
            settings["verifier"] = "rejection"
        if self._setup.device.startswith("cuda"):
            settings.setdefault("cuda_graphs", True)
        decoding = economize.DecodeConfig(**settings)

        def decode() -> list[int]:
            result = model.decode(
                ids,
                task.max_new_tokens,
                decoding=decoding,
                selector=selector,
                stop=task.eos or None,
            )
            new: list[int] = result.tokens.tolist()
            return new

        return decode


FAMILY = EconomizeFamily
