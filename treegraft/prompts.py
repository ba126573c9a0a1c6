"""Reads prompts from files: plain text, JSON lines, or a JSON list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegraft.core.errors import PromptError

__all__ = [
    "SHIPPED",
    "Prompt",
    "check_text",
    "parse_ids",
    "parse_json",
    "read_prompts",
    "take_turns",
]

SHIPPED = "zoo:prompts"
"""Name of the shipped prompts, in place of a file."""

_CONTENT_KEYS = ("turns", "prompt", "text", "ids")
_ID_KEYS = ("id", "question_id")
_KIND_KEYS = ("kind", "category")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes
    ----------
    id : how results name it.
    content : text, or token ids (then no tokenizer is needed).
    kind : what sort of text it asks for; results are also grouped by it. None if unknown.
    """

    id: str
    content: str | tuple[int, ...]
    kind: str | None = None


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Prompts of a file, at most ``limit``; PromptError names the file and the line.

    ``.jsonl`` holds one JSON object per line and ``.json`` a list of them, with one of the keys
    ``turns`` (a list of strings, of which the first is taken), ``prompt``, ``text`` or ``ids``
    (token ids), and optionally ``id`` or ``question_id``, ``kind`` or ``category``. Every other
    file is one prompt, taken as it stands, line ends included. Suffixes count in either case; a
    byte order mark at the start is dropped. ``zoo:prompts`` stands for the shipped prompts, of each
    kind in turn.
    """
    if str(path) == SHIPPED:
        return _shipped(limit)
    path = Path(path)
    try:
        # Bytes, because reading as text would turn every line end into "\n".
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise PromptError(f"prompts {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PromptError(f"prompts {str(path)!r} is not a text file in UTF-8") from None
    except ValueError as error:  # a path that no file can have
        raise PromptError(f"prompts {str(path)!r} cannot be read: {error}") from None
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        # Only "\n" ends a line of JSON; splitlines would also cut at what strings may hold raw.
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        prompts = [
            _prompt(parse_json(line, f"{path} line {n}"), f"{path} line {n}", str(n))
            for n, line in lines[:limit]
        ]
    elif suffix == ".json":
        entries = parse_json(text, str(path))
        if not isinstance(entries, list):
            raise PromptError(f"{path}: a list of prompts is needed, found {_type(entries)}")
        prompts = [
            _prompt(entry, f"{path} entry {n}", str(n))
            for n, entry in enumerate(entries[:limit], 1)
        ]
    else:
        prompts = [Prompt(path.stem, text)] if text else []
    if not prompts:
        raise PromptError(f"prompts {str(path)!r} holds no prompt")
    return prompts


def _shipped(limit: int | None) -> list[Prompt]:
    from treegraft.zoo.catalog import zoo_prompts

    prompts = [Prompt(p.id, p.prompt, p.kind) for p in zoo_prompts()]
    return take_turns(prompts, len(prompts))[:limit]


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids from numbers separated by blanks or commas."""
    parts = text.replace(",", " ").split()
    wrong = [part for part in parts if not part.isdecimal()]
    if wrong:
        raise PromptError(f"token ids must be whole numbers from 0, found {wrong[0]!r}")
    try:
        return tuple(int(part) for part in parts)
    except ValueError:  # more digits than Python reads
        longest = max(map(len, parts))
        raise PromptError(
            f"token ids must be whole numbers, found one of {longest} digits"
        ) from None


def check_text(text: str, where: str) -> str:
    """The text itself; PromptError if no tokenizer could read it.

    Half a surrogate pair comes out of a JSON escape, or out of bytes on the command line that are
    no text.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where} must be text in UTF-8, found {text[error.start]!a} at character {error.start}"
        ) from None
    return text


def take_turns(prompts: Sequence[Prompt], per_kind: int | None = None) -> list[Prompt]:
    """The same prompts ordered so that kinds take turns, at most ``per_kind`` of each.

    Whatever number of them is decoded, the kinds are then represented evenly.
    """
    by_kind: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    rounds = max((len(group) for group in by_kind.values()), default=0)
    if per_kind is not None:
        rounds = min(rounds, per_kind)
    return [group[i] for i in range(rounds) for group in by_kind.values() if i < len(group)]


def parse_json(text: str, where: str) -> Any:
    """What ``text`` holds; PromptError in one line that begins with ``where``."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: no valid JSON: {error}") from None
    except RecursionError:
        raise PromptError(f"{where}: JSON is nested too deeply") from None
    except ValueError:  # Python reads no number of more digits than its limit
        raise PromptError(f"{where}: a number in the JSON has too many digits") from None


def _prompt(entry: Any, where: str, default_id: str) -> Prompt:
    if not isinstance(entry, dict):
        raise PromptError(f"{where}: an object is needed, found {_type(entry)}")
    key = next((key for key in _CONTENT_KEYS if key in entry), None)
    if key is None:
        raise PromptError(
            f"{where}: one of the keys {', '.join(_CONTENT_KEYS)} is needed, found "
            f"{', '.join(map(str, entry)) or 'none'}"
        )
    content = entry[key]
    if key == "turns":
        if not isinstance(content, list) or not content:
            found = "an empty list" if content == [] else _type(content)
            raise PromptError(f"{where}: turns must be a list of strings, found {found}")
        content = content[0]
    if key == "ids":
        whole = isinstance(content, list) and all(type(i) is int and i >= 0 for i in content)
        if not whole:
            raise PromptError(f"{where}: ids must be a list of whole numbers from 0")
        content = tuple(content)
    elif not isinstance(content, str):
        raise PromptError(f"{where}: {key} must be text, found {_type(content)}")
    if not content:
        raise PromptError(f"{where}: {key} is empty")
    # 0 is a name; null and the empty text are none.
    given = (entry[key] for key in _ID_KEYS if entry.get(key) not in (None, ""))
    name = check_text(str(next(given, default_id)), f"{where}: id")
    kind = next((entry[key] for key in _KIND_KEYS if entry.get(key)), None)
    if kind is not None:
        kind = check_text(str(kind), f"{where}: kind")
    if isinstance(content, str):
        check_text(content, f"{where}: prompt {name!r}")
    return Prompt(name, content, kind)


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
