"""Compiled forwards: two programs per model, and on a GPU one CUDA graph per bucket.

One query and several queries are compiled apart; both programs are symbolic in everything else (n,
K, S), so no shape of a draft asks for another one (docs/decisions/0007-symbolic-programs.md). A
forward for which none was made runs eagerly and is counted: nothing is compiled while a text is
decoded.

Shapes (docs/shapes.md): n queries of this forward, N queries of its bucket, K kv span, S cache
rows, V vocabulary.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Literal, cast, final

import torch
from torch import Tensor

from treegraft.backends.hf import HFLanguageModel
from treegraft.backends.kv import KVSlab
from treegraft.backends.selftest import allowed_error, relative_error
from treegraft.backends.sources import one_line
from treegraft.core.errors import ConfigError
from treegraft.core.language_model import ForwardCounts, LanguageModel

__all__ = ["BUCKETS", "CompiledModel", "ForwardChoice", "GraphPlan", "GraphReport"]

Compiler = Literal["inductor", "aot_eager", "eager"]

BUCKETS = (1, 8, 16, 32, 64, 128, 256)
"""Numbers of queries (N) that a padded forward has."""
_FIRST_SPAN = 256  # rows; the spans of padded forwards are this and its doubles, and S
_ROWS_STEP = 64  # S of a padded slab is a multiple

# n and K of the forwards that programs are made from, and S of their slabs. Sizes that are equal
# where a program is made would be taken for one and the same, so no two of these agree, nor any
# with a usual number of heads or a head size.
_TRACED = ((592, 704), (80, 320))
_QUERIES = {"one query": (1, 1), "several queries": (23, 7)}
_SPARE = 16  # rows behind a slab that is not padded
_ROUNDS = 9  # of timing, after two that are not counted


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How the forwards of a model are to run.

    Attributes
    ----------
    mode : ``on`` compiles or raises; ``auto`` measures, keeps what is faster and says what that is.
    compiler : torch.compile's backend. ``eager`` and ``aot_eager`` only take Python out of the
        forward and need no C++ compiler.
    buckets : pad forwards to fixed N and K, which a CUDA graph needs.
    n_nodes : queries of a usual wide forward, at which ``auto`` measures.
    """

    mode: Literal["on", "auto"] = "on"
    compiler: Compiler = "inductor"
    buckets: bool = False
    n_nodes: int = 9


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
        bucket becomes a CUDA graph. notes : what a user should know, one sentence each.
    """

    model: str
    compiler: Compiler | None
    choices: tuple[ForwardChoice, ...]
    seconds: float
    buckets: bool
    captured: bool
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = "eager" if self.compiler is None else "; ".join(map(str, self.choices))
        how = [] if self.compiler is None else [str(self.compiler)]
        how += ["CUDA graphs"] if self.captured else ["buckets"] if self.buckets else []
        how.append(f"warm-up {self.seconds:.1f} s")
        notes = "".join(f". {note}" for note in self.notes)
        return f"{self.model}: {what} [{', '.join(how)}]{notes}"


@final
class CompiledModel(LanguageModel):
    """A model whose forwards are compiled; weights, caches and moves are those of ``model``.

    What is compiled is the model as it stands now. Weights are read anew by every forward; hooks or
    adapters that are put on its modules later are not seen.

    Forwards for the last query alone (prefill) stay eager: their sizes are the prompts'. So do
    those that hand out hidden states, which a hook takes from the model; they count as outside.

    Parameters
    ----------
    model : the model; it is left as it is and may be used on its own as well.
    plan : how its forwards are to run.
    on_progress : called with the pieces of the warm-up that are done, and their number.

    Attributes
    ----------
    report : what was decided about the model. graphs : what the warm-up made of it.
    forward_counts : how the forwards ran, from the first on.

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
        self._buckets = plan.buckets
        self._capture = plan.buckets and model.device.type == "cuda"
        self._graphs = _CudaGraphs(self.device) if self._capture else None
        self._compiled: dict[str, bool] = dict.fromkeys(_QUERIES, False)
        self._program: Callable[..., Tensor] = _read
        self._made_with: tuple[Any, ...] = ()
        self.graphs = self._warm_up(plan, on_progress or _ignore)
        self.compiled_as = str(self.graphs)

    def new_cache(self, n_rows: int, old: KVSlab | None = None) -> KVSlab:
        """Open a KV slab; with buckets it has spare rows behind S for the padding's keys.

        Without, a few: no span is then the whole slab, whose strides no program fits, and the end
        of a text is read like the rest of it.
        """
        if not self._buckets:
            return self._inner.new_cache(n_rows, old, n_spare=_SPARE)
        n_rows = -(-n_rows // _ROWS_STEP) * _ROWS_STEP
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
        n = tokens.shape[0]
        given = (tokens, rows, positions, visible)
        if last_only:
            self._counts.eager += 1
            return self._inner.forward(cache, *given, last_only=True)
        if not self._buckets:
            return self._inner.read(self.run, cache, *given)
        bucket = self.bucket(n, visible.shape[1], cache)
        if bucket is None:
            self._counts.outside += 1
            return self._inner.forward(cache, *given)
        padded = pad(cache, *given, bucket)

        graphs = self._graphs
        if graphs is None:
            return self._inner.read(self.run, cache, *padded)[:n]
        before = replace(self._counts)
        logits = self._inner.read(
            lambda arguments: graphs.run(self.run, arguments, bucket, cache), cache, *padded
        )
        # A replay is one forward, and so are the three calls that a capture takes.
        self._counts.compiled = before.compiled + 1
        self._counts.eager, self._counts.outside = before.eager, before.outside
        return logits[:n]

    def forward_hidden(
        self, cache: KVSlab, tokens: Tensor, rows: Tensor, positions: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read ``n`` tokens; logits and hidden states: see LanguageModel.forward_hidden."""
        self._counts.outside += 1
        return self._inner.forward_hidden(cache, tokens, rows, positions, visible)

    def bucket(self, n: int, span: int, cache: KVSlab) -> tuple[int, int] | None:
        """N and K of the padded forward that takes ``n`` queries and ``span`` rows; None if none.

        K is the cache's whole length where the next power of two is longer.
        """
        n_queries = next((size for size in BUCKETS if size >= n), None)
        if n_queries is None or span > cache.n_rows:
            return None
        reach = _FIRST_SPAN
        while reach < span:
            reach *= 2
        return n_queries, min(reach, cache.n_rows)

    def run(self, arguments: dict[str, Any]) -> Tensor:
        """Logits [1, n, V]: compiled where that was chosen and fits, else eager, and counted."""
        if not self._compiled[_kind(arguments["input_ids"].shape[1])]:
            self._counts.eager += 1
            return _read(self.model, arguments)
        if self._settings() != self._made_with:
            self._counts.outside += 1
            return _read(self.model, arguments)
        try:
            # Only for this call, and no program is made in it.
            with torch.compiler.set_stance("fail_on_recompile"):
                logits = self._program(self.model, arguments)
        except RuntimeError as error:
            if "fail_on_recompile" not in str(error):
                raise
            # Found out before the forward began.
            self._counts.outside += 1
            return _read(self.model, arguments)
        self._counts.compiled += 1
        return logits

    def _settings(self) -> tuple[Any, ...]:
        """What a program relies on besides its arguments and is cheap to look at."""
        weight = self._inner.weight
        return (
            torch.get_num_threads(),
            torch.is_inference_mode_enabled(),
            self.model.training,
            weight.dtype,
            weight.device,
        )

    def _warm_up(self, plan: GraphPlan, on_progress: Callable[[int, int], None]) -> GraphReport:
        began = time.perf_counter()
        compilers: list[Compiler] = [plan.compiler]
        if plan.mode == "auto" and plan.compiler != "eager":
            compilers.append("eager")
        notes: list[str] = []
        for compiler in compilers:
            try:
                choices = self._make(compiler, plan, on_progress)
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
                self._program = _read
                continue
            self._compiled = {choice.kind: choice.compiled for choice in choices}
            break
        else:
            compiler, choices = None, ()
        return GraphReport(
            model=self.name,
            compiler=compiler,
            choices=choices,
            seconds=time.perf_counter() - began,
            buckets=self._buckets,
            captured=self._capture,
            notes=tuple(notes),
        )

    def _make(
        self, compiler: Compiler, plan: GraphPlan, on_progress: Callable[[int, int], None]
    ) -> tuple[ForwardChoice, ...]:
        """Make the programs, check their logits against the model's own, time both."""
        # Every program belongs to a code object, and the limit on programs per code object would
        # be shared by all models of a process.
        program = cast(
            Callable[..., Tensor],
            torch.compile(
                _own_code(_read),
                fullgraph=True,
                dynamic=True,
                backend=compiler,
                options={"guard_filter_fn": _that_vary},
            ),
        )
        slabs = [(span, self._inner.new_cache(n_rows)) for span, n_rows in _TRACED]
        allowed = allowed_error(self.report, self.device)
        on_progress(0, len(_QUERIES))
        choices = []
        for done, (kind, sizes) in enumerate(_QUERIES.items(), 1):
            # The second forward differs in every size; what the first one took for fixed becomes
            # symbolic here and not in a text.
            for n, (span, slab) in zip(sizes, slabs, strict=True):
                plain = self._probe(_read, slab, n, span)
                # Scoped: the caller's own setting stands.
                with torch._dynamo.config.patch(
                    recompile_limit=16, fail_on_recompile_limit_hit=True
                ):
                    found = self._probe(program, slab, n, span)
                error = relative_error(found, plain, self.report.dtype)
                if not error <= allowed:
                    raise ArithmeticError(
                        f"logits of the compiled forward differ by {error:.2g} of their spread "
                        f"(allowed {allowed:.2g})"
                    )
            choices.append(self._time(kind, program, plan, slabs[0][1]))
            on_progress(done, len(_QUERIES))
        self._program = program
        self._made_with = self._settings()
        return tuple(choices)

    def _time(
        self, kind: str, program: Callable[..., Tensor], plan: GraphPlan, slab: KVSlab
    ) -> ForwardChoice:
        n = 1 if _QUERIES[kind][0] == 1 else min(max(2, plan.n_nodes), BUCKETS[-1])
        taken: dict[Callable[..., Tensor], list[float]] = {_read: [], program: []}
        for _ in range(2 + _ROUNDS):
            for call, seconds in taken.items():
                self._wait()
                began = time.perf_counter()
                self._probe(call, slab, n, _FIRST_SPAN + n)
                self._wait()
                seconds.append(time.perf_counter() - began)
        # What a busy machine does to a forward only ever adds to its time.
        eager, compiled = (1e3 * min(s[2:]) for s in taken.values())
        return ForwardChoice(kind, n, eager, compiled, plan.mode == "on" or compiled < eager)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _probe(self, call: Callable[..., Tensor], slab: KVSlab, n: int, span: int) -> Tensor:
        """Logits of ``n`` queries at the end of ``span`` rows of zeros."""
        rows = torch.arange(span - n, span)
        positions = torch.arange(n) % (self.max_positions or n)
        visible = torch.arange(span) <= rows[:, None]
        tokens = torch.arange(n) % self.vocab_size
        return self._inner.read(
            lambda arguments: call(self.model, arguments), slab, tokens, rows, positions, visible
        )


def pad(
    cache: KVSlab,
    tokens: Tensor,
    rows: Tensor,
    positions: Tensor,
    visible: Tensor,
    bucket: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of ``forward`` for N queries and K rows; the first n logits are the same.

    A padding query reads id 0 at position 0, writes to a spare row of the cache, which nobody
    reads, and sees row 0 alone: a row of nothing but masked columns may be NaN.
    """
    n, span = visible.shape
    n_queries, reach = bucket
    seen = visible.new_zeros(n_queries, reach)
    seen[:n, :span] = visible
    if n == n_queries:
        return tokens, rows, positions, seen
    seen[n:, 0] = True
    nothing = tokens.new_zeros(n_queries - n)
    spare = torch.arange(cache.first_spare, cache.first_spare + len(nothing), device=rows.device)
    return (
        torch.cat([tokens, nothing]),
        torch.cat([rows, spare]),
        torch.cat([positions, nothing.to(positions.device)]),
        seen,
    )


class _CudaGraphs:
    """One CUDA graph per slab and bucket, all in one memory pool.

    A graph reads and writes fixed addresses: its arguments are copied into the tensors that it was
    captured with, and its logits are copied out before the next replay can write over them. It
    lives as long as the slab whose rows it writes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def run(
        self,
        call: Callable[[dict[str, Any]], Tensor],
        arguments: dict[str, Any],
        bucket: tuple[int, int],
        slab: KVSlab,
    ) -> Tensor:
        """Logits [1, N, V] of ``call(arguments)``, replayed from the second time on."""
        held = slab.graphs.get(bucket)
        if held is None:
            held = slab.graphs[bucket] = self._captured(call, arguments, slab)
        graph, static, rows, logits = held
        for name, value in arguments.items():
            _copy(static[name], value)
        if slab.destination is not rows:
            rows.copy_(slab.destination)
            slab.destination = rows
        graph.replay()
        return cast(Tensor, logits.clone())

    def _captured(
        self, call: Callable[[dict[str, Any]], Tensor], arguments: dict[str, Any], slab: KVSlab
    ) -> tuple[Any, dict[str, Any], Tensor, Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        static = {name: _clone(value) for name, value in arguments.items()}
        rows = slab.destination = slab.destination.clone()
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        # Writing the same keys to the same rows again changes nothing.
        with torch.cuda.stream(side):
            for _ in range(2):
                call(static)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = call(static)
        return graph, static, rows, logits


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):  # one mask per layer type
        return {key: _clone(inner) for key, inner in value.items()}
    return value


def _copy(into: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        into.copy_(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _copy(into[key], inner)


def _read(model: Any, arguments: dict[str, Any]) -> Tensor:
    """Logits [1, n, V] of a model of transformers: what is compiled."""
    logits: Tensor = model(**arguments).logits
    return logits


def _that_vary(guards: Sequence[Any]) -> list[bool]:
    """Which guards of a program are looked at in every call: those on what differs between calls.

    The others, a thousand for four layers, say that modules, code and cache are as they were when
    the program was made, and took a seventh of a forward to find that out again.
    """
    return [
        guard.guard_type == "SHAPE_ENV"
        or (guard.guard_type == "TENSOR_MATCH" and _ARGUMENT.fullmatch(guard.name) is not None)
        for guard in guards
    ]


# Tensors given anew in every call, also in a dict of masks; not those of the cache.
_ARGUMENT = re.compile(r"(L\[['\"])?arguments(['\"]\])?(\[['\"]\w+['\"]\])+")

_numbers = itertools.count()


def _own_code(function: Callable[..., Tensor]) -> FunctionType:
    plain = cast(FunctionType, function)
    code = plain.__code__.replace(co_name=f"{plain.__name__}_{next(_numbers)}")
    return FunctionType(code, plain.__globals__, code.co_name)


def _kind(n: int) -> str:
    return "one query" if n == 1 else "several queries"


def _ignore(done: int, total: int) -> None:
    """No one watches."""
