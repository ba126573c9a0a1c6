"""Who is compared by `treegraft bench peers`: ways of decoding, by the library that offers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treegraft.config import PipelineConfig

__all__ = ["FAMILIES", "HF_ARMS", "PEER_FAMILIES", "Arm", "line_up"]

PEER_FAMILIES = ("transformers", "economize", "flashspec")
FAMILIES = ("treegraft", *PEER_FAMILIES)
"""Each runs in a process of its own: modules of ``bench/workers``."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding.

    Attributes
    ----------
    name : in results. family : whose worker runs it. method : as that worker calls it.
    candidates : options to choose from in the sweep, the library's defaults first; one alone is
        taken as it is.
    same_tokens : whether at temperature above 0 its tokens are to be those of ``plain``.
    """

    name: str
    family: str
    method: str
    candidates: tuple[Mapping[str, Any], ...] = ({},)
    same_tokens: bool = False


# Some settings of transformers' assistant. Its default is 20 tokens at most, as long as the
# assistant is surer than 0.4 of each.
_ASSISTANT = tuple(
    {
        "num_assistant_tokens": n,
        "num_assistant_tokens_schedule": schedule,
        "assistant_confidence_threshold": threshold,
    }
    for n, schedule, threshold in (
        (2, "constant", 0.0),
        (4, "constant", 0.0),
        (6, "constant", 0.0),
        (6, "constant", 0.4),
        (4, "heuristic", 0.0),
        (4, "heuristic", 0.4),
    )
)
_CYCLES = tuple({"cycle_length": n} for n in (4, 3, 6, 8))
_GAMMAS = tuple({"gamma": n} for n in (4, 2, 6))

_PEERS = (
    Arm("hf_plain", "transformers", "generate"),
    Arm("hf_compiled", "transformers", "compiled"),
    Arm("hf_assisted", "transformers", "assisted"),
    Arm("hf_assisted_tuned", "transformers", "assisted", _ASSISTANT),
    Arm(
        "hf_lookup",
        "transformers",
        "lookup",
        tuple({"prompt_lookup_num_tokens": n} for n in (3, 2, 5, 10)),
    ),
    Arm("economize_draft_model", "economize", "draft_model", _CYCLES),
    Arm("economize_lookup", "economize", "lookup", _CYCLES),
    Arm("economize_hybrid", "economize", "hybrid", _CYCLES),
    Arm("flashspec_draft_model", "flashspec", "draft_model", _GAMMAS),
    Arm("flashspec_lookup", "flashspec", "lookup", _GAMMAS),
    Arm(
        "flashspec_composite",
        "flashspec",
        "composite",
        ({}, {"drafter_strategy": "composite-g4"}),
    ),
)
HF_ARMS = tuple(arm.name for arm in _PEERS if arm.family == "transformers")


def line_up(configs: Mapping[str, PipelineConfig]) -> tuple[Arm, ...]:
    """Our pipelines by name (the first is the baseline), then every peer."""
    ours = (
        Arm(
            name,
            "treegraft",
            "pipeline",
            ({"config": config.model_dump(mode="json")},),
            same_tokens=config.same_tokens,
        )
        for name, config in configs.items()
    )
    return (*ours, *_PEERS)
