"""transformers' own ``generate``: eager, compiled, assisted, prompt look-up.

The generation settings that come with a checkpoint are set aside, as treegraft does: what is
decoded is asked for here. Calls return ids on the host, so their time includes work on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, final

import torch
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig

from treegraft.bench.workers.serving import Family, Setup, Task

__all__ = ["FAMILY"]


@final
class TransformersFamily(Family):
    """Methods: ``generate``, ``compiled``, ``assisted`` and ``lookup``.

    Options of ``assisted``: those of the assistant's generation config (``num_assistant_tokens``,
    ``num_assistant_tokens_schedule``, ``assistant_confidence_threshold``); none are transformers'
    defaults. Option of ``lookup``: ``prompt_lookup_num_tokens``.
    """

    def open(self, setup: Setup) -> Mapping[str, Any]:
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        self._setup = setup
        self._target = self._load(setup.target)
        self._drafter: Any = None
        return {"versions": {name: version(name) for name in ("torch", "transformers")}}

    def _load(self, source: str) -> Any:
        dtype = getattr(torch, self._setup.dtype)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        model = model.to(self._setup.device).eval()
        model.generation_config = GenerationConfig()
        return model

    def prepare(self, method: str, options: Mapping[str, Any], task: Task) -> Callable[[], Any]:
        ids = torch.tensor([task.ids], device=self._setup.device)
        settings: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": task.max_new_tokens,
            "do_sample": task.temperature > 0.0,
            "eos_token_id": task.eos or None,
            "pad_token_id": task.eos[0] if task.eos else 0,
        }
        if task.temperature > 0.0:
            settings |= {"temperature": task.temperature, "top_k": 0, "top_p": 1.0}
        settings |= self._settings(method, options)

        def generate() -> list[int]:
            torch.manual_seed(task.seed)
            new: list[int] = self._target.generate(ids, **settings)[0, ids.shape[1] :].tolist()
            return new

        return generate

    def _settings(self, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
        if method == "generate":
            return {}
        if method == "compiled":
            compiling = CompileConfig()
            # Off a GPU transformers compiles only when told so.
            compiling._compile_all_devices = True
            return {
                "cache_implementation": "static",
                "compile_config": compiling,
                # One size for all texts, or each length would be compiled anew.
                "max_cache_len": self._setup.longest,
            }
        if method == "lookup":
            return dict(options)
        if method == "assisted":
            if self._setup.drafter is None:
                raise ValueError("assisted generation needs a drafter that is a model, found none")
            if self._drafter is None:
                self._drafter = self._load(self._setup.drafter)
            # Anew for each text: transformers goes on with what it adapted in the last one.
            self._drafter.generation_config = GenerationConfig(**options)
            return {"assistant_model": self._drafter}
        raise ValueError(f"unknown method {method!r}")


FAMILY = TransformersFamily
