"""TreeGraft beside what one would use instead: same weights, prompts and settings, taking turns.

Every library decodes in a process of its own (``workers``). In each *round* one prompt is decoded
once by every arm, in an order that turns from round to round, and ratios are taken round by round;
docs/bench.md has the definitions and the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import numpy as np

from treegraft.backends.sources import resolve
from treegraft.bench.comparison import Ratio, first_difference
from treegraft.bench.lineup import FAMILIES, HF_ARMS, Arm
from treegraft.bench.worker_process import WorkerError, WorkerProcess, worker_command
from treegraft.core.errors import ConfigError, PromptError, TreegraftError
from treegraft.prompts import Prompt

__all__ = ["BASELINE", "OURS", "PeerRun", "PeerSettings", "Peers", "compare_peers"]

BASELINE, OURS, HF_PLAIN = "plain", "ours", "hf_plain"
_WARM_UP_TOKENS = 16


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


def compare_peers(
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    settings: PeerSettings,
    commands: Mapping[str, Sequence[str]] | None = None,
    required: Sequence[str] = (),
    on_progress: Callable[[str], None] | None = None,
) -> Peers:
    """Decode every prompt with every arm in turns.

    Parameters
    ----------
    arms : ``plain`` among them, which tokens and ratios are compared with.
    prompts : at least one, as token ids; each makes one round.
    commands : by family, what to start instead of ``worker_command(family)``.
    required : families whose package must be there; of others a missing one is only noted.
    on_progress : told what is going on, a line at a time, and of each round.

    Raises
    ------
    TreegraftError : the baseline cannot run. ConfigError, PromptError : before anything starts.
    """
    if BASELINE not in [arm.name for arm in arms]:
        raise ConfigError(f"arms must hold {BASELINE!r}, found {[arm.name for arm in arms]}")
    if not prompts:
        raise PromptError("a comparison needs at least one prompt, found none")
    result = Peers(settings, tuple(arms), n_offered=len(prompts))
    with ExitStack() as stack:
        bench = _Bench(result, prompts, commands or {}, required, on_progress or _silent, stack)
        bench.open()
        bench.warm_up()
        bench.sweep()
        bench.rounds()
    return result


def _silent(_: str) -> None:
    pass


class _Bench:
    """The processes of one comparison, and the stages that it goes through."""

    def __init__(
        self,
        result: Peers,
        prompts: Sequence[Prompt],
        commands: Mapping[str, Sequence[str]],
        required: Sequence[str],
        say: Callable[[str], None],
        stack: ExitStack,
    ) -> None:
        self._result = result
        self._settings = result.settings
        self._prompts = prompts
        self._commands = commands
        self._required = required
        self._say = say
        self._stack = stack
        self._workers: dict[str, WorkerProcess] = {}
        self._start = monotonic()

    def _arms(self) -> list[Arm]:
        """The arms that can still run."""
        out = self._result.failed
        return [a for a in self._result.arms if a.family in self._workers and a.name not in out]

    def _fail(self, arm: Arm, error: WorkerError) -> None:
        """Take an arm out; with its process gone, all of its family."""
        if arm.name == BASELINE or (error.gone and arm.family == FAMILIES[0]):
            raise TreegraftError(f"{arm.name} failed: {error}") from None
        self._result.failed[arm.name] = str(error)
        self._say(f"{arm.name} cannot run: {error}")
        if error.gone:
            del self._workers[arm.family]
            for other in self._result.arms:
                if other.family == arm.family and other.name not in self._result.failed:
                    self._result.failed[other.name] = f"its process ended with {arm.name}: {error}"

    def open(self) -> None:
        """Start the processes side by side and let them load the models."""
        s, families = self._settings, [a.family for a in self._result.arms]
        setup = {
            "target": resolve(s.target),
            "drafter": None if s.drafter is None else resolve(s.drafter),
            "dtype": s.dtype,
            "device": s.device,
            "threads": s.threads,
            "longest": max(len(p.content) for p in self._prompts) + s.max_new_tokens,
        }
        opening: dict[str, WorkerProcess] = {}
        for family in dict.fromkeys(families):
            self._say(f"starting {family}")
            try:
                command = self._commands.get(family) or worker_command(family)
                worker = WorkerProcess(command, s.threads)
            except WorkerError as error:
                self._missing(family, error)
                continue
            self._stack.callback(worker.close)
            worker.send({"op": "open", "setup": setup})
            opening[family] = worker
        for family, worker in opening.items():
            try:
                answer = worker.receive(s.answer_seconds)
            except WorkerError as error:
                self._missing(family, error)
                continue
            self._workers[family] = worker
            self._result.versions[family] = answer.get("versions", {})
            if family == FAMILIES[0]:
                self._result.threads = answer.get("threads")

    def _missing(self, family: str, error: WorkerError) -> None:
        """A family that does not even open."""
        if family == FAMILIES[0]:
            raise TreegraftError(f"{family} cannot start: {error}") from None
        if error.missing == family and family not in self._required:
            self._result.absent[family] = (
                f"not installed for this interpreter; --peer-python {family}=PATH names one that "
                "has it"
            )
            return
        for arm in self._result.arms:
            if arm.family == family:
                self._result.failed[arm.name] = str(error)
        self._say(f"{family} cannot run: {error}")

    def warm_up(self) -> None:
        """A short text and the longest one with every arm: it builds and compiles what it needs."""
        n = min(_WARM_UP_TOKENS, self._settings.max_new_tokens)
        longest = max(self._prompts, key=lambda prompt: len(prompt.content))
        for arm in self._arms():
            self._say(f"warming up {arm.name}")
            start = monotonic()
            for prompt, n_tokens in (
                (self._prompts[0], n),
                (longest, self._settings.max_new_tokens),
            ):
                if arm in self._arms():
                    self._run(arm, arm.candidates[0], prompt, n_tokens)
            self._result.warm_up_seconds[arm.name] = monotonic() - start

    def sweep(self) -> None:
        """Choose the fastest candidate of every arm that has several, in turns."""
        s = self._settings
        chosen = self._result.chosen
        chosen |= {arm.name: arm.candidates[0] for arm in self._arms()}
        entries = [(a, c) for a in self._arms() if len(a.candidates) > 1 for c in a.candidates]
        prompts = self._prompts[: s.sweep_prompts]
        n = min(s.sweep_tokens, s.max_new_tokens)
        figures = {i: (0, 0.0) for i in range(len(entries))}
        for number, prompt in enumerate(prompts):
            self._say(f"sweep over settings of peers, prompt {number + 1} of {len(prompts)}")
            for i, (arm, candidate) in enumerate(entries):
                if arm not in self._arms():
                    continue
                if number == 0:  # first call of a setting
                    self._run(arm, candidate, prompt, min(4, n))
                answer = self._run(arm, candidate, prompt, n) if arm in self._arms() else None
                if answer is not None:
                    tokens, seconds = figures[i]
                    tokens, seconds = tokens + len(answer["tokens"]), seconds + answer["seconds"]
                    figures[i] = (tokens, seconds)
        for i, (arm, candidate) in enumerate(entries):
            tokens, seconds = figures[i]
            speed = tokens / max(seconds, 1e-9)
            rows = self._result.sweeps.setdefault(arm.name, [])
            rows.append({"options": dict(candidate), "tokens_per_second": speed})
        for name, rows in self._result.sweeps.items():
            chosen[name] = max(rows, key=lambda row: row["tokens_per_second"])["options"]

    def rounds(self) -> None:
        """One round per prompt, each with another arm first."""
        s, result = self._settings, self._result
        every = max(1, len(self._prompts) // max(s.profile_rounds, 1))
        for number, prompt in enumerate(self._prompts):
            late = s.max_seconds is not None and monotonic() - self._start > s.max_seconds
            if number and late:
                self._say(f"time was up: {number} of {len(self._prompts)} rounds were decoded")
                return
            arms = self._arms()
            first = number % len(arms)
            answers: dict[str, dict[str, Any]] = {}
            for arm in arms[first:] + arms[:first]:
                if arm in self._arms():
                    answer = self._run(arm, result.chosen[arm.name], prompt, s.max_new_tokens)
                    if answer is not None:
                        answers[arm.name] = answer
            expected = answers[BASELINE]["tokens"]
            for arm in arms:
                if arm.name in answers:
                    result.runs.append(
                        self._as_run(number, prompt, arm, answers[arm.name], expected)
                    )
            if s.profile_rounds and number % every == 0:
                self._profile(prompt)
            self._say(f"round {number + 1} of {len(self._prompts)}")

    def _as_run(
        self,
        number: int,
        prompt: Prompt,
        arm: Arm,
        answer: Mapping[str, Any],
        expected: Sequence[int],
    ) -> PeerRun:
        comparable = self._settings.temperature == 0.0 or arm.same_tokens
        tokens = tuple(answer["tokens"])
        difference = first_difference(expected, tokens) if comparable else None
        seconds, cpu = float(answer["seconds"]), answer.get("cpu_seconds")
        return PeerRun(number, prompt, arm.name, seconds, cpu, tokens, comparable, difference)

    def _run(
        self, arm: Arm, options: Mapping[str, Any], prompt: Prompt, n_tokens: int
    ) -> dict[str, Any] | None:
        """The answer, or None if the arm failed, which takes it out."""
        request = {
            "op": "run",
            "method": arm.method,
            "options": dict(options),
            "task": self._task(prompt, n_tokens),
        }
        try:
            answer = self._workers[arm.family].ask(request, self._settings.answer_seconds)
            if not answer.get("tokens") or not isinstance(answer.get("seconds"), int | float):
                raise WorkerError(f"answered a run with {sorted(answer)} and no new token")
        except WorkerError as error:
            self._fail(arm, error)
            return None
        return answer

    def _task(self, prompt: Prompt, n_tokens: int) -> dict[str, Any]:
        s = self._settings
        return {
            "ids": list(prompt.content),
            "max_new_tokens": n_tokens,
            "temperature": s.temperature,
            "seed": s.seed,
            "eos": list(s.eos),
        }

    def _profile(self, prompt: Prompt) -> None:
        """Take the steps of ``ours`` apart on this prompt, where it is among the arms."""
        arm = next((arm for arm in self._arms() if arm.name == OURS), None)
        if arm is None:
            return
        request = {
            "op": "profile",
            "options": dict(arm.candidates[0]),
            "task": self._task(prompt, self._settings.max_new_tokens),
        }
        try:
            answer = self._workers[arm.family].ask(request, self._settings.answer_seconds)
        except WorkerError as error:
            self._fail(arm, error)
            return
        self._result.profiles.append({k: v for k, v in answer.items() if k != "ok"})
