"""The prompts that ship with the family, cut from held-out documents at natural places.

Kinds where looking things up in the context helps: edit, repeat, table. Kinds where a model must:
code, docstring, test, prose. Every prompt names the file it was cut from and that file's licence.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from sources import SOURCES
from tasks import STRUCTURED, edit, repeat
from transformers import AutoTokenizer

LEAST_TOKENS, MOST_TOKENS = 40, 300
LICENCES = {source.name: source.licence for source in SOURCES}


def cut_edit(text: str, rng: random.Random) -> str | None:
    """An edit request through the line that opens the answer."""
    made = edit(text, rng) if 300 < len(text) < 750 else None
    return made[: made.index("### After\n") + len("### After\n")] if made else None


def cut_repeat(text: str, rng: random.Random) -> str | None:
    """A repeat request through the line that opens the answer."""
    if not 250 < len(text) < 700 or re.search(r"Prev|XXX|http|\|", text):
        return None
    made = repeat(text, rng)
    head = made.find("### Repeat the text\n")
    return made[: head + len("### Repeat the text\n")] if head > 0 else None


def cut_code(text: str, rng: random.Random) -> str | None:
    """A function up to the end of its docstring, or its first lines where it has none."""
    found = re.match(r'(?s)(?:@[^\n]+\n)*def (?!test)\w+\(.*?\)[^\n]*:\n    """.*?"""\n', text)
    return found[0] if found and len(text) - len(found[0]) > 150 else None


def cut_docstring(text: str, rng: random.Random) -> str | None:
    """A function up to its docstring's opening quotes and first sentence."""
    found = re.match(r'(?s)def (?!test)\w+\([^)]{60,}\)[^\n]*:\n    r?"""\s*[^\n]+\n', text)
    return found[0] if found and '"""' in text[len(found[0]) :] else None


def cut_test(text: str, rng: random.Random) -> str | None:
    """The first half of a test function, cut at a line end."""
    if not re.match(r"(?s)(?:@[^\n]+\n)*def test\w*\(", text):
        return None
    lines = text.splitlines(keepends=True)
    return "".join(lines[: max(4, len(lines) // 2)]).rstrip() + "\n" if len(lines) >= 10 else None


def cut_prose(text: str, rng: random.Random) -> str | None:
    """The first paragraphs of a passage, the last one cut at a sentence end."""
    if len(text) < 600 or re.search(r"[{}|<>_=]{2}|>>>|::", text) or text.count("\n- ") > 2:
        return None
    ends = [m.end() for m in re.finditer(r"[a-z]\.(?=\s)", text) if 200 < m.end() < 0.6 * len(text)]
    return text[: rng.choice(ends)] if ends else None


CUTS: dict[str, tuple[str, Callable[[str, random.Random], str | None]]] = {
    "edit": ("code", cut_edit),
    "repeat": ("prose", cut_repeat),
    "code": ("code", cut_code),
    "docstring": ("code", cut_docstring),
    "test": ("code", cut_test),
    "prose": ("prose", cut_prose),
}


def tables(count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Pairs (prompt, source) of structured text, cut at a line end after about half of it."""
    for number in range(count):
        lines = STRUCTURED[number % len(STRUCTURED)](rng).splitlines(keepends=True)
        head = "".join(lines[: max(5, (len(lines) * 11) // 20)]).rstrip() + "\n"
        yield head, "recipes/zoo/tasks.py (generated records)"


def main(
    work: Annotated[Path, typer.Option(help="Working folder with corpus.jsonl and tokenizer/.")],
    out: Annotated[Path, typer.Option(help="Folder for KIND.jsonl.")],
    count: Annotated[int, typer.Option(help="Prompts per kind.")] = 12,
    seed: Annotated[int, typer.Option(help="Choice and cuts.")] = 11,
) -> None:
    """Write OUT/KIND.jsonl, one {"id", "kind", "prompt", "source"} a line."""
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    rng = random.Random(seed)
    with (work / "corpus.jsonl").open(encoding="utf-8") as lines:
        held = [d for d in map(json.loads, lines) if d["held_out"]]
    rng.shuffle(held)
    chosen: dict[str, list[tuple[str, str]]] = {kind: [] for kind in CUTS}
    used: set[str] = set()
    for kind, (of, cut) in CUTS.items():
        origins: dict[str, int] = {}
        for document in held:
            origin = document["file"].split("/")[0]
            if (
                document["kind"] != of
                or document["file"] in used
                or origins.get(origin, 0) >= max(2, count // 4)
            ):
                continue
            prompt = cut(document["text"], rng)
            if prompt is None or not LEAST_TOKENS <= len(tokenizer.encode(prompt)) <= MOST_TOKENS:
                continue
            chosen[kind].append((prompt, f"{document['file']} ({LICENCES[origin]})"))
            used.add(document["file"])
            origins[origin] = origins.get(origin, 0) + 1
            if len(chosen[kind]) == count:
                break
    fitting = (
        t
        for t in tables(10 * count, rng)
        if LEAST_TOKENS <= len(tokenizer.encode(t[0])) <= MOST_TOKENS
    )
    chosen["table"] = [next(fitting) for _ in range(count)]
    out.mkdir(parents=True, exist_ok=True)
    for kind, prompts in chosen.items():
        with (out / f"{kind}.jsonl").open("w", encoding="utf-8") as lines:
            for number, (prompt, source) in enumerate(prompts):
                record = {
                    "id": f"{kind}-{number:02d}",
                    "kind": kind,
                    "prompt": prompt,
                    "source": source,
                }
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{kind}: {len(prompts)}")


if __name__ == "__main__":
    typer.run(main)
