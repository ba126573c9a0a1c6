"""The demo: the shipped models on the shipped prompts, five ways of decoding the same text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from treegraft.bench.comparison import Comparison, Run, compare
from treegraft.config import PipelineConfig, parse_config
from treegraft.pipeline import Pipeline
from treegraft.prompts import Prompt, take_turns

__all__ = [
    "DEMO_SCHEDULERS",
    "DEMO_SETTINGS",
    "Demo",
    "choose_threads",
    "demo_configs",
    "demo_prompts",
    "run_demo",
]

DEMO_SETTINGS: dict[str, Any] = {
    "target": {"model": "zoo:target"},
    "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "zoo:small"}],
    "builder": {"kind": "layered", "depth": 4, "width": 2, "budget": 8},
}
"""Target, drafters and tree of every configuration of the demo.

A CPU pays for every node that it verifies (8 cost the zoo's target a third more than 1), so the
tree is far smaller than the paper's, which is for accelerators.
"""

DEMO_SCHEDULERS: dict[str, dict[str, Any]] = {
    "never": {"kind": "never"},
    "always": {"kind": "always"},
    "mixed": {"kind": "fixed", "calls": ["small", "small", "ngram", "ngram"]},
}
"""Who drafts in which layer, in the configurations that draft."""

DEMO_LEARNED: dict[str, Any] = {
    "drafters": [
        {"kind": "recycle", "k": 4},
        {"kind": "suffix"},
        {"kind": "lm", "model": "zoo:small"},
    ],
    "builder": {"kind": "layered", "depth": 4, "width": 2, "budget": 7},
    "scheduler": {"kind": "value", "artefact": "zoo:scheduler"},
}
"""One more way where they are not: the scheduler that was fitted on other texts, greedy ones."""

DEMO_DRAWN: dict[str, Any] = {
    "drafters": [
        {"kind": "ngram"},
        {"kind": "lm", "model": "zoo:small", "children": "sample"},
    ],
    "builder": {"kind": "layered", "depth": 3, "width": 1, "budget": 3},
    "scheduler": {"kind": "always"},
    "verifier": {"kind": "ledger"},
}
"""One more way where tokens are sampled: a chain of draws. Its texts have the law of plain ones."""

PLAIN = "plain"
_PER_KIND = 3
_MAX_SECONDS = 55.0
_FEWEST_TOKENS, _MOST_TOKENS = 16, 64
_TRIAL_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo measured, and under which settings."""

    comparison: Comparison
    settings: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The figures as ``treegraft demo --json`` prints them."""
        comparison = self.comparison
        drafting = [arm for arm in comparison.arms if arm != PLAIN]
        return {
            "prompts": comparison.n_prompts,
            "configs": {s.name: s.as_dict("ratio_to_plain") for s in comparison.summaries()},
            "kinds": {
                kind: {
                    "prompts": n,
                    "ratio_to_plain": {arm: comparison.ratio(arm, kind).total for arm in drafting},
                }
                for kind, n in comparison.kinds.items()
            },
            "settings": self.settings,
        }


def demo_configs(
    temperature: float = 0.0,
    seed: int = 0,
    max_new_tokens: int = _MOST_TOKENS,
    compile_: str = "off",
) -> dict[str, PipelineConfig]:
    """The configurations, plain decoding first; they differ in the drafting alone.

    The last one, which the demo's completion is streamed by, is ``learned`` (``DEMO_LEARNED``), or
    above temperature 0 ``drawn`` (``DEMO_DRAWN``). ``compile_`` is ``backend.compile``.
    """
    rooms = {
        "backend": {"compile": compile_},
        "sampling": {"temperature": temperature, "seed": seed},
        "stop": {"max_new_tokens": max_new_tokens},
    }
    plain = parse_config(DEMO_SETTINGS | rooms | {"drafters": []})
    drafting = {
        name: parse_config(DEMO_SETTINGS | rooms | {"scheduler": scheduler})
        for name, scheduler in DEMO_SCHEDULERS.items()
    }
    name, last = ("drawn", DEMO_DRAWN) if temperature > 0.0 else ("learned", DEMO_LEARNED)
    drafting[name] = parse_config(DEMO_SETTINGS | rooms | last)
    return {PLAIN: plain, **drafting}


def demo_prompts(per_kind: int = _PER_KIND) -> list[Prompt]:
    """Shipped prompts from texts that the zoo did not train on, kinds in turn."""
    from treegraft.zoo.catalog import zoo_prompts

    prompts = [Prompt(p.id, p.prompt, p.kind) for p in zoo_prompts()]
    return take_turns(prompts, per_kind)


def choose_threads(pipeline: Pipeline, prompt: Prompt) -> int:
    """Let torch use one thread if ``pipeline`` decodes clearly faster so; return their number.

    Threads wait for each other in every layer of a small model. On a machine that is busy with
    other work, two can be many times slower than one. The setting holds for the whole process, so
    this is for a command that owns it, before anything is measured.
    """
    n_default = torch.get_num_threads()
    if n_default == 1:
        return 1
    torch.set_num_threads(1)
    pipeline.generate(prompt.content, max_new_tokens=1)  # warm-up
    one = _decode_speed(pipeline, prompt)
    torch.set_num_threads(n_default)
    if one > 1.1 * _decode_speed(pipeline, prompt):
        torch.set_num_threads(1)
    return torch.get_num_threads()


def _decode_speed(pipeline: Pipeline, prompt: Prompt) -> float:
    """Tokens per second of a short text, prefill excluded."""
    generation = pipeline.generate(prompt.content, max_new_tokens=_TRIAL_TOKENS)
    return generation.statistics.tokens_per_second_decode


def _fitting_tokens(pipelines: dict[str, Pipeline], prompts: list[Prompt], seconds: float) -> int:
    """New tokens per text with which all prompts fit into ``seconds``, within bounds.

    As if every pipeline were as slow as plain decoding.
    """
    plain = pipelines[PLAIN]
    plain.generate(prompts[0].content, max_new_tokens=1)  # warm-up
    total = _decode_speed(plain, prompts[-1]) * seconds
    fitting = int(total / (len(pipelines) * len(prompts)))
    return max(_FEWEST_TOKENS, min(_MOST_TOKENS, fitting))


def run_demo(
    pipelines: dict[str, Pipeline],
    prompts: list[Prompt],
    max_new_tokens: int | None = None,
    max_seconds: float = _MAX_SECONDS,
    on_run: Callable[[Run], None] | None = None,
) -> Demo:
    """Decode the prompts with every pipeline in turns.

    Parameters
    ----------
    pipelines : of ``demo_configs``. prompts : at least one.
    max_new_tokens : per text; left out, as many (16 to 64) as ``max_seconds`` have room for.
    max_seconds, on_run : as in ``comparison.compare``.
    """
    if max_new_tokens is None:
        max_new_tokens = _fitting_tokens(pipelines, prompts, max_seconds)
    comparison = compare(
        pipelines,
        prompts,
        max_new_tokens=max_new_tokens,
        max_seconds=max_seconds,
        on_run=on_run,
    )
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "prompts_offered": len(prompts),
        "max_seconds": max_seconds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "mixed": pipelines["mixed"].config.model_dump(mode="json"),
        **{
            name: pipelines[name].config.model_dump(mode="json")
            for name in ("learned", "drawn")
            if name in pipelines
        },
    }
    return Demo(comparison, settings)
