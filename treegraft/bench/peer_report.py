"""What a comparison with other libraries found: runs, ratios round by round, and the report.

docs/bench.md has the definitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treegraft.bench.comparison import Ratio
from treegraft.bench.lineup import HF_ARMS, Arm
from treegraft.prompts import Prompt

__all__ = ["BASELINE", "OURS", "PeerRun", "PeerSettings", "Peers"]

BASELINE, OURS, HF_PLAIN = "plain", "ours", "hf_plain"


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What all arms share.

    Attributes
    ----------
    target, drafter : models by name; ``drafter`` is the one that peers draft with, None for none.
    dtype, device : of all models. threads : of torch in every process; None leaves its default.
    temperature, seed, max_new_tokens : of every text. eos : ids that end one.
    sweep_prompts, sweep_tokens : how many prompts, and new tokens of each, the sweep decodes with
        every candidate.
    profile_rounds : about how many rounds the profile of ``ours`` is taken in.
    answer_seconds : how long one request may take before its process is ended.
    max_seconds : begin no further round after so many seconds since the start; None for no limit.
    """

    target: str
    drafter: str | None
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    eos: tuple[int, ...] = ()
    sweep_prompts: int = 3
    sweep_tokens: int = 64
    profile_rounds: int = 7
    answer_seconds: float = 600.0
    max_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One prompt decoded by one arm.

    Attributes
    ----------
    seconds : wall time of the call. cpu_seconds : time that the process worked meanwhile, on all
        its threads; None if the worker does not say.
    comparable : whether the tokens had to be the baseline's.
    difference : index of the first new token that is not; None if there is none.
    """

    round: int
    prompt: Prompt
    arm: str
    seconds: float
    cpu_seconds: float | None
    tokens: tuple[int, ...]
    comparable: bool
    difference: int | None

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the whole call, prefill included."""
        return len(self.tokens) / max(self.seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Plain data; ``identical`` is None where tokens are not comparable."""
        return {
            "round": self.round,
            "prompt": self.prompt.id,
            "kind": self.prompt.kind,
            "arm": self.arm,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "new_tokens": len(self.tokens),
            "tokens_per_second": self.tokens_per_second,
            "identical": self.difference is None if self.comparable else None,
            "first_difference": self.difference,
        }


@dataclass(slots=True)
class Peers:
    """What was measured; filled in as the rounds go on.

    Attributes
    ----------
    arms : in order. runs : of all rounds. chosen : the options each arm ran with.
    sweeps : tokens per second of every candidate of the arms that had several.
    warm_up_seconds : first calls of each arm, with loading and compiling; counted nowhere else.
    versions : by family. failed : arms that could not run, with the error.
    absent : families that are not installed, with what to do about it.
    profiles : of ``ours``, from single rounds, as ``Profile.as_dict`` has them.
    n_offered : rounds there would have been without a time limit.
    """

    settings: PeerSettings
    arms: tuple[Arm, ...]
    n_offered: int
    runs: list[PeerRun] = field(default_factory=list)
    chosen: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    sweeps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    warm_up_seconds: dict[str, float] = field(default_factory=dict)
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    profiles: list[Mapping[str, Any]] = field(default_factory=list)
    threads: int | None = None

    @property
    def n_rounds(self) -> int:
        """Rounds that were decoded."""
        return len({run.round for run in self.runs})

    @property
    def finished(self) -> tuple[str, ...]:
        """Arms that decoded every round."""
        ran = {run.arm for run in self.runs}
        return tuple(a.name for a in self.arms if a.name in ran and a.name not in self.failed)

    def total_speed(self, arm: str) -> float:
        """All new tokens over all seconds."""
        runs = [run for run in self.runs if run.arm == arm]
        return _Side([len(run.tokens) for run in runs], [run.seconds for run in runs]).total

    def best(self, families: str) -> str | None:
        """The fastest arm over all rounds among ``hf`` or ``peers`` (the other packages)."""
        hf = [arm for arm in self.finished if arm in HF_ARMS]
        others = [
            arm.name
            for arm in self.arms
            if arm.family not in ("treegraft", "transformers") and arm.name in self.finished
        ]
        among = {"hf": hf, "peers": others}[families]
        return max(among, key=self.total_speed) if among else None

    def ratio(self, arm: str, other: str | None, cpu: bool = False) -> Ratio | None:
        """Speed of ``arm`` over ``other``; None where one of them did not run.

        ``cpu`` : by the time that the processes worked, which other load on the machine does not
        lengthen; None if it is not known.
        """
        if other is None or arm not in self.finished or other not in self.finished:
            return None
        sides = []
        for name in (arm, other):
            runs = [run for run in self.runs if run.arm == name]
            if cpu and any(run.cpu_seconds is None for run in runs):
                return None
            taken = [(run.cpu_seconds or 0.0) if cpu else run.seconds for run in runs]
            sides.append(_Side([len(run.tokens) for run in runs], taken))
        each = [a / b for a, b in zip(sides[0].speeds, sides[1].speeds, strict=True)]
        low, median, high = np.quantile(each, (0.1, 0.5, 0.9)).tolist()
        return Ratio(sides[0].total / sides[1].total, median, low, high)

    @property
    def ratios(self) -> dict[str, Ratio | None]:
        """The headline figures."""
        return self._headline(cpu=False)

    @property
    def cpu_ratios(self) -> dict[str, Ratio | None]:
        """The same by the time that the processes worked."""
        return self._headline(cpu=True)

    def _headline(self, cpu: bool) -> dict[str, Ratio | None]:
        return {
            "ours/plain": self.ratio(OURS, BASELINE, cpu),
            "ours/hf_best": self.ratio(OURS, self.best("hf"), cpu),
            "ours/peers_best": self.ratio(OURS, self.best("peers"), cpu),
            "plain/hf_plain": self.ratio(BASELINE, HF_PLAIN, cpu),
        }

    @property
    def physical_limit_share(self) -> float | None:
        """Bare forwards over steps of ``ours`` (bench/profile.py), all profiled steps together."""
        bare = sum(p["bare_seconds_per_step"] * p["steps"] for p in self.profiles)
        steps = sum(p["seconds_per_step"] * p["steps"] for p in self.profiles)
        return bare / steps if steps else None

    def n_different(self, arm: str) -> int | None:
        """Texts with other tokens than the baseline's; None if they need not be equal."""
        runs = [run for run in self.runs if run.arm == arm]
        if not all(run.comparable for run in runs):
            return None
        return sum(run.difference is not None for run in runs)

    @property
    def faulty(self) -> list[str]:
        """Arms of ours that owe the baseline's tokens and differ, where no rounding excuses it."""
        if self.settings.dtype not in ("float32", "float64"):
            return []
        ours = [arm.name for arm in self.arms if arm.family == "treegraft"]
        return [arm for arm in ours if self.n_different(arm)]

    def as_dict(self) -> dict[str, Any]:
        """The report that ``treegraft bench peers --json`` prints; docs/bench.md states it."""
        return {
            "ratios": {name: _plain(ratio) for name, ratio in self.ratios.items()},
            "cpu_ratios": {name: _plain(ratio) for name, ratio in self.cpu_ratios.items()},
            "physical_limit_share": self.physical_limit_share,
            "best": {"hf_best": self.best("hf"), "peers_best": self.best("peers")},
            "arms": {
                arm.name: {
                    "family": arm.family,
                    "options": self.chosen[arm.name],
                    "tokens_per_second": self.total_speed(arm.name),
                    "ratio_to_plain": _plain(self.ratio(arm.name, BASELINE)),
                    "texts_that_differ": self.n_different(arm.name),
                }
                for arm in self.arms
                if arm.name in self.finished
            },
            "failed": self.failed,
            "absent": self.absent,
            "rounds": self.n_rounds,
            "rounds_offered": self.n_offered,
            "warm_up_seconds": self.warm_up_seconds,
            "sweeps": self.sweeps,
            "versions": self.versions,
            "threads": self.threads,
            "settings": {
                name: getattr(self.settings, name) for name in PeerSettings.__dataclass_fields__
            },
            "profiles": list(self.profiles),
            "runs": [run.as_dict() for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class _Side:
    """New tokens and seconds of one arm, round by round."""

    tokens: Sequence[int]
    seconds: Sequence[float]

    @property
    def speeds(self) -> list[float]:
        pairs = zip(self.tokens, self.seconds, strict=True)
        return [n / max(seconds, 1e-9) for n, seconds in pairs]

    @property
    def total(self) -> float:
        return sum(self.tokens) / max(sum(self.seconds), 1e-9)


def _plain(ratio: Ratio | None) -> dict[str, float] | None:
    if ratio is None:
        return None
    return {"median": ratio.median, "low": ratio.low, "high": ratio.high, "total": ratio.total}
