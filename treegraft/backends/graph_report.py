"""What the warm-up of a compiled model measured and chose."""

from __future__ import annotations

from dataclasses import dataclass

from treegraft.backends.programs import Compiler

__all__ = ["ForwardChoice", "GraphReport"]


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    """What the warm-up measured for one kind of forward, and what it chose.

    Attributes
    ----------
    kind : ``one query`` or ``several queries``. n : queries of the forwards that were timed.
    eager_ms, compiled_ms : the fastest of some forwards. compiled : which of the two runs now.
    """

    kind: str
    n: int
    eager_ms: float
    compiled_ms: float
    compiled: bool

    def __str__(self) -> str:
        chosen = "compiled" if self.compiled else "eager"
        times = f"{self.compiled_ms:.2f} ms compiled, {self.eager_ms:.2f} ms eager"
        return f"{self.kind}: {chosen} ({times}, n = {self.n})"


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What the warm-up of a model did; ``str`` is one line.

    Attributes
    ----------
    model : its name. compiler : the one whose programs are used, None if none could be made.
    choices : one per kind of forward; empty without a compiler.
    seconds : of the warm-up. buckets, captured : whether forwards are padded, and whether each
        bucket becomes a CUDA graph. panels : bytes of the second copy of the weights.
    notes : what a user should know, one sentence each.
    """

    model: str
    compiler: Compiler | None
    choices: tuple[ForwardChoice, ...]
    seconds: float
    buckets: bool
    captured: bool
    panels: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = "eager" if self.compiler is None else "; ".join(map(str, self.choices))
        how = [] if self.compiler is None else [str(self.compiler)]
        how += ["CUDA graphs"] if self.captured else ["buckets"] if self.buckets else []
        how += [f"panels {self.panels / 1e6:.3g} MB"] if self.panels else []
        how.append(f"warm-up {self.seconds:.1f} s")
        notes = "".join(f". {note}" for note in self.notes)
        return f"{self.model}: {what} [{', '.join(how)}]{notes}"
