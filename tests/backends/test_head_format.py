"""Draft heads on disk: what a folder holds, whose it is, and what the block computes on a tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.families import build, prompt_of
from torch import Tensor
from transformers import DynamicCache

from treegraft.backends.head import HeadBlock, load_head, save_head, weight_sample
from treegraft.backends.hf import HFLanguageModel
from treegraft.backends.reference import plain_tokens
from treegraft.backends.tensor_tree import TensorTree
from treegraft.config import parse_config
from treegraft.core.errors import ConfigError, UnsupportedModelError
from treegraft.core.roles import Context
from treegraft.core.sampling import Sampling
from treegraft.core.tree import ROOT, Proposals
from treegraft.pipeline import Pipeline, build_pipeline
from treegraft.policies.drafters.head import HeadConfig, HeadDrafter

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def random_block(seed: int = 0, **changes: Any) -> HeadBlock:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = HeadBlock(32, {**SHAPE, **changes})
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return block


def saved(folder: Path, target: Any, block: HeadBlock | None = None) -> str:
    save_head(block or random_block(), folder, "a llama", weight_sample(target))
    return str(folder)


def drafting(head: str, target: HFLanguageModel, **options: Any) -> Pipeline:
    config = {
        "target": {"model": "t"},
        "drafters": [{"kind": "ngram"}, {"kind": "head", "model": head, "name": "head"}],
        "builder": {"kind": "layered", "depth": 4, "width": 3, "budget": 14},
        "scheduler": {"kind": "fixed", "calls": ["head", "ngram", "head", "head"]},
        "stop": {"max_new_tokens": 16, "eos": []},
        **options,
    }
    return build_pipeline(parse_config(config), {"t": target})


def plain(model: Any, prompt: list[int], n: int, **sampling: Any) -> list[int]:
    def logits(text: Any) -> Tensor:
        with torch.no_grad():
            return model(input_ids=torch.tensor([list(text)])).logits[0, -1]

    return plain_tokens(logits, prompt, n, Sampling(**sampling))


# --- the story ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "opt"])
def test_a_head_on_disk_drafts_for_its_target_and_changes_nothing(
    name: str, tmp_path: Path
) -> None:
    bare = build(name, seed=1, dtype=torch.float64)
    made = drafting(saved(tmp_path, bare), HFLanguageModel(bare))
    for temperature in (0.0, 1.0):
        result = made.generate([5, 17, 3, 5], temperature=temperature)
        assert result.tokens == plain(bare, [5, 17, 3, 5], 16, temperature=temperature)
        assert result.statistics.proposed[1] > 0
        stages = {stage for step in result.steps for stage in step.seconds}
        assert "forward:head" in stages, stages


def test_scores_are_those_of_the_block_run_along_each_path(tmp_path: Path) -> None:
    """The oracle: the block over text and path without our cache, rows and masks."""
    bare = build("llama", seed=1, dtype=torch.float64)
    target = HFLanguageModel(bare)
    head = load_head(saved(tmp_path, bare), target)
    block = random_block().double()
    text = prompt_of(7)
    with torch.no_grad():
        hidden = bare.model(torch.tensor([text])).last_hidden_state[0]
    drafter = HeadDrafter(HeadConfig(model="h"), head)
    drafter.begin(Context(tuple(text), 40, 97, None, hidden=hidden[:-1]))
    tree = TensorTree(97)
    tree.reset_(text[-1], 30)
    paths = [[3, 4, 5, 6], [3, 9], [8, 4, 4]]
    scores = [[-1.0] * len(path) for path in paths]
    tree.add_(Proposals.of_paths([ROOT] * 3, paths, scores), 0, overwrite=False)
    found = drafter.score(tree)
    for node in range(1, tree.n_nodes):
        path = tree.path(node)
        expected = _along(block, bare, text, hidden, path)
        assert float(found[node]) == pytest.approx(expected, abs=1e-6)


@torch.no_grad()
def _along(block: HeadBlock, bare: Any, text: list[int], hidden: Tensor, path: list[int]) -> float:
    """log q of the last token of a path, its states foretold one by one."""
    cache = DynamicCache(config=block.body.config)
    states = torch.cat([torch.zeros(1, 32, dtype=torch.float64), hidden[:-1]])
    n = len(text)
    tokens, positions = torch.tensor(text), torch.arange(n)
    causal = torch.full((n, n), -1e9, dtype=torch.float64).triu(1)
    for token in path:
        said = block(
            bare.get_input_embeddings()(tokens)[None],
            states[None],
            positions[None],
            causal[None, None],
            cache,
        )[0]
        logq = bare.lm_head(said[-1]).log_softmax(-1)[token]
        tokens, positions, states = torch.tensor([token]), torch.tensor([n]), said[-1:]
        n += 1
        causal = torch.zeros(1, n, dtype=torch.float64)
    return float(logq)


# --- whose head it is -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_target_in_another_dtype_is_the_same_target(dtype: torch.dtype, tmp_path: Path) -> None:
    source = saved(tmp_path, build("llama"))
    head = load_head(source, HFLanguageModel(build("llama", dtype=dtype)))
    assert head.dtype == dtype
    assert (head.vocab_size, head.hidden_size, head.max_positions) == (97, 32, 64)


@pytest.mark.parametrize("other", ["seed", "family", "one norm"])
def test_a_foreign_head_is_refused_by_name(other: str, tmp_path: Path) -> None:
    source = saved(tmp_path, build("llama"))
    target = build("qwen3") if other == "family" else build("llama", seed=int(other == "seed"))
    if other == "one norm":
        with torch.no_grad():
            target.model.norm.weight *= 1.1
    message = f"head '{source}' was trained for 'a llama', and the weights of target 'mine' are oth"
    with pytest.raises(UnsupportedModelError, match=message):
        load_head(source, HFLanguageModel(target, name="mine"))


def test_a_head_of_another_width_is_refused_by_name(tmp_path: Path) -> None:
    target = build("llama")
    source = saved(tmp_path, target, random_block(hidden_size=16, head_dim=4))
    message = r"reads embeddings and states of widths \(32, 16\), target 'llama' has \(32, 32\)"
    with pytest.raises(UnsupportedModelError, match=message):
        load_head(source, HFLanguageModel(target))


def test_a_target_of_ones_own_has_nothing_to_share(tmp_path: Path) -> None:
    from table_models import hashed_model

    source = saved(tmp_path, build("llama"))
    message = r"shares embedding and output layer .* found target 'hashed-1' \(TableModel\)"
    with pytest.raises(UnsupportedModelError, match=message):
        load_head(source, hashed_model(7, seed=1))


# --- what is no head ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("head.json", None, "no head.json there; name a folder that holds head.json and head.safe"),
        ("head.safetensors", None, "no head.safetensors there"),
        ("head.json", b"{", "head.json cannot be read: Expecting property name"),
        ("head.json", b"\xff\xfe\x00", "head.json cannot be read"),
        ("head.json", b"[1]", "head.json must hold embedding_size, format, shape, target with for"),
        ("head.json", {"format": 2}, "with format 1, found"),
        (
            "head.json",
            {"shape": 3},
            "shape may hold hidden_size, .* and must hold hidden_size, fou",
        ),
        ("head.json", {"shape": {"layers": 1}}, "shape may hold .*found {'layers': 1}"),
        ("head.json", {"shape": {**SHAPE, "num_hidden_layers": 2}}, "cannot be loaded: Error"),
        ("head.json", {"shape": {**SHAPE, "hidden_size": "x"}}, "cannot be loaded"),
        ("head.json", {"embedding_size": 8}, "cannot be loaded: Error"),
        ("head.safetensors", b"", "cannot be loaded"),
        ("head.safetensors", b"nothing of the kind", "cannot be loaded"),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    target = HFLanguageModel(build("llama"), self_test=False)
    source = saved(tmp_path, target.model)
    if content is None:
        (tmp_path / name).unlink()
    elif isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        whole = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps({**whole, **content}))
    with pytest.raises(ConfigError, match=message) as caught:
        load_head(source, target)
    assert "\n" not in str(caught.value)


# --- numbers that are none ------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_of_nan_changes_no_token(temperature: float, tmp_path: Path) -> None:
    bare = build("llama", dtype=torch.float64)
    block = random_block()
    with torch.no_grad():
        block.join.weight.fill_(float("nan"))
    made = drafting(saved(tmp_path, bare, block), HFLanguageModel(bare))
    result = made.generate([5, 17, 3], temperature=temperature)
    assert result.tokens == plain(bare, [5, 17, 3], 16, temperature=temperature)


@pytest.mark.parametrize("where", ["draft", "prompt"])
def test_states_that_are_nan_spoil_neither_text(where: str, tmp_path: Path) -> None:
    """An embedding row that was never trained: in the draft it costs the step its draft, in the
    prompt the text is the model's own nonsense; the next text is drafted as ever."""
    sound = build("llama", dtype=torch.float64)
    bare = build("llama", dtype=torch.float64)
    with torch.no_grad():
        bare.get_input_embeddings().weight[96] = float("nan")
    source = saved(tmp_path, bare)
    drafters = [
        {"kind": "adversarial_drafters:Scripted", "params": {"paths": [[96]]}, "name": "poison"},
        {"kind": "head", "model": source, "name": "head"},
    ]
    calls = ["head", "poison", "head"] if where == "draft" else ["head"]
    made = drafting(
        source,
        HFLanguageModel(bare),
        drafters=drafters,
        scheduler={"kind": "fixed", "calls": calls},
    )
    if where == "prompt":
        told = "target 'llama' gives NaN for this text"
        assert made.generate([5, 96, 7]).notices == (told,)
    result = made.generate([5, 17, 3])
    assert result.tokens == plain(sound, [5, 17, 3], 16)
    drafter = made._parts.drafters[1]._drafter  # type: ignore[attr-defined]
    states = drafter._text._states[: drafter._text._n_known]
    assert bool(states.isfinite().all())
    assert bool((states != 0).any())
