"""The tie rule: which tokens of a text the bare model itself would have taken, given what is before.

One causal forward of the model on the whole text, without a cache, masks or positions from us,
judges every token. Arithmetic of one type decides alike wherever the first choice leads by more
than its rounding; where it does not, a token within rounding of the lead is a tie, and anything
else is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from treegraft.core.sampling import keyed_gumbel

UNITS = 2.0
"""Units in the last place of the larger logit that rounding explains: one was the most seen."""


@dataclass(frozen=True, slots=True)
class Place:
    """A token that is not the model's first choice.

    ``position`` counts new tokens from 0; ``gap`` is how far it lies below ``first``, with the
    noise of the seed if sampled, and ``within`` the largest gap that rounding explains.
    """

    position: int
    token: int
    first: int
    gap: float
    within: float

    @property
    def is_tie(self) -> bool:
        return self.gap <= self.within


def misses(
    model: PreTrainedModel,
    prompt: Sequence[int],
    new: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Place]:
    """Places where ``new`` after ``prompt`` is not what the bare model takes; none excused yet.

    In float32 and float64 ``within`` is 0, so that every place is a fault.
    """
    text = torch.tensor([[*prompt, *new]])
    with torch.no_grad():
        logits = model(input_ids=text, use_cache=False).logits[0]
    exact = logits.dtype in (torch.float32, torch.float64)
    unit = 0.0 if exact else UNITS * torch.finfo(logits.dtype).eps
    logits = logits.float()[len(prompt) - 1 : -1]
    places = []
    for position, token in enumerate(new):
        raw = values = logits[position]
        if temperature != 0.0:
            noise = keyed_gumbel(seed, len(prompt) + position, raw.shape[-1])
            values = (raw - raw.max()) / temperature + noise.to(raw)
        first = int(values.argmax())
        if token != first:
            largest = float(raw[[first, token]].abs().max())
            gap = float(values[first] - values[token])
            within = unit * largest / (temperature or 1.0)
            places.append(Place(position, token, first, gap, within))
    return places
