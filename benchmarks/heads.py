"""A draft head against a small model, on the shipped prompts: tokens per target call, and what a
visit costs in forwards.

    python benchmarks/heads.py --head zoo:head

The configs take turns on each prompt, so that a busy machine is busy for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from treegraft import build_pipeline, parse_config
from treegraft.core.stopwatch import FORWARD
from treegraft.zoo import zoo_kinds, zoo_prompts

SCHEDULES: dict[str, list[str]] = {
    "plain": [],
    "small": ["small"] * 4,
    "head": ["head"] * 4,
    "ngram and small": ["ngram", "small"] * 2,
    "ngram and head": ["ngram", "head"] * 2,
    "head, small twice": ["head", "small"] * 2,
}


def config(schedule: list[str], head: str, n_tokens: int, temperature: float) -> Any:
    drafters = {
        "ngram": {"kind": "ngram"},
        "head": {"kind": "head", "model": head, "name": "head"},
        "small": {"kind": "lm", "model": "zoo:small"},
    }
    used = [drafter for name, drafter in drafters.items() if name in schedule]
    return parse_config(
        {
            "target": {"model": "zoo:target"},
            "drafters": used,
            "builder": {"kind": "layered", "depth": 4, "width": 3, "budget": 12},
            "scheduler": {"kind": "fixed", "calls": schedule} if used else {"kind": "never"},
            "sampling": {"temperature": temperature},
            "stop": {"max_new_tokens": n_tokens},
        }
    )


def main(
    head: Annotated[str, typer.Option(help="Folder of the head, or zoo:head.")] = "zoo:head",
    per_kind: Annotated[int, typer.Option(help="Prompts of each of the seven kinds.")] = 3,
    tokens: Annotated[int, typer.Option(help="Most new tokens per prompt.")] = 48,
) -> None:
    """Print a table for greedy and for sampled texts."""
    torch.set_num_threads(1)
    prompts = [prompt.prompt for kind in zoo_kinds() for prompt in zoo_prompts([kind])[:per_kind]]
    for temperature in (0.0, 0.8):
        made = {
            name: build_pipeline(config(schedule, head, tokens, temperature))
            for name, schedule in SCHEDULES.items()
        }
        n_new: dict[str, int] = defaultdict(int)
        n_steps: dict[str, int] = defaultdict(int)
        visits: dict[tuple[str, str], list[float]] = defaultdict(list)
        for prompt in prompts:
            said = []
            for name, pipeline in made.items():
                result = pipeline.generate(prompt)
                said.append(result.tokens)
                n_new[name] += len(result.tokens)
                n_steps[name] += len(result.steps)
                for step in result.steps:
                    for drafter in set(SCHEDULES[name]) - {"ngram"}:
                        n_calls = step.calls.count(result.drafters.index(drafter))
                        seconds = step.seconds.get(FORWARD + drafter)
                        if n_calls and seconds is not None:
                            visits[name, drafter].append(seconds / n_calls)
            if any(text != said[0] for text in said):
                raise SystemExit(f"texts differ at temperature {temperature}: a fault")
        table = Table("schedule", "tokens per target call", "ms of forwards per visit")
        for name in made:
            costs = [
                f"{drafter} {1000 * median(seconds):.2f}"
                for (config_name, drafter), seconds in visits.items()
                if config_name == name
            ]
            table.add_row(name, f"{n_new[name] / n_steps[name]:.2f}", ", ".join(costs))
        Console(width=120).print(f"temperature {temperature:g}, {n_new['plain']} new tokens", table)


if __name__ == "__main__":
    typer.run(main)
