"""Measurements of the family, written to one JSON report: loss, repetition, entropy, agreement,
forward costs.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from distil import vocabulary_logits
from model import hidden
from torch import Tensor
from train import held_out_loss
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

ORDER = 4


def distinct_share(new: list[int]) -> float:
    """Distinct 4-grams over all 4-grams of one text; 1 for a text shorter than one 4-gram."""
    grams = [tuple(new[i : i + ORDER]) for i in range(len(new) - ORDER + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def repetition(texts: list[dict]) -> dict[str, dict[str, float]]:
    """By temperature: distinct 4-gram share (mean over texts), share ended by EOS, mean length in
    tokens.
    """
    groups: dict[str, list[dict]] = defaultdict(list)
    for text in texts:
        groups[f"T={text['temperature']:g}"].append(text)
        groups[f"T={text['temperature']:g} {text['kind']}"].append(text)
    return {
        name: {
            "texts": len(group),
            "distinct_4grams": round(statistics.mean(distinct_share(t["new"]) for t in group), 4),
            "ended_by_eos": round(statistics.mean(t["ended"] for t in group), 4),
            "mean_new_tokens": round(statistics.mean(len(t["new"]) for t in group), 1),
        }
        for name, group in sorted(groups.items())
    }


@torch.inference_mode()
def new_logits(model: LlamaForCausalLM, text: dict) -> Tensor:
    """Logits (new tokens, V) fp32 at the positions that predict the text's new tokens."""
    ids = torch.tensor([text["prompt"] + text["new"]])
    states = hidden(model, ids, torch.float32)[0, len(text["prompt"]) - 1 : -1]
    return vocabulary_logits(model, states)


def agreement(
    target: LlamaForCausalLM, drafters: dict[str, LlamaForCausalLM], texts: list[dict]
) -> dict:
    """How often a drafter's first choice is the target's, over all new positions, by temperature
    and kind.

    Also the share of target choices among the drafter's first 4, and the target's mean entropy
    (nats).
    """
    hits: dict[str, dict[str, list[int]]] = {
        name: defaultdict(lambda: [0, 0, 0]) for name in drafters
    }
    entropy: dict[str, list[float]] = defaultdict(list)
    for text in texts:
        wanted = new_logits(target, text)
        best = wanted.argmax(-1)
        logprob = torch.log_softmax(wanted, -1)
        groups = (f"T={text['temperature']:g}", f"T={text['temperature']:g} {text['kind']}")
        for group in groups:
            entropy[group].append((-(logprob.exp() * logprob).sum(-1)).mean().item())
        for name, drafter in drafters.items():
            top = new_logits(drafter, text).topk(4).indices
            first, among = (
                (top[:, 0] == best).sum().item(),
                (top == best[:, None]).any(-1).sum().item(),
            )
            for group in groups:
                counts = hits[name][group]
                counts[0] += first
                counts[1] += among
                counts[2] += len(best)
    return {
        "target_entropy_nats": {
            group: round(statistics.mean(v), 4) for group, v in sorted(entropy.items())
        },
        "drafters": {
            name: {
                group: {"top1": round(a / n, 4), "top4": round(b / n, 4), "positions": n}
                for group, (a, b, n) in sorted(groups.items())
            }
            for name, groups in hits.items()
        },
    }


@torch.inference_mode()
def forward_seconds(
    models: dict[str, LlamaForCausalLM], widths: tuple[int, ...], rounds: int = 6, calls: int = 8
) -> dict[str, dict[str, float]]:
    """Median seconds of one eager forward of ``width`` tokens after 200 cached ones.

    Members take turns, so that a busy machine is busy for all of them; within a turn the calls
    follow each other, as in drafting, and the first is not counted.
    """
    generator = torch.Generator().manual_seed(0)
    past = torch.randint(1, 4096, (1, 200), generator=generator)
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, model in models.items():
            cache = DynamicCache(config=model.config)
            model(past, past_key_values=cache)
            for width in widths:
                ids = torch.randint(1, 4096, (1, width), generator=generator)
                for call in range(calls):
                    began = time.perf_counter()
                    model(ids, past_key_values=cache)
                    if call:
                        taken[name, width].append(time.perf_counter() - began)
                    cache.crop(-width)
    return {
        name: {str(width): round(statistics.median(taken[name, width]), 6) for width in widths}
        for name in models
    }


def lookup_share(text: dict, order: int = 3) -> float:
    """Share of new tokens that the longest earlier match (up to ``order`` tokens) in the text so
    far foretells.
    """
    ids = text["prompt"] + text["new"]
    after: dict[tuple[int, ...], int] = {}
    hits = 0
    for end, token in enumerate(ids):
        if end >= len(text["prompt"]):
            guess = next(
                (
                    after[g]
                    for n in range(order, 0, -1)
                    if (g := tuple(ids[end - n : end])) in after
                ),
                None,
            )
            hits += guess == token
        for n in range(1, order + 1):
            if end >= n:
                after[tuple(ids[end - n : end])] = token
    return hits / max(1, len(text["new"]))


def main(
    work: Annotated[Path, typer.Option(help="Working folder with packs.")],
    target: Annotated[Path, typer.Option(help="Target folder.")],
    drafter: Annotated[list[str], typer.Option(help="NAME=FOLDER, any number.")],
    texts: Annotated[Path, typer.Option(help="Held-out texts of generate.py for this target.")],
    out: Annotated[Path, typer.Option(help="Report to write.")],
    pack: Annotated[str, typer.Option(help="Prefix of the token files.")] = "pack",
) -> None:
    """Measure and write OUT."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    lm = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    folders = dict(item.split("=", 1) for item in drafter)
    drafters = {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for name, path in folders.items()
    }
    held = np.load(work / f"{pack}-held.npy")
    with texts.open(encoding="utf-8") as lines:
        made = [json.loads(line) for line in lines]
    family = {"target": lm, **drafters}
    seconds = forward_seconds(family, (1, 10, 64))
    lookups: dict[str, list[float]] = defaultdict(list)
    for text in made:
        lookups[f"T={text['temperature']:g} {text['kind']}"].append(lookup_share(text))
    report = {
        "parameters": {
            name: sum(p.numel() for p in model.parameters()) for name, model in family.items()
        },
        "held_out_loss_nats": {
            name: round(held_out_loss(model, held), 4) for name, model in family.items()
        },
        "repetition": repetition(made),
        "agreement": agreement(lm, drafters, made),
        "lookup_top1": {
            group: round(statistics.mean(v), 4) for group, v in sorted(lookups.items())
        },
        "forward_seconds": seconds,
        "target_forward_cost_in_drafter_forwards": {
            name: round(seconds["target"]["1"] / seconds[name]["1"], 2) for name in drafters
        },
    }
    assert math.isfinite(report["held_out_loss_nats"]["target"]), (
        "the target's weights are not finite"
    )
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    typer.run(main)
