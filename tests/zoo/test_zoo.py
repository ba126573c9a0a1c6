"""The shipped family: it loads offline, fits together, stays small, and comes with cards and
prompts.
"""

import json
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from treegraft.core.errors import ConfigError
from treegraft.zoo import zoo_kinds, zoo_names, zoo_path, zoo_prompts

MEGABYTES = 2**20
CONTEXT = 2048


@pytest.mark.parametrize("name", zoo_names())
def test_a_member_loads_and_reads_a_thousand_positions(name):
    model = AutoModelForCausalLM.from_pretrained(zoo_path(name), dtype=torch.float32)
    assert model.config.max_position_embeddings == CONTEXT
    assert model.config.eos_token_id == 0
    ids = torch.arange(1000)[None] % model.config.vocab_size
    with torch.inference_mode():
        logits = model(ids).logits
    assert logits.shape == (1, 1000, model.config.vocab_size)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    "text",
    [
        "def f(x: int) -> int:\n    return x + 1  # tabs\tand 1234567890\n",
        "naïve café, 東京, Ελλάδα, emoji 🙂🌳, zero\u200bwidth",
        "   leading and trailing spaces   \n\n\n",
        "",
    ],
)
def test_the_tokenizer_gives_text_back(text):
    tokenizer = AutoTokenizer.from_pretrained(zoo_path("target"))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_family_shares_one_vocabulary():
    vocabularies = [
        AutoTokenizer.from_pretrained(zoo_path(name)).get_vocab() for name in zoo_names()
    ]
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)
    assert len(vocabularies[0]) == 4096
    assert vocabularies[0]["<|endoftext|>"] == 0


def test_the_weights_stay_under_25_mebibytes():
    sizes = [(zoo_path(name) / "model.safetensors").stat().st_size for name in zoo_names()]
    assert sum(sizes) <= 25 * MEGABYTES
    assert sizes == sorted(sizes, reverse=True), "members are listed dearest first"


@pytest.mark.parametrize("name", zoo_names())
def test_a_card_tells_data_training_and_measurements(name):
    card = json.loads((zoo_path(name) / "card.json").read_text())
    assert card["name"] == name
    assert card["training"]["language_model"]["tokens"] > 0
    assert "seed" in card["training"]
    assert all(source["licence"] and source["version"] for source in card["data"]["sources"])
    assert card["data"]["sha256"]["corpus.jsonl"]
    assert card["measured"]["held_out_loss_nats"] > 0
    if name == "target":
        assert {"repetition", "target_entropy_nats"} <= set(card["measured"])
    else:
        assert card["training"]["distillation"]["tokens"] > 0
        assert {"agreement", "agreement_without_distillation"} <= set(card["measured"])
    assert (zoo_path(name) / "CARD.md").read_text().startswith(f"# zoo:{name}")


def test_six_kinds_of_ten_prompts_that_fit():
    prompts = zoo_prompts()
    counts = Counter(prompt.kind for prompt in prompts)
    assert len(counts) >= 6
    assert min(counts.values()) >= 10
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    tokenizer = AutoTokenizer.from_pretrained(zoo_path("target"))
    assert all(40 <= len(tokenizer.encode(prompt.prompt)) <= 300 for prompt in prompts)


def test_every_prompt_names_where_it_came_from():
    for path in (zoo_path("target").parent / "prompts").glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert json.loads(line)["source"]


def test_prompts_can_be_chosen_by_kind():
    kind = zoo_kinds()[0]
    assert {prompt.kind for prompt in zoo_prompts([kind])} == {kind}


def test_the_prefix_is_optional():
    assert zoo_path("zoo:small") == zoo_path("small")


def test_unknown_names_are_one_clear_line():
    with pytest.raises(
        ConfigError, match=r"zoo:target, zoo:medium, zoo:small, found 'tiny'"
    ) as caught:
        zoo_path("tiny")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="prompt kinds out of"):
        zoo_prompts(["poem"])
