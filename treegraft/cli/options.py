"""Options that several commands share, and the config that they amount to."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treegraft.cli.output import note

if TYPE_CHECKING:
    from treegraft.config import PipelineConfig
    from treegraft.prompts import Prompt

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; other options override it.")
]
Target = Annotated[
    str | None, typer.Option("--target", help="Model: zoo:NAME, a local folder, or a hub id.")
]
Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        help="A kind (ngram, suffix, recycle), datastore:DIR, head:DIR, a model, or "
        "package.module:Class; repeat, cheapest first.",
    ),
]
SchedulerName = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        help="never, always, priority, cost_aware, online, budgeted, fixed:NAME,NAME,... (drafter "
        "of each layer), value:DIR (of treegraft schedule fit), or package.module:Class.",
    ),
]
Depth = Annotated[int | None, typer.Option("--depth", help="Drafting layers a step.")]
Width = Annotated[int | None, typer.Option("--width", help="Positions expanded per layer.")]
Budget = Annotated[
    str | None,
    typer.Option("--budget", metavar="N|auto", help="Most nodes the target reads, or auto."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, float64, bfloat16, float16 or auto.")
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:N or mps.")]
Compile = Annotated[
    str | None,
    typer.Option("--compile", help="Compile the forwards: off, on, or auto (what is faster)."),
]
MaxNewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", "-n", help="Most tokens to produce per prompt.")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="0 is greedy; larger flattens.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Key of the noise (temperature > 0).")]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help="Text file (one prompt), .jsonl / .json with turns, prompt, text or ids, or "
        "zoo:prompts.",
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Take only the first prompts of the file.")
]
Json = Annotated[bool, typer.Option("--json", help="Result as JSON on stdout.")]


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """What a user set on the command line; None was not set. Names are those of the config."""

    config: Path | None = None
    target: str | None = None
    drafters: list[str] | None = None
    scheduler: str | None = None
    depth: int | None = None
    width: int | None = None
    budget: str | None = None
    dtype: str | None = None
    device: str | None = None
    compile: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    strings: list[str] | None = None


_ROOMS = {
    "builder": ("depth", "width", "budget"),
    "backend": ("dtype", "device", "compile"),
    "sampling": ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"),
    "stop": ("max_new_tokens", "strings"),
}
_OWN_CLASS = re.compile(r"^(?!zoo:)[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")


def pipeline_config(options: PipelineOptions) -> PipelineConfig:
    """The config of a file with the options on top, or of the options alone, checked.

    With two or more drafters and no scheduler named, drafters take turns, the cheapest first; the
    choice is printed on stderr.
    """
    from treegraft.config import load_config, parse_config
    from treegraft.core.errors import ConfigError

    if options.config is None and options.target is None:
        raise ConfigError(
            "a config (-c FILE) or a target (--target MODEL) is needed, found neither"
        )
    data: dict[str, Any] = {}
    if options.config is not None:
        data = load_config(options.config).model_dump()
    if options.target is not None:
        data["target"] = {"model": options.target}
    for room, names in _ROOMS.items():
        values = {name: getattr(options, name) for name in names}
        given = {name: value for name, value in values.items() if value is not None}
        if room == "builder" and given:
            kind = data.setdefault("builder", {"kind": "layered"})["kind"]
            _check_builder_options(kind, given)
        data[room] = data.get(room, {}) | given
    if not data["builder"]:
        del data["builder"]
    if options.drafters:
        data["drafters"] = [_drafter(text) for text in options.drafters]
        # A fixed schedule of the file names drafters that are no longer there.
        if data.get("scheduler", {"kind": "fixed"})["kind"] == "fixed":
            data["scheduler"] = {"kind": "never"}
            if options.scheduler is None and len(options.drafters) > 1:
                data["scheduler"] = _turns(parse_config(data))
    if options.scheduler is not None:
        data["scheduler"] = _scheduler(options.scheduler)
    elif options.depth is not None and data.get("scheduler", {}).get("kind") == "fixed":
        data["scheduler"] = _cut(data["scheduler"], options.depth)
    return parse_config(data)


def _check_builder_options(kind: str, given: Mapping[str, Any]) -> None:
    from treegraft.components import ROLES
    from treegraft.core.errors import ConfigError

    builtin = ROLES["builder"].builtin
    for name in given:
        having = [k for k, (config, _) in builtin.items() if name in config.model_fields]
        if kind not in having:
            raise ConfigError(
                f"--{name} is an option of builder.kind {' and '.join(map(repr, having))}, "
                f"found {kind!r}"
            )


def _cut(scheduler: dict[str, Any], depth: int) -> dict[str, Any]:
    """A fixed schedule for ``depth`` layers: the file's, without the layers that are not drafted.

    Whatever differs from what the user may expect is printed on stderr.
    """
    calls = scheduler["calls"]
    how = "set it with --scheduler"
    if depth > len(calls):
        note(f"--depth {depth}: the file's scheduler.calls end after {len(calls)} layers; {how}")
    if not 0 <= depth < len(calls):
        return scheduler
    if depth == 0:
        return {"kind": "never"}
    shown = ",".join(map(str, calls[:depth]))
    note(f"scheduler: fixed:{shown} (the file's calls cut to --depth {depth}; {how})")
    return {"kind": "fixed", "calls": calls[:depth]}


def _turns(config: PipelineConfig) -> dict[str, Any]:
    names = config.drafter_names
    depth = getattr(config.builder, "depth", len(names))
    calls = [names[layer % len(names)] for layer in range(depth)]
    if not calls:
        return {"kind": "never"}
    note(f"scheduler: fixed:{','.join(calls)} (drafters take turns; set it with --scheduler)")
    return {"kind": "fixed", "calls": calls}


def _drafter(text: str) -> dict[str, Any]:
    from treegraft.components import ROLES
    from treegraft.core.errors import ConfigError

    kinds = ROLES["drafter"].builtin
    kind, _, path = text.partition(":")
    if kind == "datastore":
        if not path:
            raise ConfigError(
                f"--drafter {text} needs a folder: datastore:DIR, made by treegraft datastore build"
            )
        return {"kind": kind, "path": path}
    if kind == "head":
        if not path:
            raise ConfigError(f"--drafter {text} needs a folder: head:DIR")
        return {"kind": kind, "model": path}
    if text in kinds:
        needed = [n for n, field in kinds[text][0].model_fields.items() if field.is_required()]
        if needed:
            raise ConfigError(
                f"--drafter {text} needs a {needed[0]}: name the model itself "
                "(zoo:NAME, a local folder, or a hub id)"
            )
        return {"kind": text}
    if _OWN_CLASS.match(text):
        return {"kind": text}
    return {"kind": "lm", "model": text}


def _scheduler(text: str) -> dict[str, Any]:
    from treegraft.components import ROLES
    from treegraft.core.errors import ConfigError

    kind, _, calls = text.partition(":")
    if kind == "fixed":
        parts = [part.strip() for part in calls.split(",") if part.strip()]
        return {
            "kind": "fixed",
            "calls": [int(part) if part.isdecimal() else part for part in parts],
        }
    if kind == "value":
        if not calls:
            raise ConfigError(
                f"--scheduler {text} needs a folder: value:DIR, made by treegraft schedule fit"
            )
        return {"kind": "value", "artefact": calls}
    if _OWN_CLASS.match(text) or text in ROLES["scheduler"].builtin:
        return {"kind": text}
    known = ", ".join(k for k in ROLES["scheduler"].builtin if k not in ("fixed", "value"))
    raise ConfigError(
        f"--scheduler must be one of {known}, fixed:NAME,NAME,..., value:DIR or "
        f"package.module:Class, found {text!r}"
    )


def prompt_list(text: str | None, file: Path | None, limit: int | None, ids: bool) -> list[Prompt]:
    """Prompts of ``-p`` and ``--prompts``; with ``ids`` texts are read as token ids."""
    from treegraft.core.errors import PromptError
    from treegraft.prompts import Prompt, check_text, parse_ids, read_prompts

    if (text is None) == (file is None):
        found = "neither" if text is None else "both"
        raise PromptError(f"one of -p TEXT and --prompts FILE is needed, found {found}")
    check_limit(limit, file)
    if file is not None:
        prompts = read_prompts(file, limit)
    else:
        assert text is not None
        given = _stdin() if text == "-" else text
        prompts = [Prompt("prompt", check_text(given, "stdin" if text == "-" else "--prompt"))]
    if not ids:
        return prompts
    return [
        Prompt(p.id, parse_ids(p.content) if isinstance(p.content, str) else p.content, p.kind)
        for p in prompts
    ]


def check_limit(limit: int | None, file: Path | None) -> None:
    """PromptError if ``--limit`` has no file to act on, where it would do nothing."""
    from treegraft.core.errors import PromptError

    if limit is not None and file is None:
        raise PromptError(f"--limit {limit} needs --prompts FILE, found none")


def _stdin() -> str:
    from treegraft.core.errors import PromptError

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="")  # as it stands, as with a file
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"stdin is not text in {error.encoding.upper()}") from None
