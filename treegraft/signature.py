"""What a trace or a learned scheduler was made for: drafters, tree settings and features.

The signature of a pipeline is plain data, so that it can stand in a file; two of them are compared
option by option, and the first that differs is named. An option that a stored signature does not
name was added to the part later; what was made before it holds for its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from treegraft.backends.identity import model_identity
from treegraft.config import PipelineConfig
from treegraft.core.language_model import LanguageModel

__all__ = ["completed", "difference", "signature"]


def signature(config: PipelineConfig, models: Mapping[str, LanguageModel]) -> dict[str, Any]:
    """Everything that decides what a schedule drafts, as plain data.

    ``models`` : by the names that the config uses; target and model drafters must be there. Models
    are known by their weights (``backends.identity``), so that a copy elsewhere is the same one.
    """
    drafters = {}
    for name, drafter in zip(config.drafter_names, config.drafters, strict=True):
        options = drafter.model_dump(mode="json", exclude={"name"})
        if drafter.kind == "lm":
            options["model"] = model_identity(models[options["model"]])
        drafters[name] = options
    return {
        "target": model_identity(models[config.target.model]),
        "drafters": drafters,
        "builder": config.builder.model_dump(mode="json"),
        "graft": config.graft.model_dump(mode="json"),
        "ride_along": list(config.ride_along),
        "leftover": config.leftover,
        "calibration": config.calibration.model_dump(mode="json"),
    }


def completed(stored: Mapping[str, Any], config: PipelineConfig) -> dict[str, Any]:
    """A stored signature with the defaults of options that it does not name.

    Only parts of the kind that ``config`` has are completed; others differ anyway.
    """
    drafters = dict(zip(config.drafter_names, config.drafters, strict=True))
    known = dict(stored)
    for key in ("builder", "graft", "calibration"):
        known[key] = _completed(stored.get(key), getattr(config, key))
    if isinstance(stored.get("drafters"), Mapping):
        known["drafters"] = {
            name: _completed(options, drafters.get(name), exclude={"name"})
            for name, options in stored["drafters"].items()
        }
    return known


def _completed(stored: Any, part: BaseModel | None, exclude: AbstractSet[str] = frozenset()) -> Any:
    if part is None or not isinstance(stored, Mapping) or stored.get("kind") != _kind(part):
        return stored
    here = part.model_dump(mode="json", exclude=set(exclude))
    fields = type(part).model_fields
    # The order of the options here: two of the same are compared key by key.
    found = {}
    for name in here:
        if name in stored:
            found[name] = stored[name]
        elif not fields[name].is_required():
            found[name] = to_jsonable_python(fields[name].get_default(call_default_factory=True))
    return found | {name: value for name, value in stored.items() if name not in here}


def _kind(part: BaseModel) -> Any:
    return getattr(part, "kind", None)


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """The first option in which two signatures differ, in words; None if there is none."""
    for key in dict.fromkeys([*expected, *found]):
        here, there = expected.get(key), found.get(key)
        if here == there and list(_keys(here)) == list(_keys(there)):
            continue
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            if list(here) != list(there) and key == "drafters":
                return f"drafters are {', '.join(here)} there and {', '.join(there)} here"
            inner = difference(here, there)
            if inner is not None:
                return f"{key}.{inner}"
            continue
        return f"{key} is {here!r} there and {there!r} here"
    return None


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, Mapping) else []
