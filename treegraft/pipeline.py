"""Composes a pipeline from a config and decodes with it; the only file that knows all parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any

import networkx as nx
import torch
from torch import Tensor

from treegraft.backends.artefact import read_artefact
from treegraft.backends.reference import ReferenceTree
from treegraft.backends.tensor_tree import TensorTree
from treegraft.builder import build_builder, check_budget_costs
from treegraft.components import build_component
from treegraft.composition import component_graph
from treegraft.config import CustomConfig, PipelineConfig, override
from treegraft.core.draft_head import DraftHead
from treegraft.core.errors import (
    ConfigError,
    PromptError,
    TreegraftError,
    UnsupportedModelError,
)
from treegraft.core.guard import TimedModel, guard
from treegraft.core.language_model import ForwardCounts, LanguageModel
from treegraft.core.modes import OwnModes
from treegraft.core.processors import Processors
from treegraft.core.roles import Drafter, Scheduler, TreeBackend, TreeBuilder
from treegraft.core.sampling import History, Sampling
from treegraft.core.stats import Generation, StepRecord
from treegraft.core.stopwatch import Stopwatch
from treegraft.core.tree import TokenTree
from treegraft.decoding import Decoding, TargetCache
from treegraft.drafting import Layer
from treegraft.fallback import Fallback
from treegraft.loading import Loader
from treegraft.parts import Parts
from treegraft.policies.calibrated_tree import CalibratedTree
from treegraft.policies.calibration import Calibration
from treegraft.policies.drafters.datastore import DatastoreConfig
from treegraft.policies.drafters.head import HeadConfig
from treegraft.policies.drafters.lm import LmConfig
from treegraft.policies.value import ValueConfig
from treegraft.scheduler import build_scheduler, fitted_elsewhere
from treegraft.text import StopStrings, TextStream


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step of a stream brought.

    Attributes
    ----------
    tokens : the committed ids. text : the text that became certain (None without a tokenizer).
    step : the record of the step.
    tree : the draft tree that the target read. path : its committed nodes, top down: node
        ``path[j]`` holds ``tokens[j]``, and a token more than that is the target's bonus token.
    layers : who was chosen in each layer, where it could draft, and what it brought.
    generation : the whole result, with the last chunk only.
    """

    tokens: list[int]
    text: str | None
    step: StepRecord
    tree: TokenTree
    path: tuple[int, ...]
    layers: tuple[Layer, ...]
    generation: Generation | None = None


LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""Text so far, int64 [1, n], and its logits, float32 [1, V], to new logits of that shape."""

_TREES: dict[str, type[TensorTree] | type[ReferenceTree]] = {
    "tensor": TensorTree,
    "reference": ReferenceTree,
}


class Pipeline:
    """A target, its drafters and the policies between them, ready to decode.

    Made by ``build_pipeline``. One text at a time: beginning a new one ends the one before.
    """

    def __init__(
        self,
        config: PipelineConfig,
        parts: Parts,
        tokenizer: Any,
        eos: Sequence[int],
        no_tokenizer: str = "",
        calibration: Calibration | None = None,
        models: Mapping[str, LanguageModel] | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.notices = tuple(notices)
        """One line for each thing that whoever uses the pipeline should know about its parts."""
        self.tokenizer = tokenizer
        self._no_tokenizer = no_tokenizer
        self._models = dict(models or {})
        self._parts = parts
        self._eos = tuple(token for token in eos if token < parts.target.vocab_size)
        self._cache = TargetCache()
        self._current: object = None
        self._calibration = calibration

    @property
    def calibration(self) -> Calibration | None:
        """What maps scores to chances of acceptance; None where ``calibration.kind`` is none."""
        return self._calibration

    @property
    def target(self) -> LanguageModel:
        """The model whose text is produced."""
        return self._parts.target

    @property
    def parts(self) -> Parts:
        """The components themselves, for whoever drives them in another way than decoding."""
        return self._parts

    @property
    def models(self) -> dict[str, LanguageModel]:
        """Target and model drafters by the names that the config has for them, each once."""
        return dict(self._models)

    @property
    def compiled(self) -> tuple[str, ...]:
        """One line per model that may be compiled: what its warm-up measured and chose."""
        if self.config.backend.compile == "off":
            return ()
        return tuple(
            model.compiled_as or f"{name}: eager, as it is no model of transformers"
            for name, model in self._models.items()
        )

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """Cheapest first, as numbered in statistics."""
        return tuple(self._parts.names)

    @property
    def builder(self) -> TreeBuilder:
        """The shape of the tree: its depth, width and budget."""
        return self._parts.builder

    def with_scheduler(self, scheduler: Scheduler) -> Pipeline:
        """The same pipeline with another scheduler; both share drafters and models.

        As one text at a time goes through its drafters, only one of the two can be decoding.
        """
        other = copy.copy(self)
        other._parts = replace(self._parts, scheduler=scheduler)
        return other

    def graph(self) -> nx.DiGraph:
        """The components and what flows between them; see ``composition.component_graph``."""
        return component_graph(self.config)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, checked; PromptError in one line before any forward."""
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise PromptError(
                    f"a text prompt must be valid Unicode, found {prompt[error.start]!r} at "
                    f"character {error.start}"
                ) from None
            if self.tokenizer is None:
                raise PromptError(
                    f"a text prompt needs a tokenizer, found none ({self._no_tokenizer}); "
                    "pass token ids"
                )
            tokens = list(self.tokenizer(prompt)["input_ids"])
        else:
            try:
                # Sets and mappings have no order, and bytes are text that nobody decoded.
                if isinstance(prompt, bytes | Set | Mapping):
                    raise TypeError
                tokens = [index(token) for token in prompt]
            except TypeError:
                raise PromptError(
                    "a prompt must be text or a flat list of token ids, found "
                    f"{type(prompt).__name__} of something else"
                ) from None
        if not tokens:
            raise PromptError("the prompt is empty; it needs at least one token")
        n_ids = self.target.vocab_size
        outside = [token for token in tokens if not 0 <= token < n_ids]
        if outside:
            raise PromptError(f"prompt ids must be in 0..{n_ids - 1}, found {outside[0]}")
        limit = self.target.max_positions
        if limit is not None and len(tokens) >= limit:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, the context of {self.target.name!r} ends at "
                f"{limit}; at most {limit - 1} leave room for a new one"
            )
        return tokens

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """Decode to the end; ``options`` (``logits_processor`` among them) as in ``stream``."""
        generation = None
        for chunk in self._decode(prompt, False, **options):
            generation = chunk.generation
        assert generation is not None
        return generation

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None = None,
        **overrides: Any,
    ) -> Iterator[Chunk]:
        """Decode step by step.

        Parameters
        ----------
        prompt : text, or token ids (then no tokenizer is needed).
        logits_processor : rules of one's own, as for transformers' ``generate``: each is called
            with the text so far, int64 [1, n], and its row of logits, float32 [1, V], and returns
            the new row. It is called for every place of the text once, in order, with what is
            committed and the accepted path; docs/method.md section 2 says what follows.
        prefix_allowed_tokens_fn : as in ``generate``: the allowed ids, given 0 and the text so far,
            int64 [n].
        overrides : options of ``config.sampling`` and ``config.stop`` for this text alone, such as
            ``max_new_tokens=64``, ``seed=7`` or ``no_repeat_ngram_size=3``.

        Raises
        ------
        PromptError, ConfigError : before any forward, and before the first chunk is asked for.
        DrafterError, ProcessorError : if a drafter or a logits processor fails; the pipeline stays
            usable.
        """
        return self._decode(
            prompt,
            True,
            logits_processor=logits_processor,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            **overrides,
        )

    def _decode(
        self,
        prompt: str | Sequence[int],
        texts: bool,
        /,
        *,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None = None,
        **overrides: Any,
    ) -> Iterator[Chunk]:
        """``stream``; without ``texts`` no chunk has one, which saves decoding it step by step."""
        config = self._with(overrides)
        tokens = self.encode(prompt)
        stop = config.stop
        if stop.strings and self.tokenizer is None:
            raise PromptError(f"stop.strings need a tokenizer, found none ({self._no_tokenizer})")
        strings = StopStrings(stop.strings, self.tokenizer) if stop.strings else None
        decoding = Decoding(
            self._parts,
            self._sampling(config, tokens, logits_processor, prefix_allowed_tokens_fn, strings),
            History(tokens, len(tokens)),
            stop.max_new_tokens,
            self._cache,
            None if strings is None else strings.completes,
        )
        return self._run(decoding, texts)

    def sampling(self, prompt: str | Sequence[int], **overrides: Any) -> Sampling:
        """The sampling settings of a text of this prompt, with processors made for it alone."""
        return self._sampling(self._with(overrides), self.encode(prompt))

    def _sampling(
        self,
        config: PipelineConfig,
        prompt: Sequence[int],
        logits_processor: Sequence[LogitsProcessor] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None = None,
        strings: StopStrings | None = None,
    ) -> Sampling:
        stop, own = config.stop, config.sampling.model_dump(exclude={"processors"})
        eos = self._eos if stop.eos is None else stop.eos
        if eos and max(eos) >= self.target.vocab_size:
            raise ConfigError(
                f"stop.eos ids must be in 0..{self.target.vocab_size - 1}, found {max(eos)}"
            )
        if stop.min_new_tokens and len(set(eos)) == self.target.vocab_size:
            raise ConfigError(
                "stop.min_new_tokens must be 0 where stop.eos holds every id, found "
                f"{stop.min_new_tokens}"
            )
        settings = {} if config.sampling.processors is None else config.sampling.processors.settings
        given = logits_processor is not None or prefix_allowed_tokens_fn is not None
        processors = None
        if settings or given:
            # transformers is imported with the first processor, not before.
            from treegraft.backends.processors import Text, build_processors

            text = Text(
                prompt=prompt,
                max_new_tokens=stop.max_new_tokens,
                eos=eos,
                vocab_size=self.target.vocab_size,
                device=torch.device(self.target.device),
                repetition_penalty=config.sampling.repetition_penalty,
                min_new_tokens=stop.min_new_tokens,
            )
            with OwnModes():
                entries = build_processors(
                    settings, logits_processor, prefix_allowed_tokens_fn, text
                )
            if entries:
                processors = Processors(entries, None if strings is None else strings.would_end)
                self._refuse_stateful(processors)
        return Sampling(**own, min_new_tokens=stop.min_new_tokens, eos=eos, processors=processors)

    def _refuse_stateful(self, processors: Processors) -> None:
        """ConfigError for a processor that keeps state under a verifier that may call it twice."""
        verifier = self._parts.verifier
        if verifier.in_text_order or not processors.stateful:
            return
        raise ConfigError(
            f"logits processor {processors.stateful[0].name!r} may keep state from call to call, "
            f"and verifier {type(verifier).__name__!r} does not visit places once and in order: "
            "use verifier 'walk', or set stateless = True on it if its answer depends on its "
            "arguments alone"
        )

    def _with(self, overrides: Mapping[str, Any]) -> PipelineConfig:
        if not overrides:
            return self.config
        return override(self.config, overrides)

    def _run(self, decoding: Decoding, texts: bool) -> Iterator[Chunk]:
        self._current = decoding
        counted = {
            name: replace(model.forward_counts)
            for name, model in self._models.items()
            if model.forward_counts is not None
        }
        watch = self._parts.watch
        watch.lap()
        with OwnModes():
            decoding.prefill()
        prefill = watch.lap()
        stream = TextStream(self.tokenizer) if texts and self.tokenizer is not None else None
        steps: list[StepRecord] = []
        while decoding.finish_reason is None:
            if self._current is not decoding:
                raise TreegraftError(
                    "this stream ended when its pipeline began another text; "
                    "build a pipeline for each text that runs at the same time"
                )
            # The caller held the generator: that time is not ours.
            watch.skip()
            with OwnModes():
                step = decoding.step()
            text = stream.push(step.tokens) if stream is not None else None
            if stream is not None and decoding.finish_reason is not None:
                text = (text or "") + stream.flush()
            steps.append(step.record.with_seconds(watch.lap()))
            generation = None
            if decoding.finish_reason is not None:
                generation = self._finished(decoding, steps, prefill, counted)
            yield Chunk(step.tokens, text, steps[-1], step.tree, step.path, step.layers, generation)

    def _finished(
        self,
        decoding: Decoding,
        steps: list[StepRecord],
        prefill: dict[str, float],
        counted: Mapping[str, ForwardCounts],
    ) -> Generation:
        history = decoding.history
        forwards = {
            name: found.since(before)
            for name, before in counted.items()
            if (found := self._models[name].forward_counts) is not None
        }
        new = history.tokens[history.n_prompt :]
        text = None
        if self.tokenizer is not None:
            text = self.tokenizer.decode(new, skip_special_tokens=True)
        return Generation(
            tokens=new,
            text=text,
            finish_reason=decoding.finish_reason or "",
            n_prompt=history.n_prompt,
            drafters=self.drafter_names,
            steps=steps,
            prefill=prefill,
            notices=tuple(decoding.notices),
            forwards=forwards,
        )


def build_pipeline(
    config: PipelineConfig,
    models: Mapping[str, LanguageModel | DraftHead] | None = None,
    tokenizer: Any = None,
    loader: Loader | None = None,
    on_compile: Callable[[str, int, int], None] | None = None,
) -> Pipeline:
    """Compose and load what ``config`` names.

    Parameters
    ----------
    config : from ``load_config``, ``parse_config`` or ``PipelineConfig(...)``.
    models : models and draft heads that are already loaded, by the name that the config uses for
        them; the others are loaded. Two roles that name one model share its weights.
    tokenizer : instead of the target's own.
    loader : a loader that earlier pipelines of the same backend settings used, to share what it
        has loaded; then ``models`` is not looked at.
    on_compile : told how far the compiling of a model is: its name, pieces done, pieces in all.

    Raises
    ------
    ConfigError : a role is unfilled or a class does not fit, before any weight is loaded; or a
        model cannot be compiled and ``backend.compile`` is on.
    UnsupportedModelError : a model cannot be verified, or a drafter does not fit the target.
    DatastoreError : a datastore cannot be opened, before any weight is loaded.
    ScheduleError : a learned scheduler cannot be read, or was made for another pipeline.
    """
    component_graph(config)
    check_budget_costs(config)
    custom = {
        role: build_component(role, getattr(config, role))
        for role in ("builder", "graft", "verifier")
    }
    loader = loader or Loader(config.backend, dict(models or {}))
    named = [drafter.model for drafter in config.drafters if isinstance(drafter, LmConfig)]
    loader.check_sources([config.target.model, *named])
    if tokenizer is not None:
        loader.give_tokenizer(config.target.model, tokenizer)
    for drafter in config.drafters:
        if isinstance(drafter, HeadConfig):
            loader.check_head(drafter.model)
    stores = [drafter.path for drafter in config.drafters if isinstance(drafter, DatastoreConfig)]
    for path in stores:
        loader.check_datastore(config.target.model, path)
    artefact = None
    if isinstance(config.scheduler, ValueConfig):
        artefact = read_artefact(config.scheduler.artefact)
    n_nodes = custom["builder"].budget + 1
    target = loader.compiled(config.target.model, config.backend, n_nodes, on_compile)
    watch = Stopwatch()
    models_used = {config.target.model: target}
    drafters: list[Drafter] = []
    for name, drafter in zip(config.drafter_names, config.drafters, strict=True):
        if isinstance(drafter, LmConfig):
            loader.check_vocabularies(config.target.model, drafter.model)
            model = loader.compiled(drafter.model, config.backend, n_nodes, on_compile)
            models_used[drafter.model] = model
            built = build_component("drafter", drafter, TimedModel(model, name, watch))
        elif isinstance(drafter, HeadConfig):
            head = loader.head(drafter.model, config.target.model)
            built = build_component(
                "drafter", drafter, head, partial(TimedModel, name=name, watch=watch)
            )
        elif isinstance(drafter, DatastoreConfig):
            loader.check_datastore(config.target.model, drafter.path)
            built = build_component("drafter", drafter, loader.datastore(drafter.path))
        else:
            built = build_component("drafter", drafter)
        if built.target_hidden and target.hidden_size is None:
            raise UnsupportedModelError(
                f"drafter {name!r} asks for hidden states, and target {target.name!r} hands out "
                "none: leave the drafter out or use another target"
            )
        drafters.append(guard(built, name, watch))
    tree_class = _TREES[config.backend.kind]
    calibration = None
    if config.calibration.kind == "online":
        calibration = Calibration(config.calibration, len(drafters))

    def tree() -> TreeBackend:
        made = tree_class(target.vocab_size)
        return made if calibration is None else CalibratedTree(made, calibration.for_text())

    builder = build_builder(config, custom["builder"], target)
    scheduler = build_scheduler(config, builder, artefact, models_used)
    parts = Parts(
        target=target,
        drafters=tuple(drafters),
        names=config.drafter_names,
        builder=builder,
        graft=custom["graft"],
        scheduler=scheduler,
        verifier=custom["verifier"],
        tree=tree,
        watch=watch,
        riders=tuple(map(config.drafter_names.index, config.ride_along)),
        leftover=config.leftover,
        fallback=Fallback() if config.fallback == "auto" else None,
        foreign=any(
            isinstance(part, CustomConfig)
            for part in (*config.drafters, config.builder, config.graft, config.scheduler)
        ),
    )
    source = config.target.model
    return Pipeline(
        config,
        parts,
        loader.tokenizer(source),
        loader.eos(source),
        loader.no_tokenizer(source),
        calibration,
        models_used,
        fitted_elsewhere(config, artefact),
    )
