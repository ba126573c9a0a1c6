"""The processors that are built, against those that transformers' ``generate`` builds itself."""

from __future__ import annotations

import inspect
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process

from treegraft.backends import processors
from treegraft.backends.processors import Text, build_processors
from treegraft.config import ProcessorsConfig
from treegraft.core.errors import ProcessorError
from treegraft.core.processors import Place, Processors
from treegraft.core.sampling import History, Sampling, process

V = 40
PROMPT = [3, 9, 3, 9, 4, 11, 3]
EOS = [5, 6]
N_NEW = 12

# One value of each setting that does something.
SETTINGS: dict[str, Any] = {
    "sequence_bias": [[[3], 2.0], [[9, 4], -3.0]],
    "encoder_repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[7], [3, 9], [5]],
    "min_length": 10,
    "forced_bos_token_id": 8,
    "forced_eos_token_id": [5],
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.2),
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [3, 4],
    "top_h": 0.7,
    "typical_p": 0.8,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.02,
    "watermarking_config": {"bias": 1.5, "greenlist_ratio": 0.3},
    "renormalize_logits": True,
}
OWN: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "min_new_tokens": 4,
    "temperature": 0.6,
    "top_k": 15,
    "top_p": 0.9,
    "min_p": 0.02,
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )


def text_of(prompt: list[int], **own: Any) -> Text:
    return Text(
        prompt=prompt,
        max_new_tokens=N_NEW,
        eos=EOS,
        vocab_size=V,
        device=torch.device("cpu"),
        repetition_penalty=own.get("repetition_penalty", 1.0),
        min_new_tokens=own.get("min_new_tokens", 0),
    )


def theirs(model: LlamaForCausalLM, settings: dict[str, Any], prompt: list[int]) -> Any:
    """What ``generate`` would call for this prompt."""
    settings = dict(settings)
    mark = settings.pop("watermarking_config", None)
    if mark is not None:
        kind = SynthIDTextWatermarkingConfig if "keys" in mark else WatermarkingConfig
        settings["watermarking_config"] = kind(**mark)
    if settings.get("temperature") == 0.0:
        settings["temperature"] = 1.0
    else:
        settings = {"do_sample": True, "top_k": 0, **settings}
    config = GenerationConfig(**settings, max_length=len(prompt) + N_NEW)
    config._eos_token_tensor = torch.tensor(EOS)
    ids = torch.tensor([prompt])
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=ids,
        device="cpu",
        model_kwargs={"attention_mask": torch.ones_like(ids)},
    )


def ours(settings: dict[str, Any], own: dict[str, Any], prompt: list[int]) -> Sampling:
    entries = build_processors(
        ProcessorsConfig(**settings).settings, None, None, text_of(prompt, **own)
    )
    return Sampling(**own, eos=tuple(EOS), processors=Processors(entries) if entries else None)


def check(
    model: LlamaForCausalLM, settings: dict[str, Any], own: dict[str, Any], seed: int
) -> bool:
    """Compare one row after each of some texts; True if the settings changed one."""
    generator = torch.Generator().manual_seed(seed)
    changed = False
    for prompt in (PROMPT, PROMPT[:1]):
        for n_path in (0, 1, 3, 5, 8, N_NEW - 1):
            new = torch.randint(0, V, (n_path,), generator=generator).tolist()
            new = [*new[:-1], 9] if new else new
            raw = torch.randn(V, generator=generator) * 3
            before = raw.clone()
            # A part of what is new is committed, the rest a path of the tree.
            history = History([*prompt, *new[: n_path // 2]], len(prompt))
            sampling = ours(settings, own, prompt)
            rest = new[n_path // 2 :]
            try:
                expected = theirs(model, settings | own, prompt)(
                    torch.tensor([prompt + new]), raw[None].clone()
                )[0].softmax(-1)
            except ValueError:  # of torch's Categorical, over NaN
                expected = raw * torch.nan
            if bool(expected.isnan().any()):
                # Settings that make an infinite logit together: generate cannot draw either.
                with pytest.raises(ProcessorError):
                    process(raw, sampling, history, rest)
                continue
            found = process(raw, sampling, history, rest)
            assert torch.equal(raw, before)
            kept = found.softmax(-1)
            torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-6)
            changed |= not torch.allclose(kept, process(raw, Sampling(**own), history).softmax(-1))
    return changed


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_alone_is_that_of_generate(model: LlamaForCausalLM, name: str) -> None:
    changed = check(model, {name: SETTINGS[name]}, {"temperature": 1.0}, seed=1)
    assert changed or name in ("remove_invalid_values", "renormalize_logits")
    check(model, {name: SETTINGS[name]}, {"temperature": 0.0}, seed=2)


@pytest.mark.parametrize("seed", range(12))
def test_any_settings_together_stand_in_the_order_of_generate(
    model: LlamaForCausalLM, seed: int
) -> None:
    dice = random.Random(seed)
    settings = {name: value for name, value in SETTINGS.items() if dice.random() < 0.5}
    if dice.random() < 0.3:
        settings["watermarking_config"] = {"ngram_len": 3, "keys": [654, 400, 836]}
    own = {name: value for name, value in OWN.items() if dice.random() < 0.5}
    check(model, settings, {"temperature": 1.0} | own, seed)


def test_all_settings_at_once_stand_in_the_order_of_generate(model: LlamaForCausalLM) -> None:
    def kinds(entries: Any) -> list[str]:
        return [type(entry).__name__ for entry in entries]

    settings = SETTINGS | {"forced_eos_token_id": 5}
    entries = build_processors(ProcessorsConfig(**settings).settings, None, None, text_of(PROMPT))
    # Ours stand by place first, which is where generate has our own settings.
    made = [entry.call for place in Place for entry in entries if entry.place is place]
    expected = kinds(theirs(model, SETTINGS | OWN, PROMPT))
    own = {
        "RepetitionPenaltyLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    }
    assert kinds(made) == [kind for kind in expected if kind not in own]
    assert own < set(expected)


def test_no_setting_of_generate_is_forgotten() -> None:
    """Each that its source reads has a place here, is our own, or is refused by name."""
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    read = set(re.findall(r"generation_config\.([a-z]\w*)", source))
    elsewhere = {
        "do_sample",  # temperature > 0
        "num_beams", "num_return_sequences", "max_length",
        "use_cache",  # of the model that guidance runs
    }  # fmt: skip
    assert read - elsewhere == set(ProcessorsConfig.model_fields) | set(OWN)


def test_every_class_of_transformers_is_judged() -> None:
    """One that is new there is taken to keep state until somebody has read it."""
    kinds = {
        name
        for name, kind in inspect.getmembers(logits_process, inspect.isclass)
        if issubclass(kind, LogitsProcessor)
        and kind is not LogitsProcessor
        and kind.__module__ == logits_process.__name__
    }
    keeps_state = {
        "PrefixConstrainedLogitsProcessor",  # as its function does
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    }
    assert kinds == processors._STATELESS | set(processors._REFUSED) | keeps_state


@pytest.mark.parametrize("name", SETTINGS)
def test_those_that_are_said_to_keep_no_state_answer_alike_in_any_order(name: str) -> None:
    def made() -> Any:
        settings = ProcessorsConfig(**{name: SETTINGS[name]}).settings
        (entry,) = build_processors(settings, None, None, text_of(PROMPT))
        assert entry.stateless
        return entry.call

    generator = torch.Generator().manual_seed(3)
    cases: list[tuple[Tensor, Tensor]] = []
    for n in (0, 4, 2, 11, 1, 4, 7):
        path = torch.randint(0, V, (n,), generator=generator)
        ids = torch.cat([torch.tensor(PROMPT), path])[None]
        cases.append((ids, torch.randn(1, V, generator=generator)))
    used = made()
    for ids, scores in (*cases, *reversed(cases)):
        assert torch.equal(used(ids, scores.clone()), made()(ids, scores.clone()))
