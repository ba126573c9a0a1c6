"""``treegraft bench``: beside what one would use instead, and where the time goes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treegraft.cli.options import (
    Compile,
    ConfigFile,
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
    check_limit,
    pipeline_config,
)
from treegraft.cli.output import note, print_json, stdout, working

if TYPE_CHECKING:
    from treegraft.bench.checkpoint import Checkpoint
    from treegraft.bench.lineup import Arm
    from treegraft.config import PipelineConfig
    from treegraft.prompts import Prompt

__all__ = ["bench"]

bench = typer.Typer(
    help="Measure: beside other libraries, and where the time of a step goes.",
    add_completion=False,
    rich_markup_mode=None,
)

Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0.0, help="0 is greedy; default: the config's.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads of torch; default: torch's own.")
]

_QUICK: dict[str, Any] = {
    "sweep_prompts": 1,
    "sweep_tokens": 32,
    "profile_rounds": 3,
    "max_seconds": 200.0,
}
_TOKENS, _QUICK_TOKENS = 128, 48
_PER_KIND, _QUICK_PER_KIND = 3, 1


@bench.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """Measure: beside other libraries, and where the time of a step goes."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command()
def peers(
    config: ConfigFile = None,
    target: Target = None,
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", help="Model that drafts, for us and for every peer."),
    ] = None,
    prompts: PromptFile = None,
    limit: Limit = None,
    temperature: Temperature = None,
    seed: Seed = None,
    max_new_tokens: MaxNewTokens = None,
    dtype: Dtype = None,
    device: Device = None,
    compile_: Compile = None,
    threads: Threads = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and shorter texts: within five minutes.")
    ] = False,
    full_length: Annotated[
        bool,
        typer.Option("--full-length", help="Go on past end tokens: all texts have all tokens."),
    ] = False,
    arm: Annotated[
        list[str] | None,
        typer.Option("--arm", help="Only this way of decoding (and plain); repeat for more."),
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            "--peer-python",
            metavar="NAME=PATH",
            help="Interpreter that runs the peer (transformers, economize or flashspec); default: "
            "this one.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds that a peer may take for one text.")
    ] = 600.0,
    as_json: Json = False,
) -> None:
    """TreeGraft beside transformers' generate, and economize and flashspec where installed.

    Same weights, prompts, type and threads; everyone takes turns on every prompt. Prints speeds
    with their spread and whether tokens equal plain decoding's. Exits 1 if ours differ from plain
    decoding where they must not. Without -c, ours is the configuration that ships for the zoo.
    """
    from treegraft.bench.checkpoint import read_checkpoint
    from treegraft.bench.lineup import line_up
    from treegraft.bench.peer_report import PeerSettings
    from treegraft.bench.peers import compare_peers
    from treegraft.bench.shipped import our_configs, shipped_config, shipped_endpoints
    from treegraft.config import load_config, parse_config

    check_limit(limit, prompts)
    commands = _commands(peer_python or [])
    given = None if config is None else load_config(config)
    if given is None:
        other_models = any(given is not None for given in (target, drafter, dtype))
        ours, endpoints = shipped_config(temperature or 0.0, other_models), shipped_endpoints()
    else:
        ours = endpoints = given
    n_tokens = max_new_tokens or (_QUICK_TOKENS if quick else _TOKENS)
    wanted: dict[str, dict[str, Any]] = {
        "sampling": {"temperature": temperature, "seed": seed},
        "stop": {"max_new_tokens": n_tokens},
        "backend": {"dtype": dtype, "device": device, "compile": compile_},
    }
    data = ours.model_dump()
    for room, options in wanted.items():
        data[room] |= {name: value for name, value in options.items() if value is not None}
    if full_length:
        data["stop"]["eos"] = ()
    ours = parse_config(data)
    _check_shared(ours)
    configs = our_configs(ours, endpoints, target, drafter)
    arms = _chosen(line_up(configs), arm or [])
    ours = configs["ours"]
    checkpoint = read_checkpoint(ours.target.model)
    texts = checkpoint.encode(_prompts(checkpoint, prompts, limit, quick), n_tokens)
    settings = PeerSettings(
        target=ours.target.model,
        drafter=drafter or _drafting_model(ours),
        dtype=ours.backend.dtype,
        device=ours.backend.device,
        threads=threads,
        temperature=ours.sampling.temperature,
        seed=ours.sampling.seed,
        max_new_tokens=n_tokens,
        eos=checkpoint.eos if ours.stop.eos is None else ours.stop.eos,
        answer_seconds=timeout,
        **(_QUICK if quick else {}),
    )
    with working("comparing") as say:
        result = compare_peers(arms, texts, settings, commands, tuple(commands), on_progress=say)
    if as_json:
        print_json(result.as_dict())
    else:
        from treegraft.cli.bench_tables import peers_remarks, peers_report

        stdout().print(peers_report(result))
        print()
        for line in peers_remarks(result):
            print(line)
    if result.n_rounds < result.n_offered:
        note(f"time was up: {result.n_rounds} of {result.n_offered} rounds were decoded")
    if result.faulty:
        note(f"FAULT: {', '.join(result.faulty)} must emit the tokens of plain decoding")
        raise typer.Exit(1)


def _commands(given: Sequence[str]) -> dict[str, list[str]]:
    """By family, the command of its worker under the interpreter that the user names."""
    from treegraft.bench.lineup import PEER_FAMILIES
    from treegraft.bench.worker_process import worker_command
    from treegraft.core.errors import ConfigError

    commands = {}
    for entry in given:
        name, equals, path = entry.partition("=")
        if not equals or name not in PEER_FAMILIES:
            raise ConfigError(
                f"--peer-python must be NAME=PATH with NAME of {', '.join(PEER_FAMILIES)}, found "
                f"{entry!r}"
            )
        if not os.access(path, os.X_OK) or Path(path).is_dir():
            raise ConfigError(f"--peer-python {entry}: {path!r} is no program that can be run")
        commands[name] = worker_command(name, path)
    return commands


def _check_shared(config: PipelineConfig) -> None:
    """ConfigError for what not every peer can do, so that nobody decodes under other rules."""
    from treegraft.config import PipelineConfig
    from treegraft.core.errors import ConfigError

    fields = PipelineConfig.model_fields
    shared = {"sampling": ("temperature", "seed"), "stop": ("max_new_tokens", "eos")}
    for room, own in shared.items():
        default = fields[room].default
        for option in type(default).model_fields:
            value = getattr(getattr(config, room), option)
            if option not in own and value != getattr(default, option):
                raise ConfigError(
                    f"{room}.{option} must be left out here, where peers decode with temperature "
                    f"alone, found {value!r}"
                )
    if config.backend.dtype == "auto":
        raise ConfigError("backend.dtype must be named, so that peers take the same, found 'auto'")


def _chosen(arms: tuple[Arm, ...], wanted: Sequence[str]) -> tuple[Arm, ...]:
    from treegraft.bench.peer_report import BASELINE
    from treegraft.core.errors import ConfigError

    known = [arm.name for arm in arms]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--arm must be one of {', '.join(known)}, found {name!r}")
    return tuple(arm for arm in arms if not wanted or arm.name in (BASELINE, *wanted))


def _prompts(
    checkpoint: Checkpoint, file: Path | None, limit: int | None, quick: bool
) -> list[Prompt]:
    """Prompts of the file, or the shipped ones where they fit the target's tokenizer."""
    from treegraft.bench.demo import demo_prompts
    from treegraft.bench.prompts import is_the_zoos
    from treegraft.core.errors import PromptError
    from treegraft.prompts import read_prompts

    if file is not None:
        return read_prompts(file, limit)
    if checkpoint.tokenizer is None or not is_the_zoos(checkpoint.tokenizer):
        raise PromptError(
            f"--prompts FILE is needed: the shipped prompts are for the zoo's tokenizer, and "
            f"{checkpoint.source!r} has another"
        )
    return demo_prompts(_QUICK_PER_KIND if quick else _PER_KIND)


def _drafting_model(config: PipelineConfig) -> str | None:
    """The dearest model among the drafters."""
    from treegraft.policies.drafters.lm import LmConfig

    models = [drafter.model for drafter in config.drafters if isinstance(drafter, LmConfig)]
    return models[-1] if models else None


@bench.command()
def profile(
    config: ConfigFile = None,
    target: Target = None,
    drafter: Drafters = None,
    scheduler: SchedulerName = None,
    prompts: PromptFile = None,
    limit: Limit = None,
    temperature: Temperature = None,
    seed: Seed = None,
    max_new_tokens: MaxNewTokens = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Where the seconds of a step go, and how near they are to the forwards alone.

    Every forward is run again, bare, right after its step; the share of the physical limit is the
    sum of these over the sum of the steps. Without --prompts the shipped ones are read, one of each
    kind.
    """
    resolved = pipeline_config(
        PipelineOptions(
            config=config,
            target=target,
            drafters=drafter,
            scheduler=scheduler,
            temperature=temperature,
            seed=seed,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            device=device,
        )
    )
    import torch

    from treegraft.bench.checkpoint import read_checkpoint
    from treegraft.bench.profile import profile_texts

    check_limit(limit, prompts)
    n_tokens = resolved.stop.max_new_tokens
    checkpoint = read_checkpoint(resolved.target.model)
    texts = checkpoint.encode(_prompts(checkpoint, prompts, limit, quick=True), n_tokens)
    if threads is not None:
        torch.set_num_threads(threads)
    with working("profiling") as say:
        result = profile_texts(
            resolved,
            [text.content for text in texts],
            on_text=lambda found: say(f"profiling: {found.n_texts} of {len(texts)} prompts"),
        )
    if as_json:
        print_json({**result.as_dict(), "config": resolved.model_dump(mode="json")})
    else:
        from treegraft.cli.bench_tables import profile_report

        stdout().print(profile_report(result))
