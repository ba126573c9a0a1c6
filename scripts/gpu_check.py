"""What only a GPU can show, in one script and under eight minutes.

    python scripts/gpu_check.py [--json] [--backend compile=on ...] [--minutes 7.5]
    python scripts/gpu_check.py --dry-run          # tiny shapes on the CPU, under a minute

It checks that tokens are lossless on the device (float32, and bfloat16 under the tie rule of
`treegraft check`), captures and replays CUDA graphs through the backend's option ``compile`` where
it has one, counts synchronisations of host and device, and measures with random weights of the
shapes of 1 B and 8 B models: one target forward over N = 8..64 nodes against N = 1, and TreeGraft
against plain decoding with drafts of a set acceptance (`treegraft.bench.scripted`). One table is
printed; exit code 1 if a token is wrong or a section failed.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from time import monotonic, perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

from treegraft.backends.hf import HFLanguageModel
from treegraft.bench.bare import BareForwards, Forward
from treegraft.bench.check import check_lossless
from treegraft.bench.choice import choice_between
from treegraft.bench.comparison import first_difference
from treegraft.bench.shipped import shipped_config
from treegraft.config import BackendConfig, PipelineConfig, parse_config
from treegraft.core.errors import ConfigError
from treegraft.core.language_model import extend
from treegraft.pipeline import Pipeline, build_pipeline

SIZES = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
WIDTHS = (1, 8, 16, 32, 64)
# Nodes of a tree besides the root, as paths times tokens of each.
TREES = {8: (1, 7), 16: (3, 5), 64: (9, 7)}
ACCEPTANCES = (0.6, 0.8)


@dataclass(frozen=True)
class Row:
    """One line of the table. ``state``: ok, FAULT, FAILED, or why there is no figure."""

    section: str
    case: str
    figure: str
    state: str = "ok"
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Plan:
    """Where and how much is measured."""

    device: str
    sizes: dict[str, dict[str, int]]
    heads: dict[str, int]
    dtype: torch.dtype
    context: int
    new_tokens: int
    repeats: int
    check_tokens: int
    compiling: dict[str, Any]
    deadline: float
    rows: list[Row] = field(default_factory=list)

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")

    def add(self, section: str, case: str, figure: str, state: str = "ok", **values: Any) -> None:
        self.rows.append(Row(section, case, figure, state, values))
        print(f"{section:12}{case:34}{figure}  {'' if state == 'ok' else state}", file=sys.stderr)

    @contextmanager
    def section(self, name: str, case: str = "") -> Iterator[bool]:
        """False where time is up; what goes wrong inside becomes a row and ends nothing else."""
        if monotonic() > self.deadline:
            self.add(name, case, "", "skipped: time is up")
            yield False
            return
        try:
            yield True
        except torch.OutOfMemoryError:
            self.add(name, case, "", "not available: out of memory")
        except Exception as error:  # one section must not cost the others
            line = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            self.add(name, case, "", f"FAILED: {line}")
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()


def synchronise(plan: Plan) -> None:
    if plan.on_cuda:
        torch.cuda.synchronize()


def random_model(plan: Plan, size: str) -> HFLanguageModel:
    """A Llama of this shape with random weights, made on the device."""
    limits = {"max_position_embeddings": 8192, "tie_word_embeddings": size == "1B"}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(**plan.sizes[size], **plan.heads, **limits, **ids)
    devices = [torch.device(plan.device)] if plan.on_cuda else []
    with torch.random.fork_rng(devices), torch.device(plan.device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=plan.dtype)
    return HFLanguageModel(model.eval(), name=size)


def equality(plan: Plan) -> None:
    """Every drafted token of the zoo on this device, in float32 and bfloat16."""
    for dtype in ("float32", "bfloat16"):
        with plan.section("equality", f"zoo, {dtype}") as goes:
            if not goes:
                continue
            data = shipped_config(other_models=True).model_dump()
            data["backend"] |= {"device": plan.device, "dtype": dtype, "compile": "off"}
            found = check_lossless(parse_config(data), n_tokens=plan.check_tokens)
            counts = ", ".join(f"{found.count(v)} {v}" for v in ("equal", "tie", "fault"))
            state = "ok" if found.passed else "FAULT"
            figure = f"{found.n_checked} tokens in {found.dtype}: {counts}"
            values = {"texts": len(found.verdicts), "ties": found.n_ties, "dtype": found.dtype}
            plan.add("equality", f"zoo, {dtype}", figure, state, **values)


def scripted(
    backend: dict[str, Any], script: list[int], nodes: int, acceptance: float, new_tokens: int
) -> PipelineConfig:
    """TreeGraft on the model ``big`` with a tree of ``nodes`` nodes, root included."""
    width, length = TREES[nodes]
    params = {"script": script, "acceptance": acceptance, "length": length}
    drafter = {"kind": "treegraft.bench.scripted:ScriptedDrafter", "params": params}
    return parse_config(
        {
            "target": {"model": "big"},
            "drafters": [drafter],
            "builder": {"kind": "layered", "depth": 1, "width": width, "budget": nodes - 1},
            "stop": {"max_new_tokens": new_tokens, "eos": []},
            "backend": backend,
        }
    )


def plain(backend: dict[str, Any], new_tokens: int) -> PipelineConfig:
    stop = {"max_new_tokens": new_tokens, "eos": []}
    return parse_config({"target": {"model": "big"}, "stop": stop, "backend": backend})


def backend_of(plan: Plan) -> dict[str, Any]:
    return {"device": plan.device, "dtype": str(plan.dtype).removeprefix("torch.")}


def prompt_of(plan: Plan) -> list[int]:
    dice = np.random.default_rng(0)
    return [int(token) for token in dice.integers(plan.heads["vocab_size"], size=plan.context)]


def timed(plan: Plan, pipeline: Pipeline, prompt: list[int]) -> tuple[float, Any]:
    synchronise(plan)
    start = perf_counter()
    generation = pipeline.generate(prompt)
    synchronise(plan)
    return perf_counter() - start, generation


def verify_cost(plan: Plan, size: str, model: HFLanguageModel) -> None:
    """One forward of the target over N nodes, through the adapter and bare, against N = 1."""
    cache = model.new_cache(plan.context + max(WIDTHS))
    for _ in extend(model, cache, prompt_of(plan), 0, last_only=True):
        pass
    bare = BareForwards({"m": model})
    taken: dict[tuple[str, int], list[float]] = {}
    for repeat in range(plan.repeats + 2):
        for n in WIDTHS:
            span = plan.context + n
            rows = torch.arange(plan.context, span)
            visible = torch.arange(span) <= rows[:, None]
            synchronise(plan)
            start = perf_counter()
            with torch.no_grad():
                model.forward(cache, rows % model.vocab_size, rows, rows, visible)
            synchronise(plan)
            seconds = {"adapter": perf_counter() - start}
            seconds["bare"] = bare.seconds(Forward("m", n, span, False))
            if repeat >= 2:  # first calls choose kernels
                for how, value in seconds.items():
                    taken.setdefault((how, n), []).append(value)
    for n in WIDTHS:
        ms = {how: 1e3 * float(np.median(taken[how, n])) for how in ("adapter", "bare")}
        ratio = {how: ms[how] / (1e3 * float(np.median(taken[how, 1]))) for how in ms}
        figure = (
            f"{ms['adapter']:.3f} ms ({ratio['adapter']:.2f} x N = 1), "
            f"bare {ms['bare']:.3f} ms ({ratio['bare']:.2f} x)"
        )
        case = f"{size}, context {plan.context}, N = {n}"
        plan.add("verify", case, figure, ms=ms, ratio=ratio, n=n)


def plain_against_tree(plan: Plan, size: str, model: HFLanguageModel) -> None:
    """TreeGraft over plain decoding at set acceptances; they take turns."""
    prompt, backend = prompt_of(plan), backend_of(plan)
    models = {"big": model}
    base = build_pipeline(plain(backend, plan.new_tokens), models=models)
    timed(plan, base, prompt)
    script = [*prompt, *base.generate(prompt).tokens]
    for nodes in TREES:
        for acceptance in ACCEPTANCES:
            config = scripted(backend, script, nodes, acceptance, plan.new_tokens)
            drafted = build_pipeline(config, models=models)
            timed(plan, drafted, prompt)
            ratios, equal, state = [], True, "ok"
            for _ in range(3):
                expected_s, expected = timed(plan, base, prompt)
                found_s, found = timed(plan, drafted, prompt)
                prefill = [sum(g.prefill.values()) for g in (expected, found)]
                ratios.append((expected_s - prefill[0]) / max(found_s - prefill[1], 1e-9))
                verdict = judge(base, prompt, expected.tokens, found.tokens)
                equal &= verdict == "equal"
                state = "FAULT" if verdict == "fault" else state
            statistics = found.statistics
            figure = (
                f"{float(np.median(ratios)):.2f} x plain ({min(ratios):.2f}-{max(ratios):.2f}), "
                f"{statistics.mean_accepted_length:.2f} tokens/call, "
                f"{'equal' if equal else 'parts at a tie' if state == 'ok' else 'WRONG'}"
            )
            case = f"{size}, {nodes} nodes, acceptance {acceptance}"
            share = statistics.overhead_share
            plan.add("speed", case, figure, state, ratios=ratios, overhead_share=share)


def judge(base: Pipeline, prompt: list[int], expected: list[int], found: list[int]) -> str:
    """equal, tie or fault, by the rule of `treegraft check` at the first difference."""
    place = first_difference(expected, found)
    if place is None:
        return "equal"
    if place >= min(len(expected), len(found)):
        return "fault"
    text = [*prompt, *expected[:place]]
    choice = choice_between(
        base.target, text, len(prompt), expected[place], found[place], base.sampling(prompt)
    )
    return "tie" if choice.is_tie else "fault"


@contextmanager
def counted_graphs() -> Iterator[dict[str, int]]:
    """Counts captures and replays of CUDA graphs, whoever makes them."""
    counts = {"captures": 0, "replays": 0}
    graph = torch.cuda.CUDAGraph
    replay, end = graph.replay, graph.capture_end

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            counts[name] += 1
            return call(*arguments, **keywords)

        return wrapped

    graph.replay, graph.capture_end = counted("replays", replay), counted("captures", end)
    try:
        yield counts
    finally:
        graph.replay, graph.capture_end = replay, end


def graphs(plan: Plan, model: HFLanguageModel) -> None:
    """Captures, and replays per step, with the backend's options for compiled forwards."""
    if not plan.on_cuda:
        plan.add("graphs", "", "", "not available: no CUDA device")
        return
    if "compile" not in BackendConfig.model_fields:
        plan.add("graphs", "", "", "not available: the backend has no option compile")
        return
    prompt = prompt_of(plan)
    backend = backend_of(plan) | plan.compiling
    case = ", ".join(f"{name}: {value}" for name, value in plan.compiling.items())
    with counted_graphs() as counts:
        base = build_pipeline(plain(backend_of(plan), plan.new_tokens), models={"big": model})
        expected = base.generate(prompt).tokens
        script = [*prompt, *expected]
        try:
            config = scripted(backend, script, 16, 0.8, plan.new_tokens)
        except ConfigError as error:
            plan.add("graphs", case, "", f"not available: {error}")
            return
        drafted = build_pipeline(config, models={"big": model})
        drafted.generate(prompt)
        captures, before = counts["captures"], counts["replays"]
        found = drafted.generate(prompt)
        n_steps = len(found.steps)
        replays = (counts["replays"] - before) / n_steps
        verdict = judge(base, prompt, expected, found.tokens)
        late = counts["captures"] - captures
    state = "FAULT" if verdict == "fault" else "ok" if captures else "nothing was captured"
    figure = f"{captures} captures ({late} while decoding), {replays:.2f} replays/step, {verdict}"
    plan.add("graphs", case, figure, state, replays_per_step=replays)


def syncs(plan: Plan, model: HFLanguageModel) -> None:
    """Synchronisations per step, and memory after many steps."""
    if not plan.on_cuda:
        plan.add("syncs", "", "", "not available: no CUDA device")
        return
    prompt, backend = prompt_of(plan), backend_of(plan)
    base = build_pipeline(plain(backend, plan.new_tokens), models={"big": model})
    script = [*prompt, *base.generate(prompt).tokens]
    config = scripted(backend, script, 16, 0.8, plan.new_tokens)
    drafted = build_pipeline(config, models={"big": model})
    for name, pipeline in (("plain", base), ("16 nodes", drafted)):
        pipeline.generate(prompt)
        before, mode = torch.cuda.memory_allocated(), torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                n_steps = len(pipeline.generate(prompt).steps)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        n = sum("synchroniz" in str(warning.message) for warning in caught)
        grown = torch.cuda.memory_allocated() - before
        figure = (
            f"{n / n_steps:.2f} per step ({n_steps} steps, prefill in), memory {grown:+d} bytes"
        )
        plan.add("syncs", name, figure, syncs_per_step=n / n_steps, memory_growth=grown)


def table(rows: list[Row]) -> str:
    """The rows in Markdown, as docs/results.md takes them."""
    lines = ["| what | case | figure | |", "| --- | --- | --- | --- |"]
    lines += [f"| {r.section} | {r.case} | {r.figure} | {r.state} |" for r in rows]
    return "\n".join(lines)


def _option(text: str) -> tuple[str, Any]:
    """An option of the backend with its value: true, false, a whole number or a word."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise typer.BadParameter(f"--backend must be OPTION=VALUE, found {text!r}")
    words: dict[str, Any] = {"true": True, "false": False}
    return name, words.get(value, int(value) if value.isdecimal() else value)


def main(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny shapes on the CPU.")] = False,
    minutes: Annotated[float, typer.Option(help="Begin no section after so long.")] = 7.5,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="OPTION=VALUE",
            help="Backend options that compile forwards; repeat for more. Default: compile=on.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="CUDA device.")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
) -> None:
    """Run every section and print one table."""
    # On the CPU only the way is tested, for which a quick compiler will do.
    usual = ["compile=on", "compiler=eager"] if dry_run else ["compile=on"]
    if not dry_run and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device is there; --dry-run runs on the CPU")
    start = monotonic()
    plan = Plan(
        device="cpu" if dry_run else device,
        sizes={name: TINY if dry_run else shape for name, shape in SIZES.items()},
        heads=TINY_HEADS if dry_run else HEADS,
        dtype=torch.float32 if dry_run else torch.bfloat16,
        context=48 if dry_run else 1024,
        new_tokens=16 if dry_run else 96,
        repeats=3 if dry_run else 20,
        check_tokens=4 if dry_run else 48,
        compiling=dict(_option(text) for text in backend or usual),
        deadline=start + 60 * minutes,
    )
    where = "CPU (dry run)" if dry_run else torch.cuda.get_device_name(plan.device)
    versions = f"torch {torch.__version__}, transformers {version('transformers')}"
    equality(plan)
    for size in SIZES:
        with plan.section("model", size) as goes:
            if not goes:
                continue
            model = random_model(plan, size)
            for part in (verify_cost, plain_against_tree):
                with plan.section(part.__name__, size) as has_time:
                    if has_time:
                        part(plan, size, model)
            if size == "1B":
                for check in (syncs, graphs):
                    with plan.section(check.__name__) as has_time:
                        if has_time:
                            check(plan, model)
            del model
    taken = monotonic() - start
    if as_json:
        rows = [asdict(row) for row in plan.rows]
        print(json.dumps({"device": where, "versions": versions, "seconds": taken, "rows": rows}))
    else:
        print(f"{where}, {versions}, {taken:.0f} s\n\n{table(plan.rows)}")
    if any(row.state.startswith(("FAULT", "FAILED")) for row in plan.rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
