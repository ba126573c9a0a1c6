"""A small family of models and prompts that ships with the package."""

from treegraft.zoo.catalog import (
    ZooPrompt,
    zoo_kinds,
    zoo_names,
    zoo_path,
    zoo_prompts,
    zoo_scheduler,
)

__all__ = ["ZooPrompt", "zoo_kinds", "zoo_names", "zoo_path", "zoo_prompts", "zoo_scheduler"]
