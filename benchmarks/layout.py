"""Products of few rows with weights that lie [out, in], as checkpoints have them, or [in, out].

    python benchmarks/layout.py [--target zoo:target] [--threads 1]

Both layouts of every linear layer of the model take turns; the times are of all layers together,
medians in milliseconds.
"""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from treegraft.backends.hf import load_model


def main(
    target: Annotated[str, typer.Option(help="Model whose layers are timed.")] = "zoo:target",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    rounds: Annotated[int, typer.Option(min=3, help="Turns of each layout.")] = 40,
) -> None:
    """Time both layouts for several numbers of rows."""
    torch.set_num_threads(threads)
    modules = load_model(target).model.modules()
    weights = [m.weight.detach() for m in modules if isinstance(m, torch.nn.Linear)]
    layouts = {
        "[out, in]": [weight.contiguous() for weight in weights],
        "[in, out]": [weight.t().contiguous().t() for weight in weights],
    }
    table = Table("rows", *map(escape, layouts), "second / first")
    for n in (1, 2, 4, 9, 16, 33, 64, 256):
        given = [torch.randn(n, weight.shape[1]) for weight in weights]
        taken: dict[str, list[float]] = {name: [] for name in layouts}
        with torch.no_grad():
            for _ in range(rounds):
                for name, laid in layouts.items():
                    began = perf_counter()
                    for rows, weight in zip(given, laid, strict=True):
                        torch.nn.functional.linear(rows, weight)
                    taken[name].append(perf_counter() - began)
        first, second = (1e3 * statistics.median(seconds) for seconds in taken.values())
        table.add_row(str(n), f"{first:.2f}", f"{second:.2f}", f"{second / first:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
