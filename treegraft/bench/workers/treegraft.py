"""Our own pipelines, in a process like every peer's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, final

import torch

from treegraft import __version__
from treegraft.bench.profile import profile_texts
from treegraft.bench.workers.serving import Family, Setup, Task
from treegraft.config import PipelineConfig, parse_config
from treegraft.loading import Loader
from treegraft.pipeline import Pipeline, build_pipeline

__all__ = ["FAMILY"]


@final
class TreegraftFamily(Family):
    """Method ``pipeline``; its option ``config`` is a whole pipeline config."""

    def open(self, setup: Setup) -> Mapping[str, Any]:
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        self._pipelines: dict[str, Pipeline] = {}
        self._loaders: dict[str, Loader] = {}
        versions = {name: version(name) for name in ("torch", "transformers")}
        return {
            "versions": {"treegraft": __version__, **versions},
            "threads": torch.get_num_threads(),
        }

    def _loader(self, config: PipelineConfig) -> Loader:
        """Pipelines of the same backend settings share what is loaded."""
        key = config.backend.model_dump_json()
        return self._loaders.setdefault(key, Loader(config.backend, {}))

    def prepare(self, method: str, options: Mapping[str, Any], task: Task) -> Callable[[], Any]:
        if method != "pipeline":
            raise ValueError(f"unknown method {method!r}")
        key = json.dumps(options["config"], sort_keys=True)
        if key not in self._pipelines:
            config = parse_config(options["config"])
            self._pipelines[key] = build_pipeline(config, loader=self._loader(config))
        pipeline = self._pipelines[key]
        return lambda: pipeline.generate(task.ids, **_settings(task)).tokens

    def profile(self, options: Mapping[str, Any], task: Task) -> Mapping[str, Any]:
        config = parse_config(options["config"])
        result = profile_texts(config, [task.ids], loader=self._loader(config), **_settings(task))
        return result.as_dict()


def _settings(task: Task) -> dict[str, Any]:
    return {
        "max_new_tokens": task.max_new_tokens,
        "temperature": task.temperature,
        "seed": task.seed,
        "eos": tuple(task.eos),
    }


FAMILY = TreegraftFamily
