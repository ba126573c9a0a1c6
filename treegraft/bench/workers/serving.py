"""The loop of a worker process: JSON lines in, one JSON line out for each (docs/bench.md).

Nothing but answers goes to the real stdout: what a library prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any, TextIO

__all__ = ["Family", "Setup", "Task", "serve"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is opened with.

    Attributes
    ----------
    target, drafter : model folders or hub ids; ``drafter`` is None where there is none.
    dtype : name of a torch dtype. device : as in torch. threads : of torch; None leaves them.
    longest : tokens of the longest text to come, prompt and new tokens.
    """

    target: str
    drafter: str | None
    dtype: str
    device: str
    threads: int | None
    longest: int


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be decoded: prompt ids, and how.

    ``eos`` are the ids that end the text; temperature 0 is greedy.
    """

    ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    eos: list[int]


class Family(ABC):
    """The ways of decoding that one library offers."""

    @abstractmethod
    def open(self, setup: Setup) -> Mapping[str, Any]:
        """Load the models; what is returned goes into the answer (versions)."""

    @abstractmethod
    def prepare(self, method: str, options: Mapping[str, Any], task: Task) -> Callable[[], Any]:
        """A call that decodes ``task`` and returns the new ids; only that call is timed."""

    # Not abstract: only our own family can say it.
    def profile(self, options: Mapping[str, Any], task: Task) -> Mapping[str, Any]:
        """Where the seconds of each step went."""
        raise NotImplementedError(f"{type(self).__name__} has no profile")


def serve(family: str, requests: TextIO | None = None, answers: TextIO | None = None) -> None:
    """Answer requests until their end, with the ``Family`` of the module of this name."""
    if answers is None:
        answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    worker: Family | None = None
    for line in requests or sys.stdin:
        answer: dict[str, Any]
        try:
            request = json.loads(line)
            if request["op"] == "open":
                worker = importlib.import_module(f"treegraft.bench.workers.{family}").FAMILY()
                answer = dict(worker.open(Setup(**request["setup"])))
            else:
                if worker is None:
                    raise RuntimeError("the first request must be open")
                answer = _answer(worker, request)
            answer["ok"] = True
        except Exception as error:  # a peer may raise anything
            line = " ".join(f"{type(error).__name__}: {error}".split())
            answer = {"ok": False, "error": line[:500]}
            answer["missing"] = error.name if isinstance(error, ModuleNotFoundError) else None
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(worker: Family, request: Mapping[str, Any]) -> dict[str, Any]:
    task = Task(**request["task"])
    if request["op"] == "profile":
        return dict(worker.profile(request["options"], task))
    if request["op"] != "run":
        raise ValueError(f"op must be open, run or profile, found {request['op']!r}")
    call = worker.prepare(request["method"], request["options"], task)
    start, worked = perf_counter(), process_time()
    tokens = call()
    seconds, worked = perf_counter() - start, process_time() - worked
    new = [int(token) for token in tokens]
    return {"tokens": new, "seconds": seconds, "cpu_seconds": worked}
