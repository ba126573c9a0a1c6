"""What runs inside the worker processes: the loop, what it may import, and real peers."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import treegraft
from treegraft.bench.worker_process import WorkerError, WorkerProcess, worker_command
from treegraft.bench.workers.serving import Family, serve

FOLDER = Path(treegraft.__file__).parent / "bench" / "workers"
TASK = {"ids": [1, 2], "max_new_tokens": 3, "temperature": 0.0, "seed": 0, "eos": []}
SETUP = {"target": "t", "drafter": None, "dtype": "float32", "device": "cpu"}
SETUP |= {"threads": None, "longest": 5}
OPEN = {"op": "open", "setup": SETUP}


class EchoFamily(Family):
    """Answers with the prompt."""

    def open(self, setup):
        return {"versions": {"echo": setup.target}}

    def prepare(self, method, options, task):
        if method != "echo":
            raise ValueError(f"unknown\nmethod {method!r}")
        return lambda: task.ids


@pytest.fixture
def answers(monkeypatch):
    module = ModuleType("treegraft.bench.workers.echo")
    module.FAMILY = EchoFamily
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def ask(*requests):
        written = io.StringIO()
        serve("echo", io.StringIO("".join(json.dumps(r) + "\n" for r in requests)), written)
        return [json.loads(line) for line in written.getvalue().splitlines()]

    return ask


def run(method="echo"):
    return {"op": "run", "method": method, "options": {}, "task": TASK}


def test_each_request_has_one_answer(answers):
    opened, ran = answers(OPEN, run())
    assert opened == {"ok": True, "versions": {"echo": "t"}}
    assert ran["tokens"] == [1, 2]
    assert ran["seconds"] >= 0.0


def test_an_error_is_an_answer_in_one_line_and_the_loop_goes_on(answers):
    early, _, wrong, ran = answers(run(), OPEN, run("other"), run())
    assert early["error"] == "RuntimeError: the first request must be open"
    assert wrong == {"ok": False, "error": "ValueError: unknown method 'other'", "missing": None}
    assert ran["ok"]


def test_only_our_own_family_has_a_profile(answers):
    _, answer = answers(OPEN, {"op": "profile", "options": {}, "task": TASK})
    assert answer["error"] == "NotImplementedError: EchoFamily has no profile"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_worker_imports_what_a_peers_interpreter_has(path):
    if path.stem == "treegraft":
        return
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    ours = {name for name in names if name.split(".")[0] == "treegraft"}
    assert ours <= {"treegraft.bench.workers.serving"}
    tops = {name.split(".")[0] for name in names} - {"treegraft"} - set(sys.stdlib_module_names)
    assert tops <= {"torch", "transformers", path.stem}


BARE = """
import sys
sys.argv[1:] = [{init!r}, "serving"]
sys.path[:] = [p for p in sys.path if "site-packages" not in p and not p.endswith({root!r})]
exec({code!r})
print("torch" in sys.modules, [p for p in sys.path if p == {root!r}], file=sys.stderr)
"""


def test_a_worker_starts_without_treegraft_on_the_path(tmp_path):
    """An interpreter without site-packages gets as far as the loop, whose input is empty."""
    _, _, code, init, _ = worker_command("serving")
    root = str(Path(init).parents[1])
    program = BARE.format(init=init, root=root, code=code)
    found = subprocess.run(
        [sys.executable, "-I", "-c", program],
        input="",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert found.stderr.split("\n")[0] == "False []"
    assert found.stdout == ""


def open_worker(family, target, drafter):
    worker = WorkerProcess(worker_command(family), threads=1)
    setup = SETUP | {"target": str(target), "drafter": drafter, "threads": 1, "longest": 40}
    try:
        worker.ask({"op": "open", "setup": setup}, 120.0)
    except WorkerError:
        worker.close()
        raise
    return worker


@pytest.mark.parametrize("package", ["economize", "flashspec"])
def test_a_package_that_is_not_installed_is_named_as_missing(package):
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(WorkerError) as caught:
        open_worker(package, "t", None)
    assert caught.value.missing == package


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "methods"),
    [
        ("transformers", ["generate", "compiled", "assisted", "lookup"]),
        ("economize", ["draft_model", "lookup", "hybrid"]),
        ("flashspec", ["draft_model", "lookup", "composite"]),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_real_peers_decode_the_zoo(family, methods, temperature):
    """Greedy texts of every method are the same; sampled ones have their length."""
    from treegraft.zoo import zoo_path

    if find_spec(family) is None:
        pytest.skip(f"{family} is not installed")
    worker = open_worker(family, zoo_path("target"), str(zoo_path("small")))
    options = {"lookup": {"prompt_lookup_num_tokens": 3}} if family == "transformers" else {}
    task = TASK | {"ids": list(range(40, 60)), "max_new_tokens": 12, "temperature": temperature}
    try:
        texts = [
            worker.ask(run(m) | {"options": options.get(m, {}), "task": task}, 300.0)["tokens"]
            for m in methods
        ]
    finally:
        worker.close()
    assert {len(text) for text in texts} == {12}
    if temperature == 0.0:
        assert all(text == texts[0] for text in texts)
