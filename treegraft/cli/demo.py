"""``treegraft demo``: the shipped models on the shipped prompts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from treegraft.cli.options import Json
from treegraft.cli.output import note, print_json, progress, stderr, stdout, working

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
    as_json: Json = False,
) -> None:
    """Shipped models on shipped prompts, four ways (five if sampled).

    Plain decoding, and three schedules of the same two drafters, take turns on every prompt; above
    temperature 0 also a chain of draws.

    Streams one completion, then prints speeds and whether all tokens were identical; exits 1 if
    one differs. Takes about a minute at most: when time runs out, fewer prompts are decoded.
    """
    from treegraft.bench.comparison import build_pipelines
    from treegraft.bench.demo import choose_threads, demo_configs, demo_prompts, run_demo

    prompts = demo_prompts(prompts_per_kind)
    with working("loading models"):
        pipelines = build_pipelines(demo_configs(temperature, seed))
        choose_threads(pipelines["plain"], prompts[0])
    if not as_json:
        _stream(pipelines["mixed"], max_new_tokens or _STREAMED_TOKENS)
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


def _print(result: Demo) -> None:
    from treegraft.cli.tables import comparison_report, slower_in_words

    comparison = result.comparison
    out = stdout()
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
