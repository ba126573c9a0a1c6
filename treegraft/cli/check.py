"""``treegraft check``: can this model be verified losslessly here?"""

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
from treegraft.cli.output import print_json, progress

if TYPE_CHECKING:
    from treegraft.backends.adapter import AdapterReport
    from treegraft.bench.check import Check, TextVerdict


def check(
    config: ConfigFile = None,
    target: Target = None,
    drafter: Drafters = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="New tokens to compare per prompt.")
    ] = 64,
    prompts: PromptFile = None,
    limit: Limit = None,
    scheduler: SchedulerName = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Key of the noise of the sampled runs.")
    ] = 0,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Is drafting lossless with this model here?

    Compares drafted with plain decoding, greedy and seeded: equal, tie or fault. Also prints what
    the adapter decided about the model and the error of its self-test. Without --drafter look-ups
    draft. Exits 1 on a fault.
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
        )
    )
    from treegraft.bench.check import check_lossless
    from treegraft.core.errors import ConfigError
    from treegraft.prompts import read_prompts

    if not resolved.drafters:
        raise ConfigError("drafters: at least one is needed to check drafting, found none")
    check_limit(limit, prompts)
    wanted = None if prompts is None else read_prompts(prompts, limit)
    with progress("checking", None if wanted is None else 2 * len(wanted)) as tick:
        result = check_lossless(resolved, wanted, tokens, seed, on_verdict=tick)
    if as_json:
        print_json(result.as_dict())
    else:
        _print(result)
    if not result.passed:
        raise typer.Exit(1)


def _print(result: Check) -> None:
    if result.report is not None:
        _print_report(result.target, "target", result.report)
    for name, report in result.drafter_reports.items():
        _print_report(name, "drafter", report)
    for verdict in result.verdicts:
        print(_sentence(verdict))
    n_tokens = sum(v.n_tokens for v in result.verdicts)
    print(
        f"{'PASSED' if result.passed else 'FAILED'}: {len(result.verdicts)} texts, {n_tokens} "
        f"tokens compared: {result.count('equal')} equal, {result.count('tie')} ties, "
        f"{result.count('fault')} faults"
    )


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


def _sentence(v: TextVerdict) -> str:
    head = f"{v.verdict:6} {v.mode:7} {v.prompt}: {v.n_tokens} tokens"
    if v.choice is None:
        return head
    choice = v.choice
    return (
        f"{head}; new token {v.position}: expected {v.expected} ({choice.expected:.6g}), found "
        f"{v.found} ({choice.found:.6g}); the target's first choice is {choice.first} "
        f"({choice.best:.6g}), gap {choice.gap:.3g}, rounding explains {choice.tie_within:.3g}"
    )
