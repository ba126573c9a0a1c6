"""What was counted and timed, with every definition in one place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from treegraft.core.language_model import ForwardCounts
from treegraft.core.stopwatch import DRAFTER, FORWARD

DEFINITIONS = {
    "new_tokens": "tokens committed after the prompt",
    "target_calls": "forwards of the target over a tree (prefill not counted)",
    "mean_accepted_length": "new tokens per target call, the bonus token included",
    "drafted": "nodes in the working trees, by the drafter that proposed them first",
    "proposed": "nodes in the working trees that each drafter proposed, as the first or after "
    "others",
    "kept": "nodes that the target read, by the drafter that proposed them first",
    "accepted": "nodes that were committed, by the drafter that proposed them first",
    "accepted_alone": "nodes that were committed and that no other drafter proposed; who was not "
    "called there could not propose",
    "acceptance_by_depth": "share of steps whose accepted path (before a stop cut it) reached each "
    "depth, from 1",
    "reused": "nodes that a step's tree began with, left over from the step before",
    "reuse_rate": "share of steps whose tree began with such nodes",
    "accepted_by_depth": "the accepted nodes of each drafter by their depth in the tree, from 1",
    "calls": "visits of each drafter (layers in which it acted)",
    "side_calls": "visits of each drafter besides those of its layers: riding along before a "
    "drafter that scores, and in the graft's work after the last layer",
    "calls_by_layer": "visits of each drafter in each layer, from 1",
    "drafter_seconds": "wall time of each drafter, its model's forwards included",
    "seconds": "wall time by stage: prefill (the target reads the prompt), target (its forwards "
    "over trees), forward:NAME (forwards of a drafter's model; the first one reads the prompt), "
    "drafter:NAME (the rest of what a drafter does), tree (operations on the working tree), "
    "scheduler, verify (sampling, walk, KV rows moved), host (everything else)",
    "forwards": "forwards of each model that backend.compile concerns: run by a compiled program; "
    "eagerly, as its warm-up chose for their kind (a prompt's always); or eagerly because no "
    "program and no bucket fits them (outside)",
    "overhead_share": "share of all seconds that is neither the target's prefill nor a forward of "
    "the target or of a drafter's model",
    "tokens_per_second": "new tokens per second of the whole run, prefill included",
    "tokens_per_second_decode": "new tokens per second, the target's prefill excluded",
}
"""Metric name to its definition; printed beside the figures."""

NODE_COUNTS = ("drafted", "proposed", "kept", "accepted", "accepted_alone")
"""Fields of StepRecord and Statistics that count nodes by drafter."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decoding step.

    Attributes
    ----------
    n_new : tokens committed. n_path : nodes accepted (before a stop cut them). n_tree : nodes the
    target read, root included.
    calls : drafter number of each layer that was drafted.
    drafted, proposed, kept, accepted, accepted_alone : nodes by drafter number; see DEFINITIONS.
    seconds : wall time by stage of this step.
    side_calls : visits by drafter number besides those of the layers (DEFINITIONS); empty if none
        were counted.
    reused : nodes that the tree began with, left over from the step before.
    visit_seconds : wall time of each layer's visit, as in ``calls``: drafter and graft policy.
    path_sources : the drafter that proposed each accepted node first, top down.
    """

    n_new: int
    n_path: int
    n_tree: int
    calls: tuple[int, ...]
    drafted: tuple[int, ...]
    proposed: tuple[int, ...]
    kept: tuple[int, ...]
    accepted: tuple[int, ...]
    accepted_alone: tuple[int, ...]
    seconds: dict[str, float]
    side_calls: tuple[int, ...] = ()
    reused: int = 0
    visit_seconds: tuple[float, ...] = ()
    path_sources: tuple[int, ...] = ()

    def with_seconds(self, more: dict[str, float]) -> StepRecord:
        """The record with time added that the step took after it was written."""
        total = dict(self.seconds)
        for stage, seconds in more.items():
            total[stage] = total.get(stage, 0.0) + seconds
        # By name, as dataclasses.replace takes ten times as long, once a step.
        return StepRecord(
            n_new=self.n_new,
            n_path=self.n_path,
            n_tree=self.n_tree,
            calls=self.calls,
            drafted=self.drafted,
            proposed=self.proposed,
            kept=self.kept,
            accepted=self.accepted,
            accepted_alone=self.accepted_alone,
            seconds=total,
            side_calls=self.side_calls,
            reused=self.reused,
            visit_seconds=self.visit_seconds,
            path_sources=self.path_sources,
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished text.

    Attributes
    ----------
    tokens : the new ids, the one that ended the text included. text : the same, decoded, or None
        without a tokenizer.
    finish_reason : "eos", "stop_string", "length" (max_new_tokens) or "context_limit".
    n_prompt : tokens of the prompt.
    drafters : names, in the order of the numbers in ``steps``.
    prefill : seconds by stage before the first step. notices : what was switched off, and why.
    forwards : how those of each model that may be compiled ran, by the model's name in the config.
    """

    tokens: list[int]
    text: str | None
    finish_reason: str
    n_prompt: int
    drafters: tuple[str, ...]
    steps: list[StepRecord]
    prefill: dict[str, float] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    forwards: dict[str, ForwardCounts] = field(default_factory=dict)

    @property
    def statistics(self) -> Statistics:
        """The figures of this text."""
        return Statistics.of([self])


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures over one or more texts of the same pipeline; see DEFINITIONS."""

    new_tokens: int
    target_calls: int
    drafters: tuple[str, ...]
    drafted: tuple[int, ...]
    proposed: tuple[int, ...]
    kept: tuple[int, ...]
    accepted: tuple[int, ...]
    accepted_alone: tuple[int, ...]
    accepted_by_depth: tuple[tuple[int, ...], ...]
    calls: tuple[int, ...]
    calls_by_layer: tuple[tuple[int, ...], ...]
    acceptance_by_depth: tuple[float, ...]
    seconds: dict[str, float]
    side_calls: tuple[int, ...]
    reused: int
    reuse_rate: float
    forwards: dict[str, ForwardCounts] = field(default_factory=dict)

    @property
    def drafter_seconds(self) -> dict[str, float]:
        """Seconds that each drafter took, its model's forwards included."""
        return {
            name: sum(self.seconds.get(stage + name, 0.0) for stage in (DRAFTER, FORWARD))
            for name in self.drafters
        }

    @property
    def visits(self) -> dict[str, int]:
        """How often each drafter was called, in a layer of its own or beside one."""
        both = zip(self.drafters, self.calls, self.side_calls, strict=True)
        return {name: calls + side_calls for name, calls, side_calls in both}

    @property
    def overhead_share(self) -> float:
        forwards = sum(self.seconds.get(FORWARD + name, 0.0) for name in self.drafters)
        forwards += self.seconds.get("target", 0.0) + self.seconds["prefill"]
        return 1.0 - forwards / max(self.total_seconds, 1e-9)

    @property
    def mean_accepted_length(self) -> float:
        return self.new_tokens / max(self.target_calls, 1)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / max(self.total_seconds, 1e-9)

    @property
    def tokens_per_second_decode(self) -> float:
        return self.new_tokens / max(self.total_seconds - self.seconds.get("prefill", 0.0), 1e-9)

    @staticmethod
    def of(generations: Sequence[Generation]) -> Statistics:
        """Sum over texts; all must come from pipelines with the same drafters."""
        names = generations[0].drafters
        if any(generation.drafters != names for generation in generations):
            raise ValueError("statistics add up only over texts of the same drafters")
        steps = [step for generation in generations for step in generation.steps]
        indices = range(len(names))
        n_layers = max((len(step.calls) for step in steps), default=0)
        n_depth = max((step.n_path for step in steps), default=0)
        depths = range(max((len(step.path_sources) for step in steps), default=0))
        seconds: dict[str, float] = {"prefill": 0.0}
        laps = [generation.prefill for generation in generations]
        for lap in [*laps, *(step.seconds for step in steps)]:
            for stage, taken in lap.items():
                seconds[stage] = seconds.get(stage, 0.0) + taken
        by_layer = tuple(
            tuple(sum(step.calls[layer : layer + 1] == (i,) for step in steps) for i in indices)
            for layer in range(n_layers)
        )

        def summed(name: str) -> tuple[int, ...]:
            return tuple(sum(getattr(step, name)[i] for step in steps) for i in indices)

        return Statistics(
            new_tokens=sum(len(generation.tokens) for generation in generations),
            target_calls=len(steps),
            drafters=names,
            drafted=summed("drafted"),
            proposed=summed("proposed"),
            kept=summed("kept"),
            accepted=summed("accepted"),
            accepted_alone=summed("accepted_alone"),
            accepted_by_depth=tuple(
                tuple(sum(step.path_sources[d : d + 1] == (i,) for step in steps) for d in depths)
                for i in indices
            ),
            calls=tuple(sum(layer[i] for layer in by_layer) for i in indices),
            calls_by_layer=by_layer,
            acceptance_by_depth=tuple(
                sum(step.n_path >= depth for step in steps) / len(steps)
                for depth in range(1, n_depth + 1)
            ),
            seconds=seconds,
            side_calls=tuple(
                sum(sum(step.side_calls[i : i + 1]) for step in steps) for i in indices
            ),
            reused=sum(step.reused for step in steps),
            reuse_rate=sum(step.reused > 0 for step in steps) / max(len(steps), 1),
            forwards=_added(generation.forwards for generation in generations),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, keyed as in DEFINITIONS, drafters by name."""
        named = {
            key: dict(zip(self.drafters, getattr(self, key), strict=True))
            for key in (*NODE_COUNTS, "calls", "side_calls")
        }
        return {
            "new_tokens": self.new_tokens,
            "target_calls": self.target_calls,
            "mean_accepted_length": self.mean_accepted_length,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_decode": self.tokens_per_second_decode,
            "overhead_share": self.overhead_share,
            **named,
            "reused": self.reused,
            "reuse_rate": self.reuse_rate,
            "calls_by_layer": [
                dict(zip(self.drafters, layer, strict=True)) for layer in self.calls_by_layer
            ],
            "acceptance_by_depth": list(self.acceptance_by_depth),
            "accepted_by_depth": {
                name: list(counts)
                for name, counts in zip(self.drafters, self.accepted_by_depth, strict=True)
            },
            "drafter_seconds": self.drafter_seconds,
            "seconds": self.seconds,
            "forwards": {name: asdict(counts) for name, counts in self.forwards.items()},
        }


def _added(counts: Iterable[Mapping[str, ForwardCounts]]) -> dict[str, ForwardCounts]:
    total: dict[str, ForwardCounts] = {}
    for each in counts:
        for name, counted in each.items():
            total[name] = total.get(name, ForwardCounts()) + counted
    return total
