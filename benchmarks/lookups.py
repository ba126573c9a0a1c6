"""What a step of each look-up drafter costs in contexts of different length.

    python benchmarks/lookups.py [--source copies|prompts|loop] [--json]

A step is what a decoding asks of the drafter: take note of the committed tokens, draft one tree.
The tree is drafted twice, as one layer (W paths under the root) and as the paper's five layers of W
positions; only the drafter's own calls are timed, not the tree's. Drafters and lengths take turns
step by step, so that a busy machine slows all of them alike. Times are those of the thread on its
core, medians and 99th percentiles of the steps, in milliseconds; ``begin`` is the time to take in
the whole prompt, in seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
import typer

from treegraft.backends.tensor_tree import TensorTree
from treegraft.components import build_component
from treegraft.config import DrafterConfig
from treegraft.core.roles import Commit, Context, Drafter, TargetTop, TreeTop
from treegraft.core.tree import ROOT
from treegraft.policies.drafters.ngram import NgramConfig
from treegraft.policies.drafters.recycle import RecycleConfig
from treegraft.policies.drafters.suffix import SuffixConfig

DEPTH, WIDTH = 5, 10
VOCAB = 32_000
K = 8

ARMS: dict[str, DrafterConfig] = {
    "ngram": NgramConfig(),
    "suffix": SuffixConfig(),
    "suffix+store": SuffixConfig(store_tokens=100_000),
    "recycle": RecycleConfig(k=K),
}


def copies(n: int, rng: np.random.Generator) -> list[int]:
    """Spans copied from anywhere before (two thirds of the tokens), and Zipf noise between."""
    text = np.minimum(rng.zipf(1.3, 64), VOCAB - 1).tolist()
    while len(text) < n:
        length = int(rng.integers(4, 40))
        start = int(rng.integers(0, len(text)))
        text += text[start : start + length]
        text += np.minimum(rng.zipf(1.3, length // 2), VOCAB - 1).tolist()
    return text[:n]


def prompts(n: int, rng: np.random.Generator) -> list[int]:
    """The prompts that ship with the zoo, over and over, in a new order each time."""
    from treegraft.backends.hf import load_tokenizer
    from treegraft.bench.demo import demo_prompts

    tokenizer = load_tokenizer("zoo:target")[0]
    each = [tokenizer(str(prompt.content))["input_ids"] for prompt in demo_prompts(10**6)]
    text: list[int] = []
    while len(text) < n:
        text += [token for i in rng.permutation(len(each)) for token in each[i]]
    return text[:n]


def loop(n: int, rng: np.random.Generator) -> list[int]:
    """Five tokens repeated: the longest chains of contexts that all match."""
    return (rng.permutation(VOCAB)[:5].tolist() * (n // 5 + 1))[:n]


SOURCES: dict[str, Callable[[int, np.random.Generator], list[int]]] = {
    "copies": copies,
    "prompts": prompts,
    "loop": loop,
}


def top_of(tokens: list[int], rng: np.random.Generator) -> tuple[TargetTop, torch.Tensor]:
    """A made-up target: the token that stands there first, then random ones."""
    top = torch.from_numpy(rng.integers(0, VOCAB, (len(tokens), K)))
    top[:, 0] = torch.tensor(tokens)
    logprobs = (-torch.arange(1.0, K + 1)).expand(len(tokens), K)
    return TargetTop(logprobs[:, 0], top, logprobs), top


@dataclass
class Arm:
    """One drafter on one text, and the times of its steps in seconds."""

    drafter: Drafter
    text: list[int]
    n_read: int
    rng: np.random.Generator
    tree: TensorTree = field(default_factory=lambda: TensorTree(VOCAB))
    begin: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"one layer": [], "tree": []})

    def start(self) -> None:
        read = self.text[: self.n_read]
        top, _ = top_of(read[1:], self.rng)
        context = Context(tuple(read), len(self.text), VOCAB, top)
        started = time.thread_time()
        self.drafter.begin(context)
        self.begin = time.thread_time() - started

    def step(self, n_new: int) -> None:
        new = self.text[self.n_read : self.n_read + n_new]
        self.n_read += n_new
        top, _ = top_of(new, self.rng)
        drafted = self.rng.integers(0, VOCAB, 64).tolist()
        every, _ = top_of(drafted, self.rng)
        read = TreeTop(torch.tensor(drafted), every.tokens, every.logprobs)
        commit = Commit(tuple(new), (), top, read)
        started = time.thread_time()
        self.drafter.observe(commit)
        noted = time.thread_time() - started
        for name, depth in (("one layer", 1), ("tree", DEPTH)):
            self.seconds[name].append(noted + self._draft(new[-1], depth))

    def _draft(self, root: int, depth: int) -> float:
        """Seconds that the drafter took for the layers of one tree."""
        self.tree.reset_(root, 64)
        frontier, taken = torch.tensor([ROOT]), 0.0
        for layer in range(1, depth + 1):
            started = time.thread_time()
            proposals = self.drafter.propose(self.tree, frontier, WIDTH)
            taken += time.thread_time() - started
            nodes = self.tree.add_(proposals, 0, overwrite=False)[:, 0]
            keep = self.tree.n_nodes if layer == 1 else WIDTH
            reached = self.tree.rank(nodes, proposals.match, keep)
            if reached.shape[0]:
                frontier = reached
        return taken


def main(
    source: Annotated[str, typer.Option(help=f"One of {', '.join(SOURCES)}.")] = "copies",
    steps: Annotated[int, typer.Option(min=10, help="Steps per drafter and length.")] = 300,
    accepted: Annotated[int, typer.Option(min=1, help="Tokens committed per step.")] = 3,
    lengths: Annotated[str, typer.Option(help="Contexts in tokens.")] = "1000,10000,100000",
    seed: Annotated[int, typer.Option(min=0, help="Of text and made-up target.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
) -> None:
    """Time per step of every look-up drafter by context length."""
    if source not in SOURCES:
        raise typer.BadParameter(f"--source must be one of {', '.join(SOURCES)}, found {source!r}")
    torch.set_num_threads(1)
    if not all(size.isdecimal() and int(size) > 0 for size in lengths.split(",")):
        raise typer.BadParameter(f"--lengths must be numbers from 1, found {lengths!r}")
    sizes = [int(size) for size in lengths.split(",")]
    text = SOURCES[source](max(sizes) + steps * accepted, np.random.default_rng(seed))
    arms: dict[tuple[str, int], Arm] = {}
    for size in sizes:
        for name, config in ARMS.items():
            drafter = build_component("drafter", config)
            here = text[len(text) - size - steps * accepted :]
            arm = arms[name, size] = Arm(drafter, here, size, np.random.default_rng(seed))
            if "store" in name:  # an earlier text: another draw of the source
                other = SOURCES[source](100_000, np.random.default_rng(seed + 1))
                drafter.begin(Context(tuple(other[:1]), len(other), VOCAB, None))
                drafter.observe(Commit(tuple(other[1:]), (), None))
            arm.start()
    for _ in range(steps):
        for arm in arms.values():
            arm.step(accepted)
    rows: list[dict[str, Any]] = []
    for (name, size), arm in arms.items():
        row: dict[str, Any] = {"drafter": name, "context": size, "begin_s": arm.begin}
        for what, seconds in arm.seconds.items():
            # The first steps warm caches.
            took = 1e3 * np.array(seconds[5:])
            row[f"{what} median_ms"] = float(np.median(took))
            row[f"{what} p99_ms"] = float(np.percentile(took, 99))
        rows.append(row)
    if as_json:
        print(json.dumps({"source": source, "steps": steps, "accepted": accepted, "rows": rows}))
        return
    heads = f"{'one layer ms':>17}{'p99':>8}{'tree ms':>14}{'p99':>8}"
    print(f"{'drafter':13}{'context':>8}{'begin s':>9}{heads}")
    for row in sorted(rows, key=lambda row: str(row["drafter"])):
        print(
            f"{row['drafter']:13}{row['context']:8}{row['begin_s']:9.3f}"
            f"{row['one layer median_ms']:17.3f}{row['one layer p99_ms']:8.3f}"
            f"{row['tree median_ms']:14.3f}{row['tree p99_ms']:8.3f}"
        )


if __name__ == "__main__":
    typer.run(main)
