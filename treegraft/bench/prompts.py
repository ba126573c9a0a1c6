"""Prompts for a model of which nothing is known, where the user names none."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from treegraft.core.errors import ConfigError
from treegraft.pipeline import Pipeline
from treegraft.prompts import Prompt

__all__ = ["default_prompts", "is_the_zoos"]

_TEXTS = (
    "def parse_args(argv):\n    parser = argparse.ArgumentParser()\n",
    "The committee met on Tuesday to discuss the plans for the new library.",
    "name,age,city\nAnna,31,Bonn\nBert,27,Kiel\nCarla,45,",
    "for i in range(10):\n    total += i\nfor j in range(10):\n    total +=",
)
_LENGTHS = (1, 2, 12, 48)


def default_prompts(pipeline: Pipeline, n_tokens: int) -> list[Prompt]:
    """Prompts that this pipeline can read, cut to leave ``n_tokens`` or half the context.

    With the zoo's tokenizer they are the shipped ones, one of each kind; with another, a few short
    texts; without one, or where it makes nothing of these, random ids of several lengths, each
    written twice so that look-ups find something.
    """
    target = pipeline.target
    room = None
    if target.max_positions is not None:
        room = max(1, target.max_positions - n_tokens, target.max_positions // 2)
    if pipeline.tokenizer is not None:
        if is_the_zoos(pipeline.tokenizer):
            from treegraft.bench.demo import demo_prompts

            prompts = demo_prompts(per_kind=1)
        else:
            prompts = [Prompt(f"text {n}", text) for n, text in enumerate(_TEXTS, 1)]
        read = [(prompt, pipeline.tokenizer(prompt.content)["input_ids"]) for prompt in prompts]
        fitting = [
            p if room is None or len(ids) <= room else Prompt(p.id, tuple(ids[:room]), p.kind)
            for p, ids in read
            if ids
        ]
        if fitting:
            return fitting
    # numpy's and not torch's: it asks for no default device.
    dice = np.random.default_rng(0)
    lengths = sorted({min(n, n if room is None else max(1, room // 2)) for n in _LENGTHS})
    random = []
    for length in lengths:
        ids = dice.integers(target.vocab_size, size=length).tolist()
        ids = (ids + ids)[:room]
        random.append(Prompt(f"{len(ids)} random ids", tuple(ids)))
    return random


def is_the_zoos(tokenizer: Any) -> bool:
    """Whether a tokenizer's ids mean what the zoo's mean, so that the shipped prompts fit it."""
    from treegraft.backends.hf import load_tokenizer
    from treegraft.zoo.catalog import PREFIX, zoo_names

    # A copy of treegraft without weights has no such tokenizer.
    with suppress(ConfigError):
        zoo, _ = load_tokenizer(PREFIX + zoo_names()[0])
        return zoo is not None and tokenizer.get_vocab() == zoo.get_vocab()
    return False
