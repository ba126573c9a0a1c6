"""Distillation: drafters learn the target's whole next-token distribution, on the corpus and on the
target's texts.

All students train on the same batches, so the target is run once for them. The loss is KL(target ||
student) in nats per position; rows of target-written text count their prompt and continuation, not
their padding.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from model import EOS_ID, hidden
from torch import Tensor
from train import optimisers, save, set_rate, window
from transformers import AutoModelForCausalLM, LlamaForCausalLM

WARMUP_STEPS = 20


def read_texts(files: list[Path], length: int) -> list[list[int]]:
    """Prompt and continuation of every generated text, cut to its last ``length`` + 1 ids."""
    rows = []
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                text = json.loads(line)
                rows.append((text["prompt"] + text["new"])[-length - 1 :])
    return rows


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """ids (B, L) int64 padded with EOS on the right, and (B, L) bool, True where a real token
    stands.
    """
    longest = -(-max(map(len, rows)) // 64) * 64
    ids = torch.tensor([row + [EOS_ID] * (longest - len(row)) for row in rows])
    real = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows])
    return ids, real


def vocabulary_logits(model: LlamaForCausalLM, states: Tensor) -> Tensor:
    """Logits (T, V) in the states' dtype from states (T, C)."""
    return F.linear(states, model.lm_head.weight.to(states.dtype))


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) in nats per row, from logits (T, V) each."""
    log_q = F.log_softmax(student.float(), -1)
    log_p = F.log_softmax(teacher.float(), -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def main(
    work: Annotated[Path, typer.Option(help="Working folder with packs and tokenizer/.")],
    target: Annotated[Path, typer.Option(help="The target's folder.")],
    student: Annotated[list[Path], typer.Option(help="Model folders to start from.")],
    out: Annotated[list[Path], typer.Option(help="Folder to write for each student.")],
    texts: Annotated[
        list[Path], typer.Option(help="Files of generate.py, from training documents.")
    ],
    pack: Annotated[str, typer.Option(help="Prefix of the token files.")] = "pack",
    minutes: Annotated[
        float, typer.Option(help="Time to train; the rate falls to zero over it.")
    ] = 8.0,
    text_share: Annotated[
        float, typer.Option(help="Share of batches of the target's texts.")
    ] = 0.7,
    rows: Annotated[int, typer.Option(help="Rows per step.")] = 16,
    length: Annotated[int, typer.Option(help="Most tokens per row.")] = 512,
    start_rate: Annotated[
        float, typer.Option(help="First learning rate, as a share of training's.")
    ] = 0.7,
    seed: Annotated[int, typer.Option(help="Order of texts and windows.")] = 6,
) -> None:
    """Distil every student and write it with a log of the divergence."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    rng = random.Random(seed)
    teacher = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    students = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in student]
    optims = [optimisers(model) for model in students]
    train = np.load(work / f"{pack}-train.npy", mmap_mode="r")
    own = sorted(read_texts(texts, length), key=len)
    # Batches differ in length, so only the memory-bound divergence is worth compiling.
    kl = torch.compile(divergence, dynamic=True)
    # A fixed set of batches: the target reads each once, later visits find its logits in memory
    # (bfloat16, about 50 MB a batch).
    batches = [padded(own[first : first + rows]) for first in range(0, len(own), rows)]
    for _ in range(int(len(batches) * (1 - text_share) / text_share)):
        first = rng.randrange(len(train) - rows * length - 1)
        ids = window(train, first, rows, length - 1)
        batches.append((ids, torch.ones_like(ids, dtype=torch.bool)))
    cached: dict[int, Tensor] = {}
    order: list[int] = []
    began, steps, trained = time.monotonic(), 0, 0
    recent: list[list[float]] = []
    while (passed := (time.monotonic() - began) / (60 * minutes)) < 1:
        if not order:
            order = rng.sample(range(len(batches)), len(batches))
        number = order.pop()
        ids, real = batches[number]
        keep = real.flatten()
        if number not in cached:
            with torch.no_grad():
                states = hidden(teacher, ids).flatten(0, 1)[keep]
                cached[number] = vocabulary_logits(teacher, states)
        wanted = cached[number]
        values = []
        for model, pair in zip(students, optims, strict=True):
            loss = kl(
                vocabulary_logits(model, hidden(model, ids).flatten(0, 1)[keep]), wanted
            ).mean()
            loss.backward()
            set_rate(pair, start_rate * min(1.0, (steps + 1) / WARMUP_STEPS) * (1 - passed))
            for optim in pair:
                optim.step()
                optim.zero_grad()
            values.append(loss.item())
        recent.append(values)
        steps, trained = steps + 1, trained + int(keep.sum())
        if len(recent) == 50:
            means = [round(sum(column) / len(column), 4) for column in zip(*recent, strict=True)]
            print(
                {
                    "step": steps,
                    "tokens": trained,
                    "seconds": round(time.monotonic() - began),
                    "kl": means,
                },
                flush=True,
            )
            recent = []
    for model, folder in zip(students, out, strict=True):
        save(model, work / "tokenizer", folder)
        (folder / "distil.json").write_text(
            json.dumps({"steps": steps, "tokens": trained, "seed": seed})
        )


if __name__ == "__main__":
    typer.run(main)
