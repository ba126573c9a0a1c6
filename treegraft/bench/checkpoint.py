"""What a checkpoint says about its texts, read without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treegraft.backends.hf import load_tokenizer
from treegraft.backends.sources import reading, resolve
from treegraft.core.errors import PromptError
from treegraft.prompts import Prompt

__all__ = ["Checkpoint", "read_checkpoint"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Attributes
    ----------
    source : its name. tokenizer : or None; ``no_tokenizer`` then says why.
    eos : ids that end a text, as its generation settings have them.
    max_positions : of its context, or None if it does not say.
    """

    source: str
    tokenizer: Any
    no_tokenizer: str
    eos: tuple[int, ...]
    max_positions: int | None

    def encode(self, prompts: Sequence[Prompt], n_new: int) -> list[Prompt]:
        """The prompts as token ids; PromptError for one without room for ``n_new`` tokens."""
        encoded = []
        for prompt in prompts:
            content = prompt.content
            if isinstance(content, str):
                if self.tokenizer is None:
                    raise PromptError(
                        f"prompt {prompt.id!r} is text and needs a tokenizer, found none "
                        f"({self.no_tokenizer})"
                    )
                content = tuple(self.tokenizer(content)["input_ids"])
            limit = self.max_positions
            if not content or (limit is not None and len(content) + n_new > limit):
                raise PromptError(
                    f"prompt {prompt.id!r} must have 1 to {limit} tokens with {n_new} new ones, "
                    f"found {len(content)}"
                )
            encoded.append(Prompt(prompt.id, content, prompt.kind))
        return encoded


def read_checkpoint(source: str) -> Checkpoint:
    """Read tokenizer and settings of a model; ``source`` as for ``load_model``."""
    from transformers import AutoConfig, GenerationConfig

    path = resolve(source)
    with reading(source):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a checkpoint need not have one
        eos = getattr(text, "eos_token_id", None)
    several = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),)
    tokenizer, why = load_tokenizer(source)
    limit = getattr(text, "max_position_embeddings", None)
    return Checkpoint(source, tokenizer, why, several, limit)
