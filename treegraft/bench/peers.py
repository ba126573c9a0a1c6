"""TreeGraft beside what one would use instead: same weights, prompts and settings, taking turns.

Every library decodes in a process of its own (``workers``). In each *round* one prompt is decoded
once by every arm, in an order that turns from round to round, and ratios are taken round by round;
docs/bench.md has the definitions and the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Any

from treegraft.backends.sources import resolve
from treegraft.bench.comparison import first_difference
from treegraft.bench.lineup import FAMILIES, Arm
from treegraft.bench.peer_report import BASELINE, OURS, PeerRun, Peers, PeerSettings
from treegraft.bench.worker_process import WorkerError, WorkerProcess, worker_command
from treegraft.core.errors import ConfigError, PromptError, TreegraftError
from treegraft.prompts import Prompt

__all__ = ["compare_peers"]

_WARM_UP_TOKENS = 16


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
