"""Several pipelines on the same prompts, interleaved: speed against the first, and equality.

Speeds drift (other processes, heat, clocks), so the pipelines take turns on every prompt, each at
every place of the order, and ratios are taken prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from treegraft.config import PipelineConfig
from treegraft.core.errors import ConfigError, TreegraftError
from treegraft.core.language_model import LanguageModel
from treegraft.core.stats import NODE_COUNTS, Generation, Statistics
from treegraft.loading import Loader
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.prompts import Prompt

__all__ = [
    "ArmSummary",
    "Comparison",
    "Difference",
    "Ratio",
    "Run",
    "build_pipelines",
    "check_comparable",
    "compare",
    "first_difference",
    "stage_seconds",
]

_WARM_UP_TOKENS = 16
_STAGES = ("prefill", "target", "drafters", "tree", "verify", "scheduler", "host")


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt decoded once by every arm; ``generations`` is keyed by arm."""

    prompt: Prompt
    repeat: int
    generations: Mapping[str, Generation]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an arm left the baseline.

    Attributes
    ----------
    prompt : its id. position : index among the new tokens, from 0.
    expected, found : the baseline's token there and this arm's; None where a text had ended.
    """

    prompt: str
    position: int
    expected: int | None
    found: int | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tokens per second of an arm over those of the baseline.

    Attributes
    ----------
    total : all new tokens over all seconds, against the same of the baseline.
    median, low, high : middle, 10th and 90th percentile of the ratios prompt by prompt.
    """

    total: float
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """The figures of one arm over all prompts; ``differences`` are against the baseline.

    ``same_law``: its texts and the baseline's have one law but need not have the same tokens, so
    there is nothing to compare.
    """

    name: str
    statistics: Statistics
    ratio: Ratio
    differences: tuple[Difference, ...]
    same_law: bool = False

    @property
    def identical(self) -> bool | None:
        """Whether every token equals the baseline's; None if that is not to be expected."""
        return None if self.same_law else not self.differences

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage, all drafters' summed under ``drafters``."""
        return stage_seconds(self.statistics)

    def as_dict(self, ratio_key: str) -> dict[str, Any]:
        """Plain numbers; ``ratio_key`` names the total ratio, such as ``ratio_to_plain``."""
        s = self.statistics
        return {
            "tokens_per_second": s.tokens_per_second,
            ratio_key: self.ratio.total,
            "ratio_median": self.ratio.median,
            "ratio_low": self.ratio.low,
            "ratio_high": self.ratio.high,
            "mean_accepted_length": s.mean_accepted_length,
            "new_tokens": s.new_tokens,
            "target_calls": s.target_calls,
            "identical": self.identical,
            "seconds": self.seconds,
            "overhead_share": s.overhead_share,
            "drafters": {
                name: {
                    "calls": s.calls[i],
                    "side_calls": s.side_calls[i],
                    "seconds": s.drafter_seconds[name],
                    **{count: getattr(s, count)[i] for count in NODE_COUNTS},
                    "accepted_by_depth": list(s.accepted_by_depth[i]),
                }
                for i, name in enumerate(s.drafters)
            },
            "tokens_per_second_decode": s.tokens_per_second_decode,
            "acceptance_by_depth": list(s.acceptance_by_depth),
            "reuse_rate": s.reuse_rate,
            "differences": [
                {
                    "prompt": d.prompt,
                    "position": d.position,
                    "expected": d.expected,
                    "found": d.found,
                }
                for d in self.differences
            ],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured; ``arms`` in the order given, the first is the baseline.

    ``same_law`` : arms whose tokens need not be the baseline's (``PipelineConfig.same_tokens``).
    """

    arms: tuple[str, ...]
    runs: tuple[Run, ...]
    same_law: frozenset[str] = frozenset()

    @property
    def n_prompts(self) -> int:
        """Prompts that were decoded."""
        return sum(run.repeat == 0 for run in self.runs)

    @property
    def kinds(self) -> dict[str, int]:
        """Kinds of the prompts, with how many prompts each has."""
        counts: dict[str, int] = {}
        for run in self.runs:
            if run.repeat == 0 and run.prompt.kind is not None:
                counts[run.prompt.kind] = counts.get(run.prompt.kind, 0) + 1
        return counts

    @property
    def identical(self) -> bool:
        """Whether every arm that must have emitted the baseline's tokens on every prompt did."""
        return all(not self.differences(arm) for arm in self.arms)

    def statistics(self, arm: str) -> Statistics:
        """Sums over all runs of an arm."""
        return Statistics.of([run.generations[arm] for run in self.runs])

    def ratio(self, arm: str, kind: str | None = None) -> Ratio:
        """Speed against the baseline, over all prompts or those of one kind."""
        runs = [run for run in self.runs if kind is None or run.prompt.kind == kind]
        by_prompt: dict[int, list[Run]] = {}
        place = -1
        for run in runs:
            place = place + 1 if run.repeat == 0 else place
            by_prompt.setdefault(place, []).append(run)
        each = [self._speed(group, arm) for group in by_prompt.values()]
        low, median, high = np.quantile(each, (0.1, 0.5, 0.9)).tolist()
        return Ratio(self._speed(runs, arm), median, low, high)

    def _speed(self, runs: Sequence[Run], arm: str) -> float:
        def tokens_per_second(name: str) -> float:
            return Statistics.of([run.generations[name] for run in runs]).tokens_per_second

        return tokens_per_second(arm) / max(tokens_per_second(self.arms[0]), 1e-9)

    def differences(self, arm: str) -> tuple[Difference, ...]:
        """The first difference of each run from the baseline's first run on the same prompt.

        None for arms of ``same_law``.
        """
        found: list[Difference] = []
        if arm in self.same_law:
            return ()
        expected: list[int] = []
        for run in self.runs:
            if run.repeat == 0:
                expected = run.generations[self.arms[0]].tokens
            tokens = run.generations[arm].tokens
            position = first_difference(expected, tokens)
            if position is not None:
                here, there = (_token(t, position) for t in (expected, tokens))
                found.append(Difference(run.prompt.id, position, here, there))
        return tuple(found)

    def summary(self, arm: str) -> ArmSummary:
        """Everything about one arm."""
        differences = self.differences(arm)
        return ArmSummary(
            arm, self.statistics(arm), self.ratio(arm), differences, arm in self.same_law
        )

    def summaries(self) -> list[ArmSummary]:
        """Everything about every arm, in order."""
        return [self.summary(arm) for arm in self.arms]


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing in one of the two, or None."""
    for position in range(max(len(expected), len(found))):
        if _token(expected, position) != _token(found, position):
            return position
    return None


def _token(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def stage_seconds(statistics: Statistics) -> dict[str, float]:
    """Seconds by stage with all drafters' summed; the values add up to the total."""
    seconds = {stage: statistics.seconds.get(stage, 0.0) for stage in _STAGES}
    seconds["drafters"] = sum(statistics.drafter_seconds.values())
    return seconds


def build_pipelines(
    configs: Mapping[str, PipelineConfig],
    models: Mapping[str, LanguageModel] | None = None,
    on_compile: Callable[[str, int, int], None] | None = None,
) -> dict[str, Pipeline]:
    """Build one pipeline per config; those with the same dtype and device share loaded models.

    ``models`` : models that are already loaded, and ``on_compile``, as for ``build_pipeline``.
    """
    loaders: dict[tuple[str, str, str], Loader] = {}
    pipelines = {}
    for name, config in configs.items():
        backend = config.backend
        key = (backend.dtype, backend.device, backend.attention)
        loader = loaders.setdefault(key, Loader(backend, dict(models or {})))
        pipelines[name] = build_pipeline(config, loader=loader, on_compile=on_compile)
    return pipelines


def check_comparable(configs: Mapping[str, PipelineConfig]) -> None:
    """ConfigError unless all configs ask for the same text: same target, sampling and stop."""
    (first, reference), *others = configs.items()
    for name, config in others:
        for room in ("target", "sampling", "stop"):
            expected = getattr(reference, room).model_dump()
            for option, value in getattr(config, room).model_dump().items():
                if value != expected[option]:
                    raise ConfigError(
                        f"configs must share target, sampling and stop: {room}.{option} is "
                        f"{expected[option]!r} in {first} and {value!r} in {name}"
                    )


def compare(
    pipelines: Mapping[str, Pipeline],
    prompts: Sequence[Prompt],
    repeat: int = 1,
    max_new_tokens: int | None = None,
    max_seconds: float | None = None,
    on_run: Callable[[Run], None] | None = None,
) -> Comparison:
    """Decode every prompt with every pipeline, in turns.

    Parameters
    ----------
    pipelines : by name; the first is the baseline. Two or more make a comparison.
    prompts : at least one. Pipelines are warmed up on the first, which is not counted.
    repeat : how often each prompt is decoded by each pipeline.
    max_new_tokens : instead of what the configs say.
    max_seconds : begin no further prompt after so many seconds; the first is always decoded.
    on_run : called after each prompt and repeat, for progress.
    """
    if not prompts:
        raise TreegraftError("a comparison needs at least one prompt, found none")
    names = tuple(pipelines)
    settings = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    for pipeline in pipelines.values():
        n_warm_up = min(_WARM_UP_TOKENS, max_new_tokens or pipeline.config.stop.max_new_tokens)
        pipeline.generate(prompts[0].content, max_new_tokens=n_warm_up, min_new_tokens=0)
    runs: list[Run] = []
    start = perf_counter()
    for i, prompt in enumerate(prompts):
        if i and max_seconds is not None and perf_counter() - start > max_seconds:
            break
        for r in range(repeat):
            first = (i + r) % len(names)
            order = names[first:] + names[:first]
            generations = {
                name: pipelines[name].generate(prompt.content, **settings) for name in order
            }
            runs.append(Run(prompt, r, {name: generations[name] for name in names}))
            if on_run is not None:
                on_run(runs[-1])
    exact = {name: pipeline.config.same_tokens for name, pipeline in pipelines.items()}
    other = {name for name in names[1:] if not (exact[name] and exact[names[0]])}
    return Comparison(names, tuple(runs), frozenset(other))
