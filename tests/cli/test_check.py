"""``check``: what it says when all is well, about ties, faults and mistakes, and its exit codes."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from treegraft import Drafter
from treegraft.zoo import catalog

DRAFTED = """
target: {{model: {target}}}
drafters: [{{kind: ngram}}, {{kind: lm, model: {small}}}]
builder: {{kind: layered, depth: 3, width: 3, budget: 12}}
scheduler: {{kind: always}}
verifier: {{kind: "{verifier}"}}
"""


class Raises(Drafter):
    def begin(self, context):
        pass

    def observe(self, commit):
        pass

    def propose(self, tree, positions, width):
        raise ValueError("nothing to say")


@pytest.fixture
def prompts(write):
    return write("p.json", '[{"prompt": "one two", "kind": "count"}, {"text": "The", "id": "x"}]')


@pytest.fixture
def drafted(zoo, write):
    """Writes a config with the verifier of this name, and returns its file."""

    def write_config(verifier, target=zoo.target):
        text = DRAFTED.format(target=target, small=zoo.small, verifier=verifier)
        return write(f"{verifier.split(':')[-1]}.yaml", text)

    return write_config


@pytest.fixture(scope="session")
def twins(zoo, tmp_path_factory):
    """A checkpoint in which ids 2k and 2k + 1 have equal logits but different embeddings."""
    folder = tmp_path_factory.mktemp("twins")
    model = AutoModelForCausalLM.from_pretrained(zoo.target)
    with torch.no_grad():
        head = model.lm_head.weight
        n = head.shape[0] // 2 * 2
        head[1:n:2] = head[0:n:2]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(zoo.target).save_pretrained(folder)
    return folder


# --- all is well ----------------------------------------------------------------------------------


def test_passes_and_says_what_the_adapter_decided(zoo, treegraft):
    result = treegraft(
        *("check", "--target", zoo.target, "--drafter", "ngram", "--drafter", zoo.small),
        *("--tokens", 8, "--json"),
    )
    assert result.code == 0
    data = result.json
    assert data["passed"] is True
    assert (data["dtype"], data["exact"], data["rounding_units"]) == ("float32", True, 0.0)
    assert data["counts"]["fault"] == data["counts"]["tie"] == data["counts"]["ties"] == 0
    assert data["counts"]["equal"] == len(data["texts"]) == 8
    assert data["counts"]["tokens"] == 8 * 8
    assert data["adapter"]["model_type"] == "llama"
    assert data["adapter"]["self_test_error"] < 1e-4
    assert set(data["drafter_adapters"]) == {"small"}
    assert {text["mode"] for text in data["texts"]} == {"greedy", "seeded"}
    assert data["drafters"] == ["ngram", "small"]
    # Remarks are no part of the result.
    assert "drafters take turns" in result.err


def test_a_checkpoint_without_a_tokenizer_needs_no_drafter_either(zoo, treegraft):
    result = treegraft("check", "--target", zoo.bare, "--tokens", 6)
    assert result.code == 0
    assert "self-test error" in result.out
    assert "24 random ids  greedy  equal" in result.out
    last = result.out.splitlines()[-1]
    assert last.startswith("PASSED: 8 texts, 48 tokens checked in float32, ")
    assert last.endswith(": 8 texts equal, 0 with ties (0 tokens), 0 faults")


def test_token_ids_of_a_file_are_checked_without_a_tokenizer(zoo, treegraft, write):
    file = write("p.jsonl", '{"ids": [5, 6, 5, 6, 5], "id": "mine"}')
    result = treegraft("check", "--target", zoo.bare, "--prompts", file, "--tokens", 6, "--json")
    assert result.code == 0
    assert [text["prompt"] for text in result.json["texts"]] == ["mine", "mine"]
    assert result.json["texts"][0]["prompt_tokens"] == 5


def test_a_copy_of_the_zoo_gets_the_shipped_prompts(treegraft, tmp_path):
    """Which prompts are taken depends on the tokenizer and not on how the model is called."""
    copy = shutil.copytree(catalog.zoo_path("small"), tmp_path / "mine")
    result = treegraft("check", "--target", copy, "--tokens", 2, "--json")
    assert result.code == 0
    prompts = {text["prompt"] for text in result.json["texts"]}
    assert prompts == {f"{kind}-00" for kind in catalog.zoo_kinds()}


def test_seed_and_temperature_are_the_configs_unless_given(zoo, treegraft, write, prompts):
    text = f"target: {{model: {zoo.target}}}\ndrafters: [{{kind: ngram}}]\n"
    file = write("s.yaml", text + "sampling: {temperature: 0.5, seed: 7}\n")
    arguments = ("check", "-c", file, "--prompts", prompts, "--tokens", 2, "--json")
    found = treegraft(*arguments).json
    assert (found["seed"], found["temperature"]) == (7, 0.5)
    assert treegraft(*arguments, "--seed", 8).json["seed"] == 8


def test_a_check_that_puts_nothing_to_the_test_says_so(zoo, treegraft, write):
    file = write("p.jsonl", '{"ids": [5]}')
    result = treegraft("check", "--target", zoo.bare, "--prompts", file, "--tokens", 2)
    assert result.code == 0
    assert "no drafted token was accepted on these prompts" in result.err


# --- ties and faults ------------------------------------------------------------------------------


def test_a_fault_names_position_node_and_drafter_and_exits_1(treegraft, drafted, prompts):
    arguments = ("check", "-c", drafted("faulty_verifier:AcceptsTheFirstChild"))
    arguments += ("--prompts", prompts, "--tokens", 6)
    result = treegraft(*arguments, "--json")
    assert result.code == 1
    assert result.json["passed"] is False
    text = next(t for t in result.json["texts"] if t["verdict"] == "fault")
    fault = text["fault"]
    assert fault["expected"] == fault["first"]
    assert fault["found"]["token"] != fault["expected"]["token"]
    assert fault["gap"] == fault["expected"]["value"] - fault["found"]["value"] > 0
    assert fault["tolerance"] == 0.0
    assert fault["position"] == text["prompt_tokens"] + fault["new"]
    # That verifier takes node 1 of every tree, and only the small model drafts.
    assert fault["origin"]["node"] == fault["origin"]["depth"] == 1
    assert fault["origin"]["drafter"] == "small"
    assert text["tokens"] == fault["new"] + 1
    printed = treegraft(*arguments)
    assert printed.code == 1
    assert "FAILED: " in printed.out
    words = " ".join(printed.out.split())
    assert (
        f"FAULT in {text['prompt']}, {text['mode']}: token {fault['position']} of the text (new "
        f"token {fault['new']}): expected {fault['expected']['token']} (logit "
    ) in words
    assert f"found {fault['found']['token']} (logit " in words
    step = fault["origin"]["step"]
    assert f"; step {step}, node 1 at depth 1, proposed by small" in words


def test_the_same_fault_in_bfloat16_is_no_tie(treegraft, drafted, prompts):
    result = treegraft(
        *("check", "-c", drafted("faulty_verifier:AcceptsTheFirstChild"), "--prompts", prompts),
        *("--tokens", 6, "--dtype", "bfloat16", "--json"),
    )
    assert result.code == 1
    faults = [t["fault"] for t in result.json["texts"] if t["fault"] is not None]
    assert faults
    assert all(fault["gap"] > fault["tolerance"] > 0 for fault in faults)


@pytest.mark.parametrize(("dtype", "code"), [("bfloat16", 0), ("float16", 0), ("float32", 1)])
def test_a_constructed_tie_is_excused_in_narrow_types_only(
    treegraft, drafted, prompts, twins, dtype, code
):
    file = drafted("broken_verifiers:TakesTheLastOfEquals", twins)
    arguments = ("check", "-c", file, "--prompts", prompts, "--tokens", 6, "--dtype", dtype)
    result = treegraft(*arguments, "--json")
    assert result.code == code
    greedy = result.json["texts"][0]
    assert greedy["verdict"] == ("fault" if code else "tie")
    printed = treegraft(*arguments)
    assert printed.code == code
    words = " ".join(printed.out.split())
    if code:
        assert "FAULT in 1, greedy: token " in words
        return
    # After a tie the texts part, and the drafted one is checked to its end.
    assert greedy["tokens"] == 6
    for tie in greedy["ties"]:
        assert tie["found"]["token"] == tie["expected"]["token"] + 1
        assert tie["found"]["logit"] == tie["expected"]["logit"]
        assert tie["gap"] == 0.0 < tie["tolerance"]
    assert len(greedy["ties"]) > 3
    assert "tie in 1, greedy: token " in words
    assert "; gap 0, rounding explains 0." in words
    assert f"{len(greedy['ties']) - 3} more ties in 1, greedy (all with --json)" in words
    assert f"({result.json['counts']['ties']} tokens), 0 faults" in words


def test_bfloat16_knows_ties_or_equality_only(zoo, treegraft):
    result = treegraft(
        *("check", "--target", zoo.target, "--drafter", zoo.small, "--dtype", "bfloat16"),
        *("--tokens", 16, "--json"),
    )
    assert result.code == 0
    assert result.json["adapter"]["dtype"] == "bfloat16"
    assert result.json["counts"]["tokens"] == 8 * 16


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--target {target} --tokens 0", "Invalid value for '--tokens': "),
        ("--target {target} --dtype int8", "backend.dtype: Input should be 'auto', 'float32', "),
        ("--target {target} --seed -1", "sampling.seed: Input should be greater than or equal to"),
        ("--tokens 3", "a config (-c FILE) or a target (--target MODEL) is needed, found neither"),
        ("-c {plain}", "drafters: at least one is needed to check drafting, found none"),
        ("--target {bare} --prompts {prompts}", "prompt '1': a text prompt needs a tokenizer, "),
        ("--target {target} --prompts {long}", "prompt 'long': the prompt has 300 tokens, the "),
        ("--target {target} --prompts {outside}", "prompt '1': prompt ids must be in 0.."),
        ("--target {target} --prompts no.txt", "prompts 'no.txt' cannot be read: No such file"),
        ("--target {target} --drafter {other}", "does not share the vocabulary of target "),
        ("--target {target} --drafter test_check:Raises", "drafter 'Raises' failed in propose: "),
    ],
)
def test_mistakes_are_one_line_and_exit_2(zoo, treegraft, write, prompts, arguments, message):
    files = {
        "plain": write("plain.yaml", f"target: {{model: {zoo.target}}}\n"),
        "long": write("long.json", json.dumps([{"ids": [5] * 300, "id": "long"}])),
        "outside": write("outside.jsonl", '{"ids": [99999]}'),
        "other": catalog.zoo_path("small"),
        "prompts": prompts,
    }
    filled = arguments.format(target=zoo.target, bare=zoo.bare, **files)
    result = treegraft("check", *filled.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


# --- other families -------------------------------------------------------------------------------


def test_checkpoints_of_other_families_are_checked_by_path(treegraft, zoo, tmp_path):
    """A sliding-window target and a gpt2 drafter, given by folder, sharing one tokenizer."""
    from transformers import (
        AutoTokenizer,
        GPT2Config,
        GPT2LMHeadModel,
        MistralConfig,
        MistralForCausalLM,
    )

    tokenizer = AutoTokenizer.from_pretrained(zoo.target)
    n = len(tokenizer)
    shared = {"vocab_size": n, "initializer_range": 0.6, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(4)
    mistral = MistralConfig(
        **shared,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        max_position_embeddings=256,
    )
    gpt2 = GPT2Config(**shared, n_embd=32, n_layer=1, n_head=2, n_positions=256)
    for name, model in (
        ("mistral", MistralForCausalLM(mistral)),
        ("gpt2", GPT2LMHeadModel(gpt2)),
    ):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    models = (
        "--target",
        tmp_path / "mistral",
        "--drafter",
        "ngram",
        "--drafter",
        tmp_path / "gpt2",
    )
    result = treegraft("check", *models, "--tokens", 24)
    assert result.code == 0, result.err
    assert "0 faults" in result.out
    made = treegraft("generate", *models, "-p", "one two three, one", "-n", 16, "--json")
    assert made.code == 0, made.err
