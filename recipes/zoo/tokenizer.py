"""The family's tokenizer: byte-level BPE over the corpus's training part, digits one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOS = "<|endoftext|>"


def texts(corpus: Path, characters: float) -> Iterator[str]:
    """Training documents of ``corpus`` until ``characters`` have been read."""
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            if document["held_out"]:
                continue
            yield document["text"]
            characters -= len(document["text"])
            if characters < 0:
                return


def train(corpus: Path, entries: int, characters: float) -> PreTrainedTokenizerFast:
    """A tokenizer of ``entries`` ids, EOS being id 0; it is also the begin and padding token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(corpus, characters), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def main(
    work: Annotated[Path, typer.Option(help="Working folder with corpus.jsonl.")],
    entries: Annotated[int, typer.Option(help="Vocabulary size.")] = 4096,
    characters: Annotated[
        float, typer.Option(help="How much text to learn the merges from.")
    ] = 3e7,
) -> None:
    """Write WORK/tokenizer (tokenizer.json, tokenizer_config.json)."""
    train(work / "corpus.jsonl", entries, characters).save_pretrained(work / "tokenizer")


if __name__ == "__main__":
    typer.run(main)
