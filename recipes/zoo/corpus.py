"""Documents: the sources cut into natural units that end (functions, classes, sections), without
near copies.

A document is 200 to 2,400 characters, roughly 60 to 700 tokens. Files are held out whole, by a hash
of their name, so nothing of a held-out file is ever trained on except what other files copy from it
(and near copies are dropped).
"""

from __future__ import annotations

import ast
import hashlib
import html
import json
import random
import re
import textwrap
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from sources import SOURCES, Source, folder

MIN_CHARS = 200
MAX_CHARS = 2400
HELD_OUT_PERCENT = 3
# A document is a near copy when more than this share of its longer lines was seen before.
SEEN_SHARE = 0.5
SKIPPED_PARTS = {
    "site-packages",
    "dist-packages",
    "_vendor",
    "vendored",
    "__pycache__",
    "lib2to3",
    "idlelib",
}


@dataclass(frozen=True, slots=True)
class Document:
    """One unit of text. ``kind`` is code, prose or a task form; ``file`` is its source and path."""

    text: str
    kind: str
    file: str
    held_out: bool


def is_held_out(file: str) -> bool:
    """True for about 3 % of the files, the same ones on every machine."""
    return int(hashlib.sha256(file.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def is_clean(text: str) -> bool:
    """False for tables of numbers, minified or encoded stuff, licence texts and mostly non-ASCII
    text.
    """
    letters = sum(map(str.isalpha, text))
    digits = sum(map(str.isdigit, text))
    foreign = sum(ord(char) > 126 for char in text)
    lines = text.splitlines()
    return (
        letters > 0.4 * len(text)
        and digits < 0.12 * len(text)
        and foreign < 0.02 * len(text)
        and max(map(len, lines)) < 400
        and not re.search(
            r"copyright|licensed under|all rights reserved|warrant(y|ies)", text, re.IGNORECASE
        )
    )


def code_units(text: str) -> Iterator[str]:
    """Functions, short classes, methods of long classes (dedented), a module's opening lines."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()

    def source(first: ast.stmt, last: ast.stmt) -> str:
        top = min([first.lineno, *(item.lineno for item in getattr(first, "decorator_list", ()))])
        return textwrap.dedent("\n".join(lines[top - 1 : last.end_lineno]))

    def walk(body: list[ast.stmt]) -> Iterator[str]:
        group: list[ast.stmt] = []
        for node in body:
            if isinstance(node, ast.ClassDef) and len(source(node, node)) > MAX_CHARS:
                yield from walk(node.body)
                continue
            if len(source(node, node)) >= MIN_CHARS * 2:
                yield source(node, node)
                continue
            # Small neighbours read as one unit, up to half the longest document.
            if group and len(source(group[0], node)) > MAX_CHARS // 2:
                yield source(group[0], group[-1])
                group = []
            group.append(node)
        if group:
            yield source(group[0], group[-1])

    yield from walk(tree.body)


def html_sections(text: str) -> Iterator[str]:
    """The text of an HTML page, cut at its headings."""
    text = re.sub(r"(?is)<(script|style|nav|head|footer)\b.*?</\1>", " ", text)
    text = re.sub(
        r"(?is)<pre\b[^>]*>(.*?)</pre>",
        lambda m: "\n\n" + m[1].replace("\n", "\x00") + "\n\n",
        text,
    )
    text = re.sub(r"\s*\n\s*", " ", text)
    text = re.sub(r"(?i)<h[1-5]\b", "\x01<", text)
    text = re.sub(r"(?i)<li\b[^>]*>", "\n- ", text)
    text = re.sub(r"(?i)<br\s*/?>|</tr>", "\n", text)
    text = re.sub(
        r"(?i)</?(p|div|h[1-5]|ul|ol|table|section|dl|dt|dd|blockquote)\b[^>]*>", "\n\n", text
    )
    text = html.unescape(re.sub(r"<[^>]*>", "", text)).replace("\x00", "\n")
    for section in text.split("\x01"):
        section = re.sub(r"[ \t\xa0]+\n", "\n", section.replace("\xa0", " ").replace("¶", ""))
        yield re.sub(r"\n{3,}", "\n\n", section).strip()


def rst_sections(text: str) -> Iterator[str]:
    """reStructuredText cut at its headings; index entries and labels are dropped."""
    text = re.sub(
        r"(?m)^\.\. (index|_|highlight|sectionauthor|moduleauthor)[^\n]*\n(?:[ ]+[^\n]*\n)*",
        "",
        text,
    )
    text = re.sub(r":(?:[a-z]+:)?[a-z]+:`[!~]?\.?([^`<]*?)(?:\s*<[^`]*>)?`", r"\1", text)
    pieces = re.split(r"(?m)^(?=[^\n]+\n([=\-~^\"*+#])\1{3,}\n)", text)
    for piece in pieces[::2]:
        yield re.sub(r"\n{3,}", "\n\n", piece).strip()


def passages(section: str) -> Iterator[str]:
    """Paragraphs of ``section`` gathered into pieces of up to about 1,400 characters."""
    piece = ""
    for paragraph in section.split("\n\n"):
        if piece and len(piece) + len(paragraph) > 1400:
            yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
    if piece:
        yield piece


def read(source: Source, work: Path) -> Iterator[tuple[str, str]]:
    """Pairs (path within the source, text), in an order that does not depend on the machine."""
    base = folder(source, work)
    for root in source.roots:
        for path in sorted((base / root).rglob("*")):
            if path.suffix not in {".py", ".txt", ".rst", ".md", ".html"} or not path.is_file():
                continue
            if SKIPPED_PARTS & set(path.relative_to(base).parts) or path.stat().st_size > 600_000:
                continue
            try:
                yield str(path.relative_to(base)), path.read_text("utf-8").expandtabs(4)
            except UnicodeDecodeError:
                continue


def units(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Pairs (kind, text) of one file."""
    if path.endswith(".py"):
        for unit in code_units(text):
            yield "code", unit
        return
    sections = html_sections(text) if path.endswith(".html") else rst_sections(text)
    for section in sections:
        for passage in passages(section):
            yield "prose", passage


def fingerprints(text: str) -> list[int]:
    """Hashes of the longer lines, CamelCase names and digits blanked: renamed copies match."""
    plain = re.sub(r"\b\w*[A-Z]\w*\b|\d+", "_", text)
    return [
        zlib.crc32(line.strip().encode()) for line in plain.splitlines() if len(line.strip()) > 24
    ]


def documents(work: Path, seed: int) -> list[Document]:
    """All clean documents of all sources, each source within its share, near copies dropped."""
    seen: set[int] = set()
    kept: list[Document] = []
    for source in SOURCES:
        found: list[Document] = []
        for path, text in read(source, work):
            file = f"{source.name}/{path}"
            held_out = is_held_out(file)
            for kind, unit in units(path, text):
                unit = re.sub(r"[ \t]+\n", "\n", unit).strip("\n")
                if not MIN_CHARS <= len(unit) <= MAX_CHARS or not is_clean(unit):
                    continue
                marks = fingerprints(unit)
                if sum(mark in seen for mark in marks) > SEEN_SHARE * len(marks):
                    continue
                seen.update(marks)
                found.append(Document(unit, kind, file, held_out))
        random.Random(seed).shuffle(found)
        total = 0
        for document in found:
            total += len(document.text)
            if total > source.share_mb * 1e6:
                break
            kept.append(document)
        size = min(total / 1e6, source.share_mb)
        print(f"{source.name}: {len(found)} documents, kept {size:.1f} MB", flush=True)
    return kept


def main(
    work: Annotated[
        Path, typer.Option(help="Working folder; sources.py has fetched the sources into it.")
    ],
    seed: Annotated[int, typer.Option(help="Order of documents.")] = 1,
) -> None:
    """Write corpus.jsonl (one document a line) below WORK."""
    kept = documents(work, seed)
    random.Random(seed).shuffle(kept)
    with (work / "corpus.jsonl").open("w", encoding="utf-8") as out:
        for document in kept:
            out.write(json.dumps(asdict(document)) + "\n")
    for held_out in (False, True):
        size = Counter[str]()
        for document in kept:
            if document.held_out == held_out:
                size[document.kind] += len(document.text)
        print("held out" if held_out else "training", dict(size), "characters")


if __name__ == "__main__":
    typer.run(main)
