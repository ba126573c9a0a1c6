"""The configurations that ship as the best ones for the zoo, and the endpoints beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treegraft.config import PipelineConfig, load_config, parse_config
from treegraft.core.errors import ConfigError

__all__ = ["our_configs", "shipped_config", "shipped_endpoints"]

_FOLDER = Path(__file__).parent / "shipped"
# What plain decoding has at its default: nobody drafts, and the built-in walk verifies.
_DRAFTING = ("drafters", "ride_along", "builder", "graft", "scheduler", "verifier")


# The best fixed schedule on this tree, on 21 shipped prompts that no table of ours reports.
_SCHEDULE = ("small", "small", "small", "recycle")


def shipped_config(temperature: float = 0.0, other_models: bool = False) -> PipelineConfig:
    """The best known configuration for the zoo on a CPU: greedy, or for sampled texts.

    With ``other_models`` the models or their type are going to be replaced, which the scheduler
    that was fitted on the zoo's would refuse: a fixed schedule takes its place.
    """
    config = load_config(_FOLDER / ("greedy.yaml" if temperature == 0.0 else "sampled.yaml"))
    if not other_models or config.scheduler.kind != "value":
        return config
    scheduler = {"kind": "fixed", "calls": _SCHEDULE}
    return parse_config(config.model_dump() | {"scheduler": scheduler})


def shipped_endpoints() -> PipelineConfig:
    """The paper's drafters on the same tree, for ``never`` and ``always``."""
    return load_config(_FOLDER / "endpoints.yaml")


def our_configs(
    ours: PipelineConfig, endpoints: PipelineConfig, target: str | None, drafter: str | None
) -> dict[str, PipelineConfig]:
    """The four pipelines of ours by name: ``plain``, ``never``, ``always``, ``ours``.

    Parameters
    ----------
    ours : the configuration in question; its backend is that of all four.
    endpoints : whose drafters and tree ``never`` and ``always`` have.
    target, drafter : models instead of the configs' own; ``drafter`` takes the place of the last
        (dearest) model among the drafters, under its name.
    """
    rooms = {room: ours.model_dump()[room] for room in ("backend", "sampling", "stop")}
    base = endpoints.model_dump() | rooms
    named = {
        "plain": {key: value for key, value in base.items() if key not in _DRAFTING},
        "never": base | {"scheduler": {"kind": "never"}},
        "always": base | {"scheduler": {"kind": "always"}},
        "ours": ours.model_dump(),
    }
    return {name: parse_config(_with_models(data, target, drafter)) for name, data in named.items()}


def _with_models(data: dict[str, Any], target: str | None, drafter: str | None) -> dict[str, Any]:
    data = dict(data)
    if target is not None:
        data["target"] = {"model": target}
    drafters = list(data.get("drafters", ()))
    if drafter is not None and drafters:
        places = [i for i, entry in enumerate(drafters) if entry["kind"] == "lm"]
        if not places:
            raise ConfigError(
                f"--drafter {drafter}: the config has no drafter of kind lm to replace"
            )
        kept = parse_config(data).drafter_names[places[-1]]
        drafters[places[-1]] = drafters[places[-1]] | {"model": drafter, "name": kept}
        data["drafters"] = drafters
    return data
