"""Synthetic task documents: edits, repeats and structured text, made from the corpus and from
seeded random records.

They teach the family to copy from its context, which is what users ask of a model when they edit or
quote. The same functions make the forms that prompts.py cuts its prompts from.
"""

from __future__ import annotations

import builtins
import json
import keyword
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

# fmt: off
WORDS = (
    "alpha", "amber", "anchor", "apple", "arrow", "atlas", "basil", "beacon", "birch", "bridge",
    "brook", "cabin", "cedar", "cobalt", "copper", "coral", "crane", "delta", "ember", "falcon",
    "fern", "flint", "forest", "garden", "ginger", "granite", "harbor", "hazel", "heron", "indigo",
    "iris", "island", "ivory", "jade", "juniper", "kestrel", "lagoon", "lantern", "larch", "lemon",
    "lilac", "linen", "lotus", "maple", "marble", "meadow", "mint", "moss", "north", "oak", "ocean",
    "olive", "onyx", "opal", "orchid", "otter", "pearl", "pepper", "pine", "plum", "poppy",
    "prairie", "quartz", "rain", "raven", "reed", "river", "robin", "rose", "saffron", "sage",
    "sand", "shell", "silver", "slate", "sparrow", "spruce", "stone", "summit", "sun", "swan",
    "teal", "thistle", "thyme", "tiger", "topaz", "tulip", "valley", "velvet", "violet", "walnut",
    "willow", "winter", "wren", "yarrow", "zinc",
)
FIELDS = (
    "id", "name", "price", "stock", "color", "size", "city", "date", "status", "owner", "email",
    "count", "total", "rate", "weight", "height", "score", "level", "group", "team", "region",
    "code", "type", "label", "active", "version", "path", "host", "port", "user", "role", "queue",
    "bytes", "seconds", "retries",
)
# fmt: on
CHOICES = ("active", "pending", "closed", "open", "done", "failed", "ready", "paused")


def value(field: str, row: int, rng: random.Random) -> str:
    """A plausible value of ``field`` in record number ``row``."""
    if field in {"id", "code", "version"}:
        return str(100 + row)
    if field in {"price", "rate", "weight", "height", "seconds"}:
        return f"{rng.randint(1, 99)}.{rng.choice('05')}0"
    if field in {"stock", "size", "count", "total", "score", "level", "port", "bytes", "retries"}:
        return str(rng.choice((1, 2, 3, 4, 5, 8, 10, 12, 16, 20, 50, 64, 80, 100, 128, 256)))
    if field == "date":
        return f"2024-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    if field == "status":
        return rng.choice(CHOICES)
    if field == "active":
        return rng.choice(("true", "false"))
    if field == "email":
        return f"{rng.choice(WORDS)}@example.com"
    if field == "path":
        return f"/{rng.choice(('srv', 'data', 'home'))}/{rng.choice(WORDS)}"
    return rng.choice(WORDS)


def records(
    rng: random.Random, least: int = 4, most: int = 14
) -> tuple[str, list[str], list[list[str]]]:
    """A title word, field names and rows of values."""
    fields = rng.sample(FIELDS, rng.randint(3, 5))
    start = rng.randint(0, 60)
    rows = [
        [value(field, start + row, rng) for field in fields]
        for row in range(rng.randint(least, most))
    ]
    return rng.choice(WORDS), fields, rows


def quoted(text: str) -> str:
    """``text`` as a JSON scalar."""
    return text if re.fullmatch(r"-?\d+(\.\d+)?|true|false", text) else f'"{text}"'


def csv_table(rng: random.Random) -> str:
    """A comma-separated table with a header."""
    _, fields, rows = records(rng, 6, 18)
    return "\n".join(",".join(row) for row in [fields, *rows])


def markdown_table(rng: random.Random) -> str:
    """A heading and a table in Markdown."""
    title, fields, rows = records(rng)
    lines = [fields, ["---"] * len(fields), *rows]
    return f"## {title.capitalize()}\n\n" + "\n".join(
        "| " + " | ".join(line) + " |" for line in lines
    )


def json_list(rng: random.Random) -> str:
    """A JSON list of flat objects, one field a line or one object a line."""
    title, fields, rows = records(rng, 4, 9)
    if rng.random() < 0.5:
        lines = [
            "{" + ", ".join(f'"{f}": {quoted(v)}' for f, v in zip(fields, row, strict=True)) + "}"
            for row in rows
        ]
        return f'{{"{title}": [\n  ' + ",\n  ".join(lines) + "\n]}"
    blocks = [
        "    {\n"
        + ",\n".join(f'      "{f}": {quoted(v)}' for f, v in zip(fields, row, strict=True))
        + "\n    }"
        for row in rows
    ]
    return f'{{\n  "{title}": [\n' + ",\n".join(blocks) + "\n  ]\n}"


def yaml_list(rng: random.Random) -> str:
    """A YAML list of mappings."""
    title, fields, rows = records(rng, 4, 10)
    blocks = [
        "\n".join(
            f"{'  - ' if i == 0 else '    '}{f}: {v}"
            for i, (f, v) in enumerate(zip(fields, row, strict=True))
        )
        for row in rows
    ]
    return f"{title}:\n" + "\n".join(blocks)


def ini_file(rng: random.Random) -> str:
    """A configuration file with like sections."""
    _, fields, rows = records(rng, 4, 9)
    names = rng.sample(WORDS, len(rows))
    blocks = [
        f"[{name}]\n" + "\n".join(f"{f} = {v}" for f, v in zip(fields, row, strict=True))
        for name, row in zip(names, rows, strict=True)
    ]
    return "\n\n".join(blocks)


def sql_inserts(rng: random.Random) -> str:
    """INSERT statements into one table."""
    title, fields, rows = records(rng, 5, 14)
    head = f"INSERT INTO {title} ({', '.join(fields)}) VALUES"
    return "\n".join(
        f"{head} ({', '.join(quoted(v).replace(chr(34), chr(39)) for v in row)});" for row in rows
    )


def log_lines(rng: random.Random) -> str:
    """Lines of a log with rising times."""
    service, verb, noun = (
        rng.choice(WORDS),
        rng.choice(("started", "finished", "loaded", "stored")),
        rng.choice(FIELDS),
    )
    minute = rng.randint(0, 30)
    lines = [
        f"2024-03-{1 + minute % 28:02d} 10:{minute + row:02d}:00 INFO {service}: "
        f"{verb} {noun} {rng.choice(WORDS)} in {rng.randint(1, 9)} ms"
        for row in range(rng.randint(6, 14))
    ]
    return "\n".join(lines)


def changelog(rng: random.Random) -> str:
    """A changelog, newest version first."""
    major, minor = rng.randint(1, 4), rng.randint(6, 14)
    verbs = {"Added": "Add", "Fixed": "Fix", "Changed": "Change"}
    blocks = []
    for step in range(rng.randint(4, 8)):
        part = rng.choice(list(verbs))
        items = "\n".join(
            f"- {verbs[part]} the {rng.choice(FIELDS)} of {rng.choice(WORDS)}."
            for _ in range(rng.randint(1, 3))
        )
        blocks.append(f"## {major}.{minor - step}.0\n\n### {part}\n\n{items}")
    return "# Changelog\n\n" + "\n\n".join(blocks)


STRUCTURED: tuple[Callable[[random.Random], str], ...] = (
    csv_table,
    markdown_table,
    json_list,
    yaml_list,
    ini_file,
    sql_inserts,
    log_lines,
    changelog,
)


def structured(rng: random.Random) -> str:
    """One document of regular lines."""
    return rng.choice(STRUCTURED)(rng)


def new_name(rng: random.Random) -> str:
    """An identifier of one or two words."""
    return "_".join(rng.sample(WORDS, rng.randint(1, 2)))


def edit(code: str, rng: random.Random) -> str | None:
    """An instruction, the code before and the code after; None where the code offers nothing to
    edit.
    """
    reserved = {*keyword.kwlist, *dir(builtins), "self", "cls"}
    names = [n for n in re.findall(r"\b[a-z_][a-z0-9_]{2,}\b", code) if n not in reserved]
    frequent = sorted({name for name in names if 2 <= names.count(name) <= 12})
    functions = re.findall(r"(?m)^\s*def (\w+)\(([^)\n]*)\)", code)
    choice = rng.random()
    if choice < 0.6 and frequent:
        old, new = rng.choice(frequent), new_name(rng)
        what, after = f"rename {old} to {new}", re.sub(rf"\b{old}\b", new, code)
    elif choice < 0.85 and functions:
        function, parameters = rng.choice(functions)
        added = f"{new_name(rng)}={rng.choice(('None', 'True', 'False', '0', '1'))}"
        joined = f"{parameters}, {added}" if parameters.strip() else added
        what = f"add the parameter {added} to {function}"
        after = code.replace(f"def {function}({parameters})", f"def {function}({joined})")
    elif "'" in code and '"' not in code:
        what, after = "use double quotes", code.replace("'", '"')
    elif re.search(r"(?m)^\s*#.*\n", code):
        what, after = "remove the comments", re.sub(r"(?m)^\s*#.*\n", "", code)
    else:
        return None
    return f"### Edit: {what}\n### Before\n{code}\n### After\n{after}" if after != code else None


def repeat(text: str, rng: random.Random) -> str:
    """A request to repeat a text, or one line of it, followed by the answer."""
    lines = [line for line in text.splitlines() if len(line.strip()) > 20]
    if rng.random() < 0.3 and len(lines) > 3:
        line = rng.choice(lines)
        start = " ".join(line.split()[:3])
        return f"### Text\n{text}\n### Quote the line that starts with: {start}\n{line.strip()}"
    return f"### Text\n{text}\n### Repeat the text\n{text}"


def main(
    work: Annotated[Path, typer.Option(help="Working folder with corpus.jsonl.")],
    edits: Annotated[int, typer.Option(help="Edit documents to make.")] = 9000,
    repeats: Annotated[int, typer.Option(help="Repeat documents to make.")] = 5000,
    tables: Annotated[int, typer.Option(help="Structured documents to make.")] = 7000,
    seed: Annotated[int, typer.Option(help="Choice of texts, names and records.")] = 4,
) -> None:
    """Write tasks.jsonl; a task made from a held-out document is held out, and 3 % of the
    structured ones.
    """
    rng = random.Random(seed)
    with (work / "corpus.jsonl").open(encoding="utf-8") as lines:
        documents = [json.loads(line) for line in lines]
    short = [d for d in documents if len(d["text"]) < 800]
    made = 0
    with (work / "tasks.jsonl").open("w", encoding="utf-8") as out:

        def write(text: str, kind: str, file: str, held_out: bool) -> None:
            out.write(
                json.dumps({"text": text, "kind": kind, "file": file, "held_out": held_out}) + "\n"
            )

        for document in rng.sample(short, len(short)):
            if made >= edits:
                break
            text = edit(document["text"], rng) if document["kind"] == "code" else None
            if text:
                write(text, "edit", document["file"], document["held_out"])
                made += 1
        for document in rng.sample(short, repeats):
            write(repeat(document["text"], rng), "repeat", document["file"], document["held_out"])
        for number in range(tables):
            text = structured(rng)
            write(text, "table", f"generated/{number}", number % 100 < 3)


if __name__ == "__main__":
    typer.run(main)
