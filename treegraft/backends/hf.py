"""The Hugging Face adapter: any causal LM of transformers that takes a 4D mask, as it is.

No modelling code is copied or changed. A forward hands the model a mask that says which cache rows
each query sees, explicit position ids, and a cache that writes where it is told (kv.py); all that
differs between architectures and versions was decided at load (adapter.py).

Shapes (docs/shapes.md): n queries of this forward, K kv span, S cache rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from treegraft.backends.adapter import decide, label_of, refuse_config
from treegraft.backends.kv import KVSlab
from treegraft.backends.masks import TreeMasks
from treegraft.backends.prefix import first_layers
from treegraft.backends.selftest import N_POSITIONS, allowed_error, tree_error
from treegraft.backends.sources import one_line, parse_dtype, reading, resolve, split_layers
from treegraft.core.errors import ConfigError, TreegraftError, UnsupportedModelError
from treegraft.core.language_model import LanguageModel

__all__ = ["HFLanguageModel", "load_model", "load_tokenizer", "logits_of"]

_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "bpe")


@final
class HFLanguageModel(LanguageModel):
    """A causal LM of transformers, read on a tree.

    The model given is left as it was found: weights, training flags, attention implementation and
    gradient settings. Forwards run without gradients and without dropout.

    Windows are measured by position. A token at position p has p ancestors, each in its own
    visible row, so positions are below the span K, and a span within the window needs no look at
    positions.

    Parameters
    ----------
    model : a loaded transformers causal LM, on any device, in any floating dtype.
    name : how messages and statistics call it; the architecture's name if left out.
    self_test : compare a small tree with its paths once, and refuse the model if they differ.

    Attributes
    ----------
    report : what was decided about the model.
    masks : makes its masks.
    model : the model as given. weight : its embedding, whose type and device stand for all.
    """

    def __init__(self, model: Any, name: str | None = None, self_test: bool = True) -> None:
        self.model = model
        self.name = str(name or getattr(model.config, "model_type", type(model).__name__))
        report = decide(model, self.name)
        self.report = report
        self._label = label_of(self.name, report.model_type)
        self.vocab_size = report.vocab_size
        self.max_positions = report.max_positions
        self.weight: Tensor = model.get_input_embeddings().weight
        self.device = self.weight.device
        self._layout: Any = None
        self._cache_keyword = report.cache_keyword
        self.masks = TreeMasks(report, self.device)
        self._probe()
        if self_test:
            self._self_test()

    def new_cache(self, n_rows: int, old: KVSlab | None = None, n_spare: int = 0) -> KVSlab:
        """Open a KV slab of ``n_rows`` rows (S), with the content of ``old`` if given.

        ``n_spare`` rows more stand behind them: see KVSlab.
        """
        cache = KVSlab(
            n_layers=self.report.n_layers,
            n_rows=n_rows,
            layout=self._layout,
            positions_device=self.device if self.masks.windowed else None,
            past_per_query=self.report.positions_from_cache,
            n_spare=n_spare,
        )
        if old is not None:
            cache.take_over_(old)
        return cache

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
        return self.read(self.call, cache, tokens, rows, positions, visible, last_only)

    def read(
        self,
        call: Callable[[dict[str, Any]], Tensor],
        cache: KVSlab,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Tensor:
        """``forward`` with ``call`` in the model's place.

        ``call`` gets the arguments that the model's own forward would get, and returns its logits,
        [1, n, V] in the dtype of the weights.
        """
        with self.steady():
            span = cache.aim_(rows, positions, visible.shape[1])
            arguments = self.arguments(cache, tokens, rows, positions, visible, span, last_only)
            return logits_of(call(arguments), last_only)

    def ready(
        self,
        call: Callable[[dict[str, Any]], Tensor],
        cache: KVSlab,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> Callable[[], Tensor]:
        """``call`` with its arguments made and the cache aimed: a bare forward."""
        span = cache.aim_(rows, positions, visible.shape[1])
        arguments = self.arguments(cache, tokens, rows, positions, visible, span, last_only)
        return lambda: call(arguments)

    def arguments(
        self,
        cache: KVSlab,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        span: int,
        last_only: bool,
    ) -> dict[str, Any]:
        """What the model's forward is called with; ``cache`` is aimed and hands out ``span``."""
        device = self.device
        if device.type != "cpu":
            tokens = tokens.to(device, non_blocking=True)
            positions = positions.to(device, non_blocking=True)
            visible = visible.to(device, non_blocking=True)
        arguments = {
            "input_ids": tokens.unsqueeze(0),
            "position_ids": positions.unsqueeze(0),
            "attention_mask": self.masks(cache.positions, positions, visible, span),
            self._cache_keyword: cache,
            "use_cache": True,
            "return_dict": True,
        }
        if self.report.cache_position:
            arguments["cache_position"] = rows.to(device, non_blocking=True)
        if last_only and self.report.logits_to_keep:
            arguments["logits_to_keep"] = 1
        return arguments

    def call(self, arguments: dict[str, Any]) -> Tensor:
        """Logits [1, n, V] of the model itself, in the dtype of the weights."""
        logits: Tensor = self.model(**arguments).logits
        return logits

    @contextmanager
    def steady(self) -> Iterator[None]:
        """No gradients, no dropout, and no autocast: keys have the dtype of the weights."""
        with ExitStack() as stack:
            if torch.is_grad_enabled():
                stack.enter_context(torch.no_grad())
            if torch.is_autocast_enabled(self.device.type):
                stack.enter_context(torch.autocast(self.device.type, enabled=False))
            if self.model.training:
                stack.enter_context(self._evaluating())
            yield

    def forward_hidden(
        self, cache: KVSlab, tokens: Tensor, rows: Tensor, positions: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read ``n`` tokens; logits and hidden states: see LanguageModel.forward_hidden."""
        with self._states_shown() as states:
            logits = self.forward(cache, tokens, rows, positions, visible)
        if not states:
            raise UnsupportedModelError(f"{self._label} hands out no hidden states")
        return logits, states[-1]

    @contextmanager
    def _states_shown(self) -> Iterator[list[Tensor]]:
        """A list that gets what each forward gives its output layer, float [n, d].

        A hook that is gone when the forward is over: what a model's own ``output_hidden_states``
        calls the last one is not what its output layer reads in every architecture.
        """
        states: list[Tensor] = []

        def note(_: Any, given: tuple[Any, ...]) -> None:
            if given:
                states.append(given[0].detach().flatten(0, -2))

        hook = self.model.get_output_embeddings().register_forward_pre_hook(note)
        try:
            yield states
        finally:
            hook.remove()

    def move_(self, cache: KVSlab, source: Tensor, target: Tensor) -> None:
        """Copy cache rows: see LanguageModel.move_."""
        with torch.no_grad():
            cache.move_(source, target)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Dropout off, then every module's training flag as it was."""
        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def _plain(self, tokens: Tensor) -> Tensor:
        """The bare model on whole texts: int64 [B, T] to logits [B, T, V]."""
        plain = torch.autocast(self.device.type, enabled=False)
        with torch.no_grad(), plain, self._evaluating():
            out = self.model(input_ids=tokens.to(self.device), use_cache=False, return_dict=True)
            return out.logits  # type: ignore[no-any-return]

    def _probe(self) -> None:
        """Read one token, to learn what the layers store and how wide the logits are."""
        cache = self.new_cache(1)
        zero = torch.zeros(1, dtype=torch.int64)
        with self._refusing("one token"), self._states_shown() as states:
            logits = self.forward(cache, zero, zero, zero, torch.ones(1, 1, dtype=torch.bool))
        self.hidden_size = states[-1].shape[-1] if states else None
        self._layout = cache.layout()
        if all(shapes is None for shapes in self._layout):
            raise UnsupportedModelError(
                f"{self._label} did not use the KV cache it was given: "
                "it cannot be read on a tree; use a model of transformers' own architectures"
            )
        if logits.shape[-1] != self.vocab_size:
            self.vocab_size = logits.shape[-1]
            self.report = replace(self.report, vocab_size=self.vocab_size)

    def _self_test(self) -> None:
        room = self.max_positions
        if room is not None and room < N_POSITIONS:
            note = f"a context of {room} positions is too short for the self-test"
            self.report = replace(self.report, notes=(*self.report.notes, note))
            return
        with self._refusing("a small draft tree"):
            error = tree_error(self, self._plain, self.report)
        allowed = allowed_error(self.report, self.device)
        if not error <= allowed:
            raise UnsupportedModelError(
                f"{self._label}: tree logits differ from path logits by "
                f"{error:.2g} of their spread (allowed {allowed:.2g}): the model does not follow "
                "the mask or the positions it is given, so drafts would change its text; use "
                "another model, or self_test=False if you know better"
            )
        self.report = replace(self.report, self_test_error=error)

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Turn what a model raises on its first forwards into a refusal of that model."""
        try:
            yield
        except (TreegraftError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self._label} fails when it reads {what} with a mask, "
                f"positions and a cache ({type(error).__name__}: {one_line(error)}): it cannot be "
                "verified on a tree; use a model of transformers' own architectures"
            ) from error


def logits_of(logits: Tensor, last_only: bool) -> Tensor:
    """float32 or float64 [n, V] of logits [1, n, V]; [1, V] of the last query if asked for."""
    logits = logits.squeeze(0)
    if last_only and logits.shape[0] != 1:
        logits = logits[-1:]
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def load_model(
    source: str,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    self_test: bool = True,
) -> HFLanguageModel:
    """Load a causal LM and wrap it.

    Parameters
    ----------
    source : a local folder, a hub id, or ``zoo:NAME`` for a model that ships with treegraft;
        with ``[:N]`` behind it only the first N layers.
    dtype : a torch dtype or its name, ``auto`` for that of the checkpoint. Left out: the
        checkpoint's own on an accelerator, float32 on the CPU, where half precision is slow.
    device : where the weights go; left out: CUDA if there is one, else the CPU.
    attention : ``sdpa`` or ``eager``; left out: sdpa where the model has it.
    self_test : see HFLanguageModel.

    Code that comes with a checkpoint is never run.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if attention not in (None, "sdpa", "eager"):
        raise ConfigError(
            f"attention {attention!r} takes no mask per query and key: use sdpa or eager"
        )
    kind = parse_dtype(dtype, place)
    base, n_layers = split_layers(source)
    path = resolve(base)
    with reading(source):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    refuse_config(config, source)
    with reading(source), _no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=kind,
            attn_implementation=attention,
            trust_remote_code=False,
        )
    if kind == torch.float64 and model._can_set_experts_implementation():
        # The grouped product of the experts has no float64 kernel.
        model.set_experts_implementation("eager")
    if n_layers is not None:
        model = first_layers(model, n_layers, source)
    model = model.to(place).eval()
    if place.type == "cpu":
        _lay_inputs_first(model)
    return HFLanguageModel(model, name=source, self_test=self_test)


def _lay_inputs_first(model: torch.nn.Module) -> None:
    """Keep float32 weights of linear layers as [in, out] in memory; their shape stays [out, in].

    For few queries the product with a matrix that lies so is a fifth to a quarter faster on a CPU
    (benchmarks/layout.py), and as fast for many.
    """
    for module in model.modules():
        if type(module) is not torch.nn.Linear or module.weight.dtype != torch.float32:
            continue
        if module.weight.is_contiguous():  # tied weights come by once more
            module.weight.data = module.weight.data.t().contiguous().t()


def load_tokenizer(source: str) -> tuple[Any | None, str]:
    """The tokenizer of a model, or None and the reason why there is none.

    ``source`` is as for ``load_model``. Generation works on token ids without one.
    """
    path = resolve(split_layers(source)[0])
    folder = Path(path)
    if folder.is_dir() and not any(
        file.name.startswith(_TOKENIZER_FILES) or file.suffix in (".model", ".tiktoken")
        for file in folder.iterdir()
    ):
        return None, f"{source} has no tokenizer files"
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False), ""
    # Every tokenizer class fails in its own way, and a missing tokenizer is no fault.
    except Exception as error:
        return None, f"the tokenizer of {source} cannot be loaded: {one_line(error)}"


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
