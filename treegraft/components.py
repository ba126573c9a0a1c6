"""What can stand in each role: the closed set of built-ins, and one's own class by import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from treegraft.config import CustomConfig
from treegraft.core.errors import ConfigError, TreegraftError
from treegraft.core.roles import Drafter, GraftPolicy, Scheduler, TreeBuilder, Verifier
from treegraft.policies.builders import (
    BestFirstBuilder,
    BestFirstConfig,
    ChainBuilder,
    ChainConfig,
    LayeredBuilder,
    LayeredConfig,
    StaticBuilder,
    StaticConfig,
)
from treegraft.policies.drafters.datastore import DatastoreConfig, DatastoreDrafter
from treegraft.policies.drafters.head import HeadConfig, HeadDrafter
from treegraft.policies.drafters.lm import LmConfig, LmDrafter
from treegraft.policies.drafters.ngram import NgramConfig, NgramDrafter
from treegraft.policies.drafters.recycle import RecycleConfig, RecycleDrafter
from treegraft.policies.drafters.suffix import SuffixConfig, SuffixDrafter
from treegraft.policies.grafts import (
    BudgetSwapConfig,
    BudgetSwapGraft,
    ReplaceConfig,
    ReplaceGraft,
    TreegraftConfig,
    TreegraftGraft,
    UnionConfig,
    UnionGraft,
)
from treegraft.policies.online import OnlineConfig, OnlineScheduler
from treegraft.policies.schedulers import (
    AlwaysConfig,
    AlwaysScheduler,
    BudgetedConfig,
    BudgetedScheduler,
    CostAwareConfig,
    CostAwareScheduler,
    FixedConfig,
    FixedScheduler,
    NeverConfig,
    NeverScheduler,
    PriorityConfig,
    PriorityScheduler,
)
from treegraft.policies.value import ValueConfig, ValueScheduler
from treegraft.policies.verifiers import (
    LedgerConfig,
    LedgerVerifier,
    TraversalConfig,
    TraversalVerifier,
    WalkConfig,
    WalkVerifier,
)


@dataclass(frozen=True, slots=True)
class Role:
    """A place in the pipeline: the ABC that fills it, and the built-ins by kind."""

    name: str
    base: type
    builtin: Mapping[str, tuple[type[BaseModel], type]]


ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role(
            "drafter",
            Drafter,
            {
                "ngram": (NgramConfig, NgramDrafter),
                "suffix": (SuffixConfig, SuffixDrafter),
                "recycle": (RecycleConfig, RecycleDrafter),
                "datastore": (DatastoreConfig, DatastoreDrafter),
                "lm": (LmConfig, LmDrafter),
                "head": (HeadConfig, HeadDrafter),
            },
        ),
        Role(
            "builder",
            TreeBuilder,
            {
                "layered": (LayeredConfig, LayeredBuilder),
                "best_first": (BestFirstConfig, BestFirstBuilder),
                "chain": (ChainConfig, ChainBuilder),
                "static": (StaticConfig, StaticBuilder),
            },
        ),
        Role(
            "graft",
            GraftPolicy,
            {
                "treegraft": (TreegraftConfig, TreegraftGraft),
                "union": (UnionConfig, UnionGraft),
                "replace": (ReplaceConfig, ReplaceGraft),
                "budget_swap": (BudgetSwapConfig, BudgetSwapGraft),
            },
        ),
        Role(
            "scheduler",
            Scheduler,
            {
                "never": (NeverConfig, NeverScheduler),
                "always": (AlwaysConfig, AlwaysScheduler),
                "fixed": (FixedConfig, FixedScheduler),
                "priority": (PriorityConfig, PriorityScheduler),
                "cost_aware": (CostAwareConfig, CostAwareScheduler),
                "online": (OnlineConfig, OnlineScheduler),
                "budgeted": (BudgetedConfig, BudgetedScheduler),
                "value": (ValueConfig, ValueScheduler),
            },
        ),
        Role(
            "verifier",
            Verifier,
            {
                "walk": (WalkConfig, WalkVerifier),
                "ledger": (LedgerConfig, LedgerVerifier),
                "traversal": (TraversalConfig, TraversalVerifier),
            },
        ),
    )
}


def component_class(role: str, config: BaseModel) -> type:
    """The class that a config names; one's own is imported and checked against its role."""
    if not isinstance(config, CustomConfig):
        return ROLES[role].builtin[config.kind][1]  # type: ignore[attr-defined]
    base = ROLES[role].base
    module_name, _, class_name = config.kind.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in class_name.split("."):
            found = getattr(found, part)
    except Exception as error:  # the module is someone else's: it may raise anything
        raise ConfigError(
            f"{role}.kind {config.kind!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{role}.kind {config.kind!r} must be a subclass of treegraft.{base.__name__}"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))  # type: ignore[attr-defined]
        raise ConfigError(f"{role}.kind {config.kind!r} does not define: {missing}")
    try:
        inspect.signature(found).bind(**config.params)
    except TypeError as error:
        raise ConfigError(f"{role}.params of {config.kind!r}: {error}") from None
    return found


def build_component(role: str, config: BaseModel, *extra: Any) -> Any:
    """Instantiate what ``config`` names.

    A built-in takes its config and ``extra``; one's own class takes its ``params`` as keywords.
    """
    found = component_class(role, config)
    if not isinstance(config, CustomConfig):
        return found(config, *extra)
    try:
        made = found(**config.params)
    except TreegraftError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{role}.kind {config.kind!r} cannot be built from params {config.params}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if role == "builder":
        # Data of the role, which an ABC cannot ask for.
        for name in ("depth", "width", "budget"):
            value = getattr(made, name, None)
            # type and not isinstance: True is an int.
            if type(value) is not int or value < 0:
                raise ConfigError(
                    f"{role}.kind {config.kind!r} must set {name} to an integer from 0, "
                    f"found {value!r}"
                )
    return made
