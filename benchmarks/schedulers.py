"""What schedulers and calibration are worth under given costs, on the shipped models and prompts.

Seconds are modelled, not measured: every forward and visit costs what the options say. So the
figures are the same on every machine, busy or not; the tokens and calls are real.

    python benchmarks/schedulers.py --per-kind 3
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from treegraft.bench.comparison import build_pipelines
from treegraft.bench.demo import demo_prompts
from treegraft.config import parse_config
from treegraft.core.stats import StepRecord

SETTINGS: dict[str, Any] = {
    "target": {"model": "zoo:target"},
    "drafters": [{"kind": "ngram", "length": 6}, {"kind": "lm", "model": "zoo:small"}],
    "builder": {"kind": "layered", "depth": 4, "width": 3, "budget": 9},
}
FIXED = {"kind": "fixed", "calls": ["small", "ngram", "ngram"]}
ONLINE = {"kind": "online"}


def main(
    ngram: Annotated[float, typer.Option(help="Seconds of a visit of the look-ups.")] = 3e-4,
    small: Annotated[float, typer.Option(help="Seconds of a visit of the small model.")] = 4e-3,
    target: Annotated[float, typer.Option(help="Seconds of a target forward.")] = 22e-3,
    node: Annotated[float, typer.Option(help="Seconds that each further node adds.")] = 9e-4,
    per_kind: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 48,
) -> None:
    """Decode every prompt with every configuration; tokens must not differ."""
    costs = {"ngram": ngram, "small": small}
    given = {"costs": costs, "target_cost": target, "node_cost": node}
    # A budget for every step: of the drafting that fixed does, a layer of the model and two others.
    seconds_of = {"target": target, "node": node, "drafting": small + 2 * ngram}
    auto = {**SETTINGS["builder"], "budget": "auto", "budget_limit": 31, "budget_costs": seconds_of}
    changes: dict[str, dict[str, Any]] = {
        "plain": {"drafters": []},
        "never": {},
        "never, calibrated": {"calibration": ONLINE},
        "always": {"scheduler": {"kind": "always"}},
        "fixed": {"scheduler": FIXED},
        "fixed, calibrated": {"scheduler": FIXED, "calibration": ONLINE},
        "priority": {"scheduler": {"kind": "priority"}},
        "fixed, budget auto": {"scheduler": FIXED, "calibration": ONLINE, "builder": auto},
        "cost_aware": {"scheduler": {"kind": "cost_aware", **given}, "calibration": ONLINE},
        "online": {"scheduler": {"kind": "online", **given}},
    }
    pipelines = build_pipelines({k: parse_config(SETTINGS | c) for k, c in changes.items()})
    prompts = demo_prompts(per_kind)
    table = Table("config", "tokens/call", "target calls", "ngram", "small", "modelled tokens/s")
    expected: list[list[int]] = []
    for name, pipeline in pipelines.items():
        texts = [pipeline.generate(p.content, max_new_tokens=tokens) for p in prompts]
        expected = expected or [text.tokens for text in texts]
        if [text.tokens for text in texts] != expected:
            raise SystemExit(f"{name} changed the text")
        steps: list[StepRecord] = [step for text in texts for step in text.steps]
        calls = [sum(step.calls.count(i) for step in steps) for i in (0, 1)]
        seconds = calls[0] * ngram + calls[1] * small
        seconds += sum(target + node * (step.n_tree - 1) for step in steps)
        n_new = sum(step.n_new for step in steps)
        speed = f"{n_new / seconds:.1f}"
        table.add_row(name, f"{n_new / len(steps):.2f}", str(len(steps)), *map(str, calls), speed)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
