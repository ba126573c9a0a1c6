"""Configs in YAML or JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from treegraft.config.pipeline import PipelineConfig, parse_config
from treegraft.core.errors import ConfigError


class _YamlLoader(yaml.SafeLoader):
    """Refuses a mapping that gives a key twice, of which YAML would silently take the last."""

    # Where the file is read and not where mappings are made: there, merged keys (<<) may repeat.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in seen:
                    raise ConfigError(
                        f"{key.value!r} is given twice, in lines {seen[name]} and {line}; "
                        "keep one of them"
                    )
                seen[name] = line
        return node


def load_config(path: str | Path) -> PipelineConfig:
    """Read a YAML (or JSON) file; ConfigError names the file and the option."""
    data = _read(path)
    try:
        return parse_config(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def load_variants(path: str | Path) -> dict[str, PipelineConfig] | None:
    """The configs of a file that holds several, by name; None for a file that is one config.

    Such a file has two keys: ``base``, a config, and ``variants``, which maps each name to the
    top-level options that differ from the base. An option is replaced whole. ConfigError names the
    file, the variant and the option.
    """
    data = _read(path)
    if not isinstance(data, dict) or "variants" not in data:
        return None
    base, variants = data.get("base"), data["variants"]
    if set(data) != {"base", "variants"} or not isinstance(base, dict):
        raise ConfigError(
            f"{path}: a file with variants must hold the mappings base and variants alone, found "
            f"{', '.join(map(str, data))}"
        )
    if not isinstance(variants, dict) or not variants:
        raise ConfigError(f"{path}: variants must map names to options, found {variants!r}")
    made = {}
    for name, options in variants.items():
        try:
            if not isinstance(name, str) or not isinstance(options, dict | None):
                raise ConfigError(f"a mapping of options is needed, found {options!r}")
            made[name] = parse_config({**base, **(options or {})})
        except ConfigError as error:
            raise ConfigError(f"{path}: variants.{name}: {error}") from None
    return made


def _read(path: str | Path) -> Any:
    """What a YAML (or JSON) file holds."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config {str(path)!r} is not a text file in UTF-8") from None
    except ValueError as error:  # a path that no file can have
        raise ConfigError(f"config {str(path)!r} cannot be read: {error}") from None
    try:
        return yaml.load(text, _YamlLoader)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"config {str(path)!r} is no valid YAML: {where}") from None
    except RecursionError:
        raise ConfigError(f"config {str(path)!r} is nested too deeply") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # PyYAML's own, for a date that is none, a number of too many digits, and the like.
        raise ConfigError(f"config {str(path)!r} is no valid YAML: {error}") from None
