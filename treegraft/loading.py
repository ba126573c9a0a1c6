"""Loads the models, tokenizers and datastores that a config names, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from treegraft.backends.datastore import Datastore, check_tokenizer, open_datastore
from treegraft.backends.sources import check_device, resolve, resolve_head, split_layers
from treegraft.backends.vocabulary import check_vocabularies, fingerprint
from treegraft.config import BackendConfig
from treegraft.core.draft_head import DraftHead
from treegraft.core.errors import ConfigError, UnsupportedModelError
from treegraft.core.language_model import LanguageModel


class Loader:
    """Finds models by the names that a config uses; models handed in come first.

    transformers is imported with the first model that has to be loaded, not before.
    """

    def __init__(
        self, backend: BackendConfig, models: Mapping[str, LanguageModel | DraftHead]
    ) -> None:
        self._backend = backend
        self._given = frozenset(models)
        self._models: dict[str, LanguageModel] = {}
        # By name and target; None is a head that was handed in.
        self._heads: dict[tuple[str, str | None], DraftHead] = {}
        for name, model in models.items():
            if isinstance(model, DraftHead):
                self._heads[name, None] = model
            else:
                self._models[name] = model
        self._compiled: dict[tuple[str, str, str | None, bool, bool], LanguageModel] = {}
        self._tokenizers: dict[str, tuple[Any, str]] = {}
        self._datastores: dict[str, Datastore] = {}

    def give_tokenizer(self, source: str, tokenizer: Any) -> None:
        """Use ``tokenizer`` for the model of this name instead of the one beside it."""
        self._tokenizers[source] = (tokenizer, "")

    def check_sources(self, sources: Iterable[str]) -> None:
        """ConfigError for the first name that leads nowhere, before anything is loaded."""
        for source in sources:
            if (source, None) in self._heads:
                raise ConfigError(f"{source!r} is a draft head: name it as model of kind head")
            base, _ = split_layers(source)
            if source not in self._models and base not in self._models:
                resolve(base)

    def check_head(self, source: str) -> None:
        """ConfigError unless this is the name of a draft head, before anything is loaded."""
        if source in self._models:
            raise ConfigError(f"{source!r} is a language model: name it as model of kind lm")
        if (source, None) not in self._heads:
            resolve_head(source)

    def head(self, source: str, target: str) -> DraftHead:
        """The draft head of this name for the target of that, loaded at most once.

        UnsupportedModelError if it was made for another target.
        """
        model = self.model(target)
        head = self._heads.get((source, None)) or self._heads.get((source, target))
        if head is None:
            from treegraft.backends.head import load_head

            head = self._heads[source, target] = load_head(source, model)
        found = (head.vocab_size, head.hidden_size)
        expected = (model.vocab_size, model.hidden_size)
        if found != expected:
            raise UnsupportedModelError(
                f"head {source!r} has (vocabulary, hidden states) of widths {found}, target "
                f"{target!r} has {expected}: use a head that was trained for it"
            )
        return head

    def model(self, source: str) -> LanguageModel:
        """The model of this name, loaded at most once; ``NAME[:N]`` shares the weights of NAME."""
        base, n_layers = split_layers(source)
        if source not in self._models and n_layers is not None:
            self._models[source] = _prefix(self.model(base), source, n_layers)
        if source not in self._models:
            from treegraft.backends.hf import load_model

            check_device(self._backend.device)
            attention = self._backend.attention
            self._models[source] = load_model(
                source,
                dtype=self._backend.dtype,
                device=self._backend.device,
                attention=None if attention == "auto" else attention,
            )
        return self._models[source]

    def compiled(
        self,
        source: str,
        backend: BackendConfig,
        n_nodes: int,
        on_compile: Callable[[str, int, int], None] | None = None,
    ) -> LanguageModel:
        """The model of this name with its forwards as ``backend`` says, compiled at most once.

        ``n_nodes`` : nodes of a usual wide forward. ``on_compile`` gets the name, the pieces of the
        warm-up that are done and their number. ConfigError where ``compile: on`` cannot be.
        """
        model = self.model(source)
        if backend.compile == "off":
            return model
        from treegraft.backends.graphs import CompiledModel, GraphPlan
        from treegraft.backends.hf import HFLanguageModel

        if not isinstance(model, HFLanguageModel):
            if backend.compile == "auto":
                return model
            raise ConfigError(
                "backend.compile 'on' compiles models of transformers, found "
                f"{type(model).__name__} {source!r}: set backend.compile to auto or off"
            )
        buckets = backend.buckets
        if buckets is None:
            buckets = model.device.type == "cuda"
        key = (source, backend.compile, backend.compiler, buckets, backend.panels)
        if key not in self._compiled:
            plan = GraphPlan(backend.compile, backend.compiler, buckets, n_nodes, backend.panels)
            tell = on_compile or _nobody
            self._compiled[key] = CompiledModel(
                model, plan, lambda done, total: tell(source, done, total)
            )
        return self._compiled[key]

    def datastore(self, path: str) -> Datastore:
        """The datastore in this folder, opened at most once."""
        if path not in self._datastores:
            self._datastores[path] = open_datastore(path)
        return self._datastores[path]

    def check_datastore(self, target: str, path: str) -> None:
        """UnsupportedModelError unless the datastore's ids mean what the target's mean.

        Loads no weights. Where tokenizers cannot be compared the widths are, if the target is
        loaded already; so ask again when it is.
        """
        tokenizer = self._vocabulary(target)
        model = self._models.get(target)
        check_tokenizer(
            self.datastore(path).header,
            path,
            target,
            None if tokenizer is None else fingerprint(tokenizer),
            None if model is None else model.vocab_size,
        )

    def _vocabulary(self, source: str) -> Any:
        """The tokenizer of the model, None also for one's own that cannot list its tokens."""
        tokenizer = self.tokenizer(source)
        return tokenizer if hasattr(tokenizer, "get_vocab") else None

    def tokenizer(self, source: str) -> Any:
        """The tokenizer of the model, or None; ``no_tokenizer`` says why."""
        return self._tokenizer(source)[0]

    def no_tokenizer(self, source: str) -> str:
        """Why the model of this name has no tokenizer; empty if it has one."""
        return self._tokenizer(source)[1]

    def _tokenizer(self, source: str) -> tuple[Any, str]:
        source, _ = split_layers(source)
        if source not in self._tokenizers:
            if source in self._given:
                return None, f"model {source!r} was handed in without one"
            from treegraft.backends.hf import load_tokenizer

            self._tokenizers[source] = load_tokenizer(source)
        return self._tokenizers[source]

    def eos(self, source: str) -> tuple[int, ...]:
        """Ids that end a text, as the model's generation settings have them."""
        settings = getattr(getattr(self._models[source], "model", None), "generation_config", None)
        eos = getattr(settings, "eos_token_id", None)
        if eos is None:
            return ()
        return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)

    def check_vocabularies(self, target: str, drafter: str) -> None:
        """UnsupportedModelError unless the drafter's ids mean what the target's mean."""
        if target == drafter:
            return
        check_vocabularies(
            self._vocabulary(target),
            self.model(target).vocab_size,
            self._vocabulary(drafter),
            self.model(drafter).vocab_size,
            (target, drafter),
        )


def _prefix(model: LanguageModel, source: str, n_layers: int) -> LanguageModel:
    from treegraft.backends.hf import HFLanguageModel
    from treegraft.backends.prefix import first_layers

    if not isinstance(model, HFLanguageModel):
        raise ConfigError(
            f"model {source!r}: only of models of transformers the first layers can be taken, "
            f"found {type(model).__name__}"
        )
    return HFLanguageModel(first_layers(model.model, n_layers, source), name=source)


def _nobody(source: str, done: int, total: int) -> None:
    """Takes note of no progress."""
