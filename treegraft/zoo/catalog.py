"""What the zoo holds: folders of weights by name, and the prompts that ship with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treegraft.core.errors import ConfigError

PREFIX = "zoo:"
_HERE = Path(__file__).parent
# Dear to cheap.
_NAMES = ("target", "medium", "small")
_SCHEDULERS = ("scheduler",)


@dataclass(frozen=True, slots=True)
class ZooPrompt:
    """One shipped prompt. ``kind`` groups prompts that reward the same sort of drafting."""

    id: str
    kind: str
    prompt: str


def zoo_names() -> tuple[str, ...]:
    """Names of the family's members, dearest first."""
    return _NAMES


def zoo_path(name: str) -> Path:
    """Folder of a member (config, weights, tokenizer) by name; the prefix ``zoo:`` is optional."""
    member = name.removeprefix(PREFIX)
    if member not in _NAMES:
        known = ", ".join(PREFIX + known for known in _NAMES)
        raise ConfigError(f"expected one of {known}, found {name!r}; use one of those names")
    folder = _HERE / member
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(
            f"model {PREFIX + member!r}: this copy of treegraft has no weights in {str(folder)!r}; "
            "install a wheel that brings them, or make them with recipes/zoo"
        )
    return folder


def zoo_scheduler(name: str) -> Path:
    """Folder of a shipped scheduler's artefact; the prefix ``zoo:`` is optional."""
    member = name.removeprefix(PREFIX)
    if member not in _SCHEDULERS:
        known = ", ".join(PREFIX + known for known in _SCHEDULERS)
        raise ConfigError(f"scheduler.artefact must be a folder or {known}, found {name!r}")
    return _HERE / member


def zoo_kinds() -> tuple[str, ...]:
    """Kinds of the shipped prompts, in alphabetical order."""
    return tuple(sorted(path.stem for path in (_HERE / "prompts").glob("*.jsonl")))


def zoo_prompts(kinds: Sequence[str] | None = None) -> list[ZooPrompt]:
    """The shipped prompts of ``kinds`` (all of them by default), in the order of their ids within
    each kind.
    """
    known = zoo_kinds()
    chosen = known if kinds is None else tuple(kinds)
    for kind in chosen:
        if kind not in known:
            raise ConfigError(
                f"expected prompt kinds out of {', '.join(known)}, found {kind!r}; use those"
            )
    prompts = []
    for kind in chosen:
        text = (_HERE / "prompts" / f"{kind}.jsonl").read_text(encoding="utf-8")
        # Only "\n" ends a line of JSON; splitlines would also cut at what strings may hold raw.
        for line in text.removesuffix("\n").split("\n"):
            record = json.loads(line)
            prompts.append(ZooPrompt(record["id"], record["kind"], record["prompt"]))
    return prompts
