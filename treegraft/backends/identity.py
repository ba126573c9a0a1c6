"""Which model this is: a fingerprint of its weights that does not depend on where they lie."""

from __future__ import annotations

import hashlib

import torch

from treegraft.core.language_model import LanguageModel

__all__ = ["model_identity"]

_SAMPLE = 64


def model_identity(model: LanguageModel) -> str:
    """24 hex digits of a SHA-256 over names, shapes and a sample of every weight.

    The sample is 64 values, spread evenly, of each parameter, so that reading it is quick; the
    element type is not part of it, but values rounded to another type give another identity. A
    model without torch parameters is known by its name and vocabulary alone.
    """
    digest = hashlib.sha256()
    module = getattr(model, "model", None)
    if not isinstance(module, torch.nn.Module):
        digest.update(f"{model.name} {model.vocab_size}".encode())
        return digest.hexdigest()[:24]
    with torch.no_grad():
        for name, weight in module.named_parameters():
            flat = weight.detach().reshape(-1)
            step = max(1, flat.shape[0] // _SAMPLE)
            values = flat[::step][:_SAMPLE].to("cpu", torch.float32)
            digest.update(f"{name} {tuple(weight.shape)} ".encode())
            digest.update(values.numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:24]
