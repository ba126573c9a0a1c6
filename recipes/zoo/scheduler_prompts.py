"""Prompts to fit the zoo's scheduler on, of the same kinds as the shipped ones but of other files.

Cut from the Python packages that stand beside treegraft in any environment, of which only files
are taken that the zoo was not trained on (``corpus.is_held_out``) and no shipped prompt is from.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from corpus import SKIPPED_PARTS, is_clean, is_held_out, passages, units
from prompts import CUTS, LEAST_TOKENS, MOST_TOKENS, tables

PACKAGES = ("stdlib", "torch", "transformers", "sympy", "numpy", "networkx", "pydantic", "rich")


def files(package: str) -> Iterator[tuple[str, Path]]:
    """Pairs (name as in the corpus, path) of a package's Python files."""
    if package == "stdlib":
        base = Path(sysconfig.get_paths()["stdlib"])
        for path in sorted(base.rglob("*.py")):
            yield f"stdlib/{path.relative_to(base)}", path
        return
    for entry in importlib.metadata.files(package) or ():
        if entry.suffix == ".py":
            yield f"{package}/{entry}", Path(str(entry.locate()))


def docstrings(text: str) -> Iterator[str]:
    """Passages of the docstrings of a file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            found = ast.get_docstring(node)
            if found:
                yield from passages(inspect.cleandoc(found))


def main(
    out: Annotated[Path, typer.Option(help="File of JSON lines to write.")],
    count: Annotated[int, typer.Option(help="Prompts per kind.")] = 60,
    seed: Annotated[int, typer.Option(help="Choice and cuts.")] = 5,
) -> None:
    """Write OUT, one {"id", "kind", "prompt", "source"} a line, kinds in turn."""
    from treegraft.backends.hf import load_tokenizer
    from treegraft.zoo.catalog import zoo_kinds

    tokenizer, _ = load_tokenizer("zoo:target")
    import treegraft.zoo

    shipped = ""
    for kind in zoo_kinds():
        file = Path(treegraft.zoo.__file__).parent / "prompts" / f"{kind}.jsonl"
        shipped += file.read_text(encoding="utf-8")
    rng = random.Random(seed)
    found: dict[str, list[tuple[str, str]]] = {"code": [], "prose": []}
    for package in PACKAGES:
        for name, path in files(package):
            if not is_held_out(name) or name in shipped or SKIPPED_PARTS & set(path.parts[-4:-1]):
                continue
            try:
                text = path.read_text("utf-8").expandtabs(4)
            except (OSError, UnicodeDecodeError):
                continue
            found["code"] += [(unit, name) for _, unit in units(str(path), text) if is_clean(unit)]
            found["prose"] += [(p, name) for p in docstrings(text) if len(p) > 200 and is_clean(p)]
    for documents in found.values():
        rng.shuffle(documents)

    def fits(prompt: str | None) -> bool:
        return prompt is not None and (
            LEAST_TOKENS <= len(tokenizer(prompt)["input_ids"]) <= MOST_TOKENS
        )

    chosen: dict[str, list[tuple[str, str]]] = {}
    for kind, (of, cut) in CUTS.items():
        mine: dict[str, str] = {}
        for text, name in found[of]:
            prompt = cut(text, rng)
            if fits(prompt):
                mine.setdefault(str(prompt), name)
            if len(mine) == count:
                break
        chosen[kind] = list(mine.items())
    chosen["table"] = [t for t in tables(4 * count, rng) if fits(t[0])][:count]
    with out.open("w", encoding="utf-8") as lines:
        for number in range(count):
            for kind, prompts in chosen.items():
                if number < len(prompts):
                    prompt, source = prompts[number]
                    record = {"id": f"{kind}-t{number:03d}", "kind": kind, "prompt": prompt}
                    lines.write(json.dumps(record | {"source": source}, ensure_ascii=False) + "\n")
    print({kind: len(prompts) for kind, prompts in chosen.items()})


if __name__ == "__main__":
    typer.run(main)
