"""A user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from treegraft.cli import app as cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "generate -p x",
            "a config (-c FILE) or a target (--target MODEL) is needed, found neither",
        ),
        ("generate --target m", "one of -p TEXT and --prompts FILE is needed, found neither"),
        (
            "generate --target m -p x --prompts y",
            "one of -p TEXT and --prompts FILE is needed, found both",
        ),
        (
            "generate --target m --drafter lm -p x",
            "--drafter lm needs a model: name the model itself (zoo:NAME, a local folder, or a "
            "hub id)",
        ),
        (
            "generate --target m --drafter head -p x",
            "--drafter head needs a folder: head:DIR",
        ),
        (
            "generate --target zoo:target --drafter head:no/where -p x",
            "head 'no/where': no head.json there; name a folder that holds head.json and "
            "head.safetensors",
        ),
        (
            "generate --target m --scheduler sometimes -p x",
            "--scheduler must be one of never, always, priority, cost_aware, online, "
            "budgeted, "
            "fixed:NAME,NAME,..., value:DIR or package.module:Class, found 'sometimes'",
        ),
        (
            "generate --target m --drafter ngram --budget auto -p x",
            "builder.budget 'auto' reckons with chances of acceptance: set calibration.kind to "
            "'online', found 'none'",
        ),
        (
            "generate --target m --drafter ngram --budget few -p x",
            "builder.budget: it must be a number of nodes, 0 to 1023, or 'auto', found 'few'",
        ),
        (
            "generate --target m --drafter ngram --scheduler fixed:small -p x",
            "scheduler.calls names drafter 'small', found drafters ['ngram']",
        ),
        (
            "generate --target m --dtype int8 -p x",
            "backend.dtype: Input should be 'auto', 'float32', 'float64', 'bfloat16' or "
            "'float16', found 'int8'",
        ),
        ("generate --target /no/where -p x", "model '/no/where': no such folder"),
        ("generate -c no.yaml -p x", "config 'no.yaml' cannot be read: No such file or directory"),
        ("generate --target m --ids -p 1,x", "token ids must be whole numbers from 0, found 'x'"),
        (
            "generate --target m --prompts no.txt",
            "prompts 'no.txt' cannot be read: No such file or directory",
        ),
        (
            "generate --target m -p x --limit 1",
            "--limit 1 needs --prompts FILE, found none",
        ),
        ("check --target m --limit 1", "--limit 1 needs --prompts FILE, found none"),
        (
            "generate --target m -p a\udcffb",
            "--prompt must be text in UTF-8, found '\\udcff' at character 1",
        ),
        ("compare a.yaml --prompts x", "config 'a.yaml' cannot be read: No such file or directory"),
        ("compare a.yaml b.yaml", "--prompts FILE (or zoo:prompts) is needed, found none"),
        ("compare a.yaml a.yaml --prompts x", "configs must be different files"),
        ("generte", "No such command 'generte'"),
        ("describe --nope", "No such option: --nope"),
        ("describe", "Missing option"),
        ("generate -c", "requires an argument"),
    ],
)
def test_mistakes_are_one_line(treegraft, arguments, message):
    result = treegraft(*arguments.split())
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


@pytest.mark.parametrize("arguments", [("--depth", "x"), ("--depth=x",)])
def test_a_value_of_the_wrong_type_is_shown(treegraft, arguments):
    result = treegraft("generate", *arguments)
    assert result.code == 2
    assert "'--depth'" in result.err
    assert "'x'" in result.err
    assert "integer" in result.err


def test_bounds_of_counts(treegraft):
    result = treegraft("compare", "a", "b", "--repeat", 0)
    assert result.code == 2
    assert "'--repeat'" in result.err
    assert "1" in result.err


def test_a_tree_option_does_not_reach_a_builder_of_ones_own(treegraft, write):
    file = write("c.yaml", "target: {model: m}\nbuilder: {kind: 'a.b:C'}\n")
    result = treegraft("generate", "-c", file, "--width", 3, "-p", "x")
    assert result.err == (
        "error: --width is an option of builder.kind 'layered' and 'best_first', found 'a.b:C'\n"
    )


def test_a_device_that_is_not_there_is_named(zoo, treegraft):
    result = treegraft("generate", "--target", zoo.target, "-p", "x", "--device", "cuda:99")
    assert result.code == 2
    assert "backend.device 'cuda:99' is not there: torch finds " in result.err
    assert result.err.count("\n") == 1


def test_a_chat_needs_a_template(zoo, treegraft):
    result = treegraft("generate", "--target", zoo.target, "-p", "x", "--chat")
    assert result.code == 2
    assert "--chat needs a tokenizer with a chat template, found none for" in result.err


def test_an_empty_prompt_is_refused(zoo, treegraft):
    result = treegraft("generate", "--target", zoo.target, "-p", "")
    assert result.code == 2
    assert result.err == "error: the prompt is empty; it needs at least one token\n"


@pytest.mark.parametrize("place", ["treegraft.cli.app.app", "treegraft.config.load_config"])
def test_an_interrupt_is_quiet(monkeypatch, treegraft, place):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    result = treegraft("describe", "-c", "c.yaml")
    assert (result.code, result.out, result.err) == (130, "", "")


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def broken(**_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.run([])


def test_help_and_version(treegraft):
    version = treegraft("--version")
    assert version.code == 0
    assert version.out.count(".") == 2
    for arguments in ((), ("--help",)):
        result = treegraft(*arguments)
        assert result.code == 0
        for name in ["demo", "generate", "compare", "check", "describe", "components", "schema"]:
            assert f"  {name} " in result.out


def test_help_loads_no_torch():
    code = (
        "import sys; from treegraft.cli import run; run(['--help']); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (io.StringIO("a\ud800b"), "stdin must be text in UTF-8, found '\\ud800' at character 1"),
        (io.TextIOWrapper(io.BytesIO(b"a\xffb"), encoding="utf-8"), "stdin is not text in UTF-8"),
    ],
    ids=["surrogate", "bytes"],
)
def test_input_that_is_no_text_is_one_line(treegraft, monkeypatch, given, found):
    monkeypatch.setattr("sys.stdin", given)
    result = treegraft("generate", "--target", "m", "-p", "-")
    assert (result.code, result.err) == (2, f"error: {found}\n")


def test_a_prompt_file_that_is_no_text_names_the_prompt(treegraft, write):
    file = write("p.jsonl", '{"prompt": "a"}\n{"prompt": "a\\ud800b", "id": "odd"}\n')
    result = treegraft("generate", "--target", "m", "--prompts", file)
    assert result.code == 2
    assert "line 2: prompt 'odd' must be text in UTF-8, found '\\ud800'" in result.err
    assert result.err.count("\n") == 1


def run_into(stdout, *arguments, stderr=subprocess.PIPE, **environment):
    """A process of its own whose output goes where it cannot be written."""
    return subprocess.run(
        [sys.executable, "-m", "treegraft", *arguments],
        stdout=stdout,
        stderr=stderr,
        env=os.environ | environment,
        check=False,
    )


@pytest.fixture
def closed_pipe():
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "generate --help",
        "--version",
        "components",
        "schema",
        "describe -c {config} --tree",
        "generate -c {config} -p one",
        "generate -c {config} -p one --stream",
        "generate -c {config} -p one --json",
        "check -c {config} --tokens 2 --prompts {prompts}",
        "compare {config} {plain} --prompts {prompts}",
    ],
)
def test_a_reader_that_leaves_early_is_141_everywhere(zoo, write, closed_pipe, arguments):
    target = f"target: {{model: {zoo.target}}}\nstop: {{max_new_tokens: 2}}\n"
    files = {
        "config": write("c.yaml", target + "drafters: [{kind: ngram}]\n"),
        "plain": write("plain.yaml", target),
        "prompts": write("p.txt", "one two"),
    }
    done = run_into(closed_pipe, *arguments.format(**files).split())
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_reader_of_both_streams_that_leaves_is_141(closed_pipe):
    """As in ``treegraft ... 2>&1 | head``."""
    assert run_into(closed_pipe, "components", stderr=closed_pipe).returncode == 141


@pytest.mark.parametrize("arguments", ["--help", "components", "schema"])
def test_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = run_into(full, arguments)
    assert done.returncode == 1
    assert done.stderr == b"error: stdout cannot be written: No space left on device\n"


def test_a_stdout_without_the_character_is_one_line():
    example = Path(__file__).parents[2] / "examples" / "plain.yaml"
    done = run_into(subprocess.PIPE, "describe", "-c", example, PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: stdout in ascii cannot hold '\\u251c'; set ")
    assert done.stderr.count(b"\n") == 1


def test_weights_that_are_not_there_are_named(monkeypatch, treegraft, tmp_path):
    from treegraft.zoo import catalog

    monkeypatch.setattr(catalog, "_HERE", tmp_path)
    result = treegraft("generate", "--target", "zoo:small", "-p", "x")
    assert result.code == 2
    assert result.err == (
        "error: model 'zoo:small': this copy of treegraft has no weights in "
        f"'{tmp_path / 'small'}'; install a wheel that brings them, or make them with recipes/zoo\n"
    )
