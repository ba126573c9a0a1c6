"""Where the seconds of a decoding step go, and how near they are to what the forwards alone take.

Every forward that a step asked for is run again, bare (bare.py), right after the step, so that a
busy machine slows both alike. The *share of the physical limit* is the sum of the bare forwards
over the sum of the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treegraft.bench.bare import BareForwards, Forward, ForwardLog
from treegraft.config import PipelineConfig
from treegraft.core.errors import PromptError
from treegraft.core.language_model import LanguageModel
from treegraft.core.stats import StepRecord
from treegraft.core.stopwatch import FORWARD
from treegraft.loading import Loader
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.drafters.lm import LmConfig

__all__ = ["Profile", "ProfiledStep", "profile_texts"]

TARGET = "target"
_WARM_UP_STEPS = 2
"""Steps of the first text that are decoded first and not counted, because first calls are slow."""


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """One step: its record, and the forwards it asked for with the bare seconds of each."""

    record: StepRecord
    forwards: tuple[tuple[Forward, float], ...]

    @property
    def seconds(self) -> float:
        """Wall time of the step."""
        return sum(self.record.seconds.values())

    @property
    def bare_seconds(self) -> float:
        """What its forwards take alone."""
        return sum(seconds for _, seconds in self.forwards)


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured.

    Attributes
    ----------
    steps : in order, at least one. models : ``target`` and the drafters that are models.
    prefill_seconds, prefill_bare_seconds : reading the prompts, and its bare forwards.
    n_texts : prompts decoded. threads : of torch.
    """

    steps: tuple[ProfiledStep, ...]
    models: tuple[str, ...]
    prefill_seconds: float
    prefill_bare_seconds: float
    n_texts: int
    threads: int

    @property
    def share(self) -> float:
        """Share of the physical limit, over all steps."""
        return sum(s.bare_seconds for s in self.steps) / sum(s.seconds for s in self.steps)

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Mean seconds of a step by stage (``core.stats.DEFINITIONS``); they add up to the step."""
        stages: dict[str, float] = {}
        for step in self.steps:
            for stage, seconds in step.record.seconds.items():
                stages[stage] = stages.get(stage, 0.0) + seconds
        return {stage: seconds / len(self.steps) for stage, seconds in sorted(stages.items())}

    def as_dict(self) -> dict[str, Any]:
        """The figures as ``treegraft bench profile --json`` prints them; docs/bench.md."""
        n = len(self.steps)
        shares = [step.bare_seconds / max(step.seconds, 1e-9) for step in self.steps]
        low, median, high = np.quantile(shares, (0.1, 0.5, 0.9)).tolist()
        stages = self.stage_seconds
        return {
            "steps": n,
            "texts": self.n_texts,
            "threads": self.threads,
            "new_tokens": sum(step.record.n_new for step in self.steps),
            "seconds_per_step": sum(step.seconds for step in self.steps) / n,
            "bare_seconds_per_step": sum(step.bare_seconds for step in self.steps) / n,
            "physical_limit_share": self.share,
            "share_of_steps": {"median": median, "low": low, "high": high},
            "stages": stages,
            "forwards": {name: self._forwards(name, stages) for name in self.models},
            "prefill": {
                "seconds": self.prefill_seconds,
                "bare_seconds": self.prefill_bare_seconds,
            },
        }

    def _forwards(self, model: str, stages: Mapping[str, float]) -> dict[str, float]:
        asked = [(f, s) for step in self.steps for f, s in step.forwards if f.model == model]
        n = len(self.steps)
        return {
            "per_step": len(asked) / n,
            "tokens_per_forward": sum(f.n for f, _ in asked) / max(len(asked), 1),
            "stage_seconds_per_step": stages.get(
                TARGET if model == TARGET else FORWARD + model, 0.0
            ),
            "bare_seconds_per_step": sum(seconds for _, seconds in asked) / n,
        }


def profile_texts(
    config: PipelineConfig,
    prompts: Sequence[str | Sequence[int]],
    models: Mapping[str, LanguageModel] | None = None,
    loader: Loader | None = None,
    on_text: Callable[[Profile], None] | None = None,
    **overrides: Any,
) -> Profile:
    """Decode ``prompts`` with ``config`` and take every step apart.

    Parameters
    ----------
    prompts : at least one; the first is begun once before anything is counted.
    models, loader : as for ``build_pipeline``.
    on_text : called with what was measured so far after each prompt, for progress.
    overrides : of ``config.sampling`` and ``config.stop``, as for ``Pipeline.generate``.
    """
    if not prompts:
        raise PromptError("a profile needs at least one prompt, found none")
    loader = loader or Loader(config.backend, dict(models or {}))
    pipeline = build_pipeline(config, loader=loader)
    timed = {TARGET: pipeline.target}
    for name, drafter in zip(config.drafter_names, config.drafters, strict=True):
        if isinstance(drafter, LmConfig):
            timed[name] = pipeline.models[drafter.model]
    texts = [pipeline.encode(prompt) for prompt in prompts]
    bare = BareForwards(timed)
    steps: list[ProfiledStep] = []
    prefill = prefill_bare = 0.0
    profile: Profile | None = None
    with ForwardLog(timed) as log:
        _measure(pipeline, texts[0], log, bare, overrides, n_steps=_WARM_UP_STEPS)
        for number, text in enumerate(texts, 1):
            found, seconds, bare_seconds = _measure(pipeline, text, log, bare, overrides)
            steps += found
            prefill += seconds
            prefill_bare += bare_seconds
            profile = Profile(
                tuple(steps), tuple(timed), prefill, prefill_bare, number, torch.get_num_threads()
            )
            if on_text is not None:
                on_text(profile)
    assert profile is not None
    return profile


def _measure(
    pipeline: Pipeline,
    text: Sequence[int],
    log: ForwardLog,
    bare: BareForwards,
    overrides: Mapping[str, Any],
    n_steps: int | None = None,
) -> tuple[list[ProfiledStep], float, float]:
    """The steps of one text (at most ``n_steps``), its prefill's seconds, and those bare."""
    steps: list[ProfiledStep] = []
    prefill = prefill_bare = 0.0
    log.take()
    for chunk in pipeline.stream(text, **overrides):
        asked = log.take()
        if not steps:
            # The target reads the prompt before the drafters act, and the tree after them.
            by_target = [i for i, forward in enumerate(asked) if forward.model == TARGET]
            reading = asked[: by_target[-1]] if len(by_target) > 1 else []
            first = [forward for forward in reading if forward.model == TARGET]
            prefill_bare = sum(bare.seconds(forward) for forward in first)
            asked = asked[len(first) :]
        steps.append(ProfiledStep(chunk.step, tuple((f, bare.seconds(f)) for f in asked)))
        if chunk.generation is not None:
            prefill = sum(chunk.generation.prefill.values())
        if n_steps is not None and len(steps) == n_steps:
            break
    return steps, prefill, prefill_bare
