"""The Hugging Face adapter: a tree is read as its paths are, or the model is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backends.draft_trees import (
    layout,
    plain_logits,
    prefill,
    relative_error,
    tree_and_path_logits,
)
from backends.families import POSITIONS, VOCAB, build, config, from_config, prompt_of
from tokenizers import Tokenizer, models
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from treegraft.backends.hf import HFLanguageModel, load_model, load_tokenizer
from treegraft.backends.vocabulary import check_vocabularies
from treegraft.core.errors import CapacityError, ConfigError, UnsupportedModelError

FORK = [0, 0, 0, 1, 2, 2, 3]


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The story: one tree, its paths, and a mask that is wrong.


def test_a_tree_reads_like_its_paths() -> None:
    model = HFLanguageModel(build("llama", dtype=torch.float64))
    tree, paths = tree_and_path_logits(model, 9, FORK, dice())
    assert relative_error(tree, paths) < 1e-12


def test_a_plain_causal_mask_in_its_place_does_not() -> None:
    model = HFLanguageModel(build("llama", dtype=torch.float64))
    text = torch.randint(0, VOCAB, (16,), generator=dice())
    cache = model.new_cache(16)
    prefill(model, cache, text[:9])
    rows, positions, visible = layout(FORK, 9)
    causal = torch.arange(16) <= rows[:, None]
    right = model.forward(cache, text[9:], rows, positions, visible)
    wrong = model.forward(cache, text[9:], rows, rows, causal)
    assert relative_error(wrong[:2], right[:2]) < 1e-12  # the first chain is the same
    assert relative_error(wrong[2:], right[2:]) > 0.1


def test_windows_count_positions_and_not_rows() -> None:
    """Twenty siblings lie twenty rows apart and see the same last positions of the text."""
    for name in ("mistral", "gemma3", "llama4"):
        model = HFLanguageModel(build(name, dtype=torch.float64))
        tree, paths = tree_and_path_logits(model, 13, [0] * 21, dice(1))
        assert relative_error(tree, paths) < 1e-9, name


def test_rows_need_no_order() -> None:
    model = HFLanguageModel(build("gemma3", dtype=torch.float64))
    text = torch.randint(0, VOCAB, (20,), generator=dice(2))
    places = torch.randperm(30, generator=dice(3))[:20]
    cache = model.new_cache(30)
    for start in (0, 7):
        part = slice(start, 7 if start == 0 else 20)
        positions = torch.arange(part.start, part.stop)
        visible = torch.zeros(len(positions), 30, dtype=torch.bool)
        for query, position in enumerate(positions.tolist()):
            visible[query, places[: position + 1]] = True
        logits = model.forward(cache, text[part], places[part], positions, visible)
    assert relative_error(logits, plain_logits(model.model, text)[7:]) < 1e-12


def test_last_only_gives_the_last_row_of_the_logits() -> None:
    model = HFLanguageModel(build("llama"))
    text = torch.randint(0, VOCAB, (8,), generator=dice())
    places = torch.arange(8)
    visible = places <= places[:, None]
    every = model.forward(model.new_cache(8), text, places, places, visible)
    last = model.forward(model.new_cache(8), text, places, places, visible, last_only=True)
    assert last.shape == (1, VOCAB)
    assert torch.allclose(last[0], every[-1], atol=1e-4)


def test_two_texts_in_two_caches_do_not_meet() -> None:
    model = HFLanguageModel(build("gemma3", dtype=torch.float64))
    texts = [torch.randint(0, VOCAB, (12,), generator=dice(s)) for s in (1, 2)]
    caches = [model.new_cache(12), model.new_cache(40)]
    for start in range(0, 12, 4):
        for cache, text in zip(caches, texts, strict=True):
            logits = prefill(model, cache, text[start : start + 4], start)
            expected = plain_logits(model.model, text)[start : start + 4]
            assert relative_error(logits, expected) < 1e-12


def test_a_full_cache_says_so() -> None:
    model = HFLanguageModel(build("llama"))
    text = torch.zeros(9, dtype=torch.int64)
    with pytest.raises(CapacityError, match="has 8 rows and 9 are asked for"):
        prefill(model, model.new_cache(8), text)


# What the caller gave is left as it was.


def test_a_model_in_training_is_read_without_dropout_and_goes_on_training() -> None:
    changes = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    given = build("gpt2", **changes).train()
    given.transformer.h[1].eval()  # as someone who froze a layer would
    flags = [module.training for module in given.modules()]
    attention = given.config._attn_implementation
    stream = torch.random.get_rng_state()
    model = HFLanguageModel(given)
    text = torch.randint(0, VOCAB, (12,), generator=dice())
    logits = prefill(model, model.new_cache(12), text)
    assert [module.training for module in given.modules()] == flags
    assert given.config._attn_implementation == attention
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert all(parameter.requires_grad for parameter in given.parameters())
    assert all(parameter.grad is None for parameter in given.parameters())
    assert not logits.requires_grad
    assert not logits.is_inference()
    assert relative_error(logits, plain_logits(given.eval(), text)) < 1e-4


def test_a_forward_that_raises_still_restores_the_training_flags() -> None:
    given = build("llama").train()
    model = HFLanguageModel(given)
    with pytest.raises(IndexError):
        prefill(model, model.new_cache(4), torch.full((4,), VOCAB))
    assert all(module.training for module in given.modules())


# The report.


def test_the_report_says_what_was_decided() -> None:
    model = HFLanguageModel(build("llama"), name="small")
    report = model.report
    assert (model.name, model.vocab_size, model.max_positions) == ("small", VOCAB, POSITIONS)
    assert (report.model_type, report.attention, report.mask_form) == ("llama", "sdpa", "tensor")
    assert report.cache_keyword in ("cache", "past_key_values")
    assert (report.n_layers, report.dtype, report.notes) == (3, torch.float32, ())
    assert report.self_test_error is not None
    assert report.self_test_error < 1e-4
    assert HFLanguageModel(build("llama"), self_test=False).report.self_test_error is None


def test_padding_rows_of_the_embedding_count_as_logits() -> None:
    given = build("llama")
    given.resize_token_embeddings(104, mean_resizing=False)
    assert HFLanguageModel(given).vocab_size == 104


def test_a_window_counts_only_where_the_modelling_code_applies_it() -> None:
    reach = HFLanguageModel(build("phi3", sliding_window=6)).report.reaches[0]
    assert (reach.kind, reach.window) == ("sliding_attention", 6)
    given = build("llama")
    given.config.sliding_window = 6  # llama's code never looks at it
    reach = HFLanguageModel(given).report.reaches[0]
    assert (reach.kind, reach.window) == ("full_attention", None)


# Rotary embeddings that change with the length are exact up to their original length.

_SWITCHING: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
            "factor": 4.0,
        },
        "original_max_position_embeddings": 64,
        "max_position_embeddings": 256,
    },
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize(("family", "kind"), [("phi3", "longrope"), ("llama", "dynamic")])
def test_switching_rotary_embeddings_are_limited_to_where_they_are_exact(
    family: str, kind: str
) -> None:
    model = HFLanguageModel(build(family, dtype=torch.float64, **_SWITCHING[kind]))
    assert model.max_positions == 64
    assert f"{kind!r} is exact up to its original length of 64 positions" in model.report.notes[0]
    tree, paths = tree_and_path_logits(model, 61, [0, 0, 0, 1, 2], dice())  # up to position 63
    assert relative_error(tree, paths) < 1e-9


def test_constant_rotary_embeddings_keep_their_full_length() -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = HFLanguageModel(build("llama", rope_parameters=yarn, max_position_embeddings=256))
    assert (model.max_positions, model.report.notes) == (256, ())


# Refusals, by name and with what to do instead.

_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"state_size": 8}, "use a model whose every layer is softmax attention"),
    "mamba2": (
        {"head_dim": 16, "num_heads": 4, "n_groups": 1, "state_size": 8},
        "use a model whose every layer is softmax attention",
    ),
    "jamba": (
        {"use_mamba_kernels": False, "num_hidden_layers": 8, "num_experts": 2},
        "has layers of type .*mamba",
    ),
    "qwen3_next": (
        {"num_experts": 4, "num_hidden_layers": 4},
        "has layers of type linear_attention.* cannot branch with a draft tree; use a model",
    ),
    "recurrent_gemma": ({"num_attention_heads": 4}, "has layers of type .*recurrent"),
    "rwkv": ({"attention_hidden_size": 32}, "keeps a recurrent state"),
    "lfm2": (
        {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
        "has layers of type conv",
    ),
    "bloom": ({"n_head": 4}, "uses ALiBi.*use a model with rotary or learned positions"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "uses ALiBi"),
    "falcon": ({"alibi": True, "num_attention_heads": 4}, "uses ALiBi"),
    "gpt_neo": (
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "has 1 layers of local attention",
    ),
    "openai-gpt": ({"n_head": 4, "n_layer": 2, "n_embd": 32}, "takes no KV cache"),
    "bart": (
        {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2},
        "takes no position_ids|encoder-decoder",
    ),
}


@pytest.mark.parametrize("kind", sorted(_REFUSED))
def test_models_that_cannot_branch_are_refused(kind: str) -> None:
    options, message = _REFUSED[kind]
    base = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32}
    if "num_hidden_layers" not in options and kind not in ("gpt_neo", "openai-gpt", "mpt"):
        base["num_hidden_layers"] = 3
    given = from_config(AutoConfig.for_model(kind, **{**base, **options}))
    with pytest.raises(UnsupportedModelError, match=message) as refusal:
        HFLanguageModel(given, name="the-model")
    assert str(refusal.value).startswith(f"the-model ({kind})")
    assert "\n" not in str(refusal.value)


def test_flash_attention_is_refused_with_what_to_load_instead() -> None:
    given = build("llama")
    given.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r"load it with attn_implementation='sdpa'"):
        HFLanguageModel(given)


def test_attention_in_both_directions_is_refused() -> None:
    given = build("gemma3")
    given.config.use_bidirectional_attention = True
    with pytest.raises(UnsupportedModelError, match="attends in both directions"):
        HFLanguageModel(given)


class IgnoresTheMask(LlamaForCausalLM):
    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, attention_mask=None, **kwargs)


class CountsItsOwnPositions(LlamaForCausalLM):
    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, position_ids=None, **kwargs)


class KeepsNoCache(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("cache", kwargs.pop("past_key_values", None))
        return super().forward(*args, **kwargs)


def _broken(cls: type[LlamaForCausalLM], dtype: torch.dtype) -> Any:
    given = cls(config("llama"))
    given.load_state_dict(build("llama").state_dict())
    # What the wrapped forward takes: a class of one's own would spell this out.
    cls.forward.__wrapped__ = LlamaForCausalLM.forward  # type: ignore[attr-defined]
    return given.to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [IgnoresTheMask, CountsItsOwnPositions])
def test_the_self_test_refuses_a_model_that_does_not_follow(
    cls: type[LlamaForCausalLM], dtype: torch.dtype
) -> None:
    given = _broken(cls, dtype)
    with pytest.raises(
        UnsupportedModelError, match=r"odd .*tree logits differ from path logits by"
    ):
        HFLanguageModel(given, name="odd")
    assert HFLanguageModel(given, self_test=False).report.self_test_error is None


def test_a_model_that_leaves_the_cache_alone_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"did not use the KV cache|fails when it reads"
    ):
        HFLanguageModel(_broken(KeepsNoCache, torch.float32))


def test_a_model_that_raises_on_a_mask_is_refused_in_one_line() -> None:
    class Raises(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError("no masks here\nplease")

    with pytest.raises(UnsupportedModelError, match=r"\(TypeError: no masks here\)"):
        HFLanguageModel(_broken(Raises, torch.float32))


# Loading.


def save(folder: Path, model: Any, words: list[str] | None = None) -> str:
    model.save_pretrained(folder)
    if words is not None:
        tokenizer(words).save_pretrained(folder)
    return str(folder)


def tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    level = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(level))


WORDS = [f"w{i}" for i in range(VOCAB)]


def test_load_model_from_a_folder(tmp_path: Path) -> None:
    given = build("llama", dtype=torch.bfloat16)
    path = save(tmp_path, given, WORDS)
    model = load_model(path, device="cpu")
    assert (model.name, model.report.dtype) == (path, torch.float32)  # half is slow on the CPU
    assert load_model(path, dtype="auto", device="cpu").report.dtype == torch.bfloat16
    assert load_model(path, "float64", "cpu", attention="eager").report.attention == "eager"
    found, reason = load_tokenizer(path)
    assert found is not None
    assert (found.get_vocab()["w5"], reason) == (5, "")


def test_weights_that_we_load_lie_inputs_first_and_say_the_same(tmp_path: Path) -> None:
    """A model that was handed in stays as it lay."""
    given = build("llama", tie_word_embeddings=True)
    path = save(tmp_path, given)
    laid = load_model(path, device="cpu").model
    layers = [m for m in laid.modules() if type(m) is torch.nn.Linear]
    assert layers
    assert all(layer.weight.t().is_contiguous() for layer in layers)
    assert laid.lm_head.weight is laid.get_input_embeddings().weight
    for name, weight in given.state_dict().items():
        assert torch.equal(laid.state_dict()[name], weight), name
    ids = torch.tensor([prompt_of(9)])
    with torch.no_grad():
        error = (laid(ids).logits - given(ids).logits).abs().max()
    assert error < 1e-5
    HFLanguageModel(given)
    assert all(m.weight.is_contiguous() for m in given.modules() if type(m) is torch.nn.Linear)


def test_float64_reaches_mixtures_of_experts(tmp_path: Path) -> None:
    path = save(tmp_path, build("mixtral"))
    assert load_model(path, dtype="float64", device="cpu").report.dtype == torch.float64
    assert load_tokenizer(path) == (None, f"{path} has no tokenizer files")


def test_a_source_that_is_no_model_is_one_line_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'/no/such/model': no such folder"):
        load_model("/no/such/model")
    with pytest.raises(ConfigError, match=r"'\./nothing': no such folder"):
        load_model("./nothing")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{]")
    with pytest.raises(ConfigError, match="cannot be loaded") as error:
        load_model(str(tmp_path))
    assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text('{"model_type": "t5", "vocab_size": 97}')
    with pytest.raises(UnsupportedModelError, match="is an encoder-decoder"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}'
    )
    with pytest.raises(UnsupportedModelError, match="brings its own code"):
        load_model(str(tmp_path))


def test_bad_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'int8' is not known: use auto"):
        load_model(str(tmp_path), dtype="int8")
    with pytest.raises(ConfigError, match="'flash_attention_2' takes no mask"):
        load_model(str(tmp_path), attention="flash_attention_2")


# Vocabularies.


def test_equal_tokenizers_may_have_padded_embeddings() -> None:
    ours, theirs = tokenizer(WORDS), tokenizer(WORDS)
    assert check_vocabularies(ours, VOCAB, theirs, 128) == VOCAB
    assert check_vocabularies(ours, 128, theirs, 104) == 104


def test_a_drafter_that_maps_ids_differently_is_refused() -> None:
    swapped = [*WORDS[:7], "w8", "w7", *WORDS[9:]]
    with pytest.raises(
        UnsupportedModelError,
        match=r"drafter 'd' does not share the vocabulary of target 't': token 'w7' is id 8 there "
        r"and id 7 in the target",
    ):
        check_vocabularies(tokenizer(WORDS), VOCAB, tokenizer(swapped), VOCAB, ("t", "d"))


def test_an_added_token_is_compared_too() -> None:
    theirs = tokenizer(WORDS)
    theirs.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    with pytest.raises(UnsupportedModelError, match="'<tool>' is id 97 there and missing in"):
        check_vocabularies(tokenizer(WORDS), 128, theirs, 128)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="logits for 90 ids but its tokenizer has 97"):
        check_vocabularies(tokenizer(WORDS), VOCAB, tokenizer(WORDS), 90)


def test_without_tokenizers_the_widths_decide() -> None:
    assert check_vocabularies(None, 97, None, 97) == 97
    with pytest.raises(UnsupportedModelError, match="has 128 token ids and target 'target' has 97"):
        check_vocabularies(None, 97, tokenizer(WORDS), 128)
    assert check_vocabularies(None, 97, None, 128, same_ids=True) == 97
