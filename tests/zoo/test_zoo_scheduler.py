"""The scheduler that ships with the zoo: it loads with its config, and with no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from treegraft.backends.artefact import read_artefact
from treegraft.config import load_config, parse_config
from treegraft.core.errors import ConfigError, ScheduleError
from treegraft.pipeline import build_pipeline
from treegraft.scheduling.collect import prompt_key
from treegraft.zoo.catalog import zoo_prompts, zoo_scheduler

EXAMPLE = Path(__file__).parents[2] / "examples" / "value.yaml"


@pytest.fixture(scope="module")
def pipeline():
    return build_pipeline(load_config(EXAMPLE))


def test_it_decodes_the_targets_text_with_mixed_schedules(pipeline):
    plain = build_pipeline(parse_config({"target": {"model": "zoo:target"}}))
    steps = []
    for prompt in zoo_prompts(["edit", "prose"])[::9]:
        found = pipeline.generate(prompt.prompt, max_new_tokens=24)
        assert found.tokens == plain.generate(prompt.prompt, max_new_tokens=24).tokens
        steps += [step.calls for step in found.steps]
    # It decides: neither endpoint, nor one schedule for all.
    assert len(set(steps)) > 2
    assert {index for calls in steps for index in calls} == {0, 1, 2}


def test_it_says_that_its_costs_are_those_of_compiled_forwards(pipeline):
    (said,) = pipeline.notices
    assert "compile on there, off here" in said


@pytest.mark.parametrize(
    ("rooms", "said"),
    [
        ({"drafters": [{"kind": "ngram"}, {"kind": "lm", "model": "zoo:small"}]}, "drafters are"),
        ({"drafters": [{"kind": "recycle", "k": 4}]}, "drafters are recycle, suffix, small there"),
        ({"builder": {"kind": "layered", "depth": 4, "width": 3, "budget": 7}}, "builder.width"),
        ({"target": {"model": "zoo:medium"}}, "target is"),
    ],
)
def test_other_pipelines_are_refused(rooms, said):
    config = parse_config(load_config(EXAMPLE).model_dump() | rooms)
    with pytest.raises(
        ScheduleError, match=f"'zoo:scheduler' was made for another pipeline: {said}"
    ):
        build_pipeline(config)


def test_a_name_that_does_not_ship_is_named():
    with pytest.raises(ConfigError, match=r"a folder or zoo:scheduler, found 'zoo:schedular'"):
        read_artefact("zoo:schedular")


def test_it_was_not_fitted_on_the_prompts_that_it_is_judged_by(pipeline):
    fitted_on = set(read_artefact("zoo:scheduler").header["data"]["fitted_on"])
    assert fitted_on
    for prompt in zoo_prompts():
        assert prompt_key(pipeline.encode(prompt.prompt))[:16] not in fitted_on


def test_it_is_small_and_ships_as_package_data():
    folder = zoo_scheduler("zoo:scheduler")
    assert {file.name for file in folder.iterdir()} == {
        "scheduler.json", "weights.safetensors"
    }  # fmt: skip
    assert sum(file.stat().st_size for file in folder.iterdir()) < 100_000
