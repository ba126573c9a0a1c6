"""Token files: shuffled documents, each closed by EOS, one after the other."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from model import EOS_ID
from transformers import AutoTokenizer


def stream(files: list[Path], held_out: bool, prose_repeats: int, seed: int) -> list[str]:
    """Texts of all documents of one split in random order; prose comes ``prose_repeats`` times."""
    chosen: list[str] = []
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                document = json.loads(line)
                if document["held_out"] == held_out:
                    repeats = prose_repeats if document["kind"] == "prose" and not held_out else 1
                    chosen.extend([document["text"]] * repeats)
    random.Random(seed).shuffle(chosen)
    return chosen


def tokens(texts: list[str], tokenizer, batch: int = 2000) -> Iterator[np.ndarray]:
    """Ids of the texts, uint16, EOS after each."""
    for start in range(0, len(texts), batch):
        for encoding in tokenizer._tokenizer.encode_batch(texts[start : start + batch]):
            yield np.asarray([*encoding.ids, EOS_ID], dtype=np.uint16)


def main(
    work: Annotated[Path, typer.Option(help="Working folder with tokenizer/ and the documents.")],
    documents: Annotated[list[str], typer.Option(help="Files of documents below WORK.")],
    name: Annotated[str, typer.Option(help="Prefix of the files written.")] = "pack",
    prose_repeats: Annotated[int, typer.Option(help="How often each prose passage occurs.")] = 1,
    seed: Annotated[int, typer.Option(help="Order of documents.")] = 2,
) -> None:
    """Write WORK/NAME-train.npy and WORK/NAME-held.npy."""
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    for split, held_out in (("train", False), ("held", True)):
        texts = stream([work / file for file in documents], held_out, prose_repeats, seed)
        ids = np.concatenate(list(tokens(texts, tokenizer)))
        np.save(work / f"{name}-{split}.npy", ids)
        print(f"{split}: {len(texts)} documents, {len(ids) / 1e6:.2f} M tokens")


if __name__ == "__main__":
    typer.run(main)
