"""``treegraft check``: is drafting lossless with this model here?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from treegraft.cli.options import (
    ConfigFile,
    Device,
    Drafters,
    Dtype,
    Json,
    Limit,
    PipelineOptions,
    PromptFile,
    SchedulerName,
    Target,
    check_limit,
    pipeline_config,
)
from treegraft.cli.output import note, print_json, progress, stdout

if TYPE_CHECKING:
    from treegraft.backends.adapter import AdapterReport
    from treegraft.bench.check import Check


def check(
    config: ConfigFile = None,
    target: Target = None,
    drafter: Drafters = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="New tokens to check per prompt.")
    ] = 64,
    prompts: PromptFile = None,
    limit: Limit = None,
    scheduler: SchedulerName = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Key of the noise of the sampled runs; default: the config's."),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Is drafting lossless with this model here?

    Every drafted token is held against plain decoding, greedy and seeded: equal, tie or fault. A
    tie is a place where rounding in bfloat16 or float16 alone may decide; in float32 and float64
    there is none. Also prints what the adapter decided about the model and the error of its
    self-test. Without --drafter look-ups draft; without --prompts a few of our own prompts are
    taken. Exits 1 on a fault.
    """
    if config is None and target is not None and not drafter:
        drafter = ["ngram"]
    resolved = pipeline_config(
        PipelineOptions(
            config=config,
            target=target,
            drafters=drafter,
            scheduler=scheduler,
            dtype=dtype,
            device=device,
            seed=seed,
        )
    )
    from treegraft.bench.check import check_lossless
    from treegraft.prompts import read_prompts

    check_limit(limit, prompts)
    wanted = None if prompts is None else read_prompts(prompts, limit)
    with progress("checking", None if wanted is None else 2 * len(wanted)) as tick:
        result = check_lossless(resolved, wanted, tokens, on_verdict=tick)
    if as_json:
        print_json(result.as_dict())
    else:
        _print(result)
    if not result.passed:
        raise typer.Exit(1)


def _print(result: Check) -> None:
    from treegraft.cli.tables import check_report

    if result.report is not None:
        _print_report(result.config.target.model, "target", result.report)
    for name, report in result.drafter_reports.items():
        _print_report(name, "drafter", report)
    print()
    stdout().print(check_report(result))
    print()
    print(
        f"{'PASSED' if result.passed else 'FAILED'}: {len(result.verdicts)} texts, "
        f"{result.n_checked} tokens checked in {result.dtype}, {result.n_accepted} of them "
        f"drafted: {result.count('equal')} texts equal, {result.count('tie')} with ties "
        f"({result.n_ties} tokens), {result.count('fault')} faults"
    )
    for mode, reason in result.skipped.items():
        note(f"{mode} texts were not checked: {reason}")
    if result.passed and not result.n_accepted:
        note("no drafted token was accepted on these prompts, so little was put to the test")


def _print_report(name: str, role: str, report: AdapterReport) -> None:
    reaches = ", ".join(
        f"{reach.layers} x {reach.kind}" + (f" ({reach.window})" if reach.window else "")
        for reach in report.reaches
    )
    limit = "not stated" if report.max_positions is None else str(report.max_positions)
    error = "not run" if report.self_test_error is None else f"{report.self_test_error:.2g}"
    print(f"{role} {name} ({report.model_type})")
    print(f"  attention        {report.attention}, mask: {report.mask_form}")
    print(f"  layers           {reaches}")
    print(f"  cache            {report.cache_keyword}, {report.n_layers} layers")
    print(f"  dtype            {str(report.dtype).removeprefix('torch.')}")
    print(f"  vocabulary       {report.vocab_size}, positions: {limit}")
    print(f"  self-test error  {error} (tree against paths, in spreads of the logits)")
    for text in report.notes:
        print(f"  note             {text}")
