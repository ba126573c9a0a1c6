"""Libraries: native code of one kind of forward, made once and kept on disk without weights.

A library runs on the weights of the model in this process, so its code is small, serves every
checkpoint of the same architecture and sees weights that are changed in place.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

__all__ = ["Library", "StateWatch", "cache_folder", "kept", "library_key"]

_FORMAT = 3
_OWN = (
    "treegraft.backends.hf",
    "treegraft.backends.kv",
    "treegraft.backends.masks",
    "treegraft.backends.panels",
)
"""Code of ours that is compiled with the model's."""


def cache_folder() -> Path:
    """Where libraries are kept: TREEGRAFT_CACHE_DIR, else treegraft in the user's cache folder."""
    named = os.environ.get("TREEGRAFT_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treegraft"


def library_key(model: nn.Module, form: Any) -> str | None:
    """Name of the library of a model and a form of forward; None if it must not be kept.

    In it goes all that decides the code: the modules with their sources and numbers, names, shapes
    and strides of the weights, every configuration among them, the form, number of threads,
    processor and versions. Modules with hooks or with a forward of their own do what no name says.
    """
    sources: dict[str, str] = {}
    modules = []
    configs: dict[int, Any] = {}  # by identity, as most modules share one
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        if any(hooks) or "forward" in vars(module):
            return None
        kind = type(module)
        numbers = sorted(_numbers(module).items())
        modules.append((name, kind.__module__, kind.__qualname__, module.extra_repr(), numbers))
        for each in (kind.__module__, *_OWN):
            if each not in sources:
                sources[each] = _source_hash(each)
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            configs.setdefault(id(config), config)
    told = {
        "format": _FORMAT,
        "versions": (torch.__version__, version("transformers"), sys.version_info[:2]),
        "machine": (platform.machine(), torch.backends.cpu.get_cpu_capability(), _features()),
        "threads": torch.get_num_threads(),
        "modules": modules,
        "sources": sources,
        "configs": [_settings(config) for config in configs.values()],
        "state": [(name, *map(str, _layout(tensor))) for name, tensor in state_of(model).items()],
        "form": repr(form),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:32]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those that several modules share under each name."""
    state = dict(model.named_parameters(remove_duplicate=False))
    return state | dict(model.named_buffers(remove_duplicate=False))


@final
class StateWatch:
    """Notices where modules, parameters or buffers of a model are replaced, or their memory.

    To collect a model's state anew takes milliseconds, and every text begins with the question.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.look()

    def look(self) -> None:
        """Take what there is now for known."""
        self._modules = list(self._model.modules())
        self._known = self._now()

    def _now(self) -> list[tuple[Any, ...]]:
        children = [item for module in self._modules for item in module._modules.items()]
        return children + [
            (name, id(t), t.data_ptr(), t.shape, t.stride(), t.dtype, t.device)
            for module in self._modules
            for owned in (module._parameters, module._buffers)
            for name, t in owned.items()
            if t is not None
        ]

    def changed(self) -> bool:
        """Whether something was replaced, added or taken away since the last look."""
        return self._now() != self._known


def _settings(config: Any) -> dict[str, Any]:
    """What a configuration says but for the model's name."""
    # Which kernels were chosen is not in to_dict.
    kernels = {name: value for name, value in vars(config).items() if "_implementation" in name}
    settings = {**config.to_dict(), **kernels}
    settings.pop("_name_or_path", None)
    return settings


def _numbers(module: nn.Module) -> dict[str, float]:
    """A module's own numbers (a scale, a window), which the code holds as constants."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float) and name != "training" and not name.startswith("_")
    }


def _source_hash(module: str) -> str:
    try:
        return hashlib.sha256(inspect.getsource(sys.modules[module]).encode()).hexdigest()
    except (OSError, TypeError, KeyError):
        return "unknown"


def _features() -> str:
    """What the processor can do, as code is made for this very one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@final
class Library:
    """The code, bound to the weights of a model.

    Parameters
    ----------
    path : of the package. model : whose weights it runs on.

    Attributes
    ----------
    fits : whether the weights have the sizes and strides that the code was made for.

    Raises
    ------
    RuntimeError : where the package cannot be loaded, or wants weights that the model lacks.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        self._model = model
        self._package = torch._inductor.aoti_load_package(str(path))
        self._names = sorted(self._package.get_constant_fqns())
        self._held: dict[str, Tensor] = {}
        self._addresses: list[int] = []
        state = state_of(model)
        self._state_names = set(state)
        self.fits = True
        lacking = [name for name in self._names if name not in state]
        if lacking:
            raise RuntimeError(f"the model has no {lacking[0]!r}")
        self._layout = [_layout(state[name]) for name in self._names]
        self.bind()
        self.run: Callable[[list[Tensor]], list[Tensor]] = self._package.loader.boxed_run
        """The outputs for a list of inputs, which it empties. What the package's own call does
        besides, reading the specification of its arguments anew, takes 0.25 ms."""

    def bind(self) -> None:
        """Run on the weights as they lie in memory now."""
        state = state_of(self._model)
        if set(state) != self._state_names:
            self.fits = False  # modules were put in the place of others, or a bias came
            return
        held = {name: state[name].detach() for name in self._names}
        self.fits = [_layout(tensor) for tensor in held.values()] == self._layout
        addresses = [tensor.data_ptr() for tensor in held.values()]
        if self.fits and addresses != self._addresses:
            # Not copied: the dictionary keeps alive what the code reads.
            self._package.load_constants(held, check_full_update=True, user_managed=True)
            self._held, self._addresses = held, addresses


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()


def kept(key: str | None, model: nn.Module, make: Callable[[str], Any]) -> tuple[Library, bool]:
    """The library of this key and whether it was found; else ``make(path)`` packs one.

    A package that cannot be read is made anew. Without a key it is not kept.
    """
    if key is None:
        with tempfile.TemporaryDirectory(prefix="treegraft-") as scratch:
            return _made(Path(scratch) / "library.pt2", model, make), False
    folder = cache_folder()
    path = folder / f"{key}.pt2"
    if path.exists():
        try:
            return Library(path, model), True
        except Exception:  # torn or of another build: whatever it was, it is replaced below
            pass
    try:
        folder.mkdir(parents=True, exist_ok=True)
        making = tempfile.TemporaryDirectory(prefix="making-", dir=folder)
    except OSError as error:
        raise OSError(
            f"libraries cannot be kept in {str(folder)!r} ({error.strerror}): set "
            "TREEGRAFT_CACHE_DIR to a folder that can be written"
        ) from error
    with making as inner:
        made = Path(inner) / path.name
        library = _made(made, model, make)
        made.replace(path)  # whole or not at all
    return library, False


def _made(path: Path, model: nn.Module, make: Callable[[str], Any]) -> Library:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(str(path))
    return Library(path, model)
