"""What a decoding step costs besides the forwards that it asks for.

    python benchmarks/overhead.py [CONFIG ...] [--contexts 500,8000] [--json]

Every forward that a step asked of a model is repeated right after the step, bare: with arguments
that are ready, as treegraft/bench/bare.py has it.
What the step took beyond the sum of these is its overhead: trees, masks, look-ups, log-softmax,
walk, statistics. All configs and contexts take turns step by step, so that a busy machine slows all
alike, and with one thread the time is that of the thread on its core. The share is
1 - (sum of bare forwards) / (sum of steps); milliseconds are medians over the steps, and beside
the share stand its 10th and 90th percentile over steps. Seconds by stage are wall time.

With --compile the forwards are compiled (backend.compile) in the steps and, beside them, alone.

Contexts longer than the models were trained for are fine here: the text makes no sense then, the
work is the same.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from treegraft.backends.graphs import CompiledModel, GraphPlan
from treegraft.backends.hf import HFLanguageModel, load_model, load_tokenizer
from treegraft.bench.bare import BareForwards, ForwardLog
from treegraft.bench.demo import demo_prompts
from treegraft.config import PipelineConfig, load_config
from treegraft.core.language_model import LanguageModel
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.drafters.lm import LmConfig

EXAMPLES = Path(__file__).parents[1] / "examples"
DEFAULTS = [EXAMPLES / f"{name}.yaml" for name in ("plain", "never", "always", "zoo", "paper")]
N_WARM = 4  # steps of each text that are not counted: first calls, and the prompt's prefill


@dataclass
class Arm:
    """One config on texts of one length, and what its steps took."""

    name: str
    context: int
    pipeline: Pipeline
    models: dict[str, LanguageModel]
    texts: Iterator[list[int]]
    new_tokens: int
    clock: Callable[[], float]
    steps: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    n_new: int = 0
    _running: Iterator[Any] | None = None
    _bare: BareForwards = field(init=False)
    _n_run: int = 0

    def __post_init__(self) -> None:
        self._bare = BareForwards(self.models, self.clock)

    def turn(self) -> None:
        """One step, and its forwards again; a new text where the last one ended."""
        if self._running is None:
            options = {"max_new_tokens": self.new_tokens, "eos": ()}
            self._running = self.pipeline.stream(next(self.texts), **options)
            self._n_run = 0
        with ForwardLog(self.models) as log:
            started = self.clock()
            chunk = next(self._running)
            taken = self.clock() - started
        bare = sum(self._bare.seconds(forward) for forward in log.take())
        if chunk.generation is not None:
            self._running = None
        self._n_run += 1
        if self._n_run <= N_WARM:
            return
        self.steps.append(taken)
        self.bare.append(bare)
        self.n_new += len(chunk.tokens)
        for stage, seconds in chunk.step.seconds.items():
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds

    def row(self) -> dict[str, Any]:
        """The figures, in milliseconds and shares."""
        step, bare = np.array(self.steps), np.array(self.bare)
        share = 1.0 - bare / step
        return {
            "config": self.name,
            "context": self.context,
            "steps": len(self.steps),
            "step_ms": 1e3 * float(np.median(step)),
            "bare_ms": 1e3 * float(np.median(bare)),
            "outside_ms": 1e3 * float(np.median(step - bare)),
            "share": 1.0 - float(bare.sum() / step.sum()),
            "share_median": float(np.median(share)),
            "share_p10": float(np.percentile(share, 10)),
            "share_p90": float(np.percentile(share, 90)),
            "stages_ms": {s: 1e3 * t / len(step) for s, t in sorted(self.stages.items())},
        }


def texts(context: int, seed: int) -> Iterator[list[int]]:
    """Texts of ``context`` tokens from the zoo's prompts, joined in a new order each time."""
    tokenizer = load_tokenizer("zoo:target")[0]
    each = [tokenizer(str(prompt.content))["input_ids"] for prompt in demo_prompts(10**6)]
    rng = np.random.default_rng(seed)
    while True:
        text: list[int] = []
        while len(text) < context:
            text += [token for i in rng.permutation(len(each)) for token in each[i]]
        yield text[-context:]


def load(source: str, n_positions: int, plan: GraphPlan | None) -> LanguageModel:
    """A model that takes at least ``n_positions``, whatever its config says."""
    model = load_model(source, dtype="float32", device="cpu").model
    limit = max(n_positions, model.config.max_position_embeddings)
    model.config.max_position_embeddings = limit
    plain = HFLanguageModel(model, name=source)
    if plan is None:
        return plain
    compiled = CompiledModel(plain, plan)
    print(compiled.graphs, file=sys.stderr)
    return compiled


def main(
    configs: Annotated[list[Path] | None, typer.Argument(help="YAML files.")] = None,
    contexts: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "200",
    steps: Annotated[int, typer.Option(min=5, help="Counted steps per arm.")] = 120,
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens per text.")] = 96,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    compile_: Annotated[
        str, typer.Option("--compile", help="off, auto, on, or with a compiler: auto:inductor.")
    ] = "off",
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
) -> None:
    """Share of a step that is not forwards, by config and context."""
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    sizes = [int(size) for size in contexts.split(",")]
    mode, _, compiler = compile_.partition(":")
    made: dict[str, Any] = {"mode": mode, "compiler": compiler or None}
    plan = None if mode == "off" else GraphPlan(**made)
    models: dict[str, LanguageModel] = {}
    arms: list[Arm] = []
    for path in configs or DEFAULTS:
        config: PipelineConfig = load_config(path)
        sampling = config.sampling.model_copy(update={"temperature": temperature})
        # Compiled here or not at all: what a pipeline compiles by itself is not in the log.
        backend = config.backend.model_copy(update={"compile": "off"})
        config = config.model_copy(update={"sampling": sampling, "backend": backend})
        lms = [drafter.model for drafter in config.drafters if isinstance(drafter, LmConfig)]
        for source in (config.target.model, *lms):
            if source not in models:
                models[source] = load(source, max(sizes) + new_tokens + 2048, plan)
        for size in sizes:
            pipeline = build_pipeline(config, models=models)
            used = {source: models[source] for source in (config.target.model, *lms)}
            arms.append(Arm(path.stem, size, pipeline, used, texts(size, 0), new_tokens, clock))
    while any(len(arm.steps) < steps for arm in arms):
        for arm in arms:
            if len(arm.steps) < steps:
                arm.turn()
    rows = [arm.row() for arm in arms]
    if as_json:
        print(json.dumps({"threads": threads, "temperature": temperature, "rows": rows}))
        return
    heads = f"{'step ms':>9}{'bare ms':>9}{'outside':>9}{'share':>8}  p10..p90"
    print(f"{'config':12}{'context':>8}{heads}")
    for row in rows:
        print(
            f"{row['config']:12}{row['context']:8}{row['step_ms']:9.2f}{row['bare_ms']:9.2f}"
            f"{row['outside_ms']:9.2f}{row['share']:8.1%}  "
            f"{row['share_p10']:.1%}..{row['share_p90']:.1%}"
        )
        print("   ", "  ".join(f"{s} {t:.2f}" for s, t in row["stages_ms"].items()))


if __name__ == "__main__":
    typer.run(main)
