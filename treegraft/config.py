"""The configuration of a pipeline: one union of kinds per role, checked before anything loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    model_validator,
)

from treegraft.core.errors import ConfigError
from treegraft.policies.builders import LayeredConfig
from treegraft.policies.calibration import CalibrationConfig
from treegraft.policies.drafters.datastore import DatastoreConfig
from treegraft.policies.drafters.lm import LmConfig
from treegraft.policies.drafters.ngram import NgramConfig
from treegraft.policies.grafts import TreegraftConfig
from treegraft.policies.schedulers import (
    AlwaysConfig,
    CostAwareConfig,
    FixedConfig,
    NeverConfig,
    PriorityConfig,
)
from treegraft.policies.verifiers import LedgerConfig, TraversalConfig, WalkConfig


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CustomConfig(_Strict):
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
    | Annotated[DatastoreConfig, Tag("datastore")]
    | Annotated[LmConfig, Tag("lm")]
    | Annotated[CustomDrafterConfig, Tag("package.module:Class")],
    Discriminator(_tag),
]
BuilderConfig = Annotated[
    Annotated[LayeredConfig, Tag("layered")] | Annotated[CustomConfig, Tag("package.module:Class")],
    Discriminator(_tag),
]
GraftConfig = Annotated[
    Annotated[TreegraftConfig, Tag("treegraft")]
    | Annotated[CustomConfig, Tag("package.module:Class")],
    Discriminator(_tag),
]
SchedulerConfig = Annotated[
    Annotated[NeverConfig, Tag("never")]
    | Annotated[AlwaysConfig, Tag("always")]
    | Annotated[FixedConfig, Tag("fixed")]
    | Annotated[PriorityConfig, Tag("priority")]
    | Annotated[CostAwareConfig, Tag("cost_aware")]
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
} | {"greenlist", "synthid"}


class TargetConfig(_Strict):
    """The model whose text is produced."""

    model: str = Field(min_length=1, description="zoo:NAME, a local path, or a hub id.")


TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1)]


class GreenlistConfig(_Strict):
    """transformers' WatermarkingConfig: a pseudorandom part of the vocabulary gets a bonus."""

    greenlist_ratio: float = Field(0.25, gt=0.0, lt=1.0, description="Share of the vocabulary.")
    bias: float = Field(2.0, description="Added to the logits of these tokens.")
    hashing_key: int = Field(15485863, ge=0, description="Key of the hash; keep it private.")
    seeding_scheme: Literal["lefthash", "selfhash"] = Field(
        "lefthash", description="selfhash also looks at the token to come."
    )
    context_width: int = Field(1, ge=1, description="Tokens before that seed the choice.")


class SynthIdConfig(_Strict):
    """transformers' SynthIDTextWatermarkingConfig: a tournament between draws."""

    ngram_len: int = Field(ge=2, description="Tokens hashed together.")
    keys: tuple[int, ...] = Field(min_length=1, description="One key per depth.")
    context_history_size: int = Field(1024, ge=1, description="Contexts remembered.")
    sampling_table_seed: int = Field(0, ge=0, description="Seed of the table of draws.")
    sampling_table_size: int = Field(2**16, ge=1, le=2**24, description="Size of that table.")
    skip_first_ngram_calls: bool = Field(False, description="Leave the first tokens alone.")
    debug_mode: bool = Field(False, description="Watermark uniform logits instead.")


def _watermark(value: Any) -> str:
    named = value if isinstance(value, Mapping) else getattr(value, "model_fields_set", ())
    return "synthid" if "ngram_len" in named or "keys" in named else "greenlist"


class ProcessorsConfig(_Strict):
    """transformers' own logits processors by their names in GenerationConfig; null is off."""

    sequence_bias: Annotated[tuple[tuple[TokenIds, float], ...], Field(min_length=1)] | None = (
        Field(None, description="Pairs of ids and what is added to the last one's logit.")
    )
    encoder_repetition_penalty: float | None = Field(
        None, gt=0.0, description="Above 1, tokens of the prompt become likelier."
    )
    no_repeat_ngram_size: int | None = Field(
        None, ge=0, description="No n-gram of this size occurs twice; 0 is off."
    )
    encoder_no_repeat_ngram_size: int | None = Field(
        None, ge=0, description="No n-gram of this size is taken from the prompt; 0 is off."
    )
    bad_words_ids: Annotated[tuple[TokenIds, ...], Field(min_length=1)] | None = Field(
        None, description="Sequences of ids that are not produced."
    )
    min_length: int | None = Field(
        None, ge=0, description="No end token before so many tokens, prompt included."
    )
    forced_bos_token_id: TokenId | None = Field(
        None, description="First new token after a prompt of one token."
    )
    forced_eos_token_id: TokenIds | None = Field(
        None, description="Id, or one of several, of the last token at max_new_tokens."
    )
    remove_invalid_values: bool | None = Field(
        None, description="Replace NaN by 0 and infinities by the largest numbers."
    )
    exponential_decay_length_penalty: tuple[Annotated[int, Field(ge=0)], float] | None = Field(
        None, description="After so many new tokens the end token gains by this factor."
    )
    suppress_tokens: TokenIds | None = Field(None, description="Ids that are not produced.")
    begin_suppress_tokens: TokenIds | None = Field(
        None, description="Ids that are not produced as the first new token."
    )
    top_h: float | None = Field(
        None, gt=0.0, le=1.0, description="Keep tokens up to this share of the entropy."
    )
    typical_p: float | None = Field(
        None, gt=0.0, le=1.0, description="Keep the most typical tokens with this mass."
    )
    epsilon_cutoff: float | None = Field(
        None, ge=0.0, lt=1.0, description="Drop tokens below this probability."
    )
    eta_cutoff: float | None = Field(
        None, ge=0.0, lt=1.0, description="The same, lower where the entropy is high."
    )
    watermarking_config: (
        Annotated[
            Annotated[GreenlistConfig, Tag("greenlist")] | Annotated[SynthIdConfig, Tag("synthid")],
            Discriminator(_watermark),
        ]
        | None
    ) = Field(None, description="Options of WatermarkingConfig or SynthIDTextWatermarkingConfig.")
    renormalize_logits: bool | None = Field(
        None, description="Logits become log probabilities at the end."
    )
    guidance_scale: float | None = Field(None, description="Refused, but for 1, which is off.")

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        """Forms that transformers takes as well: one id for several, a mapping of biases."""
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        if type(data.get("forced_eos_token_id")) is int:
            data["forced_eos_token_id"] = (data["forced_eos_token_id"],)
        if isinstance(data.get("sequence_bias"), Mapping):
            data["sequence_bias"] = tuple(data["sequence_bias"].items())
        return data

    @model_validator(mode="after")
    def _check(self) -> ProcessorsConfig:
        if self.guidance_scale not in (None, 1.0):
            raise ValueError(
                "guidance_scale needs a second forward of the target for every token, which a "
                "draft tree does not save; leave it out, or hand an "
                "UnbatchedClassifierFreeGuidanceLogitsProcessor to generate as logits_processor"
            )
        if any(bias != bias for _, bias in self.sequence_bias or ()):
            raise ValueError("sequence_bias must hold numbers, found nan")
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """Those that are set."""
        return self.model_dump(exclude_none=True, exclude={"guidance_scale"})


class SamplingConfig(_Strict):
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


class StopConfig(_Strict):
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


class BackendConfig(_Strict):
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


class PipelineConfig(_Strict):
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
    calibration: CalibrationConfig = CalibrationConfig()
    sampling: SamplingConfig = SamplingConfig()
    stop: StopConfig = StopConfig()
    backend: BackendConfig = BackendConfig()

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
        if isinstance(self.builder, LayeredConfig) and n_calls > self.builder.depth:
            raise ValueError(
                f"scheduler.calls must have at most builder.depth = {self.builder.depth} layers, "
                f"found {n_calls}"
            )
        return self

    @model_validator(mode="after")
    def _check_costs(self) -> PipelineConfig:
        scheduler = self.scheduler
        if not isinstance(scheduler, CostAwareConfig):
            return self
        if self.drafters and self.calibration.kind == "none":
            raise ValueError(
                "scheduler cost_aware reckons with chances of acceptance: set calibration.kind to "
                "'online', found 'none'"
            )
        for name in scheduler.costs:
            if name not in self.drafter_names:
                raise ValueError(
                    f"scheduler.costs names drafter {name!r}, found drafters "
                    f"{list(self.drafter_names)}"
                )
        if scheduler.node_cost and scheduler.target_cost is None:
            raise ValueError(
                f"scheduler.node_cost needs scheduler.target_cost, found {scheduler.node_cost} "
                "without"
            )
        return self

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
            if isinstance(drafter, LmConfig)
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
    if isinstance(drafter, LmConfig):
        return drafter.model.replace(":", "/").rstrip("/").split("/")[-1]
    return drafter.kind.split(":")[-1]


def parse_config(data: Any) -> PipelineConfig:
    """Check plain data (as from YAML) and return the config; ConfigError in one line otherwise."""
    if not isinstance(data, dict):
        raise ConfigError(f"a config must be a mapping of options, found {type(data).__name__}")
    try:
        return PipelineConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_one_line(error, data)) from None


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


class _YamlLoader(yaml.SafeLoader):
    """Refuses a mapping that gives a key twice, of which YAML would silently take the last."""

    # Where the file is read and not where mappings are made: there, merged keys (<<) may repeat.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in seen:
                    raise ConfigError(
                        f"{key.value!r} is given twice, in lines {seen[name]} and {line}; "
                        "keep one of them"
                    )
                seen[name] = line
        return node


def load_config(path: str | Path) -> PipelineConfig:
    """Read a YAML (or JSON) file; ConfigError names the file and the option."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config {str(path)!r} is not a text file in UTF-8") from None
    except ValueError as error:  # a path that no file can have
        raise ConfigError(f"config {str(path)!r} cannot be read: {error}") from None
    try:
        data = yaml.load(text, _YamlLoader)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"config {str(path)!r} is no valid YAML: {where}") from None
    except RecursionError:
        raise ConfigError(f"config {str(path)!r} is nested too deeply") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # PyYAML's own, for a date that is none, a number of too many digits, and the like.
        raise ConfigError(f"config {str(path)!r} is no valid YAML: {error}") from None
    try:
        return parse_config(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _written(location: Sequence[int | str], data: Any) -> Iterator[str]:
    """The keys of a location; tags of the unions stand there too, but no user wrote them."""
    for part in location:
        inside = isinstance(data, Mapping) and part in data
        if inside or part not in _TAGS:
            yield str(part)
            known = inside or (isinstance(data, list | tuple) and isinstance(part, int))
            data = data[part] if known else None


def _one_line(error: ValidationError, data: Any) -> str:
    """The first fault as ``option: what is wrong (found value)``, with a count of the others."""
    faults = error.errors(include_url=False)
    fault = faults[0]
    where = ".".join(_written(fault["loc"], data))
    message = fault["msg"].removeprefix("Value error, ")
    n_found = fault.get("ctx", {}).get("actual_length")
    if fault["type"] == "extra_forbidden":
        message = "unknown option"
    elif fault["type"] == "union_tag_invalid":
        context = fault.get("ctx", {})
        known, found = context.get("expected_tags"), context.get("tag")
        message = f"kind must be one of {known}, found {found!r}"
    elif fault["type"] == "union_tag_not_found":
        message = "a mapping with the key kind is needed"
    elif fault["type"] == "tuple_type":
        message = f"a list is needed, found {fault['input']!r}"
    elif fault["type"] == "too_short":
        message = f"{fault['ctx']['min_length']} or more entries are needed, found {n_found}"
    elif fault["type"] == "too_long":
        message = f"at most {fault['ctx']['max_length']} entries are allowed, found {n_found}"
    elif fault["type"] == "model_type":
        message = f"a mapping of options is needed, found {fault['input']!r}"
    elif fault["type"] not in ("value_error", "missing"):
        message = f"{message}, found {fault['input']!r}"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{where}: {message}{more}" if where else f"{message}{more}"
