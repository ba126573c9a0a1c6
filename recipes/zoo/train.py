"""Language-model training of one member on packed tokens: warm-up, a stable rate, then linear decay
to zero.

Without ``--decay`` a run ends in a checkpoint at the stable rate, which a later run resumes (with a
longer window or other data if wished); with it, the decayed weights are written as a model folder
and the stable checkpoint stays.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from grow import depth_of, grow_
from model import build, hidden, layer
from muon import Muon
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

MUON_RATE = 0.02
ADAM_RATE = 3e-3
WARMUP_STEPS = 80
SAVE_EVERY_SECONDS = 150


def optimisers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for embedding and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [
        Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def set_rate(optimisers: list[torch.optim.Optimizer], share: float) -> None:
    """Every optimiser at ``share`` (0 to 1) of its full rate."""
    for optimiser, full in zip(optimisers, (MUON_RATE, ADAM_RATE), strict=True):
        for group in optimiser.param_groups:
            group["lr"] = full * share


def token_losses(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, one value per position: states (T, C), vocabulary matrix (V, C),
    targets (T,) int64.
    """
    return F.cross_entropy(F.linear(states, weight).float(), targets, reduction="none")


def loss_on(model: LlamaForCausalLM, ids: Tensor, run=layer, losses=token_losses) -> Tensor:
    """Mean loss in nats per token of ids (B, L+1) int64."""
    states = hidden(model, ids[:, :-1], run=run).flatten(0, 1)
    return losses(states, model.lm_head.weight.to(states.dtype), ids[:, 1:].flatten()).mean()


def window(pack: np.ndarray, position: int, rows: int, length: int) -> Tensor:
    """``rows`` consecutive windows (rows, length+1) int64 from token ``position`` on; wraps at the
    end.
    """
    need = rows * length + 1
    if position + need > len(pack):
        position %= len(pack) - need
    flat = torch.from_numpy(pack[position : position + need].astype(np.int64))
    return torch.stack([flat[r * length : r * length + length + 1] for r in range(rows)])


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM, pack: np.ndarray, batches: int = 12, length: int = 512
) -> float:
    """Loss in nats per token on the first windows of a held-out pack."""
    total = [loss_on(model, window(pack, b * 8 * length, 8, length)).item() for b in range(batches)]
    return sum(total) / len(total)


def save(
    model: LlamaForCausalLM, tokenizer_from: Path, target: Path, dtype: torch.dtype = torch.float32
) -> None:
    """A model folder with its tokenizer; ``dtype`` is the storage type."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(dtype).save_pretrained(target)
    AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(target)


def main(
    work: Annotated[Path, typer.Option(help="Working folder with packs and tokenizer/.")],
    member: Annotated[str, typer.Option(help="target, medium or small.")],
    pack: Annotated[str, typer.Option(help="Prefix of the token files.")] = "pack",
    out: Annotated[
        str, typer.Option(help="Run folder below WORK; default: the member's name.")
    ] = "",
    grown_from: Annotated[
        str, typer.Option(help="Run folder below WORK of a shallower model that starts this one.")
    ] = "",
    steps: Annotated[
        int, typer.Option(help="Stop the stable phase at this step (counted from the start).")
    ] = 10**9,
    minutes: Annotated[float, typer.Option(help="Stop the stable phase after this time.")] = 1e9,
    decay: Annotated[
        int, typer.Option(help="Then decay to zero over this many steps and write OUT/final.")
    ] = 0,
    rows: Annotated[int, typer.Option(help="Windows per step.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 256,
    seed: Annotated[int, typer.Option(help="Initial weights.")] = 3,
    compiled: Annotated[bool, typer.Option(help="Compile the block and the loss.")] = True,
) -> None:
    """Train or resume OUT."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    folder = work / (out or member)
    folder.mkdir(parents=True, exist_ok=True)
    model = build(member, seed)
    optims = optimisers(model)
    state = {"step": 0, "position": 0, "tokens": 0, "seconds": 0.0}
    checkpoint = folder / "stable.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for optim, value in zip(optims, saved["optimisers"], strict=True):
            optim.load_state_dict(value)
        state = saved["state"]
    elif grown_from:
        saved = torch.load(work / grown_from / "stable.pt", weights_only=True)
        shallow = build(member, seed, depth_of(saved["model"]))
        shallow.load_state_dict(saved["model"])
        grow_(model, shallow)
        # The text goes on where the shallow run stopped; steps count anew: the rate warms up again.
        state["position"] = saved["state"]["position"]
        origin = {"run": grown_from, **saved["state"]}
        (folder / "grown.json").write_text(json.dumps(origin) + "\n")

    train = np.load(work / f"{pack}-train.npy", mmap_mode="r")
    held = np.load(work / f"{pack}-held.npy")
    run = torch.compile(layer, dynamic=False) if compiled else layer
    losses = torch.compile(token_losses, dynamic=False) if compiled else token_losses
    log = (folder / "log.jsonl").open("a")

    def write() -> None:
        values = {
            "model": model.state_dict(),
            "optimisers": [o.state_dict() for o in optims],
            "state": state,
        }
        torch.save(values, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)

    def step(share: float) -> float:
        ids = window(train, state["position"], rows, length)
        state["position"] = (state["position"] + rows * length) % len(train)
        state["tokens"] += rows * length
        loss = loss_on(model, ids, run, losses)
        loss.backward()
        set_rate(optims, share)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        state["step"] += 1
        return loss.item()

    def report(values: list[float], **more: object) -> None:
        mean = round(sum(values) / len(values), 4) if values else None
        line = {**state, "loss": mean, "length": length, **more}
        log.write(json.dumps(line) + "\n")
        log.flush()
        print(line, flush=True)

    began = saved_at = time.monotonic()
    before = state["seconds"]
    recent: list[float] = []
    while state["step"] < steps and time.monotonic() - began < 60 * minutes:
        recent.append(step(min(1.0, (state["step"] + 1) / WARMUP_STEPS)))
        state["seconds"] = round(before + time.monotonic() - began, 1)
        if len(recent) == 25:
            report(recent)
            recent = []
        if time.monotonic() - saved_at > SAVE_EVERY_SECONDS:
            write()
            saved_at = time.monotonic()
    write()
    for done in range(decay):
        recent.append(step(1.0 - done / decay))
        state["seconds"] = round(before + time.monotonic() - began, 1)
        if len(recent) == 25:
            report(recent, decay=True)
            recent = []
    report(recent, held_out_loss=round(held_out_loss(model, held), 4))
    if decay:
        save(model, work / "tokenizer", folder / "final")


if __name__ == "__main__":
    typer.run(main)
