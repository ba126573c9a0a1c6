"""``treegraft schedule``: measure costs, collect traces, fit a scheduler, hold it to account."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treegraft.cli.options import Json, Limit, PromptFile
from treegraft.cli.output import note, print_json, progress, working

__all__ = ["schedule"]

schedule = typer.Typer(
    help="Learn a scheduler: calibrate, collect, fit, evaluate.",
    add_completion=False,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Option("--config", "-c", help="YAML file of the pipeline.")]


@schedule.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """Learn a scheduler: calibrate, collect, fit, evaluate."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@schedule.command()
def collect(
    config: Config,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of traces; goes on with one.")],
    prompts: PromptFile = None,
    limit: Limit = None,
    every: Annotated[
        int, typer.Option("--every", min=1, help="Evaluate schedules every so many steps.")
    ] = 4,
    beam: Annotated[
        int,
        typer.Option("--beam", min=2, help="Schedules kept per layer where there are too many."),
    ] = 24,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the steps that are taken.")] = 0,
    ray: Annotated[
        str | None,
        typer.Option("--ray", help="Address of a Ray cluster, or auto; needs treegraft[ray]."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate call schedules along the target's own texts.

    Runs the target once per prompt; no schedule needs a target forward. Goes on where it stopped
    if --out holds traces of the same config.
    """
    from treegraft.config import load_config
    from treegraft.core.errors import PromptError
    from treegraft.prompts import read_prompts
    from treegraft.scheduling.collection import Collection

    if prompts is None:
        raise PromptError("--prompts FILE is needed, found none")
    wanted = read_prompts(prompts, limit)
    with working("loading models"):
        collection = Collection(load_config(config), out, every=every, beam=beam, seed=seed)
        missing = collection.missing(wanted)
    n_there = len(wanted) - len(missing)
    if n_there:
        note(f"{n_there} of {len(wanted)} prompts are there already")
    with progress("collecting", len(missing)) as tick:
        report = collection.run(missing, ray=ray, on_prompt=tick)
    for skipped in report.skipped:
        note(f"skipped {skipped}")
    if as_json:
        print_json({"path": str(out), **report.as_dict()})
    else:
        print(
            f"{out}: {report.n_steps} steps of {report.n_prompts} prompts, {report.n_rows} "
            f"schedules, {report.rate:.1f} steps per second"
        )


@schedule.command()
def calibrate(
    config: Config,
    out: Annotated[Path, typer.Option("--out", "-o", help="File of costs (JSON) to write.")],
    prompts: PromptFile = None,
    limit: Limit = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Rounds of timing each forward alone.")
    ] = 7,
    as_json: Json = False,
) -> None:
    """Measure what forwards and steps of a pipeline cost on this device.

    Prints predicted over measured seconds per step, on steps that nothing was fitted to. Without
    --prompts the shipped ones are decoded, or texts that any model can read.
    """
    from treegraft.backends.cost import save_costs
    from treegraft.bench.prompts import default_prompts
    from treegraft.config import load_config
    from treegraft.pipeline import build_pipeline
    from treegraft.prompts import read_prompts
    from treegraft.scheduling import calibration
    from treegraft.scheduling.collect import check_collectable

    loaded = load_config(config)
    check_collectable(loaded)
    with working("loading models"):
        pipeline = build_pipeline(loaded)
    wanted = read_prompts(prompts, limit) if prompts else default_prompts(pipeline, 64)[:limit]
    with progress("measuring", repeats + 1 + len(wanted)) as tick:
        measured = calibration.calibrate(pipeline, wanted, repeats=repeats, on_part=tick)
    save_costs(measured.costs, out)
    if as_json:
        print_json({"path": str(out), **measured.as_dict()})
        return
    shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in measured.stages.items())
    print(f"{out}: predicted over measured seconds: {shown} ({measured.steps} steps)")
