"""What is wrong with a config, in one line that names the option as the user wrote it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

__all__ = ["one_line"]


def _written(location: Sequence[int | str], data: Any, tags: Collection[str]) -> Iterator[str]:
    """The keys of a location; tags of the unions stand there too, but no user wrote them."""
    for part in location:
        inside = isinstance(data, Mapping) and part in data
        if inside or part not in tags:
            yield str(part)
            known = inside or (isinstance(data, list | tuple) and isinstance(part, int))
            data = data[part] if known else None


def one_line(error: ValidationError, data: Any, tags: Collection[str]) -> str:
    """The first fault as ``option: what is wrong (found value)``, with a count of the others.

    ``tags`` of the unions stand in a fault's place too, and no user wrote them.
    """
    faults = error.errors(include_url=False)
    fault = faults[0]
    where = ".".join(_written(fault["loc"], data, tags))
    message = fault["msg"].removeprefix("Value error, ")
    n_found = fault.get("ctx", {}).get("actual_length")
    if fault["type"] == "extra_forbidden":
        message = "unknown option"
    elif fault["type"] == "union_tag_invalid":
        context = fault.get("ctx", {})
        known, found = context.get("expected_tags"), context.get("tag")
        message = f"kind must be one of {known}, found {found!r}"
    elif fault["type"] == "union_tag_not_found":
        message = "a mapping with the key kind is needed"
    elif fault["type"] == "tuple_type":
        message = f"a list is needed, found {fault['input']!r}"
    elif fault["type"] == "too_short":
        message = f"{fault['ctx']['min_length']} or more entries are needed, found {n_found}"
    elif fault["type"] == "too_long":
        message = f"at most {fault['ctx']['max_length']} entries are allowed, found {n_found}"
    elif fault["type"] == "model_type":
        message = f"a mapping of options is needed, found {fault['input']!r}"
    elif fault["type"] not in ("value_error", "missing"):
        message = f"{message}, found {fault['input']!r}"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{where}: {message}{more}" if where else f"{message}{more}"
