"""What every group of options has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Options that are fixed once they are checked; unknown ones are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
