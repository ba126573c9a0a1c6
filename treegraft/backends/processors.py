"""transformers' own logits processors, made for one text in the order of its ``generate``.

Nothing is computed here: settings become transformers' processors, the user's list joins them, and
what cannot be exact on a draft tree is refused by name before any forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PrefixConstrainedLogitsProcessor

from treegraft.backends.sources import one_line
from treegraft.core.errors import ConfigError
from treegraft.core.processors import Place, Processor

__all__ = ["Text", "build_processors"]


@dataclass(frozen=True, slots=True)
class Text:
    """What ``generate`` tells its processors about a text.

    Attributes
    ----------
    prompt : its ids. max_new_tokens : most that follow. eos : ids that end it.
    vocab_size : width of the logits. device : where they are.
    repetition_penalty, min_new_tokens : treegraft's own settings that have a processor in
        transformers.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    eos: Sequence[int]
    vocab_size: int
    device: torch.device
    repetition_penalty: float
    min_new_tokens: int

    @property
    def prompt_ids(self) -> Tensor:
        """int64 [1, n]."""
        return torch.tensor([list(self.prompt)], device=self.device)

    @property
    def eos_ids(self) -> Tensor:
        """int64 [number of ids]."""
        return torch.tensor(list(self.eos), device=self.device)

    @property
    def begin(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)


def _exponential_decay(value: Sequence[float], text: Text) -> Any:
    if not text.eos:
        raise ValueError("an end token is needed, which the model and stop.eos do not have")
    return transformers.ExponentialDecayLengthPenalty(tuple(value), text.eos_ids, text.begin)


def _watermark(value: Mapping[str, Any], text: Text) -> Any:
    if "ngram_len" in value:
        config = transformers.SynthIDTextWatermarkingConfig(
            **{**value, "keys": list(value["keys"])}
        )
    else:
        config = transformers.WatermarkingConfig(**value)
    config.validate()
    return config.construct_processor(text.vocab_size, text.device)


# The settings of transformers' GenerationConfig that become processors, in the order of its
# generation/utils.py; where a place changes, one of treegraft's own settings stands between.
# A maker returns None where the value turns the setting off.
_MAKERS: dict[str, tuple[Place, Callable[[Any, Text], Any]]] = {
    "sequence_bias": (
        Place.BEFORE_PENALTY,
        # As a dict: in a list, older versions refuse id 0.
        lambda v, t: transformers.SequenceBiasLogitsProcessor({tuple(ids): b for ids, b in v}),
    ),
    "encoder_repetition_penalty": (
        Place.BEFORE_PENALTY,
        lambda v, t: (
            transformers.EncoderRepetitionPenaltyLogitsProcessor(v, t.prompt_ids)
            if v != 1.0
            else None
        ),
    ),
    "no_repeat_ngram_size": (
        Place.AFTER_PENALTY,
        lambda v, t: transformers.NoRepeatNGramLogitsProcessor(v) if v else None,
    ),
    "encoder_no_repeat_ngram_size": (
        Place.AFTER_PENALTY,
        lambda v, t: (
            transformers.EncoderNoRepeatNGramLogitsProcessor(v, t.prompt_ids) if v else None
        ),
    ),
    "bad_words_ids": (
        Place.AFTER_PENALTY,
        lambda v, t: transformers.NoBadWordsLogitsProcessor(
            [list(ids) for ids in v], t.eos_ids if t.eos else None
        ),
    ),
    "min_length": (
        Place.AFTER_PENALTY,
        lambda v, t: (
            transformers.MinLengthLogitsProcessor(v, t.eos_ids, device=str(t.device))
            if v and t.eos
            else None
        ),
    ),
    "prefix_allowed_tokens_fn": (
        Place.AFTER_MINIMUM,
        lambda v, t: PrefixConstrainedLogitsProcessor(v, 1),
    ),
    "forced_bos_token_id": (
        Place.AFTER_MINIMUM,
        lambda v, t: transformers.ForcedBOSTokenLogitsProcessor(v),
    ),
    "forced_eos_token_id": (
        Place.AFTER_MINIMUM,
        lambda v, t: transformers.ForcedEOSTokenLogitsProcessor(
            t.begin + t.max_new_tokens, list(v), device=str(t.device)
        ),
    ),
    "remove_invalid_values": (
        Place.AFTER_MINIMUM,
        lambda v, t: transformers.InfNanRemoveLogitsProcessor() if v else None,
    ),
    "exponential_decay_length_penalty": (Place.AFTER_MINIMUM, _exponential_decay),
    "suppress_tokens": (
        Place.AFTER_MINIMUM,
        lambda v, t: transformers.SuppressTokensLogitsProcessor(v, device=str(t.device)),
    ),
    "begin_suppress_tokens": (
        Place.AFTER_MINIMUM,
        lambda v, t: transformers.SuppressTokensAtBeginLogitsProcessor(
            v["ids"], t.begin + (t.begin == 1 and v["bos"]), device=str(t.device)
        ),
    ),
    "top_h": (Place.AFTER_TEMPERATURE, lambda v, t: transformers.TopHLogitsWarper(v)),
    "typical_p": (
        Place.AFTER_MIN_P,
        lambda v, t: transformers.TypicalLogitsWarper(v) if v < 1.0 else None,
    ),
    "epsilon_cutoff": (
        Place.AFTER_MIN_P,
        lambda v, t: transformers.EpsilonLogitsWarper(v) if v > 0.0 else None,
    ),
    "eta_cutoff": (
        Place.AFTER_MIN_P,
        lambda v, t: transformers.EtaLogitsWarper(v, device=str(t.device)) if v > 0.0 else None,
    ),
    "watermarking_config": (Place.LAST, _watermark),
    "renormalize_logits": (
        Place.LAST,
        lambda v, t: transformers.LogitNormalization() if v else None,
    ),
}

# Read in transformers' generation/logits_process.py: no attribute that a call changes decides a
# later one. SequenceBias keeps tables of its arguments, Watermark seeds its generator in each call.
_STATELESS = {
    "AlternatingCodebooksLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "WatermarkLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
}

_NEEDS_ROWS = "it needs several rows of logits per text, and a draft tree has one per node"
_REFUSED = {
    "ClassifierFreeGuidanceLogitsProcessor": _NEEDS_ROWS,
    "DiaClassifierFreeGuidanceLogitsProcessor": _NEEDS_ROWS,
    "DiaEOSChannelFilterLogitsProcessor": _NEEDS_ROWS,
    "DiaEOSDelayPatternLogitsProcessor": _NEEDS_ROWS,
    "WhisperNoSpeechDetection": "it reads the audio of an encoder, which no target here has",
}


def build_processors(
    settings: Mapping[str, Any],
    given: Sequence[Any] | None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]] | None,
    text: Text,
) -> tuple[Processor, ...]:
    """The processors of one text: those that ``settings`` ask for, then those that were ``given``.

    Parameters
    ----------
    settings : names and values of transformers' GenerationConfig that are set.
    given : the caller's own, such as a LogitsProcessorList.
    prefix_allowed_tokens_fn : as in ``generate``: allowed ids, from the batch's number (0) and the
        text so far, int64 [n].

    Raises
    ------
    ConfigError : a setting does not fit the vocabulary or the text, an entry cannot be called or
        cannot be exact, or two things ask for the same processor.
    """
    values = dict(settings)
    if prefix_allowed_tokens_fn is not None:
        if not callable(prefix_allowed_tokens_fn):
            raise ConfigError(
                "prefix_allowed_tokens_fn must be a function of a batch number and ids, found "
                f"{type(prefix_allowed_tokens_fn).__name__}"
            )
        values["prefix_allowed_tokens_fn"] = prefix_allowed_tokens_fn
    _check_ids(values, text.vocab_size)
    if "begin_suppress_tokens" in values:
        forced = "forced_bos_token_id" in values
        values["begin_suppress_tokens"] = {"ids": values["begin_suppress_tokens"], "bos": forced}
    own = [_taken(entry, i) for i, entry in enumerate(_entries(given))]
    made: list[Processor] = []
    for name, value in values.items():
        place, make = _MAKERS[name]
        shown = name if callable(value) else f"sampling.processors.{name}"
        try:
            processor = make(value, text)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{shown}: {one_line(error)}") from error
        if processor is not None:
            made.append(Processor(shown, processor, place, _is_stateless(processor)))
    _check_twice(own, made, text)
    order = list(_MAKERS)
    made.sort(key=lambda entry: order.index(entry.name.removeprefix("sampling.processors.")))
    # The caller's own come after all that is not for sampling alone; places keep the rest apart.
    return (*made, *own)


def _check_twice(own: Sequence[Processor], made: Sequence[Processor], text: Text) -> None:
    """ConfigError where ``generate`` would drop one of two, with no more than a warning."""
    settings = {
        type(entry.call).__name__: entry.name
        for entry in made
        if entry.place < Place.AFTER_TEMPERATURE
    }
    if text.repetition_penalty != 1.0:
        settings["RepetitionPenaltyLogitsProcessor"] = "sampling.repetition_penalty"
    if text.min_new_tokens and text.eos:
        settings["MinNewTokensLengthLogitsProcessor"] = "stop.min_new_tokens"
    for i, entry in enumerate(own):
        kind = type(entry.call).__name__
        if kind in settings and _is_transformers(entry.call):
            raise ConfigError(
                f"logits_processor.{i} is a {kind}, and {settings[kind]} asks for one too; "
                "keep one of them"
            )
        if any(entry.call is other.call for other in own[:i]):
            raise ConfigError(
                f"logits_processor.{i} is the same {entry.name} as one before it; keep it once"
            )


def _entries(given: Sequence[Any] | None) -> Sequence[Any]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise ConfigError(
            "logits_processor must be a list of processors, such as a LogitsProcessorList, found "
            f"{type(given).__name__}"
        )
    return given


def _taken(entry: Any, i: int) -> Processor:
    """One of the caller's own; ConfigError if it cannot be called as ``generate`` would call it."""
    name = getattr(entry, "__name__", None) or type(entry).__name__
    if isinstance(entry, type) or not callable(entry):
        found = f"the class {name}" if isinstance(entry, type) else type(entry).__name__
        raise ConfigError(
            f"logits_processor.{i} must be called with (input_ids, scores), found {found}"
        )
    if name in _REFUSED and _is_transformers(entry):
        raise ConfigError(f"logits_processor.{i} {name} cannot be used: {_REFUSED[name]}")
    try:
        inspect.signature(entry).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"logits_processor.{i} {name} must be called with (input_ids, scores): {error}"
        ) from None
    except ValueError:  # built in C, and without a signature
        pass
    return Processor(name, entry, Place.AFTER_MINIMUM, _is_stateless(entry))


def _is_transformers(entry: Any) -> bool:
    return bool(type(entry).__module__ == PrefixConstrainedLogitsProcessor.__module__)


def _is_stateless(entry: Any) -> bool:
    """Known from transformers' sources, or declared: nothing that is tried out could prove it."""
    if isinstance(entry, PrefixConstrainedLogitsProcessor):
        entry = entry._prefix_allowed_tokens_fn
    if getattr(entry, "stateless", False) is True:
        return True
    return type(entry).__name__ in _STATELESS and _is_transformers(entry)


def _check_ids(values: Mapping[str, Any], vocab_size: int) -> None:
    """ConfigError for the first id that the target does not have."""
    ids = {
        "sequence_bias": [i for sequence, _ in values.get("sequence_bias", ()) for i in sequence],
        "bad_words_ids": [i for sequence in values.get("bad_words_ids", ()) for i in sequence],
        "suppress_tokens": values.get("suppress_tokens", ()),
        "begin_suppress_tokens": values.get("begin_suppress_tokens", ()),
        "forced_eos_token_id": values.get("forced_eos_token_id", ()),
        "forced_bos_token_id": [
            values[name] for name in ("forced_bos_token_id",) if name in values
        ],
    }
    for name, found in ids.items():
        outside = [i for i in found if not 0 <= i < vocab_size]
        if outside:
            raise ConfigError(
                f"sampling.processors.{name}: ids must be in 0..{vocab_size - 1}, "
                f"found {outside[0]}"
            )
