"""Forwards compiled ahead of time: libraries without weights, found again on disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.draft_trees import tree_and_path_logits
from backends.families import VOCAB, build, near_copy, prompt_of
from torch import nn

from treegraft.backends import aot
from treegraft.backends.graphs import CompiledModel, GraphPlan
from treegraft.backends.hf import HFLanguageModel
from treegraft.backends.library import StateWatch, cache_folder, kept, library_key
from treegraft.backends.programs import PROMPT
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError
from treegraft.core.language_model import ForwardCounts
from treegraft.pipeline import build_pipeline

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

AHEAD = GraphPlan(compiler="aot", n_nodes=5)
ROOT = (Path(__file__).parents[2], Path(__file__).parents[1])
FORK = [0, 0, 0, 1, 2, 2, 3]
# Models compute norms and rotary angles in float32 whatever the type of their weights.
NEAR = 1e-5


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny(seed: int = 0) -> HFLanguageModel:
    # Its norms of queries and keys have weights of eight numbers.
    model = build("qwen3", seed=seed, dtype=torch.float64, num_hidden_layers=1)
    return HFLanguageModel(model, name="tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the tests' own, as the user's must not be touched."""
    path = tmp_path_factory.mktemp("libraries")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEGRAFT_CACHE_DIR", str(path))
        yield path


@pytest.fixture(scope="module")
def model() -> HFLanguageModel:
    return tiny()


@pytest.fixture(scope="module")
def compiled(model: HFLanguageModel, folder: Path) -> CompiledModel:
    return CompiledModel(model, AHEAD)


def test_a_tree_is_read_as_the_model_reads_it_and_nothing_runs_outside(
    model: HFLanguageModel, compiled: CompiledModel
) -> None:
    before = replace(compiled.forward_counts)
    own, _ = tree_and_path_logits(model, 9, FORK, dice())
    tree, paths = tree_and_path_logits(compiled, 9, FORK, dice())
    assert torch.allclose(tree, own, rtol=0, atol=NEAR)
    assert torch.allclose(tree, paths, rtol=0, atol=NEAR)
    counted = compiled.forward_counts.since(before)
    assert counted == ForwardCounts(compiled=counted.compiled)
    assert compiled.graphs.compiler == "aot"


def test_a_pipeline_gives_the_same_tokens_also_where_caches_grow_and_end(
    model: HFLanguageModel, compiled: CompiledModel
) -> None:
    config = {
        "target": {"model": "target"},
        "drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "near"}],
        "builder": {"kind": "layered", "depth": 3, "width": 3, "budget": 12},
        "stop": {"eos": []},
        "backend": {"dtype": "float64"},
    }
    near = HFLanguageModel(near_copy("qwen3", dtype=torch.float64, num_hidden_layers=1))
    ahead = build_pipeline(parse_config(config), models={"target": compiled, "near": near})
    plain = build_pipeline(parse_config(config), models={"target": model, "near": near})
    for length, n_new in ((3, 40), (90, 24), (7, 150)):
        prompt = prompt_of(length)
        found = ahead.generate(prompt, max_new_tokens=n_new)
        assert found.tokens == plain.generate(prompt, max_new_tokens=n_new).tokens
        assert found.forwards["target"].outside == 0
        assert found.forwards["target"].compiled > 0


def test_forwards_in_inference_mode_run_on_the_same_library(
    model: HFLanguageModel, compiled: CompiledModel
) -> None:
    before = replace(compiled.forward_counts)
    with torch.inference_mode():
        found, _ = tree_and_path_logits(compiled, 9, FORK, dice())
    expected, _ = tree_and_path_logits(model, 9, FORK, dice())
    assert torch.allclose(found, expected, rtol=0, atol=NEAR)
    assert compiled.forward_counts.since(before).outside == 0


def test_the_end_of_a_text_that_fills_its_cache_is_read_by_the_library_too(
    model: HFLanguageModel, compiled: CompiledModel
) -> None:
    for n_rows in (32, 41):
        slab, own = compiled.new_cache(n_rows), model.new_cache(n_rows)
        before = replace(compiled.forward_counts)
        for first, end in ((0, n_rows - 6), (n_rows - 6, n_rows - 1), (n_rows - 1, n_rows)):
            places = torch.arange(first, end)
            visible = torch.arange(end)[None, :] <= places[:, None]
            given = (places % VOCAB, places, places, visible)
            assert torch.allclose(
                compiled.forward(slab, *given), model.forward(own, *given), rtol=0, atol=NEAR
            )
        assert compiled.forward_counts.since(before) == ForwardCounts(compiled=3)


# Libraries hold no weights.


def test_another_checkpoint_of_the_architecture_finds_the_library_and_runs_on_its_own_weights(
    compiled: CompiledModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.export, "export", None)  # nothing is to be made
    n_kept = len(list(folder.iterdir()))
    other = tiny(seed=1)
    made = CompiledModel(other, AHEAD)
    assert len(list(folder.iterdir())) == n_kept == 3
    found, _ = tree_and_path_logits(made, 9, FORK, dice())
    expected, _ = tree_and_path_logits(other, 9, FORK, dice())
    first, _ = tree_and_path_logits(compiled, 9, FORK, dice())
    assert torch.allclose(found, expected, rtol=0, atol=NEAR)
    assert not torch.allclose(found, first, rtol=0, atol=1e-3)


def test_weights_that_change_in_place_or_move_are_read_anew(
    model: HFLanguageModel, compiled: CompiledModel
) -> None:
    weight = model.model.get_output_embeddings().weight
    held = weight.detach().clone()
    before = compiled.forward_counts.outside
    try:
        with torch.no_grad():
            weight.mul_(-1.5)
        found, _ = tree_and_path_logits(compiled, 5, FORK, dice())
        expected, _ = tree_and_path_logits(model, 5, FORK, dice())
        assert torch.allclose(found, expected, rtol=0, atol=NEAR)
        weight.data = weight.detach() / 3  # other memory
        found, _ = tree_and_path_logits(compiled, 5, FORK, dice())
        assert torch.allclose(found, expected / 3, rtol=0, atol=NEAR)
        assert compiled.forward_counts.outside == before
        # Other strides: the code does not fit, and must not read them as if it did.
        weight.data = weight.detach().t().contiguous().t()
        found, _ = tree_and_path_logits(compiled, 5, FORK, dice())
        assert torch.allclose(found, expected / 3, rtol=0, atol=NEAR)
        assert compiled.forward_counts.outside > before
    finally:
        weight.data = held


def test_weights_of_up_to_eight_numbers_were_written_into_the_code(
    model: HFLanguageModel, compiled: CompiledModel
) -> None:
    weight = model.model.model.layers[0].self_attn.q_norm.weight
    assert weight.numel() == 8
    held = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.copy_(torch.linspace(-1, 2, 8))
        found, _ = tree_and_path_logits(compiled, 5, FORK, dice())
        expected, _ = tree_and_path_logits(model, 5, FORK, dice())
        assert torch.allclose(found, expected, rtol=0, atol=NEAR)
    finally:
        with torch.no_grad():
            weight.copy_(held)


def test_a_second_text_in_the_kept_cache_was_read_with_weights_that_had_moved_away(
    model: HFLanguageModel, compiled: CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config({"target": {"model": "target"}, "drafters": [], "stop": {"eos": []}})
    # As where auto found the prompt's program slower: a text's first forward is eager then.
    monkeypatch.setitem(compiled._compiled, PROMPT, False)
    ahead = build_pipeline(config, models={"target": compiled})
    plain = build_pipeline(config, models={"target": model})
    weights = list(model.model.parameters())
    held = [weight.data for weight in weights]
    first = ahead.generate(prompt_of(6), max_new_tokens=12).tokens
    try:
        for weight in weights:
            weight.data = -0.7 * weight.data
        found = ahead.generate(prompt_of(6), max_new_tokens=12)
        assert found.tokens == plain.generate(prompt_of(6), max_new_tokens=12).tokens
        assert found.tokens != first
        assert found.forwards["target"].outside == 0
    finally:
        for weight, data in zip(weights, held, strict=True):
            weight.data = data


def test_a_module_put_in_the_place_of_another_ended_the_next_text_with_a_traceback(
    model: HFLanguageModel, compiled: CompiledModel
) -> None:
    held, before = model.model.lm_head, compiled.forward_counts.outside
    try:
        model.model.lm_head = torch.nn.Sequential(held)  # its weight has another name now
        found, _ = tree_and_path_logits(compiled, 5, FORK, dice())
        expected, _ = tree_and_path_logits(model, 5, FORK, dice())
        assert torch.allclose(found, expected, rtol=0, atol=NEAR)
        assert compiled.forward_counts.outside > before
    finally:
        model.model.lm_head = held
    before = compiled.forward_counts.outside
    tree_and_path_logits(compiled, 5, FORK, dice())
    assert compiled.forward_counts.outside == before


def test_what_is_replaced_added_or_taken_away_is_noticed_once() -> None:
    model = nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, 4))
    watch = StateWatch(model)

    def noticed() -> bool:
        changed = watch.changed()
        watch.look()
        return changed and not watch.changed()

    assert not watch.changed()
    held = model[0].weight
    del model[0].weight
    assert noticed()
    model[0].weight = held  # a module that had nothing when it was looked at
    assert noticed()
    model[1].weight.data = model[1].weight.data.clone()
    assert noticed()
    model[1].bias = None
    assert noticed()
    model[0].register_buffer("more", torch.zeros(1))
    assert noticed()
    model[1]._parameters = {"weight": nn.Parameter(torch.zeros(4, 4)), "bias": None}
    assert noticed()
    model._modules = {"one": model[0], "two": model[1]}
    assert noticed()
    with torch.no_grad():
        model.one.weight.add_(1.0)  # read by whoever reads the memory
    assert not watch.changed()


# The key names all that decides the code.


def test_the_key_differs_by_what_decides_the_code_and_not_by_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def key(model: Any, form: str = "form") -> str | None:
        return library_key(model, form)

    same = key(build("llama", num_hidden_layers=1))
    assert same == key(build("llama", seed=5, num_hidden_layers=1))
    other = build("llama", num_hidden_layers=1)
    other.lm_head.weight.data = other.lm_head.weight.detach().t().contiguous().t()
    keys = [
        same,
        key(build("llama", num_hidden_layers=2)),
        key(build("llama", num_hidden_layers=1, dtype=torch.float64)),
        key(build("llama", num_hidden_layers=1, rms_norm_eps=1e-3)),
        key(build("llama", num_hidden_layers=1), "another form"),
        key(other),
    ]
    scaled = build("llama", num_hidden_layers=1)
    scaled.model.layers[0].self_attn.scaling *= 2
    keys.append(key(scaled))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        keys.append(key(build("llama", num_hidden_layers=1)))
    finally:
        torch.set_num_threads(threads)
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_a_model_with_another_window_or_other_angles_took_the_library_of_the_first() -> None:
    def key(family: str, **options: Any) -> str | None:
        model = HFLanguageModel(build(family, num_hidden_layers=1, **options))
        form = aot._Form(1, (0, 1), most=None, last_only=False, windowed=False)
        return library_key(aot._Forward(model, form, None), form)

    def eager() -> str | None:
        model = build("llama", num_hidden_layers=1)
        model.set_attn_implementation("eager")
        form = aot._Form(1, (0, 1), most=None, last_only=False, windowed=False)
        return library_key(aot._Forward(HFLanguageModel(model), form, None), form)

    angles = {"rope_type": "default", "rope_theta": 500.0}
    keys = [
        # No window of these ends within what the warm-up reads.
        key("mistral", sliding_window=1024),
        key("mistral", sliding_window=2048),
        key("llama"),
        key("llama", rope_parameters=angles),
        key("llama", hidden_act="gelu"),
        eager(),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key("mistral", sliding_window=1024) == keys[0]


_PRINT_KEY = """
from backends.families import build
from treegraft.backends import aot
from treegraft.backends.library import library_key
form = aot._Form(1, (0, 1), most=1, last_only=False, windowed=False)
print(library_key(build("llama", num_hidden_layers=1), form))
"""


@pytest.mark.slow
def test_another_process_made_every_library_anew_as_the_key_hung_on_the_order_of_a_set() -> None:
    printed = set()
    for seed in ("1", "2", "3"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, [*ROOT, *sys.path]))
        run = subprocess.run(
            [sys.executable, "-c", _PRINT_KEY],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        printed.add(run.stdout.strip())
    assert len(printed) == 1
    assert None not in printed


def test_a_model_with_hooks_or_a_forward_of_its_own_is_not_kept() -> None:
    hooked = build("llama", num_hidden_layers=1)
    hook = hooked.lm_head.register_forward_hook(lambda module, given, out: out * 2)
    assert library_key(hooked, "form") is None
    hook.remove()
    assert library_key(hooked, "form") is not None
    hooked.lm_head.forward = lambda states: states
    assert library_key(hooked, "form") is None


def test_a_torn_package_is_made_anew(
    model: HFLanguageModel, compiled: CompiledModel, folder: Path
) -> None:
    whole = next(folder.glob("*.pt2"))
    torn = folder / "torn.pt2"
    torn.write_bytes(whole.read_bytes()[:1000])
    asked: list[str] = []

    def make(path: str) -> None:
        asked.append(path)
        shutil.copy(whole, path)

    form = aot._Form(1, (0, 1), most=1, last_only=False, windowed=False)
    forward = aot._Forward(model, form, None)
    _, found = kept("torn", forward, make)
    assert not found
    assert len(asked) == 1
    assert torn.read_bytes() == whole.read_bytes()
    assert kept("torn", forward, make)[1]
    torn.unlink()


def test_the_folder_is_the_users_cache_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TREEGRAFT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "treegraft"
    monkeypatch.setenv("TREEGRAFT_CACHE_DIR", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"


# What does not fit


def test_code_that_assumes_sizes_is_refused() -> None:
    class Exported:
        _guards_code = ("L['flat'][3].size()[1] <= 512",)

    form = aot._Form(1, (0, 1), most=None, last_only=False, windowed=False)
    with pytest.raises(RuntimeError, match=r"made for sizes with .* <= 512"):
        aot._check_guards(Exported, form)


def test_where_no_library_can_be_made_on_says_so_and_auto_takes_the_next_compiler(
    model: HFLanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("cannot be exported\nand more")

    monkeypatch.setenv("TREEGRAFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.export, "export", broken)
    with pytest.raises(ConfigError, match=r"cannot compile 'tiny' with 'aot'") as fault:
        CompiledModel(model, AHEAD)
    assert "\n" not in str(fault.value)
    assert not list(tmp_path.iterdir())


def test_a_cache_folder_that_cannot_be_written_was_told_of_as_a_missing_compiler(
    model: HFLanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = tmp_path / "file"
    taken.write_text("not a folder")
    monkeypatch.setattr(torch.export, "export", None)  # refused before anything is made
    for folder in (taken, taken / "below"):
        monkeypatch.setenv("TREEGRAFT_CACHE_DIR", str(folder))
        with pytest.raises(ConfigError, match=r"cannot be kept in .*: set TREEGRAFT_CACHE_DIR"):
            CompiledModel(model, AHEAD)
    assert taken.read_text() == "not a folder"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gpt2", "opt"])
def test_other_families_are_compiled_with_their_masks(name: str, folder: Path) -> None:
    model = HFLanguageModel(build(name, dtype=torch.float64))
    made = CompiledModel(model, AHEAD)
    found, _ = tree_and_path_logits(made, 13, [0] * 21, dice(1))
    expected, _ = tree_and_path_logits(model, 13, [0] * 21, dice(1))
    assert torch.allclose(found, expected, rtol=0, atol=NEAR)
    assert made.forward_counts.outside == 0
