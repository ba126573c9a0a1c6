"""Logits processors: transformers' settings and one's own list give the tokens of ``generate``.

Every call's ids are the committed text and one path of the tree; under the walk the calls are those
that ``generate`` itself would make: same ids, each once, in order, and no more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import curious_verifiers
import pytest
import torch
from table_models import TableModel, hashed_model, mixed_model
from torch import Tensor
from toy_tokenizers import PieceTokenizer
from transformers import (
    ClassifierFreeGuidanceLogitsProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    SynthIDTextWatermarkLogitsProcessor,
    TopKLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkingConfig,
)

from treegraft.backends.hf import HFLanguageModel
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError, PolicyError, ProcessorError
from treegraft.core.roles import Verifier
from treegraft.core.tree import TokenTree
from treegraft.pipeline import Pipeline, build_pipeline

V = 40
N_NEW = 20
PROMPTS = ([3], [5, 1, 7], [2, 9, 2, 9, 2, 9, 4] * 4)
TREES: dict[str, dict[str, Any]] = {
    "mixed": {
        "builder": {"kind": "layered", "depth": 4, "width": 4, "budget": 20},
        "scheduler": {"kind": "fixed", "calls": ["near", "ngram", "near"]},
    },
    "deep": {
        "builder": {"kind": "layered", "depth": 6, "width": 2, "budget": 12},
        "scheduler": {"kind": "always"},
        "backend": {"kind": "reference"},
    },
    "look-ups": {"scheduler": {"kind": "never"}},
    "plain": {"drafters": [], "scheduler": {"kind": "never"}},
}
DRAFTING = ("mixed", "deep", "look-ups")


def tiny_llama(seed: int, layers: int = 2) -> LlamaForCausalLM:
    """Untied weights drawn wide, so that texts are lively and far from ties."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.6,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_llama(0)


@pytest.fixture(scope="module")
def near(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A drafter that agrees with the target often: the same weights with a little noise."""
    model = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return model


def pipeline(target: PreTrainedModel, near: PreTrainedModel, **options: Any) -> Pipeline:
    config = {
        "target": {"model": "target"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "near"}],
        "stop": {"max_new_tokens": N_NEW},
        **TREES["mixed"],
        **options,
    }
    models = {
        "target": HFLanguageModel(target, self_test=False),
        "near": HFLanguageModel(near, self_test=False),
    }
    return build_pipeline(parse_config(config), models)


@pytest.fixture(scope="module")
def made(target: LlamaForCausalLM, near: LlamaForCausalLM) -> dict[str, Pipeline]:
    return {name: pipeline(target, near, **tree) for name, tree in TREES.items()}


def by_transformers(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": N_NEW, "do_sample": False, "pad_token_id": 0, **options}
    with torch.no_grad():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


class Spy(LogitsProcessor):
    """Keeps what it is handed, as handed: memory that is written to later would show."""

    stateless = True

    def __init__(self) -> None:
        self.ids: list[Tensor] = []
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.ids.append(input_ids)
        self.scores.append(scores)
        return scores

    @property
    def texts(self) -> list[list[int]]:
        return [ids[0].tolist() for ids in self.ids]


# --- the story: each setting gives what generate gives, whatever drafts ---------------------------

Settings = Callable[[list[int]], dict[str, Any]]
# From the free text of the prompt to settings that must change it.
GREEDY: dict[str, Settings] = {
    "no_repeat_ngram_size 1": lambda free: {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size": lambda free: {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": lambda free: {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": lambda free: {"encoder_repetition_penalty": 3.0},
    "repetition_penalty": lambda free: {"repetition_penalty": 1.4},
    "bad_words_ids": lambda free: {"bad_words_ids": [[free[2], free[3]], [free[6]], free[8:11]]},
    "sequence_bias": lambda free: {
        "sequence_bias": [[[free[1]], -4.0], [free[3:5], -30.0], [[free[6], 11], 50.0]]
    },
    "min_length": lambda free: {"min_length": 12, "eos_token_id": free[2:5]},
    "forced_bos_token_id": lambda free: {"forced_bos_token_id": 17},
    "forced_eos_token_id": lambda free: {"forced_eos_token_id": 23},
    "several forced_eos_token_id": lambda free: {"forced_eos_token_id": [23, 4]},
    "exponential_decay_length_penalty": lambda free: {
        "exponential_decay_length_penalty": (3, 1.3),
        "eos_token_id": [38, 39],
    },
    "suppress_tokens": lambda free: {"suppress_tokens": free[1:4]},
    "begin_suppress_tokens": lambda free: {"begin_suppress_tokens": [free[0]]},
    "begin_suppress_tokens after forced_bos_token_id": lambda free: {
        "begin_suppress_tokens": [free[0], 8],
        "forced_bos_token_id": 17,
    },
    "greenlist watermark": lambda free: {
        "watermarking_config": {"bias": 6.0, "greenlist_ratio": 0.4}
    },
    "greenlist watermark of selfhash": lambda free: {
        "watermarking_config": {"bias": 6.0, "seeding_scheme": "selfhash", "context_width": 2}
    },
    "synthid watermark": lambda free: {
        "watermarking_config": {"ngram_len": 3, "keys": [654, 400, 836, 123], "debug_mode": True}
    },
    "everything at once": lambda free: {
        "sequence_bias": [[[free[1]], -4.0], [free[3:5], -30.0]],
        "encoder_repetition_penalty": 1.2,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "encoder_no_repeat_ngram_size": 4,
        "bad_words_ids": [free[6:8]],
        "min_length": 9,
        "min_new_tokens": 10,
        "forced_eos_token_id": 23,
        "remove_invalid_values": True,
        "exponential_decay_length_penalty": (9, 1.05),
        "suppress_tokens": [free[5]],
        "begin_suppress_tokens": [free[0]],
        "watermarking_config": {"bias": 2.0},
        "renormalize_logits": True,
        "eos_token_id": [free[9], 39],
    },
}
NEVER_CHANGE: dict[str, Settings] = {
    "remove_invalid_values": lambda free: {"remove_invalid_values": True},
    "renormalize_logits": lambda free: {"renormalize_logits": True},
    "off": lambda free: {"no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0},
    "for sampling alone": lambda free: {"top_h": 0.3, "typical_p": 0.2, "epsilon_cutoff": 0.2},
}


def ours(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings by our names."""
    renamed = {"eos_token_id": "eos"}
    return {renamed.get(name, name): value for name, value in settings.items()}


def theirs(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings as transformers wants them: made anew, for they are changed there."""
    settings = copy.deepcopy(settings)
    bias = settings.get("sequence_bias")
    if bias is not None:  # in a list, older versions refuse id 0
        settings["sequence_bias"] = {tuple(ids): value for ids, value in bias}
    mark = settings.get("watermarking_config")
    if mark is not None:
        kind = SynthIDTextWatermarkingConfig if "keys" in mark else WatermarkingConfig
        settings["watermarking_config"] = kind(**mark)
    return settings


@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
@pytest.mark.parametrize("name", [*GREEDY, *NEVER_CHANGE])
def test_greedy_tokens_are_those_of_generate(
    target: LlamaForCausalLM, made: dict[str, Pipeline], name: str
) -> None:
    changed, accepted = 0, 0
    for prompt in PROMPTS:
        free = by_transformers(target, prompt)
        settings = (GREEDY | NEVER_CHANGE)[name](free)
        expected = by_transformers(target, prompt, **theirs(settings))
        changed += expected != free[: len(expected)]
        for name_of_tree in DRAFTING:
            result = made[name_of_tree].generate(prompt, **ours(settings))
            assert result.tokens == expected
            accepted += sum(step.n_path for step in result.steps)
    assert (changed > 0) == (name in GREEDY), "a setting that changes nothing proves nothing"
    assert accepted > 5, "nothing was accepted, so nothing was proved"


SAMPLED: dict[str, dict[str, Any]] = {
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.3},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.2},
    "synthid": {"watermarking_config": {"ngram_len": 3, "keys": [654, 400, 836, 123]}},
    "greenlist": {"watermarking_config": {"bias": 4.0}},
    "with treegraft's own": {
        "no_repeat_ngram_size": 2,
        "top_h": 0.9,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "renormalize_logits": True,
        "suppress_tokens": [1, 2],
    },
}


@pytest.mark.parametrize("name", SAMPLED)
def test_seeded_tokens_are_those_of_plain_decoding(made: dict[str, Pipeline], name: str) -> None:
    changed, accepted = 0, 0
    for seed in range(3):
        options = {"temperature": 0.7, "seed": seed}
        free = made["plain"].generate(PROMPTS[2], **options).tokens
        expected = made["plain"].generate(PROMPTS[2], **options, **SAMPLED[name]).tokens
        changed += expected != free
        for tree in DRAFTING:
            result = made[tree].generate(PROMPTS[2], **options, **SAMPLED[name])
            assert result.tokens == expected
            accepted += sum(step.n_path for step in result.steps)
    assert changed > 0, "a setting that changes nothing proves nothing"
    assert accepted > 5, "nothing was accepted, so nothing was proved"


def test_settings_may_stand_in_the_config(target: LlamaForCausalLM, near: LlamaForCausalLM) -> None:
    free = by_transformers(target, PROMPTS[1])
    settings = {"no_repeat_ngram_size": 2, "bad_words_ids": [[free[3]]]}
    set_up = pipeline(target, near, sampling={"processors": settings})
    assert set_up.generate(PROMPTS[1]).tokens == by_transformers(target, PROMPTS[1], **settings)
    # An override replaces one of them and leaves the others.
    fewer = by_transformers(target, PROMPTS[1], bad_words_ids=[[free[3]]])
    assert set_up.generate(PROMPTS[1], no_repeat_ngram_size=None).tokens == fewer
    assert set_up.generate(PROMPTS[1], processors=None).tokens == free


# --- the story of one's own list ------------------------------------------------------------------


class Alternating(LogitsProcessor):
    """Even places take even ids: a rule that only the right path can satisfy."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        parity = int(input_ids.sum() + input_ids.shape[1]) % 2
        ids = torch.arange(scores.shape[-1])
        return scores.masked_fill(ids % 2 != parity, -torch.inf)


class Counting(LogitsProcessor):
    """Its own memory decides: the n-th call forbids what the calls before it would have taken."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.taken[-5:]] = -torch.inf
        self.taken.append(int(scores.argmax()))
        return scores


class InPlace(LogitsProcessor):
    """Writes to everything that it is given."""

    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = int(input_ids[0, -1])
        scores.neg_()
        scores[:, last] = -torch.inf
        input_ids.fill_(0)
        return scores


@pytest.mark.parametrize("kind", [Alternating, Counting, Spy])
def test_ones_own_list_gives_the_tokens_of_generate(
    target: LlamaForCausalLM, made: dict[str, Pipeline], kind: type[LogitsProcessor]
) -> None:
    """One that keeps state too: the walk makes the calls that generate makes."""
    accepted = 0
    for prompt in PROMPTS:
        expected = by_transformers(target, prompt, logits_processor=LogitsProcessorList([kind()]))
        for tree in made.values():
            result = tree.generate(prompt, logits_processor=LogitsProcessorList([kind()]))
            assert result.tokens == expected
            accepted += sum(step.n_path for step in result.steps)
    assert accepted > 10


def test_ones_own_list_stands_where_generate_has_it(
    target: LlamaForCausalLM, made: dict[str, Pipeline]
) -> None:
    """After the penalties and the rules on ids, before what normalises at the end."""
    spies = Spy(), Spy()
    settings = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [7],
        "watermarking_config": {"bias": 3.0},
        "renormalize_logits": True,
    }
    expected = by_transformers(
        target, PROMPTS[1], logits_processor=LogitsProcessorList([spies[0]]), **theirs(settings)
    )
    result = made["mixed"].generate(PROMPTS[1], logits_processor=[spies[1]], **settings)
    assert result.tokens == expected
    found, expected_rows = torch.cat(spies[1].scores), torch.cat(spies[0].scores)
    torch.testing.assert_close(found, expected_rows, rtol=1e-3, atol=1e-3)
    assert {scores.dtype for scores in spies[1].scores} == {torch.float32}


def test_prefix_allowed_tokens_fn(target: LlamaForCausalLM, made: dict[str, Pipeline]) -> None:
    def allowed(batch: int, ids: Tensor) -> list[int]:
        assert batch == 0
        last = int(ids[-1])
        return [(last * k + 3) % V for k in range(1, 9)]

    for prompt in PROMPTS:
        expected = by_transformers(target, prompt, prefix_allowed_tokens_fn=allowed)
        for tree in made.values():
            assert tree.generate(prompt, prefix_allowed_tokens_fn=allowed).tokens == expected
    stream = made["mixed"].stream(PROMPTS[1], prefix_allowed_tokens_fn=allowed)
    tokens = [token for chunk in stream for token in chunk.tokens]
    assert tokens == by_transformers(target, PROMPTS[1], prefix_allowed_tokens_fn=allowed)


@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
def test_guidance_handed_in_is_that_of_generate(
    target: LlamaForCausalLM, made: dict[str, Pipeline]
) -> None:
    """It runs a model of its own in step with the text, which the walk keeps to."""
    negative = torch.tensor([[8, 4, 30]])
    expected = by_transformers(target, PROMPTS[1], guidance_scale=1.5, negative_prompt_ids=negative)
    assert expected != by_transformers(target, PROMPTS[1])
    for tree in made.values():
        guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(
            1.5, target, unconditional_ids=negative
        )
        assert tree.generate(PROMPTS[1], logits_processor=[guide]).tokens == expected


def test_synthid_handed_in_is_that_of_generate(
    target: LlamaForCausalLM, made: dict[str, Pipeline]
) -> None:
    def mark() -> SynthIDTextWatermarkLogitsProcessor:
        return SynthIDTextWatermarkLogitsProcessor(
            3, [654, 400, 836, 123], 2**16, 0, 1024, "cpu", debug_mode=True
        )

    expected = by_transformers(target, PROMPTS[2], logits_processor=LogitsProcessorList([mark()]))
    for tree in made.values():
        assert tree.generate(PROMPTS[2], logits_processor=[mark()]).tokens == expected


# --- the law: which calls are made ----------------------------------------------------------------


def test_the_calls_are_those_of_generate(
    target: LlamaForCausalLM, made: dict[str, Pipeline]
) -> None:
    for prompt in PROMPTS:
        free = by_transformers(target, prompt)
        for eos in (None, [free[9]]):
            spy = Spy()
            by_transformers(
                target, prompt, logits_processor=LogitsProcessorList([spy]), eos_token_id=eos
            )
            for tree in made.values():
                own = Spy()
                result = tree.generate(prompt, logits_processor=[own], eos=eos or [])
                assert own.texts == spy.texts
                text = [*prompt, *result.tokens]
                assert own.texts == [text[:n] for n in range(len(prompt), len(text))]


@pytest.mark.parametrize("name", ["mixed", "deep"])
def test_another_verifier_sees_each_nodes_own_path_and_never_a_mix_of_branches(
    target: LlamaForCausalLM,
    near: LlamaForCausalLM,
    made: dict[str, Pipeline],
    name: str,
) -> None:
    verifier = {"kind": "curious_verifiers:Everywhere"}
    curious = pipeline(target, near, verifier=verifier, **TREES[name])
    curious_verifiers.Everywhere.trees.clear()
    spy = Spy()
    text = list(PROMPTS[2])
    branches = 0
    for chunk in curious.stream(PROMPTS[2], logits_processor=[spy], no_repeat_ngram_size=3):
        (tree,) = curious_verifiers.Everywhere.trees
        paths = [text + tree.path(node) for node in range(len(tree))]
        assert sorted(spy.texts) == sorted(paths), "each node once, with its own path"
        branches += len(tree) - 1 - int(tree.depth.max())
        text += chunk.tokens
        spy.ids.clear()
        curious_verifiers.Everywhere.trees.clear()
    assert branches > 10, "without branches there is nothing to mix"
    expected = made["plain"].generate(PROMPTS[2], no_repeat_ngram_size=3).tokens
    assert text[len(PROMPTS[2]) :] == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.6},
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 1, "max_new_tokens": 12},
        {"bad_words_ids": [[i, j] for i in range(16) for j in range(16) if (i * j) % 3 == 1]},
    ],
    ids=["repetition_penalty", "no_repeat_ngram_size", "of one token", "bad_words_ids"],
)
def test_penalties_counted_on_the_wrong_path(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of other branches count for nothing; if they did, some of these texts would turn."""
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "lm", "model": "t"}],
        "builder": {"kind": "layered", "depth": 4, "width": 3, "budget": 40},
        "stop": {"max_new_tokens": 25},
    }

    def of_a_sibling(tree: TokenTree, index: int) -> list[int]:
        """The fault: the path of the next node at the same depth."""
        at_depth = (tree.depth == tree.depth[index]).nonzero()[:, 0].tolist()
        return right(tree, at_depth[(at_depth.index(index) + 1) % len(at_depth)])

    right = TokenTree.path
    changed, accepted, turned = 0, 0, 0
    for seed in range(6):
        model = hashed_model(16, seed=seed, scale=1.0)
        drafted = build_pipeline(parse_config(config), {"t": model})
        plain = build_pipeline(parse_config({**config, "drafters": []}), {"t": model})
        expected = plain.generate([0, 1], **settings).tokens
        changed += expected != plain.generate([0, 1], max_new_tokens=len(expected)).tokens
        result = drafted.generate([0, 1], **settings)
        assert result.tokens == expected
        accepted += sum(step.n_path for step in result.steps)
        with monkeypatch.context() as patch:
            patch.setattr(TokenTree, "path", of_a_sibling)
            turned += drafted.generate([0, 1], **settings).tokens != expected
    assert min(changed, accepted, turned) > 0


def test_nothing_is_asked_after_the_end_of_the_text() -> None:
    """A grammar has no answer there, and would raise; the tree goes on below the end token."""
    model = TableModel(
        lambda text: torch.nn.functional.one_hot(torch.tensor((text[-1] + 1) % 8), 8) * 9.0, 8
    )
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "lm", "model": "t"}],
        "builder": {"kind": "layered", "depth": 5, "width": 2, "budget": 30},
        "graft": {"kind": "treegraft", "lookback": 0},
        "stop": {"max_new_tokens": 100},
    }
    made = build_pipeline(parse_config(config), {"t": model}, PieceTokenizer("abcdefgh"))

    def grammar(batch: int, ids: Tensor) -> list[int]:
        return [] if 3 in ids.tolist() else list(range(8))

    for stop in ({"eos": [3]}, {"strings": ["cd"]}):
        result = made.generate([0], prefix_allowed_tokens_fn=grammar, **stop)
        assert result.tokens == [1, 2, 3]
        assert result.steps[0].n_path == 5, "the walk went past the end"
    # Without an end it is asked, and what it says is said.
    with pytest.raises(ProcessorError, match="'prefix_allowed_tokens_fn' failed after 4 tokens"):
        made.generate([0], prefix_allowed_tokens_fn=grammar, max_new_tokens=4)
    result = made.generate([0], prefix_allowed_tokens_fn=grammar, max_new_tokens=3)
    assert result.tokens == [1, 2, 3]


def test_a_processor_that_keeps_state_is_not_asked_past_the_end_either(
    target: LlamaForCausalLM, made: dict[str, Pipeline]
) -> None:
    """Its state is the caller's, and goes on into the next text as it would with generate."""
    free = by_transformers(target, PROMPTS[1])
    mine, same = Counting(), Counting()
    for prompt in (PROMPTS[1], PROMPTS[2]):
        expected = by_transformers(
            target, prompt, logits_processor=LogitsProcessorList([same]), eos_token_id=free[4:7]
        )
        found = made["deep"].generate(prompt, logits_processor=[mine], eos=free[4:7])
        assert found.tokens == expected
        assert mine.taken == same.taken


# --- what a processor may do to others ------------------------------------------------------------


def test_a_processor_that_writes_in_place_spoils_nobodys_rows(
    target: LlamaForCausalLM, near: LlamaForCausalLM, made: dict[str, Pipeline]
) -> None:
    """The target's rows are read again: by look-ups, and by other nodes of the tree."""
    curious = pipeline(target, near, verifier={"kind": "curious_verifiers:Everywhere"})
    text = list(PROMPTS[1])
    for _ in range(N_NEW):  # what it computes, without its writing
        with torch.no_grad():
            row = -target(torch.tensor([text])).logits[0, -1]
        row[text[-1]] = -torch.inf
        text.append(int(row.argmax()))
    for tree in (*made.values(), curious):
        result = tree.generate(PROMPTS[1], logits_processor=[InPlace()])
        assert result.tokens == text[len(PROMPTS[1]) :]
    curious_verifiers.Everywhere.trees.clear()


def test_without_processors_the_row_is_the_targets_own(made: dict[str, Pipeline]) -> None:
    assert made["mixed"].sampling([1, 2]).processors is None
    assert made["mixed"].sampling([1, 2], no_repeat_ngram_size=0).processors is None


class Faulty(LogitsProcessor):
    """Does what it is told, from the n-th call on."""

    def __init__(self, answer: Callable[[Tensor], Any], after: int = 3) -> None:
        self.answer = answer
        self.left = after

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.left -= 1
        return scores if self.left >= 0 else self.answer(scores)


def raising(scores: Tensor) -> Tensor:
    raise KeyError("no such rule")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (raising, "failed after 6 tokens: KeyError: 'no such rule'"),
        (lambda scores: None, "must return float logits of shape [1, 40] on cpu, found NoneType"),
        (lambda scores: scores[0], "must return float logits of shape [1, 40] on cpu, found shape"),
        (lambda scores: scores.argsort(), "found torch.int64 after 6 tokens"),
        (lambda scores: scores.to("meta"), "found a tensor on meta after 6 tokens"),
        (lambda scores: scores * torch.nan, "give NaN after 6 tokens; they are Faulty"),
    ],
)
def test_a_processor_that_fails_is_named_and_the_pipeline_stays_usable(
    made: dict[str, Pipeline], answer: Callable[[Tensor], Any], message: str
) -> None:
    for tree in made.values():
        expected = tree.generate(PROMPTS[1]).tokens
        with pytest.raises(ProcessorError) as caught:
            tree.generate(PROMPTS[1], logits_processor=[Faulty(answer)])
        assert "Faulty" in str(caught.value)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert tree.generate(PROMPTS[1]).tokens == expected


def test_no_token_left_is_said(made: dict[str, Pipeline]) -> None:
    message = (
        "the logits processors leave no token that may come after 3 tokens; they are "
        "sampling.processors.suppress_tokens"
    )
    for temperature in (0.0, 1.0):
        with pytest.raises(ProcessorError) as caught:
            made["mixed"].generate(
                PROMPTS[1], suppress_tokens=list(range(V)), temperature=temperature
            )
        assert str(caught.value) == message
    with pytest.raises(ProcessorError, match="no token that may come after 40 tokens"):
        made["mixed"].generate([3], no_repeat_ngram_size=1, max_new_tokens=60)
    forced = {"sequence_bias": [[[7], float("inf")]]}
    assert made["mixed"].generate([3], **forced, max_new_tokens=3).tokens == [7, 7, 7]
    with pytest.raises(ProcessorError, match="give an infinite logit to draw after 1 tokens"):
        made["mixed"].generate([3], **forced, temperature=1.0)


# --- those that keep state ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"logits_processor": [Counting()]}, "Counting"),
        ({"logits_processor": [Spy(), Alternating()]}, "Alternating"),
        ({"prefix_allowed_tokens_fn": lambda batch, ids: [1]}, "prefix_allowed_tokens_fn"),
        (
            {"watermarking_config": {"ngram_len": 3, "keys": [1, 2]}},
            "sampling.processors.watermarking_config",
        ),
    ],
)
def test_one_that_may_keep_state_is_refused_by_name_where_nodes_are_visited_in_another_order(
    arguments: dict[str, Any], name: str
) -> None:
    model = hashed_model(V, seed=1)
    config = {"target": {"model": "t"}, "verifier": {"kind": "curious_verifiers:Everywhere"}}
    made = build_pipeline(parse_config(config), {"t": model})
    with pytest.raises(ConfigError) as caught:
        made.stream([1, 2, 3], **arguments)
    assert str(caught.value) == (
        f"logits processor {name!r} may keep state from call to call, and verifier 'Everywhere' "
        "does not visit places once and in order: use verifier 'walk', or set stateless = True on "
        "it if its answer depends on its arguments alone"
    )
    assert model.forwards == 0


def test_one_that_says_that_it_keeps_no_state_is_taken_by_every_verifier(
    target: LlamaForCausalLM, near: LlamaForCausalLM
) -> None:
    class Declared(Alternating):
        stateless = True

    def allowed(batch: int, ids: Tensor) -> list[int]:
        return [int(ids[-1] * k + 3) % V for k in range(1, 9)]

    allowed.stateless = True  # type: ignore[attr-defined]
    curious = pipeline(target, near, verifier={"kind": "curious_verifiers:Everywhere"})
    own = LogitsProcessorList([Declared(), TopKLogitsWarper(5)])
    expected = by_transformers(target, PROMPTS[1], logits_processor=own)
    assert curious.generate(PROMPTS[1], logits_processor=own).tokens == expected
    expected = by_transformers(target, PROMPTS[1], prefix_allowed_tokens_fn=allowed)
    assert curious.generate(PROMPTS[1], prefix_allowed_tokens_fn=allowed).tokens == expected
    curious_verifiers.Everywhere.trees.clear()


def test_a_verifier_that_only_says_that_it_keeps_to_the_text_is_caught(
    target: LlamaForCausalLM, near: LlamaForCausalLM
) -> None:
    assert not Verifier.in_text_order
    lying = pipeline(target, near, verifier={"kind": "curious_verifiers:Lying"})
    with pytest.raises(PolicyError) as caught:
        lying.generate(PROMPTS[2], logits_processor=[Counting()])
    assert str(caught.value).startswith(
        "logits processor 'Counting' may keep state, so a verifier must ask about every place of "
        "the text once and in order; it asked about the one after "
    )
    curious_verifiers.Everywhere.trees.clear()


# --- what cannot be used, before any forward ------------------------------------------------------


def two_steps(input_ids: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    return scores


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"logits_processor": [ClassifierFreeGuidanceLogitsProcessor(1.5)]},
            "logits_processor.0 ClassifierFreeGuidanceLogitsProcessor cannot be used: it needs "
            "several rows of logits per text, and a draft tree has one per node",
        ),
        (
            {"guidance_scale": 1.5},
            "sampling.processors: guidance_scale needs a second forward of the target for every "
            "token, which a draft tree does not save; leave it out, or hand an "
            "UnbatchedClassifierFreeGuidanceLogitsProcessor to generate as logits_processor",
        ),
        (
            {"logits_processor": Spy()},
            "logits_processor must be a list of processors, such as a LogitsProcessorList, found "
            "Spy",
        ),
        (
            {"logits_processor": [Spy(), 7]},
            "logits_processor.1 must be called with (input_ids, scores), found int",
        ),
        (
            {"logits_processor": [Spy]},
            "logits_processor.0 must be called with (input_ids, scores), found the class Spy",
        ),
        (
            {"logits_processor": [two_steps]},
            "logits_processor.0 two_steps must be called with (input_ids, scores): missing a "
            "required argument: 'mask'",
        ),
        (
            {"logits_processor": [NoRepeatNGramLogitsProcessor(3)], "no_repeat_ngram_size": 2},
            "logits_processor.0 is a NoRepeatNGramLogitsProcessor, and "
            "sampling.processors.no_repeat_ngram_size asks for one too; keep one of them",
        ),
        (
            {
                "logits_processor": [Spy(), RepetitionPenaltyLogitsProcessor(1.3)],
                "repetition_penalty": 1.1,
            },
            "logits_processor.1 is a RepetitionPenaltyLogitsProcessor, and "
            "sampling.repetition_penalty asks for one too; keep one of them",
        ),
        (
            {
                "logits_processor": [MinNewTokensLengthLogitsProcessor(3, 2, 1)],
                "min_new_tokens": 2,
                "eos": [1],
            },
            "logits_processor.0 is a MinNewTokensLengthLogitsProcessor, and stop.min_new_tokens "
            "asks for one too; keep one of them",
        ),
        (
            {"logits_processor": [Spy()] * 2},
            "logits_processor.1 is the same Spy as one before it; keep it once",
        ),
        (
            {"prefix_allowed_tokens_fn": [1, 2]},
            "prefix_allowed_tokens_fn must be a function of a batch number and ids, found list",
        ),
        (
            {"bad_words_ids": [[3, V]]},
            "sampling.processors.bad_words_ids: ids must be in 0..39, found 40",
        ),
        (
            {"sequence_bias": {(V + 1,): 2.0}},
            "sampling.processors.sequence_bias: ids must be in 0..39, found 41",
        ),
        (
            {"forced_bos_token_id": 99},
            "sampling.processors.forced_bos_token_id: ids must be in 0..39, found 99",
        ),
        (
            {"exponential_decay_length_penalty": (3, 1.2)},
            "sampling.processors.exponential_decay_length_penalty: an end token is needed, which "
            "the model and stop.eos do not have",
        ),
        ({"no_repeat_ngrams": 3}, "unknown option 'no_repeat_ngrams'; known: temperature, top_k, "
         "top_p, min_p, repetition_penalty, seed, processors, max_new_tokens, min_new_tokens, "
         "eos, strings, and those of sampling.processors"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_said_in_one_line_before_any_forward(
    arguments: dict[str, Any], message: str
) -> None:
    model = hashed_model(V, seed=1)
    made = build_pipeline(parse_config({"target": {"model": "t"}}), {"t": model})
    with pytest.raises(ConfigError) as caught:
        made.stream([1, 2, 3], **arguments)
    assert str(caught.value) == message
    assert model.forwards == 0


def test_the_callers_list_and_settings_are_left_alone(made: dict[str, Pipeline]) -> None:
    own = LogitsProcessorList([Spy()])
    settings = {"bad_words_ids": [[1, 2], [3]], "sequence_bias": {(4,): -1}}
    before = copy.deepcopy(settings)
    made["mixed"].generate(PROMPTS[0], logits_processor=own, **settings)
    assert len(own) == 1
    assert settings == before
    assert made["mixed"].config.sampling.processors is None


def test_any_model_may_be_the_target() -> None:
    """Processors need nothing of transformers' models; tables say more per second."""
    target = hashed_model(V, seed=3)
    near = mixed_model(target, hashed_model(V, seed=4), share=0.2)
    config = {
        "target": {"model": "target"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "near"}],
        "builder": {"kind": "layered", "depth": 4, "width": 3, "budget": 15},
        "scheduler": {"kind": "fixed", "calls": ["near", "ngram", "near"]},
        "stop": {"max_new_tokens": 50, "eos": [7]},
    }
    models = {"target": target, "near": near}
    drafted = build_pipeline(parse_config(config), models)
    plain = build_pipeline(
        parse_config({**config, "drafters": [], "scheduler": {"kind": "never"}}), models
    )
    accepted = 0
    for seed in range(10):
        options = {
            "temperature": 0.6,
            "seed": seed,
            "no_repeat_ngram_size": 3,
            "min_length": 20,
            "forced_eos_token_id": 7,
            "typical_p": 0.8,
        }
        result = drafted.generate([1, 2, 3], logits_processor=[Counting()], **options)
        expected = plain.generate([1, 2, 3], logits_processor=[Counting()], **options)
        assert result.tokens == expected.tokens
        accepted += sum(step.n_path for step in result.steps)
    assert accepted > 20
