"""A short last stage for the target: less weight on tokens that would repeat what it has just
written.

Token-level unlikelihood (Welleck et al., 2019) on the target's own greedy texts: where a generated
token completes a 4-gram that the *generated* text already held, its probability is pushed down by
-log(1 - p). Copying from the prompt is not touched, tables are left out, and half of every step is
ordinary language modelling, so that the rest stays.
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
import typer
from distil import padded, vocabulary_logits
from model import hidden
from torch import Tensor
from train import held_out_loss, loss_on, optimisers, save, set_rate, window
from transformers import AutoModelForCausalLM

ORDER = 4
# Tables, edits and quotes repeat short pieces by right; only longer ones, whole lines, count.
TASK_ORDER = 24
# A text is cut after this many repeated tokens: how a loop begins matters more than its turns.
MOST_REPEATS = 48


def repeats(new: list[int], order: int) -> list[bool]:
    """For each id of a generated text: does it complete an ``order``-gram seen before in it?"""
    seen: set[tuple[int, ...]] = set()
    marks = []
    for end in range(1, len(new) + 1):
        gram = tuple(new[end - order : end]) if end >= order else ()
        marks.append(gram in seen)
        if gram:
            seen.add(gram)
    return marks


def penalty(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log(1 - p(target)) in nats from logits (T, V) and targets (T,) int64."""
    logprob = torch.log_softmax(logits.float(), -1).gather(-1, targets[:, None])[:, 0]
    return -torch.log1p(-logprob.exp().clamp(max=1 - 1e-5)).mean()


def main(
    work: Annotated[Path, typer.Option(help="Working folder with packs and tokenizer/.")],
    model: Annotated[Path, typer.Option(help="Target folder to start from.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    texts: Annotated[
        Path, typer.Option(help="Greedy texts of generate.py from training documents.")
    ],
    pack: Annotated[str, typer.Option(help="Prefix of the token files.")] = "pack",
    minutes: Annotated[
        float, typer.Option(help="Time to train; the rate falls to zero over it.")
    ] = 4.0,
    weight: Annotated[
        float, typer.Option(help="Of the penalty, beside the language-model loss.")
    ] = 0.5,
    start_rate: Annotated[
        float, typer.Option(help="First learning rate, as a share of training's.")
    ] = 0.15,
    rows: Annotated[int, typer.Option(help="Texts per step.")] = 8,
    seed: Annotated[int, typer.Option(help="Order of texts and windows.")] = 7,
) -> None:
    """Train and write OUT with unlikelihood.json."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    rng = random.Random(seed)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optims = optimisers(lm)
    train, held = (
        np.load(work / f"{pack}-train.npy", mmap_mode="r"),
        np.load(work / f"{pack}-held.npy"),
    )
    with texts.open(encoding="utf-8") as lines:
        made = [json.loads(line) for line in lines]
    cases = []
    for text in made:
        marks = repeats(text["new"], ORDER if text["kind"] in {"code", "prose"} else TASK_ORDER)
        if text["temperature"] == 0 and any(marks):
            repeated = [end for end, mark in enumerate(marks, 1) if mark]
            end = repeated[min(len(repeated), MOST_REPEATS) - 1]
            prompt = text["prompt"]
            cases.append((prompt + text["new"][:end], [False] * len(prompt) + marks[:end]))
    cases.sort(key=lambda case: len(case[0]))
    before = held_out_loss(lm, held)
    began, steps = time.monotonic(), 0
    recent: list[tuple[float, float]] = []
    while (passed := (time.monotonic() - began) / (60 * minutes)) < 1:
        first = rng.randrange(max(1, len(cases) - rows))
        part = cases[first : first + rows]
        ids, _ = padded([case[0] for case in part])
        bad = torch.zeros_like(ids, dtype=torch.bool)
        for row, (_, marks) in enumerate(part):
            bad[row, : len(marks)] = torch.tensor(marks)
        states = hidden(lm, ids[:, :-1])
        push = penalty(vocabulary_logits(lm, states[bad[:, 1:]]), ids[:, 1:][bad[:, 1:]])
        plain = loss_on(lm, window(train, rng.randrange(len(train) - 5000), 8, 512))
        (plain + weight * push).backward()
        set_rate(optims, start_rate * min(1.0, (steps + 1) / 20) * (1 - passed))
        for optim in optims:
            optim.step()
            optim.zero_grad()
        steps += 1
        recent.append((plain.item(), push.item()))
        if len(recent) == 20:
            print({"step": steps, "loss": np.mean(recent, 0).round(4).tolist()}, flush=True)
            recent = []
    save(lm, work / "tokenizer", out)
    report = {
        "technique": "token-level unlikelihood on repeated 4-grams of the model's own greedy texts",
        "texts": len(cases),
        "steps": steps,
        "weight": weight,
        "held_out_loss_before": round(before, 4),
        "held_out_loss_after": round(held_out_loss(lm, held), 4),
    }
    (out / "unlikelihood.json").write_text(json.dumps(report, indent=2))
    print(report)


if __name__ == "__main__":
    typer.run(main)
