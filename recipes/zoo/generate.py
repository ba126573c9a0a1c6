"""The target's own texts: batched greedy and sampled continuations of training or held-out
documents.

One JSON line per text: {"kind", "temperature", "prompt": ids, "new": ids, "ended": whether EOS
came}. EOS is kept as the last id of ``new``.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from model import EOS_ID
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Generated:
    """A prompt and what the model wrote after it, as token ids."""

    kind: str
    temperature: float
    prompt: list[int]
    new: list[int]
    ended: bool


def opening(document: dict, tokenizer, rng: random.Random) -> list[int]:
    """The ids to continue from: a task's request, or the first lines of a text or table."""
    text = document["text"]
    if document["kind"] == "edit":
        return tokenizer.encode(text[: text.index("### After\n") + len("### After\n")])
    if document["kind"] == "repeat":
        cut = max(text.find(marker) for marker in ("### Repeat the text\n", "### Quote the line"))
        return tokenizer.encode(text[: text.index("\n", cut) + 1])
    ids = tokenizer.encode(text)
    return ids[: max(12, int(len(ids) * rng.uniform(0.15, 0.5)))]


def pick(tokens: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One id per row from logits (B, V): the best at temperature 0, else a draw."""
    if temperature == 0:
        return tokens.argmax(-1)
    return torch.multinomial(
        torch.softmax(tokens.float() / temperature, -1), 1, generator=generator
    )[:, 0]


@torch.inference_mode()
def continuations(
    model: LlamaForCausalLM,
    prompts: Sequence[list[int]],
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> list[list[int]]:
    """Up to ``new_tokens`` ids after each prompt, through EOS if it comes; rows that ended leave
    the batch.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([[EOS_ID] * (longest - len(p)) + p for p in prompts])
    visible = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    positions = (visible.cumsum(-1) - 1).clamp(min=0)
    rows = list(range(len(prompts)))
    new: list[list[int]] = [[] for _ in prompts]
    cache = DynamicCache(config=model.config)
    for _ in range(new_tokens):
        logits = model(
            ids,
            attention_mask=visible,
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        ).logits
        chosen = pick(logits[:, -1], temperature, generator)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            new[row].append(token)
        alive = (chosen != EOS_ID).nonzero()[:, 0]
        if len(alive) == 0:
            break
        # Dropping rows copies the cache, so it waits until a quarter of the batch has ended.
        if len(alive) <= 0.75 * len(rows):
            cache.batch_select_indices(alive)
            rows = [rows[i] for i in alive.tolist()]
            chosen, visible, positions = chosen[alive], visible[alive], positions[alive]
        ids = chosen[:, None]
        visible = torch.cat((visible, visible.new_ones(len(rows), 1)), dim=1)
        positions = positions[:, -1:] + 1
    return [tokens[: tokens.index(EOS_ID) + 1] if EOS_ID in tokens else tokens for tokens in new]


def choose(
    work: Path, files: list[str], kinds: Sequence[str], held_out: bool, per_kind: int, seed: int
) -> list[dict]:
    """``per_kind`` documents of each of ``kinds`` from one split."""
    rng = random.Random(seed)
    found: dict[str, list[dict]] = {kind: [] for kind in kinds}
    for file in files:
        with (work / file).open(encoding="utf-8") as lines:
            for line in lines:
                document = json.loads(line)
                if document["held_out"] == held_out and document["kind"] in found:
                    found[document["kind"]].append(document)
    return [d for some in found.values() for d in rng.sample(some, min(per_kind, len(some)))]


def main(
    work: Annotated[Path, typer.Option(help="Working folder with documents.")],
    model: Annotated[Path, typer.Option(help="Model folder.")],
    out: Annotated[Path, typer.Option(help="File to write (JSON lines).")],
    kinds: Annotated[
        str, typer.Option(help="Kinds of documents to continue, separated by commas.")
    ] = "code,prose,edit,repeat,table",
    per_kind: Annotated[int, typer.Option(help="Documents of each kind.")] = 64,
    held_out: Annotated[
        bool, typer.Option(help="Continue held-out documents instead of training ones.")
    ] = False,
    temperatures: Annotated[list[float], typer.Option(help="0 is greedy.")] = [0.0, 0.8],  # noqa: B006
    new_tokens: Annotated[int, typer.Option(help="Most tokens per text.")] = 256,
    batch: Annotated[int, typer.Option(help="Texts at a time.")] = 64,
    seed: Annotated[int, typer.Option(help="Choice of documents, cuts and draws.")] = 5,
) -> None:
    """Generate and write."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    documents = choose(
        work, ["corpus.jsonl", "tasks.jsonl"], kinds.split(","), held_out, per_kind, seed
    )
    cases = sorted(
        ((d["kind"], opening(d, tokenizer, rng)) for d in documents), key=lambda case: len(case[1])
    )
    cases = [case for case in cases if len(case[1]) <= 640]
    with out.open("w", encoding="utf-8") as lines:
        for temperature in temperatures:
            for start in range(0, len(cases), batch):
                part = cases[start : start + batch]
                made = continuations(
                    lm, [ids for _, ids in part], new_tokens, temperature, generator
                )
                for (kind, prompt), new in zip(part, made, strict=True):
                    text = Generated(kind, temperature, prompt, new, new[-1] == EOS_ID)
                    lines.write(json.dumps(asdict(text)) + "\n")
    print(f"{len(cases) * len(temperatures)} texts in {out}")


if __name__ == "__main__":
    typer.run(main)
