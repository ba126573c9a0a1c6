"""Every family of the matrix decodes losslessly, as target and as drafter of itself.

The oracle is the model alone: one full causal forward per token, without our cache or masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from backends.families import FAMILIES, VOCAB, build
from torch import Tensor
from transformers import PreTrainedModel

from treegraft.backends.hf import HFLanguageModel
from treegraft.backends.reference import plain_tokens
from treegraft.config import parse_config
from treegraft.core.sampling import Sampling
from treegraft.pipeline import build_pipeline

PROMPT = [5, 17, 3, 8, 17, 3, 8, 40, 5, 17, 3, 9]
N_NEW = 24


def alone(model: PreTrainedModel):
    """Logits after a text, by the model itself."""

    def logits(text: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return (
                model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0, -1].float()
            )

    return logits


def noisy(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The same weights with a little noise: a drafter that is right now and then."""
    drafter = build(name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(11)
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03 * parameter.std())
    return drafter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_family_decodes_what_the_model_alone_says(name: str, temperature: float) -> None:
    model = build(name)
    config = parse_config(
        {
            "target": {"model": "target"},
            "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "drafter"}],
            "builder": {"kind": "layered", "depth": 4, "width": 3, "budget": 14},
            "scheduler": {"kind": "fixed", "calls": ["drafter", "ngram", "drafter", "ngram"]},
            "sampling": {"temperature": temperature, "seed": 5},
            "stop": {"max_new_tokens": N_NEW, "eos": []},
        }
    )
    models = {
        "target": HFLanguageModel(model, name=name),
        "drafter": HFLanguageModel(noisy(model, name), name="drafter", self_test=False),
    }
    pipeline = build_pipeline(config, models=models)
    result = pipeline.generate(PROMPT)
    sampling = Sampling(temperature=temperature, seed=5)
    assert result.tokens == plain_tokens(alone(model), PROMPT, N_NEW, sampling)
    assert models["target"].vocab_size == VOCAB
    assert result.statistics.accepted[1] > 0, "a near-copy of the target must be accepted at times"


def test_any_family_drafts_for_any_other() -> None:
    target = build("llama")
    config = parse_config(
        {
            "target": {"model": "target"},
            "drafters": [{"kind": "lm", "model": name} for name in sorted(FAMILIES)],
            "builder": {"kind": "layered", "depth": len(FAMILIES), "width": 2, "budget": 30},
            "scheduler": {"kind": "fixed", "calls": sorted(FAMILIES)},
            "stop": {"max_new_tokens": N_NEW, "eos": []},
        }
    )
    models = {name: HFLanguageModel(build(name, seed=3), self_test=False) for name in FAMILIES}
    pipeline = build_pipeline(config, models={"target": HFLanguageModel(target), **models})
    expected = plain_tokens(alone(target), PROMPT, N_NEW, Sampling())
    assert pipeline.generate(PROMPT).tokens == expected
