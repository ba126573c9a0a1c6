"""``treegraft demo``: the shipped models on the shipped prompts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from treegraft.cli.options import Compile, Json
from treegraft.cli.output import (
    loading,
    note,
    print_json,
    progress,
    stderr,
    stdout,
    working,
)
from treegraft.core.errors import ConfigError

if TYPE_CHECKING:
    from treegraft.bench.demo import Demo
    from treegraft.pipeline import Pipeline

_STREAMED_TOKENS = 48
_STREAMED_PROMPT = (
    'def is_palindrome(text):\n    """Return True if text reads the same backwards."""\n'
)


def demo(
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 is greedy.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Key of the noise.")] = 0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            min=1,
            help="Tokens per prompt and config; default: as many (16 to 64) as a minute allows.",
        ),
    ] = None,
    prompts_per_kind: Annotated[
        int, typer.Option("--prompts-per-kind", min=1, help="Prompts of each kind.")
    ] = 3,
    compile_: Compile = "off",
    as_json: Json = False,
) -> None:
    """Shipped models on shipped prompts, five ways.

    Plain decoding, three schedules of the same two drafters, and the scheduler that has learned
    when to call whom (above temperature 0 a chain of draws) take turns on every prompt.

    Streams one completion, then prints speeds and whether all tokens were identical; exits 1 if
    one differs. Takes about a minute at most: when time runs out, fewer prompts are decoded.
    """
    from treegraft.bench.comparison import build_pipelines
    from treegraft.bench.demo import choose_threads, demo_configs, demo_prompts, run_demo

    prompts = demo_prompts(prompts_per_kind)
    if compile_ not in ("off", "on", "auto"):
        raise ConfigError(f"--compile must be off, on or auto, found {compile_!r}")
    configs = demo_configs(temperature, seed, compile_=compile_)
    if compile_ != "off":
        # Programs hold for the threads that they are made with.
        with working("choosing the number of threads"):
            eager = build_pipelines({"plain": demo_configs(temperature, seed)["plain"]})
            choose_threads(eager["plain"], prompts[0])
    with loading("loading models") as on_compile:
        pipelines = build_pipelines(configs, on_compile=on_compile)
    if compile_ == "off":
        choose_threads(pipelines["plain"], prompts[0])
    for line in pipelines["plain"].compiled:
        note(line)
    if not as_json:
        _stream([*pipelines.values()][-1], max_new_tokens or _STREAMED_TOKENS)
    with progress("ways of decoding", len(prompts)) as tick:
        result = run_demo(pipelines, prompts, max_new_tokens, on_run=tick)
    n = result.comparison.n_prompts
    if n < len(prompts):
        note(f"time was up: {n} of {len(prompts)} prompts were decoded")
    if as_json:
        print_json(result.as_dict())
    else:
        _print(result)
    if not result.comparison.identical:
        raise typer.Exit(1)


def _stream(pipeline: Pipeline, n: int) -> None:
    """One completion as it comes; the prompt is dimmed where that is possible."""
    out = stdout()
    out.print(f"A completion, drafted by {' and '.join(pipeline.drafter_names)}:", style="bold")
    out.print(_STREAMED_PROMPT, style="dim", markup=False, soft_wrap=True, end="")
    for chunk in pipeline.stream(_STREAMED_PROMPT, max_new_tokens=n):
        sys.stdout.write(chunk.text or "")
        sys.stdout.flush()
    sys.stdout.write("\n\n")


def _legend(result: Demo) -> list[str]:
    """What each row of the tables is, for somebody who sees them for the first time."""
    calls = ", ".join(map(str, result.settings["mixed"]["scheduler"]["calls"]))
    lines = [
        "plain   the target alone, one token per forward (a target call)",
        "never   look-ups in the text (ngram) draft every layer of the tree, the small model never",
        "always  the small model drafts every layer",
        f"mixed   both draft one tree, in the layers {calls}",
    ]
    if "drawn" in result.comparison.arms:
        lines.append("drawn   the small model draws a chain of tokens at random")
    if "learned" in result.comparison.arms:
        lines.append(
            "learned the small model and two look-ups, called as was worth it on other texts"
        )
    return lines


def _print(result: Demo) -> None:
    from treegraft.cli.tables import comparison_report, slower_in_words

    comparison = result.comparison
    out = stdout()
    for line in _legend(result):
        out.print(line, style="dim", markup=False, highlight=False)
    print()
    out.print(comparison_report(comparison))
    print()
    for line in slower_in_words(comparison):
        print(line)
    if comparison.identical:
        same = [s for s in comparison.summaries()[1:] if not s.same_law]
        n_tokens = sum(s.statistics.new_tokens for s in same)
        print(
            f"All {n_tokens} drafted tokens are identical to plain decoding "
            f"({comparison.n_prompts} prompts, {len(same)} schedules)."
        )
        for arm in sorted(comparison.same_law):
            print(
                f"{arm} draws its tree: its texts have the law of plain ones, not their tokens "
                "(docs/losslessness.md)."
            )
    for summary in comparison.summaries():
        for d in summary.differences:
            stderr().print(
                f"{summary.name} differs from plain: prompt {d.prompt}, new token {d.position}: "
                f"expected {d.expected}, found {d.found}",
                style="red",
                markup=False,
            )
