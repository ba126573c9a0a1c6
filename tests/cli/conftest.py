"""Tiny random models with a tiny tokenizer on disk, and a way to run command lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from treegraft.cli import run

TEXTS = (
    "def parse_args(argv):\n    parser = argparse.ArgumentParser()\n    return parser\n",
    "The quick brown fox jumps over the lazy dog and the dog does not mind.",
    "one two three, one two three, one two three",
)
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def tiny_tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    if chat:
        fast.chat_template = CHAT
    return fast


def tiny_model(vocab_size: int, seed: int, n_layers: int = 2, width: int = 32) -> LlamaForCausalLM:
    """A random Llama whose logits are far from ties."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=n_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@dataclass(frozen=True)
class Zoo:
    """Folders of a target, a drafter, a target without tokenizer and one with a chat template."""

    target: str
    small: str
    bare: str
    chatty: str


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    root = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    target = tiny_model(len(tokenizer), seed=1)
    small = tiny_model(len(tokenizer), seed=2, n_layers=1, width=16)
    for name, model in {"target": target, "small": small, "bare": target, "chatty": target}.items():
        model.save_pretrained(root / name)
        if name != "bare":
            tiny_tokenizer(chat=name == "chatty").save_pretrained(root / name)
    return Zoo(*(str(root / name) for name in ("target", "small", "bare", "chatty")))


@dataclass(frozen=True)
class Result:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Result]


@pytest.fixture
def treegraft(capsys: pytest.CaptureFixture[str]) -> Command:
    def command(*arguments: object) -> Result:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return command


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file
