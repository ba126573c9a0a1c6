"""Which pipelines' schedules can be evaluated offline."""

from __future__ import annotations

from treegraft.config import PipelineConfig
from treegraft.core.errors import ConfigError
from treegraft.policies.drafters.head import HeadConfig
from treegraft.policies.drafters.lm import LmConfig
from treegraft.policies.drafters.suffix import SuffixConfig

__all__ = ["check_collectable"]


def check_collectable(config: PipelineConfig) -> None:
    """ConfigError where the accepted length of a tree cannot be read off a recorded text."""
    if not config.drafters:
        raise ConfigError("schedules need drafters, found none: add some to the config")
    if config.verifier.kind != "walk":
        raise ConfigError(
            "schedules are evaluated offline under verifier.kind 'walk', under which the text does "
            f"not depend on the draft, found {config.verifier.kind!r}"
        )
    if config.leftover:
        raise ConfigError(
            "leftover must be false to evaluate schedules offline, found true: a step's tree would "
            "depend on the schedule of the step before"
        )
    calibration = getattr(config, "calibration", None)
    if calibration is not None and calibration.kind != "none":
        raise ConfigError(
            "calibration.kind must be 'none' to evaluate schedules offline, found "
            f"{calibration.kind!r}: scores would depend on the schedules of earlier steps"
        )
    for name, drafter in zip(config.drafter_names, config.drafters, strict=True):
        if isinstance(drafter, SuffixConfig) and drafter.store_tokens:
            raise ConfigError(
                "drafters must not keep earlier texts (store_tokens: 0) to evaluate schedules "
                f"offline, found {drafter.store_tokens} of {name!r}: it would have seen the text"
            )
        if isinstance(drafter, HeadConfig):
            raise ConfigError(
                "drafters must not ask for the target's hidden states to evaluate schedules "
                f"offline, found {name!r}: traces do not keep them"
            )
        draws = isinstance(drafter, LmConfig) and drafter.children != "topk"
        if draws and config.sampling.temperature > 0.0:
            raise ConfigError(
                "drafters must take the likeliest children (children: topk) to evaluate schedules "
                f"offline at a temperature, found {name!r}, which draws"
            )
