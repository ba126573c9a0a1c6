"""A draft head for the target: one block that foretells the target's states and, through its output
layer, its tokens (after EAGLE, arXiv 2401.15077, with EAGLE-3's unrolling, arXiv 2503.01840).

The target reads each text once; its states are kept. The head then reads every text several times
over, first on the target's states and then on its own of the time before, under the mask that a
draft of that depth has: place t of the k-th reading sees the text up to t - k and one node of each
reading in between. The loss is KL(target || head) in nats at some of the places, since the output
layer costs more than the head, and the smooth L1 distance of the states at all of them.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from distil import divergence, padded, read_texts, vocabulary_logits
from model import hidden
from muon import Muon
from torch import Tensor
from train import window
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from treegraft.backends.head import HeadBlock, save_head, weight_sample

MUON_RATE = 0.01
ADAM_RATE = 2e-3
WARMUP_STEPS = 20
STATE_WEIGHT = 0.5
SAVE_EVERY_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of equal length and what the target made of them.

    ``ids`` (B, L) int64, ``real`` (B, L) bool (no padding), ``states`` (B, L, C) float16.
    """

    ids: Tensor
    real: Tensor
    states: Tensor


def new_head(target: LlamaForCausalLM, seed: int) -> HeadBlock:
    """A head of the target's shape that starts as its last block and norm."""
    torch.manual_seed(seed)
    config = target.config
    block = HeadBlock(
        config.hidden_size,
        {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": dict(config.rope_parameters),
        },
    )
    block.body.layers[0].load_state_dict(target.model.layers[-1].state_dict())
    block.body.norm.load_state_dict(target.model.norm.state_dict())
    with torch.no_grad():
        both = torch.eye(config.hidden_size)
        block.join.weight.mul_(0.1).add_(torch.cat((both, both), dim=1))
    return block


def optimisers(block: HeadBlock) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for norms."""
    parameters = list(block.parameters())
    matrices = [p for p in parameters if p.ndim == 2]
    return [
        Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(
            [p for p in parameters if p.ndim != 2], lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0
        ),
    ]


def visible(length: int, reading: int) -> Tensor:
    """Bool (L, (reading + 1) L): which keys of all readings so far each place may see.

    Places without so much text before them, whose losses do not count, see themselves only.
    """
    place = torch.arange(length)
    blocks = [place[None, :] <= place[:, None] - reading]
    for step in range(1, reading + 1):
        blocks.append(place[None, :] == place[:, None] - reading + step)
    return torch.cat(blocks, dim=1)


def shifted(states: Tensor) -> Tensor:
    """The state behind the place before each: (B, L, C), zeros first."""
    return F.pad(states, (0, 0, 1, 0))[:, :-1]


def readings(block: HeadBlock, embeddings: Tensor, states: Tensor, number: int) -> list[Tensor]:
    """What the head says behind each place in each reading: ``number`` times (B, L, C)."""
    length = embeddings.shape[1]
    place = torch.arange(length)[None]
    cache = DynamicCache(config=block.body.config)
    said: list[Tensor] = []
    before = states
    for reading in range(number):
        mask = visible(length, reading)
        added = torch.zeros(mask.shape, dtype=embeddings.dtype).masked_fill_(~mask, -1e4)
        before = block(embeddings, shifted(before), place, added[None, None], cache)
        said.append(before)
    return said


def losses(
    block: HeadBlock, target: LlamaForCausalLM, batch: Batch, number: int, judged: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """(KL in nats, smooth L1 of the states) per reading.

    Means over the real places that a reading can have; the KL over those of ``judged`` (B, L) bool.
    """
    states = batch.states.float()
    real = batch.real.clone()
    real[:, :number] = False
    judged = judged & real
    with torch.autocast("cpu", torch.bfloat16):
        said = readings(block, target.model.embed_tokens(batch.ids), states, number)
        wanted = vocabulary_logits(target, states[judged].bfloat16())
        found = []
        for guess in said:
            values = divergence(vocabulary_logits(target, guess[judged].bfloat16()), wanted)
            far = F.smooth_l1_loss(guess[real].float(), states[real])
            found.append((values.mean(), far))
    return found


@torch.no_grad()
def agreement(
    block: HeadBlock, target: LlamaForCausalLM, texts: list[dict], number: int = 4
) -> dict[str, list[float]]:
    """By temperature, how often the head's first choice is the target's, for each reading.

    Over the new tokens of the texts, from the first that the target wrote on; in float32.
    """
    hits: dict[str, list[list[int]]] = defaultdict(lambda: [[0, 0] for _ in range(number)])
    for text in texts:
        ids = torch.tensor([text["prompt"] + text["new"]])
        states = hidden(target, ids, torch.float32)
        best = vocabulary_logits(target, states[0]).argmax(-1)
        first = len(text["prompt"]) - 1
        for reading, guess in enumerate(
            readings(block, target.model.embed_tokens(ids), states, number)
        ):
            choice = vocabulary_logits(target, guess[0]).argmax(-1)
            after = slice(max(first, reading + 1), ids.shape[1] - 1)
            count = hits[f"T={text['temperature']:g}"][reading]
            count[0] += int((choice[after] == best[after]).sum())
            count[1] += len(best[after])
    return {
        name: [round(right / max(1, of), 4) for right, of in counts]
        for name, counts in sorted(hits.items())
    }


def main(
    work: Annotated[Path, typer.Option(help="Working folder with packs.")],
    target: Annotated[Path, typer.Option(help="The target's folder.")],
    texts: Annotated[
        list[Path], typer.Option(help="Files of generate.py, from training documents.")
    ],
    held: Annotated[Path, typer.Option(help="Held-out texts of generate.py, to judge by.")],
    out: Annotated[Path, typer.Option(help="Folder to write; its checkpoint is resumed.")],
    name: Annotated[str, typer.Option(help="What the head calls its target.")] = "zoo:target",
    pack: Annotated[str, typer.Option(help="Prefix of the token files.")] = "pack",
    minutes: Annotated[
        float, typer.Option(help="Processor time to train; the rate falls to zero over it.")
    ] = 12.0,
    text_share: Annotated[
        float, typer.Option(help="Share of batches of the target's texts.")
    ] = 0.85,
    rows: Annotated[int, typer.Option(help="Rows per step.")] = 12,
    length: Annotated[int, typer.Option(help="Most tokens per row.")] = 384,
    unrolled: Annotated[int, typer.Option(help="Readings per text, the depth trained for.")] = 3,
    judged: Annotated[float, typer.Option(help="Share of places with a KL.")] = 0.3,
    start_rate: Annotated[float, typer.Option(help="First learning rate, as a share.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Weights, and order of texts and windows.")] = 8,
) -> None:
    """Train a head and write it with a log of its losses and its agreement on held-out texts."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    rng = random.Random(seed)
    teacher = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    teacher.requires_grad_(False)
    block = new_head(teacher, seed)
    optims = optimisers(block)
    state = {"step": 0, "tokens": 0, "seconds": 0.0}
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "training.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        block.load_state_dict(saved["block"])
        for optim, value in zip(optims, saved["optimisers"], strict=True):
            optim.load_state_dict(value)
        state = saved["state"]
    train = np.load(work / f"{pack}-train.npy", mmap_mode="r")
    own = sorted(read_texts(texts, length), key=len)
    plain = [padded(own[first : first + rows]) for first in range(0, len(own), rows)]
    for _ in range(int(len(plain) * (1 - text_share) / text_share)):
        first = rng.randrange(len(train) - rows * length - 1)
        ids = window(train, first, rows, length - 1)
        plain.append((ids, torch.ones_like(ids, dtype=torch.bool)))
    dice = torch.Generator().manual_seed(seed + state["step"])
    batches: dict[int, Batch] = {}
    order: list[int] = []
    log = (out / "log.jsonl").open("a")

    def report(**line: object) -> None:
        log.write(json.dumps({**state, **line}) + "\n")
        log.flush()
        print({**state, **line}, flush=True)

    def write() -> None:
        values = {
            "block": block.state_dict(),
            "optimisers": [o.state_dict() for o in optims],
            "state": state,
        }
        torch.save(values, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)

    recent: list[list[float]] = []
    limit = 60 * minutes
    while state["seconds"] < limit:
        if not order:
            order = rng.sample(range(len(plain)), len(plain))
        number = order.pop()
        began = time.process_time()
        if number not in batches:
            ids, real = plain[number]
            with torch.no_grad():
                states = hidden(teacher, ids).half()
            batches[number] = Batch(ids, real, states)
        batch = batches[number]
        some = torch.rand(batch.real.shape, generator=dice) < judged
        found = losses(block, teacher, batch, unrolled, some)
        loss = sum(near + STATE_WEIGHT * far for near, far in found) / len(found)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        share = start_rate * min(1.0, (state["step"] + 1) / WARMUP_STEPS)
        share *= 0.5 + 0.5 * math.cos(math.pi * min(1.0, state["seconds"] / limit))
        for optim, full in zip(optims, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optim.param_groups:
                group["lr"] = full * share
            optim.step()
            optim.zero_grad()
        state["step"] += 1
        state["tokens"] += int(batch.real.sum())
        before = state["seconds"]
        state["seconds"] = round(before + time.process_time() - began, 2)
        recent.append([near.item() for near, _ in found] + [found[0][1].item()])
        if len(recent) == 25:
            means = [round(sum(column) / len(column), 4) for column in zip(*recent, strict=True)]
            report(kl=means[:-1], states=means[-1])
            recent = []
        if before // SAVE_EVERY_SECONDS != state["seconds"] // SAVE_EVERY_SECONDS:
            write()
    write()
    with held.open(encoding="utf-8") as lines:
        judged = [json.loads(line) for line in lines]
    report(agreement=agreement(block, teacher, judged))
    save_head(block.half(), out, name, weight_sample(teacher))


if __name__ == "__main__":
    typer.run(main)
