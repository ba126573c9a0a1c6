"""``treegraft generate``: decode prompts with a config or with options."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from treegraft.cli.options import (
    Budget,
    Compile,
    ConfigFile,
    Depth,
    Device,
    Drafters,
    Dtype,
    Json,
    Limit,
    MaxNewTokens,
    PipelineOptions,
    PromptFile,
    SchedulerName,
    Seed,
    Target,
    Temperature,
    Width,
    pipeline_config,
    prompt_list,
)
from treegraft.cli.output import line_file, loading, note, print_json, progress, stderr

if TYPE_CHECKING:
    from treegraft.core.stats import Generation, Statistics
    from treegraft.pipeline import Chunk, Pipeline
    from treegraft.prompts import Prompt


def generate(
    config: ConfigFile = None,
    target: Target = None,
    drafter: Drafters = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; - reads stdin.")
    ] = None,
    prompts: PromptFile = None,
    limit: Limit = None,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Print text as it comes; with --json a line a step."),
    ] = False,
    ids: Annotated[
        bool, typer.Option("--ids", help="Prompts and output are token ids; needs no tokenizer.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the tokenizer's chat template.")
    ] = False,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Keep the k likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Keep the smallest set with this mass.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option("--min-p", help="Drop below this share of the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help="Above 1 avoids repetition.")
    ] = None,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="String that ends a text; repeat for more.")
    ] = None,
    scheduler: SchedulerName = None,
    depth: Depth = None,
    width: Width = None,
    budget: Budget = None,
    dtype: Dtype = None,
    device: Device = None,
    compile_: Compile = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="Write a line of JSON per step: tree, decisions, timings, verdict."
        ),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print figures and what they mean on stderr.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Decode prompts with any drafters.

    Give -c FILE, or --target MODEL with any number of --drafter. The text is the target's own,
    whatever drafts.
    """
    resolved = pipeline_config(
        PipelineOptions(
            config=config,
            target=target,
            drafters=drafter,
            scheduler=scheduler,
            depth=depth,
            width=width,
            budget=budget,
            dtype=dtype,
            device=device,
            compile=compile_,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            max_new_tokens=max_new_tokens,
            strings=stop,
        )
    )
    wanted = prompt_list(prompt, prompts, limit, ids)
    from treegraft.core.stats import Statistics
    from treegraft.pipeline import build_pipeline

    results: list[Generation] = []
    quiet = not stream and (as_json or not sys.stdout.isatty())
    with ExitStack() as stack:
        file = None
        if trace is not None:
            file = stack.enter_context(line_file(trace, "--trace", (config, prompts)))
        with loading("loading models") as on_compile:
            pipeline = build_pipeline(resolved, on_compile=on_compile)
        for line in (*pipeline.compiled, *pipeline.notices):
            note(line)
        if chat:
            wanted = [_in_chat(p, pipeline) for p in wanted]
        for each in wanted:  # a bad prompt is said before the first one is decoded
            pipeline.encode(each.content)
        begin = _untraced(pipeline) if file is None else _traced(pipeline, file)
        tick = stack.enter_context(progress("decoding", len(wanted), shown=quiet))
        for each in wanted:
            if not as_json and len(wanted) > 1:
                note(f"--- {each.id}")
            as_ids = ids or pipeline.tokenizer is None
            generation = _decode(begin(each), each, stream, as_ids, as_json)
            results.append(generation)
            for notice in generation.notices:
                note(notice)
            tick()
    total = Statistics.of(results)
    _say_if_slower(pipeline, total, results)
    if as_json:
        entries = [_entry(p, g) for p, g in zip(wanted, results, strict=True)]
        result = {
            "config": resolved.model_dump(mode="json"),
            "results": entries,
            "statistics": total.as_dict(),
        }
        if stream:
            print(json.dumps(result, ensure_ascii=False))
        else:
            print_json(result)
    if stats:
        from treegraft.cli.tables import statistics_report

        stderr().print(statistics_report(total))


def _say_if_slower(pipeline: Pipeline, total: Statistics, results: list[Generation]) -> None:
    from treegraft.bench.worth import gain_over_plain

    n_text = max(result.n_prompt + len(result.tokens) for result in results)
    gain = gain_over_plain(pipeline, total, n_text)
    if gain is not None and gain < 0.95:
        note(
            f"drafting does not pay here: about {gain:.2f} times the speed of plain decoding "
            "(treegraft compare measures it; fallback: auto decodes plainly where it does not pay)"
        )


def _untraced(pipeline: Pipeline) -> Callable[[Prompt], Iterator[Chunk]]:
    return lambda prompt: pipeline.stream(prompt.content)


def _traced(pipeline: Pipeline, file: TextIO) -> Callable[[Prompt], Iterator[Chunk]]:
    """Streams that write their trace to ``file``, which is emptied first."""
    from treegraft.trace import TraceWriter

    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe has nothing to lose
        file.truncate(0)
    writer = TraceWriter(pipeline, file)
    return lambda prompt: writer.stream(prompt.content, prompt.id)


def _decode(
    chunks: Iterator[Chunk], prompt: Prompt, stream: bool, as_ids: bool, as_json: bool
) -> Generation:
    """One text, printed in the form asked for."""
    generation = None
    for chunk in chunks:
        generation = chunk.generation
        if not stream:
            continue
        if as_json:
            step = {"id": prompt.id, "tokens": chunk.tokens, "text": chunk.text}
            print(json.dumps(step, ensure_ascii=False), flush=True)
        else:
            piece = " ".join(map(str, chunk.tokens)) + " " if as_ids else chunk.text or ""
            sys.stdout.write(piece)
            sys.stdout.flush()
    assert generation is not None
    if not as_json:
        if not stream:
            text = " ".join(map(str, generation.tokens)) if as_ids else generation.text or ""
            sys.stdout.write(text)
        sys.stdout.write("\n")
        sys.stdout.flush()
    return generation


def _entry(prompt: Prompt, generation: Generation) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "kind": prompt.kind,
        "text": generation.text,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "n_prompt": generation.n_prompt,
        "notices": list(generation.notices),
        "statistics": generation.statistics.as_dict(),
    }


def _in_chat(prompt: Prompt, pipeline: Pipeline) -> Prompt:
    """The prompt as a user's message in the tokenizer's chat template, as token ids."""
    from treegraft.core.errors import PromptError
    from treegraft.prompts import Prompt

    if not getattr(pipeline.tokenizer, "chat_template", None):
        raise PromptError(
            f"--chat needs a tokenizer with a chat template, found none for "
            f"{pipeline.config.target.model!r}"
        )
    if not isinstance(prompt.content, str):
        raise PromptError(f"--chat needs text prompts, found token ids in prompt {prompt.id!r}")
    message = [{"role": "user", "content": prompt.content}]
    encoded = pipeline.tokenizer.apply_chat_template(
        message, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return Prompt(prompt.id, tuple(encoded["input_ids"]), prompt.kind)
