"""Ship a member: half-precision weights with tokenizer, and its card (card.json, CARD.md) from the
run's records.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import typer
from model import SHAPES
from sources import SOURCES
from train import save
from transformers import AutoModelForCausalLM


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def last_line(log: Path) -> dict:
    """The last record of a training log; empty where there is none."""
    return json.loads(log.read_text().splitlines()[-1]) if log.exists() else {}


def optional(path: Path) -> dict | None:
    """A JSON file, or None where the stage it reports was not run."""
    return json.loads(path.read_text()) if path.exists() else None


def release(package: str, work: Path) -> str:
    """The version of a source: from its downloaded package's file name, else the installed one."""
    stem = package.replace("-", "_").lower()
    for path in sorted((work / "packed").glob("*")):
        parts = path.name.replace(".deb", "").split("_" if path.suffix == ".deb" else "-")
        if parts[0].lower() in {package, stem}:
            return parts[1].replace("%3a", ":")
    try:
        return version(package)
    except PackageNotFoundError:
        return "of the running Python"


def data_record(work: Path) -> dict:
    """Sources with licence and version, and hashes of the files made from them."""
    return {
        "sources": [
            {"name": s.name, "licence": s.licence, "version": release(s.name, work)}
            for s in SOURCES
        ],
        "held_out": "3 % of the files, by hash of their name, never trained on",
        "sha256": {
            name: digest(work / name)
            for name in (
                "corpus.jsonl",
                "tasks.jsonl",
                "pack-train.npy",
                "pack-held.npy",
                "tokenizer/tokenizer.json",
            )
        },
    }


def plain_tokenizer_config(folder: Path) -> None:
    """Drop what only described the machine the tokenizer was saved on."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for key in ("is_local", "local_files_only", "backend"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def table(rows: dict[str, dict], columns: tuple[str, ...]) -> str:
    """A Markdown table, one line per key of ``rows``."""
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    lines += [
        f"| {key} | " + " | ".join(str(row.get(c, "")) for c in columns) + " |"
        for key, row in rows.items()
    ]
    return "\n".join(lines)


def text_of(card: dict) -> str:
    """CARD.md from the card."""
    member, measured = card["name"], card["measured"]
    parts = [
        f"# zoo:{member}",
        f"{card['parameters']:,} parameters, Llama format, {card['shape']['layers']} layers of "
        f"{card['shape']['hidden']}, 4,096 tokens (byte-level BPE), float16 storage. Made by "
        "recipes/zoo to test and show tree drafting; it is far too small to be right about "
        "anything.",
        "## Training",
        "```json\n" + json.dumps(card["training"], indent=2) + "\n```",
        "## Measured on held-out text",
        f"Held-out loss: {measured['held_out_loss_nats']} nats per token.",
    ]
    if "repetition" in measured:
        parts += [
            "Repetition of its continuations of held-out documents (up to 256 new tokens):",
            table(
                measured["repetition"],
                ("distinct_4grams", "ended_by_eos", "mean_new_tokens", "texts"),
            ),
            "Mean entropy of its next-token distribution, nats: "
            + json.dumps(measured["target_entropy_nats"]),
        ]
    if "agreement" in measured:
        parts += [
            "Agreement of its first (first four) choices with the target's choice on the target's "
            "held-out texts:",
            table(measured["agreement"], ("top1", "top4", "positions")),
            "The same before distillation:",
            table(measured["agreement_without_distillation"], ("top1", "top4", "positions")),
            "One target forward costs "
            f"{measured['target_forward_cost_in_drafter_forwards']} of its forwards "
            "(batch 1, one token, eager, measured on a busy CPU).",
        ]
    parts += [
        "## Data",
        table({s["name"]: s for s in card["data"]["sources"]}, ("licence", "version")),
        f"Held out: {card['data']['held_out']}. The shipped prompts are cut from held-out files; "
        "each names its file and licence.",
        "SHA-256 of the files made: "
        + ", ".join(f"`{k}` {v[:16]}..." for k, v in card["data"]["sha256"].items()),
    ]
    return "\n\n".join(parts) + "\n"


def main(
    work: Annotated[Path, typer.Option(help="Working folder of the runs.")],
    member: Annotated[str, typer.Option(help="target, medium or small.")],
    weights: Annotated[Path, typer.Option(help="Model folder to ship.")],
    report: Annotated[Path, typer.Option(help="Report of evaluate.py.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 3,
) -> None:
    """Write OUT. The report holds the member, and NAME-plain for a drafter before distillation."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    save(model, work / "tokenizer", out, torch.float16)
    (out / "model.safetensors").chmod(0o644)
    plain_tokenizer_config(out)
    measured = json.loads(report.read_text())
    layers, hidden, inner, heads, kv_heads = SHAPES[member]
    values: dict = {"held_out_loss_nats": measured["held_out_loss_nats"][member]}
    if member == "target":
        values |= {
            "repetition": measured["repetition"],
            "target_entropy_nats": measured["agreement"]["target_entropy_nats"],
            "lookup_top1": measured["lookup_top1"],
        }
    else:
        drafters = measured["agreement"]["drafters"]
        values |= {
            "agreement": drafters[member],
            "agreement_without_distillation": drafters[f"{member}-plain"],
            "held_out_loss_nats_without_distillation": measured["held_out_loss_nats"][
                f"{member}-plain"
            ],
            "target_forward_cost_in_drafter_forwards": measured[
                "target_forward_cost_in_drafter_forwards"
            ][member],
        }
    card = {
        "name": member,
        "parameters": sum(p.numel() for p in model.parameters()),
        "shape": {
            "layers": layers,
            "hidden": hidden,
            "inner": inner,
            "heads": heads,
            "kv_heads": kv_heads,
        },
        "training": {
            "seed": seed,
            "grown_from": optional(work / member / "grown.json"),
            "language_model": last_line(work / member / "log.jsonl"),
            "unlikelihood": optional(weights / "unlikelihood.json"),
            "distillation": optional(weights / "distil.json"),
        },
        "measured": values,
        "data": data_record(work),
        "sha256": {"model.safetensors": digest(out / "model.safetensors")},
    }
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    (out / "CARD.md").write_text(text_of(card))


if __name__ == "__main__":
    typer.run(main)
