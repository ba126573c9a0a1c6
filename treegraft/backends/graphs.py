"""Compiled forwards: a few programs per model, and on a GPU one CUDA graph per bucket.

One query and several queries are compiled apart, and few of them where weights lie in panels; the
programs are symbolic in everything else (n, K, S), so no shape of a draft asks for another one
(docs/decisions/0007-symbolic-programs.md). A forward for which none was made runs eagerly and is
counted: nothing is compiled while a text is decoded.

Shapes (docs/shapes.md): n queries of this forward, N queries of its bucket, K kv span, S cache
rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from treegraft.backends.aot import AotProgram
from treegraft.backends.buckets import BUCKETS, ROWS_STEP, CudaGraphs, bucket_of, pad
from treegraft.backends.graph_report import ForwardChoice, GraphReport
from treegraft.backends.hf import HFLanguageModel
from treegraft.backends.kv import KVSlab
from treegraft.backends.programs import Compiler, Kind, NoProgramError, Program, TracedProgram
from treegraft.backends.selftest import allowed_error, relative_error
from treegraft.backends.sources import one_line
from treegraft.core.errors import ConfigError
from treegraft.core.language_model import ForwardCounts, LanguageModel

__all__ = ["CompiledModel", "GraphPlan"]

# n and K of the forwards that programs are made from, and S of their slabs. Sizes that are equal
# where a program is made would be taken for one and the same, so no two of these agree, nor any
# with a usual number of heads or a head size.
_TRACED = ((592, 704), (80, 320))
_QUERIES = {1: (1, 1), 8: (7, 5), None: (23, 19)}  # by the most of a kind
_PROMPT = 64  # tokens of a prompt that is timed
_SPARE = 16  # rows behind a slab that is not padded
_TIMED_SPAN = 256
_ROUNDS = 9  # of timing, after two that are not counted


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How the forwards of a model are to run.

    Attributes
    ----------
    mode : ``on`` compiles or raises; ``auto`` measures, keeps what is faster and says what that is.
    compiler : ``aot`` is Inductor ahead of time; the others are backends of torch.compile, of which
        ``eager`` and ``aot_eager`` only take Python out of the forward and need no C++ compiler.
        None: ``aot`` on a CPU and ``inductor`` on a GPU.
    buckets : pad forwards to fixed N and K, which a CUDA graph needs.
    n_nodes : queries of a usual wide forward, at which ``auto`` measures.
    panels : with ``aot`` on a CPU, lay out a second copy of float32 weights for forwards over up to
        8 queries (panels.py).
    """

    mode: Literal["on", "auto"] = "on"
    compiler: Compiler | None = None
    buckets: bool = False
    n_nodes: int = 9
    panels: bool = False


@final
class CompiledModel(LanguageModel):
    """A model whose forwards are compiled; weights, caches and moves are those of ``model``.

    What is compiled is the model as it stands now. Weights are read anew by every forward; hooks or
    adapters that are put on its modules later are not seen.

    Forwards for the last query alone (prefill) stay eager where they are padded or torch.compile
    makes the programs. So do those that hand out hidden states, which a hook takes from the model;
    they count as outside.

    Parameters
    ----------
    model : the model; it is left as it is and may be used on its own as well.
    plan : how its forwards are to run.
    on_progress : called with the pieces of the warm-up that are done, and their number.

    Attributes
    ----------
    report : what was decided about the model. graphs : what the warm-up made of it.
    forward_counts : how the forwards ran, from the first on. padded : whether they go by buckets.

    Raises
    ------
    ConfigError : with mode ``on``, where a program cannot be made or gives other logits.
    """

    def __init__(
        self,
        model: HFLanguageModel,
        plan: GraphPlan,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._inner = model
        self.model = model.model
        self.report = model.report
        self.name = model.name
        self.vocab_size = model.vocab_size
        self.max_positions = model.max_positions
        self.hidden_size = model.hidden_size
        self.device = model.device
        self.forward_counts = self._counts = ForwardCounts()
        self.padded = plan.buckets
        self._capture = plan.buckets and model.device.type == "cuda"
        self._graphs = CudaGraphs(self.device) if self._capture else None
        self._compiled: dict[Kind | None, bool] = {}
        self._program: Program | None = None
        self._made_with: tuple[Any, ...] = ()
        self.graphs = self._warm_up(plan, on_progress or _ignore)
        self.compiled_as = str(self.graphs)

    def new_cache(self, n_rows: int, old: KVSlab | None = None) -> KVSlab:
        """Open a KV slab; with buckets it has spare rows behind S for the padding's keys.

        Without, a few: no span is then the whole slab, whose strides no program fits, and the end
        of a text is read like the rest of it.
        """
        if not self.padded:
            return self._inner.new_cache(n_rows, old, n_spare=_SPARE)
        n_rows = -(-n_rows // ROWS_STEP) * ROWS_STEP
        return self._inner.new_cache(n_rows, old, n_spare=BUCKETS[-1])

    def move_(self, cache: KVSlab, source: Tensor, target: Tensor) -> None:
        """Copy cache rows: see LanguageModel.move_."""
        self._inner.move_(cache, source, target)

    def forward(
        self,
        cache: KVSlab,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Tensor:
        """Read ``n`` tokens and return their next-token logits: see LanguageModel.forward."""
        self._begin(visible)
        n = tokens.shape[0]
        last_only = last_only and n > 1
        given = (tokens, rows, positions, visible)
        if not self.padded:
            return self._run(cache, *given, last_only)
        if last_only:
            self._counts.eager += 1
            return self._inner.forward(cache, *given, last_only=True)
        bucket = bucket_of(n, visible.shape[1], cache.n_rows)
        if bucket is None:
            self._counts.outside += 1
            return self._inner.forward(cache, *given)
        padded = pad(cache, *given, bucket)
        graphs, program = self._graphs, self._fitting(bucket[0], False)
        if graphs is None or program is None:
            return self._run(cache, *padded)[:n]
        assert isinstance(program, TracedProgram)
        logits = self._inner.read(
            lambda arguments: graphs.run(program.run, arguments, bucket, cache), cache, *padded
        )
        self._counts.compiled += 1
        return logits[:n]

    def forward_hidden(
        self, cache: KVSlab, tokens: Tensor, rows: Tensor, positions: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read ``n`` tokens; logits and hidden states: see LanguageModel.forward_hidden."""
        self._begin(visible)
        self._counts.outside += 1
        return self._inner.forward_hidden(cache, tokens, rows, positions, visible)

    def ready(
        self,
        cache: KVSlab,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Callable[[], Any]:
        """The forward alone, without padding, for one call; it is not counted."""
        last_only = last_only and tokens.shape[0] > 1
        program = self._fitting(tokens.shape[0], last_only)
        given = (cache, tokens, rows, positions, visible, last_only)
        if program is None:
            return self._inner.ready(self._inner.call, *given)
        return program.ready(*given)

    def _run(
        self,
        cache: KVSlab,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Tensor:
        """Logits: compiled where that was chosen and fits, else eager, and counted."""
        program = self._fitting(tokens.shape[0], last_only)
        if program is None:
            self._counts.eager += 1
            return self._inner.forward(cache, tokens, rows, positions, visible, last_only)
        try:
            if self._settings(program) != self._made_with:
                raise NoProgramError
            logits = program(cache, tokens, rows, positions, visible, last_only)
        except NoProgramError:
            self._counts.outside += 1
            return self._inner.forward(cache, tokens, rows, positions, visible, last_only)
        self._counts.compiled += 1
        return logits

    def _begin(self, visible: Tensor) -> None:
        """See weights that moved where a text begins, be it in the cache of the last one."""
        # Nothing stands before the rows that are written. To look at these takes longer.
        if self._program is not None and visible.shape[0] == visible.shape[1]:
            self._program.renew()

    def _fitting(self, n: int, last_only: bool) -> Program | None:
        """The program, if it was chosen for forwards of this kind."""
        program = self._program
        if program is None or not self._compiled.get(program.kind(n, last_only)):
            return None
        return program

    def _settings(self, program: Program) -> tuple[Any, ...]:
        """What a program relies on besides its arguments and is cheap to look at."""
        weight = self._inner.weight
        return (
            torch.get_num_threads(),
            program.minds_inference_mode and torch.is_inference_mode_enabled(),
            self.model.training,
            weight.dtype,
            weight.device,
        )

    def _warm_up(self, plan: GraphPlan, on_progress: Callable[[int, int], None]) -> GraphReport:
        began = time.perf_counter()
        usual: tuple[Compiler, ...] = ("aot", "inductor", "eager")
        named = plan.compiler or ("aot" if self.device.type == "cpu" else "inductor")
        compilers = [named]
        if plan.mode == "auto":
            compilers += usual[usual.index(named) + 1 if named in usual else 2 :]
        notes: list[str] = []
        for compiler in compilers:
            try:
                choices, self._compiled = self._make(compiler, plan, on_progress)
            except Exception as error:  # a compiler fails in ways of its own
                # Dynamo wraps what a backend raises, and says that first.
                inner = getattr(error, "inner_exception", error)
                cause = f"{type(inner).__name__}: {one_line(inner)}"
                if plan.mode == "on":
                    raise ConfigError(
                        f"backend.compile 'on' cannot compile {self.name!r} with {compiler!r} "
                        f"({cause}): set backend.compile to auto or off, or backend.compiler to "
                        "eager, which needs no C++ compiler"
                    ) from error
                notes.append(f"{compiler} failed ({cause})")
                self._program = None
                continue
            break
        else:
            compiler, choices = None, ()
        held, program = 0, self._program
        if isinstance(program, AotProgram):
            if not any(on for kind, on in self._compiled.items() if kind and kind.most):
                program.drop_panels()
            held = program.panel_bytes
        if plan.panels and not held:
            notes.append(
                "no panels: it has no linear layers of float32 weights, no aot program, or eager "
                "forwards are faster"
            )
        return GraphReport(
            model=self.name,
            compiler=compiler,
            choices=choices,
            seconds=time.perf_counter() - began,
            buckets=self.padded,
            captured=self._capture,
            panels=held,
            notes=tuple(notes),
        )

    def _make(
        self, compiler: Compiler, plan: GraphPlan, on_progress: Callable[[int, int], None]
    ) -> tuple[tuple[ForwardChoice, ...], dict[Kind | None, bool]]:
        """Make the programs, check their logits against the model's own, time both."""
        program: Program
        if compiler == "aot":
            if self._capture:
                raise RuntimeError("its forwards are not captured: set backend.buckets to false")
            program = AotProgram(self._inner, plan.panels)
        else:
            program = TracedProgram(self._inner, compiler)
        slabs = [(span, self._inner.new_cache(n_rows)) for span, n_rows in _TRACED]
        allowed = allowed_error(self.report, self.device)
        kinds = [kind for kind in program.kinds if not kind.last_only or self._reads_prompts()]
        on_progress(0, len(kinds))
        choices = []
        for done, kind in enumerate(kinds, 1):
            # The second forward differs in every size; what the first one took for fixed becomes
            # symbolic here and not in a text.
            for n, (span, slab) in zip(_QUERIES[kind.most], slabs, strict=True):
                plain = self._probe(self._inner.forward, slab, n, span, kind)
                found = self._probe(program.trial, slab, n, span, kind)
                error = relative_error(found, plain, self.report.dtype)
                if not error <= allowed:
                    raise ArithmeticError(
                        f"logits of the compiled forward differ by {error:.2g} of their spread "
                        f"(allowed {allowed:.2g})"
                    )
            choices.append(self._time(kind, program, plan, slabs[0][1]))
            on_progress(done, len(kinds))
        self._program = program
        self._made_with = self._settings(program)
        return tuple(choices), {
            kind: choice.compiled for kind, choice in zip(kinds, choices, strict=True)
        }

    def _time(self, kind: Kind, program: Program, plan: GraphPlan, slab: KVSlab) -> ForwardChoice:
        # The most nodes of a tree, or what is nearest to it among forwards of this kind.
        fewest = 1 + max((k.most for k in program.kinds if k.most and k != kind), default=0)
        most = kind.most or BUCKETS[-1]
        n = _PROMPT if kind.last_only else min(max(fewest, plan.n_nodes), most)
        taken: dict[Callable[..., Tensor], list[float]] = {self._inner.forward: [], program: []}
        for _ in range(2 + _ROUNDS):
            for call, seconds in taken.items():
                self._wait()
                began = time.perf_counter()
                self._probe(call, slab, n, _TIMED_SPAN + n, kind)
                self._wait()
                seconds.append(time.perf_counter() - began)
        # What a busy machine does to a forward only ever adds to its time.
        eager, compiled = (1e3 * min(s[2:]) for s in taken.values())
        return ForwardChoice(kind.name, n, eager, compiled, plan.mode == "on" or compiled < eager)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _reads_prompts(self) -> bool:
        return self.report.logits_to_keep and not self.padded

    def _probe(
        self,
        call: Callable[..., Tensor],
        slab: KVSlab,
        n: int,
        span: int,
        kind: Kind,
    ) -> Tensor:
        """Logits of ``n`` queries at the end of ``span`` rows of zeros."""
        rows = torch.arange(span - n, span)
        positions = torch.arange(n) % (self.max_positions or n)
        visible = torch.arange(span) <= rows[:, None]
        tokens = torch.arange(n) % self.vocab_size
        return call(slab, tokens, rows, positions, visible, kind.last_only)


def _ignore(done: int, total: int) -> None:
    """No one watches."""
