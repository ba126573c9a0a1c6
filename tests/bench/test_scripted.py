"""The scripted drafter: always right, never right, right as often as it is told to."""

from __future__ import annotations

import pytest
from table_models import hashed_model

from treegraft import ConfigError, parse_config
from treegraft.pipeline import build_pipeline

PROMPT = [1, 2, 3]
N = 400


@pytest.fixture(scope="module")
def script():
    plain = parse_config({"target": {"model": "big"}, "stop": {"max_new_tokens": N}})
    return [*PROMPT, *build_pipeline(plain, models=models()).generate(PROMPT).tokens]


def models():
    return {"big": hashed_model(11, seed=1)}


def decode(script, acceptance, length=4, width=1, seed=0):
    params = {"script": script, "acceptance": acceptance, "length": length, "seed": seed}
    config = parse_config(
        {
            "target": {"model": "big"},
            "drafters": [
                {"kind": "treegraft.bench.scripted:ScriptedDrafter", "params": params, "name": "s"}
            ],
            "builder": {"kind": "layered", "depth": 1, "width": width, "budget": width * length},
            "stop": {"max_new_tokens": N},
        }
    )
    generation = build_pipeline(config, models=models()).generate(PROMPT)
    known = script[len(PROMPT) :]
    assert generation.tokens[: len(known)] == known
    return generation.statistics


def test_always_right_every_step_takes_the_whole_path(script):
    assert decode(script, 1.0).target_calls == N / 5


def test_never_right_every_step_takes_one_token(script):
    statistics = decode(script, 0.0, width=3)
    assert statistics.target_calls == N
    assert statistics.accepted == (0,)


@pytest.mark.parametrize("acceptance", [0.5, 0.8])
@pytest.mark.parametrize("width", [1, 4])
def test_right_as_often_as_told_and_decoys_are_never_taken(script, acceptance, width):
    """Depth d is reached with probability acceptance ** d, whatever stands beside the path."""
    statistics = decode(script, acceptance, width=width)
    expected = [acceptance**depth for depth in range(1, 5)]
    assert statistics.acceptance_by_depth == pytest.approx(expected, abs=0.1)
    kept = statistics.kept[0] / statistics.target_calls
    assert kept == pytest.approx(4 * width, rel=0.05), "the tree has the size that was asked for"


def test_a_seed_is_another_dice(script):
    calls = {decode(script, 0.6, seed=seed).target_calls for seed in range(4)}
    assert len(calls) > 1


def test_behind_the_end_of_the_script_nothing_is_drafted(script):
    statistics = decode(script[: len(PROMPT) + 10], 1.0)
    assert sum(statistics.accepted) <= 10


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"acceptance": 1.5}, "acceptance must be in 0..1, found 1.5"),
        ({"acceptance": 0.5, "length": 0}, "length must be at least 1, found 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(params, message):
    drafter = {
        "kind": "treegraft.bench.scripted:ScriptedDrafter",
        "params": {"script": [1]} | params,
    }
    config = parse_config({"target": {"model": "big"}, "drafters": [drafter]})
    with pytest.raises(ConfigError, match=message):
        build_pipeline(config, models=models())
