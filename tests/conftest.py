"""Hypothesis profiles, and a guard that no test leaves global state changed.

``HYPOTHESIS_PROFILE=ci`` (the default where the variable CI is set) runs more examples, always the
same ones; tests marked ``slow`` use ``thorough`` whatever profile is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from treegraft import pipeline
from treegraft.parts import Parts

settings.register_profile("dev", max_examples=30, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, database=None)
settings.register_profile(
    "thorough", max_examples=1000, deadline=None, derandomize=True, database=None
)
# On a CI machine the same examples run every time; elsewhere each run tries new ones.
_DEFAULT = "ci" if os.environ.get("CI") else "dev"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", _DEFAULT))

# Building a Hugging Face model draws its weights from torch's global stream; tests in these folders
# build many.
_DRAW_WEIGHTS = {"backends", "bench", "cli", "zoo"}


@pytest.fixture(autouse=True, scope="session")
def trees_of_our_own_parts_are_checked_too() -> Iterator[None]:
    """Hold every pruned tree against the laws, as pipelines do only with parts of others."""
    with pytest.MonkeyPatch.context() as patch:

        def parts(**given: Any) -> Parts:
            return Parts(**(given | {"foreign": True}))

        patch.setattr(pipeline, "Parts", parts)
        yield


@pytest.fixture(autouse=True)
def global_state_is_left_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which torch's default dtype, grad mode or random stream differs."""
    folder = request.path.parent.name
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    stream = torch.random.get_rng_state()
    yield
    assert torch.get_default_dtype() is dtype, "the default dtype was changed"
    assert torch.is_grad_enabled() is grad, "the grad mode was changed"
    if folder not in _DRAW_WEIGHTS:
        assert torch.equal(torch.random.get_rng_state(), stream), "torch's random stream moved on"
