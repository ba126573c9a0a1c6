"""TreeGraft: several drafters grow one draft tree, the target verifies it in one forward."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treegraft.config import PipelineConfig, load_config, parse_config
    from treegraft.core.errors import (
        CapacityError,
        ConfigError,
        DatastoreError,
        DrafterError,
        ProcessorError,
        PromptError,
        TreeError,
        TreegraftError,
        UnsupportedModelError,
    )
    from treegraft.core.language_model import LanguageModel
    from treegraft.core.roles import (
        Commit,
        Context,
        Drafter,
        DraftState,
        GraftPolicy,
        Scheduler,
        ScoringDrafter,
        Touched,
        TreeBackend,
        TreeBuilder,
        Verifier,
    )
    from treegraft.core.stats import Generation, Statistics, StepRecord
    from treegraft.core.tree import Proposals, TokenTree, Verdict
    from treegraft.pipeline import Chunk, Pipeline, build_pipeline
    from treegraft.trace import TraceWriter

# Name to module: torch takes a second to import, so a name brings its module when it is used.
_HOMES = {
    "treegraft.config": ("PipelineConfig", "load_config", "parse_config"),
    "treegraft.core.errors": (
        "CapacityError",
        "ConfigError",
        "DatastoreError",
        "DrafterError",
        "ProcessorError",
        "PromptError",
        "TreeError",
        "TreegraftError",
        "UnsupportedModelError",
    ),
    "treegraft.core.language_model": ("LanguageModel",),
    "treegraft.core.roles": (
        "Commit",
        "Context",
        "DraftState",
        "Drafter",
        "GraftPolicy",
        "Scheduler",
        "ScoringDrafter",
        "Touched",
        "TreeBackend",
        "TreeBuilder",
        "Verifier",
    ),
    "treegraft.core.stats": ("Generation", "Statistics", "StepRecord"),
    "treegraft.core.tree": ("Proposals", "TokenTree", "Verdict"),
    "treegraft.pipeline": ("Chunk", "Pipeline", "build_pipeline"),
    "treegraft.trace": ("TraceWriter",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "Chunk",
    "Commit",
    "ConfigError",
    "Context",
    "DatastoreError",
    "DraftState",
    "Drafter",
    "DrafterError",
    "Generation",
    "GraftPolicy",
    "LanguageModel",
    "Pipeline",
    "PipelineConfig",
    "ProcessorError",
    "PromptError",
    "Proposals",
    "Scheduler",
    "ScoringDrafter",
    "Statistics",
    "StepRecord",
    "TokenTree",
    "Touched",
    "TraceWriter",
    "TreeBackend",
    "TreeBuilder",
    "TreeError",
    "TreegraftError",
    "UnsupportedModelError",
    "Verdict",
    "Verifier",
    "build_pipeline",
    "load_config",
    "parse_config",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'treegraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOME_OF]
