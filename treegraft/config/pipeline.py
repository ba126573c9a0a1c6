"""The configuration of a pipeline: one union of kinds per role, checked before anything loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from treegraft.config.faults import one_line
from treegraft.config.processors import ProcessorsConfig
from treegraft.config.reckoning import check_costs, check_reckoning
from treegraft.config.strict import Strict
from treegraft.core.errors import ConfigError
from treegraft.policies.builders import (
    BestFirstConfig,
    ChainConfig,
    LayeredConfig,
    StaticConfig,
)
from treegraft.policies.calibration import CalibrationConfig
from treegraft.policies.drafters.datastore import DatastoreConfig
from treegraft.policies.drafters.head import HeadConfig
from treegraft.policies.drafters.lm import LmConfig, ModelDrafterConfig
from treegraft.policies.drafters.ngram import NgramConfig
from treegraft.policies.drafters.recycle import RecycleConfig
from treegraft.policies.drafters.suffix import SuffixConfig
from treegraft.policies.grafts import (
    BudgetSwapConfig,
    ReplaceConfig,
    TreegraftConfig,
    UnionConfig,
)
from treegraft.policies.online import OnlineConfig
from treegraft.policies.schedulers import (
    AlwaysConfig,
    BudgetedConfig,
    CostAwareConfig,
    FixedConfig,
    NeverConfig,
    PriorityConfig,
)
from treegraft.policies.value import ValueConfig
from treegraft.policies.verifiers import LedgerConfig, TraversalConfig, WalkConfig


class CustomConfig(Strict):
    """One's own class, by import path; it is checked against its role before anything loads."""

    kind: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", description="package.module:Class"
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the class."
    )


class CustomDrafterConfig(CustomConfig):
    """One's own drafter, by import path."""

    name: str | None = Field(
        None, min_length=1, description="Name in statistics and schedules; default: class."
    )


def _tag(value: Any) -> str | None:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return "package.module:Class" if isinstance(kind, str) and ":" in kind else kind


DrafterConfig = Annotated[
    Annotated[NgramConfig, Tag("ngram")]
    | Annotated[SuffixConfig, Tag("suffix")]
    | Annotated[RecycleConfig, Tag("recycle")]
    | Annotated[DatastoreConfig, Tag("datastore")]
    | Annotated[LmConfig, Tag("lm")]
    | Annotated[HeadConfig, Tag("head")]
    | Annotated[CustomDrafterConfig, Tag("package.module:Class")],
    Discriminator(_tag),
]
BuilderConfig = Annotated[
    Annotated[LayeredConfig, Tag("layered")]
    | Annotated[BestFirstConfig, Tag("best_first")]
    | Annotated[ChainConfig, Tag("chain")]
    | Annotated[StaticConfig, Tag("static")]
    | Annotated[CustomConfig, Tag("package.module:Class")],
    Discriminator(_tag),
]
GraftConfig = Annotated[
    Annotated[TreegraftConfig, Tag("treegraft")]
    | Annotated[UnionConfig, Tag("union")]
    | Annotated[ReplaceConfig, Tag("replace")]
    | Annotated[BudgetSwapConfig, Tag("budget_swap")]
    | Annotated[CustomConfig, Tag("package.module:Class")],
    Discriminator(_tag),
]
SchedulerConfig = Annotated[
    Annotated[NeverConfig, Tag("never")]
    | Annotated[AlwaysConfig, Tag("always")]
    | Annotated[FixedConfig, Tag("fixed")]
    | Annotated[PriorityConfig, Tag("priority")]
    | Annotated[CostAwareConfig, Tag("cost_aware")]
    | Annotated[OnlineConfig, Tag("online")]
    | Annotated[BudgetedConfig, Tag("budgeted")]
    | Annotated[ValueConfig, Tag("value")]
    | Annotated[CustomConfig, Tag("package.module:Class")],
    Discriminator(_tag),
]
VerifierConfig = Annotated[
    Annotated[WalkConfig, Tag("walk")]
    | Annotated[LedgerConfig, Tag("ledger")]
    | Annotated[TraversalConfig, Tag("traversal")]
    | Annotated[CustomConfig, Tag("package.module:Class")],
    Discriminator(_tag),
]


_TAGS = {
    marker.tag
    for union in (DrafterConfig, BuilderConfig, GraftConfig, SchedulerConfig, VerifierConfig)
    for member in get_args(get_args(union)[0])
    for marker in get_args(member)
    if isinstance(marker, Tag)
} | {"greenlist", "synthid", "number", "auto"}


class TargetConfig(Strict):
    """The model whose text is produced."""

    model: str = Field(min_length=1, description="zoo:NAME, a local path, or a hub id.")


class SamplingConfig(Strict):
    """How a token is taken from the target; the same seed gives the same text, drafted or not."""

    temperature: float = Field(
        0.0, ge=0.0, le=100.0, description="0 is greedy; a larger value flattens."
    )
    top_k: int | None = Field(None, ge=1, description="Keep the k likeliest tokens.")
    top_p: float | None = Field(
        None, gt=0.0, le=1.0, description="Keep the smallest set of tokens with this mass."
    )
    min_p: float | None = Field(
        None, ge=0.0, le=1.0, description="Drop tokens below this share of the likeliest one."
    )
    repetition_penalty: float = Field(
        1.0, gt=0.0, le=100.0, description="Above 1, tokens already in the text become less likely."
    )
    seed: int = Field(0, ge=0, lt=2**64, description="Key of the noise; used if temperature > 0.")
    processors: ProcessorsConfig | None = Field(
        None, description="transformers' own logits processors; see sampling.processors."
    )


class StopConfig(Strict):
    """When a text ends."""

    max_new_tokens: int = Field(128, ge=1, description="Most tokens to produce.")
    min_new_tokens: int = Field(0, ge=0, description="No end token before so many tokens.")
    eos: tuple[int, ...] | None = Field(
        None, description="Ids that end the text; null takes the model's own, [] takes none."
    )
    strings: tuple[str, ...] = Field(
        (), description="Strings that end the text with the token that completes one."
    )

    @model_validator(mode="after")
    def _check(self) -> StopConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens}), found "
                f"{self.min_new_tokens}"
            )
        if self.eos is not None and any(token < 0 for token in self.eos):
            raise ValueError(f"eos must hold token ids from 0, found {min(self.eos)}")
        if "" in self.strings:
            raise ValueError("strings must not hold an empty string, which would stop at once")
        broken = [text for text in self.strings if not _is_unicode(text)]
        if broken:
            raise ValueError(f"strings must be text in UTF-8, found {broken[0]!a}")
        return self


class BackendConfig(Strict):
    """What carries out tree operations and forwards."""

    kind: Literal["tensor", "reference"] = Field(
        "tensor", description="reference is the slow networkx specification; same results."
    )
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = Field(
        "float32", description="Weights and KV of all models; auto keeps the checkpoint's."
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?|mps)$", description="cpu, cuda, cuda:N.")
    attention: Literal["auto", "sdpa", "eager"] = Field(
        "auto", description="Attention implementation of transformers; auto prefers sdpa."
    )
    compile: Literal["off", "on", "auto"] = Field(
        "off",
        description="Compile the forwards of target and drafters when the pipeline is built: off, "
        "on, or auto, which measures and keeps what is faster.",
    )
    compiler: Literal["aot", "inductor", "aot_eager", "eager"] | None = Field(
        None,
        description="aot is torch.export and Inductor ahead of time, the others are backends of "
        "torch.compile. aot and inductor need a C++ compiler and make the fastest programs, the "
        "others only take Python out of the forward. null: aot on a CPU, inductor on a GPU.",
    )
    buckets: bool | None = Field(
        None,
        description="Whether compiled forwards are padded to fixed shapes, each of which becomes a "
        "CUDA graph; null: on a GPU, as a CPU pays for padding.",
    )
    panels: bool = Field(
        False,
        description="Whether forwards that aot compiles for a CPU read float32 weights from a "
        "second copy, laid out for up to 8 nodes: twice the memory, up to three times as fast.",
    )

    @field_validator("compile", mode="before")
    @classmethod
    def _yaml_switch(cls, value: Any) -> Any:
        # YAML 1.1 reads off and on without quotes as false and true.
        return {False: "off", True: "on"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_panels(self) -> BackendConfig:
        if not self.panels:
            return self
        for name, found, allowed in (
            ("compile", self.compile, ("on", "auto")),
            ("compiler", self.compiler, (None, "aot")),
            ("device", self.device, ("cpu",)),
            ("dtype", self.dtype, ("float32", "auto")),
            ("buckets", self.buckets or False, (False,)),
        ):
            if found not in allowed:
                raise ValueError(
                    f"backend.panels needs backend.{name} {' or '.join(map(str, allowed))}, found "
                    f"{found}"
                )
        return self


class PipelineConfig(Strict):
    """Everything that decides how a pipeline decodes."""

    target: TargetConfig
    drafters: tuple[DrafterConfig, ...] = Field(
        (),
        # A working tree notes who has expanded a node in the bits of an int64.
        max_length=63,
        description="Cheapest first; an empty list is plain decoding.",
    )
    builder: BuilderConfig = LayeredConfig()
    graft: GraftConfig = TreegraftConfig()
    scheduler: SchedulerConfig = NeverConfig()
    verifier: VerifierConfig = WalkConfig()
    ride_along: tuple[str, ...] = Field(
        (),
        description="Names of look-up drafters that act in every layer, right before its drafter "
        "when that one scores; with graft.reach any their paths compete for its positions.",
    )
    leftover: bool = Field(
        False,
        description="Whether nodes below the bonus token, if it was drafted and pruned, start "
        "the next tree with their scores. What was drawn at random leaves nothing.",
    )
    fallback: Literal["off", "auto"] = Field(
        "off",
        description="auto times plain steps now and then and decodes plainly where drafting does "
        "not pay. It needs a verifier whose tokens do not depend on the draft.",
    )
    calibration: CalibrationConfig = CalibrationConfig()
    sampling: SamplingConfig = SamplingConfig()
    stop: StopConfig = StopConfig()
    backend: BackendConfig = BackendConfig()

    @field_validator("fallback", mode="before")
    @classmethod
    def _yaml_switch(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML 1.1 reads off without quotes as false

    @model_validator(mode="wrap")
    @classmethod
    def _check_numbers(
        cls, data: Any, handler: ModelWrapValidatorHandler[PipelineConfig]
    ) -> PipelineConfig:
        config = handler(data)
        # pydantic takes yes and true for 1.
        for where, value in _switches_as_numbers(data, config):
            raise ValueError(f"{where} must be a number, found {value}")
        return config

    @model_validator(mode="after")
    def _check(self) -> PipelineConfig:
        names = self.drafter_names
        nameless = [i for i, name in enumerate(names) if not name.strip()]
        if nameless:
            raise ValueError(f"drafters.{nameless[0]} has an empty name; set name")
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(
                f"drafters must have different names, found {twice[0]!r} twice; set name"
            )
        n_calls = len(self.fixed_calls)
        if not isinstance(self.builder, CustomConfig) and n_calls > self.builder.depth:
            raise ValueError(
                f"scheduler.calls must have at most builder.depth = {self.builder.depth} layers, "
                f"found {n_calls}"
            )
        self._check_riders()
        self._check_static()
        if self.drafters:
            check_reckoning(self.scheduler, self.builder, self.calibration)
        check_costs(self.scheduler, names)
        if self.fallback == "auto" and not self.same_tokens:
            raise ValueError(
                "fallback 'auto' needs a verifier whose tokens do not depend on the draft, or they "
                "would depend on the clock: set verifier.kind to walk, found "
                f"{self.verifier.kind!r}"
            )
        return self

    def _check_riders(self) -> None:
        names = self.drafter_names
        for name in self.ride_along:
            if name not in names:
                raise ValueError(f"ride_along names drafter {name!r}, found drafters {list(names)}")
            if isinstance(self.drafters[names.index(name)], ModelDrafterConfig):
                raise ValueError(
                    f"ride_along takes drafters that do not score, found {name!r}, which is a model"
                )
            if self.ride_along.count(name) > 1:
                raise ValueError(f"ride_along must hold each name once, found {name!r} twice")
        if self.ride_along and isinstance(self.graft, ReplaceConfig):
            raise ValueError(
                "ride_along needs a graft that keeps what look-ups drafted, found graft.kind "
                "'replace'"
            )

    def _check_static(self) -> None:
        """A static tree is expanded along its paths; a graft that goes elsewhere is refused."""
        graft = self.graft
        if not isinstance(self.builder, StaticConfig) or isinstance(graft, CustomConfig):
            return
        if isinstance(graft, TreegraftConfig) and graft.reselect:
            raise ValueError(
                "builder.kind 'static' needs a graft that expands the frontier: set graft.reselect "
                "to false or graft.kind to union, found reselect true"
            )
        if isinstance(graft, ReplaceConfig | BudgetSwapConfig):
            raise ValueError(
                "builder.kind 'static' needs a graft that expands the frontier: graft.kind "
                f"treegraft without reselect or union, found {graft.kind!r}"
            )

    @property
    def same_tokens(self) -> bool:
        """Whether the text is plain decoding's token by token; else it only has the same law.

        ``walk`` takes the target's own token everywhere. The other verifiers toss coins where a
        drafter drew (``ledger``) or anyway (``traversal``), unless nothing is random. One's own
        drafter counts as one that draws, one's own verifier as a walk.
        """
        kind = self.verifier.kind
        if self.sampling.temperature == 0.0 or kind not in {"ledger", "traversal"}:
            return True
        draws = any(
            drafter.children != "topk"
            if isinstance(drafter, ModelDrafterConfig)
            else isinstance(drafter, CustomConfig)
            for drafter in self.drafters
        )
        return kind == "ledger" and not draws

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """How each drafter is called in statistics and schedules."""
        return tuple(_name(drafter) for drafter in self.drafters)

    @property
    def fixed_calls(self) -> tuple[int, ...]:
        """The drafter numbers of a ``fixed`` scheduler; empty for other kinds."""
        if not isinstance(self.scheduler, FixedConfig):
            return ()
        names = self.drafter_names
        calls = []
        for call in self.scheduler.calls:
            known = call in names if isinstance(call, str) else 0 <= call < len(names)
            if not known:
                raise ValueError(
                    f"scheduler.calls names drafter {call!r}, found drafters {list(names)}"
                )
            calls.append(names.index(call) if isinstance(call, str) else call)
        return tuple(calls)


def _switches_as_numbers(given: Any, made: Any, where: str = "") -> Iterator[tuple[str, bool]]:
    """Options that were given as true or false and read as a number, by their place."""
    if isinstance(given, bool) and not isinstance(made, bool) and isinstance(made, int | float):
        yield where, given
    elif isinstance(given, Mapping) and isinstance(made, BaseModel):
        for key in type(made).model_fields:
            if key in given:
                inner = f"{where}.{key}" if where else key
                yield from _switches_as_numbers(given[key], getattr(made, key), inner)
    elif isinstance(given, list | tuple) and isinstance(made, tuple):
        for i, (item, entry) in enumerate(zip(given, made, strict=True)):
            yield from _switches_as_numbers(item, entry, f"{where}.{i}")


def _is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which no UTF-8 can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _name(drafter: DrafterConfig) -> str:
    if drafter.name is not None:
        return drafter.name
    if isinstance(drafter, ModelDrafterConfig):
        model, _, layers = drafter.model.partition("[:")
        name = model.replace(":", "/").rstrip("/").split("/")[-1]
        return f"{name}-{layers.rstrip(']')}" if layers else name
    return drafter.kind.split(":")[-1]


def parse_config(data: Any) -> PipelineConfig:
    """Check plain data (as from YAML) and return the config; ConfigError in one line otherwise."""
    if not isinstance(data, dict):
        raise ConfigError(f"a config must be a mapping of options, found {type(data).__name__}")
    try:
        return PipelineConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(one_line(error, data, _TAGS)) from None


def override(config: PipelineConfig, options: Mapping[str, Any]) -> PipelineConfig:
    """The config with single options of ``sampling`` and ``stop`` replaced, checked again.

    Options of ``sampling.processors`` are named without it, as in transformers' ``generate``.
    """
    data = config.model_dump()
    rooms = [data["sampling"], data["stop"]]
    processors = {}
    for option, value in options.items():
        if option in ProcessorsConfig.model_fields:
            processors[option] = value
            continue
        room = next((room for room in rooms if option in room), None)
        if room is None:
            known = ", ".join([*data["sampling"], *data["stop"]])
            raise ConfigError(
                f"unknown option {option!r}; known: {known}, and those of sampling.processors"
            )
        room[option] = value
    if processors:
        data["sampling"]["processors"] = (data["sampling"]["processors"] or {}) | processors
    return parse_config(data)
