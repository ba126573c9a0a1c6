"""Collects the traces of many prompts into a folder, here or on a Ray cluster."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any, final

from treegraft.config import PipelineConfig, parse_config
from treegraft.core.errors import ConfigError, PromptError, ScheduleError
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.prompts import Prompt
from treegraft.scheduling.collect import Collector, PromptTrace, prompt_key
from treegraft.scheduling.collectable import check_collectable
from treegraft.scheduling.traces import TraceFolder, trace_header

__all__ = ["Collection", "CollectionReport"]


@dataclass(frozen=True, slots=True)
class CollectionReport:
    """What a run of collecting brought.

    ``skipped`` : prompts without a step, and why. ``rate`` : steps evaluated per second.
    """

    n_prompts: int
    n_steps: int
    n_rows: int
    seconds: float
    skipped: tuple[str, ...]

    @property
    def rate(self) -> float:
        return self.n_steps / max(self.seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "prompts": self.n_prompts,
            "steps": self.n_steps,
            "schedules": self.n_rows,
            "seconds": self.seconds,
            "steps_per_second": self.rate,
            "skipped": list(self.skipped),
        }


@final
class Collection:
    """Traces of one config in one folder.

    Raises ConfigError or ScheduleError if the config cannot be evaluated offline, or the folder
    holds something else.
    """

    def __init__(
        self,
        config: PipelineConfig,
        out: str | Path,
        every: int = 4,
        beam: int = 24,
        seed: int = 0,
        pipeline: Pipeline | None = None,
    ) -> None:
        check_collectable(config)
        self._config = config
        self._settings = {"every": every, "beam": beam, "seed": seed}
        self._pipeline = pipeline or build_pipeline(config)
        self._collector = Collector(self._pipeline, **self._settings, own_noise=True)
        said: dict[str, Any] = dict(self._settings)
        if config.sampling.temperature > 0.0:
            said["noise"] = "by prompt"
        header = trace_header(self._pipeline, self._collector, said)
        self.folder = TraceFolder.begin(out, header)

    def missing(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts that have no trace yet, each text once.

        PromptError for what cannot be read.
        """
        found: dict[str, Prompt] = {}
        for prompt in prompts:
            try:
                key = prompt_key(self._pipeline.encode(prompt.content))
            except PromptError as error:
                raise PromptError(f"prompt {prompt.id!r}: {error}") from None
            if key not in self.folder:
                found.setdefault(key, prompt)
        return list(found.values())

    def run(
        self,
        prompts: Sequence[Prompt],
        ray: str | None = None,
        on_prompt: Callable[[object], None] | None = None,
    ) -> CollectionReport:
        """Collect ``prompts`` into the folder.

        Parameters
        ----------
        ray : address of a cluster or "auto"; its workers load the models themselves.
        on_prompt : called after each, for progress.
        """
        start = perf_counter()
        n_steps = n_rows = 0
        skipped: list[str] = []
        traces = self._here(prompts) if ray is None else self._there(prompts, ray)
        for trace in traces:
            self.folder.add(trace)
            n_steps += trace.n_steps
            n_rows += trace.arrays["step"].shape[0]
            if not trace.n_steps:
                skipped.append(f"prompt {trace.id!r}: its text ends at once, nothing to schedule")
            if on_prompt is not None:
                on_prompt(trace)
        seconds = perf_counter() - start
        return CollectionReport(len(prompts), n_steps, n_rows, seconds, tuple(skipped))

    def _here(self, prompts: Sequence[Prompt]) -> Iterator[PromptTrace]:
        for prompt in prompts:
            yield self._collector.collect(prompt.content, prompt.id, prompt.kind)

    def _there(self, prompts: Sequence[Prompt], address: str) -> Iterator[PromptTrace]:
        """One task per prompt; a task whose worker is lost is run again elsewhere."""
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError:
            raise ConfigError(
                "--ray needs the package ray, which is not installed; install treegraft[ray]"
            ) from None
        if not ray.is_initialized():
            try:
                ray.init(address=None if address == "local" else address, log_to_driver=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ConfigError(f"--ray {address!r} cannot be reached: {reason}") from None
        task = ray.remote(num_cpus=1, max_retries=-1)(_collect_remotely)
        # JSON, so that two workers agree on whether they hold this pipeline already.
        config = self._config.model_dump_json()
        waiting = [
            task.remote(config, tuple(self._settings.items()), p.content, p.id, p.kind)
            for p in prompts
        ]
        while waiting:
            (done,), waiting = ray.wait(waiting, num_returns=1)
            try:
                yield ray.get(done)
            except ray.exceptions.RayError as error:
                reason = " ".join(str(error).split())[-300:]
                raise ScheduleError(f"--ray: a prompt could not be collected: {reason}") from None


@lru_cache(maxsize=1)
def _worker(config: str, settings: tuple[tuple[str, int], ...]) -> Collector:
    """The collector of a worker's process, built with its first prompt."""
    import json

    import torch

    # A worker has one core; more threads than that wait for each other.
    torch.set_num_threads(1)
    pipeline = build_pipeline(parse_config(json.loads(config)))
    return Collector(pipeline, **dict(settings), own_noise=True)


def _collect_remotely(
    config: str,
    settings: tuple[tuple[str, int], ...],
    content: str | tuple[int, ...],
    id: str,
    kind: str | None,
) -> PromptTrace:
    return _worker(config, settings).collect(content, id, kind)
