"""The profile of a step: what is counted, what a bare forward is, and what is left behind."""

from __future__ import annotations

import pytest
import torch
from table_models import hashed_model
from transformers import LlamaConfig, LlamaForCausalLM

from treegraft import PromptError, parse_config
from treegraft.backends.hf import HFLanguageModel
from treegraft.bench.bare import BareForwards, Forward, ForwardLog
from treegraft.bench.profile import profile_texts
from treegraft.pipeline import build_pipeline

CONFIG = parse_config(
    {
        "target": {"model": "big"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "little"}],
        "builder": {"kind": "layered", "depth": 3, "width": 2, "budget": 6},
        "scheduler": {"kind": "fixed", "calls": ["little", "ngram", "little"]},
        "stop": {"max_new_tokens": 12},
    }
)
PROMPTS = [(1, 2, 3, 1, 2), (4,)]


@pytest.fixture
def models():
    return {"big": hashed_model(5, seed=1), "little": hashed_model(5, seed=2)}


def tiny_llama():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, **shape)).eval()


def test_stages_add_up_and_the_target_reads_once_a_step(models):
    profile = profile_texts(CONFIG, PROMPTS, models)
    figures = profile.as_dict()
    assert figures["texts"] == 2
    assert figures["new_tokens"] == 24
    assert sum(figures["stages"].values()) == pytest.approx(figures["seconds_per_step"])
    assert set(figures["forwards"]) == {"target", "little"}
    assert figures["forwards"]["target"]["per_step"] == 1.0
    assert figures["forwards"]["little"]["per_step"] > 0.0
    bare = sum(entry["bare_seconds_per_step"] for entry in figures["forwards"].values())
    assert bare == pytest.approx(figures["bare_seconds_per_step"])
    share = figures["bare_seconds_per_step"] / figures["seconds_per_step"]
    assert figures["physical_limit_share"] == pytest.approx(share)


def test_every_forward_is_counted_and_prefill_apart(models):
    with ForwardLog({"target": models["big"], "little": models["little"]}) as log:
        expected = build_pipeline(CONFIG, models=models).generate(PROMPTS[0])
    noted = log.take()
    profile = profile_texts(CONFIG, PROMPTS[:1], models)
    counted = [forward for step in profile.steps for forward, _ in step.forwards]
    assert noted[0].n == len(PROMPTS[0]) - 1, "the first forward reads the prompt"
    assert counted == noted[1:]
    assert [step.record.n_tree for step in profile.steps] == [s.n_tree for s in expected.steps]
    assert profile.prefill_bare_seconds > 0.0


def test_forwards_of_a_compiled_drafter_are_counted_as_those_of_an_eager_one():
    """The log stood on the model as loaded, and saw nothing of what was compiled but its prompt."""
    models = {"big": HFLanguageModel(tiny_llama()), "little": HFLanguageModel(tiny_llama())}
    plain = profile_texts(CONFIG, PROMPTS, models).as_dict()
    backend = CONFIG.backend.model_copy(update={"compile": "on", "compiler": "eager"})
    found = profile_texts(CONFIG.model_copy(update={"backend": backend}), PROMPTS, models).as_dict()
    for name in ("target", "little"):
        for figure in ("per_step", "tokens_per_forward"):
            assert found["forwards"][name][figure] == plain["forwards"][name][figure]
        assert found["forwards"][name]["bare_seconds_per_step"] > 0.0


def test_a_prompt_of_one_token_has_no_prefill(models):
    profile = profile_texts(CONFIG, PROMPTS[1:], models)
    assert profile.prefill_bare_seconds == 0.0
    assert profile.steps[0].forwards[-1][0].model == "target"


def test_plain_decoding_asks_for_the_target_alone(models):
    plain = parse_config({"target": {"model": "big"}, "stop": {"max_new_tokens": 5}})
    profile = profile_texts(plain, PROMPTS, models)
    assert profile.models == ("target",)
    assert all(len(step.forwards) == 1 for step in profile.steps)


def test_models_are_left_as_they_were(models):
    profile_texts(CONFIG, PROMPTS, models)
    assert all("forward" not in vars(model) for model in models.values())
    with pytest.raises(ZeroDivisionError), ForwardLog(models):
        _ = 1 / 0
    assert all("forward" not in vars(model) for model in models.values())


def test_bare_forwards_between_the_steps_change_no_token():
    models = {"big": HFLanguageModel(tiny_llama()), "little": HFLanguageModel(tiny_llama())}
    expected = build_pipeline(CONFIG, models=models).generate(PROMPTS[0])
    profile = profile_texts(CONFIG, PROMPTS[:1], models)
    assert [step.record.n_new for step in profile.steps] == [s.n_new for s in expected.steps]


def test_one_model_in_two_roles_is_noted_once():
    model = hashed_model(5, seed=1)
    with ForwardLog({"target": model, "little": model}) as log:
        one = torch.zeros(1, dtype=torch.int64)
        model.forward(model.new_cache(1), one, one, one, torch.ones(1, 1, dtype=torch.bool))
    assert log.take() == [Forward("target", 1, 1, False)]
    assert log.take() == []


def test_a_bare_forward_has_the_shapes_of_the_real_one_and_nothing_to_prepare():
    model = HFLanguageModel(tiny_llama())
    seen = []

    def note(module, args, kwargs):
        seen.append({k: tuple(v.shape) for k, v in kwargs.items() if torch.is_tensor(v)})

    handle = model.model.register_forward_pre_hook(note, with_kwargs=True)
    n, span = 4, 20
    rows = torch.arange(span - n, span)
    visible = torch.arange(span) <= rows[:, None]
    model.forward(model.new_cache(64), rows, rows, rows, visible)
    assert BareForwards({"m": model}).seconds(Forward("m", n, span, False)) > 0.0
    handle.remove()
    real, bare = seen
    assert bare == real


def test_a_profile_needs_a_prompt(models):
    with pytest.raises(PromptError, match="at least one prompt"):
        profile_texts(CONFIG, [], models)
