"""Compiled forwards: the logits of the model's own, no program made while a text is decoded."""

from __future__ import annotations

import gc
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from backends.draft_trees import layout, prefill, random_parents, tree_and_path_logits
from backends.families import VOCAB, build, near_copy, prompt_of
from hypothesis import given
from hypothesis import strategies as st
from table_models import hashed_model
from torch._dynamo.utils import counters

from treegraft.backends.buckets import BUCKETS, bucket_of, pad
from treegraft.backends.graphs import CompiledModel, GraphPlan
from treegraft.backends.hf import HFLanguageModel
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError
from treegraft.core.language_model import ForwardCounts
from treegraft.pipeline import Pipeline, build_pipeline

# No C++ compiler is needed, and a program takes a second.
QUICK = GraphPlan(compiler="eager", n_nodes=5)
FORK = [0, 0, 0, 1, 2, 2, 3]


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def target() -> HFLanguageModel:
    return HFLanguageModel(build("llama", dtype=torch.float64), name="target")


@pytest.fixture(scope="module")
def near() -> HFLanguageModel:
    copy = near_copy("llama", dtype=torch.float64, num_hidden_layers=1)
    return HFLanguageModel(copy, name="near")


@pytest.fixture(scope="module")
def compiled(target: HFLanguageModel) -> CompiledModel:
    return CompiledModel(target, QUICK)


@pytest.fixture(scope="module")
def small() -> HFLanguageModel:
    """One layer: its programs are made in a second."""
    return HFLanguageModel(build("llama", dtype=torch.float64, num_hidden_layers=1), name="small")


@pytest.fixture(autouse=True)
def process_is_left_alone() -> Iterator[None]:
    """Fail a test after which threads or dynamo's settings are not what they were."""
    threads, settings = torch.get_num_threads(), torch._dynamo.config.get_config_copy()
    yield
    assert torch.get_num_threads() == threads
    assert torch._dynamo.config.get_config_copy() == settings


def pipeline(models: dict[str, Any], **backend: Any) -> Pipeline:
    config = {
        "target": {"model": "target"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "near"}],
        "builder": {"kind": "layered", "depth": 3, "width": 3, "budget": 12},
        "scheduler": {"kind": "fixed", "calls": ["near", "ngram", "near"]},
        "stop": {"eos": []},
        "backend": {"dtype": "float64", **backend},
    }
    return build_pipeline(parse_config(config), models=models)


def n_programs() -> int:
    return int(counters["stats"]["unique_graphs"])


# The story: the same tree, the same logits, and all of it compiled.


def test_a_compiled_model_reads_a_tree_as_the_model_does(
    target: HFLanguageModel, compiled: CompiledModel
) -> None:
    before = replace(compiled.forward_counts)
    own, _ = tree_and_path_logits(target, 9, FORK, dice())
    tree, paths = tree_and_path_logits(compiled, 9, FORK, dice())
    assert torch.allclose(tree, own, rtol=0, atol=1e-12)
    assert torch.allclose(tree, paths, rtol=0, atol=1e-12)
    counted = compiled.forward_counts.since(before)
    assert counted.compiled > 1
    assert counted == ForwardCounts(compiled=counted.compiled)


def test_a_pipeline_with_compiled_forwards_gives_the_same_tokens_and_makes_no_program(
    small: HFLanguageModel, near: HFLanguageModel
) -> None:
    models = {"target": small, "near": near}
    plain = pipeline(models)
    made = pipeline(models, compile="on", compiler="eager")
    n_made = n_programs()
    for length, n_new in ((3, 40), (90, 24), (7, 150)):  # caches grow in between
        prompt = prompt_of(length)
        expected = plain.generate(prompt, max_new_tokens=n_new)
        found = made.generate(prompt, max_new_tokens=n_new)
        assert found.tokens == expected.tokens
        assert set(found.forwards) == {"target", "near"}
        for counts in found.forwards.values():
            assert counts.compiled > 0
            assert counts.outside == 0
        assert not expected.forwards
    assert n_programs() == n_made
    assert len(made.compiled) == 2
    assert not plain.compiled


def test_the_end_of_a_text_that_fills_its_cache_is_read_by_the_program_too(
    small: HFLanguageModel,
) -> None:
    """Spans of a whole slab met a guard on strides: the last step of a text ran eagerly, slowly."""
    made = CompiledModel(small, GraphPlan(compiler="aot_eager", n_nodes=5))
    for n_rows in (32, 41, 160):
        slab, own = made.new_cache(n_rows), small.new_cache(n_rows)
        before = replace(made.forward_counts)
        for first, end in ((0, n_rows - 6), (n_rows - 6, n_rows - 1), (n_rows - 1, n_rows)):
            places = torch.arange(first, end)
            visible = torch.arange(end)[None, :] <= places[:, None]
            given = (places % VOCAB, places, places, visible)
            assert torch.allclose(made.forward(slab, *given), small.forward(own, *given))
        assert made.forward_counts.since(before) == ForwardCounts(compiled=3)


# Padding


@given(data=st.data())
def test_the_logits_are_the_same_in_every_bucket_that_fits(
    target: HFLanguageModel, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, 40))
    n_prefix = data.draw(st.integers(1, 80))
    parents = random_parents(n, dice(n))
    text = torch.randint(0, VOCAB, (n_prefix + n,), generator=dice(n_prefix))
    given_ = (text[n_prefix:], *layout(parents, n_prefix))
    slab = target.new_cache(128, n_spare=BUCKETS[-1])
    prefill(target, slab, text[:n_prefix])
    expected = target.forward(slab, *given_)
    size = data.draw(st.sampled_from([b for b in BUCKETS if n <= b <= 64]))
    reach = data.draw(st.integers(n_prefix + n, 128))
    padded = pad(slab, *given_, (size, reach))
    assert [len(each) for each in padded] == [size] * 4
    found = target.forward(slab, *padded)
    assert found.shape[0] == size
    assert torch.allclose(found[:n], expected, rtol=0, atol=1e-12)
    # What the padding wrote is seen by nobody: the tree's next reading is the same.
    assert torch.equal(target.forward(slab, *given_), expected)


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_windows_and_chunks_hide_the_padding_as_well(name: str) -> None:
    model = HFLanguageModel(build(name, dtype=torch.float64))
    slab = model.new_cache(64, n_spare=16)
    text = torch.randint(0, VOCAB, (27,), generator=dice())
    prefill(model, slab, text[:20])
    given_ = (text[20:], *layout(FORK, 20))
    expected = model.forward(slab, *given_)
    found = model.forward(slab, *pad(slab, *given_, (16, 64)))[: len(FORK)]
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)


def test_a_grown_cache_does_not_take_over_what_padding_wrote(target: HFLanguageModel) -> None:
    old = target.new_cache(32, n_spare=8)
    spare = torch.arange(old.first_spare, old.first_spare + 1)
    zero = torch.zeros(2, dtype=torch.int64)
    seen = torch.ones(2, 1, dtype=torch.bool)
    target.forward(old, zero, torch.cat([zero[:1], spare]), zero, seen)
    new = target.new_cache(128, old, n_spare=8)
    stores = [store for store, axis in new._stores() if axis == 3]
    assert all(bool((store[:, :, :, 0] != 0).any()) for store in stores)
    assert all(not bool(store[:, :, :, 1:].any()) for store in stores)


def test_rows_between_span_and_spare_are_still_refused(target: HFLanguageModel) -> None:
    slab = target.new_cache(32, n_spare=8)
    with pytest.raises(Exception, match="every row written must be among those read"):
        slab.aim_(torch.tensor([3, 20]), torch.tensor([3, 20]), 16)


def test_buckets_change_no_token_and_what_fits_none_is_counted(
    small: HFLanguageModel, near: HFLanguageModel
) -> None:
    bucketed = CompiledModel(small, replace(QUICK, buckets=True))
    prompt = prompt_of(300)  # longer than the widest bucket: its prefill is outside
    expected = pipeline({"target": small, "near": near}).generate(prompt, max_new_tokens=30)
    found = pipeline({"target": bucketed, "near": near}).generate(prompt, max_new_tokens=30)
    assert found.tokens == expected.tokens
    assert found.forwards["target"].outside == 1
    assert found.forwards["target"].compiled == len(found.steps)
    assert found.statistics.as_dict()["forwards"]["target"]["outside"] == 1


def test_a_bucket_is_the_smallest_that_holds_queries_and_span() -> None:
    assert bucket_of(1, 200, 1000) == (1, 256)
    assert bucket_of(9, 257, 1000) == (16, 512)
    assert bucket_of(64, 1000, 1000) == (64, 1000)  # not the next power of two
    assert bucket_of(257, 300, 1000) is None


# What does not fit, and whose fault it is.


def test_another_number_of_threads_runs_eagerly_and_is_counted(
    target: HFLanguageModel, compiled: CompiledModel
) -> None:
    threads = torch.get_num_threads()
    before, n_made = replace(compiled.forward_counts), n_programs()
    try:
        torch.set_num_threads(threads + 1)
        found, _ = tree_and_path_logits(compiled, 5, FORK, dice())
        expected, _ = tree_and_path_logits(target, 5, FORK, dice())
    finally:
        torch.set_num_threads(threads)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    counted = compiled.forward_counts.since(before)
    assert counted.outside > 0
    assert counted.compiled == 0
    assert n_programs() == n_made


def test_weights_that_change_after_warm_up_are_read_anew(small: HFLanguageModel) -> None:
    """Most guards are left out of a program; what they would have seen must not be weights."""
    compiled = CompiledModel(small, QUICK)
    weight = small.model.get_output_embeddings().weight
    held = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(-1.5)
        found, _ = tree_and_path_logits(compiled, 5, FORK, dice())
        expected, _ = tree_and_path_logits(small, 5, FORK, dice())
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
        weight.data = weight.detach() / 3  # other memory
        found, _ = tree_and_path_logits(compiled, 5, FORK, dice())
        assert torch.allclose(found, expected / 3, rtol=0, atol=1e-12)
    finally:
        weight.data = held
    assert compiled.forward_counts.outside == 0


def failing(graph: Any, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("no compiler here\nand more")


def slow(graph: Any, inputs: Any) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        time.sleep(0.05)
        return graph(*arguments)

    return run


def wrong(graph: Any, inputs: Any) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        return tuple(-each if each.is_floating_point() else each for each in graph(*arguments))

    return run


def plan_with(compiler: Any, **changes: Any) -> GraphPlan:
    return replace(QUICK, compiler=compiler, **changes)


@pytest.mark.parametrize("compiler", [failing, wrong])
def test_on_raises_one_line_where_no_sound_program_can_be_made(
    small: HFLanguageModel, compiler: Any
) -> None:
    with pytest.raises(ConfigError, match=r"backend\.compile 'on' cannot compile 'small'") as fault:
        CompiledModel(small, plan_with(compiler))
    assert "\n" not in str(fault.value)
    tree, paths = tree_and_path_logits(small, 9, FORK, dice())  # the model is as it was
    assert torch.allclose(tree, paths, rtol=0, atol=1e-12)


def test_auto_says_what_failed_and_takes_the_next_compiler(small: HFLanguageModel) -> None:
    made = CompiledModel(small, plan_with(failing, mode="auto"))
    assert made.graphs.compiler == "eager"
    (said,) = made.graphs.notes
    assert "no compiler here" in said
    assert said in str(made.graphs)
    assert "\n" not in str(made.graphs)


def test_auto_stays_eager_where_programs_are_slower_and_says_so(small: HFLanguageModel) -> None:
    made = CompiledModel(small, plan_with(slow, mode="auto"))
    assert [choice.compiled for choice in made.graphs.choices] == [False, False]
    assert str(made.graphs).count(": eager (") == 2
    tree_and_path_logits(made, 9, FORK, dice())
    assert made.forward_counts.eager > 0
    assert made.forward_counts == ForwardCounts(eager=made.forward_counts.eager)


def test_on_compiles_also_where_programs_are_slower_and_tells_how_far_it_is(
    small: HFLanguageModel,
) -> None:
    told: list[tuple[int, int]] = []
    made = CompiledModel(small, plan_with(slow), lambda *pieces: told.append(pieces))
    assert [choice.compiled for choice in made.graphs.choices] == [True, True]
    assert told == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("name", ["gemma3", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_other_families_are_compiled_with_their_masks(name: str) -> None:
    model = HFLanguageModel(build(name, dtype=torch.float64))
    made = CompiledModel(model, QUICK)
    found, _ = tree_and_path_logits(made, 13, [0] * 21, dice(1))
    expected, _ = tree_and_path_logits(model, 13, [0] * 21, dice(1))
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)
    assert made.forward_counts.outside == 0


def test_a_model_of_ones_own_cannot_be_compiled_and_auto_says_so() -> None:
    models = {"target": hashed_model(8, 1), "near": hashed_model(8, 2)}
    with pytest.raises(ConfigError, match="compiles models of transformers, found TableModel"):
        pipeline(models, compile="on")
    made = pipeline(models, compile="auto")
    assert [line.split(":")[0] for line in made.compiled] == ["target", "near"]
    assert all("eager" in line for line in made.compiled)


def test_yaml_reads_on_and_off_as_switches() -> None:
    for given_, meant in ((True, "on"), (False, "off"), ("auto", "auto")):
        config = {"target": {"model": "m"}, "backend": {"compile": given_}}
        assert parse_config(config).backend.compile == meant
    with pytest.raises(ConfigError, match=r"backend\.compile"):
        parse_config({"target": {"model": "m"}, "backend": {"compile": "maybe"}})


# Longer: many models, memory, and the real compiler.


@pytest.mark.slow
def test_many_models_of_one_process_do_not_share_a_limit_on_programs() -> None:
    for seed in range(10):
        model = HFLanguageModel(build("llama", seed=seed, num_hidden_layers=1), self_test=False)
        made = CompiledModel(model, QUICK)
        tree_and_path_logits(made, 5, FORK, dice())
        assert made.forward_counts.outside == 0


@pytest.mark.slow
def test_memory_is_flat_over_a_thousand_steps(
    target: HFLanguageModel, near: HFLanguageModel
) -> None:
    made = pipeline({"target": target, "near": near}, compile="on", compiler="eager")

    def tensors() -> int:
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    n_steps, counted = 0, []
    while n_steps < 1200:
        result = made.generate(prompt_of(20), max_new_tokens=200)
        n_steps += len(result.steps)
        del result
        counted.append(tensors())
    assert counted[-1] <= counted[1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_logits() -> None:
    model = HFLanguageModel(build("llama", num_hidden_layers=1), name="target")
    made = CompiledModel(model, replace(QUICK, compiler="inductor"))
    found, _ = tree_and_path_logits(made, 9, FORK, dice())
    expected, _ = tree_and_path_logits(model, 9, FORK, dice())
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)
    assert made.forward_counts.outside == 0


def test_hidden_states_of_a_compiled_target_are_the_models_own(
    target: HFLanguageModel, compiled: CompiledModel
) -> None:
    tokens, places = torch.tensor([3, 1, 4]), torch.arange(3)
    visible = torch.ones(3, 3, dtype=torch.bool).tril()
    before = compiled.forward_counts.outside
    found = compiled.forward_hidden(compiled.new_cache(8), tokens, places, places, visible)
    expected = target.forward_hidden(target.new_cache(8), tokens, places, places, visible)
    assert compiled.hidden_size == target.hidden_size == found[1].shape[1]
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert compiled.forward_counts.outside == before + 1
