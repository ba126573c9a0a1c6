"""The package flashspec (0.3): its engine with a draft model, look-up, or both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, final

import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel
from transformers import AutoModelForCausalLM

from treegraft.bench.workers.serving import Family, Setup, Task

__all__ = ["FAMILY"]


@final
class FlashspecFamily(Family):
    """Methods: ``draft_model``, ``lookup`` (options: ``gamma``) and ``composite``
    (options: ``drafter_strategy``; without, flashspec's own default).
    """

    def open(self, setup: Setup) -> Mapping[str, Any]:
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        self._setup = setup
        self._device = torch.device(setup.device)
        self._dtype = getattr(torch, setup.dtype)
        self._target = TargetModel(
            setup.target, self._device, self._dtype, model=self._load(setup.target)
        )
        self._drafter: Any = None
        self._engines: dict[str, Any] = {}
        names = ("flashspec", "torch", "transformers")
        return {"versions": {name: version(name) for name in names}}

    def _load(self, source: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=self._dtype)
        return model.to(self._device).eval()

    def prepare(self, method: str, options: Mapping[str, Any], task: Task) -> Callable[[], Any]:
        key = json.dumps([method, dict(options), task.temperature, task.seed, task.eos])
        if key not in self._engines:
            self._engines[key] = self._engine(method, options, task)
        engine = self._engines[key]
        if self._drafter is not None:
            self._drafter.set_temperature(task.temperature)
        ids = torch.tensor([task.ids], device=self._device)

        def generate() -> list[int]:
            result = engine.generate(ids, max_new_tokens=task.max_new_tokens)
            new: list[int] = result.output_ids[0, : result.n_tokens_generated].tolist()
            return new

        return generate

    def _engine(self, method: str, options: Mapping[str, Any], task: Task) -> Any:
        sampling: dict[str, Any] = {"temperature": task.temperature, "seed": task.seed}
        settings: dict[str, Any] = {}
        if method == "composite":
            settings = dict(options)
        elif method in ("draft_model", "lookup"):
            sampling |= options
            settings = {"drafter_strategy": "bandit", "bandit": BanditConfig(n_arms=1)}
        else:
            raise ValueError(f"unknown method {method!r}")
        config = FlashSpecConfig(
            device=self._setup.device,
            dtype=self._setup.dtype,
            eos_token_ids=tuple(task.eos),
            sampling=SamplingConfig(**sampling),
            **settings,
        )
        drafter = NgramDrafter() if method == "lookup" else self._model_drafter(method)
        return SpeculativeEngine(config, [drafter], self._target)

    def _model_drafter(self, method: str) -> Any:
        source = self._setup.drafter
        if source is None:
            raise ValueError(f"{method} needs a drafter that is a model, found none")
        if self._drafter is None:
            self._drafter = HuggingFaceDrafter(
                source, self._device, self._dtype, model=self._load(source)
            )
        return self._drafter


FAMILY = FlashspecFamily
