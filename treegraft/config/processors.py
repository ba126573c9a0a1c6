"""transformers' own logits processors as options of ``sampling.processors``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from treegraft.config.strict import Strict

TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1)]


class GreenlistConfig(Strict):
    """transformers' WatermarkingConfig: a pseudorandom part of the vocabulary gets a bonus."""

    greenlist_ratio: float = Field(0.25, gt=0.0, lt=1.0, description="Share of the vocabulary.")
    bias: float = Field(2.0, description="Added to the logits of these tokens.")
    hashing_key: int = Field(15485863, ge=0, description="Key of the hash; keep it private.")
    seeding_scheme: Literal["lefthash", "selfhash"] = Field(
        "lefthash", description="selfhash also looks at the token to come."
    )
    context_width: int = Field(1, ge=1, description="Tokens before that seed the choice.")


class SynthIdConfig(Strict):
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


class ProcessorsConfig(Strict):
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
