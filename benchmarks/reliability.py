"""Predicted against observed acceptance of every drafter's scores, before and after calibration.

On the shipped prompts, with the shipped models unless a config says otherwise. Each step is judged
with what was learned from the steps before it, from an empty record on.

    python benchmarks/reliability.py --per-kind 3
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from treegraft.bench.demo import demo_prompts
from treegraft.bench.reliability import DrafterReliability, Reliability, measure_reliability
from treegraft.config import load_config, parse_config
from treegraft.pipeline import build_pipeline

CONFIG: dict[str, Any] = {
    "target": {"model": "zoo:target"},
    "drafters": [{"kind": "ngram", "length": 6}, {"kind": "lm", "model": "zoo:small"}],
    "builder": {"kind": "layered", "depth": 4, "width": 4, "budget": 24},
    "scheduler": {"kind": "fixed", "calls": ["ngram", "small", "ngram", "small"]},
    "calibration": {"kind": "online"},
}


def main(
    config: Annotated[Path | None, typer.Option("--config", "-c")] = None,
    per_kind: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 48,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
) -> None:
    """Print a table of buckets for each drafter, and the scores of the predictions."""
    pipeline = build_pipeline(parse_config(CONFIG) if config is None else load_config(config))
    prompts = demo_prompts(per_kind)
    judged = measure_reliability(pipeline, prompts, max_new_tokens=tokens, temperature=temperature)
    console = Console()
    totals = Table("drafter", "nodes", "unscored", "Brier", "ECE", "Brier scored", "ECE scored")
    for each in judged:
        console.print(_buckets(each))
        pairs = [
            f"{getattr(a, name):.3f} -> {getattr(b, name):.3f}"
            for a, b in ((each.before, each.after), (each.scored_before, each.scored_after))
            for name in ("brier", "ece")
        ]
        totals.add_row(each.drafter, str(each.before.n), str(each.n_unscored), *pairs)
    console.print(totals)
    console.print(
        f"{len(prompts)} prompts of at most {tokens} new tokens, temperature {temperature}; nodes: "
        "scores of nodes whose parent was committed; before -> after calibration; an unscored node "
        "predicts 0 before; scored: without those"
    )


def _buckets(judged: DrafterReliability) -> Table:
    table = Table(
        "predicted", "n", "mean", "accepted", "n", "mean", "accepted", title=judged.drafter
    )
    halves = [_by_low(judged.before), _by_low(judged.after)]
    for low in sorted({*halves[0], *halves[1]}):
        cells = [cell for half in halves for cell in half.get(low, ("", "", ""))]
        table.add_row(f"{low:.1f}-{low + 0.1:.1f}", *cells)
    table.caption = "left: as given; right: calibrated"
    return table


def _by_low(judged: Reliability) -> dict[float, tuple[str, str, str]]:
    return {b.low: (str(b.n), f"{b.predicted:.3f}", f"{b.observed:.3f}") for b in judged.buckets}


if __name__ == "__main__":
    typer.run(main)
