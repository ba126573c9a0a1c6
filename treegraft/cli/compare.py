"""``treegraft compare``: configs against each other on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treegraft.cli.options import Json, Limit, MaxNewTokens, PromptFile, Seed, Temperature
from treegraft.cli.output import loading, note, print_json, progress, stdout

if TYPE_CHECKING:
    from treegraft.bench.comparison import Comparison
    from treegraft.config import PipelineConfig
    from treegraft.pipeline import Pipeline


def compare(
    configs: Annotated[list[Path], typer.Argument(help="Config files; the first is the baseline.")],
    prompts: PromptFile = None,
    limit: Limit = None,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="Decode each prompt so often with each config.")
    ] = 1,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Several configs on the same prompts.

    They decode in turns; prints speed ratios with their spread, and whether tokens are equal.
    Configs must share target, sampling and stop. A file may hold several: the keys base (a config)
    and variants (names, each with the options that differ from the base). Exits 1 if tokens differ
    from the first config's although both decode in the same exact type (float32 or float64).
    """
    from treegraft.bench import comparison as bench
    from treegraft.config import override
    from treegraft.core.errors import ConfigError, PromptError
    from treegraft.prompts import read_prompts

    if prompts is None:
        raise PromptError("--prompts FILE (or zoo:prompts) is needed, found none")
    named = _load(configs)
    if len(named) < 2:
        raise ConfigError(f"compare needs at least two configs, found {len(named)}")
    given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    settings = {option: value for option, value in given.items() if value is not None}
    if settings:
        named = {name: override(config, settings) for name, config in named.items()}
    bench.check_comparable(named)
    wanted = read_prompts(prompts, limit)
    with loading("loading models") as on_compile:
        pipelines = bench.build_pipelines(named, on_compile=on_compile)
    for line in dict.fromkeys(
        line for p in pipelines.values() for line in (*p.compiled, *p.notices)
    ):
        note(line)
    for each in wanted:
        next(iter(pipelines.values())).encode(each.content)
    with progress("comparing", len(wanted) * repeat) as tick:
        comparison = bench.compare(pipelines, wanted, repeat=repeat, on_run=tick)
    faulty = _faulty(comparison, pipelines)
    if as_json:
        print_json(_as_dict(comparison, named, repeat, faulty))
    else:
        _print(comparison, faulty)
    if faulty:
        raise typer.Exit(1)


def _load(paths: list[Path]) -> dict[str, PipelineConfig]:
    """Configs by name: that of the file, of the variant in a lone file, or FILE:VARIANT."""
    from treegraft.config import load_config, load_variants

    named = {}
    for name, path in _names(paths).items():
        variants = load_variants(path)
        if variants is None:
            named[name] = load_config(path)
        else:
            prefix = "" if len(paths) == 1 else f"{name}:"
            named.update({prefix + variant: config for variant, config in variants.items()})
    return named


def _names(paths: list[Path]) -> dict[str, Path]:
    """Stems of the files, or whole paths where stems do not tell them apart."""
    from treegraft.core.errors import ConfigError

    for names in ([path.stem for path in paths], [str(path) for path in paths]):
        if len(set(names)) == len(names):
            return dict(zip(names, paths, strict=True))
    raise ConfigError(f"configs must be different files, found {', '.join(map(str, paths))}")


def _faulty(comparison: Comparison, pipelines: dict[str, Pipeline]) -> list[str]:
    """Arms whose tokens differ where nothing but a fault explains it."""
    types = {name: _exact_type(pipeline) for name, pipeline in pipelines.items()}
    expected = types[comparison.arms[0]]
    return [
        arm
        for arm in comparison.arms
        if expected is not None and types[arm] == expected and comparison.differences(arm)
    ]


def _exact_type(pipeline: Pipeline) -> tuple[str, str] | None:
    """Type and device of the target's arithmetic, None for types that round too coarsely."""
    from treegraft.bench.choice import arithmetic_type, is_exact

    dtype = arithmetic_type(pipeline.target)
    return (str(dtype), pipeline.config.backend.device) if is_exact(dtype) else None


def _as_dict(
    comparison: Comparison, configs: dict[str, PipelineConfig], repeat: int, faulty: list[str]
) -> dict[str, object]:
    return {
        "prompts": comparison.n_prompts,
        "repeat": repeat,
        "baseline": comparison.arms[0],
        "configs": {
            s.name: s.as_dict("ratio_to_first")
            | {"config": configs[s.name].model_dump(mode="json"), "fault": s.name in faulty}
            for s in comparison.summaries()
        },
        "kinds": {
            kind: {
                "prompts": n,
                "ratio_to_first": {
                    arm: comparison.ratio(arm, kind).total for arm in comparison.arms[1:]
                },
            }
            for kind, n in comparison.kinds.items()
        },
    }


def _print(comparison: Comparison, faulty: list[str]) -> None:
    from treegraft.cli.tables import comparison_report, slower_in_words

    stdout().print(comparison_report(comparison))
    print()
    for line in slower_in_words(comparison):
        print(line)
    for summary in comparison.summaries():
        for d in summary.differences[:3]:
            note(
                f"{summary.name}: prompt {d.prompt}, new token {d.position}: expected "
                f"{d.expected}, found {d.found}"
            )
        if summary.same_law:
            note(
                f"{summary.name}: its verifier keeps the law of the texts and not their tokens, so "
                "tokens are not compared"
            )
        elif not summary.identical and summary.name not in faulty:
            note(
                f"{summary.name}: differences are not judged here (other or narrower arithmetic); "
                "treegraft check tells a tie from a fault"
            )
