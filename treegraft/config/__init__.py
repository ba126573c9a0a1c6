"""The configuration of a pipeline: models of its options, and files that hold them."""

from treegraft.config.files import load_config, load_variants
from treegraft.config.pipeline import (
    BackendConfig,
    CustomConfig,
    DrafterConfig,
    PipelineConfig,
    SamplingConfig,
    StopConfig,
    TargetConfig,
    override,
    parse_config,
)
from treegraft.config.processors import ProcessorsConfig

__all__ = [
    "BackendConfig",
    "CustomConfig",
    "DrafterConfig",
    "PipelineConfig",
    "ProcessorsConfig",
    "SamplingConfig",
    "StopConfig",
    "TargetConfig",
    "load_config",
    "load_variants",
    "override",
    "parse_config",
]
