"""``treegraft schedule``: measure costs, collect traces, fit a scheduler, hold it to account."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treegraft.cli.options import Json, Limit, MaxNewTokens, PromptFile, Seed, Temperature
from treegraft.cli.output import loading, note, print_json, progress, working

if TYPE_CHECKING:
    from treegraft.prompts import Prompt

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
    n_left = len(wanted) - len(missing)
    if n_left:
        note(f"{n_left} of {len(wanted)} prompts are there already, or twice in the file")
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
    from treegraft.scheduling.collectable import check_collectable

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
    cost_scaled: Annotated[
        bool,
        typer.Option(
            "--cost-scaled",
            help="The costs are of another target than the traces, which gives the same texts at "
            "another price (recipes/zoo/deepen.py); the scheduler is for that one.",
        ),
    ] = False,
    hidden: Annotated[int, typer.Option("--hidden", min=1, help="Units per hidden layer.")] = 64,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Most passes over the rows.")] = 40,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of weights and order.")] = 0,
    ceiling: Annotated[
        bool,
        typer.Option(
            "--ceiling",
            help="Also find what boosted trees reach on the same features, cross-validated by "
            "prompt; needs treegraft[ceiling].",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Distil traces into a scheduler for one cost model.

    Prompts are split by hash into training, validation and test. Prints tokens per second that the
    cost model predicts for each split: of never, always, the best fixed schedule (found on the
    training split), the scheduler, and the oracle, which knows the continuation; with --ceiling of
    the best that boosted trees make of the features.
    """
    from treegraft.backends.artefact import write_artefact
    from treegraft.backends.cost import load_costs
    from treegraft.cli.output import stdout
    from treegraft.scheduling.ceiling import CeilingSettings, check_installed
    from treegraft.scheduling.fit import FitSettings
    from treegraft.scheduling.fit import fit as distil
    from treegraft.scheduling.traces import Traces

    if ceiling:
        check_installed()
    loaded, measured = Traces.load(traces), load_costs(costs).with_target_scale(target_scale)
    if cost_scaled:
        measured = measured.for_texts_of(loaded.header["signature"]["target"])
    warm = (measured.environment.get("temperature", 0.0), loaded.header["sampling"]["temperature"])
    if warm[0] != warm[1]:
        note(f"costs were measured at temperature {warm[0]:g}, the traces are of {warm[1]:g}")
    settings = FitSettings(hidden=hidden, epochs=epochs, seed=seed)
    with progress("fitting layers", None) as tick:
        fitted = distil(loaded, measured, settings, tick, CeilingSettings() if ceiling else None)
    write_artefact(fitted.artefact, out)
    if as_json:
        print_json(
            {
                "path": str(out),
                "best_fixed": list(fitted.best_fixed),
                "splits": fitted.metrics,
                "cost_scaled": fitted.artefact.header["cost_scaled"],
                "sampling": loaded.header["sampling"],
            }
        )
        return
    from treegraft.cli.tables import fit_report

    stdout().print(fit_report(fitted))
    print(f"\n{out}: scheduler for {', '.join(loaded.header['signature']['drafters'])}")


@schedule.command()
def evaluate(
    config: Config,
    scheduler: Annotated[Path, typer.Argument(help="Folder of treegraft schedule fit.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", help="File of prompts, a suite of its own; repeat for more."),
    ] = None,
    limit: Limit = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Runs of each prompt.")] = 3,
    every: Annotated[
        int, typer.Option("--every", min=1, help="Evaluate the oracle every so many steps.")
    ] = 4,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    paper: Annotated[
        bool, typer.Option("--paper/--no-paper", help="Decode with the paper's endpoints too.")
    ] = True,
    costs: Annotated[
        Path | None, typer.Option("--costs", help="Costs measured here; default: the scheduler's.")
    ] = None,
    ceiling: Annotated[
        Path | None,
        typer.Option(
            "--ceiling",
            help="Traces to grow boosted trees on: what the features could show at best; needs "
            "treegraft[ceiling].",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="File for a plot (.png, .svg, .pdf); needs treegraft[plot]."),
    ] = None,
    as_json: Json = False,
) -> None:
    """A fitted scheduler against its endpoints and the oracle, on prompts it was not fitted on.

    Decodes plainly, with never, always, the best fixed schedule and the scheduler in turns, and the
    endpoints under the paper's tree settings. The oracle is evaluated offline: no scheduler can
    know the continuation. Without --prompts the shipped ones are decoded, a suite for each kind;
    --limit takes the first of each suite. Exits 1 if tokens differ.
    """
    from treegraft.backends.artefact import read_artefact
    from treegraft.backends.cost import load_costs
    from treegraft.bench.comparison import build_pipelines
    from treegraft.cli.output import stdout
    from treegraft.cli.tables import evaluation_report
    from treegraft.config import load_config, override
    from treegraft.scheduling import evaluate as held
    from treegraft.scheduling.calibration import curve_models, pipeline_environment
    from treegraft.scheduling.ceiling import check_installed
    from treegraft.scheduling.traces import Traces

    if plot is not None:
        _check_plot(plot)
    artefact = read_artefact(scheduler)
    loaded = load_config(config)
    given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    settings = {option: value for option, value in given.items() if value is not None}
    if settings:
        loaded = override(loaded, settings)
    traces = None
    if ceiling is not None:
        check_installed()
        traces = Traces.load(ceiling)
    wanted = _suites(prompts, limit)
    arms = held.arm_configs(loaded, artefact, str(scheduler), paper)
    with loading("loading models") as on_compile:
        pipelines = build_pipelines(arms, on_compile=on_compile)
    for line in pipelines[held.VALUE].notices:
        note(line)
    measured = None
    if costs is not None:
        own = pipelines[held.VALUE]
        measured = load_costs(costs, curve_models(own), pipeline_environment(own))
    with progress("evaluating", len(wanted) * (repeat + 1)) as tick:
        found = held.evaluate(
            arms,
            artefact,
            wanted,
            repeat=repeat,
            every=every,
            costs=measured,
            pipelines=pipelines,
            on_part=tick,
            ceiling=traces,
        )
    if found.left_out:
        note(f"left out {len(found.left_out)} prompts that the scheduler was fitted on")
    if plot is not None:
        _plot(found.as_dict(), plot)
    if as_json:
        print_json(found.as_dict())
    else:
        stdout().print(evaluation_report(found))
    if not found.comparison.identical:
        raise typer.Exit(1)


def _suites(files: list[Path] | None, limit: int | None) -> list[Prompt]:
    """Prompts whose kind is their suite: that of the file, or of the shipped prompts."""
    from dataclasses import replace

    from treegraft.bench.demo import demo_prompts
    from treegraft.prompts import read_prompts

    if not files:
        return demo_prompts(limit or 100)
    return [
        replace(prompt, kind=file.stem, id=f"{file.stem}/{prompt.id}")
        for file in files
        for prompt in read_prompts(file, limit)
    ]


def _check_plot(file: Path) -> None:
    from importlib.util import find_spec

    from treegraft.core.errors import ConfigError

    if file.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot must end in .png, .svg or .pdf, found {str(file)!r}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; get treegraft[plot]")


def _plot(figures: dict[str, Any], file: Path) -> None:
    """Bars: value, the best fixed schedule and the oracle over the better endpoint, by suite."""
    from matplotlib.figure import Figure

    keys = (
        "best_fixed_to_better_endpoint",
        "value_to_better_endpoint",
        "oracle_to_better_endpoint",
    )
    labels = ("best fixed schedule", "value", "oracle (clairvoyant, predicted)")
    rows = {**figures["suites"], "mean": figures["mean"]}
    figure = Figure(figsize=(1.4 + 1.1 * len(rows), 3.6), layout="constrained")
    axes = figure.add_subplot()
    for i, (key, label) in enumerate(zip(keys, labels, strict=True)):
        places = [place + (i - 1) * 0.27 for place in range(len(rows))]
        axes.bar(places, [row[key] for row in rows.values()], 0.25, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), list(rows), rotation=20)
    axes.set_ylabel("x better of never and always")
    figure.legend(loc="outside upper center", ncols=len(keys), fontsize="small")
    figure.savefig(file)
