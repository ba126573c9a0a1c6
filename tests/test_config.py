"""Every bad input by its one line: which option, what was found, what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from table_models import hashed_model

from treegraft.composition import component_graph
from treegraft.config import PipelineConfig, load_config, override, parse_config
from treegraft.core.errors import ConfigError, TreegraftError
from treegraft.pipeline import build_pipeline

TARGET = {"target": {"model": "t"}}
NGRAM = {"kind": "ngram"}
BIG = 2**64


# --- the story ------------------------------------------------------------------------------------


def test_a_target_alone_is_a_config() -> None:
    config = parse_config(TARGET)
    assert config.drafters == ()
    assert config.builder.kind == "layered"
    assert (config.builder.depth, config.builder.width, config.builder.budget) == (5, 10, 63)
    assert config.graft.lookback == 5


def test_the_config_of_the_design_is_read_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "zoo.yaml"
    path.write_text(
        """
        target: {model: "zoo:target"}
        drafters:                        # cheapest first
          - {kind: ngram, max_n: 3}
          - {kind: lm, model: "zoo:small"}
        builder:   {kind: layered, depth: 5, width: 10, budget: 63}
        graft:     {kind: treegraft, lookback: 5}
        scheduler: {kind: fixed, calls: [ngram, small, ngram]}
        verifier:  {kind: walk}
        sampling:  {temperature: 0.0}
        backend:   {kind: tensor}
        """
    )
    config = load_config(path)
    assert config.drafter_names == ("ngram", "small")
    assert config.fixed_calls == (0, 1, 0)


def test_a_resolved_config_says_the_same_again() -> None:
    config = parse_config(
        {
            **TARGET,
            "drafters": [{"kind": "ngram", "name": "look"}, {"kind": "my_lab:Some", "params": {}}],
            "scheduler": {"kind": "fixed", "calls": ["look", 1]},
            "sampling": {
                "processors": {
                    "sequence_bias": {(3, 4): -1, (5,): 2.5},
                    "bad_words_ids": [[1, 2], [3]],
                    "forced_eos_token_id": 7,
                    "exponential_decay_length_penalty": [3, 1.2],
                    "watermarking_config": {"ngram_len": 3, "keys": [1, 2]},
                }
            },
            "stop": {"eos": [1, 2], "strings": ["x"]},
        }
    )
    assert parse_config(config.model_dump()) == config
    assert parse_config(json.loads(config.model_dump_json())) == config
    assert parse_config(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_config(TARGET).sampling.seed = 3  # type: ignore[misc]


def test_single_options_are_overridden_and_checked() -> None:
    config = parse_config({**TARGET, "drafters": [{"kind": "my_lab:Some", "params": {"a": [1]}}]})
    changed = override(config, {"max_new_tokens": 7, "seed": 3, "eos": [1]})
    assert (changed.stop.max_new_tokens, changed.sampling.seed, changed.stop.eos) == (7, 3, (1,))
    assert changed.drafters == config.drafters
    assert config.stop.max_new_tokens == 128
    for options, message in (
        ({"depth": 3}, "unknown option 'depth'; known: temperature, top_k, top_p, min_p, "
         "repetition_penalty, seed, processors, max_new_tokens, min_new_tokens, eos, strings, and "
         "those of sampling.processors"),
        ({"top_k": 0}, "sampling.top_k: Input should be greater than or equal to 1, found 0"),
        ({"max_new_tokens": 3, "min_new_tokens": 4},
         "stop: min_new_tokens must be at most max_new_tokens (3), found 4"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            override(config, options)
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        (NGRAM, "ngram"),
        ({"kind": "ngram", "name": "x"}, "x"),
        ({"kind": "suffix"}, "suffix"),
        ({"kind": "recycle"}, "recycle"),
        ({"kind": "lm", "model": "zoo:small"}, "small"),
        ({"kind": "lm", "model": "meta-llama/Llama-3.2-1B"}, "Llama-3.2-1B"),
        ({"kind": "lm", "model": "/models/qwen/"}, "qwen"),
        ({"kind": "my_lab.drafters:Mine"}, "Mine"),
    ],
)
def test_a_drafter_is_called_by_its_last_name(drafter: dict[str, Any], name: str) -> None:
    assert parse_config({**TARGET, "drafters": [drafter]}).drafter_names == (name,)


# --- what is wrong, in one line -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # options that do not exist, and values out of bounds
        ({"temperature": 0}, "temperature: unknown option"),
        ({"drafters": [{"kind": "ngram", "max": 3}]}, "drafters.0.max: unknown option"),
        ({"graft": {"kind": "a:B", "more": 1}}, "graft.more: unknown option"),
        (
            {"builder": {"kind": "layered", "depth": -1}},
            "builder.depth: Input should be greater than or equal to 0, found -1",
        ),
        (
            {"builder": {"kind": "layered", "width": 0}},
            "builder.width: Input should be greater than or equal to 1, found 0",
        ),
        (
            {"builder": {"kind": "layered", "budget": 1024}},
            "builder.budget: Input should be less than or equal to 1023, found 1024",
        ),
        (
            {"builder": {"kind": "layered", "depth": "deep"}},
            "builder.depth: Input should be a valid integer, unable to parse string as an integer, "
            "found 'deep'",
        ),
        (
            {"graft": {"kind": "treegraft", "lookback": 65}},
            "graft.lookback: Input should be less than or equal to 64, found 65",
        ),
        (
            {"sampling": {"temperature": -0.1}},
            "sampling.temperature: Input should be greater than or equal to 0, found -0.1",
        ),
        (
            {"sampling": {"temperature": float("nan")}},
            "sampling.temperature: Input should be less than or equal to 100, found nan",
        ),
        (
            {"sampling": {"top_p": 0.0}},
            "sampling.top_p: Input should be greater than 0, found 0.0",
        ),
        (
            {"sampling": {"min_p": 1.5}},
            "sampling.min_p: Input should be less than or equal to 1, found 1.5",
        ),
        (
            {"sampling": {"repetition_penalty": 0}},
            "sampling.repetition_penalty: Input should be greater than 0, found 0",
        ),
        (
            {"sampling": {"processors": {"no_repeat_ngram": 3}}},
            "sampling.processors.no_repeat_ngram: unknown option",
        ),
        (
            {"sampling": {"processors": {"no_repeat_ngram_size": -1}}},
            "sampling.processors.no_repeat_ngram_size: Input should be greater than or equal to 0, "
            "found -1",
        ),
        (
            {"sampling": {"processors": {"bad_words_ids": [[3], []]}}},
            "sampling.processors.bad_words_ids.1: 1 or more entries are needed, found 0",
        ),
        (
            {"sampling": {"processors": {"suppress_tokens": [4, -1]}}},
            "sampling.processors.suppress_tokens.1: Input should be greater than or equal to 0, "
            "found -1",
        ),
        (
            {"sampling": {"processors": {"sequence_bias": [[[3], float("nan")]]}}},
            "sampling.processors: sequence_bias must hold numbers, found nan",
        ),
        (
            {"sampling": {"processors": {"no_repeat_ngram_size": True}}},
            "sampling.processors.no_repeat_ngram_size must be a number, found True",
        ),
        (
            {"sampling": {"processors": {"forced_eos_token_id": True}}},
            "sampling.processors.forced_eos_token_id: a list is needed, found True",
        ),
        (
            {"sampling": {"processors": {"watermarking_config": {"bias": 2.0, "size": 3}}}},
            "sampling.processors.watermarking_config.size: unknown option",
        ),
        (
            {"sampling": {"processors": {"watermarking_config": {"ngram_len": 3}}}},
            "sampling.processors.watermarking_config.keys: Field required",
        ),
        (
            {"sampling": {"processors": {"guidance_scale": 2.0}}},
            "sampling.processors: guidance_scale needs a second forward of the target for every "
            "token, which a draft tree does not save; leave it out, or hand an "
            "UnbatchedClassifierFreeGuidanceLogitsProcessor to generate as logits_processor",
        ),
        (
            {"sampling": {"seed": BIG}},
            f"sampling.seed: Input should be less than {BIG}, found {BIG}",
        ),
        (
            {"stop": {"max_new_tokens": 0}},
            "stop.max_new_tokens: Input should be greater than or equal to 1, found 0",
        ),
        ({"stop": {"eos": 5}}, "stop.eos: a list is needed, found 5"),
        (
            {"backend": {"kind": "fast"}},
            "backend.kind: Input should be 'tensor' or 'reference', found 'fast'",
        ),
        (
            {"backend": {"device": "gpu"}},
            r"backend.device: String should match pattern '^(cpu|cuda(:\d+)?|mps)$', found 'gpu'",
        ),
        # a part that is missing or of the wrong form
        ({"target": {}}, "target.model: Field required"),
        (
            {"target": {"model": ""}},
            "target.model: String should have at least 1 character, found ''",
        ),
        ({"drafters": [{"kind": "lm"}]}, "drafters.0.model: Field required"),
        (
            {"drafters": NGRAM},
            "drafters: a list is needed, found {'kind': 'ngram'}",
        ),
        ({"drafters": ["ngram"]}, "drafters.0: a mapping with the key kind is needed"),
        ({"builder": {"depth": 3}}, "builder: a mapping with the key kind is needed"),
        ({"builder": None}, "builder: a mapping with the key kind is needed"),
        # one value where a list or a mapping is needed, and a list that is empty
        ({"drafters": None}, "drafters: a list is needed, found None"),
        ({"stop": {"strings": "abc"}}, "stop.strings: a list is needed, found 'abc'"),
        (
            {"drafters": [NGRAM], "scheduler": {"kind": "fixed", "calls": "ngram"}},
            "scheduler.calls: a list is needed, found 'ngram'",
        ),
        (
            {"drafters": [NGRAM], "scheduler": {"kind": "fixed", "calls": []}},
            "scheduler.calls: 1 or more entries are needed, found 0",
        ),
        ({"target": "m"}, "target: a mapping of options is needed, found 'm'"),
        # yes and no where a number is needed
        (
            {"sampling": {"temperature": True}},
            "sampling.temperature must be a number, found True",
        ),
        (
            {"builder": {"kind": "layered", "budget": False}},
            "builder.budget must be a number, found False",
        ),
        ({"drafters": [{**NGRAM, "max_n": True}]}, "drafters.0.max_n must be a number, found True"),
        ({"stop": {"eos": [3, True]}}, "stop.eos.1 must be a number, found True"),
        (
            {"drafters": [NGRAM], "scheduler": {"kind": "fixed", "calls": [False]}},
            "scheduler.calls.0 must be a number, found False",
        ),
        # a drafter without a name
        (
            {"drafters": [{**NGRAM, "name": ""}]},
            "drafters.0.name: String should have at least 1 character, found ''",
        ),
        (
            {"drafters": [NGRAM, {"kind": "lm", "model": "/"}]},
            "drafters.1 has an empty name; set name",
        ),
        # half a surrogate pair, which is no text
        (
            {"stop": {"strings": ["a", "b\ud800"]}},
            "stop: strings must be text in UTF-8, found 'b\\ud800'",
        ),
        # a kind that does not exist
        (
            {"drafters": [{"kind": "ngrams"}]},
            "drafters.0: kind must be one of 'ngram', 'suffix', 'recycle', 'datastore', 'lm', "
            "'head', 'package.module:Class', found 'ngrams'",
        ),
        (
            {"scheduler": {"kind": "sometimes"}},
            "scheduler: kind must be one of 'never', 'always', 'fixed', 'priority', 'cost_aware', "
            "'online', 'budgeted', 'value', 'package.module:Class', found 'sometimes'",
        ),
        (
            {"builder": {"kind": 5}},
            "builder: kind must be one of 'layered', 'best_first', 'chain', 'static', "
            "'package.module:Class', found '5'",
        ),
        (
            {"graft": {"kind": "my-lab:Graft"}},
            r"graft.kind: String should match pattern '^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$', found "
            "'my-lab:Graft'",
        ),
        # options that do not go together
        (
            {"drafters": [{"kind": "suffix", "max_match": 2, "min_match": 3}]},
            "drafters.0: min_match must be at most max_match (2), found 3",
        ),
        (
            {"drafters": [{"kind": "suffix", "store_tokens": -1}]},
            "drafters.0.store_tokens: Input should be greater than or equal to 0, found -1",
        ),
        (
            {"drafters": [{"kind": "recycle", "k": 0}]},
            "drafters.0.k: Input should be greater than or equal to 1, found 0",
        ),
        (
            {"drafters": [{"kind": "ngram", "max_n": 2, "min_n": 3}]},
            "drafters.0: min_n must be at most max_n (2), found 3",
        ),
        (
            {"stop": {"max_new_tokens": 4, "min_new_tokens": 5}},
            "stop: min_new_tokens must be at most max_new_tokens (4), found 5",
        ),
        ({"stop": {"eos": [3, -1]}}, "stop: eos must hold token ids from 0, found -1"),
        (
            {"stop": {"strings": ["a", ""]}},
            "stop: strings must not hold an empty string, which would stop at once",
        ),
        (
            {"drafters": [{**NGRAM, "name": str(i)} for i in range(64)]},
            "drafters: at most 63 entries are allowed, found 64",
        ),
        (
            {"drafters": [NGRAM, NGRAM]},
            "drafters must have different names, found 'ngram' twice; set name",
        ),
        (
            {"scheduler": {"kind": "fixed", "calls": ["ngram"]}},
            "scheduler.calls names drafter 'ngram', found drafters []",
        ),
        (
            {"drafters": [NGRAM], "scheduler": {"kind": "fixed", "calls": [-1]}},
            "scheduler.calls names drafter -1, found drafters ['ngram']",
        ),
        ({"drafters": [{"kind": "datastore"}]}, "drafters.0.path: Field required"),
        (
            {"drafters": [{"kind": "datastore", "path": "s", "min_n": 20}]},
            "drafters.0: min_n must be at most max_n (16), found 20",
        ),
        # several faults: the first, and how many more
        (
            {"builder": {"kind": "layered", "width": 0, "depth": -1, "x": 1}},
            "builder.depth: Input should be greater than or equal to 0, found -1 (and 2 more)",
        ),
    ],
)
def test_a_wrong_option_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({**TARGET, **options})
    assert str(caught.value) == message
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("data", "found"), [(None, "NoneType"), ([], "list"), ("target", "str"), (3, "int")]
)
def test_a_config_is_a_mapping(data: Any, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    assert str(caught.value) == f"a config must be a mapping of options, found {found}"


def test_no_target_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^target: Field required$"):
        parse_config({})


def test_a_file_is_named_with_what_is_wrong_in_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"

    def message() -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert message() == f"config '{path}' cannot be read: No such file or directory"
    path.write_bytes(b"\xff\xfe\x00")
    assert message() == f"config '{path}' is not a text file in UTF-8"
    path.write_text("target: {model: t\nbuilder: [")
    assert message().startswith(f"config '{path}' is no valid YAML: ")
    path.write_text("")
    assert message() == f"{path}: a config must be a mapping of options, found NoneType"
    path.write_text("target: {model: t}\nwidth: 3\n")
    assert message() == f"{path}: width: unknown option"


def test_a_key_given_twice_is_refused_and_not_the_last_one_taken(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for text, where in (
        ("target: {model: m}\ntarget: {model: n}\n", "'target' is given twice, in lines 1 and 2"),
        (
            "target: {model: m}\ndrafters:\n- kind: ngram\n  max_n: 2\n  max_n: 3\n",
            "'max_n' is given twice, in lines 4 and 5",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value) == f"{path}: {where}; keep one of them"


def test_a_merged_key_may_be_given_again(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "target: {model: m}\n"
        "drafters:\n"
        "- &first {kind: ngram, name: a, max_n: 2}\n"
        "- &second {<<: *first, name: b}\n"
        "- {<<: *second, name: c, max_n: 3}\n"
    )
    drafters = load_config(path).drafters
    assert [(drafter.name, drafter.max_n) for drafter in drafters] == [  # type: ignore[union-attr]
        ("a", 2),
        ("b", 2),
        ("c", 3),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5000, "is nested too deeply"),
        ("a: " + "9" * 5000, "is no valid YAML: Exceeds the limit"),
        ("a: 2001-99-99", "is no valid YAML: month must be in 1..12"),
    ],
    ids=["deep", "digits", "date"],
)
def test_yaml_that_breaks_its_reader_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"config '{path}' {message}")
    assert "\n" not in str(caught.value)


def test_a_path_with_a_zero_byte_is_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("a\0b")
    assert str(caught.value) == "config 'a\\x00b' cannot be read: embedded null byte"


def test_a_switch_stays_a_switch() -> None:
    graft = {"kind": "treegraft", "revisit": True}
    assert parse_config({**TARGET, "graft": graft}).graft.revisit is True  # type: ignore[union-attr]
    own = {"kind": "a:B", "params": {"flag": True}}
    assert parse_config({**TARGET, "graft": own}).graft.params == {"flag": True}  # type: ignore[union-attr]


def test_every_option_says_what_it_does() -> None:
    """The schema is the documentation of the options: none may be without a description."""
    schema = PipelineConfig.model_json_schema()
    for name, part in schema["$defs"].items():
        for option, field in part["properties"].items():
            if option != "kind":
                assert field.get("description"), f"{name}.{option} has no description"


# --- one's own class by import path ---------------------------------------------------------------


def build(**options: Any) -> Any:
    config = parse_config({**TARGET, "drafters": [NGRAM], **options})
    return build_pipeline(config, {"t": hashed_model(8, seed=1)})


def own(kind: str, **params: Any) -> dict[str, Any]:
    return {"kind": kind, "params": params}


def test_ones_own_graft_decodes() -> None:
    made = build(graft=own("my_lab:CautiousGraft", threshold=0.2))
    plain = build(drafters=[])
    assert made.generate([1, 2, 1, 2]).tokens == plain.generate([1, 2, 1, 2]).tokens
    assert made.graph().nodes["graft"] == {
        "role": "graft",
        "kind": "my_lab:CautiousGraft",
        "options": {"threshold": 0.2},
    }


def test_a_nested_class_is_found() -> None:
    build(graft=own("my_lab:Nested.Graft", threshold=1.0))


@pytest.mark.parametrize(
    ("graft", "message"),
    [
        (
            own("no_such_lab:Graft"),
            "graft.kind 'no_such_lab:Graft' cannot be imported: ModuleNotFoundError: No module "
            "named 'no_such_lab'",
        ),
        (
            own("my_lab:NoSuchClass"),
            "graft.kind 'my_lab:NoSuchClass' cannot be imported: AttributeError: module 'my_lab' "
            "has no attribute 'NoSuchClass'",
        ),
        (
            own("my_broken_lab:Graft"),
            "graft.kind 'my_broken_lab:Graft' cannot be imported: RuntimeError: no licence server",
        ),
        (
            own("my_lab:Unfinished"),
            "graft.kind 'my_lab:Unfinished' must be a subclass of treegraft.GraftPolicy",
        ),
        (
            own("my_lab:not_a_class"),
            "graft.kind 'my_lab:not_a_class' must be a subclass of treegraft.GraftPolicy",
        ),
        (
            own("my_lab:CautiousGraft"),
            "graft.params of 'my_lab:CautiousGraft': missing a required argument: 'threshold'",
        ),
        (
            own("my_lab:CautiousGraft", threshold=1, width=2),
            "graft.params of 'my_lab:CautiousGraft': got an unexpected keyword argument 'width'",
        ),
    ],
)
def test_a_class_that_does_not_fit_is_refused_before_loading(
    graft: dict[str, Any], message: str
) -> None:
    config = parse_config({**TARGET, "drafters": [NGRAM], "graft": graft})
    with pytest.raises(ConfigError) as caught:
        component_graph(config)
    assert str(caught.value) == message


def test_an_unfinished_class_names_what_it_lacks() -> None:
    with pytest.raises(ConfigError) as caught:
        build(drafters=[own("my_lab:Unfinished")])
    assert str(caught.value) == "drafter.kind 'my_lab:Unfinished' does not define: observe, propose"


def test_a_builder_without_a_shape_is_refused_and_no_attribute_error() -> None:
    with pytest.raises(ConfigError) as caught:
        build(builder=own("my_lab:Shapeless"))
    assert str(caught.value) == (
        "builder.kind 'my_lab:Shapeless' must set width to an integer from 0, found None"
    )


def test_a_builder_whose_shape_is_a_switch_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build(builder=own("my_lab:Switched"))
    assert str(caught.value) == (
        "builder.kind 'my_lab:Switched' must set width to an integer from 0, found True"
    )


def test_what_a_class_says_about_its_params_is_passed_on() -> None:
    with pytest.raises(TreegraftError, match=r"^threshold must be 0 or more"):
        build(graft=own("my_lab:CautiousGraft", threshold=-1))
    with pytest.raises(ConfigError) as caught:
        build(graft=own("my_lab:CautiousGraft", threshold=1000))
    assert str(caught.value) == (
        "graft.kind 'my_lab:CautiousGraft' cannot be built from params {'threshold': 1000}: "
        "OverflowError: too cautious"
    )
