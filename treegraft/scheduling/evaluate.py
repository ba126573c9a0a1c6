"""Holds a fitted scheduler to account: real decoding against the endpoints, and the oracle offline.

Both sides use the same prompts, none of which it was fitted on. Real decoding says how fast it is;
the offline side says how much any scheduler could have gained, and how well the cost model predicts
what was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treegraft.backends.artefact import Artefact
from treegraft.backends.cost import CostModel
from treegraft.bench.comparison import Comparison, build_pipelines, compare
from treegraft.config import PipelineConfig, parse_config
from treegraft.core.errors import PromptError, ScheduleError
from treegraft.core.stats import Statistics
from treegraft.pipeline import Pipeline
from treegraft.policies.value import ValueNetwork
from treegraft.prompts import Prompt
from treegraft.scheduling.ceiling import BoostedPolicy, boost
from treegraft.scheduling.collect import Collector, prompt_key
from treegraft.scheduling.collectable import check_collectable
from treegraft.scheduling.economy import problem_of
from treegraft.scheduling.fit import policy_actions
from treegraft.scheduling.traces import Traces, trace_header
from treegraft.signature import difference

__all__ = [
    "ENDPOINTS",
    "PAPER",
    "VALUE",
    "Evaluation",
    "Offline",
    "arm_configs",
    "evaluate",
    "unseen",
]

PAPER: dict[str, Any] = {
    "builder": {"kind": "layered", "depth": 5, "width": 10, "budget": 63},
    "graft": {"kind": "treegraft", "lookback": 5, "revisit": True},
    "ride_along": [],
    "leftover": False,
}
"""Tree settings of the paper's main runs; its endpoints are ``never`` and ``always`` with these."""
ENDPOINTS = ("never", "always")
VALUE, BEST_FIXED, PLAIN = "value", "best_fixed", "plain"
CEILING = "ceiling"
_PAPER = "paper_"


@dataclass(frozen=True, slots=True)
class Offline:
    """Tokens per second that the cost model predicts for the schedules of a suite.

    Attributes
    ----------
    steps : that were evaluated.
    rates : of ``plain``, ``never``, ``always``, ``best_fixed``, ``value`` and ``oracle``, and of
        ``ceiling`` if traces were given for it.
    """

    steps: int
    rates: dict[str, float]

    @property
    def endpoint(self) -> float:
        """The better endpoint's rate."""
        return max(self.rates[name] for name in ENDPOINTS)

    def share(self, name: str = VALUE) -> float | None:
        """Of the oracle's gain over the better endpoint, what ``name`` keeps; None without one."""
        gain = self.rates["oracle"] - self.endpoint
        if gain <= 0 or name not in self.rates:
            return None
        return (self.rates[name] - self.endpoint) / gain


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured, by suite.

    Attributes
    ----------
    comparison : real decoding; the kind of a prompt is its suite. offline : by suite.
    left_out : prompts that the scheduler was fitted on. cost_scaled : what makes its costs those of
        a dearer target, in words; None if nothing does. sampling : of the texts, as in the config.
    """

    comparison: Comparison
    offline: dict[str, Offline]
    left_out: tuple[str, ...] = ()
    cost_scaled: str | None = None
    sampling: dict[str, Any] | None = None

    def figures(self, suite: str) -> dict[str, Any]:
        """The figures of one suite, keyed as the command prints them."""
        speed = {arm: self.comparison.ratio(arm, suite).total for arm in self.comparison.arms}
        own = max(speed[arm] for arm in ENDPOINTS)
        paper = [speed[arm] for arm in speed if arm.startswith(_PAPER)]
        offline = self.offline[suite]
        bound = offline.rates.get(CEILING)
        return {
            "value_to_paper_endpoint": speed[VALUE] / max(paper) if paper else None,
            "value_to_plain": speed[VALUE] / speed[PLAIN],
            "value_to_better_endpoint": speed[VALUE] / own,
            "best_fixed_to_better_endpoint": speed[BEST_FIXED] / own,
            "oracle_to_better_endpoint": offline.rates["oracle"] / offline.endpoint,
            "ceiling_to_better_endpoint": None if bound is None else bound / offline.endpoint,
            "oracle_share": offline.share(),
            "ceiling_share": offline.share(CEILING),
            "identical": self._identical(suite),
        }

    def _identical(self, suite: str) -> bool:
        mine = {p.prompt.id for p in self.comparison.runs if p.prompt.kind == suite}
        return not any(
            d.prompt in mine
            for arm in self.comparison.arms
            for d in self.comparison.differences(arm)
        )

    @property
    def scheduler_share(self) -> float:
        """Of the seconds of ``value``'s steps (prefill excluded), those of its decisions."""
        seconds = self.comparison.statistics(VALUE).seconds
        steps = sum(seconds.values()) - seconds["prefill"]
        return seconds.get("scheduler", 0.0) / max(steps, 1e-9)

    @property
    def cost_error(self) -> dict[str, float]:
        """Predicted over measured tokens per second of decoding, by scheduler.

        Both sides are all suites together; the predicted one is of the steps that were evaluated
        offline, which are a sample of those decoded.
        """
        found = {}
        for arm in (PLAIN, *ENDPOINTS, BEST_FIXED, VALUE):
            predicted = sum(o.steps for o in self.offline.values()) / sum(
                o.steps / o.rates[arm] for o in self.offline.values()
            )
            measured = self.comparison.statistics(arm).tokens_per_second_decode
            found[arm] = predicted / measured
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as ``treegraft schedule evaluate --json`` prints it."""
        suites = {suite: self.figures(str(suite)) for suite in self.comparison.kinds}
        keys = [key for key in next(iter(suites.values())) if key != "identical"]
        mean: dict[str, Any] = {}
        for key in keys:
            values = [f[key] for f in suites.values() if f[key] is not None]
            mean[key] = float(np.mean(values)) if values else None
        mean["identical"] = all(figures["identical"] for figures in suites.values())
        statistics = {arm: self.comparison.statistics(arm) for arm in self.comparison.arms}
        return {
            "suites": suites,
            "mean": mean,
            "scheduler_share_of_step": self.scheduler_share,
            "predicted_over_measured": self.cost_error,
            "calls_by_layer": {arm: _calls(s) for arm, s in statistics.items()},
            "tokens_per_second": {arm: s.tokens_per_second for arm, s in statistics.items()},
            "mean_accepted_length": {arm: s.mean_accepted_length for arm, s in statistics.items()},
            "offline": {
                suite: {"steps": o.steps, "tokens_per_second": o.rates}
                for suite, o in self.offline.items()
            },
            "prompts": self.comparison.n_prompts,
            "left_out": list(self.left_out),
            "cost_scaled": self.cost_scaled,
            "sampling": self.sampling,
        }


def _calls(statistics: Statistics) -> list[dict[str, int]]:
    """Calls of each drafter, layer by layer."""
    return [
        dict(zip(statistics.drafters, layer, strict=True)) for layer in statistics.calls_by_layer
    ]


def arm_configs(
    config: PipelineConfig, artefact: Artefact, path: str, paper: bool = True
) -> dict[str, PipelineConfig]:
    """The configs that are compared; they differ in scheduler, and the paper's in the tree too.

    ``path`` : where the artefact lies. ``paper`` : whether the paper's endpoints are among them.
    """
    check_collectable(config)
    data = config.model_dump()
    plain = {"scheduler": {"kind": "never"}, "drafters": [], "ride_along": []}
    best: dict[str, Any] = plain
    if artefact.header["best_fixed"]:
        best = {"scheduler": {"kind": "fixed", "calls": artefact.header["best_fixed"]}}
    changes: dict[str, dict[str, Any]] = {
        **{kind: {"scheduler": {"kind": kind}} for kind in ENDPOINTS},
        PLAIN: plain,
        BEST_FIXED: best,
        VALUE: {"scheduler": {"kind": "value", "artefact": path}},
    }
    arms = {name: parse_config(data | change) for name, change in changes.items()}
    if paper:
        for kind in ENDPOINTS:
            arms[_PAPER + kind] = parse_config(data | PAPER | {"scheduler": {"kind": kind}})
    return arms


def unseen(
    pipeline: Pipeline, artefact: Artefact, prompts: Sequence[Prompt]
) -> tuple[list[Prompt], tuple[str, ...]]:
    """The prompts that the scheduler was not fitted on, and the ids of the others.

    PromptError if none is left.
    """
    known = set(artefact.header["data"].get("fitted_on", ()))
    kept, left_out = [], []
    for prompt in prompts:
        key = prompt_key(pipeline.encode(prompt.content))
        if key[:16] in known:
            left_out.append(prompt.id)
        else:
            kept.append(prompt)
    if not kept:
        raise PromptError(
            f"the scheduler was fitted on all {len(prompts)} prompts; name others with --prompts"
        )
    return kept, tuple(left_out)


def evaluate(
    configs: Mapping[str, PipelineConfig],
    artefact: Artefact,
    prompts: Sequence[Prompt],
    repeat: int = 3,
    every: int = 4,
    costs: CostModel | None = None,
    pipelines: Mapping[str, Pipeline] | None = None,
    on_part: Callable[[object], None] | None = None,
    ceiling: Traces | None = None,
) -> Evaluation:
    """Decode with every arm in turns, and evaluate schedules offline on the same prompts.

    Parameters
    ----------
    configs : of ``arm_configs``. prompts : their kinds are the suites.
    repeat : runs of each prompt with each arm. every : as in ``Collector``, for the offline side.
    costs : for the offline side instead of those that the scheduler was fitted with.
    pipelines : of the configs, if they are built already.
    on_part : called after each prompt, once offline and ``repeat`` times decoding.
    ceiling : traces that boosted trees are grown on, to say what the features could show at best;
        those that the scheduler was fitted on, or more of their kind. ScheduleError if they are of
        other drafters, another tree or other features.
    """
    pipelines = dict(pipelines or build_pipelines(configs))
    costs = costs or CostModel.of(artefact.header["costs"])
    wanted, left_out = unseen(pipelines[VALUE], artefact, prompts)
    suites = [dataclasses.replace(p, kind=p.kind or "prompts") for p in wanted]
    # Its text is any arm's text.
    trees = None if ceiling is None else _trees(ceiling, artefact, costs)
    offline = _offline(pipelines["never"], artefact, suites, every, costs, trees, on_part)
    comparison = compare(pipelines, suites, repeat=repeat, on_run=on_part)
    sampling = pipelines[VALUE].config.sampling.model_dump(mode="json")
    return Evaluation(comparison, offline, left_out, costs.scaled, sampling)


def _trees(traces: Traces, artefact: Artefact, costs: CostModel) -> BoostedPolicy:
    """Grown on traces of the artefact's pipeline; its target may be the same at another price."""
    made_for = dict(artefact.header["signature"])
    there = dict(traces.header["signature"])
    if costs.texts_of == there["target"]:
        there["target"] = made_for["target"]
    wrong = difference(made_for, there)
    if wrong is None and traces.header["features"] != artefact.header["features"]:
        wrong = "the features differ"
    if wrong is not None:
        raise ScheduleError(f"--ceiling: traces of another pipeline than the scheduler's: {wrong}")
    return boost(traces, problem_of(traces, costs, decided=True))


def _offline(
    pipeline: Pipeline,
    artefact: Artefact,
    prompts: Sequence[Prompt],
    every: int,
    costs: CostModel,
    trees: BoostedPolicy | None,
    on_part: Callable[[object], None] | None,
) -> dict[str, Offline]:
    collector = Collector(pipeline, every=every, seed=1)
    header = trace_header(pipeline, collector, {"every": every})
    network = ValueNetwork(**artefact.arrays)
    names = list(artefact.header["signature"]["drafters"])
    calls = tuple(names.index(name) for name in artefact.header["best_fixed"])
    by_suite: dict[str, list[Any]] = {}
    for prompt in prompts:
        trace = collector.collect(prompt.content, prompt.id, prompt.kind)
        if trace.n_steps:
            by_suite.setdefault(str(prompt.kind), []).append(trace)
        if on_part is not None:
            on_part(prompt)
    found = {}
    for suite in dict.fromkeys(str(prompt.kind) for prompt in prompts):
        if suite not in by_suite:
            raise PromptError(f"the texts of suite {suite!r} end at once: nothing to schedule")
        traces = Traces.join(header, by_suite[suite])
        problem = problem_of(traces, costs)
        decided = problem_of(traces, costs, decided=True)
        depth = problem.depth
        rows, features = traces.arrays["described"], traces.arrays["features"]
        rates = {
            PLAIN: problem.estimate(problem.roots),
            "never": problem.estimate(problem.fixed((0,) * depth)),
            "always": problem.estimate(problem.fixed((len(names) - 1,) * depth)),
            BEST_FIXED: problem.estimate(problem.fixed(calls)),
            VALUE: decided.estimate(
                decided.follow(policy_actions(network, decided, rows, features))
            ),
            "oracle": problem.estimate(problem.solve().ends),
        }
        if trees is not None:
            rates[CEILING] = decided.estimate(decided.follow(trees.decide(decided, rows, features)))
        found[suite] = Offline(traces.n_steps, rates)
    return found
