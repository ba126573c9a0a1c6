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


@schedule.command()
def fit(
    traces: Annotated[Path, typer.Argument(help="Folder of treegraft schedule collect.")],
    costs: Annotated[Path, typer.Option("--costs", help="File of treegraft schedule calibrate.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the scheduler to write.")],
    target_scale: Annotated[
        float,
        typer.Option("--target-scale", min=0.01, help="Take the target for so many times as dear."),
    ] = 1.0,
    hidden: Annotated[int, typer.Option("--hidden", min=1, help="Units per hidden layer.")] = 64,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Most passes over the rows.")] = 40,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of weights and order.")] = 0,
    as_json: Json = False,
) -> None:
    """Distil traces into a scheduler for one cost model.

    Prompts are split by hash into training, validation and test. Prints tokens per second that the
    cost model predicts for each split: of never, always, the best fixed schedule (found on the
    training split), the scheduler, and the oracle, which knows the continuation.
    """
    from treegraft.backends.artefact import write_artefact
    from treegraft.backends.cost import load_costs
    from treegraft.cli.output import stdout
    from treegraft.scheduling.fit import FitSettings
    from treegraft.scheduling.fit import fit as distil
    from treegraft.scheduling.traces import Traces

    loaded, measured = Traces.load(traces), load_costs(costs).with_target_scale(target_scale)
    settings = FitSettings(hidden=hidden, epochs=epochs, seed=seed)
    with progress("fitting layers", None) as tick:
        fitted = distil(loaded, measured, settings, tick)
    write_artefact(fitted.artefact, out)
    if as_json:
        print_json(
            {"path": str(out), "best_fixed": list(fitted.best_fixed), "splits": fitted.metrics}
        )
        return
    from treegraft.cli.tables import fit_report

    stdout().print(fit_report(fitted))
    print(f"\n{out}: scheduler for {', '.join(loaded.header['signature']['drafters'])}")
