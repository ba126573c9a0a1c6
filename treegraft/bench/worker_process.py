"""A worker process, seen from the benchmark that started it: requests, answers, time limits."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import treegraft

__all__ = ["WorkerError", "WorkerProcess", "worker_command"]

# Finds this treegraft's worker modules from whatever interpreter, without putting the folder that
# it is installed in (and with it our own pins) on that interpreter's path.
_START = """
import importlib.util, os, sys
sys.path[:] = [*(p for p in sys.path if p not in ("", os.getcwd())), os.getcwd()]
spec = importlib.util.spec_from_file_location(
    "treegraft", sys.argv[1], submodule_search_locations=[os.path.dirname(sys.argv[1])])
package = importlib.util.module_from_spec(spec)
sys.modules["treegraft"] = package
spec.loader.exec_module(package)
from treegraft.bench.workers.serving import serve
serve(sys.argv[2])
"""


class WorkerError(Exception):
    """A worker failed; one line says how.

    Attributes
    ----------
    missing : top-level name of the module that its interpreter does not have, or None.
    gone : whether the process is no longer there to be asked.
    """

    def __init__(self, message: str, missing: str | None = None, gone: bool = False) -> None:
        super().__init__(message)
        self.missing = missing
        self.gone = gone


def worker_command(family: str, python: str | None = None) -> list[str]:
    """Command line of the worker for a module of ``treegraft.bench.workers``."""
    return [python or sys.executable, "-c", _START, str(treegraft.__file__), family]


class WorkerProcess:
    """A process that speaks the protocol of docs/bench.md; ended by ``close`` or a time limit.

    Parameters
    ----------
    command : what to run. threads : threads of OpenMP in the process; None leaves the environment.

    WorkerError if the command cannot be run.
    """

    def __init__(self, command: Sequence[str], threads: int | None = None) -> None:
        environment = dict(os.environ, TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1")
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        # Open as long as the process is; a pipe that nobody reads would stop it when full.
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=environment,
            )
        except OSError as error:
            self._stderr.close()
            raise WorkerError(
                f"{Path(command[0])} cannot be run: {error.strerror}", gone=True
            ) from None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def send(self, request: Mapping[str, Any]) -> None:
        """Hand over a request; its answer must be received before the next one."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it is gone, as the answer will say
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def receive(self, seconds: float) -> dict[str, Any]:
        """The answer; WorkerError if it is an error, or none comes within ``seconds``."""
        deadline = monotonic() + seconds
        try:
            line = self._lines.get(timeout=max(deadline - monotonic(), 0.0))
        except queue.Empty:
            self.close()
            raise WorkerError(f"no answer within {seconds:g} seconds", gone=True) from None
        if line is None:
            self._process.wait()
            code, last = self._process.returncode, self._last_words()
            self.close()
            raise WorkerError(f"ended with exit code {code}{last}", gone=True)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.close()
            raise WorkerError(f"answered {line.strip()[:80]!r}, which is no answer", gone=True)
        if not answer.get("ok"):
            raise WorkerError(str(answer.get("error", "no reason given")), answer.get("missing"))
        return answer

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """``send`` and ``receive``."""
        self.send(request)
        return self.receive(seconds)

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr.read().splitlines() if line.strip()]
        return f": {lines[-1][:300]}" if lines else ""

    def close(self) -> None:
        """End the process and wait for it. May be called again."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._reader.join(timeout=5.0)
        self._stderr.close()
