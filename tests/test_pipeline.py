"""Law 1 end to end on table models: drafting changes the time, never the tokens.

Single stories, limits and edges; ``test_every_configuration.py`` draws whatever can be combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from table_models import TableModel, hashed_model, mixed_model
from toy_tokenizers import PieceTokenizer

from treegraft.backends.reference import plain_tokens
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError, PromptError
from treegraft.core.sampling import Sampling
from treegraft.core.stats import Statistics
from treegraft.pipeline import Pipeline, build_pipeline

V = 8
# It looks six tokens back, so that its greedy text does not fall into a loop at once.
TARGET = hashed_model(V, seed=1, order=6)
MODELS = {
    "target": TARGET,
    "near": mixed_model(TARGET, hashed_model(V, seed=2), 0.3),
    "far": hashed_model(V, seed=3),
}
NGRAM = {"kind": "ngram"}
SUFFIX = {"kind": "suffix"}
RECYCLE = {"kind": "recycle"}
NEAR = {"kind": "lm", "model": "near"}
FAR = {"kind": "lm", "model": "far"}
SELF = {"kind": "lm", "model": "target", "name": "self"}


def pipeline(*drafters: dict[str, Any], models: Any = None, **options: Any) -> Pipeline:
    config = {"target": {"model": "target"}, "drafters": list(drafters), **options}
    return build_pipeline(parse_config(config), models=models or MODELS)


def plain(prompt: Sequence[int], n: int, model: TableModel = TARGET, **sampling: Any) -> list[int]:
    return plain_tokens(lambda text: model.logits(text).float(), prompt, n, Sampling(**sampling))


def layered(depth: int = 5, width: int = 3, budget: int = 20) -> dict[str, Any]:
    return {"kind": "layered", "depth": depth, "width": width, "budget": budget}


# --- the story ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"lookback": 0}, {"revisit": False}])
def test_accepts_all_when_the_target_drafts_for_itself(options: dict[str, Any]) -> None:
    """A greedy chain of the target's own guesses is taken whole: depth + 1 tokens a step."""
    made = pipeline(
        SELF,
        builder=layered(depth=4, width=1),
        # Otherwise the one position of each layer would be the root: none is likelier.
        graft={"kind": "treegraft", **options},
        scheduler={"kind": "always"},
    )
    result = made.generate([1, 2, 3], max_new_tokens=50)
    assert result.tokens == plain([1, 2, 3], 50)
    assert [step.n_new for step in result.steps] == [5] * 10
    assert all(step.kept == step.drafted == (4,) for step in result.steps)
    assert sum(step.accepted[0] for step in result.steps) == 40
    assert result.statistics.mean_accepted_length == 5.0
    assert result.statistics.acceptance_by_depth == (1.0,) * 4


def test_rejects_all_when_the_drafter_is_always_wrong() -> None:
    made = pipeline(
        {
            "kind": "adversarial_drafters:AlwaysWrong",
            "params": {"seed": 1, "vocab_size": V, "order": 6},
        },
        builder=layered(depth=2, width=3),
    )
    result = made.generate([1, 2, 3], max_new_tokens=20)
    assert result.tokens == plain([1, 2, 3], 20)
    assert [step.n_new for step in result.steps] == [1] * 20
    assert all(step.n_path == 0 for step in result.steps)


def test_accepts_some_when_the_drafter_is_near() -> None:
    sampling = {"temperature": 1.0, "seed": 1}
    made = pipeline(NGRAM, NEAR, builder=layered(), scheduler={"kind": "always"}, sampling=sampling)
    result = made.generate([1, 2, 3], max_new_tokens=60)
    assert result.tokens == plain([1, 2, 3], 60, **sampling)
    assert 10 < len(result.steps) < 50


def test_plain_decoding_is_a_pipeline_without_drafters() -> None:
    result = pipeline().generate([1, 2, 3], max_new_tokens=20)
    assert result.tokens == plain([1, 2, 3], 20)
    assert all((step.n_new, step.n_tree, step.calls) == (1, 1, ()) for step in result.steps)


def test_a_seed_gives_the_same_text_with_and_without_drafting() -> None:
    texts = set()
    for seed in range(5):
        sampling = {"temperature": 0.9, "seed": seed}
        expected = plain([1, 2, 3], 40, **sampling)
        for drafters in ((), (NGRAM,), (SUFFIX,), (RECYCLE,), (NGRAM, FAR), (SELF,)):
            for kind in ("never", "always"):
                made = pipeline(*drafters, sampling=sampling, scheduler={"kind": kind})
                assert made.generate([1, 2, 3], max_new_tokens=40).tokens == expected
        texts.add(tuple(expected))
    assert len(texts) == 5


def test_a_mixed_schedule_lets_drafters_share_one_tree() -> None:
    made = pipeline(
        NGRAM,
        NEAR,
        builder=layered(depth=3),
        scheduler={"kind": "fixed", "calls": ["ngram", "near", "ngram"]},
    )
    result = made.generate([1, 2, 3, 1, 2, 3], max_new_tokens=60)
    assert result.tokens == plain([1, 2, 3, 1, 2, 3], 60)
    assert {step.calls for step in result.steps[:-3]} == {(0, 1, 0)}
    statistics = result.statistics
    assert min(statistics.kept) > 0
    assert statistics.calls_by_layer[1] == (0, statistics.calls[1])


def test_a_layer_that_found_nothing_leaves_the_frontier_to_the_next_drafter() -> None:
    calls = ["ngram", "near", "ngram", "near"]
    made = pipeline(NGRAM, NEAR, builder=layered(), scheduler={"kind": "fixed", "calls": calls})
    first = next(made.stream([1])).step
    assert first.calls == (0, 1, 0, 1)
    # Nothing follows the only token of the text: the look-ups are empty-handed.
    assert first.drafted[0] == 0
    assert first.drafted[1] > 3


def test_one_pipeline_decodes_many_texts() -> None:
    """Caches grow and are used again; nothing of an earlier text is seen by a later one."""
    made = pipeline(NGRAM, NEAR, scheduler={"kind": "always"})
    for prompt, n in (([1], 5), ([1, 2, 3] * 20, 40), ([4, 5], 30), ([1], 5)):
        assert made.generate(prompt, max_new_tokens=n).tokens == plain(prompt, n)


def test_what_drafters_keep_of_earlier_texts_changes_the_time_and_no_token() -> None:
    kept = ({**SUFFIX, "store_tokens": 200}, {**RECYCLE, "keep": True})
    for drafter in kept:
        for temperature in (0.0, 1.0):
            sampling = {"temperature": temperature, "seed": 5}
            made = pipeline(drafter, builder=layered(depth=3), sampling=sampling)
            runs = [made.generate([1, 2, 3], max_new_tokens=60) for _ in range(2)]
            expected = plain([1, 2, 3], 60, **sampling)
            assert [run.tokens for run in runs] == [expected] * 2
            assert runs[0].steps[0].drafted == (0,), "nothing is known of the last token"
            assert runs[1].steps[0].drafted > (0,), "the second text starts warm"


@pytest.mark.parametrize("drafter", [NGRAM, SUFFIX, RECYCLE])
def test_a_look_up_that_keeps_nothing_drafts_a_text_again_just_so(drafter: dict[str, Any]) -> None:
    made = pipeline(drafter, builder=layered())
    runs = []
    for prompt in ([1, 2, 3], [4, 5, 4], [1, 2, 3]):
        steps = made.generate(prompt, max_new_tokens=40).steps
        runs.append([(step.n_new, step.n_tree, step.drafted, step.kept) for step in steps])
    assert runs[0] == runs[2]


@pytest.mark.parametrize("drafter", [NGRAM, SUFFIX, {**RECYCLE, "levels": 4}])
def test_a_look_up_gets_a_looping_text_accepted(drafter: dict[str, Any]) -> None:
    """A target that looks at one token falls into a loop, which every look-up draws out."""
    target = hashed_model(V, seed=1, order=1)
    made = pipeline(drafter, models={"target": target}, builder=layered(depth=4))
    result = made.generate([1, 2, 3], max_new_tokens=60)
    assert result.tokens == plain([1, 2, 3], 60, target)
    assert len(result.steps) < 24


# --- limits of the target -------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("n_prompt", [1, 2, 28, 29])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 50])
def test_every_length_up_to_the_context_limit(
    temperature: float, n_prompt: int, max_new_tokens: int
) -> None:
    target = hashed_model(V, seed=1, order=6)
    target.max_positions = 30
    made = pipeline(
        NGRAM, SELF, models={"target": target}, scheduler={"kind": "always"}, builder=layered()
    )
    prompt = [i % V for i in range(n_prompt)]
    options = {"temperature": temperature, "seed": 4}
    result = made.generate(prompt, max_new_tokens=max_new_tokens, **options)
    n = min(max_new_tokens, 30 - n_prompt)
    assert result.tokens == plain(prompt, n, **options)
    assert result.finish_reason == ("length" if n == max_new_tokens else "context_limit")


# --- what a drafter is told -----------------------------------------------------------------------


def test_a_drafter_can_see_the_target_behind_rejected_nodes_too() -> None:
    """Every node of the verified tree, with the distribution given that node's own path."""
    vocab = 3
    target = hashed_model(vocab, seed=1)
    params = {"target_top": 2, "vocab_size": vocab, "tree_top": True}
    made = pipeline(
        {"kind": "adversarial_drafters:Recorder", "params": params},
        models={"target": target},
        builder=layered(depth=2, width=9, budget=999),
        sampling={"temperature": 1.0},
    )
    text = [1, 2]
    made.generate(text, max_new_tokens=11)
    recorder = made._parts.drafters[0]._drafter  # type: ignore[attr-defined]
    assert len(recorder.commits) == 3
    for commit, paths in zip(recorder.commits, recorder.paths[1::2], strict=False):
        top = commit.tree_top
        assert top.tokens.shape == top.logprobs.shape == (len(paths), 2)
        assert len(paths) == 1 + 3 + 9
        for i, path in enumerate(paths):
            assert int(top.token[i]) == (text + path)[-1]
            expected = target.logits(text + path).log_softmax(-1).topk(2)
            assert top.tokens[i].tolist() == expected.indices.tolist()
            torch.testing.assert_close(top.logprobs[i], expected.values)
        text += commit.tokens


@pytest.mark.parametrize("target_top", [None, 0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_is_told_the_text_the_path_and_the_target(
    target_top: int | None, temperature: float
) -> None:
    """Every token, its node, and the target's raw distribution at its place; settings left out."""
    vocab = 4
    target = hashed_model(vocab, seed=1)
    params = {"target_top": target_top, "vocab_size": vocab}
    made = pipeline(
        {"kind": "adversarial_drafters:Recorder", "params": params},
        models={"target": target},
        builder=layered(depth=2, width=9, budget=999),
        sampling={"temperature": temperature, "repetition_penalty": 1.5},
    )
    prompt = [1, 2, 3, 1]
    result = made.generate(prompt, max_new_tokens=11)
    recorder = made._parts.drafters[0]._drafter  # type: ignore[attr-defined]
    (context,) = recorder.contexts
    assert (context.tokens, context.vocab_size) == (tuple(prompt), vocab)
    assert context.capacity == len(prompt) + 11
    text = list(prompt)
    places = [(context.top, text[1:], 1)]
    for commit, paths in zip(recorder.commits, recorder.paths[1::2], strict=False):
        assert len(commit.path) == len(commit.tokens) - 1 == 2
        for j, node in enumerate(commit.path):
            assert paths[node] == list(commit.tokens[: j + 1])
        assert commit.tree_top is None, "nobody asked"
        places.append((commit.top, list(commit.tokens), len(text)))
        text += commit.tokens
    # The last step ends the text, and nobody is told.
    assert text == (prompt + result.tokens)[: len(text)]
    assert len(recorder.commits) == len(result.steps) - 1 == 3
    full = prompt + result.tokens
    for top, tokens, start in places:
        if target_top is None:
            assert top is None
            continue
        assert top is not None
        assert top.tokens.shape == top.logprobs.shape == (len(tokens), target_top)
        for j, token in enumerate(tokens):
            logp = target.logits(full[: start + j]).log_softmax(-1)
            assert float(top.chosen[j]) == pytest.approx(float(logp[token]))
            expected = logp.topk(target_top)
            assert top.tokens[j].tolist() == expected.indices.tolist()
            torch.testing.assert_close(top.logprobs[j], expected.values)


def test_the_largest_wish_for_top_tokens_is_served_up_to_the_vocabulary() -> None:
    wishes = [
        {
            "kind": "adversarial_drafters:Recorder",
            "params": {"target_top": wish, "vocab_size": V},
            "name": f"w{wish}",
        }
        for wish in (None, 0, 99)
    ]
    made = pipeline(*wishes, builder=layered(depth=1, width=V))
    made.generate([1, 2], max_new_tokens=5)
    for drafter in made._parts.drafters:
        assert drafter._drafter.contexts[0].top.tokens.shape == (1, V)  # type: ignore[attr-defined]


def test_a_drafter_may_be_called_like_a_stage_of_the_clock() -> None:
    """Its seconds are its own, and the target's stay the target's."""
    made = pipeline({"kind": "ngram", "name": "target"}, {"kind": "ngram", "name": "host"})
    statistics = made.generate([1, 2, 1, 2], max_new_tokens=10).statistics
    assert set(statistics.drafter_seconds) == {"target", "host"}
    assert statistics.drafter_seconds["target"] > 0
    assert statistics.drafter_seconds["target"] != statistics.seconds["target"]


# --- limits of a drafter --------------------------------------------------------------------------


def test_a_drafter_past_its_context_hands_over_to_the_cheaper_one() -> None:
    short = mixed_model(TARGET, hashed_model(V, seed=2), 0.2)
    short.max_positions = 12
    models = {"target": TARGET, "short": short}
    made = pipeline(
        NGRAM, {"kind": "lm", "model": "short"}, models=models, scheduler={"kind": "always"}
    )
    result = made.generate([1, 2, 3, 1, 2, 3], max_new_tokens=40)
    assert result.tokens == plain([1, 2, 3, 1, 2, 3], 40)
    assert 1 in result.steps[0].calls
    assert set(result.steps[-2].calls) == {0}
    assert result.notices == (
        "drafter 'short' is left out where text and draft tree pass its context limit of 12 tokens",
    )


@pytest.mark.parametrize("backend", ["tensor", "reference"])
@pytest.mark.parametrize("n_prompt", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 3])
def test_a_drafter_is_used_up_to_its_limit_and_never_past(
    n_prompt: int, width: int, backend: str
) -> None:
    """The table refuses a position past its limit; before it the drafter must not give up."""
    prompt = [1, 2, 3, 1, 2][:n_prompt]
    for limit in range(1, 14):
        short = TableModel(TARGET.logits, V, name="short", max_positions=limit)
        made = pipeline(
            NGRAM,
            {"kind": "lm", "model": "short"},
            models={"target": TARGET, "short": short},
            builder=layered(depth=4, width=width),
            scheduler={"kind": "fixed", "calls": [1, 0, 1, 1]},
            backend={"kind": backend},
        )
        result = made.generate(prompt, max_new_tokens=16)
        assert result.tokens == plain(prompt, 16)
        n_text = n_prompt
        for step in result.steps[:-1]:
            assert (step.calls[:1] == (1,)) == (n_text <= limit)
            n_text += step.n_new


def test_a_lone_drafter_past_its_context_leaves_plain_decoding() -> None:
    short = hashed_model(V, seed=2)
    short.max_positions = 3
    models = {"target": TARGET, "short": short}
    made = pipeline({"kind": "lm", "model": "short"}, models=models)
    result = made.generate([1, 2, 3, 4], max_new_tokens=10)
    assert result.tokens == plain([1, 2, 3, 4], 10)
    assert all(step.calls == () for step in result.steps)


@pytest.mark.parametrize("drafter_vocab", [3, V - 1, V + 5])
def test_padding_rows_on_either_side_change_nothing(
    drafter_vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter with fewer or more ids than the target (one tokenizer, another matrix size)."""
    monkeypatch.setattr("treegraft.loading.Loader.check_vocabularies", lambda *_: None)
    models = {"target": TARGET, "odd": hashed_model(drafter_vocab, seed=3)}
    for temperature in (0.0, 1.0):
        made = pipeline(
            NGRAM,
            {"kind": "lm", "model": "odd"},
            models=models,
            builder=layered(depth=3, width=4),
            scheduler={"kind": "fixed", "calls": [1, 0, 1]},
        )
        result = made.generate([1, 7, 3, 7], max_new_tokens=30, temperature=temperature)
        assert result.tokens == plain([1, 7, 3, 7], 30, temperature=temperature)


def test_unequal_vocabularies_are_refused_before_any_forward() -> None:
    from treegraft.core.errors import UnsupportedModelError

    models = {"target": hashed_model(V, seed=1), "odd": hashed_model(V + 1, seed=3)}
    with pytest.raises(UnsupportedModelError) as caught:
        pipeline({"kind": "lm", "model": "odd"}, models=models)
    assert "'odd'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert models["target"].forwards == models["odd"].forwards == 0


# --- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("builder", [layered(depth=0), layered(budget=0)])
def test_a_tree_without_layers_or_budget_is_plain_decoding(builder: dict[str, Any]) -> None:
    result = pipeline(NGRAM, NEAR, builder=builder).generate([1, 2, 1, 2], max_new_tokens=9)
    assert result.tokens == plain([1, 2, 1, 2], 9)
    assert all(step.n_tree == 1 for step in result.steps)


def test_an_empty_eos_list_switches_the_models_own_off() -> None:
    made = pipeline(stop={"eos": [], "max_new_tokens": 30})
    made._eos = (plain([1], 30)[3],)  # as a checkpoint's generation settings would bring it
    assert len(made.generate([1]).tokens) == 30
    assert made.generate([1], eos=None).finish_reason == "eos"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty; it needs at least one token"),
        ([1, V], f"prompt ids must be in 0..{V - 1}, found {V}"),
        ([-1], f"prompt ids must be in 0..{V - 1}, found -1"),
        (
            [1] * 30,
            "the prompt has 30 tokens, the context of 'hashed-1' ends at 30; at most 29 leave room "
            "for a new one",
        ),
    ],
)
def test_a_bad_prompt_is_refused_before_any_forward(prompt: list[int], message: str) -> None:
    target = hashed_model(V, seed=1)
    target.max_positions = 30
    made = pipeline(NGRAM, models={"target": target})
    with pytest.raises(PromptError) as caught:
        made.stream(prompt)  # at the call, not at the first chunk
    assert str(caught.value) == message
    assert target.forwards == 0


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ([1.7], "list"),
        (["1"], "list"),
        ({"input_ids": [1]}, "dict"),
        (torch.tensor([[1, 2]]), "Tensor"),
    ],
)
def test_a_prompt_of_something_else_is_one_line_and_not_a_type_error(
    prompt: Any, kind: str
) -> None:
    with pytest.raises(PromptError) as caught:
        pipeline().stream(prompt)
    assert str(caught.value) == (
        f"a prompt must be text or a flat list of token ids, found {kind} of something else"
    )


def test_text_and_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(PromptError, match=r"^a text prompt needs a tokenizer, found none"):
        pipeline().stream("abc")
    with pytest.raises(PromptError, match=r"^stop.strings need a tokenizer, found none"):
        pipeline().stream([1], strings=["x"])


def test_an_eos_id_out_of_range_is_refused_and_not_an_index_error() -> None:
    with pytest.raises(ConfigError) as caught:
        pipeline(NGRAM).stream([1], eos=[2, 999], min_new_tokens=3)
    assert str(caught.value) == f"stop.eos ids must be in 0..{V - 1}, found 999"


def test_prompts_may_be_tensors_and_arrays() -> None:
    expected = plain([1, 2, 3], 5)
    for prompt in (torch.tensor([1, 2, 3]), (1, 2, 3), torch.tensor([1, 2, 3]).numpy()):
        assert pipeline().generate(prompt, max_new_tokens=5).tokens == expected


def test_a_text_prompt_goes_through_the_tokenizer() -> None:
    config = parse_config({"target": {"model": "target"}, "drafters": [NGRAM]})
    tokenizer = PieceTokenizer(["a", "b", "ab", "c", " ", "", "ba", "é"])
    made = build_pipeline(config, MODELS, tokenizer)
    result = made.generate("abc", max_new_tokens=6)
    assert result.n_prompt == 2  # "ab", "c"
    assert result.tokens == plain([2, 3], 6)
    assert result.text == tokenizer.decode(result.tokens, skip_special_tokens=True)


def test_statistics_add_up_over_texts() -> None:
    made = pipeline(NGRAM, NEAR, scheduler={"kind": "always"})
    results = [made.generate([i], max_new_tokens=10) for i in range(3)]
    both = Statistics.of(results)
    assert both.new_tokens == 30
    assert both.target_calls == sum(len(result.steps) for result in results)
    assert both.mean_accepted_length == 30 / both.target_calls
    assert both.total_seconds == pytest.approx(sum(r.statistics.total_seconds for r in results))
    with pytest.raises(ValueError, match="only over texts of the same drafters"):
        Statistics.of([results[0], pipeline().generate([1], max_new_tokens=1)])


def test_a_prompt_longer_than_a_chunk_of_prefill() -> None:
    prompt = [(i * i + i // 7) % V for i in range(1100)]
    made = pipeline(NGRAM, NEAR, scheduler={"kind": "always"}, builder=layered(depth=3))
    assert made.generate(prompt, max_new_tokens=12).tokens == plain(prompt, 12)


def test_an_option_called_texts_was_taken_for_one_of_our_own() -> None:
    made = pipeline()
    with pytest.raises(ConfigError, match="unknown option 'texts'"):
        made.generate([1, 2], texts=True)


def test_gradients_stayed_off_where_the_default_device_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such device")

    made = pipeline()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fails)
        with pytest.raises(RuntimeError, match="no such device"):
            made.generate([1, 2], max_new_tokens=2)
    assert torch.is_grad_enabled()
