"""Names of models: local folders, hub ids and ``zoo:NAME``, and what can be wrong with them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from treegraft.core.errors import ConfigError, TreegraftError, UnsupportedModelError

__all__ = [
    "HEAD_FILES",
    "check_device",
    "one_line",
    "parse_dtype",
    "reading",
    "resolve",
    "resolve_head",
    "split_layers",
]

HEAD_FILES = ("head.json", "head.safetensors")
"""A draft head's folder: what it is, and its weights."""


_LAYERS = re.compile(r"(?P<name>.+)\[:(?P<n>\d+)\]")


def resolve(source: str) -> str:
    """Where the model of this name lies: a folder or a hub id.

    Raises ConfigError if ``source`` is a path and no model lies there.
    """
    if source.startswith("zoo:"):
        from treegraft.zoo.catalog import zoo_path

        return str(zoo_path(source.removeprefix("zoo:")))
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ConfigError(
                f"model {source!r}: the folder has no config.json; "
                "name a folder written by save_pretrained"
            )
        return path
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1 or not source
    if looks_local or os.path.exists(path):
        raise ConfigError(
            f"model {source!r}: no such folder; name a folder with a config.json, a hub id, "
            "or zoo:NAME"
        )
    return source


def split_layers(source: str) -> tuple[str, int | None]:
    """The model's own name, and how many of its first layers are meant by ``NAME[:N]``.

    ConfigError for fewer than one layer.
    """
    found = _LAYERS.fullmatch(source)
    if found is None:
        return source, None
    n_layers = int(found["n"])
    if n_layers < 1:
        raise ConfigError(f"model {source!r}: NAME[:N] takes the first N layers, N from 1")
    return found["name"], n_layers


def resolve_head(source: str) -> Path:
    """The folder of a draft head; ConfigError if there is none. Nothing is read."""
    folder = Path(source).expanduser()
    missing = [name for name in HEAD_FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"head {source!r}: no {missing[0]} there; name a folder that holds "
            f"{' and '.join(HEAD_FILES)}"
        )
    return folder


def parse_dtype(dtype: str | torch.dtype | None, device: torch.device) -> str | torch.dtype:
    """The dtype to load in: ``auto`` is that of the checkpoint.

    None means float32 on the CPU, where half precision is slow, and ``auto`` elsewhere.
    """
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            f"dtype {dtype!r} is not known: use auto, float64, float32, bfloat16 or float16"
        )
    return found


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Make one line out of what transformers raises about a source that is no usable model."""
    try:
        yield
    except TreegraftError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"model {source!r} brings its own code, which treegraft never runs: use an "
                "architecture that transformers has itself"
            ) from error
        raise ConfigError(f"model {source!r} cannot be loaded: {one_line(error)}") from error


def one_line(error: BaseException, width: int = 240) -> str:
    """The first line of an error's message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:width]


def check_device(device: str) -> None:
    """ConfigError unless torch can use ``device`` (cpu, cuda, cuda:N, mps) here."""
    kind, _, number = device.partition(":")
    n_found = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }[kind]
    if int(number or 0) >= n_found:
        raise ConfigError(
            f"backend.device {device!r} is not there: torch finds {n_found} {kind} devices; "
            "use cpu or one that it finds"
        )
