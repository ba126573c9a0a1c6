"""Draft heads on disk: a block of transformers' own on the embeddings and output layer of a target.

A head's folder holds ``head.json`` (format, target, shape) and ``head.safetensors``: the weights of
the block, and a sample of the weights of the target that it was trained for. Embedding and output
layer are the target's, shared and not stored.

Shapes (docs/shapes.md): n queries of this forward, K kv span, V vocabulary, d width of the target's
hidden states, e width of its embeddings.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from treegraft.backends.hf import HFLanguageModel
from treegraft.backends.kv import KVSlab
from treegraft.backends.sources import HEAD_FILES, one_line, resolve_head
from treegraft.core.draft_head import DraftHead
from treegraft.core.errors import ConfigError, UnsupportedModelError
from treegraft.core.language_model import LanguageModel

__all__ = ["HFDraftHead", "HeadBlock", "load_head", "save_head", "weight_sample"]

FORMAT = 1
_CONFIG, _WEIGHTS = HEAD_FILES
_SAMPLE = "target_sample"
_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)
"""What of transformers' LlamaConfig decides the block; the rest stays at its defaults."""
_PER_PARAMETER = 32
_BFLOAT16 = 2.0**-7  # relative error of a weight that was rounded once


class HeadBlock(nn.Module):
    """The trained part: embedding and state, normed and joined, through transformers' Llama.

    Parameters
    ----------
    embedding_size : width of the target's embeddings (e).
    shape : options of LlamaConfig, those that ``head.json`` holds; ``hidden_size`` is d.
    """

    def __init__(self, embedding_size: int, shape: Mapping[str, Any]) -> None:
        super().__init__()
        config = LlamaConfig(**shape, vocab_size=1, bos_token_id=None, eos_token_id=None)
        self.embedding_size = embedding_size
        self.shape = {name: shape[name] for name in _SHAPE if name in shape}
        width, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_norm = nn.RMSNorm(embedding_size, eps)
        self.state_norm = nn.RMSNorm(width, eps)
        self.join = nn.Linear(embedding_size + width, width, bias=False)
        self.body = LlamaModel(config)
        # It is given what it would look up.
        self.body.set_input_embeddings(None)
        parameters = inspect.signature(self.body.forward).parameters
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"

    def forward(
        self, embeddings: Tensor, states: Tensor, positions: Tensor, added: Tensor, cache: Any
    ) -> Tensor:
        """What it says behind each token, float [B, n, d].

        Parameters
        ----------
        embeddings, states : float [B, n, e] and [B, n, d], of each token and before it.
        positions : int64 [1, n].
        added : float [1, 1, n, span], what is added to the attention scores.
        cache : a cache of transformers that takes the keys and values.
        """
        normed = (self.embedding_norm(embeddings), self.state_norm(states))
        out: Tensor = self.body(
            inputs_embeds=self.join(torch.cat(normed, dim=-1)),
            position_ids=positions,
            attention_mask=added,
            use_cache=True,
            **{self._cache_keyword: cache},
        ).last_hidden_state
        return out


def weight_sample(model: nn.Module) -> Tensor:
    """Float32 [m]: some of a model's weights, up to 32 of each parameter, in the order of names.

    What tells one checkpoint from another in any floating dtype; padding of the vocabulary or a
    quantisation makes another model of it.
    """
    parts = []
    for _, parameter in sorted(model.named_parameters()):
        if parameter.is_floating_point():
            flat = parameter.detach().flatten()
            step = max(1, flat.shape[0] // _PER_PARAMETER)
            parts.append(flat[::step][:_PER_PARAMETER].to("cpu", torch.float32))
    return torch.cat(parts)


def save_head(block: HeadBlock, folder: str | Path, target: str, sample: Tensor) -> None:
    """Write a head's folder.

    ``target`` is how messages call the model that it was trained for, ``sample`` that model's
    ``weight_sample``. The dtype of the block is that of the file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "format": FORMAT,
        "target": target,
        "embedding_size": block.embedding_size,
        "shape": block.shape,
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in block.state_dict().items()}
    save_file({**tensors, _SAMPLE: sample.float().contiguous()}, folder / _WEIGHTS)


@final
class HFDraftHead(DraftHead):
    """A block on the embedding and the output layer of a transformers target, which it shares.

    Logits are those of the output layer alone: a scale or soft cap that the target's own forward
    puts behind it (gemma2, cohere2, granite) is left to training.

    Parameters
    ----------
    block : cast to the dtype of the target's states and moved to its output layer's device.
    target : the model whose states it reads.
    """

    def __init__(self, block: HeadBlock, target: HFLanguageModel, name: str) -> None:
        width, sizes = target.hidden_size, (block.embedding_size, block.shape["hidden_size"])
        self._embedding = target.model.get_input_embeddings()
        self._read_out = target.model.get_output_embeddings()
        expected = (self._embedding.weight.shape[-1], width)
        if width is None or sizes != expected:
            raise UnsupportedModelError(
                f"head {name!r} reads embeddings and states of widths {sizes}, target "
                f"{target.name!r} has {expected}: use a head that was trained for it"
            )
        self.name = name
        self.vocab_size = target.vocab_size
        self.hidden_size = width
        self.max_positions = block.shape.get("max_position_embeddings")
        self.device = self._read_out.weight.device
        self.dtype = target.report.dtype
        self._block = block.to(self.device, self.dtype).eval().requires_grad_(False)
        self._n_layers = self._block.body.config.num_hidden_layers
        self._shown = torch.zeros((), dtype=self.dtype, device=self.device)
        # The lowest finite number and not -inf: minus infinity less itself is NaN.
        self._hidden = torch.full_like(self._shown, torch.finfo(self.dtype).min)

    def new_cache(self, n_rows: int, old: KVSlab | None = None) -> KVSlab:
        """Open a KV slab of ``n_rows`` rows, with the content of ``old`` if given."""
        cache = KVSlab(self._n_layers, n_rows)
        if old is not None:
            cache.take_over_(old)
        return cache

    def forward(
        self,
        cache: KVSlab,
        tokens: Tensor,
        states: Tensor,
        rows: Tensor,
        positions: Tensor,
        visible: Tensor,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Read ``n`` tokens and the states before them: see DraftHead.forward."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            span = cache.aim_(rows, positions, visible.shape[1])
            seen = visible.to(self.device, non_blocking=True)
            seen = nn.functional.pad(seen, (0, span - seen.shape[1]))
            ids = tokens.to(self._embedding.weight.device, non_blocking=True)
            said = self._block(
                self._embedding(ids)[None].to(self.device, self.dtype),
                states[None],
                positions.to(self.device, non_blocking=True)[None],
                torch.where(seen, self._shown, self._hidden)[None, None],
                cache,
            )[0]
            logits = self._read_out(said[-1:] if last_only else said)
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        return said, logits

    def move_(self, cache: KVSlab, source: Tensor, target: Tensor) -> None:
        """Copy cache rows: see LanguageModel.move_."""
        with torch.no_grad():
            cache.move_(source, target)


def load_head(source: str, target: LanguageModel) -> HFDraftHead:
    """Load the head in a folder for a loaded target.

    Raises ConfigError if there is no head that this version reads, UnsupportedModelError if it was
    trained for another target than this one.
    """
    folder = resolve_head(source)
    if not isinstance(target, HFLanguageModel):
        raise UnsupportedModelError(
            f"head {source!r} shares embedding and output layer with a model of transformers, "
            f"found target {target.name!r} ({type(target).__name__})"
        )
    config = _read_config(folder / _CONFIG, source)
    try:
        tensors = load_file(folder / _WEIGHTS)
        sample = tensors.pop(_SAMPLE)
        block = HeadBlock(config["embedding_size"], config["shape"])
        block.load_state_dict(tensors)
    except torch.OutOfMemoryError:
        raise
    # safetensors, torch and the config class each have their own way to say that a file is wrong.
    except Exception as error:
        raise ConfigError(f"head {source!r} cannot be loaded: {one_line(error)}") from error
    found = weight_sample(target.model)
    same = sample.shape == found.shape and bool(
        ((sample - found).abs() <= _BFLOAT16 * sample.abs() + 1e-7).all()
    )
    if not same:
        raise UnsupportedModelError(
            f"head {source!r} was trained for {config['target']!r}, and the weights of target "
            f"{target.name!r} are others: use a head that was trained for it"
        )
    return HFDraftHead(block, target, source)


def _read_config(path: Path, source: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"head {source!r}: {path.name} cannot be read: {one_line(error)}"
        ) from error
    keys = {"format", "target", "embedding_size", "shape"}
    if not isinstance(config, dict) or set(config) != keys or config["format"] != FORMAT:
        raise ConfigError(
            f"head {source!r}: {path.name} must hold {', '.join(sorted(keys))} with format "
            f"{FORMAT}, found {str(config)[:80]}"
        )
    shape = config["shape"]
    if not isinstance(shape, dict) or not set(shape) <= set(_SHAPE) or "hidden_size" not in shape:
        raise ConfigError(
            f"head {source!r}: shape may hold {', '.join(_SHAPE)} and must hold hidden_size, found "
            f"{str(shape)[:80]}"
        )
    return config
